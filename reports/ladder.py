"""The ladder from GPU utilisation to MFU: the same run seen by figures that mislead less and less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from advisor.model import Metric, Report, Utilisation

from . import wording


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One figure of the ladder as a share of its own maximum; `reason` says why it is not known."""

    name: str
    meaning: str
    before: float | None
    after: float | None
    reason: str | None = None


_COUNTERS = (
    ("SM active", ("sm_active", "sm_util"), "cycles in which a multiprocessor holds at least one warp"),
    ("Occupancy", ("sm_occupancy", "occupancy"), "resident warps of the most possible; good kernels can be low here"),
    ("Tensor active", ("tensor_active", "any_tensor_util", "tensor_util"), "cycles in which the tensor cores work"),
    ("DRAM active", ("dram_active", "dram_bw_util"), "cycles in which device memory is read or written"),
)


def ladder(report: Report) -> tuple[Rung, ...]:
    """The rungs from the most flattering figure to the headline figure."""
    before, after = report.before, report.after or Utilisation()
    busy = Rung(
        name="GPU busy",
        meaning="share of the step in which any kernel runs: what nvidia-smi calls GPU utilisation",
        before=before.busy,
        after=after.busy,
        reason=_reason(report, before.busy, "busy", "kernels", "kineto"),
    )
    return (busy, *_counters(report), *_rates(report, before, after))


def counters(before: Iterable[Metric], after: Iterable[Metric] = ()) -> Iterable[Rung]:
    """The rungs that hardware counters give: what the multiprocessors and tensor cores really do."""
    before, after = tuple(before), tuple(after)
    for name, aliases, meaning in _COUNTERS:
        was, now = _share(before, aliases), _share(after, aliases)
        if was is not None or now is not None:
            yield Rung(name=name, meaning=meaning, before=was, after=now)


def _counters(report: Report) -> Iterable[Rung]:
    yield from counters(report.counters_before, report.counters_after)
    if not (report.counters_before or report.counters_after):
        reason = _reason(report, None, "counters", "gpm", "dcgm", "nvml")
        meaning = "what the multiprocessors and tensor cores really do"
        yield Rung(name="Hardware counters", meaning=meaning, before=None, after=None, reason=reason)


def _rates(report: Report, before: Utilisation, after: Utilisation) -> Iterable[Rung]:
    yield Rung(
        name="Share of the measured matmul rate",
        meaning="model FLOP/s over the matmul rate that this device reached in this run: the achievable ceiling",
        before=before.of_measured,
        after=after.of_measured,
        reason=_reason(report, before.of_measured, "of_measured", "measured_flops", "calibration", "flops"),
    )
    yield Rung(
        name="MFU of its own peaks",
        meaning="model FLOP/s over the peak of the data type that each operator ran in",
        before=before.mfu_own_peak,
        after=after.mfu_own_peak,
        reason=_reason(report, before.mfu_own_peak, "mfu_own_peak", "mfu", "peak", "flops"),
    )
    if before.mfu_causal is not None or after.mfu_causal is not None:
        meaning = "MFU that counts only the half of causal attention that is needed"
        yield Rung(name="MFU, causal", meaning=meaning, before=before.mfu_causal, after=after.mfu_causal)
    yield Rung(
        name="MFU",
        meaning=_definition(report),
        before=report.mfu_before,
        after=report.mfu_after,
        reason=_reason(report, report.mfu_before, "mfu", "peak", "flops", "tokens"),
    )


def _definition(report: Report) -> str:
    return definition(report.mfu_definition or report.before.definition, report.before)


def definition(text: str, use: Utilisation) -> str:
    """What an MFU counts and the peak it is a share of."""
    text, of_peak = text or "model FLOP/s over the peak", wording.of_peak(use).removeprefix("of ")
    return f"{text}; peak {of_peak}" if of_peak else text


def _reason(report: Report, value: float | None, *names: str) -> str | None:
    return None if wording.known(value) else wording.why_missing(report.missing, *names)


def _share(metrics: Iterable[Metric], aliases: tuple[str, ...]) -> float | None:
    """A counter as a share between 0 and 1."""
    for metric in metrics:
        if metric.name.lower().replace(" ", "_").replace("-", "_") in aliases and wording.known(metric.value):
            return metric.value / 100 if metric.unit.strip().startswith(("%", "percent")) else metric.value
    return None
