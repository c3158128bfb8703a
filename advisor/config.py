"""The user's settings: `advisor.toml`, or `[tool.advisor]` in `pyproject.toml`, read into one frozen `Config`."""

from __future__ import annotations

import difflib
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from advisor.errors import ConfigError
from advisor.model import Safety

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True, kw_only=True)
class BotConfig:
    """What the owners of a repository let the bot do: `[tool.advisor.bot]`, of which only the base branch's counts.

    Without `enabled` it does nothing. `scripts` are the commands to measure, each a script and its arguments, run in
    the root of the repository. `pull_requests` examines those that change a file matched by `paths`; `forks` those of
    strangers too. `commands` answers `/advisor` comments of people who may push. `schedule` (never, daily, weekly) is
    how often improvements of the default branch are looked for unasked. `fail_on` (never, regression) makes a check
    fail. `stacked` puts all proven rewrites into one pull request, else there is one a rule; `max_open` are open at a
    time, `per_week` are opened in seven days, with `labels`, as a `draft`. `dashboard` keeps an issue with the state of
    all, `code_scanning` hands findings to it as SARIF. `time_s` bounds the search of each measurement in seconds.
    `network` lets the measured script reach it.
    """

    enabled: bool = False
    scripts: tuple[str, ...] = ()
    pull_requests: bool = True
    forks: bool = False
    paths: tuple[str, ...] = ("*.py", "pyproject.toml", "requirements*.txt")
    commands: bool = True
    schedule: str = "never"
    fail_on: str = "never"
    stacked: bool = False
    max_open: int = 3
    per_week: int = 3
    labels: tuple[str, ...] = ("advisor",)
    draft: bool = False
    dashboard: bool = True
    code_scanning: bool = False
    time_s: float = 270.0
    network: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of a run; the defaults are what a user gets without a file.

    `steps` are timed without a profiler, `profile_steps` with one, after `warmup` steps. `time_s` bounds a search in
    seconds. `allow` names the safety levels that may be applied besides exact rewrites. `worth` replaces every rule's
    own share of a step (0 to 1) below which it stays silent. `rules_folder` holds further rules; `select` keeps only
    the named rules, `ignore` drops some. `out` is where runs are written. `peak_flops` is the device's dense peak in
    FLOP/s where the table does not know it. `trajectory_steps` is the length of the compared loss curves, `min_quads`
    the least number of A B B A quads behind a verdict. `python` is the interpreter of the user's script. `baselines`
    asks for the one-line variants beside the patch. `ncu` asks for the counters of the kernels with most recoverable
    time by Nsight Compute, `replay` for those of the operators, each replayed alone. `bot` is the table of that name.
    """

    steps: int = 8
    profile_steps: int = 2
    warmup: int = 3
    time_s: float = 270.0
    allow: tuple[str, ...] = ("numerics", "precision")
    worth: float | None = None
    rules_folder: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    out: str | None = None
    peak_flops: float | None = None
    trajectory_steps: int = 20
    min_quads: int = 8
    seed: int = 0
    python: str | None = None
    baselines: bool = True
    ncu: bool = False
    replay: bool = False
    bot: BotConfig = field(default_factory=BotConfig)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a key accepts: the words for it in a message, the test, and the conversion."""

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int) -> _Kind:
    return _Kind(
        f"a whole number of at least {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)


_LEVELS = tuple(level.value for level in Safety if level is not Safety.SUGGEST)
_POSITIVE = _Kind("a finite number above 0", lambda value: _is_number(value) and value > 0, float)
_SHARE = _Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1, float)
_TEXT = _Kind("a non-empty string", lambda value: isinstance(value, str) and value != "")
_TEXTS = _Kind("an array of non-empty strings", _is_texts, tuple)
_ALLOW = _Kind(
    f"an array of safety levels ({', '.join(_LEVELS)})",
    lambda value: _is_texts(value) and all(item in _LEVELS for item in value),
    tuple,
)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_KINDS: Mapping[str, _Kind] = {
    "steps": _whole(1),
    "profile_steps": _whole(1),
    "warmup": _whole(0),
    "time_s": _POSITIVE,
    "allow": _ALLOW,
    "worth": _SHARE,
    "rules_folder": _TEXT,
    "select": _TEXTS,
    "ignore": _TEXTS,
    "out": _TEXT,
    "peak_flops": _POSITIVE,
    "trajectory_steps": _whole(1),
    "min_quads": _whole(1),
    "seed": _whole(0),
    "python": _TEXT,
    "baselines": _FLAG,
    "ncu": _FLAG,
    "replay": _FLAG,
}


def _one_of(*values: str) -> _Kind:
    return _Kind(f"one of {', '.join(values)}", lambda value: value in values)


def _commands(value: Any) -> bool:
    return _is_texts(value) and all(_split(item) for item in value)


def _split(command: str) -> list[str]:
    """The words of a command, without the `--` before arguments; none of one whose quotes do not end."""
    try:
        return [word for word in shlex.split(command) if word != "--"]
    except ValueError:
        return []


_BOT: Mapping[str, _Kind] = {
    "enabled": _FLAG,
    "scripts": _Kind("an array of commands, each a script with its arguments", _commands, tuple),
    "pull_requests": _FLAG,
    "forks": _FLAG,
    "paths": _TEXTS,
    "commands": _FLAG,
    "schedule": _one_of("never", "daily", "weekly"),
    "fail_on": _one_of("never", "regression"),
    "stacked": _FLAG,
    "max_open": _whole(1),
    "per_week": _whole(1),
    "labels": _Kind("an array of strings", lambda value: value == [] or _is_texts(value), tuple),
    "draft": _FLAG,
    "dashboard": _FLAG,
    "code_scanning": _FLAG,
    "time_s": _POSITIVE,
    "network": _FLAG,
}


def load_config(start: Path) -> Config:
    """The settings of the nearest configuration upward from the folder (or file) `start`; else the defaults.

    A folder's `advisor.toml` goes before its `pyproject.toml`, and a `pyproject.toml` without `[tool.advisor]` does
    not end the search. Relative `rules_folder` and `out`, and a `python` with a slash, are taken from the file's own
    folder. Raises `ConfigError` for a file that cannot be read, an unknown key, or a value of the wrong type or
    range.
    """
    folder = start.resolve()
    for parent in (folder, *folder.parents):
        found = config_in(parent)
        if found is not None:
            return found
    return Config()


def config_in(folder: Path) -> Config | None:
    """The settings that stand in one folder, None where it has none; otherwise like `load_config`."""
    path = folder / "advisor.toml"
    if path.is_file():
        return _config(_read(path), path)
    path = folder / "pyproject.toml"
    if path.is_file():
        tool = _read(path).get("tool", {})
        if isinstance(tool, dict) and "advisor" in tool:
            return _config(tool["advisor"], path)
    return None


def merge(config: Config, **overrides: Any) -> Config:
    """`config` with the given settings replaced; an override of `None` leaves the setting as it is.

    Raises `ConfigError` for an unknown setting or a value of the wrong type or range.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    return replace(config, **_checked(given, "options"))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _config(table: Any, path: Path) -> Config:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: [tool.advisor] must be a table, found {_shown(table)}")
    bot = table.get("bot", {})
    if not isinstance(bot, dict):
        raise ConfigError(f"{path}: bot must be a table, found {_shown(bot)}")
    values = _checked({key: value for key, value in table.items() if key != "bot"}, str(path))
    values["bot"] = BotConfig(**_checked(bot, f"{path}: [bot]", _BOT))
    for key in ("rules_folder", "out", "python"):
        value = values.get(key)
        if value is not None and (key != "python" or "/" in value or "\\" in value):
            values[key] = str(path.parent / Path(value).expanduser())
    return Config(**values)


def _checked(table: Mapping[str, Any], where: str, kinds: Mapping[str, _Kind] = _KINDS) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        kind = kinds.get(key)
        if kind is None:
            raise ConfigError(f"{where}: unknown key {key!r}; {_hint(key, kinds)}")
        if not kind.accepts(value):
            raise ConfigError(f"{where}: {key} must be {kind.words}, found {_shown(value)}")
        values[key] = kind.convert(value)
    return values


def _hint(key: str, kinds: Mapping[str, _Kind]) -> str:
    near = difflib.get_close_matches(key.lower().replace("-", "_"), kinds, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"the keys are {', '.join(sorted(kinds))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
