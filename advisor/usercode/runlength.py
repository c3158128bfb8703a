"""How many steps a run is to make, as far as the script's loops and its command line tell."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor.rule import Context
from advisor.source import Source
from advisor.usercode.callees import named
from advisor.usercode.origin import call_at
from advisor.usercode.places import is_own
from advisor.usercode.trainingloop import TrainingLoop

REPEATS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
PASSES = frozenset("enumerate tqdm trange track list".split())  # give as many turns as what they are given


def planned_steps(ctx: Context) -> int | None:
    """The most steps that the training loop makes; None where the files do not say."""
    if len(ctx.loops) != 1:
        return None
    (loop,) = ctx.loops
    if named((source.tree for source in ctx.sources), ("exec",)) is not None:  # which may set any name
        return None
    total = 1
    for source, node in _around(ctx, loop):
        turns = _turns(ctx, source, node.iter) if isinstance(node, ast.For) else None
        if turns is None:
            return None
        total *= turns
    return total


def _around(ctx: Context, loop: TrainingLoop) -> Iterator[tuple[Source, ast.AST]]:
    """The loops around an iteration, innermost first, through the recorded calls of the functions that they stand in;
    the function at last where those were not recorded, or it is called elsewhere as well."""
    source = loop.source
    node: ast.AST = loop.node.body[0]
    steps = (call for call in ctx.calls("optimizer.step") if loop.inside in call.frames)
    frames = next((list(call.frames[: call.frames.index(loop.inside)]) for call in steps), [])
    while True:
        up: ast.AST = source.parents[node]
        while not isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
            if (
                isinstance(up, REPEATS)
                and node is not getattr(up, "iter", None)
                and node not in getattr(up, "orelse", [])
            ):
                yield source, up
            node, up = up, source.parents[up]
        if isinstance(up, ast.Module):
            return
        own = [frame for frame in frames if is_own(frame)]
        calls = [] if isinstance(up, ast.Lambda) else [n for s in ctx.sources for n in _called(s, up.name)]
        if not (own or calls):  # where nothing shows who calls it
            return
        outer = ctx.read(own[-1].path) if own else source
        there = call_at(outer, own[-1]) if own else None
        if there is None or (isinstance(source.parents[up], ast.Module) and len(calls) > 1):
            yield source, up
            return
        frames, source, node = own[:-1], outer, there


def _called(source: Source, name: str) -> list[ast.Call]:
    return [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == name]


def _turns(ctx: Context, source: Source, iterable: ast.expr) -> int | None:
    if not isinstance(iterable, ast.Call):
        return None
    name = iterable.func.attr if isinstance(iterable.func, ast.Attribute) else getattr(iterable.func, "id", "")
    if name == "range" or (name == "trange" and iterable.args):
        ends = [_number(ctx, source, argument) for argument in iterable.args]
        known = [end for end in ends if end is not None]
        if len(known) != len(ends) or not 1 <= len(known) <= 3 or (len(known) == 3 and not known[2]):
            return None
        return len(range(*known))
    return _turns(ctx, source, iterable.args[0]) if name in PASSES and iterable.args else None


def _number(ctx: Context, source: Source, value: ast.expr, depth: int = 4) -> int | None:
    """A whole number that an expression has in this run, through constants and options of the command line."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, int) and not isinstance(value.value, bool) else None
    if isinstance(value, ast.BinOp) and depth:
        left, right = (_number(ctx, source, side, depth - 1) for side in (value.left, value.right))
        if left is None or right is None:
            return None
        if isinstance(value.op, ast.FloorDiv) and right:
            return left // right
        known = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
        return known.get(type(value.op))
    if isinstance(value, ast.Name) and depth:
        given = [n for n in ast.walk(source.tree) if _binds(n, value.id)]
        one = given[0] if len(given) == 1 else None
        return _number(ctx, source, one.value, depth - 1) if isinstance(one, ast.Assign) else None
    if isinstance(value, ast.Attribute):
        return _option(ctx, value.attr)
    return None


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a node gives a name a value in any way."""
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for target in node.targets for t in ast.walk(target))
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        return any(isinstance(t, ast.Name) and t.id == name for t in ast.walk(node.target))
    return isinstance(node, ast.arg) and node.arg == name


def _option(ctx: Context, attribute: str) -> int | None:
    """The value of an option: that of the command line, else its default where nothing else sets one."""
    flag = f"--{attribute.replace('_', '-')}"
    flags = {flag, f"--{attribute}"}
    options = [call for source in ctx.sources for call in _adds(source, flags)]
    if len(options) != 1:
        return None
    told = _told(ctx.profile.environment.command, _flags(options[0]))
    if told is not None:
        return told
    trees = [node for source in ctx.sources for node in ast.walk(source.tree)]
    set_elsewhere = any(isinstance(n, ast.keyword) and n.arg == attribute for n in trees)
    set_elsewhere |= any(isinstance(n, ast.Constant) and n.value == attribute for n in trees)
    stored = (n for n in trees if isinstance(n, ast.Attribute) and n.attr == attribute)
    set_elsewhere |= any(isinstance(n.ctx, ast.Store) for n in stored)
    set_elsewhere |= any(isinstance(n, ast.Call) and named([n.func], ("set_defaults",)) for n in trees)
    default = next((k.value for k in options[0].keywords if k.arg == "default"), None)
    if set_elsewhere or not isinstance(default, ast.Constant) or not isinstance(default.value, int):
        return None
    return default.value


def _adds(source: Source, flags: set[str]) -> list[ast.Call]:
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and named([n.func], ("add_argument",))]
    return [n for n in found if any(isinstance(a, ast.Constant) and a.value in flags for a in n.args)]


def _flags(option: ast.Call) -> set[str]:
    return {a.value for a in option.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}


def _told(command: Sequence[str], flags: set[str]) -> int | None:
    """What the command line gives an option, the last time."""
    text: str | None = None
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in flags:
            text = value if equals else (command[place + 1] if place + 1 < len(command) else None)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
