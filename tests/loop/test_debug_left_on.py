"""Debugging aids left in the loop: what is told, what is taken out, what stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from verdicts import improved

from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite
from advisor.rule import ON_A_GPU, step

RULE = registry.load()[0]["debug-left-on"].rule
FLUSH, WAIT = "torch.cuda.empty_cache", "torch.cuda.synchronize"
HEAD = "import torch\n\n\ndef wait():\n    {body}\n\n\nfor step in range(9):\n    loss.backward()\n    opt.step()\n"


def said(text: str, folder: Path, **profile: object) -> list[Finding | Decline | Rewrite]:
    """What the rule says, with the answer to a finding in its place."""
    ctx, source = testing.context_of(RULE, text, step(10_000, **profile), folder)
    found = list(RULE.match(ctx))
    return [RULE.rewrite(item, source) if isinstance(item, Finding) else item for item in found]


def reasons(text: str, folder: Path, **profile: object) -> list[str]:
    found = said(text, folder, **profile)
    assert all(isinstance(item, Decline) for item in found), found
    return [item.reason for item in found if isinstance(item, Decline)]


def test_a_function_that_does_more_stays(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "torch.cuda.synchronize(); log()") + "    wait()\n"
    assert reasons(text, tmp_path, calls={WAIT: (1, 4_000)}, busy=0.5) == [
        "the function called here does more than torch.cuda.synchronize"
    ]


def test_a_wait_that_the_device_does_not_feel(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "torch.cuda.synchronize()") + "    wait()\n"
    assert reasons(text, tmp_path, calls={WAIT: (1, 9_000)}, busy=0.999) == [
        "the host waits in it, but the device is idle in only 10 us a step"
    ]
    assert reasons(text, tmp_path, calls={WAIT: (1, 9_000)}) == ["cannot tell: the device's idle time is not known"]


def test_what_stands_outside_the_loop_is_not_spoken_of(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "torch.cuda.synchronize()") + "wait()\ntorch.cuda.empty_cache()\n"
    assert said(text, tmp_path, calls={WAIT: (1, 9_000), FLUSH: (1, 9_000)}, busy=0.5) == []
    assert said(text, tmp_path, calls={WAIT: (0, 0), FLUSH: (0, 0)}, device="cpu") == []


def test_on_a_cpu_what_every_step_reaches_is_spoken_of(tmp_path: Path) -> None:
    """A condition on the device, or the one of the optimizer's step, leaves it in every step."""
    loop = "import torch\n\nfor step in range(9):\n    loss.backward()\n"
    stepping = loop + "    if step % 2 == 0:\n        opt.step()\n"
    device = "    if torch.cuda.is_available():\n        torch.cuda.synchronize()\n"
    for text in (stepping + "        torch.cuda.empty_cache()\n", loop + "    opt.step()\n" + device):
        assert reasons(text, tmp_path, calls={FLUSH: (0, 0)}, device="cpu") == [ON_A_GPU]
    for condition in ("step % 100 == 0", "args.tidy"):
        text = loop + f"    opt.step()\n    if {condition}:\n        torch.cuda.empty_cache()\n"
        assert said(text, tmp_path, calls={FLUSH: (0, 0)}, device="cpu") == []


def test_a_loop_over_optimizers_is_not_the_training_loop(tmp_path: Path) -> None:
    text = "import torch\n\nfor step in range(9):\n    loss.backward()\n    for one in opts:\n        one.step()\n"
    text += "    torch.cuda.empty_cache()\n"
    (found,) = said(text, tmp_path, calls={FLUSH: (1, 800)})
    assert isinstance(found, Rewrite)


def test_a_context_manager_is_told_and_stays(tmp_path: Path) -> None:
    text = "import torch\nwith torch.autograd.detect_anomaly():\n    loss.backward()\nopt.step()\n"
    assert reasons(text, tmp_path, calls={"detect_anomaly": (0, 0)}, facts={"anomaly": True}) == [
        "it is no statement of its own: take it out of the `with`"
    ]


def test_the_only_statement_under_a_condition_becomes_pass(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "pass") + "    if cuda:\n        torch.cuda.empty_cache()\n"
    (rewrite,) = said(text, tmp_path, calls={FLUSH: (1, 900)})
    assert isinstance(rewrite, Rewrite)
    assert [text for _, text in rewrite.edits] == ["pass"]


ANOMALY = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(40)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_anomaly_mode_is_removed_and_the_steps_are_faster(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ANOMALY, encoding="utf-8")
    command = [sys.executable, "-m", "advisor", "optimize", "train.py", "--time", "60", "--no-baselines", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    improved(report)
    (found,) = [f for f in report["findings"] if f["rule"] == "debug-left-on"]
    assert (found["line"], found["status"]) == (5, "applied")
    assert report["speedup"] > 1.2


@pytest.mark.parametrize(
    ("before", "inside", "reason"),
    [
        ("start = torch.cuda.Event(True)", "    ms = start.elapsed_time(end)\n", "work of other streams or events"),
        ("side = torch.cuda.Stream()", "", "work of other streams or events"),
        ("", "    host = out.to('cpu', non_blocking=True)\n", "copies to the host and goes on"),
        ("", "    host.copy_(out, non_blocking=True)\n", "copies to the host and goes on"),
        ("import time", "    begin = time.perf_counter()\n", "takes the time of a step"),
        ("import cupy", "", "cupy may have work of its own on the device"),
    ],
)
def test_a_wait_that_something_needs_stays(before: str, inside: str, reason: str, tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "torch.cuda.synchronize()").replace("\n\n\ndef", f"\n{before}\n\n\ndef")
    (said_of_it,) = reasons(text + "    wait()\n" + inside, tmp_path, calls={WAIT: (1, 4_000)}, busy=0.5)
    assert reason in said_of_it


def test_the_time_since_the_start_needs_no_wait(tmp_path: Path) -> None:
    text = HEAD.replace("{body}", "torch.cuda.synchronize()").replace("import torch", "import time, torch", 1)
    text += "    wait()\n    bar.append(time.perf_counter() - begin)\n"
    (found,) = said(text, tmp_path, calls={WAIT: (1, 4_000)}, busy=0.5)
    assert isinstance(found, Rewrite)


def test_what_was_asked_for_is_told(tmp_path: Path) -> None:
    text = "import torch\n{}\nfor x in data:\n    loss.backward()\n    opt.step()\n"
    for line, reason in (
        ("torch.autograd.set_detect_anomaly(args.debug)", "an option turns it on: leave that off"),
        (
            "if args.debug:\n    torch.autograd.set_detect_anomaly(True)",
            "the condition at line 2 asks for it: leave that off",
        ),
    ):
        found = reasons(text.format(line), tmp_path, calls={"detect_anomaly": (0, 0)}, facts={"anomaly": True})
        assert found == [reason]
    text = HEAD.replace("{body}", "torch.cuda.empty_cache()") + "    if args.tidy:\n        torch.cuda.empty_cache()\n"
    assert reasons(text, tmp_path, calls={FLUSH: (1, 4_000)}) == [
        "the condition at line 11 asks for it: leave that off"
    ]
    text = HEAD.replace("{body}", "if args.sync:\n        torch.cuda.synchronize()") + "    wait()\n"
    assert reasons(text, tmp_path, calls={WAIT: (1, 4_000)}, busy=0.5) == [
        "the function called here does more than torch.cuda.synchronize"
    ]
