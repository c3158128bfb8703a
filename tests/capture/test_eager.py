"""What a training step calls outside of the modules Dynamo captures, recorded call by call."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from advisor.capture.launch import Child
from advisor.correlate import Correlation, correlate
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import read_trace
from advisor.ingest.probe import ProbeFacts, read_probe
from advisor.model import Graph, Node, NodeCost
from advisor.semantics import operation
from advisor.session import Spec

torch = pytest.importorskip("torch")
OPTIONS = {"warmup": 2, "steps": 1, "profile_steps": 1}

LOOP = """\
import copy
import json
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
ema = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 8, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
log = open("losses.txt", "w")
for epoch in range(STEPS):
    for x, y in loader:
        logits = model(x)
        loss = F.cross_entropy(logits, y) + 0.01 * logits.square().mean()
        optimizer.zero_grad()
        loss.backward()
        total = 0.0
        for p in model.parameters():
            total += p.grad.data.norm(2).item() ** 2
        coef = 0.5 / (total ** 0.5 + 1e-6)
        for p in model.parameters():
            p.grad.data.mul_(min(coef, 1.0))
        optimizer.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters()):
                e.mul_(0.9).add_(
                    p, alpha=0.1)
        print(repr(loss.item()), file=log, flush=True)
"""

FLOW = """\
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = torch.tanh(x)
        return x


model = Gate()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    model(torch.randn(8, 16)).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
"""

GROUP = """\
import tempfile
store = torch.distributed.FileStore(tempfile.mktemp(), 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(Gate())"""

COMPILED = """\
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile
def penalty(value):
    return value.exp().sum()


def closure():
    optimizer.zero_grad()
    loss = penalty(model(torch.randn(8, 4)))
    loss.backward()
    return loss


for step in range(STEPS):
    optimizer.step(closure)
"""


@dataclass
class Captured:
    """What a capture left behind."""

    status: dict[str, Any]
    facts: ProbeFacts
    graphs: tuple[Graph, ...]
    gaps: dict[str, str]
    links: Correlation | None
    source: list[str]

    @property
    def eager(self) -> Graph:
        (graph,) = (graph for graph in self.graphs if graph.kind == "eager")
        return graph

    def text(self, node: Node) -> str:
        """The source that a node's span covers."""
        assert node.span is not None and node.span.end_column is not None
        return self.source[node.span.line - 1][node.span.column : node.span.end_column]

    def cost(self, node: Node) -> NodeCost | None:
        assert self.links is not None
        found = (c for c in self.links.costs if (c.graph, c.node) == (self.eager.index, node.index))
        return next(found, None)


def capture(text: str, folder: Path, steps: int = 100, **options: object) -> Captured:
    script, out = folder / "train.py", folder / "out"
    script.write_text(text.replace("STEPS", str(steps)), encoding="utf-8")
    spec = Spec(
        script=str(script),
        argv=(),
        root=str(folder),
        out=str(out),
        plan="advisor.capture.probe:CapturePlan",
        options={"device_rates": False, "environment": {"OMP_NUM_THREADS": "1"}, **(options or OPTIONS)},
    )
    with Child(spec, cwd=str(folder)) as child:
        while child.receive() is not None:
            continue
        child.wait()
        status = child.status()
        assert status.get("status") in ("stopped", "ended"), (status, child.output_tail())
    graphs, gaps = read_graphs(out / "graph.json", folder)
    links = None
    if (out / "annotated.json.gz").is_file():
        links = correlate(read_trace(out / "trace.json.gz"), read_trace(out / "annotated.json.gz"), graphs)
    facts = read_probe(out / "probe.json", folder)
    return Captured(status, facts, graphs, gaps, links, script.read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captured, Path]:
    folder = tmp_path_factory.mktemp("loop")
    return capture(LOOP, folder), folder


def calls(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if node.op.startswith("call_") and operation(node) == name]


def test_the_loss_is_a_node_with_its_place_and_its_time(loop: tuple[Captured, Path]) -> None:
    captured, _ = loop
    assert [graph.kind for graph in captured.graphs] == ["dynamo", "eager"]
    assert captured.eager.training and captured.gaps == {}
    (entropy,) = calls(captured.eager, "cross_entropy")
    assert captured.text(entropy) == "F.cross_entropy(logits, y)"
    assert entropy.target == "torch.nn.functional.cross_entropy"
    assert entropy.kwargs == {}, "arguments nobody gave are no arguments"
    logits, labels = (captured.eager.nodes[index] for index in entropy.inputs())
    assert (logits.op, logits.facts["origin"], logits.shape) == ("placeholder", "input", (8, 8))
    assert (labels.dtype, labels.facts["origin"]) == ("int64", "input")
    assert entropy.requires_grad and entropy.module is None
    found = captured.cost(entropy)
    assert found is not None and found.forward_us > 0 and found.backward_us > 0
    (total,) = (n for n in calls(captured.eager, "add") if n.span is not None and n.span.line == entropy.span.line)  # type: ignore[union-attr]
    assert captured.text(total) == "F.cross_entropy(logits, y) + 0.01 * logits.square().mean()"


def test_clipping_by_hand_works_on_gradients_after_the_backward_pass(loop: tuple[Captured, Path]) -> None:
    captured, _ = loop
    norms = calls(captured.eager, "norm")
    assert [captured.text(node) for node in norms] == ["p.grad.data.norm(2)"] * 4
    gradients = [captured.eager.nodes[node.inputs()[0]] for node in norms]
    assert {node.facts["kind"] for node in gradients} == {"gradient"}
    items = [node for node in calls(captured.eager, "item") if captured.eager.nodes[node.inputs()[0]] in norms]
    assert len(items) == 4
    scaled = [n for n in calls(captured.eager, "mul") if "grad" in captured.source[n.span.line - 1]]  # type: ignore[union-attr]
    assert [node.inputs()[0] for node in scaled] == [node.index for node in gradients]
    for node in (*norms, *scaled):
        found = captured.cost(node)
        assert found is not None and found.forward_us > 0, node.name
    assert captured.links is not None and captured.links.shares_us["other"] > 0


def test_averaging_reads_parameters_without_gradients(loop: tuple[Captured, Path]) -> None:
    captured, _ = loop
    line = next(n for n, text in enumerate(captured.source, start=1) if "e.mul_" in text)
    mine = [n for n in captured.eager.nodes if n.span is not None and n.span.line == line]
    assert [node.target for node in mine] == ["method.mul_", "method.add_"] * 4
    assert {node.facts["grad_mode"] for node in mine} == {"off"}
    added = captured.eager.nodes[mine[1].inputs()[1]]
    assert added.facts["kind"] == "parameter"
    assert captured.text(mine[1]) == "e.mul_(0.9).add_(", (
        "an expression of several lines is told up to the end of its first"
    )


def test_what_loaders_and_optimizers_call_is_theirs(loop: tuple[Captured, Path]) -> None:
    captured, _ = loop
    places = {frame.path for node in captured.eager.nodes for frame in node.frames}
    assert not [path for path in places if "/torch/utils/data/" in path or "/torch/optim/" in path]
    assert places == {"train.py"}


def test_the_script_computes_what_it_computes_alone(loop: tuple[Captured, Path]) -> None:
    """Dropout and shuffling draw the same numbers with and without the recording."""
    captured, folder = loop
    seen = (folder / "losses.txt").read_text(encoding="utf-8").splitlines()
    alone = folder / "alone"
    alone.mkdir()
    (alone / "train.py").write_text(LOOP.replace("STEPS", "2"), encoding="utf-8")
    subprocess.run([sys.executable, "train.py"], cwd=alone, check=True, env={"OMP_NUM_THREADS": "1", "PATH": ""})
    expected = (alone / "losses.txt").read_text(encoding="utf-8").splitlines()
    assert captured.status["steps"] == 8
    assert len(seen) >= 7 and seen == expected[: len(seen)]


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return capture(FLOW, tmp_path_factory.mktemp("flow"))


def test_a_module_dynamo_leaves_is_recorded_call_by_call(flow: Captured) -> None:
    assert [graph.kind for graph in flow.graphs] == ["eager"]
    assert flow.gaps == {"dynamo": "Gate was recorded by eager calls: Data-dependent branching"}
    layers = calls(flow.eager, "linear")
    assert [node.module for node in layers] == ["layers.0", "layers.1", "layers.2"]
    assert {node.module_class for node in layers} == {"torch.nn.modules.linear.Linear"}
    assert [flow.text(node) for node in layers] == ["layer(x)"] * 3
    assert [node.module for node in calls(flow.eager, "sum")] == [""] * 3
    (loss,) = calls(flow.eager, "mean")
    behind, index = set(), loss.index
    while flow.eager.nodes[index].inputs():
        behind.add(index)
        index = flow.eager.nodes[index].inputs()[0]
    assert {node.index for node in layers} <= behind, "module and loss are one graph"
    for node in layers:
        found = flow.cost(node)
        assert found is not None and found.backward_us > 0
    assert flow.links is not None and flow.links.linked_share is not None and flow.links.linked_share > 0.8


def test_library_code_keeps_its_frames_and_is_shown_at_the_users_call(flow: Captured) -> None:
    norms = [n for n in flow.eager.nodes if n.target.endswith("linalg_vector_norm") and n.frames[-1].line]
    assert len(norms) == 7  # one per parameter, one of all
    assert {flow.text(node) for node in norms} == {"nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)"}
    assert all(node.frames[-1].path.endswith("torch/nn/utils/clip_grad.py") for node in norms)


@pytest.mark.parametrize(("steps", "timed", "linked"), [(2, 0, False), (3, 1, True), (4, 1, True), (10, 3, True)])
def test_brief_recordings_of_short_scripts(tmp_path: Path, steps: int, timed: int, linked: bool) -> None:
    captured = capture(FLOW, tmp_path, steps, brief=True)
    assert captured.status["status"] == ("stopped" if steps == 10 else "ended")
    assert captured.status["steps"] == min(steps, 6)
    assert len(captured.facts.step_us) == timed
    assert len(calls(captured.eager, "linear")) == (3 if linked else 0)
    assert calls(captured.eager, "mean"), "what runs outside of the module is there after two steps"
    assert ("times" in captured.facts.missing) is linked
    assert ("links" in captured.facts.missing) is not linked
    if linked:
        for node in calls(captured.eager, "linear"):
            found = captured.cost(node)
            assert found is not None and found.forward_us > 0


def test_without_dynamo_every_module_is_recorded_call_by_call(tmp_path: Path) -> None:
    captured = capture(LOOP, tmp_path, dynamo=False, brief=True)
    assert [graph.kind for graph in captured.graphs] == ["eager"]
    assert [node.module for node in calls(captured.eager, "linear")] == ["0", "3"]
    (entropy,) = calls(captured.eager, "cross_entropy")
    assert operation(captured.eager.nodes[entropy.inputs()[0]]) == "linear"


def test_compiled_functions_and_closures_of_the_script(tmp_path: Path) -> None:
    captured = capture(COMPILED, tmp_path)
    (exponential,) = calls(captured.eager, "exp")
    assert captured.text(exponential) == "value.exp()"
    assert [frame.line for frame in exponential.frames] == [20, 14, 9]


def test_modules_in_a_wrapper_for_several_devices(tmp_path: Path) -> None:
    """Dynamo leaves the module, and the wrapper's own calls are no part of the loop."""
    text = FLOW.replace("model = Gate()", GROUP).replace("clip_grad_norm_(", "clip_grad_value_(")
    captured = capture(text.replace(", foreach=False", ""), tmp_path, brief=True)
    assert [node.module for node in calls(captured.eager, "linear")] == ["layers.0", "layers.1", "layers.2"]
    frames = {frame.path for node in captured.eager.nodes for frame in node.frames}
    assert not [path for path in frames if "torch/nn/parallel" in path or "torch/distributed" in path]
    assert captured.links is not None and captured.links.linked_share is not None and captured.links.linked_share > 0.6


# ----------------------------------------------------------------------------------------------------------- in process


def recorder(**options: Any) -> Any:
    from advisor.capture.eager import EagerRecorder

    return EagerRecorder(**options)


def test_modes_of_the_user_leave_in_their_own_order() -> None:
    mode = recorder()
    with torch.device("meta"):
        mode.begin(describe=True)
        assert torch.ones(2).device.type == "meta"
        with mode.paused():
            assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"
    mode.end()
    assert torch._C._len_torch_function_stack() == 0
    assert [node["target"] for node in mode.document()["nodes"]] == ["torch.ones"] * 2


def test_no_tensor_outlives_the_step() -> None:
    mode = recorder()
    value = torch.ones(4, requires_grad=True)
    mode.begin(describe=True)
    parts = (value * 2).chunk(2)
    total = parts[0] + parts[1]
    gone = [weakref.ref(t) for t in (*parts, total)]
    del parts, total
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    mode.end()
    assert [node["target"] for node in mode.document()["nodes"]] == [
        "p_0", "method.mul", "method.chunk", "operator.getitem", "operator.getitem", "method.add"
    ]  # fmt: skip


def test_a_failure_of_the_recorder_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.capture import eager

    def broken(*_args: object, **_kwargs: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(eager, "describe_value", broken)
    mode = recorder()
    mode.begin(describe=True)
    assert float(torch.ones(3).sum()) == 3.0
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3) + torch.ones(4)
    mode.end()
    assert mode.document() is None
    assert mode.missing == {"eager": "calls outside of modules were not recorded: KeyError: 'broken'"}


def test_the_number_of_nodes_is_bounded() -> None:
    mode = recorder(limit=5)
    mode.begin(describe=True)
    value = torch.ones(3)
    for _ in range(10):
        value = value + 1
    mode.end()
    assert len(mode.document()["nodes"]) == 5
    assert mode.missing == {"eager": "only the first 5 calls outside of modules were recorded"}
    assert value.tolist() == [11.0] * 3


def test_operators_are_named_as_dynamo_names_them() -> None:
    mode = recorder()
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    mode.begin(describe=True)
    (2 - x, 2 / x, x @ y, -x, x == y, x[0], x.T, 2**x)
    x[1] = 0
    x += y
    [row + 1 for row in y]
    bool(x.sum() > 0)
    x.shape, x.dim(), len(x), str(x)
    torch._foreach_mul_([x, y], 2.0)
    x.sum()
    mode.end()
    nodes = mode.document()["nodes"]
    assert [node["target"] for node in nodes if node["op"] != "placeholder"] == [
        "operator.sub", "operator.truediv", "method.matmul", "method.neg", "operator.eq", "operator.getitem",
        "builtins.getattr", "operator.pow", "operator.setitem", "method.add_", "method.unbind", "operator.getitem",
        "method.add", "operator.getitem", "method.add", "operator.getitem", "method.add", "method.sum", "method.gt",
        "method.__bool__", "method.__repr__", "torch._foreach_mul_", "operator.getitem", "method.sum",
    ]  # fmt: skip
    assert nodes[1]["args"] == [2, {"ref": 0}], "reflected operators have their operands in the order of the source"


def test_the_recorded_document_is_plain(tmp_path: Path) -> None:
    mode = recorder()
    mode.begin(describe=True)
    torch.stack([torch.ones(2, dtype=torch.bool)] * 2).masked_fill(torch.ones(2, 2, dtype=torch.bool).tril(), False)
    mode.end()
    document = {"graphs": [mode.document()]}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    ((graph,), _) = read_graphs(path, tmp_path)
    (lower,) = calls(graph, "tril")
    assert lower.facts["keep"] == "causal"
    assert graph.kind == "eager"
