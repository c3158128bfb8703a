"""The one loader of rules: built in, from entry points, and from a user's folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from advisor.errors import RuleError, UsageError
from advisor.model import Safety
from advisor.rule import NEEDS, Rule

GROUP = "advisor.rules"
HEADINGS = ("What it does", "Why it costs", "When not to", "Fix safety", "References")


@dataclass(frozen=True)
class Loaded:
    """A rule with the module that holds its page."""

    rule: Rule
    origin: str
    page: str

    @property
    def title(self) -> str:
        """First line of the page."""
        return self.page.strip().splitlines()[0]


def load(folder: Path | None = None) -> tuple[dict[str, Loaded], tuple[RuleError, ...]]:
    """Every rule by id, in order of id, and the errors of rules that could not be loaded."""
    found: dict[str, Loaded] = {}
    errors: list[RuleError] = []
    package = importlib.import_module("advisor.rules")
    modules = [importlib.import_module(f"advisor.rules.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    for module in modules:
        _add(found, module, "built in")
    for entry in importlib.metadata.entry_points(group=GROUP):
        with _guarded(errors, entry.name):
            _add(found, _as_module(entry.load()), f"entry point {entry.name}")
    if folder is not None:
        if not folder.is_dir():
            raise UsageError(f"the rules folder {folder} does not exist")
        for path in sorted(folder.glob("*.py")):
            if path.stem != "__init__":
                with _guarded(errors, path.stem):
                    _add(found, _from_file(path), str(path))
    return dict(sorted(found.items())), tuple(errors)


def built_in_folder() -> Path:
    """Where the files of the built-in rules lie."""
    return Path(str(importlib.import_module("advisor.rules").__file__)).resolve().parent


def _check_class(cls: type[Rule], module: ModuleType) -> None:
    """What a rule must say of itself before it can be asked anything; raises UsageError with the attribute to mend."""
    identifier = getattr(cls, "id", None)
    if not isinstance(identifier, str):
        raise UsageError(f'{cls.__name__} has no id: add id = "{module.__name__.rsplit(".", 1)[-1].replace("_", "-")}"')
    stem = module.__name__.rsplit(".", 1)[-1]
    if identifier.replace("-", "_") != stem.replace("-", "_"):
        raise UsageError(f"rule {identifier} stands in {stem}.py: the file is named as the rule, with underscores")
    if not isinstance(getattr(cls, "safety", None), Safety):
        raise UsageError(f"rule {identifier} has no safety: add safety = Safety.NUMERICS, or the level that is true")
    if not isinstance(cls.order, int):
        raise UsageError(f"rule {identifier}: its order is {cls.order!r}: a whole number, see advisor.rule.Rule.order")
    unknown = [need for need in cls.needs if need not in NEEDS]
    if unknown:
        raise UsageError(f"rule {identifier} needs {unknown[0]!r}, which no profile holds: one of {', '.join(NEEDS)}")


def _as_module(value: object) -> ModuleType:
    module = value if isinstance(value, ModuleType) else inspect.getmodule(value)
    assert module is not None
    return module


@contextmanager
def _guarded(errors: list[RuleError], name: str) -> Iterator[None]:
    """Foreign code may raise anything; it becomes an error of that rule and the others still load."""
    try:
        yield
    except UsageError as error:
        errors.append(RuleError(f"rule {name} could not be loaded: {error}", rule=name))
    except Exception as error:  # noqa: BLE001 - a rule that raises is reported by id, the others still count
        errors.append(RuleError(f"rule {name} could not be loaded: {error}", rule=name, detail=_traceback(error)))


def _traceback(error: Exception) -> str:
    """The traceback from the first frame of the rule's own code on; none of it where that cannot be compiled."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _from_file(path: Path) -> ModuleType:
    name = f"advisor_user_rules.{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _add(found: dict[str, Loaded], module: ModuleType, origin: str) -> None:
    """The rules that a module defines; raises UsageError where one is incomplete, or its id is taken."""
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    classes = [cls for cls in own if issubclass(cls, Rule)]
    complete = [cls for cls in classes if not inspect.isabstract(cls)]
    if classes and not complete:
        missing = " and ".join(sorted(classes[-1].__abstractmethods__))
        raise UsageError(f"{classes[-1].__name__} has no {missing}: write what advisor.rule.Rule leaves open")
    for cls in complete:
        _check_class(cls, module)
        rule = cls()
        if rule.id in found:
            raise UsageError(f"two rules are called {rule.id}: {found[rule.id].origin} and {origin}")
        found[rule.id] = Loaded(rule, origin, inspect.getdoc(module) or rule.id)
