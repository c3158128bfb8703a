"""The figures and sentences every renderer prints, so that no two of them tell a different story."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from advisor.model import Difference, Metric, Numerics, Report, ReportedFinding, Timing, Utilisation

Tone: TypeAlias = Literal["good", "flat", "bad", "open"]

UNKNOWN = "not known"

# ------------------------------------------------------------------------------------------------------------- figures


def known(value: float | None) -> bool:
    """Whether there is a finite number to print."""
    return value is not None and math.isfinite(value)


def figure(value: float | None) -> str:
    """A bare number in three or four significant digits."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for floor, decimals in ((1000.0, 0), (10.0, 1), (1.0, 2), (0.1, 3), (0.001, 4)):
        if abs(value) >= floor:
            return _decimal(value, decimals)
    return f"{value:.1e}" if value else "0"


def _decimal(value: float, decimals: int) -> str:
    """A number with grouped thousands; one too long to read goes scientific."""
    return f"{value:,.{decimals}f}" if abs(value) < 1e12 else f"{value:.2e}"


def _with_unit(value: float | None, unit: str) -> str:
    return f"{figure(value)} {unit}" if known(value) else UNKNOWN


def metrics(found: Sequence[Metric], most: int = 8) -> str:
    """The first counters with their units and where they come from; empty without any."""
    if not found:
        return ""
    figures = ", ".join(f"{each.name} {figure(each.value)} {each.unit}".rstrip() for each in found[:most])
    more = f", {len(found) - most:,} more" if len(found) > most else ""
    return f"{figures}{more} (from {', '.join(sorted({each.source for each in found}))})"


def milliseconds(value: float | None) -> str:
    """Milliseconds with their unit."""
    return _with_unit(value, "ms")


def microseconds(value: float | None) -> str:
    """Microseconds, printed in milliseconds."""
    return milliseconds(None if value is None else value / 1000)


def duration(us: float | None) -> str:
    """Microseconds in the unit that reads best: us below a millisecond, s from a second on."""
    if us is None or not math.isfinite(us):
        return UNKNOWN
    size = abs(us)
    return f"{figure(us)} us" if size < 1e3 else milliseconds(us / 1e3) if size < 1e6 else seconds(us / 1e6)


def percent(share: float | None) -> str:
    """A share between 0 and 1 as a percentage; one too small for a decimal keeps its digits."""
    if share is None or not math.isfinite(share * 100):
        return UNKNOWN
    return f"{share * 100:.2g} %" if 0 < abs(share) < 0.0005 else f"{_decimal(share * 100, 1)} %"


def ratio(value: float | None) -> str:
    """Old over new as 1.84x, with a third decimal close to 1."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{_decimal(value, 3 if 0.9 <= value < 1.1 else 2)}x"


def ratio_interval(interval: tuple[float, float] | None, confidence: float | None) -> str:
    """The bounds of a speed-up with their confidence."""
    if interval is None or not (known(interval[0]) and known(interval[1])):
        return "interval not known"
    level = f"{confidence * 100:.3g} % interval" if confidence is not None and known(confidence) else "interval"
    return f"{level} {ratio(interval[0])} to {ratio(interval[1])}"


def flops(value: float | None) -> str:
    """A rate of floating point operations."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1e12:
        return f"{figure(value / 1e12)} TFLOP/s"
    return f"{figure(value / 1e9)} GFLOP/s"


def of_peak(use: Utilisation) -> str:
    """The peak that an MFU is a share of, with its source; empty where it is not known."""
    if not known(use.peak_flops):
        return ""
    return f"of {flops(use.peak_flops)}{f' ({use.peak_source})' if use.peak_source else ''}"


def count(value: float | None) -> str:
    """A whole number, such as tokens per second."""
    return _decimal(value, 0) if value is not None and math.isfinite(value) else UNKNOWN


def gib(value: float | None) -> str:
    """GiB with their unit."""
    return _with_unit(value, "GiB")


def seconds(value: float | None) -> str:
    """Seconds with their unit."""
    return _with_unit(value, "s")


def error(value: float | None) -> str:
    """A relative error in scientific notation."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.1e}" if value else "0"


def change(before: str, after: str, *, arrow: str = "->") -> str:
    """Two figures with an arrow; one that is not known on both sides is said once."""
    return before if before == after == UNKNOWN else f"{before} {arrow} {after}"


# ------------------------------------------------------------------------------------------------------------ headline


@dataclass(frozen=True, slots=True)
class Headline:
    """The first line of a report: `lead` carries the answer, `rest` the figures behind it."""

    tone: Tone
    lead: str
    rest: str


_LEADS: Mapping[str, tuple[Tone, str]] = {
    "neutral": ("flat", "no change in speed"),
    "regressed": ("bad", "slower"),
    "wrong": ("bad", "rejected: the rewrites change the numbers"),
    "inconclusive": ("open", "inconclusive: the measurement does not settle it"),
    "failed": ("bad", "failed: the gain could not be verified"),
}


def sayable(report: Report) -> Report:
    """The report without its figures of the patched script where that is wrong: its speed says nothing."""
    if report.outcome not in ("wrong", "failed"):
        return report
    return dataclasses.replace(
        report,
        speedup=None,
        interval=None,
        step_ms_after=None,
        tokens_per_s_after=None,
        mfu_after=None,
        peak_gib_after=None,
        after=None,
        counters_after=(),
        timing=None,
    )


def headline(report: Report) -> Headline:
    """The answer in one line, for every outcome."""
    if report.outcome == "improved":
        lead = f"{ratio(report.speedup)} faster" if known(report.speedup) else "faster, by a factor that is not known"
        return Headline("good", lead, _speed(report, with_ratio=False))
    tone, lead = _LEADS.get(report.outcome, ("open", report.outcome or "no outcome was recorded"))
    return Headline(tone, lead, _speed(report, with_ratio=True))


def _speed(report: Report, *, with_ratio: bool) -> str:
    parts = []
    before, after = milliseconds(report.step_ms_before), milliseconds(report.step_ms_after)
    if known(report.step_ms_after):
        parts.append(f"{change(before, after)} per step")
    elif known(report.step_ms_before):
        parts.append(f"{before} per step as found")
    if known(report.speedup):
        interval = ratio_interval(report.interval, report.confidence)
        parts.append(f"{ratio(report.speedup)}, {interval}" if with_ratio else interval)
    return "; ".join(parts)


# -------------------------------------------------------------------------------------------------------------- safety


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether the numbers still agree: `lead` answers, `compared` and `worst` say what stands behind it."""

    tone: Tone
    lead: str
    compared: str
    worst: str


def proof(numerics: Numerics | None) -> Proof:
    """The numerics proof in words."""
    if numerics is None:
        return Proof("open", "not proved: no numbers were compared", "", "")
    compared = f"{numerics.compared:,} quantities compared with the {numerics.reference} reference"
    difference = worst_difference(numerics.worst)
    worst = "" if difference is None else _worst_sentence(difference)
    if numerics.ok:
        return Proof("good", "safe: the numbers agree", compared, worst)
    if not numerics.compared:
        return Proof("open", "not proved: the numbers were not compared", "", "")
    return Proof("bad", "not safe: the numbers differ", compared, worst)


def _worst_sentence(difference: Difference) -> str:
    limit = f"worst error {error(difference.error)}, limit {error(difference.limit)}"
    return f"{limit}, as found {error(difference.base_error)}: {difference.name}"


def strain(difference: Difference) -> float:
    """The error as a multiple of its limit; infinite where either is not finite or the limit is broken at zero."""
    if not (math.isfinite(difference.error) and math.isfinite(difference.limit)):
        return math.inf
    if difference.limit > 0:
        return difference.error / difference.limit
    return 0.0 if difference.error == 0 else math.inf


def worst_difference(differences: Iterable[Difference]) -> Difference | None:
    """The difference closest to its limit or farthest beyond it."""
    return max(differences, key=lambda each: (not each.ok, strain(each)), default=None)


# ------------------------------------------------------------------------------------------------------------ findings

STATUSES: tuple[str, ...] = ("applied", "rejected", "suggested", "declined")


def by_status(report: Report, status: str) -> tuple[ReportedFinding, ...]:
    """Findings of one status, in the report's order."""
    return tuple(finding for finding in report.findings if finding.status == status)


def statuses(report: Report) -> tuple[str, ...]:
    """The statuses that occur, those the model names first."""
    found = {finding.status for finding in report.findings}
    return (*(each for each in STATUSES if each in found), *sorted(found.difference(STATUSES)))


def estimate(bounds: tuple[float, float] | None) -> str:
    """What a change could save per step."""
    if bounds is None or not (known(bounds[0]) and known(bounds[1])):
        return UNKNOWN
    low, high = figure(bounds[0] / 1000), figure(bounds[1] / 1000)
    return f"{high} ms" if low == high else f"{low} to {high} ms"


def saving(finding: ReportedFinding) -> str:
    """What was measured or may be expected, in a few words."""
    saved = finding.saved_us
    if saved is not None and math.isfinite(saved):
        return f"saves {microseconds(saved)}" if saved >= 0 else f"costs {microseconds(-saved)}"
    if finding.estimate_us is not None:
        return f"up to {microseconds(finding.estimate_us[1])}"
    return ""


# ------------------------------------------------------------------------------------------------------------- timings


def timing(measured: Timing | None) -> str:
    """How a speed-up was measured."""
    if measured is None:
        return "not timed"
    noise = f"A/A control +/- {percent(measured.noise)}" if known(measured.noise) else "no A/A control"
    return f"{measured.quads:,} quads A B B A, {noise}"


# -------------------------------------------------------------------------------------------------------------- orders

_PHASES = ("data", "forward", "backward", "optimizer", "comm", "copy", "other", "idle")
_STAGES = ("capture", "ingest", "correlate", "analyze", "match", "plan", "patch", "verify", "report")


def phases(report: Report) -> tuple[tuple[str, float], ...]:
    """The phases of a step in the order they run, without those that take no time."""
    return tuple((name, value) for name, value in _ordered(report.phases_us, _PHASES) if known(value) and value > 0)


def stages(report: Report) -> tuple[tuple[str, float], ...]:
    """The stages of the run in the order they run."""
    return _ordered(report.stage_seconds, _STAGES)


def _ordered(values: Mapping[str, float], order: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    rank = {name: index for index, name in enumerate(order)}
    return tuple(sorted(values.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


def why_missing(missing: Mapping[str, str], *names: str) -> str:
    """The recorded reason why a figure is missing, looked up under its own name and those it is made of."""
    for name in names:
        for key in sorted(missing):
            if name == key.lower():
                return missing[key]
    for name in names:
        for key in sorted(missing):
            if name in key.lower():
                return missing[key]
    return "no reason was recorded"
