"""Tensors made on the host and moved: which are made on the device, that the script computes the same, which stay."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import codemod
from advisor import patch as patching
from advisor.devicereads import move_times
from advisor.match import match
from advisor.model import (
    Finding,
    Graph,
    Hardware,
    Kernels,
    Node,
    Operators,
    Ref,
    Rewrite,
    Safety,
    Symbol,
    Utilisation,
)
from advisor.patterns.hostmade import Moved, Unfit, moved, remade
from advisor.rule import ON_A_GPU
from advisor.source import Source
from tests.recorded_loops import RULES, Recorded, record

RULE = "cpu-create-then-copy"
IMPORT = "import torch\n"
HEAD = """\
import json, math
import torch
from torch import nn, zeros

torch.manual_seed(0)
device = torch.device("cpu")
"""
MODEL = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        B, T, C = x.shape
{forward}
        return self.linear(x) + total


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4, 6, 8)
losses = []
for step in range(24):
{loop}
    loss = model(data).square().mean() + extra
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps(losses))
"""
# what a forward pass or a loop has -> what is made of it
FORMS = {
    "mask = torch.triu(torch.ones(T, T), diagonal=1).bool().to(x.device)":
        "mask = torch.triu(torch.ones(T, T, device=x.device), diagonal=1).bool()",
    "pos = torch.arange(T).unsqueeze(0).to(x.device, torch.float32)":
        "pos = torch.arange(T, device=x.device).unsqueeze(0).to(torch.float32)",
    "h = torch.zeros(B, 8, dtype=x.dtype)\nscale = 2.0\nh = h.to(x.device, non_blocking=True)":
        "h = torch.zeros(B, 8, dtype=x.dtype, device=x.device)\nscale = 2.0",
    "c = zeros(T, C)\nc = c.to(x)":
        "c = zeros(T, C, device=x.device)\nc = c.to(x.dtype)",
    "near = (1 - torch.eye(T)).type_as(x)":
        "near = (1 - torch.eye(T, device=x.device)).to(x.dtype)",
    "keep = (torch.ones(\n    T,\n    C,\n) > 0).to(device=x.device)":
        "keep = (torch.ones(\n    T,\n    C,\n    device=x.device,\n) > 0)",
    "on_host = torch.full((T,), -1e9, device='cpu')\nfar = on_host.to(x.device)":
        "on_host = torch.full((T,), -1e9, device=x.device)\nfar = on_host",
    "low = torch.zeros(T).to(x.device).to(torch.float64)":
        "low = torch.zeros(T, device=x.device).to(torch.float64)",
    "half = torch.tensor(0.5).to(x.device)":
        "half = torch.full((), 0.5, device=x.device)",
}  # fmt: skip
USED = """\
total = (pos + h[:, :1]).mean() + c.sum() + near.sum() + keep.float().mean() + (far * 0).sum() + half * scale
total = total + mask.float().mean() + low.float().sum()"""
LOOP = """\
weight = torch.ones(8).to(device)
extra = (weight * 0.1).sum()"""
# a move that stays, and why
STAYS = {
    "a = torch.zeros(T)\nlog = a.sum()\na = a.to(x.device)": "`a` is used on the host too, at line {}",
    "a = torch.tensor([1.0, float(T)]).to(x.device)": "its values come from Python: `torch.tensor` copies them to the "
    "device either way",
    "a = torch.cumsum(torch.ones(T), 0).to(x.device)": "`torch.cumsum(torch.ones(T), 0)` is computed on the host",
    "a = torch.zeros(T)\nif T > 2:\n    a = a.to(x.device)": "`a` is made in another block than it is moved in",
    "a = torch.zeros(T)\nplace = x.device\na = a.to(place)": "`place` may not be known yet where the factory is called",
}


def indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.split("\n"))


def script(forward: str, loop: str) -> str:
    return HEAD + MODEL.replace("{forward}", indented(forward, 8)).replace("{loop}", indented(loop, 4))


def as_on_a_gpu(recorded: Recorded, held: tuple[float, float] = (400.0, 300.0)) -> Recorded:
    """The same recording as if every move had gone to a GPU."""
    graphs, times = [], {}
    for graph in recorded.ctx.profile.graphs:
        nodes = []
        for node in graph.nodes:
            moves = node.target in ("method.to", "method.cuda", "method.type_as") and len(node.args) > 1
            moves = moves and not (isinstance(node.args[1], Symbol) and node.args[1].kind == "dtype")
            moves |= node.target == "method.to" and "device" in node.kwargs
            nodes.append(replace(node, device="cuda") if moves else node)
            times |= {(graph.index, node.index): (*held, 0.0)} if moves else {}
        graphs.append(replace(graph, nodes=tuple(nodes)))
    profile = replace(
        recorded.ctx.profile,
        hardware=Hardware(name="a GPU", kind="cuda"),
        graphs=tuple(graphs),
        costs=(),
        step_us=(10_000.0,),
        utilisation=Utilisation(busy=0.8),
        facts={**recorded.ctx.profile.facts, "moves_us": times},
    )
    return Recorded(replace(recorded.ctx, profile=profile, costs={}, worth=None))


def printed(text: str, folder: Path) -> list[float]:
    path = folder / "again.py"
    path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True, cwd=folder)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def patched(recorded: Recorded) -> tuple[str, list[Rewrite]]:
    answers = recorded.ask(RULE)
    made = [item for item in answers if isinstance(item, Rewrite)]
    assert len(made) == len(answers), answers
    return patching.build(made, recorded.ctx.read).sources["train.py"], made


def test_every_form_in_a_forward_pass_and_in_the_loop_is_made_on_the_device(tmp_path: Path) -> None:
    text = script("\n".join(FORMS) + "\n" + USED, LOOP)
    recorded = record(text, tmp_path)
    assert {getattr(item, "reason", None) for item in recorded.ask(RULE)} == {ON_A_GPU}
    result, made = patched(as_on_a_gpu(recorded))
    wanted = script("\n".join(FORMS.values()) + "\n" + USED, LOOP.replace("(8).to(device)", "(8, device=device)"))
    assert result == wanted
    assert {item.safety for item in made} == {Safety.EXACT}
    assert [item.title for item in made if "same in every step" in item.title]
    assert printed(result, tmp_path) == printed(text, tmp_path)


def test_what_may_not_be_made_on_the_device_stays(tmp_path: Path) -> None:
    lines = [line.replace("a ", f"a{n} ", 1).replace("a.", f"a{n}.") for n, line in enumerate(STAYS)]
    lines = [line.replace("\na =", f"\na{n} =").replace("    a =", f"    a{n} =") for n, line in enumerate(lines)]
    used = "total = " + " + ".join(f"a{n}.sum()" for n in range(len(lines)))
    text = script("\n".join(lines) + "\n" + used, "extra = 0.0")
    answers = as_on_a_gpu(record(text, tmp_path)).ask(RULE)
    line = next(n for n, content in enumerate(text.splitlines(), 1) if "log = " in content)
    wanted = [reason.format(line).replace("`a`", f"`a{n}`") for n, reason in enumerate(STAYS.values())]
    assert [getattr(item, "reason", item) for item in answers] == wanted


def test_random_numbers_change_the_stream_and_rounding_is_said(tmp_path: Path) -> None:
    forward = "total = torch.randn(T, C).to(x.device)\ntotal = total + torch.linspace(0, 1, C).to(x.device)"
    forward += "\ntotal = total + torch.exp(torch.arange(0, C, dtype=torch.float32) * -0.1).to(x.device)"
    loop = "extra = torch.rand(1, generator=torch.Generator()).to(device).sum()"
    loop += "\nextra = extra + torch.zeros(3, requires_grad=True).to(device).sum()"
    loop += "\nextra = extra + torch.ones(3).to('cpu').sum()"
    recorded = record(script(forward, loop), tmp_path)
    assert len(recorded.ask(RULE)) == 5  # on a CPU, and what is moved to it is not among them
    answers = as_on_a_gpu(recorded).ask(RULE)[:5]
    safeties = [getattr(item, "safety", None) for item in answers]
    assert safeties == [Safety.SEMANTICS, Safety.NUMERICS, Safety.NUMERICS, None, None]
    reasons = [getattr(item, "reason", "") for item in answers[3:]]
    assert reasons == [
        "its random numbers come from a generator of the host",
        "the tensor on the host is kept: the factory is told `out` or `requires_grad`",
    ]


def test_silent_where_nothing_is_made_and_moved(tmp_path: Path) -> None:
    loop = """\
extra = torch.ones(8).to(torch.float64).sum()  # a dtype is no device
if step % 10 == 0:
    extra = torch.ones(8).to(device).sum()
extra = extra + data[0, 0].to(device).sum() * 0  # a batch is not made by a factory"""
    recorded = record(script("total = 0.0", loop), tmp_path)
    assert recorded.ask(RULE) == []
    assert as_on_a_gpu(recorded).ask(RULE) == []


def test_small_and_unlinked_copies_are_left_alone(tmp_path: Path) -> None:
    recorded = record(script("total = 0.0", LOOP), tmp_path)
    small = as_on_a_gpu(recorded, (40.0, 30.0)).reason(RULE)
    assert small == "making it on the host and moving it takes 0.3% of the step"
    assert "could not be linked" in as_on_a_gpu(recorded, (0.0, 0.0)).reason(RULE)
    result = match(as_on_a_gpu(recorded).ctx, [RULES[RULE]])
    (finding,) = result.findings
    assert isinstance(finding, Finding)
    assert finding.estimate.high_us == pytest.approx(300.0)


def test_copies_to_the_device_are_timed_as_reads_are() -> None:
    kernels = Kernels(
        name=("gemm", "Memcpy HtoD (Pageable -> Device)", "gemm", "Memcpy DtoH (Device -> Pageable)"),
        category=("kernel", "memcpy", "kernel", "memcpy"),
        start_us=(0.0, 100.0, 150.0, 200.0),
        duration_us=(90.0, 10.0, 50.0, 5.0),
        stream=(7,) * 4,
        correlation=(0, 1, 2, 3),
        operator=(0, 1, 2, 3),
        step=(0,) * 4,
    )
    operators = Operators(
        name=("aten::mm", "aten::copy_", "aten::mm", "aten::copy_"),
        start_us=(0.0, 10.0, 120.0, 130.0),
        duration_us=(5.0, 100.0, 5.0, 80.0),
        thread=(1,) * 4,
        sequence=(-1,) * 4,
        forward_thread=(0,) * 4,
        parent=(-1,) * 4,
        step=(0,) * 4,
        shapes=((),) * 4,
        dtypes=((),) * 4,
    )
    found = move_times(kernels, operators, [None, (1, 4), None, None], 1)
    assert found == {(1, 4): (100.0, 40.0, 10.0)}


def test_nodes_of_libraries_and_of_two_tensors_are_no_moves() -> None:
    made = Node(index=0, name="m", op="call_function", target="torch.ones", device="cpu")
    other = Node(index=1, name="o", op="placeholder", target="o", device="cpu")
    added = Node(index=2, name="a", op="call_method", target="method.add", args=(Ref(0), Ref(1)), device="cpu")
    move = Node(index=3, name="t", op="call_method", target="method.to", args=(Ref(2), "cuda"), device="cuda")
    graph = Graph(index=0, nodes=(made, other, added, move))
    assert moved([graph], [], lambda path: pytest.fail(path), True) == []


SHARED = "x = torch.arange(4).expand(2, 4)"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{SHARED}.to(device)\n", "x = torch.arange(4, device=device).expand(2, 4).contiguous()\n"),
        (f"{SHARED}\nx = x.to(device)\n", "x = torch.arange(4, device=device).expand(2, 4)\nx = x.contiguous()\n"),
        ("x = torch.ones(4) \\\n    .to(device)\n", "x = torch.ones(4, device=device)\n"),
        ("x = torch.ones(4).to(torch.int64).to(device)\n", "x = torch.ones(4, device=device).to(torch.int64)\n"),
    ],
)
def test_the_tensor_is_laid_out_as_the_move_does(before: str, after: str) -> None:
    found, source = only_move(before)
    assert codemod.apply(source, list(remade(found).edits)) == IMPORT + after


@pytest.mark.parametrize(
    "text",
    [
        f"{SHARED}.flip(0).to(device)",
        "x = torch.ones(4).to('cpu').to(device)",
        "x = torch.ones(4).to(other).to(device)",
        "m = torch.ones(4)\nx = [m.to(device) for device in devices]",
        "m = torch.ones(4)\nx = lambda device: m.to(device)",
    ],
)
def test_what_the_device_is_not_known_for_or_the_host_keeps(text: str) -> None:
    with pytest.raises(Unfit):
        remade(only_move(f"{text}\n")[0])


def test_half_precision_that_autocast_computes_in_float32_on_the_device() -> None:
    with pytest.raises(Unfit, match="autocast"):
        remade(only_move("x = torch.arange(4).bfloat16().exp().to(device)\n", dtype="bfloat16")[0])


def test_what_is_the_same_in_every_step() -> None:
    assert remade(only_move("x = (torch.ones(4) * 0.5).to(device)\n")[0]).fixed
    assert not remade(only_move("x = (torch.ones(4) * weight(step)).to(device)\n")[0]).fixed


def only_move(text: str, dtype: str = "float32") -> tuple[Moved, Source]:
    """The last `.to(device)` of a file, as if it had been recorded."""
    source = Source("train.py", IMPORT + text)
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and ast.unparse(n).endswith(".to(device)")]
    made = Node(index=0, name="m", op="call_function", target="torch.ones", device="cpu")
    then = Node(index=1, name="e", op="call_method", target="method.exp", args=(Ref(0),), device="cpu", dtype=dtype)
    move = Node(index=2, name="t", op="call_method", target="method.to", args=(Ref(1), "cuda"), device="cuda")
    graph = Graph(index=0, nodes=(made, then, move))
    return Moved(source, max(calls, key=lambda call: call.end_lineno or 0), ((graph, move),)), source
