"""One run on its way through the stages: what was asked, where it is kept, how the user's script is started."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor import registry, rundir
from advisor.capture.launch import Child
from advisor.config import Config, merge
from advisor.errors import RuleError, UsageError
from advisor.machine import project_root
from advisor.progress import Progress
from advisor.redact import Redactor
from advisor.registry import Loaded
from advisor.rule import Rule
from advisor.rundir import RunDir
from advisor.session import Spec
from advisor.source import Source

SCHEMA = 1  # of run.json
MOST_FILES = 200  # Python files of a folder that are looked through


@dataclass
class Request:
    """What the user asked for; `run_id` is set as soon as the run has a directory."""

    script: Path | None
    arguments: tuple[str, ...]
    config: Config
    entry: str | None = None
    out: Path | None = None
    resume: str | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class Rules:
    """The rules a run asks, by id, with their pages, and the errors of those that could not be loaded."""

    asked: dict[str, Rule]
    errors: tuple[RuleError, ...]
    pages: Mapping[str, Loaded]


def load_rules(config: Config) -> Rules:
    """The rules the settings select; raises UsageError for a folder or a rule that does not exist."""
    loaded, errors = registry.load(Path(config.rules_folder) if config.rules_folder else None)
    unknown = [r for r in (*config.select, *config.ignore) if r not in loaded]
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]}: `advisor rules` lists them")
    selected = config.select or tuple(loaded)
    asked = {name: item.rule for name, item in loaded.items() if name in selected and name not in config.ignore}
    return Rules(asked, errors, {name: loaded[name] for name in asked})


@dataclass
class Job:
    """One run on its way through the stages."""

    script: Path
    arguments: tuple[str, ...]
    entry: str | None
    root: Path
    config: Config
    run: RunDir
    progress: Progress
    rules: Rules = field(default_factory=lambda: load_rules(Config()))
    sources: dict[str, Source] = field(default_factory=dict)

    def read(self, path: str) -> Source:
        """A source of the user, parsed once."""
        if path not in self.sources:
            self.sources[path] = Source.read(self.root, path)
        return self.sources[path]

    def files_in(self, folder: str) -> tuple[str, ...]:
        """The paths of the Python files of a folder below the root; none of one that holds too many for a project."""
        found = sorted(path.name for path in (self.root / folder).glob("*.py"))
        return tuple(f"{folder}/{name}" if folder else name for name in found) if len(found) <= MOST_FILES else ()

    def spec(self, plan_name: str, out: Path, **options: Any) -> Spec:
        """A run of the user's script under a plan."""
        return Spec(
            script=str(self.script),
            argv=self.arguments,
            root=str(self.root),
            out=str(out),
            plan=plan_name,
            seed=self.config.seed,
            entry=self.entry,
            options=options,
        )

    def spawn(self, spec: Spec) -> Child:
        """Start a child for a spec; the way every stage runs the user's script."""
        return Child(spec, interpreter=self.config.python or sys.executable, redact=self.run.redactor.text)


KEPT = (
    "steps profile_steps warmup allow worth select ignore peak_flops trajectory_steps min_quads seed"
).split()  # settings a resumed run takes over; its time, folders and interpreter are those of the new command


def begin(request: Request, progress: Progress) -> Job:
    """A new run, or the interrupted one named by `request.resume`; raises UsageError where the two cannot be told.

    What is wrong with the request is said before a new run gets its directory.
    """
    _check_interpreter(request.config)
    if request.resume is not None:
        return _resumed(request, progress)
    assert request.script is not None
    if not request.script.exists():
        raise UsageError(f"no such file: {request.script}")
    script = request.script.resolve()
    root = project_root(script)
    Source.read(root, os.path.relpath(script, root))
    if request.entry is not None and not all(request.entry.partition(":")):
        raise UsageError(f"--entry {request.entry} names no function: give it as module:function")
    rules = load_rules(request.config)
    run = rundir.create(request.out, Redactor.of_machine())
    request.run_id = run.id
    stored = {
        "schema": SCHEMA,
        "script": os.path.relpath(script, root),
        "arguments": list(request.arguments),
        "arguments_sha256": _digest(request.arguments),
        "entry": request.entry,
        "root": os.path.relpath(root, run.path.resolve()),
        "folder": os.path.relpath(Path.cwd(), root),
        "config": {name: getattr(request.config, name) for name in KEPT},
    }
    run.write_json(rundir.REQUEST, stored)
    return Job(script, request.arguments, request.entry, root, request.config, run, progress, rules)


def _check_interpreter(config: Config) -> None:
    if config.python is not None and shutil.which(config.python) is None:
        raise UsageError(f"{config.python} is no interpreter that can be started: give the path of one with --python")


def _resumed(request: Request, progress: Progress) -> Job:
    """The interrupted run as it was asked for; arguments that are not stored, being secret, must be given again."""
    run = rundir.find(request.resume, request.out, Redactor.of_machine())
    request.run_id = run.id
    asked = rundir.request_of(run)
    root = rundir.root_of(run, asked)
    script = root / asked["script"]
    if request.script is not None and request.script.resolve() != script.resolve():
        raise UsageError(f"run {run.id} is of {asked['script']}: leave the script out, or start a new run")
    arguments = request.arguments or tuple(asked["arguments"])
    if _digest(arguments) != asked.get("arguments_sha256", _digest(arguments)):
        raise UsageError(
            f"the arguments of run {run.id} are not stored as given, because they hold a secret or a private path: "
            f"repeat them, as in advisor optimize --resume {run.id} {asked['script']} -- ARGUMENTS"
        )
    if os.path.relpath(Path.cwd(), root) != asked.get("folder", os.path.relpath(Path.cwd(), root)):
        raise UsageError(f"run {run.id} was started in {asked['folder']} of the project: resume it from there")
    config = merge(
        request.config, **{k: tuple(v) if isinstance(v, list) else v for k, v in asked.get("config", {}).items()}
    )
    job = Job(script, arguments, asked["entry"], root, config, run, progress, load_rules(config))
    job.read(os.path.relpath(script, root))
    return job


def _digest(arguments: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(arguments).encode()).hexdigest()
