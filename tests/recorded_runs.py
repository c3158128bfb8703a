"""Runs recorded on a GPU, put back where the stages read them."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from rich.console import Console

from advisor.config import Config
from advisor.job import Job
from advisor.progress import Progress
from advisor.redact import Redactor
from advisor.rundir import RunDir

PACKED = ("graph.json.gz", "counters.json.gz")
READ = ("trace.json.gz", "annotated.json.gz", "probe.json", "capture.json", "env.json", *PACKED)


def restore(recording: Path, run: Path) -> None:
    """Copy what a recording holds of a run into its folder; what is packed to save room is unpacked."""
    for file in (recording / name for name in READ):
        if file.name in PACKED and file.is_file():
            (run / file.name.removesuffix(".gz")).write_bytes(gzip.decompress(file.read_bytes()))
        elif file.is_file():
            shutil.copy(file, run)


def job_of(script: Path, arguments: tuple[str, ...], root: Path, run: Path) -> Job:
    """A job over the folder of a run that shows no progress."""
    progress = Progress(Console(quiet=True), quiet=True)
    return Job(script, arguments, None, root, Config(), RunDir(run, Redactor.of_machine()), progress)
