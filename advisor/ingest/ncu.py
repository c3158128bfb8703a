"""Reads what Nsight Compute printed: the raw and the details page as CSV, and the details page as text."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from advisor.ingest.lines import TextLines, read_records
from advisor.ingest.ncu_metrics import Reading, measure
from advisor.model import Metric

Extent: TypeAlias = tuple[int, int, int]

ADVICE = "export it with `ncu --import REPORT --csv --page raw`"
# Columns that say which launch it is or on whose machine it ran, not what was measured.
_IDENTITY = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream")
_PLACE = ("Block Size", "Grid Size", "Device", "CC")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcuKernel:
    """One profiled launch.

    `order` counts the launches of the file from 0; it is launch order within a process. `grid` counts blocks and
    `block` threads along x, y and z. `metrics` are our figures (`ncu_metrics.QUANTITIES`, source "ncu"), `missing` says
    why one that was asked of Nsight Compute has no value. `rules` names the rules that spoke, repeats kept; the text
    form of the details page does not name them. `raw` is everything measured as printed: under the metric's name, or
    under "Section: Label" where the details page has only a label.
    """

    order: int
    name: str
    grid: Extent | None
    block: Extent | None
    stream: int | None = None
    device: int | None = None
    compute_capability: str | None = None
    process: int | None = None
    metrics: tuple[Metric, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    raw: Mapping[str, Reading] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """The figure of that name, or None."""
        return next((metric.value for metric in self.metrics if metric.name == name), None)


def read_ncu(path: Path) -> tuple[NcuKernel, ...]:
    """The profiled launches of a file, in its order; the form is told from the content.

    Lines of the profiler ("==PROF==", "==WARNING==") and output of the program may stand around the table. Raises
    ArtifactError for a file without such a table, one cut off in the middle, one with numbers of another locale, a
    binary report and one over the limits of `lines`.
    """
    lines = TextLines(path, ADVICE)
    if path.suffix in (".ncu-rep", ".nsight-cuprof-report"):
        raise lines.refusal("is a binary report")
    said = ""
    for line in lines:
        if line.startswith(("==ERROR==", "==WARNING==")) and not said.startswith("==ERROR=="):
            said = line
        if line.startswith("=="):
            continue
        kernels = _read_from(line, lines)
        if kernels:
            return kernels
        if kernels is not None:
            raise lines.refusal("holds a table of Nsight Compute without a kernel")
    heard = f" (ncu said: {said.strip()[:200]})" if said else ""
    raise lines.refusal(f"holds no table of Nsight Compute{heard}")


def _read_from(line: str, lines: TextLines) -> tuple[NcuKernel, ...] | None:
    """The launches of the table that begins with this line, None when it begins none."""
    launch = _launch(line)
    if launch is not None:
        return _read_text(launch, lines)
    header = _header(line)
    if header is None:
        return None
    if "Dispatch_ID" in header:
        raise lines.refusal("holds counters of an AMD device (rocprof-compute), which this reader does not know")
    quoted = line.lstrip().startswith('"')  # then every record begins with a quote and other lines are program output
    records = read_records(lines, lambda text: not text.startswith("==") and (not quoted or text.startswith('"')))
    return (_read_details if "Metric Name" in header else _read_raw)(header, records, lines)


def _header(line: str) -> list[str] | None:
    if "Kernel Name" not in line and "Kernel_Name" not in line:
        return None
    try:
        cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
    except csv.Error:
        return None
    wanted = {"ID", "Kernel Name"} <= set(cells) or {"Dispatch_ID", "Kernel_Name"} <= set(cells)
    return cells if wanted else None


# ------------------------------------------------------------------------------------------------------------- raw page


class RawRow(Mapping[str, Reading]):
    """The figures of one row of the raw page; columns and units are shared by all rows. An empty cell is absent."""

    __slots__ = ("_columns", "_row", "_units")

    def __init__(self, columns: Mapping[str, int], units: Sequence[str], row: Sequence[str]) -> None:
        self._columns = columns
        self._units = units
        self._row = row

    def __getitem__(self, name: str) -> Reading:
        place = self._columns[name]
        if not self._row[place]:
            raise KeyError(name)
        return Reading(self._row[place], self._units[place])

    def __iter__(self) -> Iterator[str]:
        return (name for name, place in self._columns.items() if self._row[place])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _read_raw(header: list[str], records: Iterator[list[str]], lines: TextLines) -> tuple[NcuKernel, ...]:
    """One record per launch; the record under the header, without an ID, holds the units."""
    places = {name: place for place, name in enumerate(header)}
    columns = {name: place for name, place in places.items() if name not in _IDENTITY and name not in _PLACE}
    kernels: list[NcuKernel] = []
    units: tuple[str, ...] | None = None
    texts: dict[str, str] = {}  # most cells repeat from launch to launch: each text is kept once
    for record in records:
        if record == header:  # the table of a further process
            units = None
            continue
        if len(record) != len(header):
            raise lines.error(f"the record has {len(record)} of {len(header)} fields, so the file is truncated")
        row = tuple(texts.setdefault(cell, cell) for cell in record)
        if not row[places["ID"]]:
            units = row
        elif units is None:
            raise lines.error("the row of units under the header is missing")
        else:
            kernels.append(_kernel(lines, len(kernels), _cells(places, row), RawRow(columns, units, row)))
    return tuple(kernels)


# -------------------------------------------------------------------------------------------------- details page as CSV


def _read_details(header: list[str], records: Iterator[list[str]], lines: TextLines) -> tuple[NcuKernel, ...]:
    """One record per figure or rule of a launch; trailing empty fields of a record are not printed."""
    places = {name: place for place, name in enumerate(header)}
    if "Metric Value" not in places:
        raise lines.error("the column Metric Value is missing")
    launches: dict[tuple[str, str, str], tuple[dict[str, Reading], list[str], Callable[[str], str]]] = {}
    for record in records:
        if record == header:
            continue
        if not places["Metric Value"] < len(record) <= len(header):
            raise lines.error(f"the record has {len(record)} of {len(header)} fields, so the file is truncated")
        cell = _cells(places, record)
        launch = (cell("Process ID"), cell("ID"), cell("Kernel Name"))
        readings, rules, _ = launches.setdefault(launch, ({}, [], cell))
        if name := cell("Metric Name"):
            key = name if "__" in name else f"{_section(cell('Section Name'))}: {name}"
            readings.setdefault(key, Reading(cell("Metric Value"), cell("Metric Unit")))
        if rule := cell("Rule Name"):
            rules.append(rule)
        if lines.cut and not (name or rule):
            raise lines.error("the last record is truncated")
    return tuple(
        _kernel(lines, order, cell, readings, tuple(rules))
        for order, (readings, rules, cell) in enumerate(launches.values())
    )


def _section(name: str) -> str:
    """The section by its present name; older versions print "GPU Speed Of Light"."""
    return "GPU Speed Of Light Throughput" if name == "GPU Speed Of Light" else name


# ------------------------------------------------------------------------------------------------- details page as text


class _Launch(NamedTuple):
    """The line above the sections of one launch."""

    name: str
    grid: Extent
    block: Extent
    stream: int
    device: int | None
    compute_capability: str | None


_WHERE = re.compile(r"(\d{1,9}), Stream (\d{1,9})(?:, Device (\d{1,9}), CC (\d{1,3}\.\d{1,3}))?")
_SHAPE = re.compile(r"\s\((\d{1,10}), (\d{1,10}), (\d{1,10})\)x\((\d{1,10}), (\d{1,10}), (\d{1,10})\)$")


def _launch(line: str) -> _Launch | None:
    """`NAME (x, y, z)x(x, y, z), Context 1, Stream 7, Device 0, CC 8.0`, else None."""
    head, separator, tail = line.rpartition(", Context ")
    where = _WHERE.fullmatch(tail.strip()) if separator else None
    shape = _SHAPE.search(head, max(0, len(head) - 120)) if where else None
    if where is None or shape is None:
        return None
    x, y, z, i, j, k = (int(size) for size in shape.groups())
    _, stream, device, capability = where.groups()
    return _Launch(
        head[: shape.start()].strip(), (x, y, z), (i, j, k), int(stream), int(device) if device else None, capability
    )


def _read_text(first: _Launch, lines: TextLines) -> tuple[NcuKernel, ...]:
    """Sections of tables between rules of dashes: the first rule opens the heading, the second the body."""
    kernels: list[NcuKernel] = []
    launch, section, spans, rules_seen = first, "", [(0, 0)], 0
    readings: dict[str, Reading] = {}
    for line in lines:
        text = line.strip()
        following = _launch(line)
        if following is not None or text.startswith("Section: "):
            if rules_seen in (1, 2):
                raise lines.error("the table above is truncated")
            section, rules_seen = text.removeprefix("Section: "), 0
        if following is not None:
            kernels.append(_text_kernel(lines, len(kernels), launch, readings))
            launch, readings, section = following, {}, ""
        elif section and text and set(text) <= {"-", " "}:
            spans, rules_seen = [match.span() for match in re.finditer("-+", line)], rules_seen + 1
        elif rules_seen == 2 and len(spans) == 3:
            label, unit, value = (line[begin:end].strip() for begin, end in spans)
            readings.setdefault(f"{_section(section)}: {label}" if "__" not in label else label, Reading(value, unit))
    if rules_seen in (1, 2):
        raise lines.error("the last table is truncated")
    kernels.append(_text_kernel(lines, len(kernels), launch, readings))
    return tuple(kernels)


def _text_kernel(lines: TextLines, order: int, launch: _Launch, readings: dict[str, Reading]) -> NcuKernel:
    try:
        metrics, missing = measure(readings)
    except ValueError as error:
        raise lines.error(f"launch {order} above: {error}") from None
    return NcuKernel(order=order, **launch._asdict(), metrics=metrics, missing=missing, raw=readings)


# ----------------------------------------------------------------------------------------------------------- one launch

_EXTENT = re.compile(r"\(\s*(\d{1,10})\s*,\s*(\d{1,10})\s*,\s*(\d{1,10})\s*\)")


def _cells(places: Mapping[str, int], record: Sequence[str]) -> Callable[[str], str]:
    """Access to the cells of a record by column; a column that is not there is empty."""

    def cell(name: str) -> str:
        place = places.get(name)
        return record[place].strip() if place is not None and place < len(record) else ""

    return cell


def _kernel(
    lines: TextLines,
    order: int,
    cell: Callable[[str], str],
    raw: Mapping[str, Reading],
    rules: tuple[str, ...] = (),
) -> NcuKernel:
    """The launch a record names, with the figures of `raw`."""
    try:
        metrics, missing = measure(raw)
        return NcuKernel(
            order=order,
            name=cell("Kernel Name"),
            grid=_extent("Grid Size", cell),
            block=_extent("Block Size", cell),
            stream=_integer("Stream", cell),
            device=_integer("Device", cell),
            compute_capability=cell("CC") or None,
            process=_integer("Process ID", cell),
            metrics=metrics,
            missing=missing,
            rules=rules,
            raw=raw,
        )
    except ValueError as error:
        raise lines.error(f"launch {order}: {error}") from None


def _extent(column: str, cell: Callable[[str], str]) -> Extent | None:
    text = cell(column)
    match = _EXTENT.fullmatch(text)
    if text and match is None:
        raise ValueError(f"{column} is {text[:40]!r}, not (x, y, z)")
    if match is None:
        return None
    x, y, z = (int(size) for size in match.groups())
    return x, y, z


def _integer(column: str, cell: Callable[[str], str]) -> int | None:
    text = cell(column)
    if text and not re.fullmatch(r"\d{1,18}", text):
        raise ValueError(f"{column} is {text[:40]!r}, not a whole number")
    return int(text) if text else None
