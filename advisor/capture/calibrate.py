"""Inside a child: measure what this device reaches, a large matrix product per dtype and a large copy.

(`python -m advisor.capture.calibrate` prints the figures of the first visible device as JSON.)
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from advisor import clock

MATRIX = 8192  # rows and columns on a GPU: large enough that the launch and the last wave do not show


def measure_rates(*, every_dtype: bool = False) -> dict[str, Any]:
    """Measured ceilings of this device: matmul FLOP/s per dtype and copy bytes/s (read plus written).

    float32 products run under the script's own precision setting. With `every_dtype` a GPU is asked for float16,
    tfloat32 and plain float32, too. The best of several repetitions counts.
    """
    cuda = clock.on_cuda()
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.empty_cache()
    size, repeats = (MATRIX, 10) if cuda else (1024, 5)
    rates: dict[str, float] = {}
    for name, dtype, precision in _dtypes(cuda, every_dtype):
        with _precision(precision):
            left = torch.randn(size, size, device=device, dtype=dtype)
            seconds = _best_seconds(lambda left=left: left @ left, repeats)
        rates[name] = 2 * size**3 / seconds
    source = torch.randn((1 << 30) // 4 if cuda else (1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), repeats)
    return {"measured_flops": rates, "measured_bandwidth": 2 * source.numel() * 4 / seconds}


def _dtypes(cuda: bool, every: bool) -> list[tuple[str, torch.dtype, str | None]]:
    if not cuda:
        return [("float32", torch.float32, None)]
    if not every:
        return [("bfloat16", torch.bfloat16, None), ("float32", torch.float32, None)]
    found: list[tuple[str, torch.dtype, str | None]] = [("float16", torch.float16, None)]
    if torch.cuda.get_device_capability()[0] >= 8 or torch.version.hip:
        found += [("bfloat16", torch.bfloat16, None), ("tfloat32", torch.float32, "high")]
    return [*found, ("float32", torch.float32, "highest")]


@contextmanager
def _precision(wanted: str | None) -> Iterator[None]:
    before = clock.matmul_precision()
    if wanted is not None:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _best_seconds(work: Any, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        clock.synchronize()
        begin = time.perf_counter()
        work()
        clock.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def describe() -> dict[str, Any]:
    """The device, the software and the measured figures."""
    if torch.cuda.is_available():
        torch.cuda.init()
    if not clock.on_cuda():
        return {"device": None, "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "sm_count": properties.multi_processor_count,
        "torch": torch.__version__,
        **measure_rates(every_dtype=True),
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
