"""May the bound expressions be evaluated at the result, and may the statements of the region go?"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from advisor.alignment.aligned import Alignment, Bound, Branch, Guard, Miss, outcome
from advisor.source import Source
from advisor.usercode.draws import Places, check_draws
from advisor.usercode.reaching import Function, Loop, binds, changed_by, reaching, stored_names

MODES = frozenset({"autocast", "record_function", "nullcontext", "range", "no_grad", "enable_grad", "named_scope"})


def check_movable(alignment: Alignment, dropout: Collection[int] = (), drawn: Places = frozenset()) -> None:
    """Raise `Miss` unless the bound expressions may be evaluated at the root and the consumed statements may go.

    A constant that reads an intermediate, such as `torch.finfo(scores.dtype).min`, is taken out: it cannot be spelled
    at the root. Those of the nodes in `dropout` must all be spelled, because their defaults are no captured values.
    `drawn` is where the run drew random numbers.
    Folds the consumed statements of a branch into the `if` that holds nothing else, and says what a guard needs.
    """
    source, root = alignment.source, alignment.root
    _check_root(alignment)
    _leave_out_unspellable(alignment, dropout)
    bounds = (*alignment.values.values(), *alignment.constants.values())
    for bound in bounds:
        _check_bound(alignment, bound.expression, bound.statement)
    swallowed = [alignment.calls[node] for node in dropout if node in alignment.calls]
    check_draws(alignment, bounds, swallowed, drawn, _function(source, root.statement))
    expressions: list[ast.expr | ast.stmt] = [root.expression, *alignment.consumed]
    for statement in expressions:
        for node in ast.walk(statement):
            if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                raise Miss("the expression assigns or waits while it is evaluated", statement.lineno)
    for branch in alignment.branches:
        _check_test(source, branch.test)
        reads = _consumed_name(alignment, Bound(branch.test, branch.statement))
        if reads is not None:
            raise Miss(f"whether it is computed depends on the intermediate `{reads}`", branch.test.lineno)
    _check_contexts(alignment)
    _check_unread(alignment)
    if alignment.branches:
        alignment.guard = _guard(alignment)
    if not alignment.unran:
        _fold(alignment)


def _leave_out_unspellable(alignment: Alignment, dropout: Collection[int]) -> None:
    for bound in alignment.values.values():
        name = _consumed_name(alignment, bound)
        if name is not None:
            raise Miss(f"an input of the region reads the intermediate `{name}`", bound.statement.lineno)
    for key, bound in list(alignment.constants.items()):
        name = _consumed_name(alignment, bound)
        if name is not None and key[0] in dropout:
            raise Miss(f"how much is dropped depends on the intermediate `{name}`", bound.statement.lineno)
        if name is not None:
            alignment.left_out[key] = alignment.constants.pop(key)


def _consumed_name(alignment: Alignment, bound: Bound) -> str | None:
    """A name that an expression reads and that a consumed statement may have given its value, or None."""
    consumed = {name for s in alignment.consumed for name in stored_names(s)}
    names = {n.id for n in ast.walk(bound.expression) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    for name in sorted(names & consumed):
        found = reaching(alignment.source, name, bound.statement)
        if any(definition.statement in alignment.consumed for definition in found):
            return name
    return None


def _check_root(alignment: Alignment) -> None:
    statement = alignment.root.statement
    if isinstance(statement, ast.AugAssign) and alignment.root.expression is not statement.value:
        inside = {id(n) for n in ast.walk(statement.value)}
        if id(alignment.root.expression) not in inside:
            raise Miss("the result is computed by an assignment in place", statement.lineno)


# -------------------------------------------------------------------------------------------------------------- moving


def _position(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _function(source: Source, statement: ast.stmt) -> ast.AST:
    return source.function_at(statement.lineno) or source.tree


def _check_bound(alignment: Alignment, expression: ast.expr, statement: ast.stmt) -> None:
    """Nothing the expression reads may change between its statement and the root."""
    source, root = alignment.source, alignment.root.statement
    if statement is root:
        return
    inside = {id(n) for s in alignment.consumed for n in ast.walk(s)}
    names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(expression) if isinstance(n, ast.Attribute)}
    calls = False
    for node in _between(source, statement, root, inside):
        changed = _changed(node, names, attributes)
        if changed is not None:
            raise Miss(f"`{changed}` changes before the result is computed", _position(node)[0])
        calls = calls or isinstance(node, ast.Call)
    if calls:
        for name in sorted(attributes & _assigned_attributes(source)):
            raise Miss(f"a call in between may change `{name}`", statement.lineno)


def check_said(alignment: Alignment, branch: Branch) -> None:
    """Raise `Miss` where the test of a branch, asked again at the root, may come out otherwise.

    `if x is not None: x = x[None]` gives the same answer afterwards.
    """
    source, root = alignment.source, alignment.root.statement
    test = branch.test
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(test) if isinstance(n, ast.Attribute)}
    inside = {id(n) for s in alignment.consumed for n in ast.walk(s)}
    if branch.taken and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
        block = branch.at.body if isinstance(branch.at, ast.If) else []
        inside |= {id(n) for s in block for n in ast.walk(s)}
    for node in _between(source, test, root, inside):
        changed = _changed(node, names, attributes)
        if changed is not None:
            raise Miss(f"`{changed}` changes after `{source.segment(test)}` is asked", _position(node)[0])


def _between(source: Source, begin: ast.expr | ast.stmt, root: ast.stmt, inside: Collection[int]) -> Iterator[ast.AST]:
    """The nodes of the root's function from one up to the root, without those `inside` (by identity)."""
    for node in ast.walk(_function(source, root)):
        between = _position(begin) <= _position(node) < _position(root)
        if between and id(node) not in inside and not isinstance(node, ast.arguments):
            yield node


def _changed(node: ast.AST, names: set[str], attributes: set[str]) -> str | None:
    """What of these a single node of the tree gives a new value, or None."""
    written = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    if changed_by(node) in names:
        return changed_by(node)
    if isinstance(node, ast.Name):
        return node.id if written and node.id in names else None
    if isinstance(node, ast.Attribute):
        return node.attr if written and node.attr in attributes else None
    if isinstance(node, ast.Subscript) and written:
        base = node.value
        if isinstance(base, ast.Name) and base.id in names:
            return base.id
        return base.attr if isinstance(base, ast.Attribute) and base.attr in attributes else None
    if isinstance(node, (*Function, ast.ClassDef, ast.Import, ast.ImportFrom, ast.ExceptHandler)):
        return next((name for name in sorted(names) if binds(node, name)), None)
    return None


def _assigned_attributes(source: Source) -> set[str]:
    """Attributes that the file assigns anywhere but in a constructor."""
    found = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            function = source.function_at(node.lineno)
            if function is None or function.name not in ("__init__", "__post_init__", "__new__"):
                found.add(node.attr)
    return found


def _check_contexts(alignment: Alignment) -> None:
    """Operations may move across a `with` only where it changes no mode that capture would not have recorded."""
    source = alignment.source
    target = set(_around(source, alignment.root.statement))
    for statement in alignment.consumed:
        around = set(_around(source, statement))
        if any(isinstance(node, Loop) for node in around ^ target):
            raise Miss("the operations are spread over a loop and its surroundings", statement.lineno)
        for node in around ^ target:
            if isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    call = item.context_expr
                    func = call.func if isinstance(call, ast.Call) else call
                    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)
                    if name not in MODES:
                        raise Miss(f"the operations are spread over the block of `with {name}`", node.lineno)


def _around(source: Source, statement: ast.stmt) -> list[ast.AST]:
    """The statements around one, innermost first, within its function."""
    found: list[ast.AST] = []
    node = source.parents.get(statement)
    while node is not None and not isinstance(node, (*Function, ast.Module, ast.ClassDef)):
        found.append(node)
        node = source.parents.get(node)
    return found


# ------------------------------------------------------------------------------------------------------------- reading


def _check_unread(alignment: Alignment) -> None:
    """No name of a consumed assignment may be read outside the region before it gets a new value."""
    source, root = alignment.source, alignment.root
    body = _function(source, root.statement)
    targets = {name: s for s in alignment.consumed for name in stored_names(s)}
    gone = [*alignment.consumed, root.expression, *(b.at for b in alignment.branches)]
    inside = {id(n) for s in gone for n in ast.walk(s)}
    repeated = any(isinstance(node, Loop) for node in _around(source, root.statement))
    for node in ast.walk(body):
        reads = isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Load, ast.Del)) and node.id in targets
        if not reads or id(node) in inside:
            continue
        assert isinstance(node, ast.Name)
        first = min(s.lineno for s in alignment.consumed if node.id in stored_names(s))
        later = repeated or node.lineno >= first or source.function_at(node.lineno) is not body
        if later and not _rebound_before(alignment, node):
            alone = " for its shape or dtype" if source.reads_only_shape(node) else ""
            raise Miss(f"the intermediate `{node.id}` is read again{alone}", node.lineno)
    shared = {n for s in ast.walk(body) if isinstance(s, (ast.Global, ast.Nonlocal)) for n in s.names} & set(targets)
    if shared:
        raise Miss("an intermediate can be read from outside its function", root.statement.lineno)


def _rebound_before(alignment: Alignment, name: ast.Name) -> bool:
    """Whether straight-line code gives the name a new value after the region and before this read."""
    source = alignment.source
    block = source.block_of(alignment.root.statement)
    reader: ast.AST = name
    while reader not in block:
        parent = source.parents.get(reader)
        if parent is None:
            return False
        reader = parent
    assert isinstance(reader, ast.stmt)
    between = block[block.index(alignment.root.statement) : block.index(reader)]
    return any(
        isinstance(s, ast.Assign) and name.id in stored_names(s) and s not in alignment.consumed for s in between
    )


# ------------------------------------------------------------------------------------------------------------ branches


LOOKING = frozenset({"isinstance", "hasattr", "len", "getattr", "size", "dim", "is_grad_enabled", "bool"})


def _only_looks(source: Source, name: str) -> bool:
    """Whether a function of the file returns one expression that only looks, such as `exists(x)`: `x is not None`."""
    found = [s for s in source.tree.body if isinstance(s, ast.FunctionDef) and s.name == name]
    if len(found) != 1 or found[0].decorator_list or len(found[0].body) != 1:
        return False
    (only,) = found[0].body
    if not isinstance(only, ast.Return) or only.value is None:
        return False
    return not any(isinstance(n, (ast.Call, ast.NamedExpr, ast.Await, ast.Yield)) for n in ast.walk(only.value))


def _check_test(source: Source, test: ast.expr) -> None:
    """A test must only look: names, attributes, comparisons, and calls that change nothing."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            func = node.func
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)
            if name not in LOOKING and not (isinstance(func, ast.Name) and _only_looks(source, func.id)):
                raise Miss(f"whether `{source.segment(test)}` holds is found out by a call", test.lineno)
        elif isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            raise Miss(f"`{source.segment(test)}` does more than look", test.lineno)


def _fold(alignment: Alignment) -> None:
    """Take an `if` as a whole where all it holds is consumed; raises `Miss` where a block would be left empty."""
    source = alignment.source
    changed = True
    while changed:
        changed = False
        for node in {source.parents[s] for s in alignment.consumed}:
            blocks = [b for b in (getattr(node, n, None) for n in ("body", "orelse", "finalbody")) if b]
            if not isinstance(node, ast.stmt) or isinstance(node, Function):
                continue
            empty = [b for b in blocks if all(s in alignment.consumed or isinstance(s, ast.Pass) for s in b)]
            if not empty:
                continue
            if not isinstance(node, ast.If) or len(empty) != len(blocks):
                raise Miss("the block of a statement would be left empty", node.lineno)
            inside = {id(n) for n in ast.walk(node)}
            alignment.consumed = [s for s in alignment.consumed if id(s) not in inside] + [node]
            changed = True
            break


def _guard(alignment: Alignment) -> Guard | Miss:
    """The guard before the first statement of the region, or why there can be none."""
    source, root = alignment.source, alignment.root
    block = source.block_of(root.statement)
    tops = []
    for statement in (*alignment.consumed, *(b.statement for b in alignment.branches), root.statement):
        node: ast.AST = statement
        while node not in block and node in source.parents:
            node = source.parents[node]
        if node not in block:
            return Miss("the operations are spread over several blocks", statement.lineno)
        assert isinstance(node, ast.stmt)
        tops.append(node)
    first = min(tops, key=block.index)
    for statement in block[block.index(first) : block.index(root.statement)]:
        stray = _stray(statement, alignment)
        if stray is not None:
            return Miss("something else is computed between the operations", stray.lineno)
    for branch in alignment.branches:
        names = {n.id for n in ast.walk(branch.test) if isinstance(n, ast.Name)}
        if isinstance(branch.at, ast.IfExp) and any(
            isinstance(p, (ast.Lambda, ast.ListComp, ast.GeneratorExp)) for p in _parents(source, branch.at)
        ):
            return Miss("the condition stands inside a lambda or comprehension", branch.test.lineno)
        for node in (n for s in block[block.index(first) :] for n in ast.walk(s)):
            if _position(node) < _position(branch.test) and _changed(node, names, set()):
                return Miss(f"`{source.segment(branch.test)}` reads what is computed in between", branch.test.lineno)
    return Guard(first, _conjunction(source, alignment.branches))


def _stray(statement: ast.stmt, alignment: Alignment) -> ast.stmt | None:
    """A statement that runs together with the region, as its branches went, without being part of it."""
    if statement in alignment.consumed or isinstance(statement, ast.Pass):
        return None
    taken = {b.at: b.taken for b in alignment.branches}
    if not isinstance(statement, ast.If) or statement not in taken:
        return statement
    ran = statement.body if taken[statement] else statement.orelse
    return next((s for inner in ran if (s := _stray(inner, alignment)) is not None), None)


def _parents(source: Source, node: ast.AST) -> Iterable[ast.AST]:
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, ast.stmt):
        yield parent
        parent = source.parents.get(parent)


def _conjunction(source: Source, branches: Iterable[Branch]) -> str:
    parts = list(dict.fromkeys(outcome(source, branch) for branch in branches))
    if len(parts) == 1:
        return parts[0]
    return " and ".join(f"({p})" if _loose(p) else p for p in parts)


def _loose(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, (ast.BoolOp, ast.IfExp, ast.Lambda))
