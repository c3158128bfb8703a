"""A vocabulary-sized loss written out by hand, for `advisor optimize tests/gpu/manual_loss.py` on a GPU."""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width, vocab):
        super().__init__()
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, x, targets):
        logits = self.out(x)
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        return -log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).mean()


def main():
    gpu = torch.cuda.is_available()
    rows, width, vocab = (8192, 2048, 50304) if gpu else (256, 64, 1024)
    device = torch.device("cuda" if gpu else "cpu")
    torch.manual_seed(0)
    model = Head(width, vocab).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(4000):
        x = torch.randn(rows, width, device=device)
        targets = torch.randint(0, vocab, (rows,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = model(x, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
