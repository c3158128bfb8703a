"""Trains the sample's GPT in the states of the design's table and records what the device's counters say of each.

python record_states.py OUT.json      (from a folder where `advisor` is installed; about three minutes on an H200)
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "samples" / "nano_gpt"))
import train as sample

from advisor.capture.counters import Sampler, summarise
from advisor.capture.replaying import RecordedCall, replay

PEAK = 989.4e12  # dense bfloat16, NVIDIA H200 datasheet


class Fused(sample.CausalSelfAttention):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (
            t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.c_attn(x).split(self.width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


STATES = {
    "naive": {},
    "sdpa": {"CausalSelfAttention": Fused},
    "sdpa, norm, gelu": {
        "CausalSelfAttention": Fused,
        "LayerNorm": nn.LayerNorm,
        "NewGELU": lambda: nn.GELU(approximate="tanh"),
    },
}
STATES["padded vocabulary"] = {**STATES["sdpa, norm, gelu"], "vocab": 50304}
STATES["compiled, batch 16"] = {**STATES["padded vocabulary"], "batch_size": 16, "compile": True}


def measure(changes, seconds=8.0):
    """Step time and counters of one state."""
    saved = {name: getattr(sample, name) for name in changes if hasattr(sample, name)}
    for name in saved:
        setattr(sample, name, changes[name])
    sizes = {**sample.PRESETS["h200"], **{k: v for k, v in changes.items() if k in ("vocab", "batch_size")}}
    cfg = type("Config", (), {**sizes, "dropout": 0.0})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = sample.GPT(cfg)
    for name, value in saved.items():
        setattr(sample, name, value)
    optimizer = sample.configure_optimizer(model, cfg.lr)
    forward = torch.compile(model) if changes.get("compile") else model
    x = torch.randint(0, 50257, (cfg.batch_size, cfg.block_size), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss = forward(x, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    sampler = Sampler(0)
    sampler.start()
    begin, count = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        step()
        count += 1
        if count % 4 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    end = time.monotonic()
    recording = sampler.stop()
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() >= 2 and "wpe" not in n)
    tokens = x.numel()
    flops = tokens * (6 * matrices + 12 * cfg.layers * cfg.width * cfg.block_size)
    per_step = (end - begin) / count
    return {
        "step_ms": per_step * 1e3,
        "tokens": tokens,
        "mfu": flops / per_step / PEAK,
        "counters": {metric.name: metric.value for metric in summarise(recording.samples, begin, end)},
        "missing": dict(recording.missing),
    }


def operators():
    """Calls of the same model, replayed alone."""
    scores, heads = (8, 16, 2048, 2048), (8, 16, 2048, 128)
    bf16 = "bfloat16"

    def head(vocab):
        sizes = ((16384, 2048), (2048, vocab))
        return RecordedCall(name="aten::mm", shapes=sizes, dtypes=(bf16, bf16), strides=((2048, 1), (1, 2048)))

    product = RecordedCall(
        name="aten::bmm", shapes=((128, 2048, 128), (128, 128, 2048)), dtypes=(bf16, bf16), strides=()
    )
    masked = RecordedCall(
        name="aten::masked_fill",
        shapes=(scores, (1, 1, 2048, 2048), ()),
        dtypes=(bf16, "bool", ""),
        strides=(),
        concrete=("", "", "-inf"),
    )
    softmax = RecordedCall(
        name="aten::_softmax", shapes=(scores, (), ()), dtypes=("float32", "", ""), concrete=("", "-1", "False")
    )
    flash = RecordedCall(
        name="aten::_scaled_dot_product_flash_attention",
        shapes=(heads, heads, heads, (), (), ()),
        dtypes=(bf16, bf16, bf16, "", "", ""),
        concrete=("", "", "", "0.", "True", "False"),
    )
    small = RecordedCall(name="aten::add", shapes=((256,), (256,), ()), dtypes=(bf16, bf16, ""), concrete=("", "", "1"))
    calls = [head(50257), head(50304), product, masked, softmax, flash, small]
    return [
        {
            "name": item.call.name,
            "shapes": item.call.shapes,
            "time_us": item.time_us,
            "reason": item.reason,
            "counters": {metric.name: metric.value for metric in item.counters},
        }
        for item in replay(calls)
    ]


def main():
    out = Path(sys.argv[1])
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "operators": operators(),
        "states": {},
    }
    out.write_text(json.dumps(found, indent=1))
    for name, changes in STATES.items():
        found["states"][name] = measure(changes)
        out.write_text(json.dumps(found, indent=1))
        torch.cuda.empty_cache()
        print(name, found["states"][name], flush=True)


if __name__ == "__main__":
    main()
