"""Stage 8, first half: turn what the other stages found into the one Report the renderers see."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from advisor.analyze import after
from advisor.errors import RuleError
from advisor.model import (
    Baseline,
    Decline,
    Evidence,
    Finding,
    Outcome,
    Patch,
    Profile,
    Report,
    ReportedEdit,
    ReportedFinding,
    Rewrite,
    Span,
    Utilisation,
    Verdict,
)
from advisor.plan import Plan

SCHEMA = 1
MOST_REGIONS = 24


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything a run produced."""

    run: str
    script: str
    profile: Profile
    declines: tuple[Decline, ...]
    plan: Plan
    patch: Patch
    diffs: Mapping[str, str]  # id of a rewrite -> its own diff
    verdict: Verdict
    safety: Mapping[str, str]  # rule id -> safety level
    seconds: Mapping[str, float]
    errors: Sequence[RuleError] = ()


def report_of(results: Results) -> Report:
    """The report; what is not known is None."""
    profile, verdict = results.profile, results.verdict
    timing = verdict.timing
    before_us = median_of(timing.base_step_us) if timing else profile.median_step_us()
    after_us = median_of(timing.step_us) if timing else None
    improved = verdict.outcome is Outcome.IMPROVED
    before = _at(profile, before_us)
    later = after(before, before_us / after_us) if before_us and after_us and improved else None
    tokens = profile.tokens_per_step
    return Report(
        schema=SCHEMA,
        run=results.run,
        script=results.script,
        outcome=verdict.outcome.value,
        reasons=verdict.reasons,
        speedup=timing.speedup if timing else None,
        interval=timing.interval if timing else None,
        confidence=timing.confidence if timing else None,
        mfu_before=before.mfu,
        mfu_after=later.mfu if later else None,
        mfu_definition=before.definition,
        step_ms_before=_ms(before_us),
        step_ms_after=_ms(after_us) if improved else None,
        tokens_per_s_before=_rate(tokens, before_us),
        tokens_per_s_after=_rate(tokens, after_us) if improved else None,
        throughput_unit="samples" if (profile.tokens_source or "").startswith("samples") else "tokens",
        peak_gib_before=_gib(timing.base_peak_bytes if timing else profile.peak_bytes),
        peak_gib_after=_gib(timing.peak_bytes) if timing else None,
        environment=profile.environment,
        hardware=profile.hardware,
        before=before,
        after=later,
        phases_us=_phases(profile),
        regions=profile.regions[:MOST_REGIONS],
        findings=tuple(_findings(results)),
        baselines=tuple(_with_mfu(row, before, before_us) for row in verdict.baselines),
        timing=timing,
        numerics=verdict.numerics,
        trials=verdict.trials,
        counters_before=verdict.counters_before or profile.counters,
        counters_after=verdict.counters_after,
        diff=results.patch.diff,
        stage_seconds=results.seconds,
        linked_share=profile.linked_share,
        missing=profile.missing,
        notes=profile.notes,
        rule_errors=tuple(str(error) for error in results.errors),
    )


def _with_mfu(row: Baseline, before: Utilisation, before_us: float | None) -> Baseline:
    """A baseline does the model's arithmetic in its own time."""
    if before.mfu is None or not before_us or not row.step_us:
        return row
    return replace(row, mfu=before.mfu * before_us / row.step_us)


def _at(profile: Profile, step_us: float | None) -> Utilisation:
    """Utilisation at the step time of the verdict's own base arm, so that before and after are one measurement."""
    median = profile.median_step_us()
    if step_us is None or median is None:
        return profile.utilisation
    scaled = after(profile.utilisation, median / step_us)
    return Utilisation(**{f: getattr(scaled, f) for f in Utilisation.__slots__} | {"busy": profile.utilisation.busy})


def _findings(results: Results) -> list[ReportedFinding]:
    verdict = results.verdict
    rewrites = results.plan.rewrites
    found = [_rewritten(results, rewrite) for rewrite in rewrites if _speaks(rewrite, rewrites, verdict)]
    found += [_disproved(results, rewrite, why) for rewrite, why in results.plan.rejected if rewrite.form is None]
    found += [_reported(results, finding, "suggested", reason) for finding, reason in results.plan.suggestions]
    order = {"applied": 0, "rejected": 1, "suggested": 2}
    found.sort(key=lambda f: (order[f.status], -(f.saved_us or 0.0), -(f.estimate_us or (0, 0))[1]))
    assert set(verdict.kept) <= {r.id for r in results.plan.rewrites}
    return found + [_declined(results, decline) for decline in results.declines]


def _rewritten(results: Results, rewrite: Rewrite) -> ReportedFinding:
    verdict = results.verdict
    kept = rewrite.id in verdict.kept
    reason = None if kept else verdict.rejected.get(rewrite.id, "it was not tried: the time budget was used up")
    tried = rewrite.id in verdict.rejected and not (reason or "").startswith("not tried")
    status = "applied" if kept else ("rejected" if tried else "suggested")
    return _reported(
        results,
        replace(
            rewrite.finding,
            evidence=(*rewrite.finding.evidence, *_compared(results, rewrite), *_other_forms(results, rewrite)),
        ),
        status,
        reason,
        title=rewrite.title,
        saved_us=verdict.saved_us.get(rewrite.id) if kept else None,
        diff=results.diffs.get(rewrite.id, ""),
        safety=rewrite.safety.value,
        edits=rewrite.edits,
    )


def _speaks(rewrite: Rewrite, rewrites: Sequence[Rewrite], verdict: Verdict) -> bool:
    """Whether a rewrite stands for its finding in the report: the form that is kept, else the first."""
    forms = [other for other in rewrites if _same_finding(other, rewrite)]
    return rewrite is next((other for other in forms if other.id in verdict.kept), forms[0])


def _same_finding(one: Rewrite, other: Rewrite) -> bool:
    return (one.finding.rule, one.finding.span) == (other.finding.rule, other.finding.span)


def _other_forms(results: Results, rewrite: Rewrite) -> tuple[Evidence, ...]:
    """What became of the other ways to realise a finding."""
    reasons = {**results.verdict.rejected, **{other.id: why for other, why in results.plan.rejected}}
    others = [*results.plan.rewrites, *(other for other, _ in results.plan.rejected)]
    return tuple(
        Evidence(what=f"instead: {other.title}", value=reasons[other.id], unit="")
        for other in others
        if other is not rewrite and _same_finding(other, rewrite) and other.id in reasons
    )


def _disproved(results: Results, rewrite: Rewrite, reason: str) -> ReportedFinding:
    """A rewrite whose region, run alone, is not the same function: no script ran with it."""
    return _reported(
        results,
        replace(rewrite.finding, evidence=(*rewrite.finding.evidence, *_compared(results, rewrite))),
        "rejected",
        f"compared alone, the replacement is not proved to be the same function: {reason}",
        title=rewrite.title,
        diff=results.diffs.get(rewrite.id, ""),
        safety=rewrite.safety.value,
        edits=rewrite.edits,
    )


def _compared(results: Results, rewrite: Rewrite) -> tuple[Evidence, ...]:
    """What the region proof compared, for the page of the finding."""
    proof = results.plan.proofs.get(rewrite.id)
    if proof is None:
        return ()
    worst = max((d.error / d.limit for d in proof.worst if d.limit), default=None)
    found = [
        Evidence(what="inputs on which region and replacement were compared", value=proof.compared, unit="draws"),
        Evidence(what="distinct regions compared", value=proof.regions, unit="regions"),
        Evidence(what="compared in", value=", ".join(proof.dtypes), unit=""),
    ]
    if worst is not None and math.isfinite(worst):
        what = "largest error, as a share of what is allowed"
        found.append(Evidence(what=what, value=round(worst, 3), unit="share"))
    found += [Evidence(what="not compared", value=why, unit="") for why in proof.skipped]
    return tuple(found) if proof.compared else ()


def _reported(
    results: Results,
    finding: Finding,
    status: str,
    reason: str | None,
    *,
    title: str | None = None,
    saved_us: float | None = None,
    diff: str = "",
    safety: str | None = None,
    edits: Sequence[tuple[Span, str]] = (),
) -> ReportedFinding:
    safety = safety or results.safety.get(finding.rule)
    return reported(finding, status, reason, safety, title=title, saved_us=saved_us, diff=diff, edits=edits)


def reported(
    finding: Finding,
    status: str,
    reason: str | None,
    safety: str | None,
    *,
    title: str | None = None,
    saved_us: float | None = None,
    diff: str = "",
    edits: Sequence[tuple[Span, str]] = (),
) -> ReportedFinding:
    """A finding as documents show it; `title` is that of its rewrite, `edits` are what the rewrite does."""
    return ReportedFinding(
        rule=finding.rule,
        status=status,
        title=finding.message if title is None else f"{finding.message}: {title}",
        reason=reason,
        estimate_us=(finding.estimate.low_us, finding.estimate.high_us),
        saved_us=saved_us,
        safety=safety,
        evidence=finding.evidence,
        diff=diff,
        fingerprint=finding.fingerprint,
        edits=tuple(_edit(span, text) for span, text in edits),
        **placed(finding.span),
    )


def placed(span: Span | None) -> dict[str, Any]:
    """The fields of an entry that say where it is; an end that was not recorded is on the first line."""
    if span is None:
        return {"path": None, "line": None, "end_line": None, "column": None, "end_column": None}
    return {
        "path": span.path,
        "line": span.line,
        "end_line": span.end_line if span.end_line is not None else span.line,
        "column": span.column if span.end_column is not None else None,
        "end_column": span.end_column,
    }


def _edit(span: Span, text: str) -> ReportedEdit:
    assert span.end_line is not None and span.end_column is not None
    return ReportedEdit(
        path=span.path,
        line=span.line,
        column=span.column,
        end_line=span.end_line,
        end_column=span.end_column,
        text=text,
    )


def _declined(results: Results, decline: Decline) -> ReportedFinding:
    return declined(decline, results.safety.get(decline.rule))


def declined(decline: Decline, safety: str | None) -> ReportedFinding:
    """A decline as documents show it."""
    return ReportedFinding(
        rule=decline.rule,
        status="declined",
        title=decline.reason,
        reason=decline.reason,
        estimate_us=None,
        saved_us=None,
        safety=safety,
        needs=decline.needs,
        **placed(decline.span),
    )


def exact(found: tuple[ReportedFinding, ...], redacted: tuple[ReportedFinding, ...]) -> tuple[ReportedFinding, ...]:
    """The redacted entries, without edits that the redactor changed: those would write its marks into the source."""
    return tuple(
        after if after.edits == before.edits else replace(after, edits=())
        for before, after in zip(found, redacted, strict=True)
    )


def _phases(profile: Profile) -> dict[str, float]:
    """Mean of the profiled steps' phases."""
    names = [name for step in profile.steps for name in step.phases_us]
    count = len(profile.steps)
    return {n: sum(s.phases_us.get(n, 0.0) for s in profile.steps) / count for n in dict.fromkeys(names)}


def median_of(values: Sequence[float]) -> float | None:
    """Median of block step times, None without any."""
    return statistics.median(values) if values else None


def _ms(value_us: float | None) -> float | None:
    return None if value_us is None else value_us / 1e3


def _rate(tokens: int | None, step_us: float | None) -> float | None:
    return tokens / (step_us / 1e6) if tokens and step_us else None


def _gib(count: int | None) -> float | None:
    return None if count is None else count / 2**30


def plain(value: Any) -> Any:
    """A noun as JSON-ready dicts and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value
