"""Batches of a DataLoader are copied to the GPU from pageable memory, or while the host waits.

## What it does
Gives the DataLoader `pin_memory=True` and the copies of its batches in the loop, `x.to(device)` and `x.cuda()`,
`non_blocking=True`. The two belong together: a copy from pageable memory waits whatever it is told, and one from pinned
memory waits where it is not told. `pin_memory` is changed where it is written, as `dataloader-bound` does it.

## Why it costs
The driver first copies pageable memory into pinned memory of its own, in the host's time, and the host goes on only
when the device has come as far as the copy: it cannot launch ahead.

## When not to
On a machine without a GPU there is nothing to copy. Only copies of what the loader gave are changed, also where a
generator of the files hands its batches on as they are, never one from the device to the host: that would be read
before it has arrived. A batch that the loop writes into after the copy, and objects of classes that are not torch's
own, whose `to` may take other arguments, stay as they are. Pinned memory cannot be swapped out: `pin_memory` holds a
few batches of it.

## Fix safety
EXACT: copies stay in the order of the stream; memory that a copy still reads is not handed out again. Bit-identical
losses are demanded.

## References
- torch.utils.data, PyTorch documentation, memory pinning
- pytorch/tutorials, "A guide on good usage of non_blocking and pin_memory()"
- stas00/ml-engineering, dataloader chapter: 0.646 s to 0.459 s
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Loader, Profile, Rewrite, Safety, Span
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode import given

LOADER = "torch.utils.data.DataLoader"
TO_DEVICE, PAGEABLE = "Memcpy HtoD", "Pageable"
STORED = (ast.Name, ast.Attribute, ast.Subscript)
LOOP = """\
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size=8{pin})
for x, y in loader:
    x, y = x.to(device{copy}), y.to(device{copy})
    model(x, y).backward()
    optimizer.step()
"""


def _loop(pin: str = "", copy: str = "") -> str:
    return LOOP.replace("{pin}", pin).replace("{copy}", copy)


COPY = ("Memcpy HtoD (Pageable -> Device)", 700.0)
PINNED = ("Memcpy HtoD (Pinned -> Device)", 300.0)


class PageableH2D(Rule):
    """x.to(device) of an unpinned batch -> pin_memory=True at the loader, non_blocking=True at the copy."""

    id = "pageable-h2d"
    safety = Safety.EXACT
    needs = ("steps", "loaders")
    worth = 0.02
    order = 13
    examples = (
        Example(
            before=_loop(),
            after=_loop(", pin_memory=True", ", non_blocking=True"),
            profile=step(10_000, kernels=(COPY, ("gemm", 9_000.0))),
            saves=(0, 700),
        ),
        Example(
            before=_loop(copy=", non_blocking=True"),
            after=_loop(", pin_memory=True", ", non_blocking=True"),
            profile=step(10_000, kernels=(COPY,)),
            saves=(0, 700),
        ),
        Example(
            before=_loop(", pin_memory=True"),
            after=_loop(", pin_memory=True", ", non_blocking=True"),
            profile=step(10_000, kernels=(PINNED,)),
            saves=(0, 300),
        ),
        Example(
            before=_loop(),
            after=None,
            profile=step(10_000, device="cpu"),
            because=ON_A_GPU,
        ),
        Example(
            before=_loop(),
            after=None,
            profile=step(100_000, kernels=(COPY,)),
            because="copies of pageable memory to the device take 0.7% of the step",
        ),
        Example(
            before=_loop(),
            after=None,
            profile=step(10_000, kernels=(COPY,), fetching={"only_tensors": False}),
            because="a batch holds objects other than tensors, whose `to` may not take non_blocking",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for loader in ctx.profile.loaders:
            if loader.fetched is None or set(loader.facts.get("batch_devices", ("cpu",))) != {"cpu"}:
                continue
            source, copies = _copies(ctx, loader, loader.fetched)
            late = [copy for copy in copies if not _says(copy, "non_blocking")]
            pinned = bool(loader.arguments.get("pin_memory"))
            if not copies or (pinned and not late):
                continue
            if ctx.profile.hardware.kind == "cuda":
                yield self._judge(ctx, loader, source, late)
                continue
            places = {copy.lineno: source.span(copy) for copy in reversed(late)}
            for line in sorted(places):
                yield self.decline(places[line], ON_A_GPU, needs=("gpu",))
            if not late:
                yield self.decline(loader.span, ON_A_GPU, needs=("gpu",))

    def _judge(self, ctx: Context, loader: Loader, source: Source, late: Sequence[ast.Call]) -> Finding | Decline:
        pinned = bool(loader.arguments.get("pin_memory"))
        place = source.span(late[0]) if late else loader.span
        copied = _copied_us(ctx.profile, pinned)
        if copied is None:
            return self.decline(place, "cannot tell: no copies were recorded", needs=("kineto",))
        kind = "" if pinned else "of pageable memory "
        if copied / ctx.step_us < ctx.gate(self) or copied <= 0.0:
            return self.decline(place, f"copies {kind}to the device take {copied / ctx.step_us:.1%} of the step")
        if late and not loader.facts.get("only_tensors"):
            return self.decline(place, "a batch holds objects other than tensors, whose `to` may not take non_blocking")
        if late and _is_written(source, late):
            return self.decline(place, "the loop writes into the batch after the copy, which may still read it")
        if loader.span is None:
            return self.decline(place, "the DataLoader is constructed inside a library: ask it for pinned memory")
        edits = [_told_to_go_on(source, copy) for copy in late]
        reason, pin = None, len(edits)
        if not pinned:
            edit, reason = _pinned(ctx, loader, loader.span)
            edits += [edit] if edit is not None else []
        assert place is not None
        return self.finding(
            place,
            f"the host waits for copies {kind}to the device",
            cited_us=copied,
            high_us=copied,
            evidence=(
                Evidence(what=f"copies {kind}to the device per step", value=round(copied, 1), unit="us"),
                Evidence(what="share of the step", value=round(copied / ctx.step_us, 4), unit="share"),
            ),
            values={str(i): text for i, (_, text) in enumerate(edits)}
            | ({"told": reason} if reason else {})
            | ({"pin": str(pin)} if pin < len(edits) else {}),
            bindings={str(i): span for i, (span, _) in enumerate(edits)},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        edits = [(span, finding.values[name]) for name, span in finding.bindings.items()]
        return self.edit(finding, "pin the batches and copy them while the host goes on", edits)

    def forms(self, finding: Finding, source: Source) -> Iterator[Rewrite]:
        """The copies alone, where `dataloader-bound` pins the batches with the call that it edits."""
        pin = finding.values.get("pin")
        edits = [(span, finding.values[name]) for name, span in finding.bindings.items() if name != pin]
        if pin is not None and edits:
            found = self.edit(finding, "copy the batches while the host goes on", edits)
            yield replace(found, form="copies", requires=("dataloader-bound",))


# ---------------------------------------------------------------------------------------------------------- the copies


def _copies(ctx: Context, loader: Loader, fetched: Span) -> tuple[Source, list[ast.Call]]:
    """The calls that move batches and their file: in the loop that asks for them, or where they are handed on to."""
    source = ctx.read(fetched.path)
    for place in loader.through[::-1] or (fetched,):
        source = ctx.read(place.path)
        found = copies_of(source, place)
        if found or not _hands_on(source, place):
            return source, found
    return source, []


def _hands_on(source: Source, fetched: Span) -> bool:
    """Whether a generator does nothing to the batches that it gets at a place but yield them, one by one."""
    if any(isinstance(n, ast.YieldFrom) and n.lineno == fetched.line for n in ast.walk(source.tree)):
        return True
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and fetched.line in (node.lineno, node.iter.lineno):
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            target: ast.expr = node.target
            if isinstance(target, ast.Tuple) and getattr(called, "id", None) == "enumerate":
                target = target.elts[-1]
            return isinstance(target, ast.Name) and _yields(node.body, target.id)
    return False


def _yields(body: Sequence[ast.stmt], name: str) -> bool:
    """Whether all that some statements yield is what a name got before them."""
    inner = [n for statement in body for n in ast.walk(statement)]
    values = [n.value for n in inner if isinstance(n, ast.Yield)]
    anew = any(isinstance(n, ast.Name) and n.id == name and _is_store(n) for n in inner)
    return bool(values) and not anew and all(isinstance(v, ast.Name) and v.id == name for v in values)


def copies_of(source: Source, fetched: Span) -> list[ast.Call]:
    """The calls that move what a loader gave to a device, in the loop that asks it for batches at `fetched`."""
    loop = _loop_at(source, fetched)
    if loop is None:
        return []
    names, body = loop
    given_names = frozenset(names)
    nodes = [node for statement in body for node in ast.walk(statement)]
    for _ in range(3):  # names that stand for parts of the batch, parts of parts
        for node in nodes:
            if isinstance(node, ast.Assign) and _root(node.value) in names:
                names |= {n.id for target in node.targets for n in _bound(target)}
            elif isinstance(node, (ast.For, ast.comprehension)) and _root(_iterated(node.iter)) in names:
                names |= {n.id for n in _bound(node.target)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and _moves(source, node)]
    found = [call for call in calls if isinstance(call.func, ast.Attribute) and _root(call.func.value) in names]
    part = _Parts(source, body, nodes, given_names)
    found = [call for call in found if isinstance(call.func, ast.Attribute) and part.is_given(call.func.value, call)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


@dataclass(frozen=True)
class _Parts:
    """What is bound in the body of a loop over batches; `batch` are the names that the loop itself binds."""

    source: Source
    body: Sequence[ast.stmt]
    nodes: Sequence[ast.AST]
    batch: frozenset[str]

    def is_given(self, part: ast.expr, at: ast.expr, depth: int = 4) -> bool:
        """Whether a part of a batch is still what the loader gave: on the host, not moved or computed before."""
        name, line = _root(part), at.lineno
        stores = [n for n in self.nodes if isinstance(n, STORED) and _is_store(n) and _root(n) == name]
        anew = name in self.batch or any(
            isinstance(n, ast.Name) and n.lineno < line and self.source.statement_of(n) in self.body for n in stores
        )
        return all(self._keeps(n, part, name, depth) for n in stores if n.lineno < line or not anew)

    def _keeps(
        self, store: ast.Name | ast.Attribute | ast.Subscript, part: ast.expr, name: str | None, depth: int
    ) -> bool:
        if not isinstance(store, ast.Name):
            fixed = not isinstance(store, ast.Subscript) or isinstance(store.slice, ast.Constant)
            return fixed and not ast.unparse(part).startswith(ast.unparse(store))
        value = _bound_to(self.source, store)
        root = None if value is None else _root(value)
        if value is None or root is None or depth == 0:
            return False
        return root == name or self.is_given(value, store, depth - 1)


def _bound_to(source: Source, name: ast.Name) -> ast.expr | None:
    """The expression that a name gets its value, or a part of it, from; None where that is not spelled out."""
    node: ast.AST = name
    while isinstance(node, (ast.Name, ast.Tuple, ast.List, ast.Starred)):
        node = source.parents[node]
    if isinstance(node, ast.Assign):
        return node.value
    if isinstance(node, ast.AugAssign):
        return name
    return _iterated(node.iter) if isinstance(node, (ast.For, ast.comprehension)) else None


def _loop_at(source: Source, fetched: Span) -> tuple[set[str], Sequence[ast.stmt]] | None:
    """The names that a batch gets and the statements that follow."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.For) and fetched.line in (node.lineno, node.iter.lineno):
            called = node.iter.func if isinstance(node.iter, ast.Call) else None
            name = getattr(called, "id", None)
            if name == "zip":
                return None
            whole = isinstance(node.target, ast.Tuple) and len(node.target.elts) == 2 and name == "enumerate"
            target = node.target.elts[1] if whole else node.target  # type: ignore[attr-defined]
            return {n.id for n in _bound(target)}, node.body
    for statement in source.statements_at(fetched.line):
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and getattr(value.func, "id", None) == "next":
            assert isinstance(statement, ast.Assign)
            block = source.block_of(statement)
            behind = block[block.index(statement) + 1 :]
            return {n.id for target in statement.targets for n in _bound(target)}, behind
    return None


def _bound(target: ast.expr) -> list[ast.Name]:
    return [n for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _iterated(iterable: ast.expr) -> ast.expr:
    """`batch` of `batch.items()` and `batch.values()`."""
    called = iterable.func if isinstance(iterable, ast.Call) and not iterable.args else None
    if isinstance(called, ast.Attribute) and called.attr in ("items", "values"):
        return called.value
    return iterable


def _root(node: ast.expr) -> str | None:
    """The name that parts are taken of: `batch["x"]`, `batch.x[0]`."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _moves(source: Source, call: ast.Call) -> bool:
    """Whether a call is `.cuda(...)` or `.to(device)` with a device that is not the host."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return False
    if method == "cuda":
        return len(call.args) < 2
    device = next((k.value for k in call.keywords if k.arg == "device"), call.args[0] if call.args else None)
    if method != "to" or device is None or len(call.args) > 2:
        return False
    if isinstance(device, ast.Name):  # what a constant of the file says
        device = _constant(source, device.id) or device
    if isinstance(device, ast.Constant):
        return isinstance(device.value, int) or str(device.value).startswith("cuda")
    name = source.qualified(device) or ""
    if "dtype" in source.segment(device):
        return False
    return not name.startswith("torch.") and (isinstance(device, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)))


def _constant(source: Source, name: str) -> ast.Constant | None:
    """The constant that a name is assigned once."""
    stores = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name and _is_store(n)]
    statement = source.parents[stores[0]] if len(stores) == 1 else None
    value = statement.value if isinstance(statement, ast.Assign) else None
    return value if isinstance(value, ast.Constant) else None


def _is_store(node: ast.Name | ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _says(call: ast.Call, name: str) -> bool:
    return any(k.arg == name for k in call.keywords) or (name == "non_blocking" and _is_positional(call))


def _is_positional(call: ast.Call) -> bool:
    """`x.cuda(0, True)`, `x.to(device, torch.float32, True)`."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    return len(call.args) > (1 if method == "cuda" else 2)


def _is_written(source: Source, copies: Sequence[ast.Call]) -> bool:
    """Whether the loop writes into a tensor on the host that was copied under another name."""
    for copy in copies:
        assert isinstance(copy.func, ast.Attribute)
        root = _root(copy.func.value)
        statement = source.statement_of(copy)
        bound = {
            n.id for target in getattr(statement, "targets", ()) for n in ast.walk(target) if isinstance(n, ast.Name)
        }
        if root in bound:
            continue
        around = source.parents[statement]
        if any(_writes(node, root) for node in ast.walk(around)):
            return True
    return False


def _writes(node: ast.AST, root: str | None) -> bool:
    if isinstance(node, ast.AugAssign):
        return _root(node.target) == root
    if isinstance(node, ast.Assign):
        return any(not isinstance(t, ast.Name) and _root(t) == root for t in node.targets)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr.endswith("_") and _root(called.value) == root


# ----------------------------------------------------------------------------------------------------------- the edits


def _told_to_go_on(source: Source, copy: ast.Call) -> codemod.Edit:
    return codemod.set_keywords(source, source.span(copy), {"non_blocking": "True"})


def _pinned(ctx: Context, loader: Loader, span: Span) -> tuple[codemod.Edit | None, str | None]:
    """The edit that pins the loader's batches, or why it is to be made by hand."""
    source = ctx.read(span.path)
    call = given.construction(source, span, LOADER)
    if call is None:
        return None, "this call does not name DataLoader: set pin_memory=True where it is constructed"
    now = loader.arguments.get("pin_memory", False)
    place = given.written(source, ctx.sources, call, "pin_memory", now, ctx.profile.environment.command)
    if place.reason is not None:
        return None, f"{place.reason}, to True"
    if place.span is not None:
        return (place.span, place.text.format(value="True")), None
    try:
        return codemod.set_keywords(source, source.span(call), {"pin_memory": "True"}), None
    except codemod.CannotEdit as error:
        return None, f"set pin_memory=True at the DataLoader: {error}"


def _copied_us(profile: Profile, pinned: bool) -> float | None:
    """Time per step in copies to the device that hold the host: all, or those of pageable memory."""
    kernels = profile.kernels
    steps = {number for number in kernels.step if number >= 0}
    if not steps:
        return None
    rows = zip(kernels.name, kernels.duration_us, kernels.step, strict=True)
    held = [us for name, us, number in rows if TO_DEVICE in name and number >= 0 and (pinned or PAGEABLE in name)]
    return sum(held) / len(steps)
