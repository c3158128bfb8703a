"""One run on its way through the stages: what was asked, where it is kept, how the user's script is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor import rundir
from advisor.capture.launch import Child
from advisor.config import Config
from advisor.errors import UsageError
from advisor.machine import project_root
from advisor.progress import Progress
from advisor.redact import Redactor
from advisor.rundir import RunDir
from advisor.session import Spec
from advisor.source import Source

SCHEMA = 1  # of run.json


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
    sources: dict[str, Source] = field(default_factory=dict)

    def read(self, path: str) -> Source:
        """A source of the user, parsed once."""
        if path not in self.sources:
            self.sources[path] = Source.read(self.root, path)
        return self.sources[path]

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


def begin(request: Request, progress: Progress) -> Job:
    redactor = Redactor.of_machine()
    if request.resume is not None:
        run = rundir.find(request.resume, request.out, redactor)
        asked = rundir.request_of(run)
        root = (run.path / asked["root"]).resolve()
        script, arguments, entry = root / asked["script"], tuple(asked["arguments"]), asked["entry"]
    else:
        assert request.script is not None
        if not request.script.exists():
            raise UsageError(f"no such file: {request.script}")
        script, arguments, entry = request.script.resolve(), request.arguments, request.entry
        root = project_root(script)
        Source.read(root, os.path.relpath(script, root))
        run = rundir.create(request.out, redactor)
    request.run_id = run.id
    job = Job(script, arguments, entry, root, request.config, run, progress)
    job.read(os.path.relpath(script, root))
    if request.resume is None:
        run.write_json(
            rundir.REQUEST,
            {
                "schema": SCHEMA,
                "script": os.path.relpath(script, root),
                "arguments": list(arguments),
                "entry": entry,
                "root": os.path.relpath(root, run.path.resolve()),
            },
        )
    return job
