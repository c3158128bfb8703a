"""The commands `advisor rules` and `advisor explain`: list the rules, show the page of one, begin one, check one."""

from __future__ import annotations

import difflib
import shlex
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from advisor.commands.common import show_error
from advisor.errors import RuleError, UsageError

if TYPE_CHECKING:
    from advisor.registry import Loaded

_folder = click.option(
    "--rules", "folder", type=click.Path(path_type=Path), help="A folder with rules of your own (default: the setting)."
)


@click.group(invoke_without_command=True)
@_folder
@click.pass_context
def rules(ctx: click.Context, folder: Path | None) -> None:
    """List every rule: id, what it may change, first line of its page."""
    ctx.obj = folder
    if ctx.invoked_subcommand is not None:
        return
    loaded, errors = _load(folder)
    width = max(len(name) for name in loaded)
    for name, item in loaded.items():
        click.echo(f"{name:<{width}}  {item.rule.safety.value:<10} {item.title}")
    _end(errors)


@rules.command()
@click.argument("name")
@_folder
@click.pass_obj
def new(outer: Path | None, name: str, folder: Path | None) -> None:
    """Write the file of a rule NAME that is still to be filled in, and say how to go on."""
    from advisor import skeleton

    skeleton.text_of(name)  # a name that can be none is refused first
    given = folder or outer
    into = given or _configured() or _checkout()
    if into is None:
        raise UsageError(f"name the folder of your rules: advisor rules new {name} --rules FOLDER")
    loaded, _ = _load(into if into.is_dir() else None)
    if name in loaded:
        raise UsageError(f"there is a rule {name} already: `advisor explain {name}` shows it; give another name")
    path, here = skeleton.write(name, into), Path.cwd()
    click.echo(f"wrote {path.relative_to(here) if path.is_relative_to(here) else path}")
    option = f" --rules {shlex.quote(str(given))}" if given else ""
    click.echo(f"fill it in, then: advisor rules check {name}{option}; advisor explain {name}{option}")


@rules.command()
@click.argument("names", metavar="RULE...", nargs=-1, required=True)
@_folder
@click.pass_obj
def check(outer: Path | None, names: tuple[str, ...], folder: Path | None) -> None:
    """Run the examples of RULE and hold it to the contract of all rules. Rules that look at graphs need torch."""
    inside = folder or outer
    loaded, failed = _load(inside)
    errors: list[RuleError] = []
    for name in names:
        error = _checked(_named(loaded, failed, name, inside))
        if error is None:
            click.echo(f"{name}: {len(loaded[name].rule.examples)} examples pass")
        else:
            errors.append(error)
    _end(errors)


def _checked(item: Loaded) -> RuleError | None:
    """What a rule does not hold, or raises."""
    from advisor import testing

    try:
        testing.check(item)
    except AssertionError as error:
        if str(error):
            return RuleError(str(error))
        return RuleError(f"rule {item.rule.id} fails an assertion", detail=traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - a rule that raises is reported by id
        return RuleError.raised(item.rule.id, error)
    return None


@click.command()
@click.argument("rule")
@_folder
def explain(rule: str, folder: Path | None) -> None:
    """Show the page of RULE: what it does, why it costs, when not to, its examples."""
    loaded, errors = _load(folder)
    item = _named(loaded, errors, rule, folder)
    for error in errors:
        show_error(error)
    click.echo(f"# {item.rule.id}\n\n{item.page}\n\n## Examples")
    for example in item.rule.examples:
        click.echo(f"\nbefore:\n\n{_indented(example.before)}")
        after = f"after:\n\n{_indented(example.after)}" if example.after else f"left alone: {example.because}"
        click.echo(f"\n{after}")


def _named(loaded: dict[str, Loaded], errors: tuple[RuleError, ...], name: str, folder: Path | None) -> Loaded:
    """The rule of an id; raises the error of a rule of that name which could not be loaded, else UsageError."""
    item = loaded.get(name)
    if item is not None:
        return item
    stem = name.replace("-", "_")
    for error in errors:
        if error.rule in (name, stem):
            raise error
    for error in errors:
        show_error(error)
    inside = folder or _configured()
    if inside is not None and (inside / f"{stem}.py").is_file():
        raise UsageError(f"{inside / stem}.py holds no rule: derive a class from advisor.rule.Rule in it")
    near = difflib.get_close_matches(name, loaded, 1)
    hint = f": did you mean {near[0]}?" if near else ": `advisor rules` lists them"
    raise UsageError(f"there is no rule {name}{hint}")


def _load(folder: Path | None) -> tuple[dict[str, Loaded], tuple[RuleError, ...]]:
    """The rules there are, with those of the folder that was given or that the settings name."""
    from advisor.registry import load

    return load(folder or _configured())


def _configured() -> Path | None:
    from advisor.config import load_config

    folder = load_config(Path.cwd()).rules_folder
    return Path(folder) if folder else None


def _checkout() -> Path | None:
    """The folder of the built-in rules where the working directory is the checkout they are loaded from."""
    from advisor.registry import built_in_folder

    folder = built_in_folder()
    return folder if folder.parent == Path.cwd().resolve() else None


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def _end(errors: list[RuleError] | tuple[RuleError, ...]) -> None:
    """Show errors, and end with their status where there are any."""
    for error in errors:
        show_error(error)
    if errors:
        raise SystemExit(errors[0].exit_status)
