"""The search over combinations, with a mock laboratory that knows what every combination costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from verify_bench import rewrite

from advisor.model import Baseline, Numerics, Outcome, Patch, Rewrite, Safety, Span, Timing, Verdict
from advisor.verify.numerics import NOT_REPRODUCIBLE
from advisor.verify.search import OUT_OF_TIME, UNMEASURED, TrialFailed, search

ALLOWED = frozenset({Safety.NUMERICS, Safety.PRECISION})
Cost = Callable[[frozenset[str]], float]


def names(patch: Patch) -> frozenset[str]:
    return frozenset(item.finding.rule for item in patch.rewrites)


class MockLab:
    """No script is run: step times come from `cost`, proofs fail for combinations in `wrong`, clocks tick by count."""

    def __init__(
        self,
        cost: Cost,
        *,
        wrong: Iterable[frozenset[str]] = (),
        crashes: Iterable[str] = (),
        reason: str = "gradient of w is off by 1",
        seconds: float = 1e6,
        race_s: float = 10.0,
        proof_s: float = 0.0,
        late: Mapping[str, float] = {},
        few: Iterable[tuple[str, str]] = (),
        instant: Iterable[str] = (),
        slow_proofs: Mapping[str, float] = {},
        warmup_s: tuple[float, float] | None = None,
    ) -> None:
        self.few = set(few)  # races that end after four quads
        self.instant = set(instant)  # combinations whose races were measured before
        self.slow_proofs, self.warmup_s = slow_proofs, warmup_s
        self.cost, self.wrong, self.crashes, self.reason = cost, set(wrong), set(crashes), reason
        self.left, self.race_s, self.proof_s = seconds, race_s, proof_s
        self.late = late  # seconds more that races of a combination take
        self.granted: list[float] = []
        self.log: list[str] = []

    def prove(self, patch: Patch) -> Numerics:
        self.log.append("prove " + "+".join(sorted(names(patch))))
        self.left -= self.slow_proofs.get("".join(sorted(names(patch))), self.proof_s)
        bad = any(part <= names(patch) for part in self.wrong)
        return Numerics(ok=not bad, reference="float64", compared=1, reasons=(self.reason,) if bad else ())

    def race(self, kept: Patch, candidate: Patch, seconds: float) -> Timing:
        assert seconds > 0
        before, after = names(kept), names(candidate)
        self.log.append(f"race {'+'.join(sorted(before))} > {'+'.join(sorted(after))}")
        self.granted.append(seconds)
        together = "".join(sorted(after))
        self.left -= 0.0 if together in self.instant else self.race_s + self.late.get(together, 0.0)
        if self.crashes & after:
            raise TrialFailed("the rewritten script fails: out of memory")
        old, new = self.cost(before), self.cost(after)
        ratio = old / new
        return Timing(
            speedup=ratio,
            interval=(ratio * 0.999, ratio * 1.001),
            confidence=0.95,
            quads=4 if ("".join(sorted(before)), "".join(sorted(after))) in self.few else 8,
            noise=0.002,
            base_step_us=(old,) * 16,
            step_us=(new,) * 16,
            warmup_s=self.warmup_s,
        )

    def baseline(self, label: str, variant: str, patch: Patch) -> Baseline:
        self.log.append(f"baseline {label}")
        self.left -= self.race_s
        return Baseline(label=label, step_us=self.cost(names(patch)) * 0.9, speedup=None)

    def seconds_left(self) -> float:
        return max(0.0, self.left)


def gains(**saved: float) -> Cost:
    """A step of 1000 us from which every rewrite takes its own share."""
    return lambda rules: 1000.0 - sum(saved.get(rule, 0.0) for rule in rules)


def build(rewrites: Sequence[Rewrite]) -> Patch:
    return Patch(base={}, rewrites=tuple(rewrites), diff="", sources={})


def hunt(lab: MockLab, *rewrites: Rewrite, baselines: bool = False) -> Verdict:
    return search(rewrites, build, lab, allow=ALLOWED, baselines=baselines)


def rules(verdict: Verdict) -> list[str]:
    return [name.split("@")[0] for name in verdict.kept]


def test_each_rewrite_is_measured_on_top_of_what_is_kept() -> None:
    lab = MockLab(gains(a=100, b=-50, c=200))
    verdict = hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))
    assert verdict.outcome is Outcome.IMPROVED
    assert rules(verdict) == ["a", "c"]
    races = [line for line in lab.log if line.startswith("race")]
    assert races == ["race  > a", "race a > a+b", "race a > a+c", "race  > a+c", "race a+c > c"]
    assert verdict.saved_us == {"a@train.py:1": 100.0, "c@train.py:1": 200.0}
    assert verdict.timing is not None
    assert verdict.timing.speedup == 1000 / 700
    assert "all below" in verdict.rejected["b@train.py:1"]
    assert [trial.outcome.value for trial in verdict.trials] == [
        *("improved", "regressed", "improved", "improved", "regressed")
    ]


def test_numbers_come_first_and_decide() -> None:
    lab = MockLab(gains(a=500, b=100), wrong=[frozenset("a")])
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert lab.log[:2] == ["prove a", "prove b"]
    assert rules(verdict) == ["b"]
    assert verdict.rejected == {"a@train.py:1": "gradient of w is off by 1"}
    assert [line for line in lab.log if line.startswith("race")] == ["race  > b", "race  > b"]


def test_a_combination_that_is_wrong_together_is_reverted() -> None:
    verdict = hunt(MockLab(gains(a=100, b=100), wrong=[frozenset("ab")]), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["a"]
    assert verdict.trials[1].outcome is Outcome.WRONG
    assert verdict.trials[1].against == ("a@train.py:1",)


def test_a_single_rewrite_is_measured_once() -> None:
    lab = MockLab(gains(a=100))
    verdict = hunt(lab, rewrite("a"))
    assert lab.log == ["prove a", "race  > a"]
    assert verdict.outcome is Outcome.IMPROVED
    assert verdict.timing is verdict.trials[0].timing


def test_ablation_drops_what_no_longer_pays() -> None:
    def cost(found: frozenset[str]) -> float:
        return 1000.0 - 100 * ("a" in found) - 300 * ("b" in found) + 250 * ({"a", "b"} <= found)

    def helped(found: frozenset[str]) -> float:
        return cost(found) if found != {"a", "b"} else 800.0

    verdict = hunt(MockLab(helped), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["b"]
    assert verdict.rejected["a@train.py:1"] == "the other rewrites are faster without it, 1.143x"
    assert verdict.saved_us.keys() == {"b@train.py:1"}


def test_a_faster_ablation_that_is_wrong_is_not_taken() -> None:
    def cost(found: frozenset[str]) -> float:
        return {frozenset(): 1000.0, frozenset("a"): 900.0, frozenset("ab"): 800.0}.get(found, 700.0)

    verdict = hunt(MockLab(cost, wrong=[]), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["b"]
    lab = MockLab(cost)
    lab.prove = lambda patch: Numerics(  # type: ignore[method-assign]
        ok=names(patch) != {"b"}, reference="float64", compared=1, reasons=("alone it is wrong",)
    )
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["a", "b"]
    assert [trial.outcome for trial in verdict.trials if trial.label.startswith("without")] == [Outcome.WRONG]


def test_exclusive_groups_hold_one_and_the_other_is_retried() -> None:
    def cost(found: frozenset[str]) -> float:
        slow = 150 * ({"a", "c"} <= found)
        return 1000.0 - 100 * ("a" in found) - 200 * ("b" in found) - 200 * ("c" in found) + slow

    lab = MockLab(cost)
    verdict = hunt(lab, rewrite("a", group="g"), rewrite("b", group="g"), rewrite("c"))
    assert rules(verdict) == ["b", "c"]
    assert not any({"a", "b"} <= set(line.split("> ")[-1].split("+")) for line in lab.log)


def test_of_an_exclusive_group_the_fastest_is_kept() -> None:
    faster = hunt(MockLab(gains(a=100, b=300)), rewrite("a", group="g"), rewrite("b", group="g"))
    assert rules(faster) == ["b"]
    assert faster.rejected == {"a@train.py:1": "b@train.py:1 is faster in its place, 1.286x"}
    assert faster.saved_us["b@train.py:1"] == pytest.approx(300, rel=0.05)
    slower = hunt(MockLab(gains(a=300, b=100)), rewrite("a", group="g"), rewrite("b", group="g"))
    assert rules(slower) == ["a"]
    assert list(slower.rejected) == ["b@train.py:1"]


def test_what_makes_the_same_edits_is_tried_once_and_said_of_all() -> None:
    edits = ((Span(path="train.py", line=1, column=0, end_line=1, end_column=1), "x"),)
    same = [dataclasses.replace(rewrite(rule, group="g"), edits=edits) for rule in ("a", "b")]
    lab = MockLab(gains(a=300, b=300))
    kept = hunt(lab, *same)
    assert rules(kept) == ["a", "b"]
    assert (kept.rejected, lab.log) == ({}, ["prove a", "race  > a"])
    dropped = hunt(MockLab(gains(a=0, b=0)), *same)
    assert not dropped.kept
    assert dropped.rejected["a@train.py:1"] == dropped.rejected["b@train.py:1"]


def test_prerequisites_must_be_kept() -> None:
    lab = MockLab(gains(a=-10, b=100))
    verdict = hunt(lab, rewrite("a"), rewrite("b", requires=("a",)))
    assert rules(verdict) == []
    assert verdict.rejected["b@train.py:1"] == "not tried: needs a, which is not kept"
    verdict = hunt(MockLab(gains(a=50, b=100)), rewrite("a"), rewrite("b", requires=("a",)))
    assert rules(verdict) == ["a", "b"]


def test_only_allowed_levels_are_tried() -> None:
    lab = MockLab(gains(a=100, b=100, c=100))
    levels = (Safety.SUGGEST, Safety.SEMANTICS, Safety.EXACT)
    verdict = hunt(lab, *(rewrite(name, safety=level) for name, level in zip("abc", levels, strict=True)))
    assert rules(verdict) == ["c"]
    assert verdict.rejected["a@train.py:1"] == "a suggestion, never applied"
    assert verdict.rejected["b@train.py:1"] == "not tried: needs --allow semantics"


def test_a_used_up_budget_ends_with_what_is_proved() -> None:
    lab = MockLab(gains(a=100, b=100, c=100), seconds=34, race_s=12, late={"ab": 8})
    verdict = hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"), baselines=True)
    assert (rules(verdict), verdict.outcome) == (["a"], Outcome.IMPROVED)
    assert verdict.timing is verdict.trials[0].timing
    assert verdict.saved_us == {"a@train.py:1": 100.0}
    assert verdict.rejected == {
        "b@train.py:1": f"faster on top of a@train.py:1, but {UNMEASURED}",
        "c@train.py:1": f"not tried: {OUT_OF_TIME}",
    }
    late = [row.label for row in verdict.baselines if row.reason == f"not measured: {OUT_OF_TIME}"]
    assert late == ["as found + TF32", "as found + torch.compile", "the patch + torch.compile"]


def test_time_for_the_race_of_the_whole_patch_is_set_aside() -> None:
    lab = MockLab(gains(a=100, b=100, c=100), seconds=94, race_s=30)
    verdict = hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))
    assert (rules(verdict), verdict.outcome) == (["a", "b"], Outcome.IMPROVED)
    assert verdict.rejected == {"c@train.py:1": f"not tried: {OUT_OF_TIME}"}
    assert lab.log[-1] == "race  > a+b"
    assert lab.granted == [94 / 4, (64 - 30) / 2, 34]


def test_of_a_race_with_too_few_quads_the_whole_needs_more_than_it_took() -> None:
    lab = MockLab(gains(a=500, b=100), seconds=34)
    assert rules(hunt(lab, rewrite("a"), rewrite("b"))) == ["a", "b"]
    lab = MockLab(gains(a=500, b=100), seconds=34, few=[("", "a")])
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert verdict.rejected["b@train.py:1"] == f"not tried: {OUT_OF_TIME}"
    assert lab.log == ["prove a", "race  > a", "race  > a"]


def test_starting_is_not_repeated_by_quads() -> None:
    few = [("", "a")]
    lab = MockLab(gains(a=500, b=100), seconds=70, race_s=20, few=few, warmup_s=(8.0, 8.0))
    assert rules(hunt(lab, rewrite("a"), rewrite("b"))) == ["a", "b"]
    assert lab.granted[1] == 50 - (16 + 2 * (20 - 16))
    # the script as found was started for the first race, waited during the second, and has to be started again
    lab = MockLab(gains(a=-100, b=500, c=100), seconds=90, race_s=20, warmup_s=(8.0, 8.0))
    assert rules(hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))) == ["b", "c"]
    assert lab.granted[2] == 50 - (16 + 20 - 8)


def test_a_race_that_was_measured_before_is_no_guide() -> None:
    lab = MockLab(gains(a=100, b=100), seconds=60, instant=["a"])
    assert rules(hunt(lab, rewrite("a"), rewrite("b"))) == ["a", "b"]
    assert lab.granted[:2] == [60 / 3, (60 - 5) / 2]


def test_no_less_is_set_aside_than_a_race_needs_to_begin() -> None:
    lab = MockLab(gains(a=100, b=100), seconds=9, race_s=1)
    assert rules(hunt(lab, rewrite("a"), rewrite("b"))) == ["a"]
    assert "race a > a+b" not in lab.log


def test_proofs_that_were_made_before_are_no_guide_and_the_first_records_three_arms() -> None:
    lab = MockLab(gains(a=100, b=100, c=100), seconds=160, proof_s=30, slow_proofs={"a": 0})
    assert rules(hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))) == ["a", "b", "c"]
    assert lab.granted[:3] == [160 / 4, (120 - 10 - 10) / 2, 80 - 10]
    lab = MockLab(gains(a=100, b=100, c=100), seconds=200, slow_proofs={"a": 60, "ab": 20})
    hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))
    assert lab.granted[:3] == [(140 - 2 * 20) / 4, (110 - 10 - 20) / 2, 100 - 10]


def test_after_a_proof_that_took_too_long_there_is_no_race() -> None:
    lab = MockLab(gains(a=100, b=100), seconds=60, slow_proofs={"ab": 37})
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert (rules(verdict), verdict.outcome) == (["a"], Outcome.IMPROVED)
    assert verdict.rejected == {"b@train.py:1": f"not timed: {OUT_OF_TIME}"}
    assert "race a > a+b" not in lab.log


def test_too_few_quads_of_the_whole_leave_the_first() -> None:
    lab = MockLab(gains(a=100, b=100), few=[("", "ab")])
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert (rules(verdict), verdict.outcome) == (["a"], Outcome.IMPROVED)
    assert verdict.timing is verdict.trials[0].timing
    assert verdict.rejected["b@train.py:1"].startswith("faster on top of a@train.py:1, but 1.250x old/new")
    assert verdict.rejected["b@train.py:1"].endswith("over 4 quads: a verdict needs 8 quads")
    against = MockLab(lambda found: {frozenset("a"): 900.0, frozenset("ab"): 800.0}.get(found, 1000.0), few=lab.few)
    race = against.race
    against.race = lambda kept, candidate, seconds: (
        race(  # type: ignore[method-assign]
            kept, candidate, seconds
        )
        if names(kept) or len(names(candidate)) < 2
        else dataclasses.replace(race(kept, candidate, seconds), interval=(0.9, 1.1))
    )
    assert hunt(against, rewrite("a"), rewrite("b")).outcome is Outcome.INCONCLUSIVE


def test_a_proof_that_would_not_leave_time_for_its_race_is_not_begun() -> None:
    lab = MockLab(gains(a=100, b=100, c=100), seconds=100, race_s=10, proof_s=26)
    verdict = hunt(lab, rewrite("a"), rewrite("b"), rewrite("c"))
    assert rules(verdict) == ["a", "b"]
    assert verdict.rejected == {"c@train.py:1": f"not tried: {OUT_OF_TIME}"}


def test_a_whole_that_is_not_faster_is_not_kept() -> None:
    def cost(found: frozenset[str]) -> float:
        return {frozenset(): 1000.0, frozenset("a"): 900.0, frozenset("ab"): 800.0}.get(found, 1000.0)

    lab = MockLab(cost)
    race = lab.race
    lab.race = lambda kept, candidate, seconds: race(  # type: ignore[method-assign]
        kept, candidate if names(kept) or len(names(candidate)) < 2 else kept, seconds
    )
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert (verdict.outcome, verdict.kept, verdict.saved_us) == (Outcome.NEUTRAL, (), {})
    assert verdict.rejected["a@train.py:1"].startswith("proved alone, but the whole patch is neutral")


def test_no_time_at_all_proves_nothing() -> None:
    verdict = hunt(MockLab(gains(a=100), seconds=0), rewrite("a"))
    assert (verdict.outcome, verdict.kept, verdict.timing) == (Outcome.INCONCLUSIVE, (), None)


def test_a_crash_loses_the_trial_only() -> None:
    verdict = hunt(MockLab(gains(a=100, b=50), crashes=["a"]), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["b"]
    assert verdict.trials[0].outcome is Outcome.FAILED
    assert verdict.rejected["a@train.py:1"] == "the rewritten script fails: out of memory"


def test_an_unreproducible_script_ends_the_search() -> None:
    reason = f"{NOT_REPRODUCIBLE}: two runs of the original have different batches (batch 0)"
    lab = MockLab(gains(a=100, b=50), wrong=[frozenset("a")], reason=reason)
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert (verdict.outcome, verdict.reasons) == (Outcome.INCONCLUSIVE, (reason,))
    assert lab.log == ["prove a"]


def test_a_fused_kernel_that_fell_back_is_not_wrong() -> None:
    reason = "a fell back to aten::slow, which is no gain"
    lab = MockLab(gains(a=100, b=50))
    lab.prove = lambda patch: Numerics(  # type: ignore[method-assign]
        ok=True, reference="float64", compared=1, fallbacks=(reason,) if "a" in names(patch) else ()
    )
    verdict = hunt(lab, rewrite("a"))
    assert (verdict.outcome, verdict.reasons, verdict.kept) == (Outcome.NEUTRAL, (reason,), ())
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert (verdict.outcome, rules(verdict)) == (Outcome.IMPROVED, ["b"])
    assert (verdict.trials[0].outcome, verdict.trials[0].timing) == (Outcome.NEUTRAL, None)
    assert verdict.rejected == {"a@train.py:1": reason}


def test_savings_are_of_the_medians_that_are_shown() -> None:
    lab = MockLab(gains(a=100))
    race = lab.race
    lab.race = lambda kept, candidate, seconds: dataclasses.replace(  # type: ignore[method-assign]
        race(kept, candidate, seconds), base_step_us=(1000.0,) * 15 + (5000.0,)
    )
    assert hunt(lab, rewrite("a")).saved_us == {"a@train.py:1": 100.0}


def test_nothing_to_try_is_neutral() -> None:
    verdict = hunt(MockLab(gains()))
    assert (verdict.outcome, verdict.reasons, verdict.kept) == (Outcome.NEUTRAL, ("no rewrite was tried",), ())


def test_a_slower_rewrite_is_the_verdict_when_it_was_the_only_one() -> None:
    verdict = hunt(MockLab(gains(a=-100)), rewrite("a"))
    assert verdict.outcome is Outcome.REGRESSED
    assert verdict.timing is not None
    assert verdict.kept == ()


def test_baselines_use_the_final_race_where_it_has_the_figure() -> None:
    lab = MockLab(gains(a=200, b=100))
    verdict = hunt(lab, rewrite("a"), rewrite("b"), baselines=True)
    rows = {row.label: (row.step_us, row.speedup) for row in verdict.baselines}
    assert rows == {
        "as found": (1000.0, 1.0),
        "as found + TF32": (900.0, 1000 / 900),
        "as found + torch.compile": (900.0, 1000 / 900),
        "the patch": (700.0, 1000 / 700),
        "the patch + torch.compile": (630.0, 1000 / 630),
    }
    assert "baseline as found" not in lab.log


def test_a_replaced_form_is_the_verdict_where_the_whole_was_not_measured() -> None:
    lab = MockLab(gains(a=100, b=300), seconds=28.0, late={"b": 6})
    verdict = hunt(lab, rewrite("a", group="g"), rewrite("b", group="g"))
    assert rules(verdict) == ["a"]
    assert verdict.outcome is Outcome.IMPROVED
    assert verdict.rejected == {"b@train.py:1": f"faster in place of a@train.py:1, but {UNMEASURED}"}
    assert set(verdict.saved_us) == {"a@train.py:1"}


def test_a_form_that_replaced_another_is_measured_without() -> None:
    lab = MockLab(gains(a=100, b=300))
    hunt(lab, rewrite("a", group="g"), rewrite("b", group="g"), rewrite("c"))
    assert "race b > " in lab.log or "race b+c > c" in lab.log


def test_what_was_wrong_is_not_tried_again() -> None:
    def cost(found: frozenset[str]) -> float:
        return 1000.0 - 100 * ("b" in found) - 200 * ("c" in found) + 150 * ({"b", "c"} <= found)

    lab = MockLab(cost, wrong=[frozenset("a")])
    verdict = hunt(lab, rewrite("a", group="g"), rewrite("b", group="g"), rewrite("c"))
    assert [line for line in lab.log if line == "prove a"] == ["prove a"]
    assert not any("a" in line.split("> ")[-1].split("+") for line in lab.log if line.startswith("race"))
    assert rules(verdict) == ["c"]


def test_a_clear_gain_in_too_few_quads_is_kept_until_the_whole_is_measured() -> None:
    lab = MockLab(gains(a=700, b=100), few=[("", "a"), ("ab", "b")], seconds=60.0)
    verdict = hunt(lab, rewrite("a"), rewrite("b"))
    assert verdict.outcome is Outcome.IMPROVED
    assert rules(verdict) == ["a", "b"]
    races = [line for line in lab.log if line.startswith("race")]
    assert races == ["race  > a", "race a > a+b", "race  > a+b", "race a+b > b"]
    assert verdict.reasons[-1].startswith("a@train.py:1 by itself: 3.333x old/new")
    assert verdict.reasons[-1].endswith("over 4 quads: a verdict needs 8 quads")


def test_dropping_it_decides_about_a_gain_in_too_few_quads() -> None:
    verdict = hunt(MockLab(gains(a=700, b=100), few=[("", "a")]), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["a", "b"]
    assert not any("by itself" in reason for reason in verdict.reasons)


def test_a_small_gain_in_too_few_quads_is_not_kept() -> None:
    verdict = hunt(MockLab(gains(a=15, b=100), few=[("", "a")]), rewrite("a"), rewrite("b"))
    assert rules(verdict) == ["b"]
    assert "a verdict needs 8 quads" in verdict.rejected["a@train.py:1"]


def test_too_few_quads_of_the_whole_patch_promise_nothing() -> None:
    verdict = hunt(MockLab(gains(a=700), few=[("", "a")]), rewrite("a"))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.kept == ()


def test_the_only_rewrite_gets_all_the_time() -> None:
    lab = MockLab(gains(a=500), seconds=100)
    hunt(lab, rewrite("a"))
    assert lab.granted == [100]
    lab = MockLab(gains(a=500), seconds=100)
    hunt(lab, rewrite("a"), rewrite("b", requires=("c",)), rewrite("d", safety=Safety.SEMANTICS))
    assert lab.granted == [100], "what can never be tried waits for nothing"
    lab = MockLab(gains(a=500), seconds=100)
    hunt(lab, rewrite("a"), rewrite("d", safety=Safety.SUGGEST), rewrite("b", requires=("d",)))
    assert lab.granted == [100]
    lab = MockLab(gains(c=500), wrong=[frozenset("a")], seconds=100)
    hunt(lab, rewrite("a"), rewrite("c"), rewrite("b", requires=("a",)))
    assert lab.granted[0] == pytest.approx(100 / 2)
    lab = MockLab(gains(a=500, b=100), seconds=100)
    hunt(lab, rewrite("a"), rewrite("b", requires=("a",)))
    assert lab.granted[0] == pytest.approx(100 / 3)


def test_the_only_rewrite_in_too_few_quads_is_told_with_what_was_measured() -> None:
    lab = MockLab(gains(a=500), seconds=12, few=[("", "a")])
    verdict = hunt(lab, rewrite("a"))
    assert lab.log == ["prove a", "race  > a"]
    assert verdict.outcome is Outcome.INCONCLUSIVE and verdict.timing is not None and verdict.timing.quads == 4
    assert UNMEASURED not in verdict.reasons and "4 quads" in verdict.reasons[0]
