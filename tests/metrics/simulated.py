"""A host, streams and what waits for what, simulated: recordings of training loops whose true step time is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from recordings import EMPTY

from advisor.columns.schema import ANNOTATION, KERNEL
from advisor.columns.table import ActivityRows, CallRows, RangeRows, Table

# An operation of a step: ("host", us) works, ("launch", stream, us) launches a kernel, ("sync", stream) and ("device",)
# wait for what was launched, ("wait", stream, other) lets a stream wait for an event of another one.
Operation = tuple[Any, ...]
LAUNCH_US, LATENCY_US, RETURN_US, ENTRY_US = 2.0, 5.0, 3.0, 1.0


@dataclass
class Loop:
    """Runs the operations of a step over and over; `calls`, `kernels` and `marks` record what a profiler would."""

    moment: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)
    events: dict[int, float] = field(default_factory=dict)
    calls: list[tuple[str, float, float, int]] = field(default_factory=list)  # name, begin, duration, correlation
    kernels: list[tuple[int, float, float, int]] = field(default_factory=list)  # stream, begin, duration, correlation
    marks: list[tuple[float, float]] = field(default_factory=list)

    def run(self, operations: Sequence[Operation], steps: int, shares: Sequence[float] | None = None) -> Loop:
        """Run some steps; `shares` scales the kernels of a step in the order of their launch."""
        for _ in range(steps):
            begin, kernel = self.moment, 0
            for kind, *what in operations:
                if kind == "host":
                    self.moment += what[0]
                elif kind == "launch":
                    self._launch(what[0], what[1] * (1.0 if shares is None else shares[kernel]))
                    kernel += 1
                elif kind == "wait":
                    self.events[what[0]] = max(self.events.get(what[0], 0.0), self.ends.get(what[1], 0.0))
                    self._call("cudaStreamWaitEvent", self.moment + ENTRY_US)
                else:
                    waited = [self.ends.get(what[0], 0.0)] if kind == "sync" else self.ends.values()
                    until = max([self.moment + ENTRY_US, *(end + RETURN_US for end in waited)])
                    self._call("cudaStreamSynchronize" if kind == "sync" else "cudaDeviceSynchronize", until)
            self.marks.append((begin, self.moment))
        return self

    def _launch(self, stream: int, duration: float) -> None:
        number = len(self.calls)
        ready = (self.moment + LATENCY_US, self.ends.get(stream, 0.0), self.events.pop(stream, 0.0))
        self.kernels.append((stream, max(ready), duration, number))
        self.ends[stream] = max(ready) + duration
        self._call("cudaLaunchKernel", self.moment + LAUNCH_US)

    def _call(self, name: str, until: float) -> None:
        self.calls.append((name, self.moment, until - self.moment, len(self.calls)))
        self.moment = until

    @property
    def reached(self) -> float:
        """When the host and all streams have ended what they were given."""
        return max(self.moment, *self.ends.values()) if self.ends else self.moment

    def table(self) -> Table:
        """The recording."""
        names = ("cudaLaunchKernel", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaStreamWaitEvent", "kernel")
        names += tuple(f"ProfilerStep#{number}" for number in range(len(self.marks)))
        calls = sorted(self.calls, key=lambda item: (item[1], item[3]))
        kernels = sorted(self.kernels, key=lambda item: (item[1], item[0], item[3]))
        filler = {name: np.full(len(kernels), -1) for name in ActivityRows.__dataclass_fields__}
        filler |= {
            "name": np.full(len(kernels), 4),
            "kind": np.full(len(kernels), KERNEL),
            "device": filler["device"] + 1,
        }
        columns = np.array(kernels, dtype=np.float64).reshape(-1, 4)
        filler |= {"stream": columns[:, 0].astype(np.int64), "start": columns[:, 1], "duration": columns[:, 2]}
        filler |= {"correlation": columns[:, 3].astype(np.int64)}
        marks = np.array(self.marks).reshape(-1, 2)
        return dataclasses.replace(
            EMPTY,
            calls=CallRows(
                name=np.array([names.index(item[0]) for item in calls], dtype=np.int64),
                start=np.array([item[1] for item in calls]),
                duration=np.array([item[2] for item in calls]),
                thread=np.zeros(len(calls), dtype=np.int64),
                correlation=np.array([item[3] for item in calls], dtype=np.int64),
            ),
            activities=ActivityRows(**filler),
            ranges=RangeRows(
                name=np.arange(len(marks)) + 5,
                start=marks[:, 0],
                duration=marks[:, 1] - marks[:, 0],
                thread=np.zeros(len(marks), dtype=np.int64),
                kind=np.full(len(marks), ANNOTATION),
            ),
            names=names,
            threads=(("1", "1"),),
        )


def step_time(operations: Sequence[Operation], shares: Sequence[float] | None = None) -> float:
    """The time of a step in the long run, in microseconds."""
    loop = Loop().run(operations, 200, shares)
    begin = loop.reached
    return (loop.run(operations, 200, shares).reached - begin) / 200
