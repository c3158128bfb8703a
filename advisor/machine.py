"""Facts about this machine and checkout: an allow-list for `env.json`, never a dump."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import advisor
from advisor.model import Environment, Hardware
from advisor.redact import environment_allow_list

MAX_SOURCES = 5000  # source files hashed into a fingerprint
SKIPPED_FOLDERS = ("site-packages", "node_modules", "__pycache__", "venv")


def sources_digest(script: Path, root: Path) -> str:
    """Hash of the script and of every Python source of its project, libraries not included."""
    digest = hashlib.sha256()
    for path in itertools.islice(itertools.chain([script], _source_files(root)), MAX_SOURCES):
        with contextlib.suppress(OSError):  # a dangling link
            digest.update(os.path.relpath(path, root).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_files(root: Path) -> Iterator[Path]:
    for folder, inside, names in os.walk(root):
        inside[:] = sorted(n for n in inside if not n.startswith(".") and n not in SKIPPED_FOLDERS)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def project_root(script: Path) -> Path:
    """The git work tree that holds the script, or the script's own folder."""
    folder = script.resolve().parent
    found = git(folder, "rev-parse", "--show-toplevel")
    return Path(found.strip()).resolve() if found else folder


def git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in `folder`, None where git is missing or refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def environment(
    root: Path, command: Sequence[str], seed: int, software: Mapping[str, Any], hardware: Hardware
) -> Environment:
    """What makes two runs comparable. `software` is what the child said of torch and CUDA."""
    changed = git(root, "status", "--porcelain", "--untracked-files=no")
    commit = git(root, "rev-parse", "HEAD")
    return Environment(
        python=platform.python_version(),
        torch=software.get("torch"),
        cuda=software.get("cuda"),
        driver=_driver(),
        platform=f"{platform.system()} {platform.machine()}",
        gpus=(hardware.name,) if hardware.kind == "cuda" else (),
        cpu=_processor(),
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        threads=software.get("threads"),
        command=tuple(command),
        commit=commit.strip() if commit else None,
        dirty=bool(changed.strip()) if changed is not None else None,
        seed=seed,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        advisor=advisor.__version__,
        variables=environment_allow_list(os.environ),
        collectors=tuple(software.get("collectors", ())),
        packages=dict(software.get("packages", {})),
    )


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _processor() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()
