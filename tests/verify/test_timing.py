"""Statistics against scipy, the schedule against simulated machines that drift, jump and have heavy tails."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from advisor.model import Outcome, Timing
from advisor.verify.timing import (
    Block,
    check_floor,
    control_log_ratios,
    hodges_lehmann,
    judge,
    measure_pair,
    quad_log_ratios,
    signed_rank_interval,
    stable,
    summarize,
)

# ----------------------------------------------------------------------------------------------------------- statistics


def test_a_quad_compares_arms_with_the_same_centre_in_time() -> None:
    assert quad_log_ratios([100, 100], [50, 50]) == pytest.approx([math.log(0.5)])
    drift = np.exp(0.01 * np.arange(8))  # A B B A A B B A on a machine that slows down steadily
    assert quad_log_ratios(drift[[0, 3, 4, 7]], drift[[1, 2, 5, 6]]) == pytest.approx([0, 0], abs=1e-12)
    assert control_log_ratios(drift[[0, 3, 4, 7]], drift[[1, 2, 5, 6]]) == pytest.approx([0, 0], abs=1e-12)


def test_the_control_cancels_what_the_first_block_of_a_turn_costs_more() -> None:
    cold = 1.05
    base, candidate = [1.0, cold, 1.0, cold], [cold, 1.0, cold, 1.0]
    assert quad_log_ratios(base, candidate) == pytest.approx([0, 0], abs=1e-12)
    assert control_log_ratios(base, candidate) == pytest.approx([0, 0], abs=1e-12)


def test_eight_quads_give_eight_controls() -> None:
    rng = np.random.default_rng(0)
    base, candidate = rng.uniform(1, 2, 16), rng.uniform(1, 2, 16)
    assert len(control_log_ratios(base, candidate)) == 8
    assert len(control_log_ratios(base[:14], candidate[:14])) == 6


@pytest.mark.parametrize(("base", "candidate"), [([1], [1]), ([1, 1], [1]), ([1, 0], [1, 1]), ([1, 1], [1, math.nan])])
def test_times_that_cannot_be_are_refused(base: list[float], candidate: list[float]) -> None:
    with pytest.raises(ValueError, match="block"):
        quad_log_ratios(base, candidate)


def test_hodges_lehmann_is_the_median_of_pairwise_means() -> None:
    assert hodges_lehmann([3.0]) == 3.0
    assert hodges_lehmann([1.0, 2.0, 10.0]) == pytest.approx(np.median([1, 2, 10, 1.5, 5.5, 6]))
    with pytest.raises(ValueError, match="at least one"):
        hodges_lehmann([])


@pytest.mark.parametrize("n", [*range(6, 16), 20, 30, 40])
def test_the_interval_holds_what_wilcoxon_does_not_reject(n: int) -> None:
    d = np.random.default_rng(n).standard_t(3, n)
    low, high, achieved = signed_rank_interval(d, 0.95)
    assert 0.95 <= achieved < 1
    for centre, kept in [(low + 1e-6, True), (high - 1e-6, True), (low - 1e-6, False), (high + 1e-6, False)]:
        p = stats.wilcoxon(d - centre, method="exact").pvalue
        assert bool(p > 0.05) is kept
    assert achieved == pytest.approx(1 - stats.wilcoxon(d - (low - 1e-6), method="exact").pvalue)


@pytest.mark.parametrize("n", [41, 60, 200])
def test_the_interval_of_many_values_follows_the_normal_approximation(n: int) -> None:
    d = np.random.default_rng(n).normal(0.1, 1, n)
    low, high, achieved = signed_rank_interval(d)
    assert achieved == pytest.approx(0.95, abs=0.005)
    assert stats.wilcoxon(d - (low - 1e-3), method="exact").pvalue < 0.055
    assert stats.wilcoxon(d - (high + 1e-3), method="exact").pvalue < 0.055
    assert stats.wilcoxon(d - (low + 1e-2), method="exact").pvalue > 0.045


@pytest.mark.parametrize(("n", "achieved"), [(1, 0.0), (2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_too_few_values_give_their_range_and_say_so(n: int, achieved: float) -> None:
    d = [float(i * i) for i in range(n)]
    assert signed_rank_interval(d, 0.95) == (d[0], d[-1], achieved)


def test_the_exact_confidence_of_eight_quads() -> None:
    assert signed_rank_interval(list(range(8)))[2] == pytest.approx(1 - 2 * 5 / 256)


# ------------------------------------------------------------------------------------------------------------- machines


class Machine:
    """Multiplies every block by a factor; `kind` says how the factors of consecutive blocks hang together."""

    def __init__(self, seed: int, kind: str, noise: float) -> None:
        self.rng, self.kind, self.noise = np.random.default_rng(seed), kind, noise
        self.blocks, self.level, self.last = 0, 0.0, ""

    def factor(self, who: str) -> float:
        self.blocks += 1
        jitter = self.rng.normal(0, self.noise)
        if self.kind == "tails":
            jitter = self.rng.standard_t(2.5) * self.noise
        elif self.kind == "drift":
            jitter += 0.004 * self.blocks
        elif self.kind == "wander":
            self.level += self.rng.normal(0, self.noise / 2)
            jitter += self.level
        elif self.kind == "swing":
            jitter += 0.05 * math.sin(self.blocks / 7)
        elif self.kind == "bursts":
            jitter += 0.5 * (self.rng.random() < 0.05)
        elif self.kind == "turns":
            jitter += 0.05 * (self.last not in ("", who))
        self.last = who
        return math.exp(jitter)


class Simulated:
    """An arm on such a machine."""

    def __init__(self, machine: Machine, who: str, step_us: float) -> None:
        self.machine, self.who, self.step_us = machine, who, step_us
        self.steps: list[int] = []

    def run_block(self, steps: int) -> Block:
        self.steps.append(steps)
        step_us = self.step_us * self.machine.factor(self.who)
        return Block(step_us=(step_us,) * steps, wall_us=step_us * steps, peak_bytes=1000 + len(self.steps))


KINDS = ["even", "tails", "drift", "wander", "swing", "bursts", "turns"]


def race(seed: int, kind: str, noise: float, speedup: float, **options: Any) -> Timing:
    machine = Machine(seed, kind, noise)
    return measure_pair(Simulated(machine, "a", 2e5), Simulated(machine, "b", 2e5 / speedup), **options)


def shares(kind: str, noise: float, speedup: float, tries: int) -> dict[str, float]:
    found = {"covered": 0, "apart": 0} | {outcome.value: 0 for outcome in Outcome}
    for seed in range(tries):
        timing = race(seed, kind, noise, speedup)
        low, high = timing.interval
        found["covered"] += low <= speedup <= high
        found["apart"] += low > 1 or high < 1
        found[judge(timing)[0].value] += 1
    return {name: count / tries for name, count in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_an_unchanged_program_is_not_improved(kind: str, noise: float) -> None:
    found = shares(kind, noise, 1.0, 100)
    assert found["improved"] <= 0.05
    assert found["regressed"] <= 0.05
    assert found["covered"] >= 0.89  # 95 % nominal, 100 tries, and looks at a growing sample
    assert found["apart"] <= 0.11


@pytest.mark.parametrize("kind", KINDS)
def test_a_gain_of_fifteen_percent_is_found(kind: str) -> None:
    found = shares(kind, 0.01, 1.15, 60)
    assert found["improved"] >= (0.85 if kind == "bursts" else 0.98)
    assert found["covered"] >= 0.88


@pytest.mark.parametrize("kind", ["even", "drift", "turns"])
def test_a_loss_and_a_standstill_are_told_apart(kind: str) -> None:
    assert shares(kind, 0.003, 1 / 1.15, 40)["regressed"] >= 0.95
    assert shares(kind, 0.002, 1.0, 40)["neutral"] >= 0.95


def test_a_small_gain_takes_more_quads_than_a_large_one() -> None:
    small = [race(seed, "even", 0.01, 1.02).quads for seed in range(20)]
    large = [race(seed, "even", 0.01, 1.15).quads for seed in range(20)]
    assert set(large) == {8}
    assert np.mean(small) > 10
    assert max(small) <= 24


# ------------------------------------------------------------------------------------------------------------- schedule


class Scripted:
    """An arm whose step times are given, and which writes down whose turn it was."""

    def __init__(self, log: list[str], who: str, step_us: float, *, wall: float = 1.0) -> None:
        self.log, self.who, self.step_us, self.wall = log, who, step_us, wall
        self.steps: list[int] = []

    def run_block(self, steps: int) -> Block:
        self.log.append(self.who)
        self.steps.append(steps)
        return Block(step_us=(self.step_us,) * steps, wall_us=self.wall * self.step_us * steps)


def test_blocks_run_as_a_b_b_a_after_one_probe_of_each() -> None:
    log: list[str] = []
    lines: list[str] = []
    timing = measure_pair(Scripted(log, "a", 1e5), Scripted(log, "b", 5e4), on_progress=lines.append)
    assert "".join(log) == "ab" + "abba" * 8
    assert timing.quads == 8
    assert timing.speedup == pytest.approx(2.0)
    assert timing.interval == pytest.approx((2.0, 2.0))
    assert timing.noise == pytest.approx(0.0)
    assert timing.base_step_us == (1e5,) * 16
    assert timing.peak_bytes is None
    assert lines[-1] == "quad 8 of 24: 2.000x (2.000x to 2.000x)"


@pytest.mark.parametrize(
    ("base_us", "candidate_us", "steps"),
    [(1e3, 1e3, 50), (1e4, 1e4, 50), (1e5, 1e5, 5), (2e5, 5e4, 10), (3e6, 3e6, 1)],
)
def test_a_block_is_half_a_second_or_fifty_steps(base_us: float, candidate_us: float, steps: int) -> None:
    base = Scripted([], "a", base_us)
    measure_pair(base, Scripted([], "b", candidate_us))
    assert set(base.steps[1:]) == {steps}


class Countdown:
    """A clock that a simulated pair moves."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def __call__(self) -> float:
        return self.left


class Timed(Scripted):
    def __init__(self, clock: Countdown, who: str, step_us: float) -> None:
        super().__init__([], who, step_us)
        self.clock = clock

    def run_block(self, steps: int) -> Block:
        self.clock.left -= steps * self.step_us / 1e6
        return super().run_block(steps)


def test_blocks_shrink_so_that_the_least_quads_fit() -> None:
    clock = Countdown(9.0)
    base = Timed(clock, "a", 5e4)
    timing = measure_pair(base, Timed(clock, "b", 5e4), deadline=clock)
    assert timing.quads == 8
    assert set(base.steps[1:]) == {5}
    assert any("blocks of 5 steps instead of 10" in note for note in timing.notes)
    assert clock.left >= 0


def test_no_quad_is_begun_that_does_not_fit() -> None:
    clock = Countdown(10.0)
    timing = measure_pair(Timed(clock, "a", 1e6), Timed(clock, "b", 1e6), deadline=clock)
    assert timing.quads == 1
    assert clock.left >= 0
    assert "the time was used up after 1 of at most 24 quads" in timing.notes
    assert judge(timing)[0] is Outcome.INCONCLUSIVE


def test_an_instant_is_a_deadline_too() -> None:
    log: list[str] = []
    timing = measure_pair(Scripted(log, "a", 1e4), Scripted(log, "b", 1e4), deadline=time.monotonic() - 1)
    assert timing.quads == 1
    assert measure_pair(Scripted(log, "a", 1e4), Scripted(log, "b", 1e4), deadline=time.monotonic() + 3600).quads == 8


def test_what_an_arm_raises_is_raised() -> None:
    class Broken(Scripted):
        def run_block(self, steps: int) -> Block:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_pair(Scripted([], "a", 1e4), Broken([], "b", 1e4))


def test_without_a_control_there_is_no_noise() -> None:
    timing = measure_pair(Scripted([], "a", 1e4), Scripted([], "b", 1e4), control=False)
    assert timing.noise is None
    assert judge(timing)[0] is Outcome.NEUTRAL
    assert "no A/A control was run" in judge(timing)[1]


def test_a_slow_step_now_and_then_counts() -> None:
    """Nine of ten steps got faster and the tenth far slower: no gain, although the median says so."""
    base = [Block(step_us=(100.0,) * 50, wall_us=5000.0)] * 16
    candidate = [Block(step_us=(*(90.0,) * 45, *(400.0,) * 5), wall_us=6050.0)] * 16
    assert judge(summarize(base, candidate))[0] is Outcome.REGRESSED


def test_work_the_step_times_do_not_see_is_no_gain() -> None:
    timing = measure_pair(Scripted([], "a", 1e5), Scripted([], "b", 5e4, wall=2.0))
    assert timing.speedup == pytest.approx(2.0)
    assert timing.interval == pytest.approx((1.0, 2.0))
    assert judge(timing)[0] is Outcome.INCONCLUSIVE
    assert any("by the wall clock" in note for note in timing.notes)


def test_a_machine_that_changes_its_mind_is_noted() -> None:
    base = [Block(step_us=(t,), wall_us=t) for t in [100.0, 110.0, 110.0, 100.0] * 4]
    timing = summarize(base, base)
    assert any("the A/A control differs from itself" in note for note in timing.notes)


@pytest.mark.parametrize("times", [(), (0.0,), (1.0, math.nan), (1.0, -1.0), (math.inf,)])
def test_a_block_without_times_is_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="finite, positive step times"):
        Block(step_us=times, wall_us=1.0)


# ----------------------------------------------------------------------------------------------------------- properties

BLOCKS = st.lists(st.tuples(*[st.floats(1.0, 1e6)] * 4), min_size=1, max_size=12)
Quads = list[tuple[float, float, float, float]]


def estimate(quads: Quads, swapped: bool = False, scale: float = 1.0) -> tuple[float, float, float]:
    base = [Block((t * scale,), t * scale) for a1, _, _, a2 in quads for t in (a1, a2)]
    candidate = [Block((t * scale,), t * scale) for _, b1, b2, _ in quads for t in (b1, b2)]
    timing = summarize(candidate, base) if swapped else summarize(base, candidate)
    return timing.speedup, *timing.interval


@settings(deadline=None)
@given(BLOCKS, st.randoms(use_true_random=False))
def test_the_order_of_quads_does_not_matter(quads: Quads, random: Any) -> None:
    shuffled = list(quads)
    random.shuffle(shuffled)
    assert estimate(shuffled) == pytest.approx(estimate(quads))


@settings(deadline=None)
@given(BLOCKS, st.floats(1e-3, 1e3))
def test_slower_clocks_leave_the_ratio_alone(quads: Quads, scale: float) -> None:
    assert estimate(quads, scale=scale) == pytest.approx(estimate(quads), rel=1e-6)


@settings(deadline=None)
@given(BLOCKS)
def test_swapping_the_arms_inverts_the_ratio(quads: Quads) -> None:
    speedup, low, high = estimate(quads)
    assert estimate(quads, swapped=True) == pytest.approx((1 / speedup, 1 / high, 1 / low), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=45))
def test_the_estimate_lies_in_its_interval(d: list[float]) -> None:
    low, high, achieved = signed_rank_interval(d)
    assert low <= hodges_lehmann(d) <= high
    assert 0 <= achieved <= 1


# ------------------------------------------------------------------------------------------------------------ judgement


def timing(
    interval: tuple[float, float], noise: float | None = 0.002, quads: int = 8, confidence: float = 0.961
) -> Timing:
    return Timing(
        speedup=math.sqrt(interval[0] * interval[1]),
        interval=interval,
        confidence=confidence,
        quads=quads,
        noise=noise,
        base_step_us=(),
        step_us=(),
    )


@pytest.mark.parametrize(
    ("measured", "outcome"),
    [
        (timing((1.10, 1.20)), Outcome.IMPROVED),
        (timing((1.011, 1.02)), Outcome.IMPROVED),
        (timing((1.009, 1.02)), Outcome.INCONCLUSIVE),
        (timing((1.011, 1.02), noise=0.01), Outcome.INCONCLUSIVE),
        (timing((1.03, 1.04), noise=0.01), Outcome.IMPROVED),
        (timing((1.03, 1.04), noise=None), Outcome.IMPROVED),
        (timing((0.80, 0.90)), Outcome.REGRESSED),
        (timing((0.98, 0.991)), Outcome.INCONCLUSIVE),
        (timing((0.995, 1.005)), Outcome.NEUTRAL),
        (timing((0.995, 1.005), noise=0.05), Outcome.NEUTRAL),
        (timing((0.97, 1.03)), Outcome.INCONCLUSIVE),
        (timing((1.10, 1.20), quads=7), Outcome.INCONCLUSIVE),
        (timing((1.10, 1.20), confidence=0.9375), Outcome.INCONCLUSIVE),
        (timing((0.5, 0.6), quads=1, confidence=0.0), Outcome.INCONCLUSIVE),
    ],
)
def test_outcomes(measured: Timing, outcome: Outcome) -> None:
    found, reasons = judge(measured)
    assert found is outcome
    assert reasons
    assert f"{measured.interval[0]:.3f}x to {measured.interval[1]:.3f}x over {measured.quads} quads" in reasons[0]


def test_reasons_say_what_decided() -> None:
    assert judge(timing((1.1, 1.2)))[1] == (
        "1.149x old/new, 96.1% interval 1.100x to 1.200x over 8 quads: all above 1.010x",
        "the A/A control is known to within 0.20%, so a change counts beyond 1.00%",
    )
    assert judge(timing((1.1, 1.2), quads=5))[1][0].endswith("a verdict needs 8 quads")
    assert judge(timing((0.97, 1.03)))[1][0].endswith("not all on one side of 1.010x")
    assert judge(timing((1.012, 1.016), noise=0.01))[1][0].endswith("neither within 1.00% nor beyond it enough")


def test_swapping_the_arms_swaps_the_outcome() -> None:
    for low, high in pairwise([0.5, 0.9, 0.98, 0.995, 1.0, 1.004, 1.012, 1.1, 2.0]):
        forth, back = judge(timing((low, high)))[0], judge(timing((1 / high, 1 / low)))[0]
        mirror = {Outcome.IMPROVED: Outcome.REGRESSED, Outcome.REGRESSED: Outcome.IMPROVED}
        assert back is mirror.get(forth, forth)


@pytest.mark.parametrize(
    ("times", "steady"),
    [
        ([], False),
        ([100.0, 100.0], False),
        ([9000.0, 100.0, 101.0], False),
        ([9000.0, 100.0, 101.0, 99.0], True),
        ([100.0, 112.0, 100.0], False),
        ([100.0, 109.0, 100.0], True),
        ([100.0, 100.0, 100.0, 250.0], False),
        ([100.0, 89.0, 100.0], False),
    ],
)
def test_warm_up_ends_when_three_steps_agree(times: Sequence[float], steady: bool) -> None:
    assert stable(times) is steady


def test_a_step_cannot_be_faster_than_physics() -> None:
    assert check_floor(100.0, 40.0) is None
    assert check_floor(39.9, 40.0) == (
        "a step of 39.9 us is below its physical floor of 40.0 us: it did not do the work"
    )
    assert check_floor(0.0, 0.0) is not None
    assert check_floor(math.nan, 1.0) is not None
