"""May the weight of a linear layer be used in place of a call of the layer, in every instance and every call?

The captured run shows one instance. Another may hold another module under the same name or have no bias, a hook runs
only while the layer is called, and an expression that a rewrite says several times must be nothing but a name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor.aligned import Miss
from advisor.made import Made, made, own_class
from advisor.model import Graph, Node
from advisor.patterns.callsites import spreads
from advisor.patterns.sites import argument
from advisor.source import Source
from advisor.swallowed import hooked, replaced

PARAMETERS = frozenset({"torch.nn.Parameter", "torch.nn.parameter.Parameter"})
REPARAMETRISED = ("weight_norm", "spectral_norm", "prune", "parametrize", "parametrizations")  # of torch.nn.utils
SHARDED = frozenset({"fully_shard", "FullyShardedDataParallel", "FSDP", "deepspeed"})
VIEWS = frozenset({"view", "view_as", "as_strided"})


def unfit_layer(sources: Sequence[Source], source: Source, call: ast.Call, bias: bool) -> str | None:
    """Why `self.head(x)` may be something else than nn.Linear with (or without) a bias, None where it cannot.

    `bias` tells whether the recorded layer has one.
    """
    text = source.segment(call.func)
    if not is_plain(call.func):
        return f"`{text}` would be evaluated several times"
    computed = _property_in(sources, call.func)
    if computed is not None:
        return f"`{computed}` is a property, which would be computed several times"
    try:
        found = made(sources, source, call.func)
    except Miss as miss:
        return miss.reason
    other = next((one for one in found if one.kind != "Linear"), None)
    if other is not None:
        given = " ".join(other.source.segment(other.call).split())
        return (
            f"`{text}` may be another module in another instance: `{given}` ({other.source.path}:{other.call.lineno})"
        )
    line = replaced(sources, call.func, "Linear")
    if line is not None:
        return f"`{text}` may be replaced by another module ({line})"
    hook = hooked(sources, call.func, "Linear")
    if hook is not None:
        return f"{hook} may be on `{text}`, which would no longer be called"
    changed = _changed_by_torch(sources)
    if changed is not None:
        return f"`{changed}` may compute the weight when the layer is called"
    if any(_has_bias(one) is not bias for one in found) or _takes_bias_away(sources):
        return f"whether `{text}` has a bias is decided elsewhere"
    return None


def unfit_operands(
    sources: Sequence[Source], source: Source, call: ast.Call, weight: Node, bias: bool, padded: bool
) -> str | None:
    """Why `F.linear(x, weight, bias)` cannot be given a padded weight in every call, None where it can.

    `bias` tells whether the recorded call has one, `padded` whether it would be padded too.
    """
    given = {name: argument(call, place, name) for place, name in ((1, "weight"), (2, "bias"))}
    for name, value in given.items():
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            continue
        computed = _property_in(sources, value)
        if not is_plain(value) or computed is not None:
            return f"`{source.segment(value)}` would be computed several times: give it a name"
        if name == "weight" and isinstance(value, ast.Attribute) and weight.facts.get("origin") != "state":
            return f"`{source.segment(value)}` is no parameter: it may be computed when it is read"
        if name == "bias" and not bias:
            return f"another call may pass a bias as `{source.segment(value)}`"
        if name == "bias" and padded and not _is_parameter(sources, value):
            return f"`{source.segment(value)}` may be None in another call"
    return None


def unseen_view(source: Source, call: ast.Call, graphs: Sequence[Graph]) -> int | None:
    """The line of the function around a call that views a tensor and did not run, None where all of them ran."""
    function = source.function_at(call.lineno)
    ran = {
        frame.line
        for graph in graphs
        for node in graph.nodes
        if node.target.rsplit(".", 1)[-1] in VIEWS
        for frame in node.frames
        if frame.path == source.path
    }
    for node in ast.walk(function) if function is not None else ():
        views = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS
        if views and isinstance(node, ast.Call):
            lines = {line for line, _ in source.starts(node)}
            if not lines & ran:
                return min(lines)
    return None


def is_plain(expression: ast.expr) -> bool:
    """Whether an expression only names something, so that it may be said several times: `self.layers[i].head`."""
    if isinstance(expression, ast.Subscript):
        return isinstance(expression.slice, (ast.Name, ast.Constant)) and is_plain(expression.value)
    return isinstance(expression, ast.Name) or (isinstance(expression, ast.Attribute) and is_plain(expression.value))


def _property_in(sources: Sequence[Source], expression: ast.expr) -> str | None:
    """The first attribute of an expression that a class of the files computes."""
    names = {n.attr for n in ast.walk(expression) if isinstance(n, ast.Attribute)}
    methods = {
        node.name
        for source in sources
        for owner in source.classes
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name in names and node.decorator_list
    }
    return min(methods & names, default=None)


def _changed_by_torch(sources: Sequence[Source]) -> str | None:
    """A call of the files that makes torch compute or shard parameters around the calls of their modules."""
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            name = source.qualified(node.func) or ""
            parts = name.split(".")
            utils = name.startswith("torch.nn.utils.") and any(part in REPARAMETRISED for part in parts[3:])
            if utils or SHARDED & set(parts):
                return source.segment(node.func)
    return None


def _has_bias(one: Made) -> bool | None:
    """Whether a construction of nn.Linear gives it a bias, None where it depends."""
    if spreads(one.call):
        return None
    given = argument(one.call, 2, "bias")
    if given is None:
        return True
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, bool) else None


def _takes_bias_away(sources: Sequence[Source]) -> bool:
    """Whether the files give the attribute `bias` of another object a value: `self.head.bias = None`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "bias"
        and not isinstance(node.ctx, ast.Load)
        and own_class(source, node.value) is None
        for source in sources
        for node in ast.walk(source.tree)
    )


def _is_parameter(sources: Sequence[Source], value: ast.expr) -> bool:
    """Whether all that the files assign to an attribute are parameters, so that it is never None."""
    if not isinstance(value, ast.Attribute):
        return False
    found = list(_assigned(sources, value.attr))
    return bool(found) and all(
        isinstance(given, ast.Call) and (source.qualified(given.func) or "") in PARAMETERS for source, given in found
    )


def _assigned(sources: Sequence[Source], name: str) -> Iterator[tuple[Source, ast.expr | None]]:
    """Every value the files give an attribute of this name, None where it cannot be read off."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load):
                statement = source.statement_of(node)
                alone = isinstance(statement, (ast.Assign, ast.AnnAssign)) and source.parents[node] is statement
                yield source, statement.value if alone and isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
            elif isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == name for a in node.args):
                yield source, None  # register_parameter("bias", None), setattr(module, "bias", ...)
