"""Examines models of installed packages: `python run_packages.py [--python PATH ...] [NAME ...]`.

The key is packages_key.json. Each script of scripts/ runs with the first interpreter, of those given and this one, that
has its packages at the versions of the key, or else with the first that has them at all; the table says what it had.
Transformers needs one in which torchvision is missing or fits torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from applying import apply_all
from examiner import Answer, Entry, ask
from results import Row, expectations, row, setting, tell, write

HERE = Path(__file__).parent
HELPER = "torchvision_schemas.py"
WITHOUT_LOOP = ("kernelbench_form",)


def main() -> None:
    """Run the scripts that are asked for and write the results beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts (default: all)")
    parser.add_argument("--python", action="append", default=[], help="another interpreter, with more packages")
    parser.add_argument("--apply", action="store_true", help="apply every rewrite and compare the losses")
    parser.add_argument("--results", type=Path, default=HERE / "results_packages")
    given = parser.parse_args()
    rows = []
    for name, entry in key().items():
        if not given.names or name in given.names:
            rows.append(_row(name, entry, (*given.python, sys.executable), given.apply))
            tell(rows[-1])
    write(rows, "Models of installed packages", given.results, setting(sys.executable))


def key() -> dict[str, dict[str, Any]]:
    """The scripts by name: their packages, with the versions the places were read at, and what must be said."""
    loaded: dict[str, dict[str, Any]] = json.loads((HERE / "packages_key.json").read_text(encoding="utf-8"))
    return loaded


def examine(
    name: str, interpreter: str | None = None, *, apply: bool = False
) -> tuple[Answer, list[tuple[Entry, str]]]:
    """Ask about a copy of a script in a folder of its own, and apply the rewrites if told to."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        shutil.copy(HERE / "scripts" / script.name, script)
        shutil.copy(HERE / HELPER, folder)
        answer = ask(script, interpreter=interpreter)
        return answer, apply_all(script, answer, interpreter) if apply else []


def _row(name: str, entry: dict[str, Any], interpreters: tuple[str, ...], apply: bool) -> Row:
    asked: dict[str, str] = entry["packages"]
    had = {path: found for path in interpreters if (found := _versions(path, tuple(asked))) is not None}
    answer, applied = Answer((), (f"no interpreter has {_origin(asked)}",)), []
    if had:
        chosen = next((path for path, found in had.items() if found == asked), next(iter(had)))
        asked = had[chosen]
        answer, applied = examine(name, chosen, apply=apply and name not in WITHOUT_LOOP)
    return row(name, _origin(asked), expectations(entry["key"]), answer, applied)


def _origin(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items()) or "torch"


@functools.cache
def _versions(interpreter: str, packages: tuple[str, ...]) -> dict[str, str] | None:
    asked = f"import importlib.metadata as m; print(*(m.version(name) for name in {packages}))"
    ended = subprocess.run([interpreter, "-c", asked], capture_output=True, text=True)
    if ended.returncode:
        return None
    public = [version.partition("+")[0] for version in ended.stdout.split()]  # without the name of the build
    return dict(zip(packages, public, strict=True))


if __name__ == "__main__":
    main()
