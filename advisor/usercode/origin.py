"""Where the model that a training loop calls is made and ready in the user's source: the statement behind which it can
be prepared, before anything wraps it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from advisor.model import LoopCall, Span
from advisor.patterns.callsites import scope_of
from advisor.source import Source, last_name
from advisor.usercode.made import is_parameter, own_class
from advisor.usercode.places import is_own

DEPTH = 5  # functions that are followed one into the other
MOVES = frozenset("to cuda cpu float double half bfloat16 requires_grad_ train eval to_empty".split())  # give the model
CHECKPOINTING = frozenset(
    "apply_activation_checkpointing checkpoint_wrapper gradient_checkpointing_enable enable_gradient_checkpointing"
    " set_grad_checkpointing enable_input_require_grads".split()
)
PARALLEL = frozenset({"DistributedDataParallel", "DDP", "DataParallel"})  # hold the model as `module`
SHARDING = frozenset({"fully_shard", "replicate", "parallelize_module"})  # change the model in place
FACTORIES = frozenset("create_model get_model".split())  # of libraries, by the name of a model
READY = ("made", "ready")  # events behind which the model is ready
LEAVES = frozenset("exit _exit quit error".split())  # functions that do not return, as statements
LAZY = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Unclear(Exception):
    """Why the place where a model is made cannot be told, and the position of what stands in the way."""

    def __init__(self, reason: str, span: Span | None = None) -> None:
        super().__init__(reason)
        self.reason, self.span = reason, span


@dataclass(frozen=True)
class Kind:
    """What a model is made by: a class of the user's files, or something else by its name."""

    name: str
    source: Source | None = None
    node: ast.ClassDef | None = None
    fixed: bool = True  # the same class whatever the program is given

    @property
    def key(self) -> tuple[str, str | None]:
        """What tells a kind from others."""
        return self.name, None if self.source is None else self.source.path


@dataclass(frozen=True)
class Origin:
    """A model once it is made: `name` is how it is spelled behind the statement `behind`, `inside` the attributes from
    there to the module that the loop calls. `wrapped` says that the loop calls it through a `module` attribute."""

    source: Source
    behind: ast.stmt
    name: str
    inside: tuple[str, ...]
    kinds: tuple[Kind, ...]
    wrapped: bool

    @property
    def text(self) -> str:
        """The module that the loop calls, as spelled there."""
        return ".".join((self.name, *self.inside))

    @property
    def kind(self) -> Kind | None:
        """The one class that it always is; None where it may be another."""
        known = {kind.key for kind in self.kinds}
        return self.kinds[0] if len(known) == 1 and self.kinds[0].fixed else None


def origin(sources: Sequence[Source], read: Callable[[str], Source], call: LoopCall) -> Origin:
    """Where the module that a LoopCall "module" calls is made; raises `Unclear` where that cannot be told."""
    frames = [frame for frame in call.frames if is_own(frame)]
    if not frames:
        raise Unclear("a library calls the model")
    source = read(frames[-1].path)
    made = call_at(source, frames[-1])
    if made is None:
        raise Unclear("the call of the model is not found in its line", frames[-1])
    return _Finder(sources, read).of(source, made.func, made, frames[:-1], (), DEPTH)


def call_at(source: Source, span: Span) -> ast.Call | None:
    """The call at a position; None where none stands there, or several in a line whose columns are not known."""
    here = [n for n in source.expressions_at(span.line, span.column) if isinstance(n, ast.Call)]
    known = [n for n in here if (n.lineno, n.end_lineno) == (span.line, span.end_line)]
    exact = [n for n in known if (source.span(n).column, source.span(n).end_column) == (span.column, span.end_column)]
    if span.end_line is None:
        here = [n for n in source.expressions_at(span.line, None) if isinstance(n, ast.Call)]
        return here[0] if len(here) == 1 else None
    return next(iter(exact), None)


# --------------------------------------------------------------------------------------------------------------- scopes


@dataclass(frozen=True)
class _Event:
    """A statement that makes, moves or wraps the model: `what` is "made", "ready" (it is moved, checkpointed, a part of
    it exchanged), "wrapped", or "none" where it says that there is no model."""

    what: str
    statement: ast.stmt
    value: ast.expr | None = None
    alters: bool = False  # what it gives holds the model as `module`


@dataclass(frozen=True)
class _Finder:
    """Follows an expression that is called to the statements that bind it."""

    sources: Sequence[Source]
    read: Callable[[str], Source]

    def of(
        self,
        source: Source,
        expression: ast.expr,
        use: ast.expr,
        frames: Sequence[Span],
        inside: tuple[str, ...],
        depth: int,
    ) -> Origin:
        """The origin of an expression; `use` is where it is used, `frames` are the callers of that place."""
        span = source.span(use)
        attributes: list[str] = []
        node = expression
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            raise Unclear(f"`{source.segment(expression)}` is no name that is given a model", span)
        owner = own_class(source, node)
        if owner is not None:
            if not attributes:
                raise Unclear("the model is called by one of its own methods", span)
            name = f"{node.id}.{attributes[0]}"
            return self._attribute(source, owner, name, frames, (*attributes[1:], *inside), use)
        for scope in _scopes(source, node):
            if is_parameter(scope, node.id):
                return self._caller(source, scope, node.id, frames, (*attributes, *inside), use, depth)
            if _bound(scope, node.id):
                return self._in(source, scope, node.id, (*attributes, *inside), _reached(source, scope, use, frames))
        raise Unclear(f"`{node.id}` is not made in this file", span)

    def _caller(
        self,
        source: Source,
        scope: ast.AST,
        name: str,
        frames: Sequence[Span],
        inside: tuple[str, ...],
        use: ast.expr,
        depth: int,
    ) -> Origin:
        """The origin of a parameter: that of what the recorded caller hands over."""
        if depth == 0 or not frames or not isinstance(scope, Function):
            raise Unclear(f"what is handed over as `{name}` was not recorded", source.span(use))
        there = self.read(frames[-1].path)
        call = call_at(there, frames[-1])
        if call is None or last_name(call.func) != (_class_of(source, scope) or scope.name):
            raise Unclear(f"what is handed over as `{name}` was not recorded", source.span(use))
        given = _argument(call, scope, name, method=isinstance(source.parents[scope], ast.ClassDef))
        if given is None:
            raise Unclear(f"what is handed over as `{name}` cannot be read off the call", there.span(call))
        events = list(_events(source, scope, name))
        if any(event.what == "made" for event in events):
            raise Unclear(f"`{name}` is given another model in `{scope.name}`", source.span(use))
        made = self.of(there, given, call, frames[:-1], inside, depth - 1)
        return replace(made, wrapped=made.wrapped or any(event.alters for event in events))

    def _attribute(
        self,
        source: Source,
        owner: ast.ClassDef,
        name: str,
        frames: Sequence[Span],
        inside: tuple[str, ...],
        use: ast.expr,
    ) -> Origin:
        """The origin of an attribute that one method of a class gives its instances."""
        methods = {
            function: None
            for node in ast.walk(owner)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node) == name
            for function in [source.function_at(node.lineno)]
            if function is not None
        }
        if len(methods) != 1:
            raise Unclear(f"`{name}` is given a model in {len(methods) or 'no'} methods of its class", source.span(use))
        (method,) = methods
        return self._in(source, method, name, inside, _reached(source, method, use, frames))

    def _in(self, source: Source, scope: ast.AST, name: str, inside: tuple[str, ...], use: ast.expr | None) -> Origin:
        """The origin of a name that statements of one scope bind."""
        if any(isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in ast.walk(source.tree)):
            raise Unclear(f"`{name}` is global, and may be given another model anywhere")
        events = list(_events(source, scope, name))
        made = [event for event in events if event.what == "made"]
        if not made:
            raise Unclear(f"no statement makes `{name}`")
        fixed = [event.statement for event in made]
        used = None if use is None else source.statement_of(use)
        block = _block(source, events, used, name)
        place = {id(event.statement): _place(source, block, event.statement) for event in events}
        wraps = [p for e in events if e.what == "wrapped" and (p := place[id(e.statement)]) is not None]
        there = None if used is None else _place(source, block, used)
        end = min([*wraps, len(block) if there is None else there])
        first = max(place[id(statement)] or 0 for statement in fixed)
        if first >= end:
            wrapping = [e.statement for e in events if e.what == "wrapped"]
            where = next((w for w in wrapping if (place[id(w)] or 0) <= first), fixed[0])
            raise Unclear(f"`{name}` is wrapped where it is made, or made anew where it is used", source.span(where))
        ready = [p for e in events if e.what in READY and (p := place[id(e.statement)]) is not None and p < end]
        kinds = [kind for event in made if event.value is not None for kind in self._kinds(source, event.value, DEPTH)]
        held, altered = {e.alters for e in made}, [e for e in events if e.what == "wrapped" and e.alters]
        if len(held) > 1 or (held == {True} and wraps):
            raise Unclear(f"`{name}` is wrapped in one case and not in another", source.span(fixed[0]))
        spelled = f"{name}.module" if held == {True} else name
        return Origin(source, block[max(ready)], spelled, inside, tuple(kinds), held == {True} or bool(altered))

    # -------------------------------------------------------------------------------------------------------- classes

    def _kinds(self, source: Source, value: ast.expr, depth: int) -> Iterator[Kind]:
        """What an expression that makes a model may make."""
        value = _unmoved(value)
        text = " ".join(source.segment(value).split())
        if isinstance(value, ast.IfExp) and depth:
            yield from self._kinds(source, value.body, depth - 1)
            yield from self._kinds(source, value.orelse, depth - 1)
        elif isinstance(value, ast.Name) and depth:
            yield from self._named(source, value, depth)
        elif not isinstance(value, ast.Call) or not depth:
            yield Kind(text, fixed=False)
        else:
            yield from self._called(source, value, text, depth)

    def _named(self, source: Source, name: ast.Name, depth: int) -> Iterator[Kind]:
        """What a name holds, through the one call that hands it over where it is a parameter."""
        scope = next((s for s in _scopes(source, name) if is_parameter(s, name.id) or _bound(s, name.id)), None)
        if isinstance(scope, Function) and is_parameter(scope, name.id):
            called = _class_of(source, scope) or scope.name
            calls = [(s, c) for s in self.sources for c in _calls(s) if last_name(c.func) == called]
            method = isinstance(source.parents[scope], ast.ClassDef)
            given = _argument(calls[0][1], scope, name.id, method) if len(calls) == 1 else None
            others = [event for event in _events(source, scope, name.id) if event.what == "made" or event.alters]
            if given is not None and not others:
                yield from self._kinds(calls[0][0], given, depth - 1)
                return
        elif scope is not None:
            events = list(_events(source, scope, name.id))
            made = [event.value for event in events if event.what == "made"]
            for value in made:
                if value is not None:
                    yield from self._kinds(source, value, depth - 1)
            if made and not any(event.alters for event in events):
                return
        yield Kind(name.id, fixed=False)

    def _called(self, source: Source, call: ast.Call, text: str, depth: int) -> Iterator[Kind]:
        name = last_name(call.func)
        classes = [(s, c) for s in self.sources for c in s.classes if c.name == name]
        functions = [(s, f) for s in self.sources for f in _functions(s) if f.name == name]
        plain = isinstance(call.func, ast.Name) or source.qualified(call.func) is not None
        if name in PARALLEL:
            yield Kind(text, fixed=False)
        elif plain and len(classes) == 1 and not functions:
            yield Kind(classes[0][1].name, *classes[0])
        elif plain and len(functions) == 1 and not classes:
            yield from self._returned(*functions[0], depth)
        elif plain and not classes and not functions and name is not None:
            known = source.qualified(call.func) or name
            by_name = name.startswith("Auto") or name in FACTORIES or name[:1].islower() or "Auto" in known
            named = [*call.args, *(k.value for k in call.keywords)] if name == "load" else call.args[:1]
            said = bool(call.args) and all(isinstance(argument, ast.Constant) for argument in named)
            shown = f"{known}({ast.unparse(call.args[0])})" if by_name and said else known
            yield Kind(shown, fixed=said or not by_name)
        else:
            yield Kind(text, fixed=False)

    def _returned(self, source: Source, function: ast.FunctionDef, depth: int) -> Iterator[Kind]:
        """What the returns of a function may give."""
        for node in ast.walk(function):
            if not isinstance(node, ast.Return) or node.value is None or scope_of(source, node) is not function:
                continue
            value = _unmoved(node.value)
            if isinstance(value, ast.Name):
                wraps = any(event.what == "wrapped" for event in _events(source, function, value.id))
            else:
                wraps = isinstance(value, ast.Call) and last_name(value.func) in PARALLEL | SHARDING
            if wraps:
                raise Unclear(f"`{function.name}` wraps the model that it makes", source.span(node))
            yield from self._kinds(source, value, depth - 1)


# --------------------------------------------------------------------------------------------------------------- events


def _events(source: Source, scope: ast.AST, name: str) -> Iterator[_Event]:
    """What the statements of one scope do with the model of a name; raises `Unclear` for what is not understood."""
    for node in _own_nodes(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            yield from _assigned(source, node, name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _called(node, node.value, name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and _binds_otherwise(source, node, name):
            raise Unclear(f"`{name}` is bound in a way that is not followed", source.span(node))


def _assigned(source: Source, node: ast.Assign | ast.AnnAssign, name: str) -> Iterator[_Event]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    named = [t for target in targets for t in _flat(target) if ast.unparse(t) == name]
    if not named and any(ast.unparse(t).startswith(f"{name}.") for target in targets for t in _flat(target)):
        yield _Event("ready", node)
    if not named or node.value is None:
        return
    if isinstance(node.value, ast.Constant) and node.value.value is None:
        yield _Event("none", node)
        return
    given = _element(targets, node.value, name)
    value, alone = _unmoved(given), given is not node.value or any(ast.unparse(t) == name for t in targets)
    if ast.unparse(value) == name and alone:
        yield _Event("ready", node)
    elif not _mentions(value, name):
        held = _held(value)
        if isinstance(value, ast.Call) and last_name(value.func) in PARALLEL | SHARDING and (held is None or not alone):
            raise Unclear(f"`{name}` is wrapped where it is made", source.span(node))
        yield _Event("made", node, value if held is None else held, alters=held is not None)
    elif isinstance(value, ast.Call) and last_name(value.func) in CHECKPOINTING:
        yield _Event("ready", node)
    elif isinstance(value, ast.Call) and last_name(value.func) in PARALLEL and alone:
        yield _Event("wrapped", node, alters=True)
    elif isinstance(value, ast.Call) and last_name(value.func) in SHARDING:
        yield _Event("wrapped", node)
    else:
        raise Unclear(f"`{ast.unparse(value)[:60]}` gives `{name}` what is not followed", source.span(node))


def _element(targets: Sequence[ast.expr], value: ast.expr, name: str) -> ast.expr:
    """What a name is given by `a, b = x, y`; the whole value where it is no such pair of tuples."""
    for target in targets:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            return next((v for t, v in zip(target.elts, value.elts, strict=True) if ast.unparse(t) == name), value)
    return value


def _held(value: ast.expr) -> ast.expr | None:
    """The model that an expression wraps for several processes as it is made: `Net()` of `DDP(Net().cuda())`."""
    if not isinstance(value, ast.Call) or last_name(value.func) not in PARALLEL or not value.args:
        return None
    inner = _unmoved(value.args[0])
    return inner if isinstance(inner, ast.Call) else None


def _called(node: ast.Expr, call: ast.Call, name: str) -> Iterator[_Event]:
    """A statement that is a call: `model.cuda()`, `fully_shard(block)`."""
    last = last_name(call.func)
    method = isinstance(call.func, ast.Attribute) and ast.unparse(_unmoved(call.func.value)) == name
    given = any(_mentions(argument, name) for argument in call.args)
    if (method and last in MOVES - {"train", "eval"}) or ((method or given) and last in CHECKPOINTING):
        yield _Event("ready", node)
    elif last in SHARDING and given:
        yield _Event("wrapped", node)


def _unmoved(value: ast.expr) -> ast.expr:
    """The model in `model.to(device).train()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in MOVES:
        value = value.func.value
    return value


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions and classes that are defined in it."""
    pending = list(reversed(list(ast.iter_child_nodes(scope))))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*Function, ast.ClassDef, ast.Lambda)):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _scopes(source: Source, name: ast.Name) -> Iterator[ast.AST]:
    """The scopes in which a name may be bound, innermost first; a class's body is none for what its methods read."""
    scope = scope_of(source, name)
    while scope is not source.tree:
        yield scope
        scope = scope_of(source, scope)  # type: ignore[arg-type]
    yield source.tree


def _bound(scope: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in _own_nodes(scope))


def _binds_otherwise(source: Source, node: ast.Name | ast.Attribute, name: str) -> bool:
    """Whether a name is bound or deleted by anything but an assignment."""
    if isinstance(node.ctx, ast.Load) or ast.unparse(node) != name:
        return False
    parent = source.parents[node]
    while isinstance(parent, (ast.Tuple, ast.List)):
        parent = source.parents[parent]
    return not isinstance(parent, (ast.Assign, ast.AnnAssign))


def _flat(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        return [t for element in target.elts for t in _flat(element)]
    return [target]


def _mentions(value: ast.AST, name: str) -> bool:
    kinds = (ast.Name, ast.Attribute)
    return any(isinstance(node, kinds) and ast.unparse(node) == name for node in ast.walk(value))


def _functions(source: Source) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef))


def _calls(source: Source) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))


def _class_of(source: Source, function: ast.AST) -> str | None:
    """The class that a call names which runs a constructor."""
    parent = source.parents[function]
    runs = isinstance(parent, ast.ClassDef) and getattr(function, "name", "") == "__init__"
    return parent.name if runs and isinstance(parent, ast.ClassDef) else None


def _argument(
    call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, method: bool
) -> ast.expr | None:
    """What a call gives a parameter."""
    keyword = next((k.value for k in call.keywords if k.arg == name), None)
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)][int(method) :]
    if keyword is not None or name not in positional:
        return keyword
    place = positional.index(name)
    if place >= len(call.args) or any(isinstance(a, ast.Starred) for a in call.args[: place + 1]):
        return None
    return call.args[place]


# --------------------------------------------------------------------------------------------------------------- blocks


def _blocks(source: Source, statement: ast.stmt) -> list[tuple[list[ast.stmt], int]]:
    """The blocks around a statement with the place in each, innermost first, up to its function."""
    found: list[tuple[list[ast.stmt], int]] = []
    node: ast.AST = statement
    while isinstance(node, ast.stmt):
        block = source.block_of(node)
        found.append((block, block.index(node)))
        node = source.parents[node]
        while not isinstance(node, (ast.stmt, ast.Module)):
            node = source.parents[node]
        if isinstance(node, (*Function, ast.ClassDef)):
            break
    return found


def _common(source: Source, statements: Sequence[ast.stmt]) -> list[ast.stmt] | None:
    """The innermost block that holds some statements, or what they stand in."""
    chains = [_blocks(source, statement) for statement in statements]
    shared = set.intersection(*({id(block) for block, _ in chain} for chain in chains))
    return next((block for block, _ in chains[0] if id(block) in shared), None)


def _reached(source: Source, scope: ast.AST, use: ast.expr, frames: Sequence[Span]) -> ast.expr | None:
    """The expression of a scope through which a model is called: its use, or the call that leads there; None where the
    model is called from outside."""
    if scope_of(source, use) is scope:
        return use
    for frame in reversed(frames):
        if frame.path == source.path:
            there = source.expressions_at(frame.line, None if frame.end_line is None else frame.column)
            found = next((node for node in there if scope_of(source, node) is scope), None)
            if found is not None:
                return found
    return None


def _block(source: Source, events: Sequence[_Event], use: ast.stmt | None, name: str) -> list[ast.stmt]:
    """The statements among which a model is made for sure: those around its use, or those of the only place that makes
    it, where another way through the script leads past it."""
    made = [event for event in events if event.what == "made"]
    fixed = [event.statement for event in made]
    block = _common(source, [*fixed, *([] if use is None else [use])])
    if block is None:
        raise Unclear(f"`{name}` is made where the loop does not see it", source.span(fixed[0]))
    if _certain(source, block, None if use is None else _place(source, block, use), events, name):
        return block
    if len(made) > 1 or _perhaps(made[0]):
        raise Unclear(f"`{name}` is not made in every case", source.span(fixed[0]))
    return source.block_of(fixed[0])


def _certain(source: Source, block: list[ast.stmt], end: int | None, events: Sequence[_Event], name: str) -> bool:
    """Whether there is a model behind the statements of a block that make it, or what follows fails without one."""
    made = {event.statement for event in events if event.what == "made" and not _perhaps(event)}
    if any(_gives(statement, made) for statement in block[:end]):
        return True
    places = [_place(source, block, event.statement) for event in events if event.what == "made"]
    attributes = any(event.what == "none" or _perhaps(event) for event in events)
    for statement in block[max((place for place in places if place is not None), default=len(block)) + 1 : end]:
        if any(_reads(node, name, attributes) for node in _evaluated(statement)):
            return True
        if any(isinstance(n, (ast.Return, ast.Raise, ast.Break, ast.Continue)) for n in ast.walk(statement)):
            return False
        if any(isinstance(n, ast.stmt) and _leaves([n]) for n in ast.walk(statement)):
            return False
    return False


def _perhaps(event: _Event) -> bool:
    """Whether a statement may give None: `Net() if train else None`."""
    value = event.value
    return isinstance(value, ast.BoolOp) or (
        isinstance(value, ast.IfExp) and any(isinstance(v, ast.Constant) for v in (value.body, value.orelse))
    )


def _gives(statement: ast.stmt, made: set[ast.stmt]) -> bool:
    """Whether every way through a statement passes one that makes the model."""

    def each(*bodies: list[ast.stmt]) -> bool:
        return all(_leaves(body) or any(_gives(inner, made) for inner in body) for body in bodies)

    if isinstance(statement, ast.If):
        return each(statement.body, statement.orelse)
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return each(statement.body)
    if isinstance(statement, ast.Try):
        handled = each([*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers))
        return handled or any(_gives(inner, made) for inner in statement.finalbody)
    if isinstance(statement, ast.Match):
        last = statement.cases[-1]
        whole = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        return whole and each(*(case.body for case in statement.cases))
    return statement in made


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows some statements does not run."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return last_name(last.value.func) in LEAVES
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _evaluated(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions that a statement evaluates whatever the program is given."""
    if isinstance(statement, (ast.If, ast.While)):
        pending: list[ast.AST] = [statement.test]
    elif isinstance(statement, (ast.For, ast.AsyncFor)):
        pending = [statement.iter]
    elif isinstance(statement, (ast.Try, ast.Match, *Function, ast.ClassDef)):
        pending = []
    else:
        pending = [statement]
    while pending:
        node = pending.pop()
        if not isinstance(node, LAZY):
            yield node
            pending.extend(ast.iter_child_nodes(node))


def _reads(node: ast.AST, name: str, attributes: bool) -> bool:
    """Whether a node reads a model, of which `attributes` asks that it is one."""
    if attributes:
        return isinstance(node, ast.Attribute) and ast.unparse(node.value) == name
    return isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == name


def _place(source: Source, block: list[ast.stmt], statement: ast.stmt) -> int | None:
    """The place in a block of a statement, or of what it stands in."""
    return next((place for other, place in _blocks(source, statement) if other is block), None)


# --------------------------------------------------------------------------------------------------------------- inside


def always_has(sources: Sequence[Source], kind: Kind, path: Sequence[str]) -> bool:
    """Whether every model of a class has a container of modules under an attribute path, whatever it is given."""
    if kind.source is None or kind.node is None:
        return kind.fixed  # a library's class: as recorded
    given = [
        (function, node)
        for node in ast.walk(kind.node)
        if isinstance(node, ast.Assign)
        for function in [kind.source.function_at(node.lineno)]
        for target in node.targets
        for one in _flat(target)
        if isinstance(one, ast.Attribute) and one.attr == path[0] and own_class(kind.source, one.value) is kind.node
    ]
    if not given:
        return any(_inherits(sources, kind, base, path) for base in kind.node.bases)
    function, node = given[0]
    if len(given) > 1 or function is None or getattr(function, "name", "") != "__init__":
        return False
    if not any(node is statement for statement in function.body):  # under a condition, or in a loop
        return False
    targets, value = _flat(node.targets[0]), node.value
    if len(targets) > 1:
        whole = isinstance(value, ast.Tuple) and len(value.elts) == len(targets) and len(node.targets) == 1
        place = next(i for i, t in enumerate(targets) if isinstance(t, ast.Attribute) and t.attr == path[0])
        if not whole or not isinstance(value, ast.Tuple):
            return False
        value = value.elts[place]
    if isinstance(value, ast.IfExp) or not isinstance(value, ast.Call):
        return False
    name = last_name(value.func)
    if len(path) == 1:
        return name != "ModuleDict"  # which gives its keys
    classes = [(s, c) for s in sources for c in s.classes if c.name == name]
    if len(classes) == 1:
        return always_has(sources, Kind(classes[0][1].name, *classes[0]), path[1:])
    return name == "ModuleDict" or (name or "")[:1].isupper()


def _inherits(sources: Sequence[Source], kind: Kind, base: ast.expr, path: Sequence[str]) -> bool:
    """Whether a base of a class gives every instance a container."""
    classes = [(s, c) for s in sources for c in s.classes if c.name == last_name(base) and c is not kind.node]
    if len(classes) == 1:
        return always_has(sources, Kind(classes[0][1].name, *classes[0]), path)
    assert kind.source is not None
    return not classes and (kind.source.qualified(base) or "") != "torch.nn.Module"
