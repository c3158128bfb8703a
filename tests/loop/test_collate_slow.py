"""Batches built from lists of arrays: what is rewritten gives the same bits, what could differ is declined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verdicts import improved

from advisor import patch as patching
from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.rule import step

RULE = registry.load()[0]["collate-slow"].rule
FACTS: dict[str, Any] = {"dtypes": ["float64"], "results": ["float32"], "mixed": False, "elements": 4096, "loader": 0}

SCRIPT = """\
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
CLIPS = np.random.default_rng(0).standard_normal((16, 3, 8192))


class Clips(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        return CLIPS[i % 16].T, i % 10


def collate(rows):
    clips, labels = zip(*rows)
    return torch.FloatTensor(clips), torch.tensor(labels)  # both


net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8192, WIDTH), nn.Linear(WIDTH, 10))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for x, y in DataLoader(Clips(), batch_size=4, collate_fn=collate, num_workers=WORKERS):
    opt.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
"""
BUFFER = """\
import random

import numpy as np
import torch
from torch import nn

net = nn.Linear(2048, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-4)
rng = np.random.default_rng(0)
buffer = [(rng.standard_normal(2048), 1.0) for _ in range(64)]
for _ in range(200):
    states, rewards = zip(*random.sample(buffer, 16))
    x = torch.tensor(states, dtype=torch.float32)  # arrays
    loss = (net(x)[:, 0] - torch.tensor(rewards, dtype=torch.float32)).square().mean()  # numbers
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def answer(
    call: str, folder: Path, head: str = "import numpy as np\nimport torch\n", begin: str = "", **facts: object
) -> str | None:
    """The line with the call after the rewrite, or the reason of a decline; None where nothing is said."""
    text = f"{head}\n\ndef build(rows, keys):\n    {begin}return {call}\n"
    names = {"torch.tensor", "torch.as_tensor", "torch.FloatTensor", "torch.LongTensor"}
    profile = step(
        10_000, device="cpu", calls=dict.fromkeys(names, (1, 5_000)), called=dict.fromkeys(names, FACTS | facts)
    )
    ctx, source = testing.context_of(RULE, text, profile, folder)
    said = [RULE.rewrite(item, source) if isinstance(item, Finding) else item for item in RULE.match(ctx)]
    if not said:
        return None
    (result,) = said
    if isinstance(result, Decline):
        return result.reason
    assert isinstance(result, Rewrite)
    return patching.build([result], lambda _: source).sources["example.py"].split("    return ")[-1].rstrip()


def test_forms_that_people_write(tmp_path: Path) -> None:
    assert answer("torch.tensor(rows).to('cuda')", tmp_path) == "torch.tensor(np.array(rows)).to('cuda')"
    assert answer("torch.as_tensor(tuple(r.x for r in rows), dtype=torch.float32)", tmp_path) == (
        "torch.as_tensor(np.array(tuple(r.x for r in rows)), dtype=torch.float32)"
    )
    assert answer("torch.tensor(data=[r for r in rows], device=keys)", tmp_path) == (
        "torch.tensor(data=np.array([r for r in rows]), device=keys)"
    )
    assert answer("torch.tensor(\n        [r['ü'] for r in rows],  # kept\n        dtype=None)", tmp_path) == (
        "torch.tensor(\n        np.array([r['ü'] for r in rows]),  # kept\n        dtype=None)"
    )
    assert answer("FloatTensor(rows)", tmp_path, head="import numpy\nfrom torch import FloatTensor\n") == (
        "FloatTensor(numpy.array(rows))"
    )


def test_one_array_already(tmp_path: Path) -> None:
    assert answer("torch.tensor(np.stack(rows))", tmp_path) is None
    assert answer("torch.as_tensor(np.asarray([r[0] for r in rows]))", tmp_path) is None


def test_what_could_differ_is_declined(tmp_path: Path) -> None:
    assert answer("torch.LongTensor(rows)", tmp_path, results=["int64"]) == (
        "numbers of float64 that int64 does not hold raise here and would wrap around in one array"
    )
    assert answer("torch.tensor(rows, requires_grad=True)", tmp_path) == "it makes a leaf that gradients are asked of"
    assert answer("torch.tensor(rows, **keys)", tmp_path) == (
        "its arguments are unpacked from others: give it one array"
    )
    assert answer("torch.tensor(rows)", tmp_path, dtypes=["complex64"]) == (
        "arrays of complex64 are no numbers that one array of them would hand on as float32"
    )
    assert answer("np.stack(rows)", tmp_path) is None
    for call in (
        "[torch.tensor(column) for column in zip(*rows)]",
        "{k: torch.tensor([r[k] for r in rows]) for k in keys}",
    ):
        assert answer(call, tmp_path) == "the line builds every column of a batch, of numbers too: give it dtype"
    assert answer("[torch.tensor(c, dtype=torch.float32) for c in zip(*rows)]", tmp_path) == (
        "[torch.tensor(np.array(c), dtype=torch.float32) for c in zip(*rows)]"
    )


def test_a_list_that_may_be_empty_needs_a_type(tmp_path: Path) -> None:
    """torch makes float32 of an empty list, NumPy float64."""
    reason = "without dtype, an empty list and an empty array differ: give it dtype"
    assert answer("torch.tensor([r.box for r in rows if r.ok])", tmp_path) == reason
    assert answer("torch.tensor(rows.boxes)", tmp_path) == reason
    assert answer("torch.tensor(rows.boxes, dtype=None)", tmp_path) == reason
    assert answer("torch.tensor([r for r in rows])", tmp_path) == "torch.tensor(np.array([r for r in rows]))"
    assert answer("torch.tensor([rows[0], rows[1]])", tmp_path) == "torch.tensor(np.array([rows[0], rows[1]]))"
    assert answer("torch.FloatTensor(rows.boxes)", tmp_path) == "torch.FloatTensor(np.array(rows.boxes))"


def test_columns_that_a_zip_was_unpacked_into_hold_something(tmp_path: Path) -> None:
    """Of no rows there are no two columns to unpack."""
    begin = "xs, ys = zip(*rows.kept)\n    "
    assert answer("torch.tensor(xs)", tmp_path, begin=begin) == "torch.tensor(np.array(xs))"
    reason = "without dtype, an empty list and an empty array differ: give it dtype"
    for other in ("xs = list(zip(*rows.kept))\n    ", "xs, ys = zip(rows.a, rows.b)\n    ", f"{begin}xs = []\n    "):
        assert answer("torch.tensor(xs)", tmp_path, begin=other) == reason


@pytest.mark.parametrize("result", ["float16", "bfloat16", "float32", "float64", "int64", "bool"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int16", "int32", "int64", "bool"])
def test_what_is_rewritten_gives_the_same_bits(dtype: str, result: str, tmp_path: Path) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    call = f"torch.tensor(rows, dtype=torch.{result})"
    after = answer(call, tmp_path, dtypes=[dtype], results=[result])
    assert after is not None
    if "np.array" not in after:
        assert result == "int64" and dtype not in ("uint8", "int16", "int32", "int64")
        return
    rng = numpy.random.default_rng(0)
    values = rng.standard_normal((4, 5, 3)) * 10.0 ** rng.integers(-50, 50, (4, 5, 3))
    special = [numpy.nan, numpy.inf, -numpy.inf, -0.0, 5e-324, 65519.9999]
    values.reshape(-1)[: len(special)] = special
    whole = numpy.array([2**53 + 1, 2**60 + 2**36 + 1, 2**24 + 1, 2**31 - 1] * 15).reshape(4, 5, 3)
    with numpy.errstate(all="ignore"):
        made = (values if dtype.startswith("float") else whole).astype(dtype)
    rows = [row.T for row in made]
    known = {"rows": rows, "torch": torch, "np": numpy}
    try:
        before = eval(call, known)
    except TypeError:  # then no run has been seen that gave such a tensor
        return
    now = eval(after, known)
    assert now.dtype is before.dtype and now.stride() == before.stride()
    assert torch.equal(now.nan_to_num(1.5) if now.is_floating_point() else now,
                       before.nan_to_num(1.5) if before.is_floating_point() else before)  # fmt: skip
    assert now.tolist().__repr__() == before.tolist().__repr__()  # the sign of zero too


def advise(command: str, folder: Path, text: str, *arguments: str) -> dict[str, Any]:
    (folder / "train.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "advisor", command, "train.py", "--json", "-q", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def lines_of(report: dict[str, Any]) -> list[str]:
    """What is rewritten, as the lines that go and come."""
    found = [f["diff"].splitlines() for f in report["findings"] if f["rule"] == RULE.id]
    return [line[1:].strip() for diff in found for line in diff if line[:1] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_is_measured_here_and_in_workers(tmp_path: Path, workers: int) -> None:
    pytest.importorskip("torch")
    text = SCRIPT.replace("WORKERS", str(workers)).replace("WIDTH", "10")
    report = advise("check", tmp_path, text, "--worth", "0")
    assert lines_of(report) == [
        "return torch.FloatTensor(clips), torch.tensor(labels)  # both",
        "return torch.FloatTensor(np.array(clips)), torch.tensor(labels)  # both",
    ]


def test_a_buffer_in_the_loop_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = advise("check", tmp_path, BUFFER, "--worth", "0")
    assert lines_of(report)[1:] == ["x = torch.tensor(np.array(states), dtype=torch.float32)  # arrays"]


@pytest.mark.slow
def test_the_collate_function_improves_and_the_losses_stay(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = SCRIPT.replace("WORKERS", "0").replace("8192", "512").replace("WIDTH", "1024")
    report = advise("optimize", tmp_path, text, "--time", "90", "--no-baselines", "--select", RULE.id)
    improved(report)
    assert report["numerics"]["losses"] == report["numerics"]["base_losses"]
    assert "np.array(clips)" in report["diff"]
