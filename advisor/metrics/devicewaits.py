"""What released each activity of one step: the work before it on its stream, its launch, or an event of another stream.

Which event `cudaStreamWaitEvent` names, a trace does not say: the latest work that the other streams had been given
before the call is taken, as far as it had ended in time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.columns.table import Floats, Ints, Table
from advisor.metrics.hosttime import matching
from advisor.metrics.hostwaits import Host
from advisor.metrics.stepwork import Launched, Window, Work

STREAM_WAIT = re.compile(r"^(cuda|hip|cu)StreamWaitEvent")

STREAM, LAUNCH, EVENT, NOTHING = 0, 1, 2, 3  # what released an activity; NOTHING that is recorded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """What each activity of a step waited for, with delays in microseconds from which the recorded starts come out.

    `released` tells what decided. `gap` follows the previous activity of the stream (or the work before the step),
    `launch_delay` the moment `launched`; `moment` is the place of the last moment of the launching thread before that,
    -1 where no launch is known. `events` are (producer, consumer, delay) over streams; producers may be places of work
    before the step.
    """

    released: Ints
    gap: Floats
    launch_delay: Floats
    moment: Ints
    events: tuple[tuple[int, int, float], ...]


def waits_of(table: Table, work: Work, host: Host, window: Window) -> Waits:
    """What released each activity, with delays that reproduce the recorded times.

    That is what was ready last: the previous activity on its stream, its launch, or an event of another stream.
    Readiness allows for the usual delays of the step, the median from a launch to the start on an idle stream and the
    median between activities that queue. What is left of the distance stays with what released the activity.
    """
    first = np.append(True, work.stream[1:] != work.stream[:-1])[: len(work)]
    before = np.where(first, work.earlier[work.stream], np.roll(work.ends, 1))
    events = [
        (producer, consumer, float(work.begin[consumer]) - work.end(producer))
        for producer, consumer in _events(table, work, window)
    ]
    launch, gap = _usual_delays(work, before, [consumer for _, consumer, _ in events])
    after_stream, after_launch = work.begin - before, work.begin - work.launched
    ready = np.full((3, len(work)), -np.inf)
    ready[STREAM] = np.nan_to_num(before + np.fmin(after_stream, gap), nan=-np.inf)
    ready[LAUNCH] = np.nan_to_num(work.launched + np.fmin(after_launch, launch), nan=-np.inf)
    nearest: dict[int, float] = {}
    for _, consumer, distance in events:
        nearest[consumer] = min(distance, nearest.get(consumer, np.inf))
        ready[EVENT, consumer] = work.begin[consumer] - nearest[consumer] + min(gap, nearest[consumer])
    released = np.argmax(ready, axis=0)
    released[np.isinf(ready.max(axis=0))] = NOTHING
    return Waits(
        released=released,
        gap=np.where(released == STREAM, after_stream, np.fmin(after_stream, gap)),
        launch_delay=np.where(released == LAUNCH, after_launch, np.fmin(after_launch, launch)),
        moment=_moments_before(work, host),
        events=tuple(
            (producer, consumer, distance)
            if released[consumer] == EVENT and distance == nearest[consumer]
            else (producer, consumer, min(gap, distance))
            for producer, consumer, distance in events
        ),
    )


def _usual_delays(work: Work, before: Floats, consumers: Sequence[int]) -> tuple[float, float]:
    """Median microseconds from a launch to the start on an idle stream, and between activities that queue.

    What may have waited for an event (`consumers`) tells neither.
    """
    free = np.ones(len(work), dtype=bool)
    free[list(consumers)] = False
    known = ~np.isnan(work.launched)
    idle = known & free & ~(work.launched < before)
    after = work.begin - work.launched
    launch = float(np.median(after[idle])) if idle.any() else float(after[known].min()) if known.any() else 0.0
    queued = ~np.isnan(before) & free & ~(work.launched + launch >= before)
    gaps = (work.begin - before)[queued]
    return launch, max(0.0, float(np.median(gaps))) if len(gaps) else 0.0


def _events(table: Table, work: Work, window: Window) -> list[tuple[int, int]]:
    """Pairs of activities of different streams that a call for a stream to wait stands between: producer, consumer.

    The consumer is what the calling thread launched next, or what another thread launched before that (at the end of a
    backward pass the main thread goes on). The producers are what the other streams had been given before the call, as
    far as it had ended when the consumer began.
    """
    calls = table.calls
    inside = (calls.start >= window[0]) & (calls.start < window[1])
    chosen = np.flatnonzero(inside & matching(table, STREAM_WAIT, calls.name))
    order = np.flatnonzero(~np.isnan(work.launched))
    order = order[np.argsort(work.launched[order], kind="stable")]
    launched = Launched(work)
    found: set[tuple[int, int]] = set()
    for thread in np.unique(calls.thread[chosen]).tolist():
        moments = calls.start[chosen[calls.thread[chosen] == thread]]
        for launches in (order[work.thread[order] == thread], order):
            following = np.searchsorted(work.launched[launches], moments, side="left")
            for moment, place in zip(moments.tolist(), following.tolist(), strict=True):
                if place < len(launches):
                    consumer = int(launches[place])
                    found.update((producer, consumer) for producer in _producers(work, launched, consumer, moment))
    return sorted(found)


def _producers(work: Work, launched: Launched, consumer: int, moment: float) -> list[int]:
    begin = float(work.begin[consumer])
    others = [stream for stream in range(len(work.earlier)) if stream != work.stream[consumer]]
    found = [launched.last(stream, moment, begin) for stream in others]
    return [place for place in found if place is not None and (place < 0 or work.begin[place] < begin)]


def _moments_before(work: Work, host: Host) -> Ints:
    """The place of the last moment of the launching thread before each launch, -1 where no launch is known."""
    found = np.full(len(work), -1, dtype=np.int64)
    for place in np.flatnonzero(~np.isnan(work.launched)).tolist():
        found[place] = host.last(int(work.thread[place]), float(work.launched[place]))
    return found
