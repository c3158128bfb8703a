"""Examine a pull request: base against head, and what could be proposed on its lines; check, comment, suggestions."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence

from advisor.bot import handover, policy
from advisor.bot.desk import Desk, Measurement
from advisor.bot.forge import Annotation, ChangedFile, Check, PullRequest, Suggestion
from advisor.bot.told import told
from advisor.config import Config
from advisor.errors import (
    AdvisorError,
    ArtifactError,
    ConfigError,
    ForgeConflict,
    ForgeError,
    ForgeMissing,
    ForgeRefused,
)
from advisor.proposals import Examination

CHECK = "advisor"
REPORT = "<!-- advisor:report -->"
MOST_LINES = 30  # of a suggestion
INSTALLED = (  # names of files that say what is installed
    *("requirements*.txt", "constraints*.txt", "pyproject.toml", "setup.py", "setup.cfg", "*.lock"),
    *("environment*.yml", "environment*.yaml", "Pipfile"),
)


def examine(desk: Desk, number: int, *, asked: bool = False) -> str:
    """Measure a pull request and say what came of it; returns a line for the log.

    `asked` is for one that somebody who may push asked for: then drafts, forks and changes of other files count too.
    What is not the owner's wish is left alone without a word.
    """
    pull_request = desk.forge.pull_request(number)
    head = pull_request.head_sha
    if pull_request.state != "open":
        return f"#{number} is {pull_request.state}: nothing to examine"
    settings = desk.tip(pull_request.base_ref)
    try:
        config = desk.settings(settings)
    except ConfigError as error:
        _conclude(desk, head, "the settings of the base branch cannot be read", told(error))
        return f"#{number}: {told(error)}"
    changed = desk.forge.changed_files(number)
    why = unwanted(desk, pull_request, changed, config, asked=asked)
    if why is not None:
        return f"#{number} is not examined: {why}"
    base = fetch_head(desk, pull_request, settings)
    if base is None:
        return f"#{number} moved on while it was fetched: the next delivery is of the new head"
    desk.forge.post_check(Check(name=CHECK, head_sha=head, conclusion=None, title="measuring", summary=""))
    wanted = Measurement(purpose="examine", base=base, head=head, settings=settings)
    try:
        data = desk.measure(wanted, config)
        return tell(desk, pull_request, base, config, data, changed)
    except (ForgeConflict, ForgeMissing, ForgeRefused) as error:  # final: nothing else would end the check
        _conclude(desk, head, "there is no result", told(error))
        raise
    except ForgeError:
        raise
    except AdvisorError as error:
        _conclude(desk, head, "it could not be measured", told(error))
        return f"#{number} could not be measured: {told(error)}"


def unwanted(
    desk: Desk, pull_request: PullRequest, changed: Sequence[ChangedFile], config: Config, *, asked: bool
) -> str | None:
    """Why a pull request is left alone; None for one to examine."""
    bot = config.bot
    fork = pull_request.head_repository != desk.forge.repository().name
    if not bot.enabled:
        return "the bot is not enabled on the base branch"
    if not bot.scripts:
        return "no scripts are configured on the base branch"
    if asked:
        return None
    if not bot.pull_requests:
        return "pull_requests is off"
    if not fork and policy.rule_of(pull_request.head_ref) is not None:
        return "it is the bot's own, and measured already"
    if pull_request.draft:
        return "it is a draft"
    if fork and not bot.forks:
        return "it comes from a fork, and forks is off"
    if not policy.concerns(changed, bot):
        return "it changes no file that the configured paths match"
    return None


def fetch_head(desk: Desk, pull_request: PullRequest, settings: str) -> str | None:
    """Fetch the head; the commit it grew from on the base branch, None where the head is not the one known any more."""
    pull = "refs/merge-requests" if desk.forge.kind == "gitlab" else "refs/pull"
    ref = f"{pull}/{pull_request.number}/head"
    desk.workspace.fetch(ref)
    if desk.workspace.resolve(ref) != pull_request.head_sha:
        return None
    base = desk.workspace.merge_base(settings, pull_request.head_sha)
    if base is None:
        raise ArtifactError("base and head have no commit in common: rebase the pull request")
    return base


def tell(
    desk: Desk,
    pull_request: PullRequest,
    base: str,
    config: Config,
    data: bytes,
    changed: Sequence[ChangedFile],
) -> str:
    """Publish what the measuring job wrote of the head, once it has passed every check; returns a line for the log.

    Raises ArtifactError, before anything is posted, for a file that does not pass.
    """
    from advisor.reports import pull_request as page

    number, head = pull_request.number, pull_request.head_sha
    files = desk.reader(head)
    found = handover.read(data, base=base, head=head, purpose="examine", config=config, files=files)
    now = desk.forge.pull_request(number)
    if (now.state, now.head_sha, now.base_ref) != ("open", head, pull_request.base_ref):
        _conclude(desk, head, "measured, and left since", "The pull request has moved on or ended meanwhile.")
        return f"#{number} moved on or ended while it was measured: nothing is said of {head[:12]}"
    notes = tuple(_notes(changed))
    title, summary = page.check_output(found, notes=notes)
    conclusion = page.conclusion(found, config.bot.fail_on)
    paths = {file.path for file in changed}
    remarks = tuple(
        Annotation(path=path, start_line=start, end_line=end, level=level, title=name, message=message)
        for path, start, end, level, name, message in page.annotations(found)
        if path in paths and end <= len((files(path) or b"").splitlines())
    )
    check = Check(name=CHECK, head_sha=head, conclusion=conclusion, title=title, summary=summary, annotations=remarks)
    desk.forge.post_check(check)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("comment", lambda: desk.forge.upsert_comment(number, REPORT, page.comment(found, marker=REPORT, notes=notes))),
        ("suggestions", lambda: desk.forge.post_suggestions(number, head, (*suggestions(found, files, changed),))),
    ]
    if config.bot.code_scanning:
        steps.append(("code scanning", lambda: _scan(desk, pull_request, found)))
    for what, step in steps:
        try:
            step()
        except (ForgeConflict, ForgeMissing, ForgeRefused) as error:  # a locked conversation, a right that is missing
            desk.say(f"#{number}: {what}: {error}")
    return f"#{number} examined: {conclusion}, {title}"


def _notes(changed: Sequence[ChangedFile]) -> Iterator[str]:
    """What the measurement of a pull request does not show, in sentences."""
    installed = [f.path for f in changed if any(fnmatch.fnmatchcase(f.path.split("/")[-1], each) for each in INSTALLED)]
    if installed:
        yield f"{', '.join(installed[:5])}: base and head ran with the same installed packages, whatever it asks for"


def _scan(desk: Desk, pull_request: PullRequest, examination: Examination) -> None:
    """Hand the findings on the head to code scanning, a document for each script."""
    from advisor.reports.sarif import render_sarif

    for script in examination.scripts:
        if script.report is not None:
            ref = f"refs/pull/{pull_request.number}/head"
            desk.forge.upload_sarif(render_sarif(script.report), head_sha=pull_request.head_sha, ref=ref)


def suggestions(examination: Examination, files: handover.Read, changed: Sequence[ChangedFile]) -> Iterator[Suggestion]:
    """Those rewrites that are one run of lines, all of it in the diff; the others are only in the comment."""
    from advisor.reports import pull_request as page

    shown = {file.path: file.lines for file in changed}
    for script in examination.scripts:
        proven = script.report is not None and script.report.outcome == "improved"
        for finding in script.report.findings if script.report is not None and proven else ():
            edits = script.rewrites.get(finding.fingerprint or "") if finding.status == "applied" else None
            place = None if edits is None else _lines(handover.results(edits, files), files)
            if place is None:
                continue
            path, first, last, lines = place
            if set(range(first, last + 1)) <= shown.get(path, frozenset()) and len(lines) <= MOST_LINES:
                assert finding.fingerprint is not None
                yield Suggestion(
                    key=finding.fingerprint,
                    path=path,
                    start_line=first,
                    end_line=last,
                    remark=page.suggestion_remark(finding),
                    lines=lines,
                )


def _lines(after: Mapping[str, str], files: handover.Read) -> tuple[str, int, int, tuple[str, ...]] | None:
    """The one run of lines that a rewrite replaces, and what with; None for several runs, files, or an odd line end."""
    if len(after) != 1:
        return None
    ((path, text),) = after.items()
    before = handover.text_of(files(path)) or ""
    if "\r" in before or not before.endswith("\n") or not text.endswith("\n"):
        return None
    old, new = before.split("\n"), text.split("\n")
    changes = [op for op in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes() if op[0] != "equal"]
    if len(changes) != 1:
        return None
    _, first, last, begin, end = changes[0]
    if first == last:  # lines are only put in: the one before them is replaced by itself and them
        if first == 0:
            return None
        first, begin = first - 1, begin - 1
    return path, first + 1, last, tuple(new[begin:end])


def _conclude(desk: Desk, head: str, title: str, reason: str) -> None:
    """Say beside the commit why there is nothing to say."""
    from advisor.reports import markdown_text

    summary = markdown_text.text(reason)
    desk.forge.post_check(Check(name=CHECK, head_sha=head, conclusion="neutral", title=title, summary=summary))
