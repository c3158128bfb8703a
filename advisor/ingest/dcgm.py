"""Reads GPU counters that DCGM reported: dcgm-exporter's Prometheus text and the table of `dcgmi dmon`.

Sources: fields, numbers and definitions in dcgm_fields.h, the short names of `dcgmi dmon` in dcgm_fields.cpp and the
form of its table in dcgmi/DeviceMonitor.cpp of DCGM 2.1 to 4.6; series and labels in dcgm-exporter's templates; the
text format in "Exposition formats" of the Prometheus documentation. In DCGM's words sm_active is "the ratio of cycles
an SM has at least 1 warp assigned", sm_occupancy "the ratio of number of warps resident on an SM" to the maximum "per
elapsed cycle", tensor_active "the ratio of cycles the any tensor pipe is active (off the peak sustained elapsed
cycles)", dram_active "the ratio of cycles the device memory interface is active sending or receiving data".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from advisor.ingest.gpu_counters import (
    MEMORY_BYTES,
    MEMORY_MIB,
    MEMORY_UTILISATION,
    POWER,
    UTILISATION,
    Counter,
    GpuCounters,
    Tally,
    in_order,
    ratio,
)
from advisor.ingest.lines import TextLines
from advisor.ingest.nvidia_smi import is_monitor_header, is_query_header, read_monitor, read_query

ADVICE = (
    "give the text of dcgm-exporter's /metrics, of `dcgmi dmon`, of `nvidia-smi dmon` or of `nvidia-smi --query-gpu`"
)
SOURCE = "dcgm"


class _Field(NamedTuple):
    """One DCGM field: the series that carry it, older name first, its column in dcgmi dmon, and our counter."""

    series: tuple[str, ...]
    column: str
    counter: Counter


# DCGM 4.6 renamed the profiling fields to _UTIL_RATIO and keeps the old names as aliases; dcgm-exporter prints the name
# that its configuration uses.
_FIELDS: tuple[_Field, ...] = (
    _Field(("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"), "SMACT", ratio("sm_active")),
    _Field(("DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"), "SMOCC", ratio("sm_occupancy")),
    _Field(("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"), "TENSO", ratio("tensor_active")),
    _Field(("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"), "DRAMA", ratio("dram_active")),
    _Field(("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_FP32_UTIL_RATIO"), "FP32A", ratio("fp32_active")),
    _Field(("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "DCGM_FI_PROF_FP16_UTIL_RATIO"), "FP16A", ratio("fp16_active")),
    _Field(("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_FP64_UTIL_RATIO"), "FP64A", ratio("fp64_active")),
    _Field(("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"), "GRACT", ratio("graphics_active")),
    _Field(("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO"), "GPUTL", UTILISATION),
    _Field(("DCGM_FI_DEV_MEM_COPY_UTIL",), "MCUTL", MEMORY_UTILISATION),
    _Field(("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS"), "POWER", POWER),
    _Field(("DCGM_FI_DEV_FB_USED",), "FBUSD", MEMORY_MIB),
    _Field(("DCGM_FI_DEV_FB_USED_BYTES",), "", MEMORY_BYTES),
)
_COLUMNS: Mapping[str, Counter] = {field.column: field.counter for field in _FIELDS if field.column}
# Field 203 in whole percent up to DCGM 4.6, a ratio of its own (field 1613) from 4.7 on.
_TWO_MEANINGS = "DCGM_FI_DEV_GPU_UTIL_RATIO"


def read_counters(path: Path) -> tuple[GpuCounters, ...]:
    """The counters of every GPU a file speaks of; the form is told from the content.

    Raises ArtifactError for a file of no known form, one without a GPU, one cut off within a line, and one over the
    limits of `lines`.
    """
    lines = TextLines(path, ADVICE)
    for line in lines:
        if re.match(r"#\s*Entity\b", line):
            found = _read_monitor(line, lines)
        elif is_monitor_header(line):
            found = read_monitor(line, lines)
        elif is_query_header(line):
            found = read_query(line, lines)
        elif line.startswith(("DCGM_FI_", "# HELP DCGM_", "# TYPE DCGM_")):
            found = _read_prometheus(line, lines)
        else:
            continue
        if not found:
            raise lines.refusal("has counters of no GPU")
        return found
    raise lines.refusal("holds no counters of a GPU")


# ------------------------------------------------------------------------------------------------------ Prometheus text


class _Value(NamedTuple):
    timestamp: float | None
    text: str


class _Device:
    """The newest value of each series of one GPU."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.values: dict[str, _Value] = {}

    def keep(self, series: str, value: _Value) -> None:
        """Of two values the one with the newer timestamp stays, without timestamps the one further down."""
        known = self.values.get(series)
        if known is None or known.timestamp is None or value.timestamp is None or value.timestamp >= known.timestamp:
            self.values[series] = value


_NAME = re.compile(r"(\w+)\s*(\{?)")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?\s*')
_REST = re.compile(r"\s*([^\s#{}]+)(?:\s+(-?\d{1,20}(?:\.\d{1,20})?))?\s*(?:#.*)?")
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}


def _read_prometheus(first: str, lines: TextLines) -> tuple[GpuCounters, ...]:
    """One or several scrapes, one after the other: a later value replaces an earlier one."""
    devices: dict[tuple[str, str], _Device] = {}
    line: str | None = first
    while line is not None:
        if line.startswith("DCGM_FI_"):
            series, labels, value = _sample(line, lines)
            gpu, uuid = labels.get("gpu"), labels.get("UUID") or labels.get("uuid")
            if gpu or uuid:  # a switch, a link and a CPU have neither
                host = labels.get("Hostname") or labels.get("hostname") or ""
                identity = uuid or f"{host}/{gpu}", labels.get("GPU_I_ID", "")
                devices.setdefault(identity, _Device(labels)).keep(series, value)
        line = next(lines, None)
    return in_order([_device(device) for device in devices.values()])


def _sample(line: str, lines: TextLines) -> tuple[str, dict[str, str], _Value]:
    """`NAME{label="value",...} VALUE [TIMESTAMP]` and a line end, which the format demands of the last line too."""
    labels: dict[str, str] = {}
    head = _NAME.match(line)
    if head is not None:
        place = head.end()
        while head[2] and (label := _LABEL.match(line, place)) is not None:
            labels[label[1]] = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), label[2])
            place = label.end()
        closed = line[place : place + 1] == "}"
        rest = _REST.fullmatch(line.rstrip(), place + closed) if closed == bool(head[2]) else None
        if rest is not None and not lines.cut:
            return head[1], labels, _Value(float(rest[2]) if rest[2] else None, rest[1])
    raise lines.error("the series is damaged or truncated")


def _device(device: _Device) -> GpuCounters:
    labels = device.labels
    index = labels.get("gpu", "")
    gpu = int(index) if re.fullmatch(r"\d{1,6}", index) else None
    instance = labels.get("GPU_I_ID")
    entity = f"GPU {index}" + (f" instance {instance}" if instance else "")
    uuid, model = labels.get("UUID") or labels.get("uuid"), labels.get("modelName")
    tally = Tally(entity.strip(), gpu, uuid or None, model or None)
    for field in _FIELDS:
        for series in field.series:
            value = device.values.get(series)
            if value is not None:
                _count(tally, series, field.counter, value.text)
                break
    return tally.finish(len(device.values))


def _count(tally: Tally, series: str, counter: Counter, text: str) -> None:
    """One value of the Prometheus text; the exporter prints whole numbers without and ratios with decimals."""
    if series == _TWO_MEANINGS and text == "1":
        tally.reject(counter, f"1 in {series} is 1 % before DCGM 4.7 and 100 % from then on", SOURCE)
    elif series == _TWO_MEANINGS and "." in text:
        tally.add(ratio(counter.name), text, SOURCE)
    else:
        tally.add(counter, text, SOURCE)


# ----------------------------------------------------------------------------------------------------------- dcgmi dmon

_ROW = re.compile(r"\s*(GPU(?:-I|-CI)?)\s+(\d{1,6})(?=\s)")
_CELL = re.compile(r"\S+")


def _read_monitor(header: str, lines: TextLines) -> tuple[GpuCounters, ...]:
    """A row per entity and sample under a header that is repeated; the mean over the samples of each entity.

    Stopping dcgmi cuts the last row anywhere, within a number too: a last row without its line end does not count.
    """
    columns = _columns(header)
    seen = set(columns.values())
    tallies: dict[str, Tally] = {}
    for line in lines:
        if re.match(r"#\s*Entity\b", line):
            columns = _columns(line)
            seen |= set(columns.values())
            continue
        row = _ROW.match(line)
        if row is None:  # the row of units, a switch, a CPU, a message
            continue
        if lines.cut and tallies:
            break
        kind, number = row.groups()
        entity = f"{kind} {number}"
        tally = tallies.setdefault(entity, Tally(entity, int(number) if kind == "GPU" else None))
        for name, text in _cells(line, row.end(), columns, lines):
            counter = _COLUMNS.get(name)
            if counter is not None and text == "N/A":
                tally.expect(counter, SOURCE)
            elif counter is not None:
                tally.add(counter, text, SOURCE)
    return in_order([tally.finish(len(seen)) for tally in tallies.values()])


def _columns(header: str) -> dict[int, str]:
    """Where each column begins, in the order of the line."""
    names = re.sub(r"#\s*Entity", lambda match: " " * len(match[0]), header, count=1)
    return {match.start(): match[0] for match in _CELL.finditer(names)}


def _cells(line: str, begin: int, columns: Mapping[int, str], lines: TextLines) -> list[tuple[str, str]]:
    """The cells of a row with their columns; where a field without a value leaves a gap, by where they begin."""
    texts = {match.start(): match[0] for match in _CELL.finditer(line, begin)}
    if len(texts) == len(columns):
        return list(zip(columns.values(), texts.values(), strict=True))
    if not texts.keys() <= columns.keys() or len(line.rstrip("\n")) < max(columns):  # rows are padded to full width
        raise lines.error(f"the row has {len(texts)} of {len(columns)} values, so the table is damaged or truncated")
    return [(columns[start], text) for start, text in texts.items()]
