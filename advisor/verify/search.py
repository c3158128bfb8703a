"""Find the combination of rewrites that is proved right and measured faster: greedy, with revert and ablation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from advisor.errors import AdvisorError
from advisor.model import Baseline, Numerics, Outcome, Patch, Rewrite, Safety, Timing, Trial, Verdict
from advisor.verify.numerics import inconclusive
from advisor.verify.timing import FLOOR, MIN_QUADS, check_floor, judge

PROMISE = 2.0  # times the floor: a gain above it, in too few quads, is kept until the whole patch is measured
LEAST_RACE_S = 5.0  # time left below which no further race is begun
ARMS = 3  # that the first proof records: the script as found, the reference and the candidate, later ones the last only
ALWAYS_ALLOWED = frozenset({Safety.EXACT})
OUT_OF_TIME = "the time budget was used up"
UNMEASURED = "the whole patch was not measured against the script as found"
AS_FOUND = "as found"
THE_PATCH = "the patch"

Build: TypeAlias = Callable[[Sequence[Rewrite]], Patch]
Judge: TypeAlias = Callable[[Timing], tuple[Outcome, tuple[str, ...]]]
Report: TypeAlias = Callable[[str], None]


class TrialFailed(AdvisorError):
    """The rewritten script failed where the original does not; the trial is lost, the search goes on."""

    exit_status = 3


class Lab(Protocol):
    """Where combinations are proved and measured. Errors of the original script are raised as they are."""

    def prove(self, patch: Patch) -> Numerics:
        """Compare the patched script with the original; a patched script that fails is a proof that failed."""

    def race(self, kept: Patch, candidate: Patch, seconds: float) -> Timing:
        """Time `candidate` against `kept` for at most about `seconds`; raises TrialFailed when the candidate fails."""

    def baseline(self, label: str, variant: str, patch: Patch) -> Baseline:
        """Measure a variant (as-found, tf32, compile) of a patched script; what cannot be measured has a reason."""

    def seconds_left(self) -> float:
        """What is left of the time budget."""


VARIANTS = (  # label, variant, whether on top of the patch
    (AS_FOUND, "as-found", False),
    ("as found + TF32", "tf32", False),
    ("as found + torch.compile", "compile", False),
    (THE_PATCH, "as-found", True),
    ("the patch + torch.compile", "compile", True),
)


def search(
    rewrites: Sequence[Rewrite],
    build: Build,
    lab: Lab,
    *,
    allow: frozenset[Safety],
    floor: float = FLOOR,
    min_quads: int = MIN_QUADS,
    physical_floor_us: float | None = None,
    baselines: bool = True,
    on_progress: Report = lambda text: None,
) -> Verdict:
    """Try `rewrites` in order, each on top of what is kept, and return the one verdict on the patch that is left.

    Where the time of one is up before there are `min_quads` quads and all there are show a clear gain, it is kept for
    the time being: only the whole patch, measured in full, can be improved, and the verdict names such rewrites.
    `allow` names the safety levels that may be applied besides EXACT; SUGGEST is never tried. `floor` is the share of a
    step below which a gain counts as none, `min_quads` the least number of quads behind a judgement,
    `physical_floor_us` the step time below which the work cannot have been done. The time budget is the lab's; what the
    race of the whole patch needs is set aside, and when the rest is used up the verdict is about what is kept until
    then. Errors of the original script are raised.
    """

    def judge_timing(timing: Timing) -> tuple[Outcome, tuple[str, ...]]:
        impossible = check_floor(min(timing.step_us), physical_floor_us or 0.0)
        return (Outcome.WRONG, (impossible,)) if impossible else judge(timing, floor, min_quads)

    def promising(timing: Timing) -> bool:
        """All of too few quads agree on a gain: what comes later is measured on top, the whole patch decides."""
        return timing.quads < min_quads and timing.interval[0] > 1 + PROMISE * floor

    distinct, same = _by_edits(rewrites)
    hunt = _Search(distinct, build, lab, allow, judge_timing, promising, min_quads, on_progress)
    hunt.greedy()
    verdict = hunt.conclude()
    if verdict.outcome is Outcome.IMPROVED:
        changed = hunt.ablate()
        verdict = hunt.conclude() if changed else replace(verdict, trials=tuple(hunt.trials))
    verdict = replace(verdict, reasons=(*verdict.reasons, *hunt.undecided_of(verdict)))
    if baselines:
        verdict = replace(verdict, baselines=tuple(hunt.baselines(verdict)))
    return _shared(verdict, same)


def _by_edits(rewrites: Sequence[Rewrite]) -> tuple[list[Rewrite], dict[str, str]]:
    """The rewrites that make different edits, and of each other one which of them makes the same."""
    first: dict[object, Rewrite] = {}
    same: dict[str, str] = {}
    for rewrite in rewrites:
        found = first.setdefault(frozenset(rewrite.edits) or rewrite.id, rewrite)
        if found is not rewrite:
            same[rewrite.id] = found.id
    return list(first.values()), same


def _shared(verdict: Verdict, same: Mapping[str, str]) -> Verdict:
    """A verdict that says of rewrites with the same edits the same."""
    kept = [other for other, tried in same.items() if tried in verdict.kept]
    rejected = {other: verdict.rejected[tried] for other, tried in same.items() if tried in verdict.rejected}
    return replace(verdict, kept=(*verdict.kept, *kept), rejected={**verdict.rejected, **rejected})


class _Search:
    """The state of one search."""

    def __init__(
        self,
        rewrites: Sequence[Rewrite],
        build: Build,
        lab: Lab,
        allow: frozenset[Safety],
        judge_timing: Judge,
        promising: Callable[[Timing], bool],
        min_quads: int,
        say: Report,
    ) -> None:
        self.rewrites, self.build, self.lab = rewrites, build, lab
        self.allowed = (allow | ALWAYS_ALLOWED) - {Safety.SUGGEST}
        self.judge, self._promising, self.say = judge_timing, promising, say
        self.min_quads = min_quads
        self.kept: list[Rewrite] = []
        self.rejected: dict[str, str] = {}
        self.saved: dict[str, float] = {}
        self.proofs: dict[tuple[str, ...], Numerics] = {}
        self.timings: dict[str, Timing] = {}
        self.trials: list[Trial] = []
        self.longest_race_s = 0.0
        self.whole_s: float | None = None  # what a race against the script as found takes up to a verdict
        self.proof_s: float | None = None  # what the last proof took, apart from what only the first one records
        self.tried: list[str] = []
        self.undecided: dict[str, str] = {}  # kept for their promise: too few quads for a verdict of their own
        self.unreliable: tuple[str, ...] = ()  # why the script cannot be judged at all

    # --------------------------------------------------------------------------------------------------------- greedy

    def greedy(self) -> None:
        """Every allowed rewrite once, in the planned order."""
        for number, rewrite in enumerate(self.rewrites):
            if self.unreliable:
                self.rejected[rewrite.id] = f"not tried: {self.unreliable[0]}"
                continue
            reason = self._obstacle(rewrite)
            if reason is not None:
                self.rejected[rewrite.id] = reason
                continue
            self._try(rewrite, self._waiting(self.rewrites[number:]))

    def _waiting(self, rewrites: Sequence[Rewrite]) -> int:
        """How many rewrites can have their turn: what the others need will not be kept."""
        rules = {other.finding.rule for other in self.kept}
        count = 0
        for rewrite in rewrites:
            if rewrite.safety in self.allowed and rules.issuperset(rewrite.requires):
                rules.add(rewrite.finding.rule)
                count += 1
        return count

    def _obstacle(self, rewrite: Rewrite) -> str | None:
        """Why a rewrite is not even tried now."""
        if rewrite.safety is Safety.SUGGEST:
            return "a suggestion, never applied"
        if rewrite.safety not in self.allowed:
            return f"not tried: needs --allow {rewrite.safety.value}"
        rules = {other.finding.rule for other in self.kept}
        lacking = [name for name in rewrite.requires if name not in rules]
        if lacking:
            return f"not tried: needs {', '.join(lacking)}, which is not kept"
        if self._seconds_for_trials() < (self.proof_s or 0.0) + LEAST_RACE_S:
            return f"not tried: {OUT_OF_TIME}"
        return None

    def _seconds_for_trials(self) -> float:
        """What is left without the race of the whole patch, which a patch of several needs to be claimed."""
        return self.lab.seconds_left() - (max(self.whole_s or 0.0, LEAST_RACE_S) if self.kept else 0.0)

    def _share(self, waiting: int) -> float:
        """Seconds for the race of one of `waiting` rewrites, the proofs of the others and the last race set aside."""
        proofs = (waiting - 1) * (self.proof_s or 0.0)
        only = waiting == 1 and len(self.tried) == 1  # its own race is that of the whole patch
        if not only and (not self.kept or self.whole_s is None):  # the whole patch, if any, counts as one more
            waiting += 1
        return max((self._seconds_for_trials() - proofs) / waiting, LEAST_RACE_S)

    def _try(self, rewrite: Rewrite, waiting: int) -> None:
        """Prove, measure, then keep or revert. `waiting` is how many rewrites share the time that is left.

        Where one of its exclusive group is kept, it is measured in that one's place.
        """
        rival = next((other for other in self.kept if rewrite.group is not None and other.group == rewrite.group), None)
        combination = [*(other for other in self.kept if other is not rival), rewrite]
        patch, below = self.build(combination), self.build(self.kept)
        skipped = next((reason for other, reason in patch.skipped if other.id == rewrite.id), None)
        if skipped is not None:
            self.rejected[rewrite.id] = f"cannot be applied: {skipped}"
            return
        self.tried.append(rewrite.id)
        self.say(f"{rewrite.title}: comparing numbers")
        numerics = self._prove(patch)
        unfit = _unfit(numerics)
        if unfit is not None:
            outcome, reasons = unfit
            if outcome is Outcome.INCONCLUSIVE:
                self.unreliable = reasons
            self._record(rewrite.id, combination, outcome, reasons, numerics, None)
            self.rejected[rewrite.id] = "; ".join(reasons)
            return
        if self.kept and self._seconds_for_trials() < LEAST_RACE_S:  # the proof took longer than the last one
            self.rejected[rewrite.id] = f"not timed: {OUT_OF_TIME}"
            return
        self.say(f"{rewrite.title}: timing")
        timing = self._race(below, patch, self._share(waiting), rewrite, combination, numerics)
        if timing is None:
            return
        outcome, reasons = self.judge(timing)
        self._record(rewrite.id, combination, outcome, reasons, numerics, timing)
        undecided = outcome is Outcome.INCONCLUSIVE and self._promising(timing)
        if outcome is not Outcome.IMPROVED and not undecided:
            self.rejected[rewrite.id] = "; ".join(reasons) or outcome.value
            return
        if undecided:
            self.undecided[rewrite.id] = f"{rewrite.id} by itself: {reasons[0]}"
        self.kept = combination
        self.saved[rewrite.id] = _saved_us(timing)
        self.timings[rewrite.id] = timing
        self.rejected.pop(rewrite.id, None)
        if rival is not None:
            self.undecided.pop(rival.id, None)
            self.saved[rewrite.id] += self.saved.pop(rival.id)
            self.timings.pop(rival.id)
            self.rejected[rival.id] = f"{rewrite.id} is faster in its place, {timing.speedup:.3f}x"

    def _prove(self, patch: Patch) -> Numerics:
        key = _ids(patch.rewrites)
        if key not in self.proofs:
            before = self.lab.seconds_left()
            self.proofs[key] = self.lab.prove(patch)
            took = before - self.lab.seconds_left()
            if took >= LEAST_RACE_S:  # what took less may have been remembered: no guide
                self.proof_s = took / ARMS if self.proof_s is None else took
        return self.proofs[key]

    def _race(
        self,
        below: Patch,
        patch: Patch,
        seconds: float,
        rewrite: Rewrite,
        combination: list[Rewrite],
        numerics: Numerics,
    ) -> Timing | None:
        """Time a candidate; a candidate that fails is recorded and gives None."""
        try:
            return self._timed(below, patch, seconds)
        except TrialFailed as error:
            self._record(rewrite.id, combination, Outcome.FAILED, (str(error),), numerics, None)
            self.rejected[rewrite.id] = str(error)
            return None

    def _timed(self, below: Patch, patch: Patch, seconds: float) -> Timing:
        """A race, noting how long the longest has taken, start-up included."""
        before = self.lab.seconds_left()
        timing = self.lab.race(below, patch, seconds)
        took = before - self.lab.seconds_left()
        self.longest_race_s = max(self.longest_race_s, took)
        if not below.rewrites and took >= LEAST_RACE_S:  # what took less may have been remembered: no guide
            self.whole_s = self._seconds_of_whole(timing, took)
        return timing

    def _seconds_of_whole(self, timing: Timing, took: float) -> float:
        """What a race like this one takes with just the quads of a verdict, both scripts started anew.

        The script as found was started in the first such race only, and then waited; the candidate in each.
        """
        base_s, candidate_s = timing.warmup_s or (0.0, 0.0)
        started = candidate_s + (base_s if self.whole_s is None else 0.0)
        return base_s + candidate_s + max(took - started, 0.0) * self.min_quads / timing.quads

    def _record(
        self,
        label: str,
        combination: Sequence[Rewrite],
        outcome: Outcome,
        reasons: Sequence[str],
        numerics: Numerics | None,
        timing: Timing | None,
        against: Sequence[Rewrite] | None = None,
    ) -> None:
        self.trials.append(
            Trial(
                label=label,
                patch=_ids(combination),
                against=_ids(self.kept if against is None else against),
                outcome=outcome,
                reasons=tuple(reasons),
                numerics=numerics,
                timing=timing,
            )
        )

    # ------------------------------------------------------------------------------------------------------- ablation

    def ablate(self) -> bool:
        """Drop each kept rewrite once; keep the drop if it wins, then retry the others of its exclusive group.

        A rewrite that was raced against just the others needs no ablation. Begins a race only where time is left for it
        and for the race of the whole patch that a drop makes necessary. True when what is kept has changed.
        """
        before = list(self.kept)
        for rewrite in before:
            rest = _ids([other for other in self.kept if other is not rewrite])
            raced = any(trial.label == rewrite.id and trial.against == rest for trial in self.trials)
            if raced and rewrite.id not in self.undecided:
                continue
            if self.lab.seconds_left() < 2.5 * max(self.longest_race_s, LEAST_RACE_S):
                break
            if rewrite in self.kept and not any(rewrite.finding.rule in other.requires for other in self.kept):
                self._ablate_one(rewrite)
        return self.kept != before

    def _ablate_one(self, rewrite: Rewrite) -> None:
        rest = [other for other in self.kept if other is not rewrite]
        self.say(f"{rewrite.title}: measuring without it")
        patch = self.build(rest)
        try:
            timing = self._timed(self.build(self.kept), patch, self.lab.seconds_left() / (len(self.kept) + 1))
        except TrialFailed as error:
            self._record(f"without {rewrite.id}", rest, Outcome.FAILED, (str(error),), None, None)
            return
        outcome, reasons = self.judge(timing)
        numerics = self._prove(patch) if outcome is Outcome.IMPROVED else None
        outcome, reasons = (_unfit(numerics) if numerics is not None else None) or (outcome, reasons)
        self._record(f"without {rewrite.id}", rest, outcome, reasons, numerics, timing)
        if outcome is Outcome.REGRESSED:
            self.undecided.pop(rewrite.id, None)
        if outcome is not Outcome.IMPROVED:
            return
        self.kept = rest
        self.undecided.pop(rewrite.id, None)
        self.saved.pop(rewrite.id)
        self.timings.pop(rewrite.id)
        self.rejected[rewrite.id] = f"the other rewrites are faster without it, {timing.speedup:.3f}x"
        self._retry(rewrite)

    def _retry(self, dropped: Rewrite) -> None:
        """Try again what is right of the dropped rewrite's exclusive group."""
        wrong = {trial.label for trial in self.trials if trial.outcome in (Outcome.WRONG, Outcome.FAILED)}
        for rewrite in self.rewrites:
            waits = rewrite.id in self.rejected and rewrite is not dropped and rewrite.group is not None
            if rewrite.id not in wrong and waits and rewrite.group == dropped.group and self._obstacle(rewrite) is None:
                self._try(rewrite, 1)

    # ----------------------------------------------------------------------------------------------------- conclusion

    def conclude(self) -> Verdict:
        """The proof and the race of the whole patch against the script as found, and the verdict they support."""
        if not self.kept:
            return self._nothing_kept()
        patch = self.build(self.kept)
        numerics = self._prove(patch)
        timing = self._final_timing(patch)
        unfit = _unfit(numerics)
        if unfit is not None:
            outcome, reasons = unfit
        else:
            outcome, reasons = (Outcome.INCONCLUSIVE, (UNMEASURED,)) if timing is None else self.judge(timing)
            short = timing is None or (outcome is Outcome.INCONCLUSIVE and self._promising(timing))
            alone = self._first_alone(reasons[0]) if short else None
            if alone is not None:
                return alone
        if outcome is not Outcome.IMPROVED:  # each was faster on top of the others; the whole is not confirmed
            for rewrite in self.kept:
                self.rejected[rewrite.id] = (
                    f"proved alone, but the whole patch is {outcome.value}: {'; '.join(reasons)}"
                )
            self.kept = []
        return self._verdict(outcome, reasons, timing, numerics)

    def _first_alone(self, reason: str) -> Verdict | None:
        """The best proven patch where for some reason, such as too few quads, there is no verdict on the whole one: the
        one measured against the script as found."""
        known = {rewrite.id: rewrite for rewrite in self.rewrites}
        alone = [t for t in self.trials if t.label in known and not t.against and t.outcome is Outcome.IMPROVED]
        if not alone or alone[0].timing is None:
            return None
        own, first = alone[0], known[alone[0].label]
        for other in self.kept:
            if other is not first:
                where = "in place" if other.group is not None and other.group == first.group else "on top"
                self.rejected[other.id] = f"faster {where} of {first.id}, but {reason}"
        self.rejected.pop(first.id, None)
        self.saved[first.id] = _saved_us(alone[0].timing)
        self.kept = [first]
        return self._verdict(own.outcome, own.reasons, own.timing, own.numerics)

    def _final_timing(self, patch: Patch) -> Timing | None:
        """A new race; the one there was where a single rewrite was tried, and decided or no time is left for another.
        None where several were tried and time is up."""
        late = self.lab.seconds_left() < LEAST_RACE_S
        if len(self.tried) == 1 and (late or not self.undecided):
            return self.timings[self.kept[0].id]
        if late:
            return None
        self.say("the whole patch: timing against the script as found")
        nothing = self.build(())
        try:
            timing = self._timed(nothing, patch, self.lab.seconds_left())
        except TrialFailed as error:
            self._record("the whole patch", self.kept, Outcome.FAILED, (str(error),), None, None, ())
            return None
        outcome, reasons = self.judge(timing)
        self._record("the whole patch", self.kept, outcome, reasons, None, timing, ())
        return timing

    def _nothing_kept(self) -> Verdict:
        """Nothing is left: say the least that the trials allow."""
        found = [trial.outcome for trial in self.trials]
        if not found:
            late = any(reason.endswith(OUT_OF_TIME) for reason in self.rejected.values())
            outcome = Outcome.INCONCLUSIVE if late else Outcome.NEUTRAL
            reason = f"{OUT_OF_TIME} before a rewrite was tried" if late else "no rewrite was tried"
            return self._verdict(outcome, (reason,), None, None)
        order = (Outcome.INCONCLUSIVE, Outcome.NEUTRAL, Outcome.REGRESSED, Outcome.WRONG, Outcome.FAILED)
        outcome = next(candidate for candidate in order if candidate in found)
        telling = [trial for trial in self.trials if trial.outcome is outcome]
        reasons = tuple(dict.fromkeys(reason for trial in telling for reason in trial.reasons))
        only = telling[0] if len(self.trials) == 1 else None
        return self._verdict(outcome, reasons, only.timing if only else None, only.numerics if only else None)

    def _verdict(
        self, outcome: Outcome, reasons: Sequence[str], timing: Timing | None, numerics: Numerics | None
    ) -> Verdict:
        return Verdict(
            outcome=outcome,
            reasons=tuple(reasons),
            kept=_ids(self.kept),
            rejected=dict(self.rejected),
            saved_us={name: saved for name, saved in self.saved.items() if name in _ids(self.kept)},
            timing=timing,
            numerics=numerics,
            trials=tuple(self.trials),
        )

    def undecided_of(self, verdict: Verdict) -> list[str]:
        """What is in an improved patch without a verdict of its own, with what was measured of it."""
        return [why for name, why in self.undecided.items() if name in verdict.kept]

    # ------------------------------------------------------------------------------------------------------ baselines

    def baselines(self, verdict: Verdict) -> list[Baseline]:
        """What one line would have bought, as far as time allows; the final race already holds two of the rows."""
        rows: list[Baseline] = []
        found_us: float | None = None
        patch, nothing = self.build(self.kept), self.build(())
        for label, variant, patched in VARIANTS:
            if patched and not self.kept:
                continue
            row = self._measured(label, verdict)
            if row is None and self.lab.seconds_left() < 4 * LEAST_RACE_S:
                row = Baseline(label=label, step_us=None, speedup=None, reason=f"not measured: {OUT_OF_TIME}")
            elif row is None:
                self.say(f"baseline: {label}")
                row = self.lab.baseline(label, variant, patch if patched else nothing)
            if label == AS_FOUND:
                found_us = row.step_us
            if row.step_us is not None and row.speedup is None and found_us is not None:
                row = replace(row, speedup=found_us / row.step_us)
            rows.append(row)
        return rows

    def _measured(self, label: str, verdict: Verdict) -> Baseline | None:
        if verdict.timing is None or not self.kept:
            return None
        if label == AS_FOUND:
            return Baseline(label=label, step_us=statistics.median(verdict.timing.base_step_us), speedup=1.0)
        if label == THE_PATCH:
            step_us = statistics.median(verdict.timing.step_us)
            return Baseline(label=label, step_us=step_us, speedup=verdict.timing.speedup)
        return None


def _ids(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    return tuple(rewrite.id for rewrite in rewrites)


def _unfit(numerics: Numerics) -> tuple[Outcome, tuple[str, ...]] | None:
    """Outcome and reasons of a candidate that need not be timed: its numbers, or it does not run what it is for."""
    if not numerics.ok:
        return Outcome.INCONCLUSIVE if inconclusive(numerics) else Outcome.WRONG, numerics.reasons
    return (Outcome.NEUTRAL, numerics.fallbacks) if numerics.fallbacks else None


def _saved_us(timing: Timing) -> float:
    """Median step time before minus after, in microseconds."""
    return statistics.median(timing.base_step_us) - statistics.median(timing.step_us)
