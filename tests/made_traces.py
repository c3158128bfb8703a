"""Recordings of made-up training loops, whose figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Event = dict[str, Any]

H200 = {  # as torch 2.11 records it
    "id": 0,
    "name": "NVIDIA H200",
    "totalGlobalMem": 150109880320,
    "computeMajor": 9,
    "computeMinor": 0,
    "warpSize": 32,
    "numSms": 132,
}
UNKNOWN = {**H200, "name": "Experimental GPU", "numSms": 100}
BF16, FLOAT, LONG = "c10::BFloat16", "float", "long int"
GEMM = "nvjet_sm90_tst_128x128_64x4_1x2_h_bz_coopA_TNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAUNCH_US, ENTRY_US, LATENCY_US = 2.0, 1.0, 3.0


class Loop:
    """One host thread that calls operators and streams that run what it launches, in the order of the launches.

    An operator takes a microsecond around its launches of two each; a kernel begins three microseconds after its launch
    returned or when its stream is free.
    """

    def __init__(self, tid: int = 1) -> None:
        self.events: list[Event] = []
        self.moment = 100.0
        self._tid = tid
        self._ends: dict[tuple[int, int], float] = {}
        self._correlation = 0
        self._step = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step that the profiler marks."""
        begin = self.moment
        yield
        self._add("user_annotation", f"ProfilerStep#{self._step}", begin, self.moment - begin)
        self._step += 1

    @contextmanager
    def operator(
        self,
        name: str,
        dims: Sequence[Any] | None = None,
        types: Sequence[str] | None = None,
        concrete: Sequence[str] | None = None,
        **args: Any,
    ) -> Iterator[None]:
        """An operator call around whatever happens inside; `args` become arguments, `sequence` the autograd number."""
        begin = self.moment
        self.moment += ENTRY_US
        yield
        inputs = {"Input Dims": dims, "Input type": types, "Concrete Inputs": concrete}
        recorded = {key: list(value) for key, value in inputs.items() if value is not None}
        if dims is not None and concrete is None:
            recorded["Concrete Inputs"] = [""] * len(dims)
        names = {"sequence": "Sequence number", "forward_thread": "Fwd thread id"}
        recorded |= {names[key]: value for key, value in args.items()}
        self._add("cpu_op", name, begin, self.moment - begin, **recorded)

    def kernel(self, name: str, us: float, stream: int = 7, category: str = "kernel", **args: Any) -> None:
        """Launch something; `args` are those of the launch, `device` is 0 unless given."""
        self._correlation += 1
        begin = self.moment
        self.moment += LAUNCH_US
        self._add("cuda_runtime", "cudaLaunchKernel", begin, LAUNCH_US, correlation=self._correlation)
        self._run(name, us, self.moment + LATENCY_US, stream, category, correlation=self._correlation, **args)

    def spilled(self, name: str, us: float, stream: int = 7, correlation: int = 900_000) -> None:
        """A kernel that was launched before the recording."""
        self._run(name, us, 50.0, stream, "kernel", correlation=correlation)

    def call(self, name: str, dims: Sequence[Any], types: Sequence[str], kernel: str, us: float, **more: Any) -> None:
        """An operator that launches one kernel."""
        with self.operator(name, dims, types, more.pop("concrete", None)):
            self.kernel(kernel, us, **more)

    def mm(self, m: int, k: int, n: int, us: float, kernel: str = GEMM, dtype: str = BF16, **more: Any) -> None:
        """A matrix product [m, k] x [k, n]."""
        self.call("aten::mm", [[m, k], [k, n]], [dtype, dtype], kernel, us, **more)

    def add(self, size: int, us: float, dtype: str = FLOAT, **more: Any) -> None:
        """A sum of two vectors."""
        given = {"concrete": ["", "", "1"], **more}
        self.call("aten::add", [[size], [size], []], [dtype, dtype, "Scalar"], POINTWISE, us, **given)

    def _run(self, name: str, us: float, ready: float, stream: int, category: str, **args: Any) -> None:
        device = args.pop("device", 0)
        start = max(ready, self._ends.get((device, stream), 0.0))
        self._ends[device, stream] = start + us
        given = {"device": device, "stream": stream, **{key.replace("_", " "): value for key, value in args.items()}}
        self._add(category, name, start, us, lane=(device, stream), **given)

    def _add(
        self, category: str, name: str, ts: float, dur: float, lane: tuple[int, int] | None = None, **args: Any
    ) -> None:
        pid, tid = lane or (77, self._tid)
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def document(self, device: Event | None = H200, **more: Any) -> dict[str, Any]:
        """The whole trace."""
        head = {"schemaVersion": 1, "deviceProperties": [device] if device is not None else [], **more}
        return {**head, "traceEvents": self.events}

    def save(self, path: Path, device: Event | None = H200, **more: Any) -> Path:
        """Write the trace."""
        path.write_text(json.dumps(self.document(device, **more)), encoding="utf-8")
        return path


def training(steps: int = 3, factor: float = 1.0) -> Loop:
    """Steps of 800 us: two products, a sum, and a product of the backward pass, back to back on the device."""
    loop = Loop()
    for _ in range(steps):
        with loop.step():
            loop.mm(4096, 4096, 4096, 250.0 * factor)
            loop.mm(4096, 4096, 1024, 150.0 * factor)
            loop.add(1 << 24, 100.0 * factor)
            loop.mm(4096, 1024, 4096, 300.0 * factor)
    return loop


# ------------------------------------------------------------------------------------------------------ made at random

_SIZES = st.sampled_from([1, 8, 64, 256, 2048])
_TIMES = st.one_of(st.integers(0, 400).map(float), st.floats(0.0, 50.0))
_STREAMS = st.sampled_from([7, 7, 7, 20, 21])


@st.composite
def operations(draw: st.DrawFn) -> tuple[Any, ...]:
    """One thing that a step does."""
    kind = draw(st.sampled_from(["mm", "add", "linear", "custom", "reduce", "copy", "bare", "host", "backward"]))
    return kind, draw(_SIZES), draw(_SIZES), draw(_TIMES), draw(_STREAMS), draw(st.sampled_from([BF16, FLOAT]))


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """A training loop of a few steps, whole or partly marked, on one to three streams."""
    loop = Loop()
    if draw(st.booleans()):
        loop.spilled("left over", draw(_TIMES))
    step, count, marked = draw(st.lists(operations(), max_size=6)), draw(st.integers(1, 3)), draw(st.booleans())
    for _ in range(count):
        if marked:
            with loop.step():
                for operation in step:
                    perform(loop, *operation)
        else:
            for operation in step:
                perform(loop, *operation)
    return loop


def perform(loop: Loop, kind: str, m: int, n: int, us: float, stream: int, dtype: str) -> None:
    """Add one operation to a loop."""
    launched = {"grid": [m, 1, 1], "block": [128, 1, 1], "registers_per_thread": 32, "shared_memory": 0}
    if kind == "mm":
        loop.mm(m, 64, n, us, dtype=dtype, stream=stream, **launched)
    elif kind == "add":
        loop.add(m * n, us, dtype=dtype, stream=stream, **launched)
    elif kind == "linear":
        with (
            loop.operator("aten::linear", [[m, 64], [n, 64], []], [dtype, dtype, ""]),
            loop.operator("aten::mm", [[m, 64], [64, n]], [dtype, dtype]),
        ):
            loop.kernel(GEMM, us, stream, **launched)
            loop.kernel("reduce_splits", us / 2, stream)
    elif kind == "custom":
        loop.call("mine::work", [[m]], [dtype], "my_kernel", us, stream=stream)
    elif kind == "reduce":
        loop.kernel(ALL_REDUCE, us, 30)
    elif kind == "copy":
        loop.kernel("Memcpy DtoD (Device -> Device)", us, stream, "gpu_memcpy", bytes=m * n)
    elif kind == "bare":
        loop.kernel("launched by nobody", us, stream)
    elif kind == "backward":
        with loop.operator("MmBackward0", sequence=3, forward_thread=1):
            loop.mm(m, n, 64, us, dtype=dtype, stream=stream)
    else:
        loop.moment += us
