"""A batch is built by handing torch a Python list of NumPy arrays.

## What it does
Puts `np.array(...)` around the list: `torch.tensor([r[0] for r in rows], dtype=d)` becomes
`torch.tensor(np.array([r[0] for r in rows]), dtype=d)`. So also for `torch.as_tensor` and the old constructors
(`torch.FloatTensor`, `torch.LongTensor` ...), in a collate function, a dataset or the loop. Everything else that the
call is given, `dtype`, `device`, stays. Where arrays of 64-bit integers become floating-point numbers, the array is
made of float64, through which torch reads such numbers one by one too.

## Why it costs
torch walks a list of arrays as if it held Python numbers: every number becomes an object of Python's and is stored
alone. One array is copied, or converted, as a whole.

## When not to
A list of plain numbers has nothing to gain, and the rule is silent. A list whose arrays have several types is promoted
by other rules in NumPy; numbers that may not fit into the tensor's type raise in torch and wrap around in NumPy; with
`requires_grad=True` the call makes a leaf of the model. Each is declined with its reason. On a GPU, time that the
device does not wait for is not counted.

A line without `dtype` that saw arrays is taken to be for arrays: if another data set gave it a list of Python floats,
they would become float64, which torch makes its default type. A list that may be empty would, too,
and is declined. With a `dtype` there is no such case.

## Fix safety
EXACT: the same numbers, type, shape and strides; bit-identical losses are demanded. `np.array` and not `np.stack`,
which keeps the order of the axes in memory: of images that were transposed it makes batches that are not contiguous.
Lists of arrays of different shapes raise as before. Arrays without a number in them are the one exception: of two
arrays of shape (0, 4) torch makes shape (2, 0), NumPy (2, 0, 4).

## References
- pytorch/pytorch#13918, #30460, #57467: "creating a tensor from a list of numpy.ndarrays is extremely slow"; users
  report 30 to 140 times
- the warning of torch itself: "consider converting the list to a single numpy.ndarray with numpy.array()"
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, LoopCall, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source

FUNCTIONS = ("tensor", "as_tensor")
CLASSES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
           "CharTensor", "ByteTensor", "BoolTensor")  # fmt: skip
NAMES = tuple(f"torch.{name}" for name in (*FUNCTIONS, *CLASSES))
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS: Mapping[str, tuple[int, int]] = {  # bits that hold a number, and whether it may be negative
    "int8": (7, 1), "int16": (15, 1), "int32": (31, 1), "int64": (63, 1),
    "uint8": (8, 0), "uint16": (16, 0), "uint32": (32, 0), "uint64": (64, 0),
}  # fmt: skip
GAIN = 0.97  # of the time: thirty times faster is the least that was reported
COLLATE = """\
{imports}import torch


def collate(rows):
    return {call}
"""
FETCHED = {"dtypes": ["float64"], "results": ["float32"], "mixed": False, "elements": 12_288, "loader": 0, "share": 0.8}


def _collate(call: str, imports: str = "import numpy as np\n") -> str:
    return COLLATE.replace("{call}", call).replace("{imports}", imports)


class CollateSlow(Rule):
    """torch.tensor([array, array, ...]) -> torch.tensor(np.array([array, array, ...]))."""

    id = "collate-slow"
    safety = Safety.EXACT
    needs = ("steps", "calls")
    worth = 0.02
    order = 11
    examples = (
        Example(
            before=_collate("torch.tensor([r[0] for r in rows], dtype=torch.float32)"),
            after=_collate("torch.tensor(np.array([r[0] for r in rows]), dtype=torch.float32)"),
            profile=step(
                10_000, calls={"torch.tensor": (1, 4_000)}, called={"torch.tensor": FETCHED}, device_idle_us=5_000
            ),
            saves=(0, 4_000),
        ),
        Example(
            before=_collate("torch.LongTensor(rows)", imports=""),
            after=_collate("torch.LongTensor(np.array(rows))", imports="").replace(
                "import torch\n", "import torch\nimport numpy as np\n"
            ),
            profile=step(
                10_000,
                calls={"torch.LongTensor": (2, 4_000)},
                called={"torch.LongTensor": {**FETCHED, "dtypes": ["int32"], "results": ["int64"]}},
                device="cpu",
            ),
            saves=(0, 4_000),
        ),
        Example(
            before=_collate("torch.FloatTensor(rows)"),
            after=_collate("torch.FloatTensor(np.array(rows, dtype=np.float64))"),
            profile=step(
                10_000,
                calls={"torch.FloatTensor": (2, 4_000)},
                called={"torch.FloatTensor": {**FETCHED, "dtypes": ["int64"]}},
                device="cpu",
            ),
        ),
        Example(
            before=_collate("torch.tensor(rows)"),
            after=None,
            profile=step(
                10_000, calls={"torch.tensor": (1, 4_000)}, called={"torch.tensor": FETCHED}, device_idle_us=100
            ),
            because="building it takes 4000 us a step, but the device waits in only 100 us of them",
        ),
        Example(
            before=_collate("torch.tensor(rows)"),
            after=None,
            profile=step(100_000, calls={"torch.tensor": (1, 40)}, called={"torch.tensor": FETCHED}, device="cpu"),
            because="building it takes 0.0% of the step",
        ),
        Example(
            before=_collate("torch.tensor(rows, dtype=torch.uint8)"),
            after=None,
            profile=step(
                10_000,
                calls={"torch.tensor": (1, 4_000)},
                called={"torch.tensor": {**FETCHED, "dtypes": ["int64"], "results": ["uint8"]}},
                device="cpu",
            ),
            because="numbers of int64 that uint8 does not hold raise here and would wrap around in one array",
        ),
        Example(
            before=_collate("torch.tensor(rows)"),
            after=None,
            profile=step(
                10_000,
                calls={"torch.tensor": (1, 4_000)},
                called={"torch.tensor": {**FETCHED, "dtypes": ["float32", "int64"], "mixed": True}},
                device="cpu",
            ),
            because="one list holds arrays of several types: NumPy and torch promote them differently",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for call in ctx.calls(*NAMES):
            assert call.span is not None
            source = ctx.read(call.span.path)
            written = [_data(n) for n in _builders(source, call.span)]
            if not any(data is not None and _is_one(source, data) for data in written):
                yield self._judge(ctx, call)

    def _judge(self, ctx: Context, call: LoopCall) -> Finding | Decline:
        share = call.host_us / ctx.step_us
        if share < ctx.gate(self) or call.host_us <= 0.0:
            return self.decline(call.span, f"building it takes {share:.1%} of the step")
        felt = _felt(ctx, call)
        if felt is None:
            return self.decline(call.span, "cannot tell: the device's idle time is not known", needs=("kineto",))
        if felt / ctx.step_us < ctx.gate(self):
            return self.decline(
                call.span,
                f"building it takes {call.host_us:.0f} us a step, but the device waits in only {felt:.0f} us of them",
            )
        reason = _unlike(call)
        if reason is not None:
            return self.decline(call.span, reason)
        assert call.span is not None
        return self.finding(
            call.span,
            f"{call.name} walks a list of arrays number by number",
            cited_us=felt,
            high_us=GAIN * felt,
            evidence=(
                Evidence(what="the host's time in it per step", value=round(call.host_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="numbers in a call", value=int(call.facts.get("elements", 0)), unit="elements"),
                Evidence(what="what the arrays hold", value=", ".join(call.facts["dtypes"]), unit=""),
            ),
            values={"wide": str(_is_wide(call))},
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        calls = _builders(source, finding.span)
        call = calls[0] if len(calls) == 1 else None
        data = None if call is None else _data(call)
        if call is None or data is None:
            return self.decline(finding.span, "the call is not written at this line: give it one array")
        if any(k.arg == "requires_grad" for k in call.keywords):
            return self.decline(finding.span, "it makes a leaf that gradients are asked of")
        if isinstance(data, ast.Starred) or any(k.arg is None for k in call.keywords):
            return self.decline(finding.span, "its arguments are unpacked from others: give it one array")
        if _is_for_every_column(source, call, data):
            return self.decline(finding.span, "the line builds every column of a batch, of numbers too: give it dtype")
        if _may_be_empty(source, call, data):
            return self.decline(finding.span, "without dtype, an empty list and an empty array differ: give it dtype")
        name, edits = codemod.module_name(source, call.lineno, "numpy")
        inner, outer = source.segment(data), source.segment(call)
        begin = source.offset(*_begin(source, data)) - source.offset(*_begin(source, call))
        wide = f", dtype={name}.float64" if finding.values.get("wide") == "True" else ""
        text = f"{outer[:begin]}{name}.array({inner}{wide}){outer[begin + len(inner) :]}"
        span = source.span(call)
        return self.edit(finding, "make one array of the list", [*edits, (span, codemod.laid_out(source, span, text))])


def _builders(source: Source, span: Span) -> list[ast.Call]:
    """The calls at a position that build tensors: one, where Python knows the column."""
    here = source.expressions_at(span.line, span.column)
    calls = [n for n in here if isinstance(n, ast.Call) and source.qualified(n.func) in NAMES]
    return [n for n in calls if span.end_column is None or source.span(n).end_column == span.end_column]


def _is_one(source: Source, data: ast.expr) -> bool:
    """Whether what the call is given is one array or tensor already."""
    name = source.qualified(data.func) if isinstance(data, ast.Call) else None
    return name is not None and name.partition(".")[0] in ("numpy", "torch")


def _is_for_every_column(source: Source, call: ast.Call, data: ast.expr) -> bool:
    """Whether one call without a type makes a tensor of each column in turn: of plain numbers, which another data set
    may hold, torch makes its default type and NumPy float64."""
    name = (source.qualified(call.func) or "").removeprefix("torch.")
    if name not in FUNCTIONS or len(call.args) > 1 or any(k.arg == "dtype" for k in call.keywords):
        return False
    names = {n.id for n in ast.walk(data) if isinstance(n, ast.Name)}
    node = source.parents.get(call)
    while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
        loops = [node] if isinstance(node, ast.For) and _is_by_column(node.iter) else getattr(node, "generators", ())
        for loop in loops:
            if names & {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}:
                return True
        node = source.parents.get(node)
    return False


def _may_be_empty(source: Source, call: ast.Call, data: ast.expr) -> bool:
    """Whether a list without a type may hold nothing: of that torch makes its default type, and NumPy float64.

    The rows that a function is given, all of them, are taken to be some; of none, `a, b = zip(*rows)` has no columns.
    """
    name = (source.qualified(call.func) or "").removeprefix("torch.")
    typed = any(k.arg == "dtype" and not _is_none(k.value) for k in call.keywords)
    if name not in FUNCTIONS or typed or (isinstance(data, (ast.List, ast.Tuple)) and data.elts):
        return False
    if isinstance(data, ast.Call) and getattr(data.func, "id", None) in ("list", "tuple") and len(data.args) == 1:
        data = data.args[0]
    while isinstance(data, (ast.ListComp, ast.GeneratorExp)) and len(data.generators) == 1:
        if data.generators[0].ifs:
            return True
        data = data.generators[0].iter
    if not isinstance(data, ast.Name):
        return True
    return data.id not in _parameters(source, call) and not _is_column(source, call, data.id)


def _parameters(source: Source, node: ast.AST) -> set[str]:
    """The parameters of the function or lambda around a node that it assigns nothing else to."""
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        parent = source.parents.get(parent)
    if parent is None:
        return set()
    stored = {n.id for n in ast.walk(parent) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return {a.arg for a in (*parent.args.posonlyargs, *parent.args.args, *parent.args.kwonlyargs)} - stored


def _is_column(source: Source, node: ast.AST, name: str) -> bool:
    """Whether a name of the function around a node is a column and nothing else: `a` of `a, b = zip(*rows)`."""
    function = source.function_at(node.lineno)  # type: ignore[attr-defined]
    stores = [] if function is None else [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    stores = [n for n in stores if not isinstance(n.ctx, ast.Load)]
    if len(stores) != 1:
        return False
    columns = source.parents[stores[0]]
    statement = source.parents[columns]
    called = statement.value if isinstance(statement, ast.Assign) else None
    return (
        isinstance(columns, (ast.Tuple, ast.List))
        and isinstance(called, ast.Call)
        and getattr(called.func, "id", None) == "zip"
        and len(called.args) == 1
        and isinstance(called.args[0], ast.Starred)
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_by_column(iterable: ast.expr) -> bool:
    """`zip(*rows)`, `row.items()`, a literal list of keys."""
    if isinstance(iterable, (ast.List, ast.Tuple)):
        return True
    called = iterable.func if isinstance(iterable, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name in ("zip", "items", "keys", "values")


def _data(call: ast.Call) -> ast.expr | None:
    if call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg == "data"), None)


def _begin(source: Source, node: ast.expr) -> tuple[int, int]:
    return node.lineno, source.character(node.lineno, node.col_offset)


def _felt(ctx: Context, call: LoopCall) -> float | None:
    """Of the host's time in the call, what the step waits for; None where that is not known."""
    if ctx.profile.hardware.kind != "cuda":
        return call.host_us
    idle = ctx.profile.facts.get("data_idle_us") if "loader" in call.facts else ctx.idle_us
    return None if idle is None else min(call.host_us, float(idle))


def _unlike(call: LoopCall) -> str | None:
    """Why one array could give another tensor than the list, or None."""
    dtypes, results = list(call.facts.get("dtypes", ())), list(call.facts.get("results", ()))
    if call.facts.get("mixed") or not dtypes:
        return "one list holds arrays of several types: NumPy and torch promote them differently"
    for result in results:
        reason = next((r for r in (_lossy(dtype, result) for dtype in dtypes) if r is not None), None)
        if reason is not None:
            return reason
    return None


def _lossy(dtype: str, result: str) -> str | None:
    if dtype == result or result == "bool":
        return None
    if result in FLOATS and (dtype in FLOATS or dtype in INTEGERS or dtype == "bool"):
        return None
    if dtype in INTEGERS and result in INTEGERS:
        (bits, signed), (most, negative) = INTEGERS[dtype], INTEGERS[result]
        if bits <= most and signed <= negative:
            return None
    if result in INTEGERS:
        return f"numbers of {dtype} that {result} does not hold raise here and would wrap around in one array"
    return f"arrays of {dtype} are no numbers that one array of them would hand on as {result}"


def _is_wide(call: LoopCall) -> bool:
    """Whether 64-bit integers become floating-point numbers, which torch reads through float64."""
    dtypes: Sequence[str] = call.facts.get("dtypes", ())
    return any(dtype in ("int64", "uint64") for dtype in dtypes) and any(
        result in FLOATS for result in call.facts.get("results", ())
    )
