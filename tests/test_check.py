"""`advisor check` on real scripts and recorded runs: what it says, what it leaves alone, how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor.checking import dealt

pytest.importorskip("torch")

TRANSFORMER = """\
import math
import os
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = F.softmax(att, dim=-1)
        y = att @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Watched(Attention):
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))).softmax(-1)
        y = weights @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c)), weights.pow(2).mean()


first, second = Attention(32, 4), Watched(32, 4)
head = nn.Linear(32, 8)
parameters = [p for module in (first, second, head) for p in module.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = first, second, head

    def forward(self, x):
        y, spread = self.second(x + self.first(x))
        return self.head(y).square().mean() + spread


model = Model()
for step in range(int(os.environ.get("STEPS", "40"))):
    loss = model(torch.randn(2, 16, 32))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RULE = '''\
"""Attention by its source.

## What it does
## Why it costs
## When not to
## Fix safety
## References
"""
from advisor.glance import glances
from advisor.model import Safety
from advisor.rule import Rule


class Seen(Rule):
    id = "seen"
    safety = Safety.NUMERICS

    def match(self, ctx):
        return iter(())

    def rewrite(self, finding, source):
        raise AssertionError

    def glance(self, source):
        return glances(source, "attention")
'''


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(TRANSFORMER.splitlines(), start=1) if text in line)


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "advisor", "check", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment, check=False
    )


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


def tree(folder: Path) -> dict[str, bytes]:
    """Every file outside of the runs."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and ".advisor" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script that was checked once, and what the command said."""
    folder = tmp_path_factory.mktemp("project")
    write(folder, "train.py", TRANSFORMER)
    before = tree(folder)
    done = run(folder, "train.py", "--worth", "0", "--json")
    (folder / ".advisor" / "said.json").write_text(done.stdout, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert tree(folder) == before
    return folder


@pytest.fixture(scope="module")
def said(project: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((project / ".advisor" / "said.json").read_text(encoding="utf-8"))
    return document


def recorded(project: Path) -> Path:
    (found,) = (project / ".advisor" / "runs").iterdir()
    return found


# -------------------------------------------------------------------------------------------------------------- content


def test_findings_and_declines_of_a_script(said: dict[str, Any]) -> None:
    assert said["schema_version"] == 1
    (file,) = said["files"]
    assert (file["path"], file["status"], file["device"]) == ("train.py", "measured", "CPU")
    assert file["step_ms"] > 0
    found = {(f["rule"], f["line"]): f for f in said["findings"]}
    attention = found["naive-attention", line_of("y = att @ v")]
    assert (attention["status"], attention["safety"], attention["script"]) == ("found", "numerics", "train.py")
    assert "+        y = F.scaled_dot_product_attention(q, k, v)" in attention["diff"]
    assert 0 < attention["estimate_us"][1] <= file["step_ms"] * 1e3
    declined = [d["reason"] for d in said["declines"] if d["rule"] == "naive-attention"]
    assert any("used elsewhere" in reason for reason in declined), declined
    assert ("naive-attention", line_of("y = weights @ v")) not in found


def test_entries_have_the_fields_of_a_report(said: dict[str, Any]) -> None:
    fields = set("rule path line end_line status title reason estimate_us saved_us safety evidence diff needs".split())
    for entry in (*said["findings"], *said["declines"]):
        assert fields <= set(entry)
        assert isinstance(entry["needs"], list)
        assert (entry["line"] is None) == (entry["end_line"] is None)
    assert all(entry["status"] == "declined" for entry in said["declines"])
    assert all(entry["status"] != "declined" for entry in said["findings"])


def test_edits_make_what_the_diff_shows(said: dict[str, Any]) -> None:
    lines = TRANSFORMER.splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    (found,) = (f for f in said["findings"] if f["rule"] == "naive-attention")
    text = TRANSFORMER
    edits = [
        (starts[e["line"] - 1] + e["column"], starts[e["end_line"] - 1] + e["end_column"], e) for e in found["edits"]
    ]
    for begin, end, edit in sorted(edits, key=lambda each: each[0], reverse=True):
        text = text[:begin] + edit["text"] + text[end:]
    added = [line[1:] for line in found["diff"].splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert added
    assert all(line in text.splitlines() for line in added)


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_recorded_run_is_read_and_never_written(project: Path, said: dict[str, Any]) -> None:
    folder = recorded(project)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    done = run(project, str(folder.relative_to(project)), "--worth", "0", "--json", "-q")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    places = [[(e["rule"], e["line"], e["status"]) for e in d["findings"]] for d in (document, said)]
    assert places[0] == places[1]
    assert document["files"][0]["run"] == folder.name
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert recorded(project) == folder


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--check", "--worth", "0"], 1),
        (["--check", "--worth", "1"], 0),
        (["--check", "--worth", "0", "--ignore", "naive-attention", "--select", "naive-attention"], 0),
        (["--worth", "0"], 0),
    ],
)
def test_the_gate(project: Path, options: list[str], status: int) -> None:
    done = run(project, "--run", recorded(project).name, "-q", *options)
    assert (done.returncode, done.stderr) == (status, "")
    assert re.search(r"^\d+ findings?, \d+ declines? in 1 file$", done.stdout, re.MULTILINE)


def test_a_run_whose_source_has_changed_is_refused(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "copy")
    (tmp_path / "copy" / "train.py").write_text(TRANSFORMER + "\n", encoding="utf-8")
    done = run(tmp_path / "copy", "--run", recorded(project).name, "-q")
    assert done.returncode == 4
    assert "train.py has changed" in done.stderr


def test_a_run_of_check_is_not_taken_for_one_with_a_verdict(project: Path) -> None:
    command = [sys.executable, "-m", "advisor", "apply"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "there is no run" in done.stderr


# ---------------------------------------------------------------------------------------------------------------- forms


def test_github_lines(project: Path) -> None:
    done = run(project, "--run", recorded(project).name, "-q", "--worth", "0", "--output-format", "github")
    line = line_of("y = att @ v")
    wanted = rf"^::warning file=train\.py,line={line},endLine=\d+,title=naive-attention::softmax attention"
    assert re.search(wanted, done.stdout, re.MULTILINE), done.stdout


def test_sarif_on_standard_output(project: Path) -> None:
    done = run(project, "--run", recorded(project).name, "-q", "--worth", "0", "--output-format", "sarif")
    document = json.loads(done.stdout)
    found = {r["ruleId"]: r for r in document["runs"][0]["results"]}["naive-attention"]
    assert found["level"] == "warning"
    assert found["fixes"]
    assert found["locations"][0]["physicalLocation"]["region"]["startLine"] == line_of("y = att @ v")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("y = att @ v", ["finding", "softmax attention is written out", "region", "operator.matmul (2, 4, 16, 8)"]),
        ("weights = ((q @", ["decline", "near miss", "used elsewhere", "method.softmax (2, 4, 16, 16)"]),
        ("super().__init__()", ["no rule's pattern starts here", "no operation was recorded", "nearest line"]),
    ],
)
def test_why(project: Path, text: str, words: list[str]) -> None:
    place = f"train.py:{line_of(text)}"
    done = run(project, "--run", recorded(project).name, "-q", "--worth", "0", "--why", place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(place)
    for word in words:
        assert word in done.stdout


def test_why_of_a_report(project: Path) -> None:
    command = [sys.executable, "-m", "advisor", "report", recorded(project).name, "--why"]
    where = f"train.py:{line_of('y = weights @ v')}"
    done = subprocess.run([*command, where], cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "used elsewhere" in done.stdout


# -------------------------------------------------------------------------------------------------------- short, broken


@pytest.mark.parametrize("steps", range(2, 12))
def test_steps_are_dealt_out_so_that_every_run_ends(steps: int) -> None:
    runs = dealt(steps)
    for options in runs:
        if options.get("brief"):
            needed = options["warmup"] + 2
        else:
            needed = options["warmup"] + options["steps"]
            needed += 0 if steps < 4 else options["profile_steps"] + 1 + (3 if options.get("annotate", True) else 0)
        assert needed <= steps, options


def test_a_script_of_four_steps_is_measured_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRANSFORMER)
    done = run(tmp_path, "train.py", "--worth", "0", "--json", "-q", "--select", "naive-attention", STEPS="4")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["files"][0]["status"] == "measured", document["files"]
    assert [(f["line"], f["status"]) for f in document["findings"]] == [(line_of("y = att @ v"), "found")]


def test_a_script_of_two_steps_is_told_in_part(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRANSFORMER)
    write(tmp_path, "seen.py", RULE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "seen.py").rename(tmp_path / "mine" / "seen.py")
    done = run(tmp_path, "train.py", "--rules", "mine", "--select", "seen", "--json", "-q", STEPS="2")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (file,) = document["files"]
    assert file["status"] == "partial"
    assert "after 2 steps" in file["missing"]["graph"]
    assert [(f["line"], f["status"]) for f in document["findings"]] == [(line_of("y = att @ v"), "not measured")]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("import a_module_nobody_has\n", "ModuleNotFoundError"),
        ("import torch\ntorch.zeros(1, device='cuda:7')\n", "the script raised"),
        ("import sys\nif len(sys.argv) > 1:\n    sys.exit(9)\n", "exit status 9"),
    ],
)
def test_a_script_that_cannot_run_is_looked_at_and_not_measured(tmp_path: Path, prefix: str, words: str) -> None:
    write(tmp_path, "train.py", prefix + TRANSFORMER)
    (tmp_path / "mine").mkdir()
    write(tmp_path, "mine/seen.py", RULE)
    done = run(tmp_path, "train.py", "--rules", "mine", "--select", "seen", "--json", "-q", "--check", "--", "--go")
    assert done.returncode == 3
    assert words in done.stderr
    document = json.loads(done.stdout)
    (file,) = document["files"]
    assert file["status"] == "not measured"
    assert words in file["reason"]
    (found,) = document["findings"]
    assert (found["rule"], found["status"], found["estimate_us"]) == ("seen", "not measured", None)
    assert found["line"] == line_of("y = att @ v") + prefix.count("\n")
    assert found["edits"] == []


def test_one_script_that_fails_leaves_the_others(tmp_path: Path) -> None:
    write(tmp_path, "good.py", TRANSFORMER)
    write(tmp_path, "raises.py", "raise RuntimeError('no data')\n")
    write(tmp_path, "torn.py", "x = 1\nfor for\n")
    paths = ("raises.py", "torn.py", "good.py")
    done = run(tmp_path, *paths, "--worth", "0", "--select", "naive-attention", "--json", "-q")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert [(f["path"], f["status"]) for f in document["files"]] == [
        ("raises.py", "not measured"),
        ("torn.py", "not measured"),
        ("good.py", "measured"),
    ]
    assert {f["script"] for f in document["findings"]} == {"good.py"}
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: the script raised RuntimeError: no data",
        "error: torn.py:2: invalid syntax",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name training scripts or a run"),
        (("missing.py",), "no such file: missing.py"),
        (("train.py", "."), "is a directory"),
        (("train.py", "--select", "nothing"), "there is no rule nothing"),
        (("train.py", "--json", "--output-format", "sarif"), "exclude each other"),
        (("train.py", "--why", "train.py"), "names no line"),
        (("train.py", "--why", "train.py:3", "--json"), "answers in text"),
        (("--run", "2099"), "there is no run"),
        (("train.py", "--worth", "7"), "from 0 to 1"),
    ],
)
def test_wrong_use_starts_nothing(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    write(tmp_path, "train.py", "raise SystemExit('started')\n")
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / ".advisor").exists()
