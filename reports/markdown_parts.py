"""The parts that the Markdown texts share: tables of figures, findings and errors, the patch, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.model import Difference, Environment, Evidence, Hardware, Numerics, Report, ReportedFinding, Timing
from advisor.proposals import Use

from . import wording
from .markdown_fit import Block, few
from .markdown_text import cell, code, diff, folded, table, text

LEVELS: Mapping[str, str] = {
    "exact": "the loss is bit-identical where the program is deterministic",
    "numerics": "the same maths in another rounding order: losses differ in their last digits",
    "precision": "lower precision: losses differ, within the limits below where they were compared",
    "semantics": "the training itself changes: random streams, shapes or checkpoints may differ",
    "suggest": "a suggestion that is never applied",
}
DIFF_LINES = (400, 150, 40)  # of a patch, in its forms from the fullest to the shortest


# ------------------------------------------------------------------------------------------------------------- figures


def uses(report: Report) -> tuple[Use, Use]:
    """What the script as found and the patched script make of the device."""
    peak, source, unit = report.before.peak_flops, report.before.peak_source, report.throughput_unit
    before = Use(
        step_ms=report.step_ms_before,
        tokens_per_s=report.tokens_per_s_before,
        throughput_unit=unit,
        peak_gib=report.peak_gib_before,
        mfu=report.mfu_before,
        peak_flops=peak,
        peak_source=source,
        missing=report.missing,
    )
    after = Use(
        step_ms=report.step_ms_after,
        tokens_per_s=report.tokens_per_s_after,
        throughput_unit=unit,
        peak_gib=report.peak_gib_after,
        mfu=report.mfu_after,
        peak_flops=peak,
        peak_source=source,
    )
    return before, after


def figures(before: Use | None, after: Use | None, heads: tuple[str, str]) -> str:
    """The table of step time, throughput, MFU and memory; what is known on neither side is told below it."""
    every = _figures(before, after)
    rows = [row for row in every if row[1:] != (wording.UNKNOWN, wording.UNKNOWN) or row[0] == "step"]
    shown = table(("", *heads), rows, right=(1, 2))
    reasons = [f"{name}: {cell(reason, 200)}" for name, reason in _unknown(before, after)]
    return f"{shown}\n\nNot known: {'; '.join(reasons)}." if reasons else shown


def _figures(before: Use | None, after: Use | None) -> list[tuple[str, str, str]]:
    unit = "samples/s" if "samples" in {use.throughput_unit for use in (before, after) if use} else "tokens/s"
    was, now = _shown(before), _shown(after)
    return [(name, one, other) for name, one, other in zip(("step", unit, "MFU", "peak memory"), was, now, strict=True)]


def _shown(use: Use | None) -> tuple[str, str, str, str]:
    if use is None:
        return wording.UNKNOWN, wording.UNKNOWN, wording.UNKNOWN, wording.UNKNOWN
    return (
        wording.milliseconds(use.step_ms),
        wording.count(use.tokens_per_s),
        wording.percent(use.mfu),
        wording.gib(use.peak_gib),
    )


_WHY = {"step": ("step",), "MFU": ("mfu", "peak", "flops", "tokens"), "peak memory": ("memory", "peak_gib", "bytes")}


def _unknown(before: Use | None, after: Use | None) -> list[tuple[str, str]]:
    """What is known on neither side, where a reason was recorded."""
    missing = {**(after.missing if after else {}), **(before.missing if before else {})}
    found = []
    for name, was, now in _figures(before, after):
        reason = wording.why_missing(missing, *_WHY.get(name, ("tokens", "throughput")))
        if was == now == wording.UNKNOWN and reason != "no reason was recorded":
            found.append((name, reason))
    return found


def machine(environment: Environment | None, hardware: Hardware | None, use: Use | None) -> str:
    """Device, versions and the peak that MFU is a share of, in one line."""
    parts = [cell(hardware.name)] if hardware is not None else []
    if environment is not None:
        versions = (("torch", environment.torch), ("CUDA", environment.cuda), ("driver", environment.driver))
        parts += [f"{name} {cell(version)}" for name, version in versions if version]
        parts += [f"Python {cell(environment.python)}"]
    if use is not None and wording.known(use.peak_flops):
        source = f" ({cell(use.peak_source)})" if use.peak_source else ""
        parts.append(f"MFU of {wording.flops(use.peak_flops)}{source}")
    return ", ".join(parts) or "the machine is not known"


def speed(timing: Timing | None, *, ratio: bool = True) -> str:
    """The speed-up with its interval and how it was measured; empty where nothing was timed."""
    if timing is None:
        return ""
    interval = wording.ratio_interval(timing.interval, timing.confidence)
    said = f"{interval}, {wording.timing(timing)}"
    return f"{wording.ratio(timing.speedup)}, {said}" if ratio else said


# ------------------------------------------------------------------------------------------------------------ findings


def place(entry: ReportedFinding) -> str:
    """Where a finding is, as a path and lines."""
    if entry.path is None:
        return "-"
    if entry.line is None:
        return code(entry.path)
    last = f"-{entry.end_line}" if entry.end_line is not None and entry.end_line > entry.line else ""
    return code(f"{entry.path}:{entry.line}{last}")


def label(entry: ReportedFinding) -> str:
    """Rule and place of a finding, for a summary between HTML tags."""
    if entry.path is None:
        return text(entry.rule, 80)
    return f"{text(entry.rule, 80)} {text(entry.path if entry.line is None else f'{entry.path}:{entry.line}', 160)}"


def what(entry: ReportedFinding) -> str:
    """What a finding says; an entry without a title says why it was left alone."""
    return cell(entry.title or entry.reason or "")


def rewrites(found: Sequence[ReportedFinding], rows: int) -> str:
    """A table of rewrites with what each saves."""
    shown = []
    for entry in found[:rows]:
        saved = wording.saving(entry) or "not measured alone"
        shown.append((saved, code(entry.rule), place(entry), cell(entry.safety or "", 40), what(entry)))
    return listed(table(("per step", "rule", "where", "level", "what"), shown), len(found), rows)


def left_alone(found: Sequence[ReportedFinding], rows: int) -> str:
    """A table of places with the reason why nothing is rewritten there."""
    shown = [(code(entry.rule), place(entry), _because(entry)) for entry in found[:rows]]
    return listed(table(("rule", "where", "because"), shown), len(found), rows)


def _because(entry: ReportedFinding) -> str:
    said = cell(entry.reason or entry.title)
    if entry.status != "declined" and entry.title and entry.reason:
        said = f"{cell(entry.title)}: {said}"
    if expected := wording.saving(entry):
        said += f" ({expected} per step)"
    return f"{said} (needs {', '.join(cell(each, 60) for each in entry.needs)})" if entry.needs else said


def listed(shown: str, total: int, rows: int) -> str:
    """A table, and how many rows of it are left out."""
    if rows >= total:
        return shown
    return f"{shown}\n\nand {total - rows:,} more" if rows else f"{total:,}, not listed here"


def listing(name: str, weight: int, title: str, found: Sequence[ReportedFinding], *, fold: bool = False) -> Block:
    """A block with a table of places under a heading, or folded."""
    forms = []
    for rows in few(len(found)):
        shown = left_alone(found, rows)
        forms.append(folded(f"{title} ({len(found):,})", shown) if fold else f"### {title}\n\n{shown}")
    return Block(name=name, weight=weight, forms=(*forms, ""))


def patches(name: str, weight: int, title: str, patch: str) -> Block:
    """A folded block with a diff, shortened line by line before it goes."""
    count = patch.count("\n") + (not patch.endswith("\n"))
    forms = [folded(f"{title} ({count:,} lines)", diff(patch, lines=most)) for most in DIFF_LINES]
    return Block(name=name, weight=weight, forms=(*forms, f"{title}: {count:,} lines, not shown here", ""))


def evidence(found: Sequence[Evidence]) -> str:
    """Measured facts as a list."""
    lines = []
    for fact in found:
        value = cell(fact.value) if isinstance(fact.value, str) else wording.figure(fact.value)
        lines.append(f"- {text(fact.what, 300)}: {value} {text(fact.unit, 60)}".rstrip())
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------------- proofs


def proof(numerics: Numerics | None) -> str:
    """Whether the numbers agree, in a sentence."""
    said = wording.proof(numerics)
    return ": ".join(text(part, 300) for part in (said.lead, said.compared) if part)


def errors(worst: Sequence[Difference], rows: int) -> str:
    """A table of relative errors against the reference, those closest to their limit first."""
    ordered = sorted(worst, key=lambda each: (each.ok, -wording.strain(each), each.name))
    shown = [
        (
            cell(each.name, 120),
            wording.error(each.base_error),
            wording.error(each.error),
            wording.error(each.limit),
            "yes" if each.ok else "**no**",
        )
        for each in ordered[:rows]
    ]
    head = ("quantity", "error as found", "error of the patch", "limit", "within")
    return listed(table(head, shown, right=(1, 2, 3)), len(ordered), rows)


def operators(numerics: Numerics | None, most: int = 40) -> str:
    """The operators that run in a step no more, and those that run instead; empty where that was not recorded."""
    if numerics is None:
        return ""
    found = (("gone", numerics.operators_gone), ("new", numerics.operators_new))
    lines = []
    for name, names in found:
        more = f" and {len(names) - most:,} more" if len(names) > most else ""
        lines += [f"- {name}: {', '.join(code(each, 80) for each in names[:most])}{more}"] if names else []
    return "\n".join(lines)


def bullets(found: Sequence[str], most: int = 20) -> str:
    """Sentences as a list; how many are left out is its last line."""
    lines = [f"- {text(each, 400)}" for each in found[:most]]
    return "\n".join([*lines, *([f"- and {len(found) - most:,} more"] if len(found) > most else [])])
