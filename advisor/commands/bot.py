"""The commands `advisor bot ...`: options in, log lines and an exit status out; the work is in `advisor.bot`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.commands.common import progress
from advisor.errors import UsageError

if TYPE_CHECKING:
    from advisor.bot.desk import Desk
    from advisor.bot.forge import Forge
    from advisor.bot.webhooks.webhook import Secrets

TOKENS = {"github": ("ADVISOR_TOKEN", "GITHUB_TOKEN"), "gitlab": ("ADVISOR_TOKEN", "GITLAB_TOKEN")}
SECRET = "ADVISOR_WEBHOOK_SECRET"


@click.group()
def bot() -> None:
    """Measure pull requests and propose proven rewrites on GitHub or GitLab; only where [tool.advisor.bot] says so."""


@bot.command()
@click.option("--purpose", type=click.Choice(["examine", "propose"]), required=True)
@click.option("--base", type=click.Path(path_type=Path, file_okay=False, exists=True), required=True)
@click.option("--head", type=click.Path(path_type=Path, file_okay=False, exists=True), required=True)
@click.option("--settings", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Default: the base.")
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="Propose rewrites of this rule only.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--quiet", "-q", is_flag=True, help="No progress lines.")
def measure(
    purpose: str, base: Path, head: Path, settings: Path | None, rules: tuple[str, ...], out: Path, quiet: bool
) -> None:
    """Measure the checkouts BASE and HEAD and leave examination.json in the folder OUT. Needs no token, takes none.

    The settings are those of the checkout SETTINGS, which must be of the branch that the owner controls. Where the bot
    is not enabled there, nothing is measured and nothing is left.
    """
    from advisor.bot import handover
    from advisor.bot.measure import Order, inside, measure
    from advisor.config import Config, config_in
    from advisor.machine import git
    from advisor.progress import STAGES

    commits = {}
    for tree in (base, head):
        commit = git(tree.resolve(), "rev-parse", "HEAD")
        if commit is None:
            raise UsageError(f"{tree} is no git work tree: check the commit out with git")
        commits[tree] = commit.strip()
    config = config_in((settings or base).resolve()) or Config()
    if not config.bot.enabled:
        click.echo("nothing is measured: the settings of the base branch do not say enabled = true, [tool.advisor.bot]")
        return
    out.mkdir(parents=True, exist_ok=True)
    order = Order(
        purpose=purpose,
        base=base.resolve(),
        head=head.resolve(),
        base_commit=commits[base],
        head_commit=commits[head],
        config=config,
        out=(out / "runs").resolve(),
        rules=rules,
    )
    with inside(head.resolve()):
        found = measure(order, progress(quiet, STAGES))
    handover.write(found, out / handover.NAME)


# ------------------------------------------------------------------------------------------------------- with a forge


def _at_a_forge(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of the commands that talk to a forge."""
    options = (
        click.option("--forge", "kind", type=click.Choice(["github", "gitlab"]), default="github"),
        click.option("--url", metavar="URL", help="Of the API of GitHub Enterprise, or of the GitLab server."),
        click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False, exists=True)),
        click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="Where mirrors are kept."),
        click.option("--sandbox", default="auto", help="bubblewrap, user, none; auto takes the first that works."),
        click.option("--python", metavar="PATH", help="Interpreter that runs advisor and the scripts."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@bot.command()
@click.option("--repo", required=True, metavar="OWNER/NAME")
@click.option("--pr", "number", type=click.IntRange(1), help="Examine this pull request.")
@click.option("--propose", is_flag=True, help="Propose proven rewrites of the default branch.")
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="With --propose: of this rule only.")
@click.option("--maintain", is_flag=True, help="Rebase or close what is open, measuring only what changed.")
@_at_a_forge
def run(repo: str, number: int | None, propose: bool, rules: tuple[str, ...], maintain: bool, **options: Any) -> None:
    """Do one piece of work on a repository by hand: the token is taken from --token-file or ADVISOR_TOKEN."""
    from advisor.bot import examining, proposing

    if sum((number is not None, propose, maintain)) != 1:
        raise UsageError("name one piece of work: --pr N, --propose or --maintain")
    desk = _desk(repo, _token(options["kind"], options["token_file"]), **options)
    if number is not None:
        click.echo(examining.examine(desk, number, asked=True))
    elif propose:
        click.echo(proposing.propose(desk, rules))
    else:
        click.echo(proposing.maintain(desk))


@bot.command()
@click.option("--repo", required=True, metavar="OWNER/NAME")
@click.option("--examination", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option("--head", metavar="SHA", required=True, help="The commit that was measured, as the forge told it.")
@click.option("--purpose", type=click.Choice(["examine", "propose"]), required=True)
@_at_a_forge
def publish(repo: str, examination: Path, head: str, purpose: str, **options: Any) -> None:
    """Publish what `advisor bot measure` wrote in another job. Runs none of the repository's code.

    HEAD comes from the event, never from the file: of a pull request it is the head, else the default branch's commit.
    """
    from advisor.bot import handover
    from advisor.bot.publishing import publish_examined, publish_proposed
    from advisor.bot.sandboxes.sandbox import read_result

    desk = _desk(repo, _token(options["kind"], options["token_file"]), **options)
    data = read_result(examination.parent, examination.name, handover.MOST_BYTES)
    click.echo(publish_examined(desk, head, data) if purpose == "examine" else publish_proposed(desk, head, data))


@bot.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--app-id", metavar="ID", help="Act as this GitHub App, with --app-key.")
@click.option("--app-key", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Its private key, PEM.")
@click.option(
    "--webhook-secret-file",
    "secret_files",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    help="A file with the secret of the webhook; several while one is exchanged. Or set ADVISOR_WEBHOOK_SECRET.",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Tasks done at a time.")
@_at_a_forge
def serve(
    host: str,
    port: int,
    app_id: str | None,
    app_key: Path | None,
    secret_files: tuple[Path, ...],
    workers: int,
    **options: Any,
) -> None:
    """Receive webhooks and do what they ask for, one task at a time. Stops on SIGTERM; what was accepted is kept."""
    from advisor.bot.assembly import default_state
    from advisor.bot.sandboxes.sandbox import find_sandbox
    from advisor.bot.service import Service
    from advisor.bot.webhooks.events import parse
    from advisor.bot.webhooks.serve import ServeOptions, serve

    kind, url = options["kind"], options["url"]
    if (app_id is None) != (app_key is None) or (app_id is not None and kind != "github"):
        raise UsageError("--app-id and --app-key belong together, and to GitHub")
    secrets = _secrets(kind, secret_files)
    token = _token(kind, options["token_file"]) if app_key is None else ""
    key = _text(app_key) if app_key is not None else ""
    find_sandbox(options["sandbox"])  # said now, not when the first task comes

    def forge_of(task: Any) -> Forge:
        if app_id is None:
            return _forge(kind, task.repository, token, url)
        return _app_forge(app_id, key, task.repository, url)

    state = (options["state"] or default_state()).resolve()
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"the folder of --state cannot be made: {error.strerror}: {state}") from error
    files = (*secret_files, *(path for path in (app_key, options["token_file"]) if path is not None))
    service = Service(
        forge_of=forge_of,
        state=state,
        sandbox=options["sandbox"],
        interpreter=options["python"] or sys.executable,
        hidden=tuple(path.resolve() for path in files),
        say=_say,
    )
    # Apps are known as bots by what the forge says of them; whoever else the token belongs to is asked for
    account = None
    if app_id is None:
        account = _forge(kind, "any/project", token, url).account()
    else:
        _app_forge(app_id, key, "any/project", url)  # a wrong key is said now, not when the first task comes
    serving = ServeOptions(state=state / "inbox", secrets=secrets, host=host, port=port, workers=workers)
    serve(serving, service.handle, service.tick, read=functools.partial(parse, account=account))


def _say(line: str) -> None:
    from advisor.redact import Redactor
    from advisor.reports.untrusted import clip

    click.echo(clip(Redactor.of_machine().text(line), 2000), err=True)


def _token(kind: str, file: Path | None) -> str:
    """The token; it leaves the environment of this process and so of every other that it starts."""
    if file is not None:
        found = _text(file).strip()
    else:
        given = [os.environ.pop(name, "") for name in TOKENS[kind]]
        found = next((token.strip() for token in given if token.strip()), "")
    if not found:
        raise UsageError(f"there is no token: name a file with --token-file, or set {TOKENS[kind][0]}")
    return found


def _secrets(kind: str, files: tuple[Path, ...]) -> Secrets:
    """The secrets of the webhook; the one in the environment leaves it."""
    from advisor.bot.webhooks.webhook import Secrets

    given = [_text(path).strip() for path in files]
    given += [secret] if (secret := os.environ.pop(SECRET, "").strip()) else []
    if not given:
        raise UsageError(f"there is no webhook secret: name a file with --webhook-secret-file, or set {SECRET}")
    return Secrets(github=tuple(given)) if kind == "github" else Secrets(gitlab=tuple(given))


def _text(file: Path) -> str:
    """The text of a file with a token, secret or key."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as text: name a file with nothing but the secret in it") from error


def _desk(
    repo: str,
    token: str,
    *,
    kind: str,
    url: str | None,
    token_file: Path | None,
    state: Path | None,
    sandbox: str,
    python: str | None,
) -> Desk:
    from advisor.bot.assembly import default_state, desk_of

    return desk_of(
        _forge(kind, repo, token, url),
        state=(state or default_state()).resolve(),
        sandbox=sandbox,
        interpreter=python or sys.executable,
        hidden=() if token_file is None else (token_file.resolve(),),
        say=_say,
    )


def _forge(kind: str, repo: str, token: str, url: str | None) -> Forge:
    with _needed():
        if kind == "gitlab":
            from advisor.bot.forges.failures import Patience
            from advisor.bot.forges.gitlab import GitLab

            patience = Patience(sleep=_wait)
            return GitLab(repo, token=token, base_url=url or "https://gitlab.com", patience=patience)
        from advisor.bot.forges.github import GitHub
        from advisor.bot.forges.githubapi import PUBLIC_URL

        return GitHub(repo, token, base_url=url or PUBLIC_URL, sleep=_wait)


def _wait(seconds: float) -> None:
    _say(f"the forge gave no answer, or limits how often it is asked: asking again in {seconds:.0f} s")
    time.sleep(seconds)


def _app_forge(app_id: str, key: str, repo: str, url: str | None) -> Forge:
    with _needed():
        from advisor.bot.forges.appauth import InstallationAuth
        from advisor.bot.forges.github import GitHub
        from advisor.bot.forges.githubapi import PUBLIC_URL

        base_url = url or PUBLIC_URL
        return GitHub(repo, InstallationAuth(app_id, key, repo, base_url=base_url), base_url=base_url)


@contextlib.contextmanager
def _needed() -> Iterator[None]:
    """Say what to install where a client library is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'torch-advisor[bot]'") from error
