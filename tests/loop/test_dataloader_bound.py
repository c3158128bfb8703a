"""Loaders that are waited for: where the setting is written is edited, what would change the data is declined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from verdicts import improved

from advisor import patch as patching
from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.rule import ExampleProfile, step
from advisor.source import Source

RULE = registry.load()[0]["dataloader-bound"].rule
HEAD = "import argparse\nimport functools\nfrom dataclasses import dataclass\nfrom torch.utils.data import DataLoader\n"
SLOW: dict[str, Any] = {"loader_wait_us": 5_000, "device": "cpu"}


def said(text: str, folder: Path, workers: int = 0, argv: tuple[str, ...] = (), **measured: Any) -> Finding | Decline:
    """What the rule says of the one loader, with `workers` in the run whatever the source seems to say."""
    profile: ExampleProfile = step(10_000, **{**SLOW, **measured})
    ctx, _ = testing.context_of(RULE, HEAD + text, profile, folder)
    loaders = [replace(x, arguments={**x.arguments, "num_workers": workers}) for x in ctx.profile.loaders]
    if not loaders:  # made through a partial, which the harness does not see
        source = Source.read(folder, testing.FILE)
        example, _ = testing.context_of(RULE, HEAD + "DataLoader(data)\n", profile, folder / "..")
        call = next(n for n in source.expressions_at(source.text[: source.text.index("make(")].count("\n") + 1, 9))
        loaders = [replace(example.profile.loaders[0], span=source.span(call))]
    environment = replace(ctx.profile.environment, command=("train.py", *argv))
    source = Source(testing.FILE, HEAD + text)
    ctx = replace(
        ctx,
        profile=replace(ctx.profile, loaders=tuple(loaders), environment=environment),
        read=lambda _: source,
        script=testing.FILE,
    )
    (found,) = RULE.match(ctx)
    return found


def result(text: str, folder: Path, **parts: Any) -> str:
    """The text after the rewrite, or the reason of a decline."""
    found = said(text, folder, **parts)
    source = Source(testing.FILE, HEAD + text)
    answer = RULE.rewrite(found, source) if isinstance(found, Finding) else found
    if isinstance(answer, Decline):
        return answer.reason
    assert isinstance(answer, Rewrite)
    return patching.build([answer], lambda _: source).sources[testing.FILE].removeprefix(HEAD)


OPTION = """\
parser = argparse.ArgumentParser()
parser.add_argument("-j", "--num-workers", type=int, default=0)
args = parser.parse_args()
loader = DataLoader(data, num_workers=args.num_workers)
"""
FIELD = """\
@dataclass
class Config:
    lr: float = 0.1
    workers: int = 0


cfg = Config()
loader = DataLoader(data, num_workers=cfg.workers)
"""
PARAMETER = """\
def make_loader(data, size, workers=0):
    return DataLoader(data, size, num_workers=workers)


loader = make_loader(data, 4)
"""


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("DataLoader(data, num_workers=0)\n", "=0", "=2"),
        ("N = 0\nDataLoader(data, num_workers=N)\n", "N = 0", "N = 2"),
        ('k = {"batch_size": 4, "num_workers": 0}\nDataLoader(data, **k)\n', ": 0", ": 2"),
        ('k = {\n    "batch_size": 4,\n}\nDataLoader(data, **k)\n', ": 4", ': 4, "num_workers": 2'),
        ("k = dict(batch_size=4)\nDataLoader(data, **k)\n", "=4", "=4, num_workers=2"),
        ("make = functools.partial(DataLoader, batch_size=4)\nloader = make(data)\n", "=4", "=4, num_workers=2"),
        (OPTION, "default=0", "default=2"),
        (FIELD, "workers: int = 0", "workers: int = 2"),
        (PARAMETER, "workers=0", "workers=2"),
    ],
)
def test_the_setting_is_changed_where_it_is_written(tmp_path: Path, text: str, old: str, new: str) -> None:
    (tmp_path / "inner").mkdir()
    assert text.count(old) == 1
    assert result(text, tmp_path / "inner") == text.replace(old, new)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("A, N = (8, 4) if big else (2, 0)\nDataLoader(data, num_workers=N)\n",
         "num_workers is `N`: set it where that gets its value, to 2"),
        ("N = 0\nprint(N)\nDataLoader(data, num_workers=N)\n",
         "num_workers is `N`: set it where that gets its value, to 2"),
        ('k = {"num_workers": 0}\nDataLoader(a, **k)\nother(**k)\n',
         "the call passes `**k`: set num_workers there, to 2"),
        ("DataLoader(data, **options())\n", "the call passes `**options()`: set num_workers there, to 2"),
        (OPTION + "print(args.num_workers)\n",
         "num_workers is `args.num_workers`: set it where that gets its value, to 2"),
        (PARAMETER + "other = make_loader(more, 4)\n",
         "num_workers is `workers`: set it where that gets its value, to 2"),
        (FIELD.replace("Config()", "Config(workers=0)"),
         "num_workers is `cfg.workers`: set it where that gets its value, to 2"),
    ],
)  # fmt: skip
def test_a_setting_that_others_read_is_told(tmp_path: Path, text: str, reason: str) -> None:
    assert result(text, tmp_path) == reason


def test_an_option_of_the_command_line_is_told(tmp_path: Path) -> None:
    told = "num_workers is `args.num_workers`: set it where that gets its value, to 2"
    for argv in (("--num-workers", "0"), ("--num-workers=0",), ("-j", "0")):
        assert result(OPTION, tmp_path, argv=argv) == told


@pytest.mark.parametrize(
    ("fetching", "reason"),
    [
        ({"changed_by_fetch": True},
         "fetching changes its dataset, of which every worker would have a copy of its own"),
        ({"changed_by_loop": True}, "the loop changes its dataset between batches, which a worker would not see"),
        ({"handles": ["open file"]}, "its dataset holds an object that worker processes cannot share: open file"),
        ({"sampler_moves": True}, "fetching changes its sampler, which workers ask for batches ahead of the loop"),
        ({"late": True},
         "random numbers are drawn between iter() and the first batch: workers would draw its order before them"),
        ({"batch_devices": ["cuda"]}, "its batches are made on the device: worker processes cannot hand them over"),
        ({"beside": ["Other"]}, "the same line makes a loader of Other, which was not read in this run"),
        ({"batch_bytes": 40 << 20, "shared_memory": 64 << 20},
         "workers hand batches of 40 MiB over in shared memory, of which 64 MiB are free"),
    ],
)  # fmt: skip
def test_what_workers_would_change_is_declined(tmp_path: Path, fetching: dict[str, Any], reason: str) -> None:
    found = said("DataLoader(data)\n", tmp_path, fetching=fetching)
    assert isinstance(found, Decline) and found.reason == reason


@pytest.mark.parametrize("line", ["data.size = 2", "data.set_stage(2)", "loader.dataset.rows[0] = 2"])
def test_a_loop_that_may_change_the_dataset_later(tmp_path: Path, line: str) -> None:
    text = "loader = DataLoader(data)\nfor step, x in enumerate(loader):\n    if step == 300:\n        {}\n"
    found = said(text.format(line), tmp_path)
    assert isinstance(found, Decline)
    assert found.reason == "line 8 changes its dataset between batches, which a worker would not see"
    assert isinstance(said(text.format("print(len(loader.dataset), data.show(x))"), tmp_path), Finding)


def test_a_spawned_worker_runs_the_script_again(tmp_path: Path) -> None:
    loop = "loader = DataLoader(data)\nfor x in loader:\n    opt.step()\n"
    found = said(loop, tmp_path, fetching={"start_method": "spawn"})
    assert isinstance(found, Decline) and "__main__" in found.reason
    assert isinstance(said(loop, tmp_path), Finding)
    indented = "".join(f"    {line}\n" for line in loop.splitlines())
    guarded = f"def main():\n{indented}\n\nif __name__ == '__main__':\n    main()\n"
    assert isinstance(said(guarded, tmp_path, fetching={"start_method": "spawn"}), Finding)


def test_more_workers_where_they_are_too_few(tmp_path: Path) -> None:
    text = "DataLoader(data, num_workers=1)\n"
    assert result(text, tmp_path, workers=1) == text.replace("=1", "=3")
    # measured in one process: 12 ms a batch against 5 ms of the rest of a step
    assert result(text, tmp_path, workers=1, fetching={"fetch_us": 12_000}) == text.replace("=1", "=4")
    assert result(text, tmp_path, workers=1, cores=2) == (
        "it has 1 worker process already, all that 2 cores and shared memory have room for"
    )


def test_batches_come_late_though_the_workers_are_fast(tmp_path: Path) -> None:
    fast = {"fetch_us": 2_000}
    text = "DataLoader(data, num_workers=2)\n"
    assert result(text, tmp_path, workers=2, fetching=fast) == text.replace("=2", "=2, prefetch_factor=4")
    read = "N = 2\nDataLoader(data, num_workers=N)\n"  # with N = 0 the argument would raise
    assert result(read, tmp_path, workers=2, fetching=fast) == "where it has workers, set prefetch_factor=4"


def test_workers_that_start_anew_are_told(tmp_path: Path) -> None:
    text = "DataLoader(data, num_workers=2)\n"
    assert "order of the samples changes" in result(text, tmp_path, workers=2, fetching={"start_us_per_step": 4_000})


def test_an_iterable_dataset_that_shards_itself_is_told(tmp_path: Path) -> None:
    assert "does not shard itself" in result("DataLoader(data)\n", tmp_path, iterable=True)
    assert "order of the samples changes" in result(
        "DataLoader(data)\n", tmp_path, iterable=True, fetching={"shards": True}
    )


SCRIPT = """\
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

torch.manual_seed(0)


class Items(Dataset):
    def __init__(self):
        self.count = 0

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep(0.001)
        BODY
        return torch.full((16,), i / 4096)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(4096):
            time.sleep(0.001)
            yield torch.full((16,), i / 4096)


net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
loader = LOADER
for x in loader:
    opt.zero_grad()
    net(x).square().mean().backward()
    opt.step()
"""


def advise(folder: Path, loader: str, body: str = "pass", command: str = "check", *arguments: str) -> dict[str, Any]:
    text = SCRIPT.replace("LOADER", loader).replace("BODY", body)
    (folder / "train.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "advisor", command, "train.py", "--json", "-q", "--select", RULE.id, *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("loader", "body", "reason"),
    [
        ("DataLoader(Items(), 8)", "self.count += 1",
         "fetching changes its dataset, of which every worker would have a copy of its own"),
        ("DataLoader(Items(), 8)", "np.random.rand()",
         "fetching draws from the global random stream: workers would change the data"),
        ("DataLoader(Items(), 8, num_workers=1)", "np.random.rand()",
         "fetching draws from the global random stream: workers would change the data"),
        ("DataLoader(Stream(), 8)", "pass", "does not shard itself"),
    ],
    ids=["state", "random", "random in workers", "iterable"],
)  # fmt: skip
def test_a_run_shows_what_workers_would_change(tmp_path: Path, loader: str, body: str, reason: str) -> None:
    pytest.importorskip("torch")
    report = advise(tmp_path, loader, body, "check", "--worth", "0")
    assert not [f for f in report["findings"] if f["diff"]]
    said = [item["reason"] for item in (*report["findings"], *report["declines"]) if item["rule"] == RULE.id]
    assert any(reason in (text or "") for text in said), said


@pytest.mark.slow
def test_a_worker_improves_and_the_losses_stay(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    report = advise(tmp_path, "DataLoader(Items(), 8, shuffle=True)", "pass", "optimize", "--time", "60",
                    "--no-baselines")  # fmt: skip
    improved(report)
    assert report["numerics"]["losses"] == report["numerics"]["base_losses"]
