"""What a run notes of the calls that its loop makes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from advisor.capture.launch import Child
from advisor.ingest.probe import read_probe
from advisor.model import LoopCall
from advisor.session import Spec

pytest.importorskip("torch")
SCRIPT = """
    import torch
    from torch import nn


    def flush():
        torch.cuda.empty_cache()


    torch.autograd.set_detect_anomaly(True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        for micro in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        flush(); flush()
        if step % 2 == 0:
            torch.save(model.state_dict(), __file__ + ".pt")
"""
OPTIONS = {"warmup": 2, "steps": 4, "profile_steps": 1, "annotate": False, "device_rates": False}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoopCall, ...]:
    return run(SCRIPT, tmp_path_factory.mktemp("calls"))


def run(text: str, root: Path) -> tuple[LoopCall, ...]:
    script = root / "train.py"
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    spec = Spec(
        script=str(script),
        argv=(),
        root=str(root),
        out=str(root / "out"),
        plan="advisor.capture.probe:CapturePlan",
        options=OPTIONS,
    )
    with Child(spec) as child:
        while child.receive() is not None:
            continue
        child.wait(60.0)
    return read_probe(root / "out" / "probe.json", root).calls


def of(calls: tuple[LoopCall, ...], name: str) -> list[LoopCall]:
    return [call for call in calls if call.name == name]


def test_calls_per_step_and_their_places(calls: tuple[LoopCall, ...]) -> None:
    (backward,) = of(calls, "backward")
    assert backward.per_step == 2.0
    assert [frame.line for frame in backward.frames] == [15]
    (step,) = of(calls, "optimizer.step")
    assert (step.per_step, step.frames[-1].line) == (1.0, 16)


def test_a_function_of_the_users_is_told_from_each_of_its_callers(calls: tuple[LoopCall, ...]) -> None:
    flushes = of(calls, "torch.cuda.empty_cache")
    assert [[frame.line for frame in call.frames] for call in flushes] == [[18, 7], [18, 7]]
    assert [call.per_step for call in flushes] == [1.0, 1.0]
    assert len({call.frames[0].column for call in flushes}) == 2


def test_arguments_and_time(calls: tuple[LoopCall, ...]) -> None:
    assert [call.facts for call in of(calls, "zero_grad")] == [{"set_to_none": False}]
    assert [call.facts for call in of(calls, "detect_anomaly")] == [{"mode": True}]
    (save,) = of(calls, "torch.save")
    assert save.per_step == 0.5
    assert save.host_us > 0


def test_what_only_libraries_call_is_left_out(calls: tuple[LoopCall, ...]) -> None:
    assert {call.name for call in calls} == {
        "backward", "optimizer.step", "torch.cuda.empty_cache", "zero_grad", "detect_anomaly", "torch.save", "module"
    }  # fmt: skip


EVALUATIONS = """
    import torch
    from torch import nn

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.eval()
        x = torch.ones(2, 4, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        model.train()
        with torch.autocast("cpu"):
            model.eval()
            model(x)
            model.train()
"""


def test_who_differentiates_in_an_evaluation(tmp_path: Path) -> None:
    found = of(run(EVALUATIONS, tmp_path), "evaluation")
    assert [call.facts for call in found] == [
        {"grad": True, "autocast": False, "differentiated": True},
        {"grad": True, "autocast": True},
    ]
