"""Train the GPT of train.py as a whole under torch.compile, in bfloat16, with fused AdamW.

`python train_compiled.py --preset h200` takes the sizes of a large GPU; the flags are those of train.py.
"""

import torch
from torch.utils.data import DataLoader
from train import GPT, TokenDataset, cycle, load_tokens, parse_args


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    dataset = TokenDataset(load_tokens(args.vocab, args.seed), args.block_size)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    device = torch.device(args.device)
    with device:  # parameters are created where they are used
        model = GPT(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    model = torch.compile(model)
    data = cycle(loader)
    for step in range(1, args.steps + 1):
        x, y = next(data)
        x, y = x.to(device), y.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0:
            print(f"step {step:5d} | loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
