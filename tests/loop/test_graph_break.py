"""Breaks of the graph that a script compiles: recorded from its own compilation, closed where that is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verdicts import improved

from advisor import codemod
from advisor.model import Span
from advisor.patterns import breaks
from advisor.source import Source

SCRIPT = """\
import json
import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.stats = []

    def forward(self, x):
        h = self.linear(x)
        if h.abs().max().item() > 0.5:
            h = h.clamp(-0.5, 0.5)
        self.stats.append(float(h.mean()))
        return x + h


net = nn.Sequential(Block(), Block())
model = torch.compile(net, backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(30):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
kept = [float(value) for block in net for value in block.stats]
limits = [m for m in get_compilation_metrics() if "limit" in (m.fail_reason or "")]
print(json.dumps([losses, kept, sum(counters["graph_break"].values()), len(limits)]))
"""


def checked(path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "advisor", "check", path.name, "--worth", "0", "--json", "-q"]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    return [one for one in (*said["findings"], *said["declines"]) if one["rule"] in ("graph-break", "recompile")]


def printed(path: Path, *arguments: str) -> list[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return list(json.loads(done.stdout.splitlines()[-1]))


def edited(path: Path, edits: list[dict[str, Any]]) -> Path:
    """A copy of a script with the edits of a finding."""
    names = ("line", "column", "end_line", "end_column")
    spans = [(Span(path=path.name, **{name: edit[name] for name in names}), edit["text"]) for edit in edits]
    after = path.with_name("after.py")
    after.write_text(codemod.apply(Source.read(path.parent, path.name), spans), encoding="utf-8")
    return after


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(SCRIPT.splitlines(), start=1) if text in line)


@pytest.mark.slow
def test_both_lines_are_found_and_the_edit_closes_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    said = checked(path)
    found = {one["line"]: one for one in said if one["status"] == "found"}
    assert set(found) == {line_of("if h.abs()"), line_of("self.stats.append")}
    assert not [one for one in said if one["rule"] == "recompile" and one["status"] != "declined"]
    edits = found[line_of("if h.abs()")]["edits"]
    assert edits == found[line_of("self.stats.append")]["edits"]
    after = edited(path, edits)
    losses, kept, broken, _ = printed(path)
    new_losses, new_kept, new_broken, limits = printed(after)
    assert broken > 0 and new_broken == 0 and limits == 0
    assert new_losses == pytest.approx(losses, rel=1e-5) and new_kept == pytest.approx(kept, rel=1e-5)


TRAINED = (
    SCRIPT.replace('backend="eager"', 'backend="aot_eager"')
    .replace("nn.Sequential(Block(), Block())", "nn.Sequential(*(Block() for _ in range(4)))")
    .replace("range(30)", "range(int(sys.argv[1]))")
    .replace("import json\n", "import json\nimport sys\n")
)


@pytest.mark.slow
def test_with_both_lines_closed_the_script_is_faster(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "train.py"
    path.write_text(TRAINED, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--select", "graph-break", "--no-baselines"]
    done = subprocess.run(
        [*command, "--time", "90", "--json", "--", "100000"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    improved(report)
    assert {f["line"]: f["status"] for f in report["findings"]} == {18: "applied", 20: "applied"}
    assert len([t for t in report["trials"] if t["label"].startswith("graph-break")]) == 1
    losses, kept, broken, _ = printed(path, "12")
    new_losses, new_kept, new_broken, limits = printed(edited(path, report["findings"][0]["edits"]), "12")
    assert broken > 0 and new_broken == 0 and limits == 0
    assert new_losses == pytest.approx(losses, rel=1e-5) and new_kept == pytest.approx(kept, rel=1e-5)


def source(text: str) -> Source:
    return Source("train.py", text)


HEAD = "import torch\n\n\ndef forward(h):\n"


def clamp(text: str) -> str:
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    made = source(f"{HEAD}{lines}    return h\n")
    statement = next(s for s in made.tree.body[1].body)  # type: ignore[attr-defined]
    return codemod.apply(made, breaks.unconditional(made, statement))


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ("h.abs().max() > LIMIT", "h.clamp(-LIMIT, LIMIT)"),
        ("h.abs().max().item() >= LIMIT", "torch.clamp(h, min=-LIMIT, max=LIMIT)"),
        ("LIMIT < float(torch.max(torch.abs(h)))", "h.clip(-LIMIT, LIMIT)"),
        ("h.detach().abs().amax().item() > self.limit", "h.clamp(-self.limit, self.limit)"),
        ("h.max().item() > 5", "h.clamp(max=5)"),
        ("h.min() < -5", "h.clamp_min(-5)"),
        ("(h > 5).any()", "torch.clamp_max(h, 5)"),
        ("torch.any(h.abs() > LIMIT).item()", "h.clamp(-LIMIT, LIMIT)"),
    ],
)
def test_conditions_that_the_clamp_makes_superfluous(test: str, value: str) -> None:
    assert clamp(f"if {test}:\n    h = {value}") == f"{HEAD}    h = {value}\n    return h\n"


@pytest.mark.parametrize(
    "text",
    [
        "if h.abs().max() > 10:\n    h = h.clamp(-5, 5)",  # another limit
        "if h.abs().max() > LIMIT:\n    h = h.clamp(max=LIMIT)",  # one side only
        "if h.max() > LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)",  # the other side is not asked for
        "if h.abs().max() < LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)",
        "if h.abs().mean() > LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)",
        "if x.abs().max() > LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)",  # of another tensor
        "if h.abs().max() > LIMIT:\n    g = h.clamp(-LIMIT, LIMIT)",
        "if h.abs().max() > LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)\nelse:\n    h = h + 1",
        "if h.abs().max() > LIMIT:\n    h = h.clamp(-LIMIT, LIMIT)\n    n += 1",
        "if h.abs().max() > LIMIT and step > 3:\n    h = h.clamp(-LIMIT, LIMIT)",
        "if h.abs().max() > limit():\n    h = h.clamp(-limit(), limit())",
        "if h.abs().max() > LIMIT:\n    h.clamp_(-LIMIT, LIMIT)",  # other names of the tensor would see it
        "if torch.isinf(h).any():\n    h = h.clamp(-LIMIT, LIMIT)",
        "if h.abs().max() > LIMIT:\n    h = h * 2",
        "if h.abs().max() > 1e5:\n    h = h.clamp(-1e5, 1e5)",  # the clamp raises in float16
        "if h.max() > LIMIT:\n    h = h.clamp(max=LIMIT)\nh += residual",  # other names of the tensor would see it
        "if h.max() > LIMIT:\n    h = h.clamp(max=LIMIT)\nF.relu(h, inplace=True)",
        "if h.max() > LIMIT:\n    h = h.clamp(max=LIMIT)\nh[0].mul_(2)",
    ],
)
def test_other_conditions_stay(text: str) -> None:
    with pytest.raises(codemod.CannotEdit):
        clamp(text)


KEPT = """\
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stats = []
        self.last = 0.0

    def forward(self, h):
        self.stats.append(h.mean().item())
        self.last = h.std().item()
        return h
"""


def unlike(reader: str, which: int = 0) -> str | None:
    made = source(f"{KEPT}\n\n{reader}\n")
    forward = made.tree.body[1].body[1]  # type: ignore[attr-defined]
    return breaks.read_alike([made], made, forward.body[which])


@pytest.mark.parametrize(
    "reader",
    [
        "print(f'{model.stats[-1]:.3f}')",
        "values = [float(v) for v in model.stats]",
        "for v in model.stats:\n    print(f'{v}')",
        "mean = float(sum(model.stats) / len(model.stats))",
        "model.stats.clear()",
        "model.stats = []",
        "log = {'stats': 1}\nlog['stats']",
        "float(sum(model.stats[-10:]) / 10)",
    ],
)
def test_readers_that_make_numbers(reader: str) -> None:
    assert unlike(reader) is None


@pytest.mark.parametrize(
    "reader",
    [
        "json.dump(model.stats, file)",
        "print(model.stats[-1])",
        "import numpy as np\nnp.mean(model.stats)",
        "if model.stats:\n    pass",
        "values = list(model.stats)",
        "values = [v for v in model.stats]",
        "for v in model.stats:\n    total.append(v)",
        "if model.stats[-1] > 3:\n    pass",
        "getattr(model, 'stats')",
        "vars(model)['stats']",
        "log = {'stats': 1}\ngetattr(model, name)",
        "model.stats.append(3.0)",
        "model.stats += [1.0]",
        "model.stats = [0.0]",
        "model.stats.pop()",
        "model = torch.nn.DataParallel(Block())",
        "for v in model.stats:\n    float(v)\nprint(v)",
        "model.to('mps')",
    ],
)
def test_readers_that_need_numbers(reader: str) -> None:
    assert unlike(reader) is not None


@pytest.mark.parametrize(
    ("reader", "same"),
    [
        ("print(f'{model.last:.2f}')", True),
        ("float(model.last)", True),
        ("writer.add_scalar('std', model.last)", False),
        ("if model.last > 2:\n    pass", False),
        ("model.last += 1", False),
    ],
)
def test_a_single_number(reader: str, same: bool) -> None:
    assert (unlike(reader, 1) is None) is same


def test_a_list_that_is_emptied_stays_empty_as_a_tensor() -> None:
    made = source(f"{KEPT}\n\nmodel.stats.clear()\nmodel.stats = list()\n")
    forward = made.tree.body[1].body[1]  # type: ignore[attr-defined]
    after = codemod.apply(made, breaks.on_the_device(made, forward.body[0]))
    empty = "torch.zeros(0, dtype=torch.float64)"  # sums of numbers of Python's are float64
    assert f"        self.stats = {empty}\n" in after and f"model.stats = {empty}\n" in after
    assert "model.stats = model.stats[:0]\n" in after
    assert "self.stats = torch.cat((self.stats.to(h.device), h.mean().detach().reshape(1)))\n" in after


def test_numbers_stay_as_exact_as_those_of_python() -> None:
    torch = pytest.importorskip("torch")
    made = source(f"{KEPT}\n")
    forward = made.tree.body[1].body[1]  # type: ignore[attr-defined]
    after = codemod.apply(made, [e for s in forward.body[:2] for e in breaks.on_the_device(made, s)])
    models = []
    for text in (KEPT, after):
        names: dict[str, Any] = {}
        exec(compile(text, "train.py", "exec"), names)
        models.append(names["Block"]())
        torch.manual_seed(0)
        for _ in range(300):
            models[-1](torch.rand(8).bfloat16())
    one, other = models
    assert f"{sum(one.stats) / len(one.stats)}" == f"{sum(other.stats) / len(other.stats)}"
    assert f"{one.last * 100 - 3}" == f"{other.last * 100 - 3}"
