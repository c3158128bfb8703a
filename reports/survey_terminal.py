"""What `advisor analyze` found, for a terminal: how long a step takes, where it goes, what could be recovered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from advisor.measured import Cost, FileProfile, Ranks, RankTime, Survey

from . import lines, survey_ranks, wording
from . import survey_wording as words
from .lines import plain

_LABEL = 15  # cells of the label column
_WIDE = 120  # cells from which a cost stands on one line
_COSTS = 5  # rows of one kind of cost
_FIGURES = (("time", 9), ("share", 8), ("floor", 9), ("recoverable", 12), ("bound", 9), ("tensor", 9))
_OCCUPANCY = 22  # cells of the last column
_INDENT = 2
_RANKS = 16  # ranks up to which each has a row
_ENDS = 5  # rows from each end of more ranks
_FILES = 20
_GAPS = 8
_SENTENCES = 5
_WRAPPED = 4  # most lines of one sentence
_BAR = 24


def render_terminal(survey: Survey, console: Console) -> None:
    """Print the survey; everything in it has passed the redactor."""
    width = max(console.width, 40)
    bar = _bar_of(console.encoding)
    for line in _lines(survey, width, bar):
        line.rstrip()
        lines.print_line(console, line, width)


def _bar_of(encoding: str) -> str:
    """The character that bars are made of."""
    block = "\N{FULL BLOCK}"
    return block if lines.encodable(Text(block), encoding).plain == block else "#"


def _lines(survey: Survey, width: int, bar: str) -> Iterator[Text]:
    if len(survey.files) == 1 and survey.ranks is None:
        yield from _file(survey.files[0], width, bar)
        return
    yield from lines.headline(survey_ranks.headline(survey), width)
    if not survey.files:
        return
    counts = [survey_ranks.statuses(survey)] if survey.ranks is not None else []
    yield Text("  " + plain("; ".join([*counts, survey_ranks.devices(survey)])).rstrip("; "), style="dim")
    yield Text()
    yield from _rank_table(survey.ranks, width) if survey.ranks is not None else _file_table(survey, width)
    yield from _troubled(survey, width)
    shown = survey_ranks.detailed(survey, 1, 2)
    for profile in shown:
        yield Text()
        yield Text(plain(survey_ranks.title(survey, profile)), style="bold underline")
        yield from _file(profile, width, bar)
    if len(survey.files) > len(shown):
        yield Text()
        yield Text("give one file alone to see where its time goes", style="dim")


# ---------------------------------------------------------------------------------------------------------------- file


def _file(profile: FileProfile, width: int, bar: str) -> Iterator[Text]:
    yield from _headline(profile, width)
    about = words.about(profile)
    yield from _sentence(f"{profile.path}: {about}" if about else profile.path, width, style="dim")
    if profile.status == "refused":
        return
    if profile.status != "ok":
        said = f"{profile.status}: {profile.reason or 'no reason was recorded'}"
        yield from _sentence(said, width, style="yellow")
    for section in (_figures, _breakdown, _costs, _end_to_end, _gaps, _notes):
        block = list(section(profile, width, bar))
        yield from [Text(), *block] if block else []


def _headline(profile: FileProfile, width: int) -> Iterator[Text]:
    said = words.headline(profile)
    if profile.status != "refused":
        yield from lines.headline(said, width)
        return
    yield Text(said.lead, style=lines.STYLES[said.tone])
    yield from _sentence(said.rest, width)


def _figures(profile: FileProfile, width: int, _: str) -> Iterator[Text]:
    lead, peak = words.mfu(profile)
    busy = [f"{wording.percent(each.share)} of {each.of}" for each in words.busy(profile)]
    steps = f"{wording.UNKNOWN} ({words.why(profile, 'step times')})"
    idle = f"{wording.UNKNOWN} ({words.why(profile, 'idle time', 'device time')})"
    rows: tuple[tuple[str, Sequence[str]], ...] = (
        ("step", words.step_times(profile) or (steps,)),
        ("GPU busy", busy or (idle,)),
        ("MFU", (f"{lead} {peak}" if wording.known(profile.mfu) else f"{lead} ({peak})", words.other_mfu(profile))),
        ("tensor cores", (words.tensor_time(profile),)),
        ("occupancy", words.occupancy(profile)),
        ("SM efficiency", (words.sm_efficiency(profile),)),
        ("counters", (wording.metrics(profile.counters),)),
    )
    room = width - _LABEL - 2
    for label, values in rows:
        for index, part in enumerate(part for value in values if value for part in _cut(plain(value), room)):
            yield lines.row("" if index else label, part, style="", cells=_LABEL)


def _cut(text: str, room: int) -> list[str]:
    """A sentence in at most a few lines; the last of them takes what is left."""
    parts = lines.wrapped(text, room, room)
    return [*parts[: _WRAPPED - 1], " ".join(parts[_WRAPPED - 1 :])] if len(parts) > _WRAPPED else parts


def _sentence(text: str, width: int, *, style: str = "", indent: int = 2) -> Iterator[Text]:
    first, *more = _cut(plain(text), width - indent - 2)
    yield Text(f"{' ' * indent}{first}", style=style)
    yield from (Text(f"{' ' * (indent + 2)}{part}", style=style) for part in more)


def _breakdown(profile: FileProfile, width: int, bar: str) -> Iterator[Text]:
    parts = words.parts(profile.breakdown)
    if profile.breakdown is None or not parts:
        return
    total = wording.duration(profile.breakdown.length_us)
    yield Text.assemble((words.where(profile), "bold"), f" ({total}{' mean' if words.per_step(profile) else ''})")
    names = [("  " if part.within else "") + plain(part.name)[:40] for part in parts]
    most = max(cell_len(name) for name in names)
    room = min(_BAR, width - most - 30)
    for name, part in zip(names, parts, strict=True):
        length = round(min(1.0, part.share) * room) if room >= 8 else 0
        figures = f"{wording.duration(part.us):>11}  {wording.percent(part.share):>7}"
        style = "dim" if part.within else ""
        yield Text.assemble(f"  {name}{' ' * (most - cell_len(name))}", (figures, style), "  ", (bar * length, "cyan"))


# --------------------------------------------------------------------------------------------------------------- costs


def _costs(profile: FileProfile, width: int, _: str) -> Iterator[Text]:
    groups = words.cost_groups(profile)
    if not groups:
        return
    per = "per step" if words.per_step(profile) else "over the recording"
    room = width - _INDENT - sum(cells for _, cells in _FIGURES) - _OCCUPANCY if width >= _WIDE else 0
    titles = {"share": "of step" if words.per_step(profile) else "of span"}
    header = "".join(_cells(name, titles.get(name, name), cells) for name, cells in _FIGURES)
    for index, (kind, costs) in enumerate(groups):
        yield from [Text()] if index else []
        yield Text.assemble((plain(words.group_title(kind)), "bold"), f", {per}")
        yield Text(f"{' ' * (room + _INDENT)}{header}  occupancy", style="dim")
        for each in costs[:_COSTS]:
            yield from _cost(profile, each, room)
        if rest := words.rest(costs, _COSTS):
            yield Text(f"  {plain(rest)}", style="dim")


def _cost(profile: FileProfile, cost: Cost, room: int) -> Iterator[Text]:
    values = (
        wording.duration(cost.time_us),
        words.cost_share(profile, cost),
        _or_dash(cost.floor_us),
        _or_dash(words.recoverable_us(cost)),
        plain(cost.bound or "-")[:8],
        words.tensor(cost),
    )
    figures = "".join(_cells(name, value, cells) for (name, cells), value in zip(_FIGURES, values, strict=True))
    full = words.cost_occupancy(cost) if cost.occupancy_percent is not None else "-"
    name = plain(cost.title) or "(no name)"
    if room:
        yield Text.assemble("  ", _fitted(name, room), f"{figures}  {plain(full)}")
    else:
        yield Text(f"  {name}")
        yield Text(f"  {figures}  {plain(full)}")
    if cost.counters:
        yield Text(f"      {plain(wording.metrics(cost.counters))}", style="dim")


def _fitted(text: str, cells: int) -> Text:
    """A text in exactly so many cells."""
    fitted = Text(text)
    if cell_len(text) > cells:
        fitted.truncate(cells - 3, overflow="crop")
        fitted.append("...")
    return fitted.append(" " * (cells - cell_len(fitted.plain)))


def _cells(name: str, value: str, cells: int) -> str:
    """A value in its column: words to the left with a gap before them, figures to the right."""
    return f"  {value:<{cells - 2}}" if name in ("bound", "tensor") else f"{value:>{cells}}"


def _or_dash(us: float | None) -> str:
    return wording.duration(us) if wording.known(us) else "-"


def _end_to_end(profile: FileProfile, width: int, _: str) -> Iterator[Text]:
    path = profile.critical_path
    if path is None:
        return
    parts = [f"{name} {wording.duration(us)}" for name, us in words.path_parts(path)]
    if not parts and not path.what_if:
        return
    yield Text.assemble(("end to end", "bold"), f", critical path of {wording.duration(path.length_us)}")
    if parts:
        yield from _sentence(", ".join(parts), width)
    for each in words.what_ifs(profile)[:_SENTENCES]:
        yield from _sentence(words.what_if(profile, each), width)


def _gaps(profile: FileProfile, width: int, _: str) -> Iterator[Text]:
    if not profile.gaps:
        return
    yield Text("what the data does not support", style="bold")
    for each in profile.gaps[:_GAPS]:
        yield from _sentence(words.gap(each), width, style="yellow")
        yield from _sentence(f"collect: {each.collect}", width, indent=6)
    if len(profile.gaps) > _GAPS:
        yield Text(f"  and {len(profile.gaps) - _GAPS:,} more in --json", style="dim")


def _notes(profile: FileProfile, width: int, _: str) -> Iterator[Text]:
    yield from _noted(profile.notes, width)


def _noted(notes: Sequence[str], width: int) -> Iterator[Text]:
    if notes:
        yield Text("notes", style="bold")
    for note in notes[:_SENTENCES]:
        yield from _sentence(note, width)


# --------------------------------------------------------------------------------------------------------------- ranks


def _rank_table(ranks: Ranks, width: int) -> Iterator[Text]:
    names = [name for name, _ in survey_ranks.RANK_COLUMNS]
    yield Text("  " + "rank".rjust(6) + "".join(_rank_cell(name, name) for name in names), style="dim")
    ordered = survey_ranks.by_compute(ranks)
    if len(ordered) <= _RANKS:
        yield from (_rank(each, ranks, width) for each in survey_ranks.in_order(ordered))
    else:
        yield from (_rank(each, ranks, width) for each in ordered[:_ENDS])
        yield Text(f"  ... {len(ordered) - 2 * _ENDS:,} ranks between ...", style="dim")
        yield from (_rank(each, ranks, width) for each in ordered[-_ENDS:])
    for name, values in survey_ranks.spread(ranks.ranks):
        yield Text("  " + name.rjust(6) + _rank_cells(values), style="dim")
    if ranks.missing:
        yield from _sentence(f"not among the files: ranks {survey_ranks.numbers(ranks.missing)}", width, style="yellow")
    yield from (line for note in ranks.notes[:_SENTENCES] for line in _sentence(note, width))


def _rank(each: RankTime, ranks: Ranks, width: int) -> Text:
    name = f"{each.rank:,}" if each.rank is not None else "-"
    row = Text("  " + name.rjust(6) + _rank_cells(survey_ranks.times(each)))
    if each.rank is not None and each.rank == ranks.straggler:
        row.append("  <- straggler", style="bold yellow")
    elif width >= _WIDE:
        row.append(" " * 14)
    return (
        row.append(f"  {lines.column([plain(each.path)], width - _WIDE + 38)[0]}", style="dim")
        if width >= _WIDE
        else row
    )


def _rank_cells(values: Iterable[float | None]) -> str:
    columns: Iterable[tuple[str, Callable[[RankTime], float | None]]] = survey_ranks.RANK_COLUMNS
    return "".join(_rank_cell(name, _or_dash(value)) for (name, _), value in zip(columns, values, strict=True))


def _rank_cell(name: str, value: str) -> str:
    return value.rjust(max(len(name), 9) + 2)


def _file_table(survey: Survey, width: int) -> Iterator[Text]:
    read = [each for each in survey.files if each.status != "refused"]
    if not read:
        return
    header = f"{'steps':>7}{'step':>11}{'GPU busy':>24}{'MFU':>9}"
    paths = lines.column((plain(each.path) for each in read[:_FILES]), max(16, width - 2 - len(header)))
    cells = cell_len(paths[0])
    yield Text("  " + " " * cells + header, style="dim")
    for path, each in zip(paths, read, strict=False):
        step_us = each.device_step_us if wording.known(each.device_step_us) else each.step_mean_us
        shares = words.busy(each)
        busy = f"{wording.percent(shares[0].share)} of {shares[0].short}" if shares else "-"
        mfu = wording.percent(each.mfu) if wording.known(each.mfu) else "-"
        steps = f"{each.steps:,}" if each.steps is not None else "-"
        yield Text(f"  {path}{steps:>7}{_or_dash(step_us):>11}{busy:>24}{mfu:>9}")
    if len(read) > _FILES:
        yield Text(f"  and {len(read) - _FILES:,} more in --json", style="dim")


def _troubled(survey: Survey, width: int) -> Iterator[Text]:
    found = survey_ranks.troubled(survey)
    if not found:
        return
    yield Text()
    yield Text("not read whole", style="bold")
    for each in found[:_FILES]:
        style = lines.STYLES[survey_ranks.STATUS_TONES.get(each.status, "open")].removeprefix("bold ")
        said = f"{each.status}: {each.path}: {each.reason or 'no reason was recorded'}"
        yield from _sentence(said, width, style=style)
    if len(found) > _FILES:
        yield Text(f"  and {len(found) - _FILES:,} more in --json", style="dim")
