"""Schedule and statistics of an interleaved A/B measurement: quads A B B A of blocks, one interval, one judgement.

The unit is the quad. Its two arms have the same centre in time, so a drift of the machine that is linear over a quad
cancels, and so does a cost of taking turns that falls on the first or second block of a turn. Everything is computed
on natural logarithms of block means, so that a ratio and its inverse are treated alike. A block's figure is its *mean*
step time: the median would hide a candidate whose every tenth step is slow, and the mean is what the user waits for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from advisor.model import Outcome, Timing

MIN_QUADS = 8
MAX_QUADS = 24
FLOOR = 0.01
CONFIDENCE = 0.95
BLOCK_STEPS = 50
PROBE_STEPS = 3
EXACT_UP_TO = 40  # quads with the exact null distribution; the normal approximation above

Floats = npt.NDArray[np.float64]
Deadline = Callable[[], float] | float | None


@dataclass(frozen=True, slots=True)
class Block:
    """What one block of steps cost: device-side times of its measured steps, and its time by the wall clock.

    `wall_us` covers the same steps up to a synchronisation with the device. Raises ValueError for a block without
    steps, or with times that are negative, not finite, or zero together.
    """

    step_us: tuple[float, ...]
    wall_us: float
    peak_bytes: int | None = None

    def __post_init__(self) -> None:
        times = self.step_us
        if not times or not all(math.isfinite(t) and t >= 0 for t in times) or sum(times) <= 0:
            raise ValueError(f"a block needs finite, positive step times, got {times[:5]!r} of {len(times)}")

    @property
    def mean_us(self) -> float:
        """Mean step time in microseconds."""
        return sum(self.step_us) / len(self.step_us)


class Arm(Protocol):
    """One of the two programs: loaded, warm, and waiting while the other one runs."""

    def run_block(self, steps: int) -> Block:
        """Run `steps` measured steps and wait for the device."""
        ...


# ----------------------------------------------------------------------------------------------------------- statistics


def quad_log_ratios(base_blocks: Sequence[float], cand_blocks: Sequence[float]) -> Floats:
    """log(new / old) of every quad: d = ((b1 + b2) - (a1 + a2)) / 2 on the logarithms of block times.

    The sequences hold two times per quad in the order they were run, a1 a2 a1' a2' ... and b1 b2 b1' b2' ...; quads ran
    as A B B A. Raises ValueError for unequal or odd lengths and for times that are not positive and finite.
    """
    base, cand = _logs(base_blocks), _logs(cand_blocks)
    if base.shape != cand.shape:
        raise ValueError(f"both arms need the same number of blocks, got {base.size} and {cand.size}")
    return np.asarray(cand.reshape(-1, 2).mean(axis=1) - base.reshape(-1, 2).mean(axis=1), dtype=np.float64)


def control_log_ratios(base_blocks: Sequence[float], cand_blocks: Sequence[float]) -> Floats:
    """The A/A control: log ratios of an arm against itself, from the blocks that were run anyway.

    Two consecutive quads give a1 a2 a1' a2' of one program, which is a quad A B B A again:
    ((a2 + a1') - (a1 + a2')) / 2 has the same centre on both sides, cancels a linear drift, and cancels what a turn's
    first or second block costs more, as the real quads do. The candidate's blocks b1 b2 b1' b2' give a second value, so
    n quads give n (n even) controls at no cost. They span twice the time of a real quad, so slow wandering of the
    machine makes them wider, never narrower: the control errs on the careful side. Separate quads A A A A would cost as
    much again.
    """
    values: list[Floats] = []
    for blocks in (base_blocks, cand_blocks):
        logs = _logs(blocks)
        pairs = logs[: logs.size // 4 * 4].reshape(-1, 4)
        values.append((pairs[:, 1] + pairs[:, 2] - pairs[:, 0] - pairs[:, 3]) / 2)
    return np.concatenate(values)


def hodges_lehmann(d: Sequence[float] | Floats) -> float:
    """The median of all means of two values (a value with itself included): robust, and efficient for normal noise.

    Hodges and Lehmann, "Estimates of location based on rank tests", 1963. Raises ValueError without values.
    """
    return float(np.median(_walsh_averages(d)))


def signed_rank_interval(d: Sequence[float] | Floats, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Confidence interval of the centre of `d` and the confidence it really has: (low, high, achieved).

    The bounds are order statistics of the Walsh averages, those that Wilcoxon's signed-rank test at `1 - confidence`
    does not reject (Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3.3): with the exact null
    distribution up to 40 values, by its normal approximation above. Too few values for the confidence (fewer than six
    for 95 %) give the full range and the lower confidence that it has.
    """
    averages = np.sort(_walsh_averages(d))
    n, total = len(d), averages.size
    if n <= EXACT_UP_TO:
        tail = _null_tail(n)  # tail[t] = P(T <= t)
        dropped = int(np.searchsorted(tail, (1 - confidence) / 2 + 1e-12, side="right"))
        dropped = min(max(dropped, 1), (total + 1) // 2)
        achieved = 1 - 2 * float(tail[dropped - 1])
    else:
        deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        dropped = max(1, math.floor(total / 2 - z * deviation))
        achieved = 1 - 2 * NormalDist().cdf((dropped - 0.5 - total / 2) / deviation)
    return float(averages[dropped - 1]), float(averages[total - dropped]), max(0.0, achieved)


def _logs(blocks: Sequence[float]) -> Floats:
    values = np.asarray(blocks, dtype=np.float64)
    if values.ndim != 1 or values.size % 2 or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError("block times come in pairs and are positive and finite")
    return np.log(values)


def _walsh_averages(d: Sequence[float] | Floats) -> Floats:
    values = np.asarray(d, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError("at least one log ratio is needed")
    first, second = _pairs(values.size)
    return np.asarray((values[first] + values[second]) / 2, dtype=np.float64)


@lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    first, second = np.triu_indices(n)
    return first, second


@lru_cache(maxsize=64)
def _null_tail(n: int) -> Floats:
    """P(T <= t) of the signed-rank statistic of n values under symmetry: subsets of the ranks 1..n by their sum."""
    counts = np.zeros(n * (n + 1) // 2 + 1)
    counts[0] = 1
    for rank in range(1, n + 1):
        counts[rank:] += counts[:-rank].copy()
    return np.asarray(np.cumsum(counts) / 2.0**n, dtype=np.float64)


# ------------------------------------------------------------------------------------------------------------- schedule


@dataclass(slots=True)
class _Race:
    """The blocks of a pair so far."""

    base: list[Block] = field(default_factory=list)
    candidate: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def quads(self) -> int:
        return len(self.base) // 2

    def run_quad(self, base: Arm, candidate: Arm, steps: int) -> None:
        first = base.run_block(steps)
        second, third = candidate.run_block(steps), candidate.run_block(steps)
        self.base += [first, base.run_block(steps)]
        self.candidate += [second, third]


def measure_pair(
    base: Arm,
    candidate: Arm,
    *,
    min_quads: int = MIN_QUADS,
    max_quads: int = MAX_QUADS,
    block_s: float = 0.5,
    min_steps: int = 1,
    max_steps: int = BLOCK_STEPS,
    deadline: Deadline = None,
    floor: float = FLOOR,
    control: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Timing:
    """Time two arms against each other in quads A B B A and return the speed-up old/new with its interval.

    A probing block of three steps of each arm, not counted, sets the steps of a block: `block_s` seconds of the faster
    arm or `max_steps`, whichever is less, and never below `min_steps`; fewer where the time left would not hold
    `min_quads`. After `min_quads`, and then after every second quad, the measurement ends if `judge` can decide; it
    goes on to `max_quads` while it cannot. `deadline` is a function that returns the seconds left, or an instant of
    `time.monotonic()`; no quad is begun that would not fit, but one quad is always run. `on_progress` gets a line after
    every quad. What the arms raise is raised.
    """
    left = _clock(deadline)
    race = _Race()
    steps = _steps_of_a_block(base, candidate, block_s, min_steps, max_steps, left() / max(min_quads, 1), race.notes)
    longest = 0.0
    while True:
        before = left()
        race.run_quad(base, candidate, steps)
        if math.isfinite(before):
            longest = max(longest, before - left())
        timing = summarize(race.base, race.candidate, control=control, floor=floor, notes=tuple(race.notes))
        if on_progress is not None:
            low, high = timing.interval
            on_progress(f"quad {race.quads} of {max_quads}: {timing.speedup:.3f}x ({low:.3f}x to {high:.3f}x)")
        due = race.quads >= min_quads and (race.quads - min_quads) % 2 == 0
        if race.quads >= max_quads or (due and judge(timing, floor, min_quads)[0] is not Outcome.INCONCLUSIVE):
            return timing
        if left() < longest or left() <= 0:
            note = f"the time was used up after {race.quads} of at most {max_quads} quads"
            return summarize(race.base, race.candidate, control=control, floor=floor, notes=(*race.notes, note))


def summarize(
    base: Sequence[Block],
    candidate: Sequence[Block],
    *,
    control: bool = True,
    floor: float = FLOOR,
    notes: tuple[str, ...] = (),
) -> Timing:
    """The `Timing` of blocks run as quads A B B A, two of each arm per quad, in order.

    Where the blocks' wall clock gives another ratio than their device-side step times, by more than `floor`, the
    interval is widened to cover both: work that the step times do not see is no gain.
    """
    base_us, step_us = [block.mean_us for block in base], [block.mean_us for block in candidate]
    d = quad_log_ratios(base_us, step_us)
    low, high, achieved = signed_rank_interval(d)
    extra: list[str] = []
    wall = _wall_interval(base, candidate)
    if wall is not None and abs(wall[0] - hodges_lehmann(d)) > floor:
        low, high = min(low, wall[1]), max(high, wall[2])
        extra.append(f"by the wall clock the blocks give {math.exp(-wall[0]):.3f}x: the interval covers both")
    noise = _noise(control_log_ratios(base_us, step_us), extra) if control else None
    lengths = {len(block.step_us) for block in (*base, *candidate)}
    if len(lengths) > 1:
        extra.append(f"blocks had between {min(lengths)} and {max(lengths)} steps")
    return Timing(
        speedup=math.exp(-hodges_lehmann(d)),
        interval=(math.exp(-high), math.exp(-low)),
        confidence=achieved,
        quads=len(d),
        noise=noise,
        base_step_us=tuple(base_us),
        step_us=tuple(step_us),
        base_peak_bytes=_peak(base),
        peak_bytes=_peak(candidate),
        notes=(*notes, *extra),
    )


def _clock(deadline: Deadline) -> Callable[[], float]:
    if deadline is None:
        return lambda: math.inf
    if callable(deadline):
        return deadline
    instant = float(deadline)
    return lambda: instant - time.monotonic()


def _steps_of_a_block(
    base: Arm,
    candidate: Arm,
    block_s: float,
    min_steps: int,
    max_steps: int,
    quad_s: float,
    notes: list[str],
) -> int:
    step_s = [arm.run_block(PROBE_STEPS).mean_us / 1e6 for arm in (base, candidate)]
    wanted = max(min_steps, min(max_steps, math.ceil(block_s / min(step_s))))
    affordable = quad_s / (2 * sum(step_s))
    if affordable >= wanted:
        return wanted
    steps = max(min_steps, 1, math.floor(affordable))
    if steps < wanted:
        notes.append(f"blocks of {steps} steps instead of {wanted}, for the time left")
    return steps


def _wall_interval(base: Sequence[Block], candidate: Sequence[Block]) -> tuple[float, float, float] | None:
    """Estimate and bounds of log(new / old) by the wall clock; `None` where a block's wall time is no such thing."""
    if any(block.wall_us < sum(block.step_us) * 0.99 for block in (*base, *candidate)):
        return None
    d = quad_log_ratios(*([b.wall_us / len(b.step_us) for b in blocks] for blocks in (base, candidate)))
    low, high, _ = signed_rank_interval(d)
    return hodges_lehmann(d), low, high


def _noise(controls: Floats, notes: list[str]) -> float | None:
    """Half-width of the A/A control's interval as a share; `None` where too few controls bound anything."""
    if controls.size == 0:
        return None
    low, high, achieved = signed_rank_interval(controls)
    if achieved < CONFIDENCE:
        return None
    if low > 0 or high < 0:
        notes.append(f"the A/A control differs from itself by {math.expm1(hodges_lehmann(controls)):+.2%}: it drifts")
    return math.expm1((high - low) / 2)


def _peak(blocks: Sequence[Block]) -> int | None:
    peaks = [block.peak_bytes for block in blocks if block.peak_bytes is not None]
    return max(peaks, default=None)


# ------------------------------------------------------------------------------------------------------------ judgement


def judge(timing: Timing, floor: float = FLOOR, min_quads: int = MIN_QUADS) -> tuple[Outcome, tuple[str, ...]]:
    """What a measurement allows to be said, with its reasons as sentences.

    `floor` is a share of the step time. Improved or regressed: the whole interval lies beyond the larger of the floor
    and twice the A/A half-width, on its side. Neutral: the whole interval lies within the floor. Anything else, fewer
    than `min_quads` quads, or an interval of less than 95 % is inconclusive.
    """
    low, high = timing.interval
    measured = (
        f"{timing.speedup:.3f}x old/new, {timing.confidence:.1%} interval {low:.3f}x to {high:.3f}x over "
        f"{timing.quads} quads"
    )
    if timing.quads < min_quads:
        return Outcome.INCONCLUSIVE, (f"{measured}: a verdict needs {min_quads} quads",)
    if timing.confidence < CONFIDENCE - 1e-9:
        return Outcome.INCONCLUSIVE, (f"{measured}: a verdict needs {CONFIDENCE:.0%} confidence",)
    limit = max(floor, 2 * timing.noise) if timing.noise is not None else floor
    above, below = 1 + limit, 1 / (1 + limit)
    control = "no A/A control was run"
    if timing.noise is not None:
        control = f"the A/A control is known to within {timing.noise:.2%}, so a change counts beyond {limit:.2%}"
    if low > above:
        return Outcome.IMPROVED, (f"{measured}: all above {above:.3f}x", control)
    if high < below:
        return Outcome.REGRESSED, (f"{measured}: all below {below:.3f}x", control)
    if low >= 1 / (1 + floor) and high <= 1 + floor:
        return Outcome.NEUTRAL, (f"{measured}: all within {floor:.2%} of 1x", control)
    crossed = [edge for edge in (above, below) if low <= edge <= high]
    where = (
        f"not all on one side of {crossed[0]:.3f}x" if crossed else f"neither within {floor:.2%} nor beyond it enough"
    )
    return Outcome.INCONCLUSIVE, (f"{measured}: {where}", control)


def stable(times: Sequence[float], window: int = 3, tolerance: float = 0.1) -> bool:
    """Whether warm-up is over: the last `window` step times lie within `tolerance` (a share) of their median.

    A single slow step (a recompilation, an autotuning run) therefore prolongs the warm-up by `window` steps, and fewer
    than `window` times are never stable.
    """
    last = sorted(times[-window:])
    if len(last) < window:
        return False
    middle = last[window // 2]
    return last[0] >= middle * (1 - tolerance) and last[-1] <= middle * (1 + tolerance)


def check_floor(step_us: float, floor_us: float) -> str | None:
    """Why a step time cannot be true: it is not a time, or it is below the physical floor; `None` where it can.

    The floor is the larger of FLOPs / peak and least bytes / bandwidth, in microseconds. A step below it did not do the
    work: the harness or the rewrite is wrong.
    """
    if not math.isfinite(step_us) or step_us <= 0:
        return f"a step of {step_us} us is no time"
    if step_us < floor_us:
        return f"a step of {step_us:.1f} us is below its physical floor of {floor_us:.1f} us: it did not do the work"
    return None
