"""May the weight of a linear layer be used in place of a call of the layer, in every instance and every call?

The captured run shows one instance. Another may hold another module under the same name or have no bias, a hook runs
only while the layer is called, and an expression that a rewrite says several times must be nothing but a name.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence

from advisor.alignment.aligned import Miss
from advisor.model import Graph, Node
from advisor.patterns.callsites import spreads
from advisor.patterns.convolutions import VIEWS
from advisor.patterns.sites import argument, origins
from advisor.source import Source
from advisor.usercode.made import Made, given_to, made, own_class
from advisor.usercode.swallowed import hooked, replaced

PARAMETERS = frozenset({"torch.nn.Parameter", "torch.nn.parameter.Parameter"})
REPARAMETRISED = ("weight_norm", "spectral_norm", "prune", "parametrize", "parametrizations")  # of torch.nn.utils
SHARDED = frozenset({"fully_shard", "FullyShardedDataParallel", "FSDP", "deepspeed"})
# what puts other layers, or weights that are no plain tensors, in the place of a model's, under any name
EXCHANGES = re.compile(
    r"\w*quant(iz|stub)\w*|prepare_(qat|fx|pt2e)\w*|convert_fx|\w*qconfig\w*|torchao|bitsandbytes|peft|get_peft_model|lora\w*",
    re.IGNORECASE,
)
HOLDERS = frozenset({"Sequential", "ModuleList", "ModuleDict", "DataParallel"})  # of torch.nn, of modules of any class
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LIBRARIES = frozenset("torch numpy math random itertools functools einops".split())  # whose functions are no modules


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
        varying = _varying_weight(sources, source, value) if name == "weight" else None
        if varying is not None:
            return varying
        if name == "bias" and not bias:
            return f"another call may pass a bias as `{source.segment(value)}`"
        if name == "bias" and padded and not _is_parameter(sources, value):
            return f"`{source.segment(value)}` may be None in another call"
    return None


def exchanged(sources: Sequence[Source]) -> str | None:
    """What in the files may put another layer, or a weight that cannot be padded, in place of one that ran, or None."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == "__class__" and not isinstance(node.ctx, ast.Load):
                return f"line {node.lineno} of {source.path} gives an object another class"
            if isinstance(node, ast.Constant) and node.value == "__class__":
                return f"line {node.lineno} of {source.path} may give an object another class"
            name = _names(node)
            if name is not None:
                return f"`{name}` ({source.path}:{getattr(node, 'lineno', 1)}) may put another layer in its place"
    return None


def unseen_view(sources: Sequence[Source], source: Source, call: ast.Call, graphs: Sequence[Graph]) -> str | None:
    """Where a view that did not run may be of the result of a call, as "path:line", None where none may.

    In the function around the call every view counts, elsewhere views of what a module gives.
    """
    function = source.function_at(call.lineno)
    near = {id(node) for node in ast.walk(function)} if function is not None else set()
    ran = {
        (frame.path, frame.line)
        for graph in graphs
        for node in graph.nodes
        if node.target.rsplit(".", 1)[-1] in VIEWS
        for frame in node.frames
    }
    defined = _defined(sources)
    for other in sources:
        for node in ast.walk(other.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS):
                continue
            lines = {line for line, _ in other.starts(node)}
            if any((other.path, line) in ran for line in lines) or _keeps_last_axis(node):
                continue
            if (other.path == source.path and id(node) in near) or _of_module(sources, other, node.func.value, defined):
                return f"{other.path}:{min(lines)}"
    return None


def _keeps_last_axis(call: ast.Call) -> bool:
    """`x.view(-1, x.size(-1))`, which joins leading axes only."""
    assert isinstance(call.func, ast.Attribute)
    viewed = ast.unparse(call.func.value)
    return bool(call.args) and ast.unparse(call.args[-1]) in (f"{viewed}.size(-1)", f"{viewed}.shape[-1]")


def _of_module(sources: Sequence[Source], source: Source, viewed: ast.expr, defined: set[str]) -> bool:
    """Whether a tensor may be what a module of the files gives."""
    return any(
        isinstance(inner, ast.Call) and _may_call_module(sources, at, inner, defined)
        for at, one in origins(sources, source, viewed)
        for inner in ast.walk(one)
    )


def _may_call_module(sources: Sequence[Source], source: Source, call: ast.Call, defined: set[str]) -> bool:
    """Whether a call may be one of a module that holds a layer of the files: not a layer of torch, a function or class
    of the files or of a library, a method of a tensor."""
    function = call.func
    if (source.qualified(function) or "").split(".")[0] in LIBRARIES:
        return False
    if not isinstance(function, (ast.Name, ast.Attribute)):
        return True
    name = function.id if isinstance(function, ast.Name) else function.attr
    if name in defined:
        return False
    if isinstance(function, ast.Name):
        return not hasattr(builtins, name)
    if own_class(source, function.value) is None:
        return any(
            isinstance(n, ast.Attribute) and n.attr == name and isinstance(n.ctx, ast.Store)
            for s in sources
            for n in (ast.walk(s.tree) if name in s.text else ())
        )
    try:
        found = made(sources, source, function)
    except Miss:
        return True
    return any(one.kind is None or one.kind in HOLDERS for one in found)


def _defined(sources: Sequence[Source]) -> set[str]:
    """The names of the functions and classes of the files."""
    return {n.name for s in sources for n in ast.walk(s.tree) if isinstance(n, DEFINITIONS)}


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


def _names(node: ast.AST) -> str | None:
    """A part of a name that a node says or imports and that exchanges layers."""
    said: list[str] = []
    if isinstance(node, ast.Name):
        said = [node.id]
    elif isinstance(node, ast.Attribute):
        said = [node.attr]
    elif isinstance(node, ast.alias):
        said = node.name.split(".")
    elif isinstance(node, ast.ImportFrom):
        said = (node.module or "").split(".")
    return next((part for part in said if EXCHANGES.fullmatch(part)), None)


def _varying_weight(sources: Sequence[Source], source: Source, weight: ast.expr) -> str | None:
    """Why a weight may be a vector or another tensor in another call, None for an attribute or global of one value."""
    text = source.segment(weight)
    root = weight
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    function = source.function_at(weight.lineno)
    inside = list(ast.walk(function)) if function is not None else []
    local = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {n.arg for n in inside if isinstance(n, ast.arg)}
    owner = own_class(source, root)
    if isinstance(root, ast.Name) and owner is None and root.id in local:
        return f"`{text}` may be another tensor in another call, one of one dimension too"
    if isinstance(weight, ast.Attribute) and weight.value is root and owner is not None:
        given = [g for g in given_to(sources, source, owner, weight.attr) if g.owner is not None]
        if len(given) > 1 or any(isinstance(g.value, ast.IfExp) for g in given):
            return f"`{text}` may be another tensor in another instance, one of one dimension too"
    return None


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
