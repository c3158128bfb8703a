"""Scripts of other frameworks and forms run through capture unedited."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import scripts

from advisor import match, plan, registry
from advisor.capture.launch import Child
from advisor.correlate import correlate
from advisor.ingest.graph import read_graphs
from advisor.ingest.kineto import read_trace
from advisor.ingest.probe import ProbeFacts, read_probe
from advisor.model import Environment, Graph, Hardware, Profile, Safety
from advisor.session import Spec
from advisor.source import Source

pytest.importorskip("torch")
OPTIONS = {"warmup": 3, "steps": 4, "profile_steps": 2, "device_rates": False}


@dataclass
class Captured:
    """What a capture left behind."""

    status: dict[str, Any]
    facts: ProbeFacts
    graphs: tuple[Graph, ...]
    folder: Path
    linked: float | None

    def profile(self) -> Profile:
        out = self.folder / "out"
        correlation = correlate(read_trace(out / "trace.json.gz"), read_trace(out / "annotated.json.gz"), self.graphs)
        return Profile(
            environment=Environment(python="3", torch="2", cpu_count=2),
            hardware=Hardware(name="CPU", kind="cpu"),
            steps=(),
            step_us=self.facts.step_us,
            graphs=self.graphs,
            costs=correlation.costs,
            optimizers=self.facts.optimizers,
            loaders=self.facts.loaders,
        )


def capture(text: str, folder: Path, entry: str | None = None) -> Captured:
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    out = folder / "out"
    spec = Spec(
        script=str(script),
        argv=(),
        root=str(folder),
        out=str(out),
        plan="advisor.capture.probe:CapturePlan",
        entry=entry,
        options={**OPTIONS, "environment": {"OMP_NUM_THREADS": "1"}},
    )
    with Child(spec) as child:
        while child.receive() is not None:
            continue
        child.wait()
        status = child.status()
        assert status.get("status") == "stopped", (status, child.output_tail())
    graphs, _ = read_graphs(out / "graph.json", folder)
    linked = correlate(read_trace(out / "trace.json.gz"), read_trace(out / "annotated.json.gz"), graphs).linked_share
    return Captured(status, read_probe(out / "probe.json", folder), graphs, folder, linked)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    captured = capture(scripts.TRAINER, tmp_path)
    assert captured.status["steps"] >= 12
    (optimizer,) = captured.facts.optimizers
    assert optimizer.kind == "torch.optim.adamw.AdamW"
    assert captured.facts.tokens_per_step == 4 * 32
    assert len(captured.facts.step_us) == OPTIONS["steps"]
    assert [graph.kind for graph in captured.graphs] == ["dynamo", "eager"]
    assert captured.linked is not None
    assert captured.linked > 0.9

    rules = {name: item.rule for name, item in registry.load()[0].items()}
    ctx = match.context(captured.profile(), lambda path: Source.read(tmp_path, path), worth=0.0)
    assert not match.match(ctx, [rules["naive-attention"]]).findings
    (finding,) = match.match(ctx, [rules["library-attention"]]).findings
    assert finding.span.path == "train.py"
    assert "LlamaConfig(" in scripts.TRAINER.splitlines()[finding.span.line - 1]
    read = lambda path: Source.read(tmp_path, path)  # noqa: E731
    made = plan.plan([finding], rules, read, frozenset({Safety.NUMERICS}))
    (rewrite,) = made.rewrites
    assert [text for _, text in rewrite.edits] == ['"sdpa"']


def test_lightning_module(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    captured = capture(scripts.LIGHTNING, tmp_path)
    (optimizer,) = captured.facts.optimizers
    assert optimizer.span is not None
    assert "AdamW" in scripts.LIGHTNING.splitlines()[optimizer.span.line - 1]
    (loader,) = captured.facts.loaders
    assert loader.span is not None
    assert "DataLoader(data" in scripts.LIGHTNING.splitlines()[loader.span.line - 1]
    assert [(graph.kind, len(graph.nodes) > 3) for graph in captured.graphs] == [("dynamo", True), ("eager", True)]
    assert all(loss > 0 for loss in captured.facts.losses)


@pytest.fixture(scope="module")
def kernel_bench(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return capture(scripts.KERNEL_BENCH, tmp_path_factory.mktemp("kernel_bench"))


def test_kernel_bench_form(kernel_bench: Captured) -> None:
    assert any(node.target.endswith("relu") for node in kernel_bench.graphs[0].nodes)


def test_nothing_recorded_names_the_folder_of_the_user(kernel_bench: Captured) -> None:
    folder = kernel_bench.folder
    for name in ("graph.json", "probe.json"):
        assert str(folder) not in (folder / "out" / name).read_text(encoding="utf-8")


def test_entry_function(tmp_path: Path) -> None:
    text = scripts.KERNEL_BENCH + "\n\ndef build():\n    return Model(16), get_inputs(), lambda out: out.sum()\n"
    captured = capture(text.replace("get_init_inputs", "unused"), tmp_path, entry="train:build")
    assert captured.status["steps"] >= 12


def test_gradient_accumulation_counts_one_step(tmp_path: Path) -> None:
    text = scripts.LOOP.replace("{body}", "for _ in range(3): model(torch.randn(8, 4)).square().mean().backward()")
    captured = capture(text, tmp_path)
    document = json.loads((tmp_path / "out" / "probe.json").read_text(encoding="utf-8"))
    assert document["backwards"] == 4 * captured.status["steps"]


def test_a_failing_annotated_step_loses_the_graph_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    fails = 'if model._compiled_call_impl is not None: raise RuntimeError("annotated")'
    script.write_text(scripts.LOOP.replace("{body}", fails), encoding="utf-8")
    spec = Spec(
        script=str(script),
        argv=(),
        root=str(tmp_path),
        out=str(tmp_path / "out"),
        plan="advisor.capture.probe:CapturePlan",
        options=OPTIONS,
    )
    with Child(spec) as child:
        while child.receive() is not None:
            continue
        child.wait()
        assert child.status()["status"] == "stopped"
    assert (tmp_path / "out" / "trace.json.gz").is_file()
    assert "annotated run raised" in read_probe(tmp_path / "out" / "probe.json", tmp_path).missing["graph"]


def test_steps_that_only_draw_a_schedule_are_none(tmp_path: Path) -> None:
    drawing = (
        "import torch\n"
        "dummy = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(dummy, lambda step: 0.9**step)\n"
        "for _ in range(50):\n    dummy.step()\n    schedule.step()\n"
    )
    captured = capture(drawing + scripts.LOOP.replace("{body}", "pass"), tmp_path)
    assert captured.facts.step_us and captured.graphs
    assert captured.linked is not None and captured.linked > 0.5
