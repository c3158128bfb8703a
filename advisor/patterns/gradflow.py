"""Whether every step gives a gradient to the same parameters, and who looks at gradients, as the source shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from advisor.source import Source
from advisor.usercode.callees import called_names, callees

Loop = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Match, ast.Try)
CONSTRUCTORS = frozenset({"__init__", "__post_init__", "setup", "build"})
REGISTERS = ("register_buffer", "register_parameter")
DRAWS = ("random.", "numpy.random.")
Place = tuple[Source, ast.AST]


def choices(sources: Sequence[Source], source: Source, statements: Sequence[ast.stmt]) -> Iterator[Place]:
    """What may choose other parameters in another step: branches in some statements, in what the loop does before them
    to the names they read, and in the functions and `forward` methods that they may call."""
    forwards = [
        (other, function)
        for other in sources
        for holder in other.classes
        for function in holder.body
        if isinstance(function, ast.FunctionDef) and function.name in ("forward", "__call__")
    ]
    called = callees(sources, [*statements, *(function for _, function in forwards)])
    known = {id(f): (s, f) for s, f in (*forwards, *called) if f.name != "__init__"}
    for node in (n for statement in statements for n in ast.walk(statement)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            yield source, node  # it may be None
    for other, node in (*((source, statement) for statement in statements), *known.values()):
        yield from ((other, inner) for inner in ast.walk(node) if _chooses(sources, other, inner))
    read = {n.id for statement in statements for n in ast.walk(statement) if isinstance(n, ast.Name)}
    for before in _before(source, statements[0]):
        for inner in ast.walk(before):
            stored = {n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if stored & read and _chooses(sources, source, inner):
                yield source, inner
        values = [before.value] if isinstance(before, (ast.Assign, ast.AnnAssign)) and before.value is not None else []
        yield from (
            (source, n) for v in values for n in ast.walk(v) if isinstance(n, ast.IfExp) and _stores(before, read)
        )


def _before(source: Source, statement: ast.stmt) -> Iterator[ast.stmt]:
    """The statements before one in the loop or function around it."""
    node: ast.AST = statement
    while isinstance(node, ast.stmt):
        block = source.block_of(node)
        yield from block[: block.index(node)] if node in block else []
        node = source.parents[node]
        if isinstance(node, (*Loop, *FUNCTIONS)):
            return


def _stores(statement: ast.stmt, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names for n in ast.walk(statement))


def _chooses(sources: Sequence[Source], source: Source, node: ast.AST) -> bool:
    """Whether a node may lead to other parameters in another step."""
    if isinstance(node, BRANCHES):
        return not _decided(sources, source, node)
    if isinstance(node, (ast.For, ast.comprehension)):
        slices = (
            n.slice for n in ast.walk(node.iter) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice)
        )
        bounds = (bound for one in slices for bound in (one.lower, one.upper, one.step) if bound is not None)
        plain = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "range"
        ends = [] if plain else [a for n in ast.walk(node.iter) if _is_range(n) for a in n.args]  # type: ignore[attr-defined]
        return not all(_fixed(sources, source, bound) for bound in (*bounds, *ends))
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return _may_hold_modules(sources, source, node) and not _is_settled(sources, source, node)
    return isinstance(node, ast.Call) and (_picks_at_random(sources, source, node) or _asks_by_name(node))


def _is_range(node: ast.AST) -> bool:
    """`range(k)`, or another call that ends after so many."""
    last = next(iter(called_names([node])), "") if isinstance(node, ast.Call) else ""
    return last in ("range", "islice", "takewhile", "sample", "choices")


def _asks_by_name(call: ast.Call) -> bool:
    """A call that gives an attribute or a part of a module by a name that is made up."""
    last = next(iter(called_names([call])), "")
    names = call.args[1:2] if last == "getattr" else call.args
    return last in ("getattr", "get_submodule", "get_parameter") and not all(isinstance(n, ast.Constant) for n in names)


def _may_hold_modules(sources: Sequence[Source], source: Source, element: ast.Subscript) -> bool:
    """Whether an element may be one of a list or dictionary, not of a tensor, which gets its gradient as a whole."""
    value = element.value
    if isinstance(element.slice, ast.Tuple):  # lists have no two indices
        return False
    if isinstance(value, ast.Attribute):
        return not _is_tensor(sources, value.attr)
    if isinstance(value, ast.Name):
        scope: ast.AST = source.function_at(element.lineno) or source.tree
        assigned = [n for n in ast.walk(scope) if isinstance(n, ast.Assign) and _stores(n, {value.id})]
        return any(_is_container(sources, n.value) for n in assigned)
    return _is_container(sources, value)


def _is_container(sources: Sequence[Source], value: ast.expr) -> bool:
    if isinstance(value, ast.Attribute):
        return value.attr not in ("shape", "T") and not _is_tensor(sources, value.attr)
    called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
    kinds = (ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp)
    return isinstance(value, kinds) or called in ("list", "tuple", "dict", "sorted", "reversed")


def _is_tensor(sources: Sequence[Source], attribute: str) -> bool:
    """Whether an attribute is a parameter, a buffer or another tensor, wherever it is set."""
    stored = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and next(called_names([node]), "") in REGISTERS and node.args:
                stored += [True] if getattr(node.args[0], "value", None) == attribute else []
            if isinstance(node, ast.Assign) and any(getattr(t, "attr", None) == attribute for t in node.targets):
                called = (source.qualified(node.value.func) or "") if isinstance(node.value, ast.Call) else ""
                makes = called.startswith("torch.") and not called.startswith("torch.nn.")
                stored.append(makes or called in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"))
    return attribute in ("shape", "data") or (bool(stored) and all(stored))


def _is_settled(sources: Sequence[Source], source: Source, element: ast.Subscript) -> bool:
    """Whether an element or a slice is the same one in every step."""
    place = element.slice
    if isinstance(place, ast.Slice):
        return all(_fixed(sources, source, b) for b in (place.lower, place.upper, place.step) if b is not None)
    return _fixed(sources, source, place) or _counts(sources, source, element)


def _decided(sources: Sequence[Source], source: Source, branch: ast.AST) -> bool:
    """Whether a branch goes the same way in every step."""
    if isinstance(branch, (ast.If, ast.IfExp)):
        return _fixed(sources, source, branch.test)
    return False


def _picks_at_random(sources: Sequence[Source], source: Source, call: ast.Call) -> bool:
    """A call that draws a number in Python, or of an element chosen by a value: `self.experts[i](x)`."""
    name = source.qualified(call.func) or ""
    chosen = isinstance(call.func, ast.Subscript) and not isinstance(call.func.slice, ast.Constant)
    return name.startswith(DRAWS) or (chosen and not _counts(sources, source, call.func))


def _counts(sources: Sequence[Source], source: Source, element: ast.expr) -> bool:
    """Whether the index of an element is the counter of a loop over a range around it."""
    index = getattr(element, "slice", None)
    if not isinstance(index, ast.Name):
        return False
    node: ast.AST | None = element
    while node is not None and not isinstance(node, FUNCTIONS):
        if isinstance(node, ast.For) and any(
            isinstance(t, ast.Name) and t.id == index.id for t in ast.walk(node.target)
        ):
            counted = isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) in ("range", "enumerate")
            return counted and all(_fixed(sources, source, bound) for bound in getattr(node.iter, "args", ()))
        node = source.parents.get(node)
    return False


def _fixed(sources: Sequence[Source], source: Source, test: ast.expr) -> bool:
    """Whether an expression has the same truth in every step: settings of the module, tests for None, constants."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.BinOp):
        return _fixed(sources, source, test.left) and _fixed(sources, source, test.right)
    if isinstance(test, ast.UnaryOp):
        return _fixed(sources, source, test.operand)
    if isinstance(test, ast.BoolOp):
        return all(_fixed(sources, source, value) for value in test.values)
    if isinstance(test, ast.Compare):
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
            return True
        return all(_fixed(sources, source, side) for side in (test.left, *test.comparators))
    if isinstance(test, ast.Call):
        named = isinstance(test.func, ast.Name) and test.func.id in ("isinstance", "hasattr", "callable")
        return named or (
            isinstance(test.func, ast.Name) and test.func.id == "len" and _attribute(sources, test.args[0])
        )
    if isinstance(test, ast.Name):
        return _set_once(source, test)
    return _attribute(sources, test)


def _attribute(sources: Sequence[Source], node: ast.expr) -> bool:
    """An attribute of `self`, or of one of its attributes, that constructors set and nothing else; `self.training`."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name) or node.id not in ("self", "s"):
        return False
    stored = [
        (source.function_at(other.lineno), other.attr)
        for source in sources
        for other in ast.walk(source.tree)
        if isinstance(other, ast.Attribute) and other.attr in names and not isinstance(other.ctx, ast.Load)
    ]
    made = all(function is not None and function.name in CONSTRUCTORS for function, _ in stored)
    return made and (names[-1] == "training" or any(name == names[-1] for _, name in stored))


def _set_once(source: Source, name: ast.Name) -> bool:
    """A name of the module that is set once, and by no loop or function."""
    stores = [
        n
        for n in ast.walk(source.tree)
        if (isinstance(n, ast.Name) and n.id == name.id and not isinstance(n.ctx, ast.Load))
        or (isinstance(n, ast.arg) and n.arg == name.id)
    ]
    if len(stores) != 1 or not isinstance(stores[0], ast.Name):
        return False
    return source.statement_of(stores[0]) in source.tree.body and not isinstance(source.statement_of(stores[0]), Loop)


# ----------------------------------------------------------------------------------------------------------- gradients


def gradient_uses(sources: Iterable[Source], besides: frozenset[int] = frozenset()) -> Iterator[Place]:
    """Every read or write of a `.grad` but those at some nodes, None tests apart."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and node.value == "grad":
                yield source, node
            if not isinstance(node, ast.Attribute) or node.attr != "grad" or id(node) in besides:
                continue
            parent = source.parents.get(node)
            tested = isinstance(parent, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
            if not tested and not (source.qualified(node) or "").startswith("torch."):
                yield source, node


def guarded(source: Source, node: ast.AST) -> bool:
    """Whether the loop, comprehension or function around a gradient tests the same one for None."""
    around: ast.AST | None = source.parents.get(node)
    scopes = (*Loop, *FUNCTIONS, ast.comprehension, ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.Module)
    while around is not None and not isinstance(around, scopes):
        around = source.parents.get(around)
    text = ast.unparse(node)
    tests = (n for n in ast.walk(around or source.tree) if isinstance(n, ast.Compare))
    return any(
        ast.unparse(test.left) == text and all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops) for test in tests
    )
