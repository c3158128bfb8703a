"""Reads GPU counters that nvidia-smi printed: the table of `nvidia-smi dmon` and the CSV of `nvidia-smi --query-gpu`.

Source: the manual page of nvidia-smi. Its GPU utilisation, called `sm` in dmon and `utilization.gpu` in a query, is the
"percent of time over the past sample period during which one or more kernels was executing on the GPU"
(nvmlUtilization_t of the NVML API): not the share of SMs that were active, which only `smutil` (GPM) gives.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

from advisor.ingest.gpu_counters import (
    MEMORY_MIB,
    MEMORY_UTILISATION,
    POWER,
    UTILISATION,
    Counter,
    GpuCounters,
    Tally,
    in_order,
    percent,
)
from advisor.ingest.lines import TextLines, read_records

# ------------------------------------------------------------------------------------------------------ nvidia-smi dmon

_MONITOR = re.compile(r"#\s*(?:Date\s+)?(?:Time\s+)?gpu\s")
_MONITOR_COLUMNS: Mapping[str, tuple[Counter, str]] = {
    "pwr": (POWER, "nvml"),
    "sm": (UTILISATION, "nvml"),
    "mem": (MEMORY_UTILISATION, "nvml"),
    "smutil": (percent("sm_active"), "gpm"),
    "gract": (percent("graphics_active"), "gpm"),
    "fp16": (percent("fp16_active"), "gpm"),
}


def is_monitor_header(line: str) -> bool:
    """Whether the line is the first header line of `nvidia-smi dmon`."""
    return _MONITOR.match(line) is not None


def read_monitor(header: str, lines: TextLines) -> tuple[GpuCounters, ...]:
    """A row per GPU and sample under headers that are repeated; the mean over the samples of each GPU.

    Stopping nvidia-smi cuts the last row anywhere: a last row without its line end does not count, here and in a query.
    """
    columns = header.lstrip("# ").split()
    tallies: dict[int, Tally] = {}
    for line in lines:
        if is_monitor_header(line):
            columns = line.lstrip("# ").split()
        cells = line.split()
        if not cells or line.lstrip().startswith("#"):
            continue
        if lines.cut and tallies:
            break
        if len(cells) != len(columns):
            raise lines.error(
                f"the row has {len(cells)} of {len(columns)} values, so the table is damaged or truncated"
            )
        row = dict(zip(columns, cells, strict=True))
        if not re.fullmatch(r"\d{1,6}", row["gpu"]):
            raise lines.error(f"{row['gpu'][:40]!r} is no index of a GPU")
        gpu = int(row["gpu"])
        tally = tallies.setdefault(gpu, Tally(f"GPU {gpu}", gpu))
        for name, (counter, source) in _MONITOR_COLUMNS.items():
            if row.get(name) == "-":
                tally.expect(counter, source)
            elif name in row:
                tally.add(counter, row[name], source)
    return in_order([tally.finish(sum(name in _MONITOR_COLUMNS for name in columns)) for tally in tallies.values()])


# ----------------------------------------------------------------------------------------------- nvidia-smi --query-gpu

# Of several columns for one counter the first that is there is read.
_QUERY_COLUMNS: tuple[tuple[Counter, tuple[str, ...]], ...] = (
    (UTILISATION, ("utilization.gpu",)),
    (MEMORY_UTILISATION, ("utilization.memory",)),
    (POWER, ("power.draw", "power.draw.average", "power.draw.instant")),
    (MEMORY_MIB, ("memory.used",)),
)
_UNITS = {"%": "%", "W": "W", "byte": "MiB"}
_UNKNOWN = re.compile(r"\[?(N/A|Not Supported|Unknown Error|GPU requires reset|Insufficient Permissions)\]?", re.I)


def is_query_header(line: str) -> bool:
    """Whether the line is the header of the CSV of `nvidia-smi --query-gpu`."""
    names = {cell.partition("[")[0].strip() for cell in line.split(",")}
    return any(name in names for _, choices in _QUERY_COLUMNS for name in choices)


def read_query(header: str, lines: TextLines) -> tuple[GpuCounters, ...]:
    """A row per GPU and sample; the mean over the samples of each GPU.

    Without a column that names the GPU (index, uuid, pci.bus_id) more than one row is an error: they can be samples of
    one GPU or GPUs of one sample.
    """
    names = [cell.partition("[")[0].strip() for cell in next(csv.reader([header], skipinitialspace=True))]
    tallies: dict[str, Tally] = {}
    for record in read_records(lines, lambda line: True):
        cells = [cell.strip() for cell in record]
        if [cell.partition("[")[0].strip() for cell in cells] == names:
            continue
        if lines.cut and tallies:
            break
        if len(cells) != len(names):
            raise lines.error(f"the row has {len(cells)} of {len(names)} values, so the table is damaged or truncated")
        row = dict(zip(names, cells, strict=True))
        identity = next((row[name] for name in ("index", "uuid", "gpu_uuid", "pci.bus_id") if name in row), None)
        if identity is None and tallies:
            raise lines.error("rows do not say which GPU they are of; add index to --query-gpu")
        _add_row(tallies.setdefault(identity or "", _tally(row)), row, lines)
    counted = sum(name in names for _, choices in _QUERY_COLUMNS for name in choices)
    return in_order([tally.finish(counted) for tally in tallies.values()])


def _tally(row: Mapping[str, str]) -> Tally:
    index = row.get("index", "")
    gpu = int(index) if re.fullmatch(r"\d{1,6}", index) else None
    return Tally(f"GPU {index}".strip(), gpu, row.get("uuid") or row.get("gpu_uuid"), row.get("name"))


def _add_row(tally: Tally, row: Mapping[str, str], lines: TextLines) -> None:
    for counter, choices in _QUERY_COLUMNS:
        text = _first(row, choices)
        if text is None:
            continue
        value, _, unit = text.partition(" ")
        if _UNKNOWN.fullmatch(text):
            tally.expect(counter, "nvml")
        elif unit in ("", _UNITS[counter.unit]):
            tally.add(counter, value, "nvml")
        else:
            raise lines.error(f"{text[:40]!r} has another unit than {_UNITS[counter.unit]}")


def _first(row: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((row[name] for name in names if name in row), None)
