"""Train a small Llama of Hugging Face transformers from scratch, with the attention its tutorials start from.

`python train.py` trains a tiny model on made-up tokens on a CPU; `--preset h200` a 0.7 B model in bfloat16 on a GPU.
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

PRESETS = {
    "h200": dict(
        layers=12, width=2048, heads=16, inner=5632, block_size=2048, vocab=32000, batch_size=8, dtype="bfloat16"
    )
}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a named set of sizes; other flags still win")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--inner", type=int, default=344, help="width of the feed-forward layers")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    preset = parser.parse_known_args()[0].preset
    if preset:
        parser.set_defaults(**PRESETS[preset])
    return parser.parse_args()


def build(args):
    config = LlamaConfig(
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=args.inner,
        max_position_embeddings=args.block_size,
        vocab_size=args.vocab,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    with device:  # parameters are created where they are used
        model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(args.steps):
        tokens = torch.randint(0, args.vocab, (args.batch_size, args.block_size + 1), generator=generator).to(device)
        with autocast:
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
