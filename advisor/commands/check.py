"""The command `advisor check`: options in, the chosen form of the result out; the work is in `advisor.checking`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.commands.common import NOT_CONFIRMED, console, progress, settings, show_error, style_of
from advisor.errors import UsageError

if TYPE_CHECKING:
    from advisor.checking import Result
    from advisor.model import CheckReport

FORMATS = ["text", "json", "sarif", "github", "markdown", "rdjson"]
_ARGUMENTS = "advisor.arguments"


class _WithArguments(click.Command):
    """A command of several paths; what follows `--` are the arguments of the scripts."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_ARGUMENTS] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


@click.command(cls=_WithArguments, options_metavar="[OPTIONS]", epilog="Arguments of the scripts follow `--`.")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--run", metavar="RUN", help="Read this recorded run instead of running anything.")
@click.option("--entry", metavar="MODULE:FUNCTION", help="For a model without a loop, as in optimize.")
@click.option("--steps", type=click.IntRange(1), help="Steps timed before profiling (default: 3).")
@click.option("--worth", type=float, metavar="SHARE", help="Share of a step below which every rule stays silent.")
@click.option("--rules", "rules_folder", type=click.Path(path_type=Path), help="A folder with rules of your own.")
@click.option("--select", multiple=True, metavar="RULE", help="Only these rules.")
@click.option("--ignore", multiple=True, metavar="RULE", help="Not these rules.")
@click.option("--out", type=click.Path(path_type=Path), help="Where runs are kept (default: .advisor/runs).")
@click.option("--python", metavar="PATH", help="Interpreter that runs the scripts.")
@click.option("--seed", type=int, help="Seed set before a script starts.")
@click.option("--check", "gate", is_flag=True, help="Exit with status 1 when there is a finding.")
@click.option("--why", metavar="FILE:LINE", help="Tell instead why there is or is no finding at a line.")
@click.option(
    "--output-format",
    type=click.Choice([*FORMATS, "schema"]),
    help="Default: text; schema is the JSON Schema of the JSON form and needs no script.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --output-format json.")
@click.option("--quiet", "-q", is_flag=True, help="No progress lines.")
def check(
    paths: tuple[Path, ...],
    run: str | None,
    entry: str | None,
    steps: int | None,
    out: Path | None,
    gate: bool,
    why: str | None,
    output_format: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Say what the rules find in scripts or recorded runs (.advisor/runs/ID); nothing is rewritten.

    Each script runs for a few steps. Of one that cannot run here the source alone is looked at; what that shows is
    marked "not measured".
    """
    from advisor import checking

    style = style_of(as_json, output_format)
    if style == "schema":
        from advisor.reports.jsonform import written
        from advisor.reports.schema import check_schema

        click.echo(written(check_schema()), nl=False)
        return
    if not paths and run is None:
        raise UsageError("name training scripts or a run: advisor check PATH... [-- ARGUMENTS], or --run RUN")
    if why is not None and style != "text":
        raise UsageError(f"--why answers in text: leave --output-format {style} out")
    config, out = settings(options, out)
    asked = checking.Asked(
        paths=paths,
        arguments=click.get_current_context().meta.get(_ARGUMENTS, ()),
        config=config,
        entry=entry,
        out=out,
        run=run,
        steps=steps,
        why=place_of(why) if why is not None else None,
    )
    result = checking.check(asked, progress(quiet, checking.STAGES))
    _show_check(result, style)
    for error in result.errors:
        show_error(error)
    if result.errors:
        raise SystemExit(result.errors[0].exit_status)
    raise SystemExit(NOT_CONFIRMED if gate and checking.has_findings(result.report) else 0)


def place_of(text: str) -> tuple[str, int]:
    """The file and line of `--why`; raises UsageError."""
    path, colon, line = text.rpartition(":")
    if not colon or not path or not line.isdecimal() or int(line) < 1:
        raise UsageError(f"--why {text} names no line: give it as file:line, such as train.py:41")
    return path, int(line)


def _show_check(result: Result, style: str) -> None:
    if result.explanations or style == "text":
        from advisor.reports.check_terminal import render_explanation, render_terminal

        for explanation in result.explanations:
            render_explanation(explanation, console())
        if not result.explanations:
            render_terminal(result.report, console())
    else:
        click.echo(_rendered(result.report, style), nl=False)


def _rendered(report: CheckReport, style: str) -> str:
    """The document of a format."""
    from advisor.reports.check_terminal import render_github
    from advisor.reports.jsonform import render_check
    from advisor.reports.markdown import render_check_markdown
    from advisor.reports.rdjson import render_rdjson
    from advisor.reports.sarif import render_sarif

    formats = {
        "json": render_check,
        "sarif": render_sarif,
        "github": render_github,
        "markdown": render_check_markdown,
        "rdjson": render_rdjson,
    }
    return str(formats[style](report))


def explain(folder: Path, why: str) -> None:
    """Print why a recorded run has or has not a finding at a line, given as file:line."""
    from advisor import checking
    from advisor.config import load_config

    asked = checking.Asked(paths=(folder,), arguments=(), config=load_config(Path.cwd()), why=place_of(why))
    result = checking.check(asked, progress(True, checking.STAGES))
    for error in result.errors:
        show_error(error)
    if not result.explanations:
        raise SystemExit(result.errors[0].exit_status)
    _show_check(result, "text")
