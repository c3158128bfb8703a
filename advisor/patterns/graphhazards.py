"""What keeps the launches of a model from being recorded once and played again as a CUDA graph: values that live on
from one step to the next in memory that the graph writes again, inputs and gradients that it does not find there."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from advisor.model import Graph, LoopCall, Span
from advisor.patterns.regions import changes_in_place
from advisor.source import Source, last_name

GATHERS = frozenset("append extend add put insert update setdefault appendleft push store".split())
Function = ast.FunctionDef | ast.AsyncFunctionDef
NAMED = (ast.Name, ast.Attribute)
SHARES = frozenset("detach view reshape squeeze unsqueeze flatten data T float contiguous".split())  # may share memory
KEPT = "is kept, and CUDA graphs write the next step's over it"


def in_the_graph(graph: Graph) -> tuple[Span | None, str] | None:
    """An input in host memory, or one that the model changes."""
    inputs = {n.index: n for n in graph.nodes if n.op == "placeholder" and n.facts.get("origin") != "state"}
    on_device = any(n.device is not None and n.device.startswith("cuda") for n in graph.nodes)
    for node in inputs.values():
        if on_device and node.device is not None and node.device.startswith("cpu") and node.shape:
            return graph.span, "an input of the model lies in the host's memory"
    for node in graph.nodes:
        if node.op.startswith("call_") and changes_in_place(node) and set(node.inputs()[:1]) & set(inputs):
            return node.span, "the model changes its input"
    return None


def in_the_loop(calls: Sequence[LoopCall], span: Span | None) -> tuple[Span | None, str] | None:
    """Gradients that outlive a step, or a model that runs several times in one, as the run has shown."""
    backward = [call for call in calls if call.name == "backward" and call.per_step]
    if sum(call.per_step for call in backward) > 1.01:
        return backward[0].span, "gradients are accumulated over several backward passes"
    zeroed = [call for call in calls if call.name == "zero_grad" and call.per_step]
    kept = next((call for call in zeroed if call.facts.get("set_to_none") is False), None)
    if kept is not None:
        return kept.span, "gradients are kept from step to step: set them to None"
    if not zeroed:
        return span, "gradients are not set to None in the loop"
    runs = [call for call in calls if call.name == "module"]
    if sum(call.per_step or call.calls for call in runs) > 1.01:  # noted in one step, where that is no timed one
        return runs[0].span, "modules run several times in a step"
    return None


def in_the_files(sources: Sequence[Source], names: Collection[str]) -> tuple[Span, str] | None:
    """An output of the model that is kept, or parameters that move; `names` are those that it is known as."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Store):
                return source.span(node), "the memory of a tensor is exchanged"
            if isinstance(node, ast.Call) and last_name(node.func) in names:
                for kept in _kept(source, node):
                    return source.span(kept), f"an output of the model {KEPT}"
    return None


def known_as(sources: Sequence[Source], names: Collection[str]) -> frozenset[str]:
    """The names of a model, the last part of each, with those of the parameters and the attributes that it is given
    to."""
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, NAMED)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    functions = [(node.name, node) for node in nodes if isinstance(node, Function)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions += [(c.name, f) for c in classes for f in c.body if isinstance(f, Function) and f.name == "__init__"]
    known = frozenset(names)
    while True:
        held = (target for node in assigned if last_name(node.value) in known for target in node.targets)
        more = {last for target in held if (last := last_name(target)) is not None}
        for call in calls:
            more |= {p for name, f in functions if name == last_name(call.func) for p in _given(call, f, known)}
        if more <= known:
            return known
        known |= more


def _given(call: ast.Call, function: Function, names: Collection[str]) -> Iterator[str]:
    """The parameters of a function that a call gives a model of some names."""
    parameters = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
    places = parameters[1:] if parameters[:1] == ["self"] else parameters
    for parameter, value in (*zip(places, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)):
        if parameter is not None and isinstance(value, NAMED) and last_name(value) in names:
            yield parameter


def _kept(source: Source, call: ast.Call) -> Iterator[ast.expr]:
    """Where an output of a call is put that outlives the step; not what is computed from it."""
    function = source.function_at(call.lineno)
    scope: ast.AST = function if function is not None else source.tree
    names = _outputs(scope, call)
    for node in ast.walk(scope):
        for value in (part for given in _outliving(node) for part in _parts(given)):
            shared = _shared(value)
            if shared is call or (isinstance(shared, ast.Name) and shared.id in names):
                yield value
    yield from _from_before(source, source.statement_of(call), names)


def _outliving(node: ast.AST) -> list[ast.expr]:
    """The values that a statement or a call puts where they outlive an iteration: a list, an attribute, the caller."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GATHERS:
        return node.args
    if isinstance(node, ast.Assign) and any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
        return [node.value]
    if isinstance(node, ast.AugAssign) and isinstance(node.value, (ast.List, ast.Tuple)):
        return [node.value]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
        return [node.elt]
    if isinstance(node, ast.DictComp):
        return [node.value]
    return [node.value] if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None else []


def _from_before(source: Source, statement: ast.stmt, names: set[str]) -> Iterator[ast.Name]:
    """Reads of an output in an iteration before it is given its value: they see that of the step before."""
    loop: ast.AST = statement
    while not isinstance(loop, (ast.For, ast.While)):
        if loop not in source.parents:
            return
        loop = source.parents[loop]
    for name in names:
        sets = [source.statement_of(n) for n in ast.walk(loop) if _is(n, name, ast.Store)]
        first = min(sets, key=lambda setting: setting.lineno, default=statement)
        own = set(ast.walk(first.value)) if isinstance(first, ast.Assign) else set()
        for node in ast.walk(loop):
            if isinstance(node, ast.Name) and _is(node, name, ast.Load) and (node.lineno < first.lineno or node in own):
                yield node


def _is(node: ast.AST, name: str, context: type[ast.expr_context]) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, context)


def _outputs(scope: ast.AST, call: ast.Call) -> set[str]:
    """The names that hold what a call gives, or parts of it."""
    names: set[str] = set()
    given = [node for node in ast.walk(scope) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))]
    while True:
        more: set[str] = set()
        for node in given:
            shared = [_shared(part) for part in _parts(node.value)] if node.value is not None else []
            if any(one is call or (isinstance(one, ast.Name) and one.id in names) for one in shared):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                more |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        if more <= names:
            return names
        names |= more


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(value, (ast.Tuple, ast.List)):
        for element in value.elts:
            yield from _parts(element)
    elif isinstance(value, ast.Dict):
        for held in value.values:
            yield from _parts(held)
    elif isinstance(value, ast.IfExp):
        yield from _parts(value.body)
        yield from _parts(value.orelse)
    elif isinstance(value, ast.Starred):
        yield from _parts(value.value)
    else:
        yield value


def _shared(value: ast.expr) -> ast.expr:
    """The value that a view is of: `loss` of `loss.detach()`, `out` of `out[0]`."""
    while True:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in SHARES:
            value = value.func.value
        elif isinstance(value, ast.Subscript) or (
            isinstance(value, ast.Attribute) and value.attr in ("logits", "loss")
        ):
            value = value.value
        else:
            return value
