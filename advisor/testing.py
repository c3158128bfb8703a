"""Run a rule's examples and hold the rule to its contract; for our tests and for other people's rules.

`check(loaded)` raises AssertionError with what is wrong. Graph rules' examples are captured with Dynamo and
executed forward and backward, before and after, so they need torch; everything else does not.
"""

from __future__ import annotations

import ast
import copy
import itertools
import linecache
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from advisor import match as matching
from advisor import patch as patching
from advisor.graphrule import GraphRule
from advisor.ingest.graph import read_graphs
from advisor.model import (
    Decline,
    Environment,
    Finding,
    Graph,
    Hardware,
    Kernels,
    Loader,
    NodeCost,
    OptimizerUse,
    Profile,
    Rewrite,
    Safety,
)
from advisor.registry import HEADINGS, Loaded
from advisor.rule import Context, Example, ExampleProfile, Rule
from advisor.source import Source

FILE = "example.py"
_count = itertools.count()


def check(loaded: Loaded) -> None:
    """Everything the project demands of a rule; raises AssertionError."""
    rule = loaded.rule
    missing = [h for h in HEADINGS if f"## {h}" not in loaded.page]
    assert not missing, f"{rule.id}: the page lacks the headings {missing}"
    assert any(e.after is not None for e in rule.examples), f"{rule.id}: no example fires"
    assert any(e.after is None for e in rule.examples), f"{rule.id}: no example stays silent"
    for number, example in enumerate(rule.examples):
        run_example(rule, example, f"{rule.id} example {number}")


def run_example(rule: Rule, example: Example, label: str = "example") -> None:
    """One example: findings or decline, byte-exact result, a second run finds nothing, order and inputs stable."""
    with tempfile.TemporaryDirectory() as folder:
        ctx, source = context_of(rule, example.before, example.profile, Path(folder))
        before = copy.deepcopy(ctx.profile)
        results = list(rule.match(ctx))
        assert results == list(rule.match(ctx)), f"{label}: two runs differ"
        assert ctx.profile == before, f"{label}: the rule changed its input"
        findings = [r for r in results if isinstance(r, Finding)]
        if example.after is None:
            assert not findings, f"{label}: fired where it should stay silent"
            reasons = [r.reason for r in results if isinstance(r, Decline)]
            assert example.because in reasons, f"{label}: declined with {reasons}, not with {example.because!r}"
            return
        assert len(findings) == 1, f"{label}: {len(findings)} findings, {results}"
        _check_estimate(example, findings[0], label)
        rewrite = rule.rewrite(findings[0], source)
        if example.after == example.before:  # a finding that is told and never edited
            assert isinstance(rewrite, Decline), f"{label}: an edit where there is none to make, {rewrite}"
            _check_needs(rule, ctx, label)
            return
        assert isinstance(rewrite, Rewrite), f"{label}: {rewrite}"
        result = patching.build([rewrite], lambda _: source).sources[FILE]
        assert result == example.after, f"{label}: the result differs\n{result}"
        ast.parse(result)
        _check_needs(rule, ctx, label)
        if isinstance(rule, GraphRule) and rule.safety in (Safety.EXACT, Safety.NUMERICS):
            check_same_function(example.before, result, rule.tolerance, label)
            check_regions(rewrite, ctx.graphs, label)
        for form in rule.forms(findings[0], source):
            ast.parse(patching.build([form], lambda _: source).sources[FILE])
        after, _ = context_of(rule, result, example.profile, Path(folder))
        assert not [r for r in rule.match(after) if isinstance(r, Finding)], f"{label}: fires on its own result"


def _check_estimate(example: Example, finding: Finding, label: str) -> None:
    low, high = finding.estimate.low_us, finding.estimate.high_us
    assert 0 <= low <= high <= example.profile.step_us and high > 0, f"{label}: estimate {low}..{high} us"
    if example.saves is not None:
        least, most = example.saves
        assert least <= low and high <= most, f"{label}: estimate {low}..{high} us is outside saves {least}..{most}"


def _check_needs(rule: Rule, ctx: Context, label: str) -> None:
    for need in rule.needs:
        poorer = replace(ctx, profile=replace(ctx.profile, missing={need: f"no {need} in this test"}))
        result = matching.match(poorer, [rule])
        assert not result.findings, f"{label}: fires without {need}"
        assert need in result.declines[0].needs, f"{label}: declines without {need}, but does not name it"


# ------------------------------------------------------------------------------------------------------------- contexts


def context_of(rule: Rule, text: str, measured: ExampleProfile, folder: Path) -> tuple[Context, Source]:
    """The context a rule sees for an example: a real captured graph for graph rules, made-up measurements for all."""
    (folder / FILE).write_text(text, encoding="utf-8")
    source = Source.read(folder, FILE)
    graphs = capture(folder) if isinstance(rule, GraphRule) else ()
    profile = Profile(
        environment=Environment(python="3", torch="2", cpu_count=measured.cores),
        hardware=Hardware(name="example device", kind=measured.device),
        steps=(),
        step_us=(measured.step_us,),
        graphs=graphs,
        costs=_costs(graphs, measured),
        optimizers=_optimizers(source, measured),
        loaders=_loaders(source, measured),
        kernels=_kernels(measured),
        facts={} if measured.device_idle_us is None else {"data_idle_us": measured.device_idle_us},
    )
    return matching.context(profile, lambda _: source), source


def capture(folder: Path) -> tuple[Graph, ...]:
    """The graphs of the module in `folder`/example.py, captured as the product captures them."""
    from advisor.capture.annotate import Annotation

    module = load_module(folder / FILE)
    model = module.Model(*module.get_init_inputs())
    annotation = Annotation([model], folder, str(folder))
    annotation.begin()
    model(*module.get_inputs())
    annotation.write()
    return read_graphs(folder / "graph.json", folder)[0]


def load_module(path: Path) -> ModuleType:
    """Execute a source file as a module, always from its present text."""
    linecache.checkcache(str(path))
    module = ModuleType(f"advisor_example_{next(_count)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # Dynamo imports the module of the functions it inlines
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def _costs(graphs: tuple[Graph, ...], measured: ExampleProfile) -> tuple[NodeCost, ...]:
    called = [(g.index, n.index) for g in graphs for n in g.nodes if n.op.startswith("call_")]
    each = measured.step_us * measured.nodes / len(called) if called else 0.0
    return tuple(
        NodeCost(graph=g, node=n, forward_us=each / 3, backward_us=each * 2 / 3, launches=1, provenance="example")
        for g, n in called
    )


def _kernels(measured: ExampleProfile) -> Kernels:
    """Device activities of one step, one after another; operators are not linked."""
    pairs = measured.kernels
    count = len(pairs)
    return Kernels(
        name=tuple(name for name, _ in pairs),
        category=("kernel",) * count,
        start_us=tuple(float(sum(t for _, t in pairs[:i])) for i in range(count)),
        duration_us=tuple(time_us for _, time_us in pairs),
        stream=(7,) * count,
        correlation=tuple(range(count)),
        operator=(-1,) * count,
        step=(0,) * count,
    )


def _calls(source: Source, prefix: str) -> list[tuple[ast.Call, str]]:
    found = [(n, source.qualified(n.func)) for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    return [(call, name) for call, name in found if name is not None and name.startswith(prefix)]


def _literals(call: ast.Call) -> Mapping[str, Any]:
    pairs = {k.arg: k.value for k in call.keywords if k.arg is not None}
    return {name: value.value for name, value in pairs.items() if isinstance(value, ast.Constant)}


def _optimizers(source: Source, measured: ExampleProfile) -> tuple[OptimizerUse, ...]:
    """What capture would have seen of the optimizers a source constructs; stands in for running it."""
    return tuple(
        OptimizerUse(
            span=source.span(call),
            kind=f"torch.optim.{name.rsplit('.', 1)[-1].lower()}.{name.rsplit('.', 1)[-1]}",
            arguments=_literals(call),
            given=tuple(_literals(call)),
            parameters=12,
            elements=12_000,
            devices=(measured.device,),
            dtypes=measured.dtypes,
            sparse=measured.sparse,
            overrides_step=measured.overrides_step,
            groups=1,
            step_us=sum(measured.optimizer) or None,
        )
        for call, name in _calls(source, "torch.optim.")
    )


def _loaders(source: Source, measured: ExampleProfile) -> tuple[Loader, ...]:
    """What capture would have seen of the loaders a source constructs; stands in for running it."""
    return tuple(
        Loader(
            span=source.span(call),
            arguments={"num_workers": 0, **_literals(call)},
            given=tuple(_literals(call)),
            wait_us_per_step=measured.loader_wait_us,
            fetch_us=measured.loader_wait_us,
            batches=8,
            dataset="Data",
            iterable=measured.iterable,
            picklable=True,
            draws_global_rng=measured.draws_global_rng,
        )
        for call, _ in _calls(source, "torch.utils.data.DataLoader")
    )


# ------------------------------------------------------------------------------------------------------------ execution


def check_regions(rewrite: Rewrite, graphs: tuple[Graph, ...], label: str) -> None:
    """The regions that a rewrite replaces, run alone in this process, are the same function as their replacement."""
    from advisor.verify import proving, regions

    for proof in regions.prove([rewrite], graphs, lambda jobs: [proving.prove(job) for job in jobs]).values():
        assert proof.ok, f"{label}: the replacement is not the same function alone: {proof.reasons}"


def check_same_function(before: str, after: str, tolerance: float, label: str) -> None:
    """Outputs and input and parameter gradients of both sources agree with a float64 run as well as each other."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        results: list[list[Any]] = []
        for text, dtype in ((before, torch.float32), (after, torch.float32), (before, torch.float64)):
            path = Path(folder) / f"module{len(results)}.py"
            path.write_text(text, encoding="utf-8")
            results.append(_forward_backward(load_module(path), dtype))
    for old, new, reference in zip(*results, strict=True):
        scale = reference.abs().max().clamp(min=1e-30)
        limit = 1.5 * float((old - reference).abs().max() / scale) + tolerance * torch.finfo(torch.float32).eps
        error = float((new - reference).abs().max() / scale)
        assert error <= limit, f"{label}: another function, error {error:.2e} over the limit {limit:.2e}"


def _forward_backward(module: ModuleType, dtype: Any) -> list[Any]:
    import torch

    torch.manual_seed(0)
    model = module.Model(*module.get_init_inputs())
    inputs = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in module.get_inputs()]
    model = model.to(dtype)
    output = model(*inputs)
    weights = torch.arange(output.numel(), dtype=torch.float64).reshape(output.shape).cos().to(dtype)
    (output * weights).sum().backward()
    leaves = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    return [value.detach().double() for value in (output, *gradients)]
