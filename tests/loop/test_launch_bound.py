"""A device that waits for launches: a script recorded on a CPU, as if a GPU had run kernels of a few microseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import RULES, Recorded, reading, record

from advisor.model import Decline, Finding, Kernels, LoopCall, Utilisation
from advisor.patterns import graphhazards
from advisor.rule import ON_A_GPU
from advisor.source import Source

pytest.importorskip("torch")
RULE = "launch-bound"
STEP_US = 8_000.0
SCRIPT = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.up(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Net(16, 4).to("cpu")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
kept = []
for step in range(100_000):
    out = model(torch.randn(8, 16))
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.item())
"""
MADE = 'model = Net(16, 4).to("cpu")\n'
REPLAYED = 'model.compile(mode="reduce-overhead")\n'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(SCRIPT, tmp_path_factory.mktemp("launches"))


def on_a_gpu(recorded: Recorded, busy: float = 0.3, median_us: float = 4.0, **facts: object) -> Recorded:
    """The recording as if each step of 8 ms had run 60 kernels, the device being busy for a share of it."""
    count = 60
    kernels = Kernels(
        name=("elementwise",) * count,
        category=("kernel",) * count,
        start_us=tuple(float(i) for i in range(count)),
        duration_us=(median_us,) * count,
        stream=(7,) * count,
        correlation=tuple(range(count)),
        operator=(-1,) * count,
        step=(0,) * count,
    )
    profile = replace(
        recorded.ctx.profile,
        hardware=replace(recorded.ctx.profile.hardware, kind="cuda"),
        kernels=kernels,
        step_us=(STEP_US,),
        utilisation=Utilisation(busy=busy),
        facts={**recorded.ctx.profile.facts, **facts},
        costs=(),
    )
    return Recorded(replace(recorded.ctx, profile=profile, costs={}))


def answer(recorded: Recorded) -> Finding | Decline:
    (found,) = RULES[RULE].match(recorded.ctx)
    return found


def test_on_a_cpu_it_cannot_tell(recorded: Recorded) -> None:
    found = answer(recorded)
    assert isinstance(found, Decline) and found.reason == ON_A_GPU
    assert found.span is not None and found.span.line == 1 + SCRIPT[: SCRIPT.index(MADE)].count("\n")


def test_the_model_is_compiled_with_cuda_graphs(recorded: Recorded) -> None:
    assert on_a_gpu(recorded).patched(RULE) == SCRIPT.replace(MADE, MADE + REPLAYED)
    found = answer(on_a_gpu(recorded))
    assert isinstance(found, Finding)
    assert found.estimate.high_us == pytest.approx(0.7 * STEP_US)
    (plain,) = RULES[RULE].forms(found, recorded.ctx.read("train.py"))
    assert [text for _, text in plain.edits] == ["model.compile()\n"]


def test_it_shares_its_group_with_the_chains_of_the_same_model(recorded: Recorded) -> None:
    found = answer(on_a_gpu(recorded))
    assert isinstance(found, Finding)
    mine = RULES[RULE].rewrite(found, recorded.ctx.read("train.py"))
    other = RULES["pointwise-chain"].edit(found, "compile the model", [])
    assert not isinstance(mine, Decline) and mine.group == other.group


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ({"busy": 0.95}, "the device waits 5.0% of the step for launches"),
        ({"data_idle_us": 5_500.0}, "the device waits 1.2% of the step for launches"),
        ({"reads_us": {(1, 0): (6_000.0, 5_500.0)}}, "the device waits 1.2% of the step for launches"),
        ({"median_us": 40.0}, "the median kernel takes 40 us: launches are not what is short of"),
    ],
)
def test_other_waits_and_longer_kernels(recorded: Recorded, measured: dict[str, object], reason: str) -> None:
    assert on_a_gpu(recorded, **measured).reason(RULE) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kept.append(loss.item())", "kept.append(out.detach())"),
        ("kept.append(loss.item())", "kept.append((step, out))"),
        ("kept.append(loss.item())", "model.head.weight.data = model.head.weight.data.clone()"),
    ],
)
def test_without_cuda_graphs_where_memory_lives_on(recorded: Recorded, old: str, new: str) -> None:
    text = SCRIPT.replace(old, new)
    changed = reading(on_a_gpu(recorded), text)
    assert changed.patched(RULE) == text.replace(MADE, MADE + "model.compile()\n")
    found = answer(changed)
    assert isinstance(found, Finding) and not list(RULES[RULE].forms(found, changed.ctx.read("train.py")))


def test_gradients_that_live_on(recorded: Recorded) -> None:
    def said(name: str, **differ: object) -> str | None:
        calls = [replace(c, **differ) if c.name == name else c for c in recorded.ctx.profile.calls]  # type: ignore[arg-type]
        found = graphhazards.in_the_loop(calls, None)
        return None if found is None else found[1]

    assert said("none") is None
    assert said("zero_grad", facts={"set_to_none": False}) == "gradients are kept from step to step: set them to None"
    assert said("zero_grad", per_step=0.0) == "gradients are not set to None in the loop"
    assert said("backward", per_step=4.0) == "gradients are accumulated over several backward passes"
    assert said("module", per_step=2.0) == "modules run several times in a step"
    assert said("module", calls=2) == "modules run several times in a step"


KEPT = [
    ("losses.append(loss)", True),
    ("losses.append(loss.detach())", True),
    ("losses.append(loss.item())", False),
    ("losses.append(loss.detach().clone())", False),
    ("losses.append(loss.detach() * 2)", False),
    ("total += loss.detach()", False),
    ("self.last = loss", True),
    ("log['loss'] = loss.detach()", True),
    ("return loss", True),
    ("return loss.item()", False),
    ("print(float(loss))", False),
    ("losses += [loss]", True),
    ("first = loss.detach()\n    losses.append(first)", True),
    ("losses.append(loss if keep else None)", True),
    ("scores = [model(z, y) for z in x]", True),
    ("score = sum(model(z, y)[1].item() for z in x)", False),
]


@pytest.mark.parametrize(("line", "kept"), KEPT)
def test_outputs_that_are_kept(line: str, kept: bool) -> None:
    """The model gives the loss itself, as many language models do."""
    text = f"def turn(self, x, y):\n    _, loss = model(x, y)\n    loss.backward()\n    {line}\n"
    assert (graphhazards.in_the_files([Source("train.py", text)], {"model"}) is not None) is kept


def test_a_loss_that_is_a_module_is_no_second_call_of_the_model(tmp_path: Path) -> None:
    text = SCRIPT.replace("    out = model(torch.randn(8, 16))\n    loss = out.square().mean()\n", "").replace(
        "    optimizer.zero_grad()\n",
        "    loss = criterion(model(torch.randn(8, 16)), torch.zeros(8, 1))\n    optimizer.zero_grad()\n",
    )
    text = text.replace("kept = []\n", "criterion = nn.MSELoss()\n")
    text = text.replace("    kept.append(loss.item())\n", "")
    recorded = on_a_gpu(record(text, tmp_path))
    assert recorded.patched(RULE) == text.replace(MADE, MADE + REPLAYED)


def test_two_runs_of_the_model_in_a_step(tmp_path: Path) -> None:
    once = "    out = model(torch.randn(8, 16))\n"
    text = SCRIPT.replace(once, once + "    out = out + model(torch.randn(8, 16))\n")
    text = text.replace("model(", "net(").replace(MADE, f"{MADE}net = model\n")
    assert on_a_gpu(record(text, tmp_path)).patched(RULE) == text.replace(
        "net = model\n", "net = model\nnet.compile()\n"
    )


def test_an_output_of_the_step_before() -> None:
    text = "state = None\nfor x in data:\n    y = x if state is None else x + state\n    state = model(y)\n"
    assert graphhazards.in_the_files([Source("train.py", text)], {"model"}) is not None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("for x in data:\n    out, state = model(x, state)\n", True),
        ("for x in data:\n    state = state.detach()\n    out, state = model(x, state)\n", True),
        ("for x in data:\n    x = model(x)\n    x.sum().backward()\n", False),
        ("for x in data:\n    out = model(x)\n    ema = out.detach() if ema is None else 0.9 * ema + out\n", True),
    ],
)
def test_a_state_that_is_carried_from_step_to_step(text: str, kept: bool) -> None:
    assert (graphhazards.in_the_files([Source("train.py", text)], {"model"}) is not None) is kept


def test_a_model_is_known_by_every_name_that_it_is_handed_over_as() -> None:
    text = """\
class Trainer:
    def __init__(self, cfg, network):
        self.network = network


def evaluate(net, *, head):
    pass


evaluate(model, head=model)
trainer = Trainer(cfg, model)
alias = model
evaluate(other, head=3)
"""
    known = graphhazards.known_as([Source("train.py", text)], {"model"})
    assert known == {"model", "net", "head", "network", "alias"}


def test_outputs_that_are_kept_under_another_name(recorded: Recorded, tmp_path: Path) -> None:
    """The function that trains has a name of its own for the model."""
    head, loop = SCRIPT.split(MADE)
    inside = "".join(f"    {line}\n" for line in loop.splitlines()).replace("model", "net")
    text = f"{head}def train(net):\n{inside}\n\n{MADE}train(model)\n"
    kept = text.replace("kept.append(loss.item())", "kept.append(out.detach())")
    assert on_a_gpu(record(text, tmp_path)).patched(RULE) == text.replace(MADE, MADE + REPLAYED)
    changed = on_a_gpu(record(kept, tmp_path))
    assert changed.patched(RULE) == kept.replace(MADE, MADE + "model.compile()\n")


def test_a_graph_that_is_kept_is_left_alone(recorded: Recorded) -> None:
    text = SCRIPT.replace("loss.backward()", "loss.backward(retain_graph=True)")
    assert "whose memory compiled code gives away" in reading(on_a_gpu(recorded), text).reason(RULE)


def test_a_short_run_is_only_told(recorded: Recorded) -> None:
    short = reading(on_a_gpu(recorded), SCRIPT.replace("range(100_000)", "range(1_000)"))
    reason = short.reason(RULE)
    assert reason.startswith("overhead-bound, but 1000 steps save at most 6 s")


def test_sizes_that_vary_are_only_told(tmp_path: Path) -> None:
    text = SCRIPT.replace("torch.randn(8, 16)", "torch.randn(8 + step % 5, 16)")
    recorded = record(text, tmp_path)
    reason = on_a_gpu(recorded).reason(RULE)
    assert reason.startswith("overhead-bound, but sizes vary from step to step")
    assert not recorded.ask(RULE)


def test_a_compiled_script_is_left_alone(recorded: Recorded) -> None:
    text = SCRIPT.replace("kept = []", "step_ = torch.compile(print)")
    assert reading(on_a_gpu(recorded), text).reason(RULE) == "the script has a call of the compiler of its own"


def test_without_a_measured_idle_time_nothing_is_claimed(recorded: Recorded) -> None:
    blind = on_a_gpu(recorded)
    profile = replace(blind.ctx.profile, utilisation=Utilisation())
    assert Recorded(replace(blind.ctx, profile=profile)).reason(RULE).startswith("cannot tell")


def test_calls_are_those_of_the_loop(recorded: Recorded) -> None:
    assert {c.name for c in recorded.ctx.profile.calls if isinstance(c, LoopCall)} >= {
        "module",
        "backward",
        "zero_grad",
    }
