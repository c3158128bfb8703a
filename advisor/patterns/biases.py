"""May the bias of a convolution before BatchNorm be left out for all that the files do with it?

BatchNorm takes the bias out again only while it computes the mean of the batch: frozen, it does not. And what reads the
bias by its name meets None where there is none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from advisor.alignment.aligned import Miss
from advisor.patterns.callsites import Function, around
from advisor.source import Source
from advisor.usercode.made import SETTINGS, made, own_class

MODEL = re.compile(r"_?(ema_?|teacher_?)?(model|net|network|module|teacher)(_ema)?")  # what is evaluated as a whole
FREEZES = re.compile(r"\w*fr(ee|o)ze\w*(bn|norm)\w*|\w*(bn|norm)\w*fr(ee|o)ze\w*", re.IGNORECASE)
NAMED = re.compile(r"[\w.]+\.bias")  # in a checkpoint


def frozen(sources: Sequence[Source]) -> str | None:
    """Where the files may put a BatchNorm of a model in training into evaluation, as text and "path:line"."""
    for source in sources:
        for node in ast.walk(source.tree):
            name = next((v for f in ("id", "attr", "name") if isinstance(v := getattr(node, f, None), str)), "")
            if FREEZES.fullmatch(name.rsplit(".", 1)[-1]) or _evaluates_a_part(source, node):
                text = ast.unparse(node) if isinstance(node, ast.expr) else name
                return f"`{text}` ({source.path}:{getattr(node, 'lineno', 1)})"
    return None


def reads_bias(sources: Sequence[Source]) -> str | None:
    """Where the files read the bias of what may be a convolution without asking whether it has one."""
    for source in sources:
        for node in ast.walk(source.tree) if "bias" in source.text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
                return f"`{ast.unparse(node)}` ({source.path}:{node.lineno})"
            if isinstance(node, ast.Attribute) and node.attr == "bias" and _may_be_none(sources, source, node):
                return f"`{ast.unparse(node)}` ({source.path}:{node.lineno})"
    return None


def _evaluates_a_part(source: Source, node: ast.AST) -> bool:
    """`backbone.bn.eval()`, `m.eval()` in a loop, `m.training = False`; in an override of `train` of anything."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        off = node.func.attr == "train" and literal is False
        evaluates = off or (node.func.attr == "eval" and not node.args)
        receiver: ast.expr = node.func.value
    elif isinstance(node, ast.Attribute) and node.attr == "training" and not isinstance(node.ctx, ast.Load):
        evaluates, receiver = True, node.value
    else:
        return False
    if not evaluates:
        return False
    outer = around(source, node)
    if any(
        isinstance(n, Function) and n.name == "train" and isinstance(source.parents.get(n), ast.ClassDef) for n in outer
    ):
        return True
    if isinstance(receiver, ast.Name):
        loops = (n.target for n in outer if isinstance(n, (ast.For, ast.comprehension)))
        return any(isinstance(t, ast.Name) and t.id == receiver.id for loop in loops for t in ast.walk(loop))
    return not (isinstance(receiver, ast.Attribute) and MODEL.fullmatch(receiver.attr))


def _may_be_none(sources: Sequence[Source], source: Source, read: ast.Attribute) -> bool:
    """Whether `x.bias` is used unasked and `x` may be a convolution of torch."""
    parent, owner = source.parents.get(read), read.value
    stored = not isinstance(read.ctx, ast.Load)
    if stored or isinstance(parent, ast.Compare) or own_class(source, owner) is not None:
        return False
    if isinstance(owner, (ast.Name, ast.Attribute)):
        name = owner.id if isinstance(owner, ast.Name) else owner.attr
        if name.lstrip("_") in SETTINGS:
            return False
    tests = [
        n.test for n in around(source, read) if isinstance(n, (ast.If, ast.IfExp)) and not _in_else(source, n, read)
    ]
    if read in [n for test in tests for n in ast.walk(test)] or _asked(tests):
        return False
    kinds = next((k for test in tests if (k := _tested_kinds(test))), None)
    if kinds is not None:
        return any("Conv" in kind for kind in kinds)
    try:
        found = made(sources, source, owner)
    except Miss:
        return True
    return any(one.kind is None or "Conv" in one.kind for one in found)


def _in_else(source: Source, branch: ast.If | ast.IfExp, node: ast.AST) -> bool:
    otherwise = branch.orelse if isinstance(branch.orelse, list) else [branch.orelse]
    outer = [node, *around(source, node)]
    return any(n in outer for n in otherwise)


def _asked(tests: Iterable[ast.expr]) -> bool:
    """Whether a test looks at a bias: `m.bias is not None`, `hasattr(m, "bias")`."""
    return any("bias" in ast.unparse(test) for test in tests)


def _tested_kinds(test: ast.expr) -> set[str]:
    """The classes that `isinstance` in a test asks for."""
    calls = (n for n in ast.walk(test) if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance")
    names = (n for call in calls for arg in call.args[1:] for n in ast.walk(arg))
    return {n.attr if isinstance(n, ast.Attribute) else n.id for n in names if isinstance(n, (ast.Attribute, ast.Name))}
