"""Runs the composite action as GitHub's runner does: expressions, inputs, environment, bash; nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "samples" / "bot"

# `-m pip install` and `-m venv` are noted down instead of done, since advisor is there already; `advisor bot measure`
# is the real command with the recorded measurement in place of the engine.
_PYTHON = """#!/bin/bash
given=("$@")
[ "$1" = -I ] && shift
case "$1 $2 $3" in
  "-m pip install") echo "$PWD | token ${ADVISOR_TOKEN:+seen} | ${*: -1}" >> "$NOTES/pip"; exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit 0 ;;
  "-m advisor bot") if [ "$4" = measure ]; then shift 2; exec "$REAL_PYTHON" -P "$MEASURED" "$@"; fi ;;
esac
exec "$REAL_PYTHON" "${given[@]}"
"""

_MEASURED = """
import dataclasses, json, os, sys
from pathlib import Path
sys.path.append({tests!r})
from handed import recorded
from advisor import comparing
from advisor.bot import measure
from advisor.cli import main

def instead(order, progress):
    note = Path(os.environ["NOTES"], "measured.json")
    trees = {{name: (getattr(order, name) / "train.py").read_text() for name in ("base", "head")}}
    seen = {{name: value for name, value in os.environ.items() if "TOKEN" in name}}
    note.write_text(json.dumps(dict(trees, cwd=os.getcwd(), seen=seen, scripts=order.config.bot.scripts)))
    found = recorded()
    (script,) = found.scripts
    if order.purpose == "examine":
        (proposal,) = script.proposals
        print("::add-mask::base")
        edits = {{next(f.fingerprint for f in script.report.findings if f.status == "applied"): proposal.files}}
        script = dataclasses.replace(script, proposals=(), rewrites=edits, comparison=comparing.failed("none here"))
    change = dict(base=order.base_commit, head=order.head_commit, purpose=order.purpose, scripts=(script,))
    return dataclasses.replace(found, **change)

measure.measure = instead
sys.argv[0] = "advisor"
main()
"""


def load(path: Path) -> Any:
    """A YAML file as YAML 1.2 has it, where `on` is a word."""
    return YAML(typ="safe").load(path)


def evaluated(expression: str, context: Mapping[str, Any]) -> Any:
    """An expression of GitHub made of names, texts, `!`, `==`, `!=`, `&&`, `||` and brackets."""
    tokens = re.findall(r"'[^']*'|[\w.-]+|\|\||&&|==|!=|!|\(|\)", expression)

    def either() -> Any:
        value = both()
        while tokens and tokens[0] == "||":
            tokens.pop(0)
            other = both()
            value = value or other
        return value

    def both() -> Any:
        value = compared()
        while tokens and tokens[0] == "&&":
            tokens.pop(0)
            other = compared()
            value = value and other
        return value

    def compared() -> Any:
        value = one()
        while tokens and tokens[0] in ("==", "!="):
            same = tokens.pop(0) == "=="
            value = (value == one()) is same
        return value

    def one() -> Any:
        token = tokens.pop(0)
        if token == "!":
            return not one()
        if token == "(":
            value = either()
            tokens.pop(0)
            return value
        if token.startswith("'"):
            return token[1:-1]
        value = context
        for name in token.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    found = either()
    assert not tokens, tokens
    return found


def filled(text: Any, context: Mapping[str, Any]) -> str:
    """A text with its `${{ }}`; null is empty."""

    def value(match: re.Match[str]) -> str:
        found = evaluated(match[1], context)
        return "" if found is None else str(found).lower() if isinstance(found, bool) else str(found)

    return re.sub(r"\$\{\{(.*?)\}\}", value, str(text))


@dataclass
class Ran:
    """How a run of the action ended: status of the step that failed, or 0, and what all of them printed."""

    status: int
    said: str
    steps: list[str] = field(default_factory=list)


@dataclass
class Runner:
    """One job on one machine: `workspace` is the checkout, `notes` what the stand-ins of pip and the engine saw."""

    folder: Path
    github: dict[str, Any]

    def __post_init__(self) -> None:
        for name in ("workspace", "temp", "notes", "bin"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        shim = self.folder / "bin" / "python3"
        shim.write_text(_PYTHON, encoding="utf-8")
        shim.chmod(0o755)
        (self.folder / "measured.py").write_text(_MEASURED.format(tests=str(Path(__file__).parent)), encoding="utf-8")

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "REAL_PYTHON": sys.executable,
            "MEASURED": str(self.folder / "measured.py"),
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_ACTION_PATH": str(ROOT),
            "RUNNER_TEMP": str(self.folder / "temp"),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }

    def act(self, **inputs: str) -> Ran:
        """Use the action with inputs (`base_ref` for base-ref)."""
        action = load(ROOT / "action.yml")
        known = action["inputs"]
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert set(given) <= set(known), "GitHub warns of an input that the action lacks"
        values = {
            name: given.get(name, filled(about.get("default", ""), {"github": self.github}))
            for name, about in known.items()
        }
        context = {"inputs": values, "github": self.github}
        ran = Ran(0, "")
        for step in action["runs"]["steps"]:
            if "if" in step and not evaluated(step["if"], context):
                continue
            script = self.folder / "script.sh"
            script.write_text(step["run"], encoding="utf-8")
            env = {name: filled(text, context) for name, text in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
                cwd=self.workspace,
                env={**self.environment(), **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=60,
                text=True,
                check=False,
            )
            ran.steps.append(step["name"])
            ran.said += done.stdout
            if done.returncode:
                ran.status = done.returncode
                break
        return ran
