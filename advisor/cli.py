"""The command line: arguments in, exit status out; the work is elsewhere and imported when it is needed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import advisor
from advisor.commands import bot as bot_command
from advisor.commands import check as check_command
from advisor.commands import rules as rules_command
from advisor.commands.common import INTERRUPTED, NOT_CONFIRMED, console, settings, show_error, shown, style_of
from advisor.commands.common import progress as stage_lines
from advisor.errors import AdvisorError, ArtifactError, OutputError, UsageError

if TYPE_CHECKING:
    from advisor.job import Request
    from advisor.model import Report

FORMATS = ["text", "json", "markdown", "sarif", "rdjson", "html"]


class _Group(click.Group):
    """Turns our errors into one message and their exit status; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AdvisorError as error:
            show_error(error)
            ctx.exit(error.exit_status)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(advisor.__version__, prog_name="advisor")
def cli() -> None:
    """Find where a PyTorch training script loses time, rewrite it there, and prove the rewrite."""


@cli.command(context_settings={"ignore_unknown_options": False})
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--entry",
    metavar="MODULE:FUNCTION",
    help="For a model without a loop: a function returning (model, batch[, loss]).",
)
@click.option("--time", "time_s", type=float, metavar="SECONDS", help="Budget of the search for the best patch.")
@click.option("--steps", type=int, help="Steps timed before profiling.")
@click.option("--allow", multiple=True, metavar="LEVEL", help="Safety levels to apply: numerics, precision, semantics.")
@click.option("--worth", type=float, metavar="SHARE", help="Share of a step below which every rule stays silent.")
@click.option("--rules", "rules_folder", type=click.Path(path_type=Path), help="A folder with rules of your own.")
@click.option("--select", multiple=True, metavar="RULE", help="Only these rules.")
@click.option("--ignore", multiple=True, metavar="RULE", help="Not these rules.")
@click.option(
    "--peak",
    "--peak-flops",
    "peak_flops",
    type=float,
    metavar="FLOP/S",
    help="Dense peak of a device the table does not know.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where runs are kept (default: .advisor/runs).")
@click.option("--python", metavar="PATH", help="Interpreter that runs the script.")
@click.option("--seed", type=int, help="Seed set before the script starts.")
@click.option("--baselines/--no-baselines", default=None, help="Measure what one line would have bought as well.")
@click.option("--ncu/--no-ncu", default=None, help="Counters of the kernels that matter, by Nsight Compute.")
@click.option("--replay/--no-replay", default=None, help="Counters of the operators that matter, each replayed alone.")
@click.option("--resume", metavar="RUN", help="Go on with an interrupted run.")
@click.option("--apply", "apply_patch", is_flag=True, help="Apply the patch when it is proven.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON on standard output.")
@click.option("--output-format", type=click.Choice(FORMATS), help="How the report is printed (default: text).")
@click.option("--quiet", "-q", is_flag=True, help="No progress lines.")
def optimize(
    script: Path | None,
    arguments: tuple[str, ...],
    resume: str | None,
    apply_patch: bool,
    as_json: bool,
    output_format: str | None,
    quiet: bool,
    out: Path | None,
    entry: str | None,
    **options: Any,
) -> None:
    """Profile SCRIPT, rewrite it where that pays, prove the rewrite, report. Its own ARGUMENTS follow `--`."""
    from advisor.job import Request
    from advisor.pipeline import optimize
    from advisor.progress import STAGES

    if script is None and resume is None:
        raise UsageError("name the training script: advisor optimize SCRIPT [-- ARGUMENTS]")
    style = style_of(as_json, output_format)
    config, out = settings(options, out)
    progress = stage_lines(quiet, STAGES)
    request = Request(script=script, arguments=arguments, entry=entry, config=config, out=out, resume=resume)
    try:
        result = optimize(request, progress)
    except KeyboardInterrupt:
        _interrupted(progress.current, request)
        raise SystemExit(INTERRUPTED) from None
    _show(result.report, result.folder, style)
    if apply_patch and result.report.outcome == "improved":
        from advisor.application import apply_patch as put

        for path in put(result.root, result.patch):
            click.echo(f"changed {path}", err=style != "text")
    for error in result.errors:
        show_error(error)
    if result.errors:
        raise SystemExit(result.errors[0].exit_status)
    raise SystemExit(0 if result.report.outcome == "improved" else NOT_CONFIRMED)


def _interrupted(stage: str | None, request: Request) -> None:
    where = f" in {stage}" if stage else ""
    out = f" --out {request.out}" if request.out else ""
    hint = f": go on with `advisor optimize --resume {request.run_id}{out}`" if request.run_id else ""
    click.echo(f"\ninterrupted{where}{hint}", err=True)


def _show(report: Report, folder: Path, style: str) -> None:
    if style == "text":
        from advisor.reports.terminal import render_terminal

        inside = os.path.relpath(folder)
        render_terminal(report, console(), folder=inside if not inside.startswith("..") else shown(str(folder)))
    elif style == "json":
        from advisor.reports.jsonform import render_json

        click.echo(render_json(report))
    else:
        click.echo(_rendered(report, style), nl=False)


def _rendered(report: Report, style: str) -> str:
    """The document of a format for other programs and for people elsewhere."""
    from advisor.reports.html import render_html
    from advisor.reports.markdown import render_markdown
    from advisor.reports.rdjson import render_rdjson
    from advisor.reports.sarif import render_sarif

    formats = {"html": render_html, "markdown": render_markdown, "rdjson": render_rdjson, "sarif": render_sarif}
    return str(formats[style](report))


cli.add_command(check_command.check)
cli.add_command(bot_command.bot)
cli.add_command(rules_command.rules)
cli.add_command(rules_command.explain)


@cli.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with the result to a file.")
@click.option("--peak", type=float, metavar="FLOP/S", help="Dense peak of a device the table does not know.")
@click.option("--counters", type=click.Path(path_type=Path, dir_okay=False, exists=True), multiple=True)
@click.option("--workers", type=click.IntRange(1), help="Processes that read (default: one per core).")
@click.option("--cache/--no-cache", default=True, help="Keep the columns of large traces for a second look.")
def analyze(
    paths: tuple[Path, ...],
    as_json: bool,
    html: Path | None,
    peak: float | None,
    counters: tuple[Path, ...],
    workers: int | None,
    cache: bool,
) -> None:
    """Say where the time of traces goes: files, folders of ranks or folders of runs. Needs no torch and no GPU.

    Reads what torch.profiler exported (.json, .json.gz), a damaged file as far as it is whole. --counters names output
    of Nsight Compute, dcgm-exporter, dcgmi dmon or nvidia-smi of the same run.
    """
    from dataclasses import replace

    from advisor.calibration import default_path
    from advisor.redact import Redactor
    from advisor.survey import Options, cache_folder, survey

    options = Options(
        store=cache_folder() if cache else None,
        workers=workers,
        peak_flops=peak,
        calibration=default_path(),
        counters=counters,
    )
    found = survey(paths, options)
    shown = Redactor.of_machine().value(found)
    if html is not None:
        from advisor.reports.survey_html import render_html

        _write(html, render_html(shown))
    if as_json:  # for a program that looks for the paths it gave
        from advisor.reports.survey_json import render_json

        named = (replace(file, path=given.path) for file, given in zip(shown.files, found.files, strict=True))
        click.echo(render_json(replace(shown, files=tuple(named))))
    else:
        from advisor.reports.survey_terminal import render_terminal

        render_terminal(shown, console())
    if all(file.status == "refused" for file in found.files):
        raise SystemExit(ArtifactError.exit_status)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path.name}: {error.strerror}: give another file") from error


@cli.command()
@click.option("--calibrate", is_flag=True, help="Measure the first device: products of every dtype and a copy.")
@click.option("--python", metavar="PATH", help="Interpreter that has torch.")
def doctor(calibrate: bool, python: str | None) -> None:
    """Say what this machine offers: torch, devices, counters, tools. --calibrate measures a device."""
    from advisor import calibration, doctor

    interpreter = python or sys.executable
    if calibrate:
        found = doctor.calibrate(calibration.default_path(), interpreter)
        for dtype, rate in sorted(found["measured_flops"].items()):
            click.echo(f"{dtype:<10} {rate / 1e12:8.1f} TFLOP/s")
        click.echo(f"{'copy':<10} {found['measured_bandwidth'] / 1e12:8.2f} TB/s, read and written")
        return
    for check in doctor.checks(interpreter):
        mark = {True: "ok", False: "missing", None: "-"}[check.good]
        click.echo(f"{mark:<8} {check.name:<9} {check.says}")


@cli.command()
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="Where runs are kept.")
@click.option("--allow-dirty", is_flag=True, help="Apply although the work tree has uncommitted changes.")
def apply(run: str | None, out: Path | None, allow_dirty: bool) -> None:
    """Apply the proven patch of RUN (default: the latest) to the work tree."""
    from advisor.redact import Redactor
    from advisor.rundir import find

    _apply(find(run, out, Redactor.of_machine()).path, allow_dirty)


def _apply(folder: Path, allow_dirty: bool) -> None:
    from advisor.application import apply_run

    for path in apply_run(folder, allow_dirty=allow_dirty):
        click.echo(f"changed {path}")


@cli.command()
@click.argument("run", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="Where runs are kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--output-format",
    type=click.Choice([*FORMATS, "schema"]),
    help="Default: text; schema is the JSON Schema of the JSON form and needs no run.",
)
@click.option("--html", is_flag=True, help="Write report.html again and print its path.")
@click.option("--why", metavar="FILE:LINE", help="Tell instead why there is or is no finding at a line.")
def report(
    run: str | None, out: Path | None, as_json: bool, output_format: str | None, html: bool, why: str | None
) -> None:
    """Show the report of RUN (default: the latest) again."""
    from advisor.redact import Redactor
    from advisor.reports.html import render_html
    from advisor.reports.jsonform import from_document
    from advisor.rundir import find

    style = style_of(as_json, output_format)
    if style != "text" and (html or why is not None):
        raise UsageError(f"--{'html' if html else 'why'} and another format exclude each other: leave one out")
    if style == "schema":
        from advisor.reports.jsonform import written
        from advisor.reports.schema import report_schema

        click.echo(written(report_schema()), nl=False)
        return
    found = find(run, out, Redactor.of_machine())
    if why is not None:
        check_command.explain(found.path, why)
        return
    try:
        document = from_document(found.read_json("report.json"))
    except ValueError as error:
        raise ArtifactError(
            f"report.json of run {found.id} cannot be read: {error}: run `advisor optimize` again"
        ) from error
    if html:
        found.write("report.html", render_html(document))
        click.echo(found.path / "report.html")
    else:
        _show(document, found.path, style)


def main() -> None:
    """Entry point of the command."""
    try:
        status = cli.main(prog_name="advisor", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        show_error(OutputError(f"cannot write the output: {error.strerror}"))
        os._exit(OutputError.exit_status)  # what is left in the buffer cannot be written, either
    raise SystemExit(status if isinstance(status, int) else 0)
