"""The forward pass of a training loop in its source: the statements from the call of the model to the loss, and what
becomes of their values behind them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor.model import LoopCall, Span
from advisor.source import Source

Block = list[ast.stmt]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
GATHERS = frozenset("append extend add put insert update setdefault log add_scalar write save".split())
PLAIN = frozenset("item float double tolist backward argmax size numel dim".split())  # give a number, or float32
FACTS = frozenset("shape ndim device dtype is_cuda requires_grad grad_fn".split())
KEEPS = frozenset(  # of one tensor, with the same dtype
    "detach cpu cuda data sigmoid softmax log_softmax exp round squeeze unsqueeze view reshape flatten permute"
    " transpose contiguous clone abs mean sum sqrt T".split()
)
PASSES = KEEPS | {"long", "int", "numpy", "to", "tolist"}  # give of a number, an index or float32 no bfloat16
PICKS = frozenset("max min topk sort".split())  # values and indices
SMALL = frozenset({"len", "float", "int", "isinstance", "type", "id", "bool", "print"})


@dataclass(frozen=True)
class ForwardPass:
    """Neighbouring statements of one block that compute the loss; `loss` is what is differentiated, as text."""

    source: Source
    statements: tuple[ast.stmt, ...]
    call: ast.Call
    loss: frozenset[str]

    @property
    def lines(self) -> range:
        """The lines of the statements."""
        last = self.statements[-1]
        return range(self.statements[0].lineno, (last.end_lineno or last.lineno) + 1)

    def holds(self, span: Span | None) -> bool:
        """Whether a position lies in the statements."""
        return span is not None and span.path == self.source.path and span.line in self.lines


def forward_pass(source: Source, module: LoopCall, backward: LoopCall) -> ForwardPass | str:
    """The statements from a module's call to the loss; the reason where they do not stand in one block.

    `source` is the file of the frame in which the two calls part, which is the same for both.
    """
    pair = parting(module, backward)
    if pair is None:
        return "a library calls the model and differentiates the loss"
    calls = [_call(source, span) for span in pair]
    if calls[0] is None or calls[1] is None or not _differentiates(calls[1]):
        return "the loss is differentiated in another function than the model is called in"
    stated = [source.statement_of(call) for call in calls if call is not None]
    if stated[0] is stated[1]:
        return f"the model's call and the backward pass are one statement, line {stated[0].lineno}: name the loss first"
    found = _common(source, stated[0], stated[1])
    if found is None or found[1] >= found[2]:
        return f"the backward pass (line {stated[1].lineno}) does not follow the model's call in its block"
    block, first, last = found
    parts, whole = _texts(source, calls[1])
    ends = [place for place in range(first, last) if _stores(block[place]) & parts]
    if not ends:
        return f"the loss that line {stated[1].lineno} differentiates is not computed beside the model's call"
    return ForwardPass(source, tuple(block[first : ends[-1] + 1]), calls[0], frozenset(whole))


def parting(one: LoopCall, other: LoopCall) -> tuple[Span, Span] | None:
    """The positions in one function at which the ways to two calls part; None where they do not."""
    for a, b in zip(one.frames, other.frames, strict=False):
        if _position(a) != _position(b):
            return (a, b) if (a.path, a.function) == (b.path, b.function) else None
    return None


def _position(span: Span) -> tuple[str, int, int, int | None, int | None]:
    return span.path, span.line, span.column, span.end_line, span.end_column


def _call(source: Source, span: Span) -> ast.Call | None:
    """The call at a position; the outermost of its line where the columns are not known."""
    known = span.end_line is not None
    here = [n for n in source.expressions_at(span.line, span.column if known else None) if isinstance(n, ast.Call)]
    exact = [node for node in here if _position(source.span(node)) == _position(span)]
    return next(iter([*exact, *here]), None)


def _differentiates(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _texts(source: Source, call: ast.Call) -> tuple[set[str], set[str]]:
    """Names, attributes and elements in what a backward call differentiates, as text: all, and those that are no part
    of another."""
    assert isinstance(call.func, ast.Attribute)
    given = [*call.args, *(k.value for k in call.keywords)]
    parts = given if source.qualified(call.func) is not None else [call.func.value]
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    found = [node for part in parts for node in ast.walk(part) if isinstance(node, kinds)]
    owners = {id(node.value) for node in found if isinstance(node, (ast.Attribute, ast.Subscript))}
    return {ast.unparse(node) for node in found}, {ast.unparse(node) for node in found if id(node) not in owners}


def _common(source: Source, one: ast.stmt, other: ast.stmt) -> tuple[Block, int, int] | None:
    """The innermost block that holds two statements, or what they stand in, and their places in it."""
    around: dict[int, ast.stmt] = {}
    node: ast.AST | None = one
    while node is not None and not isinstance(node, FUNCTIONS):
        if isinstance(node, ast.stmt):
            around[id(source.block_of(node)) if node in source.parents else 0] = node
        node = source.parents.get(node)
    node = other
    while node is not None and not isinstance(node, FUNCTIONS):
        if isinstance(node, ast.stmt) and node in source.parents:
            block = source.block_of(node)
            if id(block) in around:
                return block, block.index(around[id(block)]), block.index(node)
        node = source.parents.get(node)
    return None


def _stores(statement: ast.stmt) -> set[str]:
    """What a statement gives a value to, as text."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    stored = [n for n in inside([statement]) if isinstance(n, kinds) and isinstance(n.ctx, ast.Store)]
    return {ast.unparse(node) for node in stored}


def inside(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Everything in some statements but what stands in functions that are only defined there."""
    pending = list(reversed(statements))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, FUNCTIONS):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def branches(found: ForwardPass) -> Iterator[list[ast.stmt]]:
    """The branches of the `if` statements in the forward pass."""
    for node in inside(found.statements):
        if isinstance(node, ast.If):
            yield from (branch for branch in (node.body, node.orelse) if branch)


def losses(found: ForwardPass, branch: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    """What a branch gives the loss."""
    for node in inside(branch):
        given = _given(node)
        if given is not None and {ast.unparse(target) for target in given[0]} & found.loss:
            yield given[1]


# ----------------------------------------------------------------------------------------------------- what is used on


@dataclass(frozen=True)
class Used:
    """A value of the forward pass that is used behind it, in a way that may need float32, and where."""

    name: str
    line: int


def used_on(found: ForwardPass) -> Used | None:
    """A value computed from the model's output that is kept or used behind the forward pass where bfloat16 could fail
    or be rounded; the loss itself is float32 and left out."""
    lowered = _lowered(found)
    for node in inside(found.statements):
        kept = _kept(found, node, lowered)
        if kept is not None:
            return kept
    for name in _reads_behind(found, lowered):
        if not _is_harmless(found.source, name, depth=3):
            return Used(name.id, name.lineno)
    return None


def _lowered(found: ForwardPass) -> set[str]:
    """Names that hold what the model gave or what was computed of that, but the loss."""
    names: set[str] = set()
    for node in inside(found.statements):
        given = _given(node)
        if given is None or _is_plain(given[1]):
            continue
        targets, value = given
        read = {n.id for n in inside([value]) if isinstance(n, ast.Name)}
        if read & names or any(n is found.call for n in ast.walk(value)):
            targets = [t.elts[0] if _picks(value) and isinstance(t, ast.Tuple) and t.elts else t for t in targets]
            names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return names - found.loss


def _picks(value: ast.expr) -> bool:
    """Whether an expression gives values and their indices: `x.max(1)`."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in PICKS


def _given(node: ast.AST) -> tuple[list[ast.expr], ast.expr] | None:
    """What a statement or expression gives values to, and the value."""
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    if isinstance(node, (ast.For, ast.comprehension)):
        return [node.target], node.iter
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        return [node.target], node.value
    return None


def _is_plain(value: ast.expr) -> bool:
    """Whether an expression gives a number, an index, a comparison or float32, whatever it reads."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in PLAIN or (value.func.attr in PASSES and _is_plain(value.func.value))
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in SMALL
    if isinstance(value, ast.BinOp):
        return all(_is_plain(side) for side in (value.left, value.right))
    return isinstance(value, (ast.Compare, ast.Constant))


def _kept(found: ForwardPass, node: ast.AST, lowered: set[str]) -> Used | None:
    """A value that the forward pass puts where it outlives it: an attribute, an element, a list."""
    values: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in targets):
            values = [node.value] if not {ast.unparse(t) for t in targets} & found.loss else []
    elif isinstance(node, ast.Call) and _keeps(found.source, node):
        values = [*node.args, *(k.value for k in node.keywords)]
    elif isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
        values = [node.value]
    for value in values:
        for name in inside([value]):
            if isinstance(name, ast.Name) and name.id in lowered and not _is_harmless(found.source, name, depth=3):
                return Used(name.id, name.lineno)
    return None


def _keeps(source: Source, call: ast.Call) -> bool:
    """Whether a call may keep what it is given: it gathers values, or gives nothing that is used."""
    gathers = isinstance(call.func, ast.Attribute) and call.func.attr in GATHERS
    return gathers or isinstance(source.parents.get(call), ast.Expr)


def _reads_behind(found: ForwardPass, lowered: set[str]) -> Iterator[ast.Name]:
    """Reads of some names outside the forward pass, in its function, and by functions that do not have their own."""
    function = found.source.function_at(found.call.lineno)
    scope: ast.AST = found.source.tree if function is None else function
    held = {id(n) for statement in found.statements for n in ast.walk(statement)}
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in lowered
            and id(node) not in held
        ):
            owner = found.source.parents.get(node)
            if isinstance(owner, (ast.Attribute, ast.Subscript)) and ast.unparse(owner) in found.loss:
                continue
            around = found.source.function_at(node.lineno)
            if (around is function or around is None or not _binds(around, node.id)) and _may_follow(found, node):
                yield node


def _may_follow(found: ForwardPass, name: ast.Name) -> bool:
    """Whether a read can see the value of the forward pass: no assignment before it in its own block overwrites that
    always."""
    source, node = found.source, found.source.statement_of(name)
    heads = {id(statement) for statement in found.statements}
    while True:
        block = source.block_of(node)
        for before in reversed(block[: block.index(node)] if node in block else []):
            if id(before) in heads:
                return True
            stored = before.targets if isinstance(before, ast.Assign) else []
            if any(isinstance(t, ast.Name) and t.id == name.id for target in stored for t in ast.walk(target)):
                return False
        parent = source.parents.get(node)
        while parent is not None and not isinstance(parent, ast.stmt):
            parent = source.parents.get(parent)
        if parent is None or isinstance(parent, FUNCTIONS):
            return True
        node = parent


def _binds(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    stored = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(function))
    return stored or any(a.arg == name for a in ast.walk(function.args) if isinstance(a, ast.arg))


def _is_harmless(source: Source, name: ast.expr, depth: int) -> bool:
    """Whether a use of a value is right in bfloat16 as well: it ends in a number, an index or a comparison."""
    parent = source.parents.get(name)
    if isinstance(parent, ast.Attribute):
        if parent.attr in FACTS:
            return True
        called = source.parents.get(parent)
        is_call = isinstance(called, ast.Call) and called.func is parent
        if is_call and parent.attr in PLAIN:
            return True
        if is_call and parent.attr in PICKS and isinstance(called, ast.Call):
            return _only_indices(source, called)
        if parent.attr in KEEPS:
            return _is_harmless(source, called if is_call and isinstance(called, ast.Call) else parent, depth)
        return False
    if isinstance(parent, ast.Subscript) and parent.value is name:
        return _is_harmless(source, parent, depth)
    if isinstance(parent, (ast.Compare, ast.Delete)) or (isinstance(parent, ast.Expr) and isinstance(name, ast.Call)):
        return True
    if isinstance(parent, ast.keyword):
        parent = source.parents.get(parent)
    return isinstance(parent, ast.Call) and _is_harmless_argument(source, parent, name, depth)


def _is_harmless_argument(source: Source, call: ast.Call, value: ast.expr, depth: int) -> bool:
    function = source.qualified(call.func) or (call.func.id if isinstance(call.func, ast.Name) else "")
    last = function.rpartition(".")[2]
    if last in SMALL or (function.startswith("torch.") and last in ("argmax", "numel", "is_tensor")):
        return True
    if function.startswith("torch.") and call.args[:1] == [value]:
        if last in PICKS:
            return _only_indices(source, call)
        return last in KEEPS and _is_harmless(source, call, depth)
    return depth > 0 and _passed_on(source, call, value, depth)


def _only_indices(source: Source, call: ast.Call) -> bool:
    """Whether only the indices of `values, indices = x.max(1)` are used."""
    parent = source.parents.get(call)
    if isinstance(parent, ast.Subscript) and isinstance(parent.slice, ast.Constant):
        return parent.slice.value == 1
    if isinstance(parent, ast.Attribute):
        return parent.attr == "indices"
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return False
    target = parent.targets[0]
    if not isinstance(target, (ast.Tuple, ast.List)) or not target.elts or not isinstance(target.elts[0], ast.Name):
        return False
    first = target.elts[0].id
    scope: ast.AST = source.function_at(call.lineno) or source.tree
    return not any(isinstance(n, ast.Name) and n.id == first and isinstance(n.ctx, ast.Load) for n in ast.walk(scope))


def _passed_on(source: Source, call: ast.Call, value: ast.expr, depth: int) -> bool:
    """Whether the one function of the file that is called by its name uses an argument harmlessly."""
    named = call.func.id if isinstance(call.func, ast.Name) else None
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == named]
    if len(found) != 1:
        return False
    names = [a.arg for a in (*found[0].args.posonlyargs, *found[0].args.args)]
    given = next((k.arg for k in call.keywords if k.value is value), None)
    if given is None and value in call.args and call.args.index(value) < len(names):
        given = names[call.args.index(value)]
    if given is None:
        return False
    reads = [n for n in ast.walk(found[0]) if isinstance(n, ast.Name) and n.id == given and isinstance(n.ctx, ast.Load)]
    return all(_is_harmless(source, read, depth - 1) for read in reads)
