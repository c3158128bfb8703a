"""Tensors that the source makes on the host and moves to the device at once, and how it would make them there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from advisor import blocks, codemod
from advisor.graphrule import is_fixed
from advisor.model import Graph, Node, Ref, Safety, Span, Symbol
from advisor.patterns.callsites import COMPREHENSIONS, around, call_at, keyword, names, scope_of, shared, spreads
from advisor.patterns.hostreads import seldom_reached
from advisor.source import Source
from advisor.usercode.places import is_own
from advisor.usercode.reaching import reaching
from advisor.usercode.trainingloop import TrainingLoop

MOVES = frozenset({"to", "cuda", "type_as"})
CONSTANTS = frozenset(
    "zeros ones full eye arange tril_indices triu_indices zeros_like ones_like full_like new_zeros new_ones "
    "new_full".split()
)
ROUNDED = frozenset({"linspace", "logspace"})  # spaced in another rounding on the device
RANDOM = frozenset("rand randn randint randperm rand_like randn_like randint_like normal".split())
VALUES = frozenset({"tensor"})
FACTORIES = CONSTANTS | ROUNDED | RANDOM | VALUES
# what gives the same bits on every device
SAME = frozenset(
    "view reshape unsqueeze squeeze expand repeat flatten unflatten transpose permute contiguous t tril triu bool long "
    "int float double half bfloat16 to flip eq ne lt le gt ge logical_not add sub mul neg fill_ tril_ triu_ "
    "clone detach".split()
)
NEARLY = frozenset("exp log sin cos sqrt rsqrt pow div reciprocal tanh sigmoid".split())  # up to rounding
HALF = frozenset({"bfloat16", "float16"})
OPERATORS = (ast.Add, ast.Sub, ast.Mult)
ROUNDING = (ast.Div, ast.Pow)
BLANKS = " \t\r\n\\"  # a line that is continued, too
PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


class Unfit(Exception):
    """Why a tensor cannot be made on the device; the message is the reason."""


@dataclass(frozen=True)
class Moved:
    """A call that moves what a factory made on the host, with the nodes (graph, node) of its calls in a step."""

    source: Source
    call: ast.Call
    nodes: tuple[tuple[Graph, Node], ...]

    @property
    def span(self) -> Span:
        """The call."""
        return self.source.span(self.call)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """Graph and node numbers of the calls."""
        return tuple((graph.index, node.index) for graph, node in self.nodes)


@dataclass(frozen=True)
class Remade:
    """The edits that make a tensor on the device, and what they may change; `fixed` tells that every step makes the
    same."""

    edits: tuple[codemod.Edit, ...]
    safety: Safety
    fixed: bool


@dataclass(frozen=True)
class _Factory:
    """A factory's call, the `whole` expression that is computed of it, and how exactly the device repeats that.

    `own_memory` is what gives the whole memory of its own where the move did that: elements that `expand` repeats share
    theirs.
    """

    call: ast.Call
    name: str
    safety: Safety
    whole: ast.expr
    own_memory: str


def moved(
    graphs: Sequence[Graph], loops: Sequence[TrainingLoop], read: Callable[[str], Source], gpu: bool
) -> list[Moved]:
    """The calls of a step that move what a factory made on the host to the device, in the order of their places."""
    found: dict[tuple[str, int, int, int], Moved] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.span is None or not node.frames or not is_own(node.frames[-1]) or not _moves(graph, node, gpu):
                continue
            source = read(node.span.path)
            call = call_at(source, node, lambda call, node=node, source=source: _fits(source, call, node))  # type: ignore[misc]
            if call is None or _seldom(source, call, node, loops) or (not gpu and _stays(call)):
                continue
            key = (source.path, call.lineno, call.col_offset, call.end_col_offset or 0)
            nodes = found[key].nodes if key in found else ()
            found[key] = Moved(source, call, (*nodes, (graph, node)))
    return [found[key] for key in sorted(found)]


def _moves(graph: Graph, node: Node, gpu: bool) -> bool:
    """Whether a node moves to the device what, by calls with one input each, comes of a factory on the host."""
    if node.op != "call_method" or node.target.rpartition(".")[2] not in MOVES or not node.args:
        return False
    if not (node.device or "").startswith("cuda" if gpu else "cpu"):
        return False
    if not isinstance(node.args[0], Ref) or (node.target == "method.to" and _device_of(node) is None):
        return False
    origin = graph.nodes[node.args[0].index]
    while origin.op.startswith("call_") and origin.device == "cpu":
        if _is_factory(origin):
            return not origin.inputs() or "_like" in origin.target or origin.target.startswith("method.new_")
        inputs = set(origin.inputs())
        if len(inputs) != 1:
            return False
        origin = graph.nodes[inputs.pop()]
    return False


def _is_factory(node: Node) -> bool:
    named = node.target.rpartition(".")[2] in FACTORIES
    return named and node.target.startswith(("torch.", "method.new_"))


def _device_of(node: Node) -> object:
    """What tells a recorded `.to` its device: a device, its name or number, or a tensor; None for a dtype alone."""
    for given in (node.kwargs.get("device"), node.kwargs.get("other"), *node.args[1:2]):
        if isinstance(given, (Ref, str)) or (isinstance(given, int) and not isinstance(given, bool)):
            return given
        if isinstance(given, Symbol) and given.kind == "device":
            return given
    return None


def _fits(source: Source, call: ast.Call, node: Node) -> bool:
    """Whether a call may be the recorded one: the same method with as many arguments, not told a dtype first."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Attribute) and _is_dtype(source, first):
        return False
    return method == node.target.rpartition(".")[2] and (spreads(call) or len(call.args) <= len(node.args) - 1)


def _stays(call: ast.Call) -> bool:
    """Whether a call names the host as the device."""
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "device")]
    return any("'cpu" in ast.unparse(value) and not isinstance(value, ast.IfExp) for value in given)


def _seldom(source: Source, call: ast.Call, node: Node, loops: Sequence[TrainingLoop]) -> bool:
    """Whether a call is reached every so many steps only."""
    statement = source.statement_of(call)
    if seldom_reached(source, statement, None, None):
        return True
    for loop in loops:
        place = next((frame for frame in node.frames if loop.holds(frame)), None)
        inside = loop.source.statements_at(place.line) if place is not None else []
        if inside and seldom_reached(loop.source, inside[-1], loop.node, loop.inside.line):
            return True
    return False


# ----------------------------------------------------------------------------------------------------------- the edits


def remade(found: Moved) -> Remade:
    """How the source would make the tensor on the device; raises `Unfit` or `codemod.CannotEdit`."""
    source, call = found.source, found.call
    assert isinstance(call.func, ast.Attribute)
    device, dtype = _arguments(found)
    receiver = call.func.value
    if isinstance(receiver, ast.Name):
        made, edits = _by_name(source, call, receiver, device, dtype)
    else:
        made = _factory(source, receiver)
        dtype = made.own_memory + dtype
        start, end = source.span(call), source.span(made.call)
        _, text = _on_device(source, made, device)
        whole = _receiver_text(source, call)
        begin = source.offset(end.line, end.column) - source.offset(start.line, start.column)
        rest = whole[begin + len(source.segment(made.call)) :]
        edits = [(start, whole[:begin] + text + rest + dtype)]
    safety = _safety(made, found)
    fixed = made.name not in RANDOM and is_fixed(source, made.whole)
    return Remade(tuple(edits), safety, fixed)


def _safety(made: _Factory, found: Moved) -> Safety:
    chains = [_chain(graph, node) for graph, node in found.nodes]
    if any(n.dtype in HALF and n.target.rpartition(".")[2] in NEARLY for chain in chains for n in chain):
        raise Unfit("autocast computes it in float32 on the device, and in half precision on the host")
    floating = any((chain[-1].dtype or "").startswith(("float", "bfloat")) for chain in chains)
    return _loosest(made.safety, Safety.NUMERICS) if made.name == "arange" and floating else made.safety


def _chain(graph: Graph, node: Node) -> list[Node]:
    """What was computed before a move, back to the factory."""
    found = [graph.nodes[node.inputs()[0]]]
    while not _is_factory(found[-1]):
        found.append(graph.nodes[found[-1].inputs()[0]])
    return found


def _receiver_text(source: Source, call: ast.Call) -> str:
    """What stands before the dot of a method's call, parentheses included."""
    assert isinstance(call.func, ast.Attribute)
    start, function = source.span(call), source.span(call.func)
    assert function.end_line is not None and function.end_column is not None
    begin = source.offset(start.line, start.column)
    end = source.offset(function.end_line, function.end_column) - len(call.func.attr)
    text = source.text[begin:end].rstrip(BLANKS).removesuffix(".").rstrip(BLANKS)
    inner = source.span(call.func.value)
    assert inner.end_line is not None and inner.end_column is not None
    if "#" in source.text[source.offset(inner.end_line, inner.end_column) : end]:
        raise Unfit("a comment stands before the call that moves it")
    return text


def _by_name(
    source: Source, call: ast.Call, name: ast.Name, device: str, dtype: str
) -> tuple[_Factory, list[codemod.Edit]]:
    """The edits where a name holds what the factory made until it is moved."""
    statement = source.statement_of(call)
    if any(isinstance(outer, COMPREHENSIONS) for outer in around(source, call)):
        raise Unfit(f"`{name.id}` is moved in a comprehension or a lambda: its device is known there only")
    definition = _definition(source, name, statement)
    assert isinstance(definition, ast.Assign)
    block = source.block_of(statement)
    between = block[block.index(definition) + 1 : block.index(statement)]
    _check_device(source, device, between)
    again = isinstance(statement, ast.Assign) and statement.value is call and _targets(statement) == [name.id]
    scope = scope_of(source, name)
    if isinstance(scope, ast.Module) and between:
        raise Unfit(f"`{name.id}` may be used on the host before it is moved")
    first, last = definition.lineno, statement.end_lineno or statement.lineno
    for other in names(scope, name.id, ast.Load):
        if other is not name and (not again or first <= other.lineno <= last):
            raise Unfit(f"`{name.id}` is used on the host too, at line {other.lineno}")
    made = _factory(source, definition.value)
    edits = [_on_device(source, made, device)]
    then = made.own_memory + dtype
    if again and not then:
        return made, [*edits, *blocks.removed(source, statement)]
    return made, [*edits, (source.span(call), f"{name.id}{then}")]


def _definition(source: Source, name: ast.Name, statement: ast.stmt) -> ast.Assign:
    """The one assignment, in the same block, that gives a name its value."""
    found = reaching(source, name.id, statement)
    scope = scope_of(source, name)
    defined = found[0].statement if len(found) == 1 and not found[0].decisions and found[0].item is None else None
    local = not any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(scope)) or not shared(scope, name.id)
    if not isinstance(defined, ast.Assign) or _targets(defined) != [name.id] or not local:
        raise Unfit(f"`{name.id}` is not given its value in one place before it is moved")
    if source.block_of(defined) is not source.block_of(statement):
        raise Unfit(f"`{name.id}` is made in another block than it is moved in")
    return defined


def _check_device(source: Source, device: str, between: Sequence[ast.stmt]) -> None:
    """The device must be known where the factory is called, and the same; raises `Unfit`."""
    used = {n.id for n in ast.walk(ast.parse(device, mode="eval")) if isinstance(n, ast.Name)}
    for statement in between:
        stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        written = {ast.unparse(n) for n in ast.walk(statement) if isinstance(n, ast.Attribute) and _is_stored(n)}
        if stored & used or any(text in device for text in written) or not isinstance(statement, PLAIN):
            raise Unfit(f"`{device}` may not be known yet where the factory is called")


def _is_stored(node: ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _targets(statement: ast.Assign) -> list[str]:
    return [t.id if isinstance(t, ast.Name) else "" for t in statement.targets]


# ----------------------------------------------------------------------------------------------------------- the device


def _arguments(found: Moved) -> tuple[str, str]:
    """The device as text, and what must follow the tensor to give it the dtype that the move gave it."""
    source, call = found.source, found.call
    assert isinstance(call.func, ast.Attribute)
    if spreads(call):
        raise Unfit("the call that moves it passes * or ** arguments")
    if keyword(call, "memory_format") is not None:
        raise Unfit("the call that moves it asks for a memory format")
    if call.func.attr == "cuda":
        return _of_cuda(source, call), ""
    given = {_device_kind(node) for _, node in found.nodes}
    first = call.args[0] if call.args else None
    if call.func.attr == "type_as" or given == {"tensor"}:
        return _as_tensor(source, first if first is not None else keyword(call, "other"))
    device = keyword(call, "device") or first
    if given != {"device"} or device is None:
        raise Unfit("the calls that move it are told a device in some places and a tensor in others")
    dtype = keyword(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    return _pure(source, device), "" if dtype is None else f".to({source.segment(dtype)})"


def _device_kind(node: Node) -> str:
    return "tensor" if node.target == "method.type_as" or isinstance(_device_of(node), Ref) else "device"


def _of_cuda(source: Source, call: ast.Call) -> str:
    device = keyword(call, "device") or (call.args[0] if call.args else None)
    if device is None:
        return '"cuda"'
    if not isinstance(device, ast.Constant) or device.value is None:
        raise Unfit(f"`{source.segment(device)}` may be None, which is the host to a factory and not to `.cuda()`")
    return source.segment(device)


def _as_tensor(source: Source, other: ast.expr | None) -> tuple[str, str]:
    """Device and dtype of another tensor."""
    inner = other
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if other is None or not isinstance(inner, ast.Name):
        raise Unfit("the tensor whose device it gets is computed in the call that moves it")
    text = source.segment(other)
    return f"{text}.device", f".to({text}.dtype)"


def _pure(source: Source, device: ast.expr) -> str:
    if any(isinstance(n, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for n in ast.walk(device)):
        raise Unfit("the expression of the device does more than name it")
    return " ".join(source.segment(device).split())


# --------------------------------------------------------------------------------------------------------- the factory


def _factory(source: Source, made: ast.expr) -> _Factory:
    """The factory's call inside an expression that computes nothing but what the device computes too."""
    safety, expression = Safety.EXACT, made
    while True:
        name = _factory_name(source, expression)
        if name is not None:
            assert isinstance(expression, ast.Call)
            safety = _loosest(safety, _of_factory(name))
            own = ".contiguous()" if _expands(made) and expression is not made else ""
            return _checked(source, _Factory(expression, name, safety, made, own))
        inner, rounded = _operand(source, expression)
        if inner is None:
            raise Unfit(f"`{_short(source, made)}` is computed on the host")
        if expression is not made and _expands(expression):
            raise Unfit("`expand` repeats elements without memory of their own, which the move gives them")
        safety = Safety.NUMERICS if rounded else safety
        expression = inner


def _expands(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else None
    return isinstance(name, ast.Attribute) and name.attr == "expand"


def _short(source: Source, node: ast.expr) -> str:
    text = " ".join(source.segment(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_factory(name: str) -> Safety:
    if name in RANDOM:
        return Safety.SEMANTICS
    return Safety.NUMERICS if name in ROUNDED else Safety.EXACT


def _loosest(one: Safety, other: Safety) -> Safety:
    order = (Safety.EXACT, Safety.NUMERICS, Safety.SEMANTICS)
    return max(one, other, key=order.index)


def _factory_name(source: Source, node: ast.expr) -> str | None:
    """`zeros` of `torch.zeros(...)`, `new_zeros` of `x.new_zeros(...)`; None for what is no factory."""
    if not isinstance(node, ast.Call):
        return None
    package, _, last = (source.qualified(node.func) or "").rpartition(".")
    if package == "torch" and last in FACTORIES:
        return last
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method if method.startswith("new_") and method in FACTORIES else None


def _operand(source: Source, node: ast.expr) -> tuple[ast.expr | None, bool]:
    """The part of an expression that holds the factory, and whether what is done with it rounds; None where another
    device may give something else."""
    if isinstance(node, ast.Call):
        package, _, last = (source.qualified(node.func) or "").rpartition(".")
        if package == "torch" and last in SAME | NEARLY and node.args:
            return _only(source, node.args), last in NEARLY
        if isinstance(node.func, ast.Attribute) and node.func.attr in SAME | NEARLY and not _may_move(source, node):
            return node.func.value, node.func.attr in NEARLY
    if isinstance(node, ast.UnaryOp):
        return node.operand, False
    if isinstance(node, ast.Compare):
        return _only(source, [node.left, *node.comparators]), False
    if isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS + ROUNDING):
        return _only(source, [node.left, node.right]), isinstance(node.op, ROUNDING)
    return None, False


def _may_move(source: Source, call: ast.Call) -> bool:
    """Whether a `.to` is told anything but a dtype: a device, or a tensor with its device."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "to":
        return False
    given = [*call.args, *(k.value for k in call.keywords if k.arg != "dtype")]
    dtypes = [v for v in given if isinstance(v, ast.Attribute) and _is_dtype(source, v)]
    return spreads(call) or len(dtypes) != len(given)


def _is_dtype(source: Source, node: ast.Attribute) -> bool:
    return node.attr == "dtype" or source.qualified(node) == f"torch.{node.attr}"


def _only(source: Source, parts: Sequence[ast.expr]) -> ast.expr | None:
    """The one part of some that calls a factory."""
    found = [p for p in parts if any(_factory_name(source, n) for n in ast.walk(p) if isinstance(n, ast.expr))]
    return found[0] if len(found) == 1 else None


def _checked(source: Source, made: _Factory) -> _Factory:
    """The factory, if it may be told a device; raises `Unfit`."""
    if keyword(made.call, "generator") is not None:
        raise Unfit("its random numbers come from a generator of the host")
    if keyword(made.call, "out") is not None or keyword(made.call, "requires_grad") is not None:
        raise Unfit("the tensor on the host is kept: the factory is told `out` or `requires_grad`")
    if made.name in VALUES and _number(made.call) is None:
        raise Unfit("its values come from Python: `torch.tensor` copies them to the device either way")
    return made


def _number(call: ast.Call) -> tuple[str, ast.expr] | None:
    """Shape and number of `torch.tensor(0.5)` and `torch.tensor([0.5])`."""
    value, shape = (call.args[0] if len(call.args) == 1 else None), "()"
    if isinstance(value, ast.List) and len(value.elts) == 1:
        value, shape = value.elts[0], "(1,)"
    plain = value.operand if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) else value
    if value is None or not isinstance(plain, ast.Constant) or not isinstance(plain.value, (bool, int, float)):
        return None
    return shape, value


def _on_device(source: Source, made: _Factory, device: str) -> codemod.Edit:
    """The edit that tells the factory its device; pinned memory is the host's."""
    span = source.span(made.call)
    if made.name not in VALUES:
        return codemod.set_keywords(source, span, {"device": device}, drop=("pin_memory",))
    number = _number(made.call)
    assert number is not None and isinstance(made.call.func, (ast.Name, ast.Attribute))
    module, imports = codemod.module_name(source, made.call.lineno, "torch")
    if imports:
        raise codemod.CannotEdit("the file has no name for torch")
    others = [source.segment(k.value) for k in made.call.keywords if k.arg == "dtype"]
    dtype = f", dtype={others[0]}" if others else ""
    return span, f"{module}.full({number[0]}, {source.segment(number[1])}{dtype}, device={device})"
