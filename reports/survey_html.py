"""What `advisor analyze` found as one HTML file that asks for nothing else: no script, no font, no image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.measured import Cost, FileProfile, RankTime, Survey

from . import survey_ranks, wording
from . import survey_wording as words
from .html import environment
from .ladder import Rung
from .untrusted import clip_path

_DETAILED = 4  # of the ranks of a job, those that are shown whole
_FILES = 8  # files of no one job up to which all are
_COSTS = 20  # rows of one kind of cost, where one file is shown
_FEWER_COSTS = 8  # and where several are
_RANKS = 16  # ranks up to which each is charted
_ENDS = 8  # charted from each end of more ranks
_TITLE = 120  # characters of the path that heads a file
_ROWS = 1000  # of any table
_CLASSES = {  # colours of the parts of a step, by their kind
    "compute": "forward",
    "comm": "comm",
    "copy": "copy",
    "data": "data",
    "sync": "backward",
    "launch": "optimizer",
    "idle": "idle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """One file and what its part of the page shows; `id` sets the ids of several files apart."""

    id: str
    profile: FileProfile
    title: str
    headline: wording.Headline
    rungs: tuple[Rung, ...]
    parts: tuple[words.Part, ...]
    stack: tuple[tuple[str, float], ...]
    groups: tuple[tuple[str, tuple[Cost, ...], str], ...]
    most_us: float


def render_html(survey: Survey) -> str:
    """The whole page as text, to be written in UTF-8; everything in the survey has passed the redactor."""
    alone = len(survey.files) == 1 and survey.ranks is None
    shown = survey.files if alone else survey_ranks.detailed(survey, _DETAILED, _FILES)
    titles = _distinct([clip_path(survey_ranks.title(survey, each), _TITLE) for each in shown])
    numbered = enumerate(zip(shown, titles, strict=True), 1)
    views = [_view(each, title, "" if alone else f"file-{number}-") for number, (each, title) in numbered]
    return (
        environment()
        .get_template("survey.html.j2")
        .render(
            survey=survey,
            alone=alone,
            views=views,
            headline=survey_ranks.headline(survey),
            statuses=survey_ranks.statuses(survey),
            devices=survey_ranks.devices(survey),
            status_tones=survey_ranks.STATUS_TONES,
            files=survey.files[:_ROWS],
            ranks=_ranks(survey),
            numbers=survey_ranks.numbers,
            classes=_CLASSES,
            words=words,
            duration=wording.duration,
        )
    )


def _view(profile: FileProfile, title: str, id_: str) -> _View:
    parts = words.parts(profile.breakdown)
    most = _FEWER_COSTS if id_ else _COSTS
    groups = words.cost_groups(profile)
    times = [cost.time_us for _, costs in groups for cost in costs if wording.known(cost.time_us)]
    return _View(
        id=id_,
        profile=profile,
        title=title,
        headline=words.headline(profile),
        rungs=words.ladder(profile),
        parts=parts,
        stack=_stack(parts),
        groups=tuple((kind, costs[:most], words.rest(costs, most)) for kind, costs in groups),
        most_us=max(times, default=0.0),
    )


def _distinct(titles: Sequence[str]) -> list[str]:
    """Headings that differ: what occurs again gets a number."""
    seen: Counter[str] = Counter()
    found = []
    for title in titles:
        seen[title] += 1
        found.append(f"{title} ({seen[title]})" if seen[title] > 1 else title)
    return found


def _stack(parts: Sequence[words.Part]) -> tuple[tuple[str, float], ...]:
    """The parts side by side, idle time by its causes as far as they are known."""
    split = {part.within for part in parts if part.within}
    found = []
    for part in parts:
        left = part.us - sum(each.us for each in parts if each.within == part.name)
        if part.name not in split or left > 1e-6 * part.us:
            found.append((part.kind, left if part.name in split else part.us))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The rows of the table of ranks; `all` is empty where `shown` has every rank."""

    columns: tuple[str, ...]
    shown: tuple[tuple[RankTime, tuple[float | None, ...]], ...]
    hidden: int
    all: tuple[tuple[RankTime, tuple[float | None, ...]], ...]
    spread: tuple[tuple[str, tuple[float | None, ...]], ...]
    most_us: float


def _ranks(survey: Survey) -> _Ranks | None:
    if survey.ranks is None:
        return None
    ordered = survey_ranks.by_compute(survey.ranks)
    every = survey_ranks.in_order(ordered)
    many = len(ordered) > _RANKS
    shown = (*ordered[:_ENDS], *ordered[-_ENDS:]) if many else every
    return _Ranks(
        columns=tuple(name for name, _ in survey_ranks.RANK_COLUMNS),
        shown=tuple((each, survey_ranks.times(each)) for each in shown),
        hidden=len(ordered) - len(shown),
        all=tuple((each, survey_ranks.times(each)) for each in every[:_ROWS]) if many else (),
        spread=survey_ranks.spread(survey.ranks.ranks),
        most_us=max((each.step_us for each in ordered if each.step_us and wording.known(each.step_us)), default=0.0),
    )
