"""What several files say together: how many were read, and how the ranks of one job share their time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from advisor.measured import FileProfile, Ranks, RankTime, Survey

from . import survey_wording
from .wording import Headline, Tone, known, percent

STATUS_TONES: Mapping[str, Tone] = {"ok": "good", "partial": "open", "refused": "bad"}


def headline(survey: Survey) -> Headline:
    """The answer in one line for any number of files."""
    if not survey.files:
        return Headline("open", "no file was analyzed", "give a trace, a folder of ranks or a run folder")
    if len(survey.files) == 1:
        return survey_wording.headline(survey.files[0])
    ranks = survey.ranks
    tone: Tone = "flat" if all(each.status == "ok" for each in survey.files) else "open"
    if ranks is None:
        return Headline(tone, f"{len(survey.files):,} files", statuses(survey))
    lead = f"{len(ranks.ranks):,} ranks"
    if ranks.straggler is not None:
        lead = f"{lead}, the others wait for rank {ranks.straggler:,}"
    if not known(ranks.imbalance):
        return Headline(tone, lead, "")
    return Headline(tone, lead, f"the slowest computes {percent(ranks.imbalance)} longer than the mean")


def statuses(survey: Survey) -> str:
    """How many files were read, in words."""
    counts = dict.fromkeys(STATUS_TONES, 0)
    for each in survey.files:
        counts[each.status] = counts.get(each.status, 0) + 1
    return ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)


def devices(survey: Survey) -> str:
    """The devices that the files name, with how many files name each where they differ."""
    names = [each.device for each in survey.files if each.device]
    each = sorted(set(names))
    return ", ".join(each if len(each) == 1 else (f"{name} ({names.count(name):,})" for name in each))


def troubled(survey: Survey) -> tuple[FileProfile, ...]:
    """The files that were not read whole, refused ones first."""
    return tuple(
        sorted(
            (each for each in survey.files if each.status != "ok"),
            key=lambda each: (each.status != "refused", each.path),
        )
    )


def title(survey: Survey, profile: FileProfile) -> str:
    """What one of several files is called: its rank in a job, else its path."""
    return profile.path if survey.ranks is None or profile.rank is None else f"Rank {profile.rank:,}"


RANK_COLUMNS: tuple[tuple[str, Callable[[RankTime], float | None]], ...] = (
    ("step", lambda each: each.step_us),
    ("compute", lambda each: each.compute_us),
    ("exposed comm", lambda each: each.exposed_comm_us),
    ("transfer", lambda each: each.transfer_us),
    ("wait", lambda each: each.wait_us),
)
"""The columns of a table of ranks: name and time in microseconds."""


def times(each: RankTime) -> tuple[float | None, ...]:
    """The columns of one rank."""
    return tuple(value(each) for _, value in RANK_COLUMNS)


def in_order(ranks: Iterable[RankTime]) -> tuple[RankTime, ...]:
    """Ranks by their number."""
    return tuple(sorted(ranks, key=lambda each: (each.rank is None, each.rank or 0, each.path)))


def by_compute(ranks: Ranks) -> tuple[RankTime, ...]:
    """Ranks from the one that holds the others up to the one that waits most: by compute time, else by step time."""

    def key(each: RankTime) -> tuple[bool, float, bool, int, str]:
        busy_us = each.compute_us if known(each.compute_us) else each.step_us
        last = busy_us is None or not known(busy_us)
        straggles = each.rank is not None and each.rank == ranks.straggler
        return (not straggles, 0.0 if busy_us is None or last else -busy_us, last, each.rank or 0, each.path)

    return tuple(sorted(ranks.ranks, key=key))


def spread(ranks: Iterable[RankTime]) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """Least, median and most of every column over the ranks that tell it."""
    columns = [[us for us in map(value, ranks) if us is not None and known(us)] for _, value in RANK_COLUMNS]
    whole: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
        ("least", min),
        ("median", statistics.median),
        ("most", max),
    )
    return tuple((name, tuple(take(each) if each else None for each in columns)) for name, take in whole)


def numbers(values: Iterable[int]) -> str:
    """Whole numbers with runs drawn together: 0, 2-5, 9."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(said[:20]) + (f" and {len(said) - 20:,} more runs" if len(said) > 20 else "")


def detailed(survey: Survey, most_ranks: int, most_files: int) -> tuple[FileProfile, ...]:
    """The files worth showing whole: of several ranks those that compute longest, else all where they are few."""
    read = [each for each in survey.files if each.status != "refused"]
    if survey.ranks is None:
        return tuple(read) if len(read) <= most_files else ()
    place = {each.path: index for index, each in enumerate(by_compute(survey.ranks))}
    return tuple(sorted(read, key=lambda each: (place.get(each.path, len(place)), each.path))[:most_ranks])
