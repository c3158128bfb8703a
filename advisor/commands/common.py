"""What the commands share: how an error is shown, the console, the settings, the format, the progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.errors import AdvisorError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from advisor.config import Config
    from advisor.progress import Progress

INTERRUPTED = 130
NOT_CONFIRMED = 1  # ran, and there is no proven gain, or with --check a finding


def show_error(error: AdvisorError) -> None:
    """Print an error on standard error: its detail (a traceback of the script, say) first, the message last."""
    if error.detail:
        click.echo(error.detail.rstrip(), err=True)
    click.echo(f"error: {error}", err=True)


def shown(path: str) -> str:
    """A path as it may be shown: `~` for the home folder."""
    from advisor.redact import Redactor

    return Redactor.of_machine().text(path)


def console() -> Console:
    """Standard output, a hundred columns wide where nobody looks."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout is not None and sys.stdout.isatty() else 100)


def style_of(as_json: bool, output_format: str | None) -> str:
    """The format that was asked for; raises UsageError where two were."""
    if as_json and output_format not in (None, "json"):
        raise UsageError(f"--json and --output-format {output_format} exclude each other: leave one out")
    return "json" if as_json else output_format or "text"


def settings(options: dict[str, Any], out: Path | None) -> tuple[Config, Path | None]:
    """The user's configuration with the options of the command line, and where runs are kept."""
    from advisor.config import load_config, merge

    options["rules_folder"] = str(options["rules_folder"]) if options["rules_folder"] else None
    for name in ("allow", "select", "ignore"):
        options[name] = options.get(name) or None
    config = merge(load_config(Path.cwd()), **options)
    return config, out if out is not None or config.out is None else Path(config.out)


def progress(quiet: bool, stages: tuple[str, ...]) -> Progress:
    """Lines on standard error, one a stage."""
    from rich.console import Console

    from advisor.progress import Progress

    return Progress(Console(stderr=True), quiet=quiet, stages=stages)
