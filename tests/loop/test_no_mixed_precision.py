"""bfloat16 autocast: which statements of a loop it goes around, and where it must not."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import LARGE, Recorded, on_a_gpu, reading, record

from advisor.hardware import lookup
from advisor.model import Decline, Hardware
from advisor.patterns.settled import settled
from advisor.rule import ON_A_GPU
from advisor.source import Source

pytest.importorskip("torch")
RULE = "no-mixed-precision"
HEAD = """\
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
criterion = nn.CrossEntropyLoss()
opt = torch.optim.AdamW(model.parameters())
log, flag = [], False
"""
LOOP = """\
for step in range(30):
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
{forward}
    opt.zero_grad()
    loss.backward()
    opt.step()
{behind}
"""
USUAL = ("out = model(x)", "loss = criterion(out, y)")


def script(*forward: str, behind: tuple[str, ...] = (), head: str = HEAD) -> str:
    lines = {"forward": forward, "behind": behind}
    text = LOOP
    for name, given in lines.items():
        text = text.replace(f"{{{name}}}", "\n".join(f"    {line}" for line in given))
    return head + text


def under(text: str) -> list[str]:
    """The statements under autocast."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.With) and "autocast" in ast.unparse(n.items[0])]
    (block,) = found
    assert ast.unparse(block.items[0]) == "torch.autocast(device_type='cuda', dtype=torch.bfloat16)"
    return [ast.unparse(statement) for statement in block.body]


def on_gpu(text: str, folder: Path) -> Recorded:
    return on_a_gpu(record(text, folder))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    behind = ("_, best = out.max(1)", "hits = (out.argmax(1) == y).sum().item()", "log.append(loss.detach())")
    return record(script(*USUAL, behind=behind), tmp_path_factory.mktemp("usual"))


def test_model_and_loss_go_under_autocast_and_nothing_else(usual: Recorded) -> None:
    assert under(on_a_gpu(usual).patched(RULE)) == list(USUAL)


def test_on_a_cpu_it_cannot_tell(usual: Recorded) -> None:
    (answer,) = usual.ask(RULE)
    assert isinstance(answer, Decline)
    assert (answer.reason, answer.needs) == (ON_A_GPU, ("gpu",))
    assert answer.span is not None
    assert "out = model(x)" in usual.ctx.read("train.py").lines[answer.span.line - 1]


def test_measurements_decide(usual: Recorded) -> None:
    small = on_a_gpu(usual, [("aten::mm", "float32", 8.0)] * 900).reason(RULE)
    assert small == "its float32 products take at most 8 us each: the casts of autocast would take as long"
    few = on_a_gpu(usual, LARGE[:3]).reason(RULE)
    assert few == "the large float32 products of the loop take 12.0% of the step"
    assert on_a_gpu(usual, [("aten::mm", "bfloat16", 400.0)] * 20).reason(RULE) == "no product in float32 was recorded"
    double = [*LARGE, ("aten::mm", "float64", 40.0)]
    assert "float64" in on_a_gpu(usual, double).reason(RULE)
    launches = on_a_gpu(usual)
    profile = launches.ctx.profile
    idle = replace(profile, utilisation=replace(profile.utilisation, busy=0.3), step_us=(12_000.0,))
    waits = Recorded(replace(launches.ctx, profile=idle)).reason(RULE)
    assert waits == "the device is idle in 70% of the step: it does not wait for its products"


@pytest.mark.parametrize(
    ("name", "words"),
    [("Tesla V100-SXM2-16GB", "float16 with a GradScaler"), ("Tesla P100-PCIE-16GB", "has no tensor cores")],
)
def test_older_devices(usual: Recorded, name: str, words: str) -> None:
    assert lookup(name) is not None
    assert words in on_a_gpu(usual, name=name).reason(RULE)


def test_a_device_that_is_not_known(usual: Recorded) -> None:
    there = on_a_gpu(usual)
    unknown = replace(there.ctx.profile, hardware=Hardware(name="a device", kind="cuda"))
    assert "cannot tell" in Recorded(replace(there.ctx, profile=unknown)).reason(RULE)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (("out = model(x)", "loss = criterion(out, y)", "loss = loss / 2"), 3),
        (("if flag:", "    loss = F.cross_entropy(model(x), y)", "else:", "    loss = criterion(model(x), y)"), 1),
        (("loss = criterion(model(x), y)", "norm = 1.0"), 1),
        (("loss = 0.0", "for part in x.split(4):", "    loss = loss + model(part).square().sum()"), 1),
    ],
)
def test_what_is_put_under_it(tmp_path: Path, forward: tuple[str, ...], expected: int) -> None:
    assert len(under(on_gpu(script(*forward), tmp_path).patched(RULE))) == expected


@pytest.mark.parametrize(
    ("forward", "behind", "words"),
    [
        (("out = model(x)", "log.append(out.detach())", "loss = criterion(out, y)"), (), "`out` is used in line 13"),
        (("out = model(x)", "loss = out.abs().mean()"), (), "a scalar that is differentiated would be rounded"),
        (
            ("if flag:", "    loss = model(x).abs().mean()", "else:", "    loss = criterion(model(x), y)"),
            (),
            "did not run",
        ),
        (("out = model(x)", "with torch.no_grad():", "    t = model(x)", "loss = F.mse_loss(out, t)"), (), "gradients"),
        (
            ("out = model(x)", "b = x.index_copy(0, torch.arange(8), out.repeat(1, 4))", "loss = b.sum()"),
            (),
            "differ in dtype",
        ),
        (
            ("out = model(x)", "b = torch.searchsorted(x[0], out)", "loss = criterion(out, y) + 0 * b.sum()"),
            (),
            "differ in dtype",
        ),
    ],
)
def test_what_bfloat16_would_break(
    tmp_path: Path, forward: tuple[str, ...], behind: tuple[str, ...], words: str
) -> None:
    assert words in on_gpu(script(*forward, behind=behind), tmp_path).reason(RULE)


@pytest.mark.parametrize(
    "line", ["log.append(out.detach().numpy())", "log.append(out)", "np.sum(out)", "best, _ = out.max(1); print(best)"]
)
def test_what_is_used_on_behind_the_loss(usual: Recorded, line: str) -> None:
    text = script(*USUAL, behind=(line,))
    assert "`out` is used in line 17" in reading(on_a_gpu(usual), text).reason(RULE)


@pytest.mark.parametrize(
    "line",
    [
        "best = out.argmax(1).cpu().numpy()",
        "log.append(out.detach().float().numpy())",
        "log.append((torch.sigmoid(out) > 0.5).numpy())",
        "print(out.shape, loss.item())",
        "out = torch.zeros(3).numpy(); log.append(out)",
    ],
)
def test_uses_that_bfloat16_does_not_change(usual: Recorded, line: str) -> None:
    assert under(reading(on_a_gpu(usual), script(*USUAL, behind=(line,))).patched(RULE)) == list(USUAL)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("scaler = torch.amp.GradScaler('cpu', enabled=False)", "GradScaler already (train.py:LINE)"),
        ("amp = torch.autocast('cpu', enabled=False)", "autocast already (train.py:LINE)"),
        ("kept = model[0].weight.half()", "half precision themselves (train.py:LINE)"),
        ("kept = torch.zeros(4, dtype=torch.bfloat16)", "half precision themselves (train.py:LINE)"),
        ("other = nn.BCELoss()", "autocast refuses binary_cross_entropy"),
        ("kept = model.to(getattr(torch, 'float' + '32'))", "chosen when the script runs (train.py:LINE)"),
        ("assert model(x).dtype == torch.float32", "a dtype is compared"),
        ("assert model(x).dtype in (torch.float32, torch.float64)", "a dtype is compared"),
        ("kept = model(x).dtype != model[0].weight.dtype", "a dtype is compared"),
        ("other = nn.GRU(4, 4)", "recurrent layers in float16"),
    ],
)
def test_what_the_files_settle(usual: Recorded, line: str, words: str) -> None:
    text = script(*USUAL) + line + "\n"
    assert words.replace("LINE", str(text.count("\n"))) in reading(on_a_gpu(usual), text).reason(RULE)


def test_two_backward_passes_are_told(tmp_path: Path) -> None:
    text = script("other = criterion(model(x), y)", "other.backward()", *USUAL)
    assert "differentiates at several places" in on_gpu(text, tmp_path).reason(RULE)


def test_one_statement_is_told(tmp_path: Path) -> None:
    text = HEAD + "for step in range(30):\n    model(torch.randn(4, 16)).square().mean().backward()\n    opt.step()\n"
    assert "one statement, line 11: name the loss first" in on_gpu(text, tmp_path).reason(RULE)


def test_a_loop_of_functions_and_methods(tmp_path: Path) -> None:
    text = """\
import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model, self.opt = model, torch.optim.AdamW(model.parameters())

    def loss_of(self, batch):
        return nn.functional.smooth_l1_loss(self.model(batch), batch[:, :4])

    def step(self, batch):
        loss = self.loss_of(batch)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


trainer = Trainer(nn.Linear(16, 4))
for _ in range(30):
    trainer.step(torch.randn(8, 16))
"""
    assert under(on_gpu(text, tmp_path).patched(RULE)) == ["loss = self.loss_of(batch)"]


def test_recorded_h200_steps_have_nothing_to_gain() -> None:
    """A launch-bound step and one that waits for its loader: their float32 products are a few percent of it."""
    from profiles import h200

    from advisor.patterns.precision import arithmetic

    for name, family, low, high in (
        ("gpt_launch_bound_fp32", "matmul", 0.05, 0.10),
        ("resnet50_dataloader_bound_fp32", "convolution", 0.07, 0.12),
    ):
        _, profile = h200(name)
        median = profile.median_step_us()
        assert median is not None
        assert low < arithmetic(profile).of("float32", family).time_us / median < high


def test_what_a_library_has_to_be_given_is_advice(tmp_path: Path) -> None:
    """The file says nothing of bfloat16 itself."""
    source = Source("train.py", "from torch.distributed.fsdp import fully_shard\nfully_shard(net)\n")
    reason = settled([source])
    assert reason is not None
    assert "for bfloat16 give it `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` (train.py:2)" in reason
