"""What reading the loss, and reducing the gradients, in every micro-step of samples/accum_sync costs, as JSON.

`python tests/gpu/accumulation.py [--seconds 40] -- [flags of the sample]` in one process, or under
`torchrun --nproc-per-node 2`. The same model trains in short blocks: as found; with the loss added up on the device
("deferred"); and, of several processes, with `no_sync` around all micro-steps but the last ("no_sync"). A round runs
every variant once, in an order that alternates; the ratios are of blocks of one round, with an interval of 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "samples" / "accum_sync"))
import train  # the sample

from advisor.verify.timing import hodges_lehmann, signed_rank_interval

STEPS = 3  # optimizer steps of a block


class Loop:
    """The loop of the sample, one optimizer step at a time."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, device
        self.model = DistributedDataParallel(train.GPT(args).to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.generator = torch.Generator(device).manual_seed(args.seed + dist.get_rank())
        self.running: Any = 0.0

    def step(self, variant: str) -> None:
        args = self.args
        for number in range(args.accumulate):
            shape = (args.micro_batch, args.block_size + 1)
            tokens = torch.randint(args.vocab, shape, device=self.device, generator=self.generator)
            last = number == args.accumulate - 1
            hold = self.model.no_sync() if variant == "no_sync" and not last else contextlib.nullcontext()
            with hold:
                with torch.autocast(self.device.type, dtype=torch.bfloat16):
                    logits = self.model(tokens[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
                loss.backward()
            self.running += loss.detach().double() if variant == "deferred" else loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def block(self, variant: str) -> float:
        """Seconds of one optimizer step; the sum of the losses is read once at the end of the block."""
        self.running = 0.0
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.step(variant)
        float(self.running)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = [flag for flag in rest if flag != "--"]
    args = train.parse_args()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29517"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    several = dist.get_world_size() > 1
    variants = ["as found", "deferred", *(["no_sync"] if several else [])]
    loop = Loop(args, device)
    for variant in variants:
        loop.block(variant)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    end = time.monotonic() + own.seconds
    go = torch.ones(1, device=device)
    while go.item() > 0:
        for variant in variants if len(times["as found"]) % 2 else variants[::-1]:
            times[variant].append(loop.block(variant))
        go.fill_(float(time.monotonic() < end or len(times["as found"]) < 8))
        dist.all_reduce(go, dist.ReduceOp.MIN)  # all processes run the same rounds
    if dist.get_rank() == 0:
        print(json.dumps({"processes": dist.get_world_size(), "device": torch.cuda.get_device_name(device),
                          "torch": torch.__version__, "steps_per_block": STEPS, **table(times)}, indent=1))  # fmt: skip
    dist.destroy_process_group()


def table(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the blocks, and of each variant the ratio as found / variant with its interval."""
    rows = {}
    for variant, seconds in times.items():
        rows[variant] = {"step_ms": round(statistics.median(seconds) * 1e3, 3), "blocks": len(seconds)}
        if variant != "as found":
            d = [math.log(new / old) for old, new in zip(times["as found"], seconds, strict=True)]
            low, high, confidence = signed_rank_interval(d)
            rows[variant] |= {"ratio": round(math.exp(-hodges_lehmann(d)), 4), "low": round(math.exp(-high), 4),
                              "high": round(math.exp(-low), 4), "confidence": round(confidence, 3)}  # fmt: skip
    return {"variants": rows}


if __name__ == "__main__":
    main()
