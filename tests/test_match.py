"""What is small beside one finding that takes most of a step is asked for again without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from advisor import match
from advisor.model import (
    Decline,
    Environment,
    Evidence,
    Finding,
    Hardware,
    Profile,
    Rewrite,
    Safety,
    Span,
    Step,
    Utilisation,
)
from advisor.rule import Context, Rule, floor_evidence, step
from advisor.source import Source

SOURCE = Source("train.py", "big = 1\nsmall = 1\n")
STEP_US = 10_000.0


class Share(Rule):
    """A rule that finds a share of the step at a line."""

    safety = Safety.EXACT
    worth = 0.02

    def __init__(self, name: str, line: int, share: float, told: bool = False) -> None:
        self.id = name  # type: ignore[misc]
        self.line, self.share, self.told = line, share, told

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        span = Span(path="train.py", line=self.line, function="<module>")
        cost = self.share * ctx.step_us
        if self.share < ctx.gate(self):
            yield self.decline(span, f"it takes {self.share:.1%} of the step")
            return
        evidence = (Evidence(what="time per step", value=cost, unit="us"),)
        yield self.finding(span, "found", cited_us=cost, high_us=cost, evidence=evidence)

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        return self.decline(finding.span, "told") if self.told else self.edit(finding, "edit", [(finding.span, "x")])


def found(*rules: Rule, worth: float | None = None, **allow: frozenset[Safety]) -> list[str]:
    environment = Environment(platform="test", python="3", torch="2", command=("train.py",))
    profile = Profile(environment=environment, hardware=Hardware(name="cpu", kind="cpu"), steps=(), step_us=(STEP_US,))
    ctx = match.context(profile, lambda path: SOURCE, worth)
    return [finding.rule for finding in match.match(ctx, rules, **allow).findings]


def test_shares_are_of_what_the_largest_finding_leaves() -> None:
    assert found(Share("small", 2, 0.005)) == []
    assert found(Share("big", 1, 0.9), Share("small", 2, 0.005)) == ["big", "small"]
    assert found(Share("big", 1, 0.5), Share("small", 2, 0.005)) == ["big"]


def test_a_finding_that_is_only_told_leaves_the_gates() -> None:
    assert found(Share("big", 1, 0.9, told=True), Share("small", 2, 0.005)) == ["big"]


def test_a_finding_that_is_not_allowed_leaves_the_gates() -> None:
    big = Share("big", 1, 0.9)
    big.safety = Safety.PRECISION  # type: ignore[misc]
    assert found(big, Share("small", 2, 0.005)) == ["big", "small"]
    assert found(big, Share("small", 2, 0.005), allow=frozenset()) == ["big"]


def test_gates_given_by_the_user_stay() -> None:
    assert found(Share("big", 1, 0.9), Share("small", 2, 0.005), worth=0.02) == ["big"]


def test_something_is_always_noise() -> None:
    assert found(Share("big", 1, 1.0), Share("small", 2, 0.0003)) == ["big"]


@pytest.mark.parametrize(("busy", "profiled_us", "idle_us"), [(0.25, 40_000.0, 0.0), (0.1, 20_000.0, 8_000.0)])
def test_idle_time_without_the_profiler(busy: float, profiled_us: float, idle_us: float) -> None:
    """The profiler slows the host: kernels of 2,000 us in a step of 20,000 leave 8,000 of the 10,000 without it."""
    environment = Environment(platform="test", python="3", torch="2", command=("train.py",))
    profile = Profile(
        environment=environment,
        hardware=Hardware(name="gpu", kind="cuda"),
        steps=(Step(index=0, duration_us=profiled_us, phases_us={}),),
        step_us=(STEP_US,),
        utilisation=Utilisation(busy=busy),
    )
    assert match.context(profile, lambda path: SOURCE).idle_us == pytest.approx(idle_us)


def test_an_unfit_trace_is_why_its_operators_are_missing() -> None:
    environment = Environment(platform="test", python="3", torch="2", command=("train.py",))
    unfit = "insufficient trace, collect this: two profiled steps"
    hardware = Hardware(name="cpu", kind="cpu")
    profile = Profile(
        environment=environment, hardware=hardware, steps=(), step_us=(STEP_US,), missing={"trace": unfit}
    )
    rule = Share("linked", 1, 0.5)
    rule.needs = ("steps", "kineto", "links", "graph")  # type: ignore[misc]
    (decline,) = match.match(match.context(profile, lambda path: SOURCE, None), [rule]).declines
    assert decline.reason == f"cannot tell: {unfit}; the profile holds no graph"
    assert decline.needs == ("kineto", "links", "graph")


def test_a_floor_that_is_not_known_is_no_evidence() -> None:
    assert floor_evidence("floor: state read once", 0.0) == ()
    assert floor_evidence("floor: state read once", 3.14) == (
        Evidence(what="floor: state read once", value=3.1, unit="us"),
    )


def test_a_misspelt_measurement_is_named() -> None:
    with pytest.raises(TypeError, match="step\\(\\) has no keyword optimiser: did you mean optimizer\\?"):
        step(10_000, optimiser=[1])
