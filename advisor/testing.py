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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from advisor import match as matching
from advisor import patch as patching
from advisor.diffs import unified
from advisor.graphrule import GraphRule
from advisor.ingest.graph import read_graphs
from advisor.model import (
    Break,
    Decline,
    Environment,
    Finding,
    Graph,
    Hardware,
    Kernels,
    Loader,
    LoopCall,
    Node,
    NodeCost,
    Operators,
    OptimizerUse,
    Profile,
    Ref,
    Rewrite,
    Safety,
    Span,
    Symbol,
    Utilisation,
)
from advisor.registry import HEADINGS, Loaded
from advisor.rule import Context, Example, ExampleProfile, Rule
from advisor.skeleton import FILL_IN
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
    for number, example in enumerate(rule.examples, 1):
        run_example(rule, example, f"{rule.id} example {number}")
    assert FILL_IN not in loaded.page, f"{rule.id}: the page still says {FILL_IN}: write it"


def run_example(rule: Rule, example: Example, label: str = "example") -> None:
    """One example: findings or decline, byte-exact result, a second run finds nothing, order and inputs stable."""
    with tempfile.TemporaryDirectory() as folder:
        ctx, source = context_of(rule, example.before, example.profile, Path(folder))
        before, state = copy.deepcopy(ctx.profile), dict(vars(rule))
        results = _matched(rule, ctx, label)
        assert results == _matched(rule, ctx, label), f"{label}: two runs differ"
        assert ctx.profile == before, f"{label}: the rule changed its input"
        assert vars(rule) == state, f"{label}: the rule changed itself, {sorted(vars(rule))}"
        findings = [r for r in results if isinstance(r, Finding)]
        if example.after is None:
            assert not findings, f"{label}: fired where it should stay silent"
            reasons = [r.reason for r in results if isinstance(r, Decline)]
            assert example.because in reasons, f"{label}: declined with {reasons}, not with {example.because!r}"
            return
        assert len(findings) == 1, f"{label}: {len(findings)} findings where one is due, {results}"
        _check_estimate(example, findings[0], label)
        rewrite = rule.rewrite(findings[0], source)
        if example.after == example.before:  # a finding that is told and never edited
            assert isinstance(rewrite, Decline), f"{label}: an edit where there is none to make, {rewrite}"
            _check_needs(rule, ctx, label)
            return
        assert isinstance(rewrite, Rewrite), f"{label}: no edit, rewrite gave {rewrite}"
        result = patching.build([rewrite], lambda _: source).sources[FILE]
        assert result == example.after, f"{label}: the result differs\n{unified('after', example.after, result)}"
        ast.parse(result)
        _check_needs(rule, ctx, label)
        if isinstance(rule, GraphRule) and rule.safety in (Safety.EXACT, Safety.NUMERICS):
            check_same_function(example.before, result, rule.tolerance, label)
            check_regions(rewrite, ctx.graphs, label)
        for form in rule.forms(findings[0], source):
            ast.parse(patching.build([form], lambda _: source).sources[FILE])
        after, _ = context_of(rule, result, example.profile, Path(folder))
        again = [r for r in _matched(rule, after, label) if isinstance(r, Finding)]
        assert not again, f"{label}: fires on its own result"


def _matched(rule: Rule, ctx: Context, label: str) -> list[Finding | Decline]:
    results = rule.match(ctx)
    assert isinstance(results, Iterable), f"{label}: match gave {results}: yield findings and declines"
    return list(results)


def _check_estimate(example: Example, finding: Finding, label: str) -> None:
    low, high = finding.estimate.low_us, finding.estimate.high_us
    said, step_us = f"{label}: estimate {low}..{high} us", example.profile.step_us
    assert 0 <= low <= high <= step_us and high > 0, f"{said}: it is above 0 and at most the step, {step_us} us"
    if example.saves is not None:
        least, most = example.saves
        assert least <= low and high <= most, f"{said} is outside saves {least}..{most}"


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
    graphs = capture(folder) if isinstance(rule, GraphRule) else _product_graph(source, measured)
    graphs = (*graphs, *_values(source, measured, len(graphs)))
    graphs = (*graphs, *_batch(measured, len(graphs)))
    reads = _reads(source, measured)
    if reads:
        graphs = (*graphs, _eager(len(graphs), reads, measured.device))
    graphs = (*graphs, *_moves(source, measured, len(graphs)))
    graphs = (*graphs, *_trips(source, measured, len(graphs)))
    profile = Profile(
        environment=Environment(python="3", torch="2", cpu_count=measured.cores, packages=measured.packages),
        hardware=Hardware(
            name="example device",
            kind=measured.device,
            arch=measured.arch,
            hbm_bytes=measured.memory[1] if measured.memory and measured.device == "cuda" else None,
        ),
        peak_bytes=measured.memory[0] if measured.memory else None,
        steps=(),
        step_us=(measured.step_us,),
        graphs=graphs,
        costs=_costs(graphs, measured),
        optimizers=_optimizers(source, measured),
        loaders=_loaders(source, measured),
        calls=_loop_calls(source, measured),
        breaks=_breaks(source, measured),
        recompiled=measured.recompiled,
        utilisation=Utilisation(busy=measured.busy),
        kernels=_kernels(measured),
        operators=_operators(measured),
        facts={
            **measured.facts,
            **({"host_memory_bytes": measured.memory[1]} if measured.memory and measured.device == "cpu" else {}),
            **({"reads_us": _read_times(len(graphs) - 1, reads, measured)} if reads else {}),
            **({"moves_us": _move_times(graphs, measured)} if measured.moves else {}),
            **({"casts_us": _cast_times(graphs, measured)} if measured.trips else {}),
            **({} if measured.device_idle_us is None else {"data_idle_us": measured.device_idle_us}),
        },
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
    """Device activities of one step, one after another; those of operators are linked to them."""
    pairs = [*((name, time_us, -1) for name, time_us in measured.kernels)]
    pairs += [(name, time_us, row) for row, (name, _, time_us) in enumerate(measured.products)]
    if measured.device == "cuda":
        first = len(measured.products) + 1  # behind the node of the backward pass that runs them
        pairs += [(name, time_us, first + row) for row, (name, time_us) in enumerate(measured.recomputed)]
    count = len(pairs)
    return Kernels(
        name=tuple(name for name, _, _ in pairs),
        category=("kernel",) * count,
        start_us=tuple(float(sum(t for _, t, _ in pairs[:i])) for i in range(count)),
        duration_us=tuple(time_us for _, time_us, _ in pairs),
        stream=(7,) * count,
        correlation=tuple(range(count)),
        operator=tuple(row for _, _, row in pairs),
        step=(0,) * count,
    )


def _operators(measured: ExampleProfile) -> Operators:
    """The operators of `products` and, inside a node of the backward pass, of `recomputed`, in one step."""
    again = measured.recomputed
    first = len(measured.products)
    node, inside = (1, len(again)) if again else (0, 0)
    count = first + node + inside
    return Operators(
        name=(*(name for name, _, _ in measured.products), *(BACKWARD,) * node, *(name for name, _ in again)),
        start_us=tuple(float(row) for row in range(count)),
        duration_us=(*(1.0,) * first, *(sum(t for _, t in again),) * node, *(time_us for _, time_us in again)),
        thread=(1,) * count,
        sequence=(*(-1,) * (first + node), *range(9, 9 + inside)),
        forward_thread=(*(0,) * first, *(1,) * node, *(0,) * inside),
        parent=(*(-1,) * (first + node), *(first,) * inside),
        step=(0,) * count,
        shapes=(*(measured.sizes,) * first, *((),) * node, *(((1024, 1024),),) * inside),
        dtypes=(*((dtype, dtype) for _, dtype, _ in measured.products), *((),) * node, *(("float32",),) * inside),
    )


def _product_graph(source: Source, measured: ExampleProfile) -> tuple[Graph, ...]:
    """A graph of one linear layer where an example has products, called where the source calls `model`."""
    if not measured.products:
        return ()
    called = (n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "model")
    span = next((source.span(call) for call in called), None)
    kinds: dict[str, Any] = {"dtype": measured.products[0][1], "shape": (8, 8), "requires_grad": True}
    nodes = (
        Node(index=0, name="x", op="placeholder", target="x", users=(2,), **{**kinds, "requires_grad": False}),
        Node(index=1, name="w", op="placeholder", target="w", users=(2,), facts={"origin": "state"}, **kinds),
        Node(
            index=2,
            name="linear",
            op="call_function",
            target="torch.nn.functional.linear",
            args=(Ref(0), Ref(1)),
            module="head",
            **kinds,
        ),
    )
    return (Graph(index=0, nodes=nodes, span=span),)


def _values(source: Source, measured: ExampleProfile, index: int) -> tuple[Graph, ...]:
    """A graph of the tensors whose dtypes an example names, computed where the source computes them."""
    found = [(_where(source, text), dtype) for text, dtype in measured.values.items()]
    nodes = tuple(
        Node(index=number, name=f"value{number}", op="call_method", target="method.value", dtype=dtype, span=span)
        for number, (span, dtype) in enumerate(found)
        if span is not None
    )
    return (Graph(index=index, nodes=nodes, kind="eager"),) if nodes else ()


def _batch(measured: ExampleProfile, index: int) -> tuple[Graph, ...]:
    """A graph of a product on the tokens of a batch, of whose labels a share is padding."""
    if measured.padded is None:
        return ()
    facts = {"padded": str(measured.padded), "padding": "-100"}
    nodes = (
        Node(index=0, name="y", op="placeholder", target="y", shape=(4, 64), dtype="int64", facts=facts),
        Node(index=1, name="linear", op="call_function", target="torch.nn.functional.linear", shape=(4, 64, 8)),
    )
    return (Graph(index=index, nodes=nodes),)


def _breaks(source: Source, measured: ExampleProfile) -> tuple[Break, ...]:
    """What Dynamo would have said of the places that an example names; what an edit took away broke no more."""
    found = [(_where(source, text), reason) for text, reason in measured.breaks.items()]
    return tuple(Break(reason=why, span=span, count=2, frames=(span,)) for span, why in found if span is not None)


def _where(source: Source, text: str) -> Span | None:
    """The first expression of a source that is spelled so."""
    found = (n for n in ast.walk(source.tree) if isinstance(n, ast.expr) and source.segment(n) == text)
    return next((source.span(node) for node in found), None)


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
            idle_us=measured.optimizer_idle_us,
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
            fetched=_fetched(source, call),
            facts={**FETCHING, **measured.fetching},
        )
        for call, _ in _calls(source, "torch.utils.data.DataLoader")
    )


FETCHING: Mapping[str, Any] = {
    "start_method": "fork",
    "batch": "list",
    "batch_bytes": 1 << 16,
    "batch_devices": ["cpu"],
    "only_tensors": True,
    "shared_memory": 1 << 30,
}


def _fetched(source: Source, call: ast.Call) -> Span | None:
    """The iterable of the first loop over the name that a loader is assigned to."""
    statement = source.statement_of(call)
    names = {t.id for t in getattr(statement, "targets", ()) if isinstance(t, ast.Name)}
    loops = (n for n in ast.walk(source.tree) if isinstance(n, ast.For))
    over = (n.iter for n in loops if names & {m.id for m in ast.walk(n.iter) if isinstance(m, ast.Name)})
    return next((source.span(iterable) for iterable in over), None)


# as a loop spells them
METHODS = {
    "step": "optimizer.step",
    "backward": "backward",
    "zero_grad": "zero_grad",
    "eval": "evaluation",
    "compile": "torch.compile",
}
MODULES = {"model": "module"}  # what a loop calls a module
ALSO = {"backward": "ddp.reduce", "module": "library.checkpoint"}  # what the same call is noted as too
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
CLASSES = {"set_detect_anomaly": "detect_anomaly", "detect_anomaly": "detect_anomaly"}
FLAGS = {"zero_grad": ("set_to_none", True), "detect_anomaly": ("mode", True)}  # argument and default


def _said(value: ast.expr) -> bool:
    """The truth of a constant; what an option says is taken to be true."""
    return bool(value.value) if isinstance(value, ast.Constant) else True


def _loop_calls(source: Source, measured: ExampleProfile) -> tuple[LoopCall, ...]:
    """What capture would have seen of the calls a source makes; stands in for running it.

    A call in a function is one from every place that calls that function by name.
    """
    found = []
    for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
        qualified = source.qualified(call.func) or ""
        last = call.func.attr if isinstance(call.func, ast.Attribute) else qualified.rpartition(".")[2]
        name = CLASSES.get(last) or (qualified if qualified.startswith("torch.") else METHODS.get(last, qualified))
        name = MODULES.get(ast.unparse(call.func), name)
        for noted in (name, ALSO.get(name)):
            if noted not in (*measured.calls, "optimizer.step", "backward"):
                continue
            per_step, host_us = measured.calls.get(noted, (1.0, 0.0))
            flag, default = FLAGS.get(noted, ("", None))
            given = [k.value for k in call.keywords if k.arg == flag] + call.args[:1]
            facts = {flag: _said(given[0]) if given else default} if flag else {}
            facts |= measured.called.get(noted, {})
            found += [
                LoopCall(name=noted, frames=frames, calls=4, per_step=per_step, host_us=host_us, facts=facts)
                for frames in _frames(source, call)
            ]
    return tuple(found)


READ = {"item": "method.item", "float": "method.__float__", "int": "method.__int__"}


def _reads(source: Source, measured: ExampleProfile) -> list[ast.expr]:
    """The expressions of a source that read the device, in the order of their places."""
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.expr) and ast.unparse(n) in measured.reads]
    return sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _eager(index: int, reads: list[ast.expr], device: str) -> Graph:
    """What capture would have seen of reads outside modules: for each a tensor, and the call that reads it."""
    nodes: list[Node] = []
    for read in reads:
        assert isinstance(read, ast.Call)
        name = read.func.attr if isinstance(read.func, ast.Attribute) else ast.unparse(read.func)
        span = Span(path=FILE, line=read.lineno)
        number = len(nodes)
        nodes += [
            Node(index=number, name=f"p_{number}", op="placeholder", target="p", dtype="float32", device=device),
            Node(
                index=number + 1,
                name=f"read_{number}",
                op="call_method",
                target=READ.get(name, f"method.{name}"),
                args=(Ref(number),),
                frames=(span,),
                span=span,
            ),
        ]
    return Graph(index=index, nodes=tuple(nodes), kind="eager")


def _read_times(
    index: int, reads: list[ast.expr], measured: ExampleProfile
) -> dict[tuple[int, int], tuple[float, float]]:
    return {(index, 2 * place + 1): measured.reads[ast.unparse(read)] for place, read in enumerate(reads)}


def _moves(source: Source, measured: ExampleProfile, index: int) -> tuple[Graph, ...]:
    """What capture would have seen of tensors made on the host and moved: for each text a factory and a move."""
    nodes: list[Node] = []
    for text in measured.moves:
        call = next((n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and source.segment(n) == text), None)
        if call is None or not isinstance(call.func, ast.Attribute):
            continue
        number, span = len(nodes), source.span(call)
        inner = [source.qualified(n.func) or "" for n in ast.walk(call.func) if isinstance(n, ast.Call)]
        made = Node(
            index=number,
            name=f"made{number}",
            op="call_function",
            target=next((name for name in reversed(inner) if name.startswith("torch.")), "torch.zeros"),
            dtype="float32",
            device="cpu",
        )
        moved = Node(
            index=number + 1,
            name=f"moved{number}",
            op="call_method",
            target=f"method.{call.func.attr}",
            args=(Ref(number), *(Symbol("device", measured.device) for _ in call.args)),
            device=measured.device,
            frames=(span,),
            span=span,
            facts={"text": text},
        )
        nodes += [made, moved]
    return (Graph(index=index, nodes=tuple(nodes), kind="eager"),) if nodes else ()


def _move_times(
    graphs: tuple[Graph, ...], measured: ExampleProfile
) -> dict[tuple[int, int], tuple[float, float, float]]:
    moved = [(g.index, n) for g in graphs for n in g.nodes if n.facts.get("text") in measured.moves]
    return {(index, node.index): (*measured.moves[node.facts["text"]], 0.0) for index, node in moved}


TRIP = (1024, 1024)  # what is cast in an example


def _trips(source: Source, measured: ExampleProfile, index: int) -> tuple[Graph, ...]:
    """What capture would have seen under autocast: an activation, what makes it float32, a product that casts back."""
    nodes: list[Node] = []
    for text, (target, _) in measured.trips.items():
        span, at = _where(source, text), len(nodes)
        if span is None:
            continue
        half: dict[str, Any] = {"dtype": "bfloat16", "shape": TRIP}
        two = target.startswith("operator.")
        nodes += [
            Node(index=at, name=f"x{at}", op="placeholder", target="x", users=(at + 2,), **half),
            Node(
                index=at + 1,
                name=f"s{at}",
                op="placeholder",
                target="s",
                dtype="float32",
                shape=TRIP[1:],
                facts={"origin": "state"},
            ),
            Node(
                index=at + 2,
                name=f"trip{at}",
                op="call_function",
                target=target,
                args=(Ref(at), Ref(at + 1)) if two else (Ref(at),),
                users=(at + 3,),
                dtype="float32",
                shape=TRIP,
                frames=(span,),
                span=span,
                facts={"text": text},
            ),
            Node(index=at + 3, name=f"back{at}", op="call_function", target="linear", args=(Ref(at + 2),), **half),
        ]
    return (Graph(index=index, nodes=tuple(nodes)),) if nodes else ()


def _cast_times(
    graphs: tuple[Graph, ...], measured: ExampleProfile
) -> dict[tuple[int, int], dict[tuple[int, ...], float]]:
    made = [(g.index, n) for g in graphs for n in g.nodes if n.facts.get("text") in measured.trips]
    return {(index, node.index + 1): {TRIP: measured.trips[node.facts["text"]][1]} for index, node in made}


def _frames(source: Source, call: ast.Call, depth: int = 3) -> list[tuple[Span, ...]]:
    function = source.function_at(call.lineno)
    callers = [
        n
        for n in ast.walk(source.tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and function is not None
        and n.func.id == function.name
    ]
    if not callers or depth == 0:
        return [(source.span(call),)]
    return [(*outer, source.span(call)) for caller in callers for outer in _frames(source, caller, depth - 1)]


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
