"""Examines public repositories against models_key.json: `python run_models.py CHECKOUTS [--python PATH] [NAME ...]`.

CHECKOUTS holds one folder a repository, by its name, at the commit of the key; nothing of them is kept here. A recipe
of recipes/ is put into the root of the checkout for as long as it runs, so that the repository's files count as the
user's own. The packages that a repository imports must be there for the interpreter.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from applying import apply_all
from examiner import Answer, Entry, ask
from results import expectations, row, setting, tell, write

HERE = Path(__file__).parent
HELPERS = ("recipe_help.py", "torchvision_schemas.py")


def main() -> None:
    """Run the recipes that are asked for and write the results beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", help="recipes (default: all)")
    parser.add_argument("--python", help="interpreter that runs the recipes")
    parser.add_argument("--apply", action="store_true", help="apply every rewrite and compare the losses")
    parser.add_argument("--results", type=Path, default=HERE / "results_models")
    given = parser.parse_args()
    rows = []
    for repository, name, key in recipes():
        if given.names and name not in given.names:
            continue
        checkout = given.checkouts / repository["repository"].rpartition("/")[2]
        answer, applied = Answer((), ("no checkout",)), []
        if checkout.is_dir():
            answer, applied = examine(checkout, name, given.python, apply=given.apply)
        origin = f"{repository['repository']} {repository['commit']}"
        found = row(name, origin, expectations(key), answer, applied)
        rows.append(found)
        tell(found)
    not_run = json.loads((HERE / "models_not_run.json").read_text(encoding="utf-8"))
    write(rows, "Public repositories", given.results, setting(given.python or sys.executable, not_run))


def recipes() -> Iterator[tuple[dict[str, Any], str, list[dict[str, Any]]]]:
    """Every repository of the key with each of its recipes and the key of that."""
    for repository in json.loads((HERE / "models_key.json").read_text(encoding="utf-8")):
        for name, key in repository["recipes"].items():
            yield repository, name, key


def examine(
    checkout: Path, name: str, interpreter: str | None, *, apply: bool = False
) -> tuple[Answer, list[tuple[Entry, str]]]:
    """Put the recipe into a copy of the checkout, ask about it there, and apply the rewrites if told to."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / checkout.name
        shutil.copytree(checkout, root, ignore=shutil.ignore_patterns(".advisor", ".git", "train_exam_*"))
        for helper in HELPERS:
            shutil.copy(HERE / helper, root)
        script = root / f"train_exam_{name}.py"
        shutil.copy(HERE / "recipes" / f"{name}.py", script)
        answer = ask(script, interpreter=interpreter)
        return answer, apply_all(script, answer, interpreter) if apply else []


if __name__ == "__main__":
    main()
