"""The user's settings: `advisor.toml`, or `[tool.advisor]` in `pyproject.toml`, read into one frozen `Config`."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from advisor.errors import ConfigError
from advisor.model import Safety

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


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
    time by Nsight Compute, `replay` for those of the operators, each replayed alone.
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


def load_config(start: Path) -> Config:
    """The settings of the nearest configuration upward from the folder (or file) `start`; else the defaults.

    A folder's `advisor.toml` goes before its `pyproject.toml`, and a `pyproject.toml` without `[tool.advisor]` does
    not end the search. Relative `rules_folder` and `out`, and a `python` with a slash, are taken from the file's own
    folder. Raises `ConfigError` for a file that cannot be read, an unknown key, or a value of the wrong type or
    range.
    """
    folder = start.resolve()
    for parent in (folder, *folder.parents):
        path = parent / "advisor.toml"
        if path.is_file():
            return _config(_read(path), path)
        path = parent / "pyproject.toml"
        if path.is_file():
            tool = _read(path).get("tool", {})
            if isinstance(tool, dict) and "advisor" in tool:
                return _config(tool["advisor"], path)
    return Config()


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
    values = _checked(table, str(path))
    for key in ("rules_folder", "out", "python"):
        value = values.get(key)
        if value is not None and (key != "python" or "/" in value or "\\" in value):
            values[key] = str(path.parent / Path(value).expanduser())
    return Config(**values)


def _checked(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        kind = _KINDS.get(key)
        if kind is None:
            raise ConfigError(f"{where}: unknown key {key!r}; {_hint(key)}")
        if not kind.accepts(value):
            raise ConfigError(f"{where}: {key} must be {kind.words}, found {_shown(value)}")
        values[key] = kind.convert(value)
    return values


def _hint(key: str) -> str:
    near = difflib.get_close_matches(key.lower().replace("-", "_"), _KINDS, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"the keys are {', '.join(sorted(_KINDS))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
