"""A report as one HTML file that asks for nothing else: no script, no font, no image from anywhere."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_mark_safe

from advisor.model import Report, ReportedFinding, Trial

from . import wording
from .ladder import ladder
from .untrusted import clip, clip_path, diff_lines

_TEXT = 2_000  # characters of one untrusted text that are shown
_NAME = 200
_PATH = 160
_DIFF_LINES = 400
_DIFF_WIDTH = 400
_REGIONS = 30


def render_html(report: Report) -> str:
    """The whole page as text, to be written in UTF-8."""
    report = wording.sayable(report)
    template = environment().get_template("report.html.j2")
    return template.render(
        report=report,
        headline=wording.headline(report),
        proof=wording.proof(report.numerics),
        ladder=ladder(report),
        applied=wording.by_status(report, "applied"),
        declined=wording.by_status(report, "declined"),
        groups=[(each, wording.by_status(report, each)) for each in wording.statuses(report) if each != "declined"],
        phases=wording.phases(report),
        stages=wording.stages(report),
        regions=_regions(report),
        differences=_differences(report),
        counters=_counters(report),
        trial_axis=_axis(report.trials),
        why=functools.partial(wording.why_missing, report.missing),
    )


@functools.cache
def environment() -> Environment:
    """The templates of every page, with the filters they share; what a template prints is escaped and bounded."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters.update(
        ms=wording.milliseconds,
        us=wording.microseconds,
        percent=wording.percent,
        ratio=wording.ratio,
        flops=wording.flops,
        whole=wording.count,
        gib=wording.gib,
        seconds=wording.seconds,
        error=wording.error,
        estimate=wording.estimate,
        figure=wording.figure,
        known=wording.known,
        strain=wording.strain,
        short=_short,
        clip=clip,
        path=_path,
        place=_place,
        amount=_amount,
        breakable=_breakable,
    )
    environment.tests["known"] = wording.known
    environment.globals.update(
        difference=_difference,
        diff_lines=_diff_lines,
        metrics=wording.metrics,
        change=_change,
        scaled=_scaled,
        ticks=_ticks,
        interval=wording.ratio_interval,
        measured=wording.timing,
        quoted=shlex.quote,
    )
    return environment


def _printable(value: Any) -> Any:
    """What every expression of a template prints: untrusted text becomes visible and bounded, markup stays."""
    if value is None:
        return wording.UNKNOWN
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return clip(value, _TEXT)
    return value


# ------------------------------------------------------------------------------------------------------------- figures


def _short(text: str) -> str:
    return clip(text, _NAME)


def _path(text: str) -> str:
    return clip_path(text, _PATH)


def _breakable(text: str) -> str:
    """A path or dotted name that may break after its separators; its line numbers stay together."""
    escaped = escape(clip(text, _NAME))
    separators = "/@" if "/" in escaped else ".@_"
    name, lines, _ = re.split(r"((?::\d+(?:-\d+)?)?)$", escaped, maxsplit=1, flags=re.ASCII)
    broken = re.sub(f"(?<=[{separators}])(?=[^{separators}])", "<wbr>", name)
    return do_mark_safe(f'{broken}<span class="num">{lines}</span>' if lines else broken)


def _place(finding: ReportedFinding) -> str:
    if finding.path is None:
        return "no single line"
    if finding.line is None:
        return _path(finding.path)
    last = finding.end_line if finding.end_line is not None and finding.end_line > finding.line else None
    return f"{_path(finding.path)}:{finding.line}" + (f"-{last}" if last is not None else "")


def _amount(value: float | str) -> str:
    return value if isinstance(value, str) else wording.figure(value)


def _difference(before: float | None, after: float | None, unit: str, *, factor: float = 1.0) -> str:
    """The signed change between two figures; empty unless both are known."""
    if before is None or after is None or not (wording.known(before) and wording.known(after)):
        return ""
    change = (after - before) * factor
    sign = "+" if change > 0 else "\N{MINUS SIGN}" if change < 0 else ""
    return f"{sign}{wording.figure(abs(change))} {unit}"


def _change(before: str, after: str) -> tuple[str, str]:
    """Two figures as what was and what is; a unit they share is said once, and so is what is not known."""
    if wording.UNKNOWN in (before, after):
        return "", before if after == wording.UNKNOWN else after
    unit = before.rpartition(" ")[2]
    return before.removesuffix(f" {unit}") if after.endswith(f" {unit}") else before, after


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from `low` to `high`."""
    third = (high - low) / 3
    if not 1e-300 < third < math.inf:
        return [low]
    size = 10.0 ** math.floor(math.log10(third))
    step = max((each * size for each in (1, 2, 2.5, 5) if each * size <= third), default=size)
    first = math.ceil(low / step)
    return [index * step for index in range(first, first + 7) if index * step <= high]


def _scaled(value: float | None, low: float, high: float, start: float, stop: float) -> float:
    """`value` on an axis from `low` to `high`, as a coordinate from `start` to `stop`, kept inside."""
    if value is None or not wording.known(value) or high <= low:
        return start
    share = min(1.0, max(0.0, (value - low) / (high - low)))
    return round(start + share * (stop - start), 2)


# --------------------------------------------------------------------------------------------------------------- parts


def _regions(report: Report) -> Mapping[str, Any]:
    """Regions by what they can give back, the most first; those without a floor by their time."""
    ordered = sorted(report.regions, key=lambda each: (-(each.recoverable_us or 0.0), -each.measured_us, each.name))
    finite = [each for each in ordered if wording.known(each.measured_us)]
    return {
        "shown": finite[:_REGIONS],
        "hidden": len(ordered) - len(finite[:_REGIONS]),
        "most_us": max((each.measured_us for each in finite), default=0.0),
    }


def _differences(report: Report) -> tuple[Any, ...]:
    if report.numerics is None:
        return ()
    return tuple(sorted(report.numerics.worst, key=lambda each: (each.ok, -wording.strain(each), each.name)))


def _counters(report: Report) -> list[tuple[str, str, float | None, float | None, str]]:
    """Counters as (name, source, before, after, unit), in the order they were recorded."""
    rows: dict[tuple[str, str, str], list[float | None]] = {}
    for index, metrics in enumerate((report.counters_before, report.counters_after)):
        for metric in metrics:
            rows.setdefault((metric.name, metric.source, metric.unit), [None, None])[index] = metric.value
    return [(name, source, before, after, unit) for (name, source, unit), (before, after) in rows.items()]


def _axis(trials: tuple[Trial, ...]) -> tuple[float, float]:
    """Bounds that hold 1 and the interval of every trial, with some air."""
    bounds = [bound for trial in trials if trial.timing for bound in trial.timing.interval if wording.known(bound)]
    low, high = min([1.0, *bounds]), max([1.0, *bounds])
    air = 0.06 * (high - low) or 0.05
    return low - air, high + air


def _diff_lines(diff: str) -> list[tuple[str, str]]:
    lines = diff_lines(diff, lines=_DIFF_LINES, width=_DIFF_WIDTH)
    return [(kind, do_mark_safe(escape(text))) for kind, text in lines]
