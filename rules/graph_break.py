"""The graph of a compiled model breaks at a line of the script.

## What it does
Shows every line at which the script's own `torch.compile` had to leave the graph, with the reason and how often that
happened while it compiled, and rewrites two forms, all lines of a file together. A clamp under a condition that is
superfluous, `if h.abs().max().item() > limit: h = h.clamp(-limit, limit)`, loses the condition. A statistic kept as a
number, `self.stats.append(float(h.mean()))`, is kept as a tensor that grows, where everything else in the user's files
that reads it makes numbers of its elements. What breaks elsewhere is told in plain words: the way out is the author's.

## Why it costs
What stands before and behind a break is compiled alone: nothing is fused across it, its values go through memory, and
guards are checked for each piece. A break because of a tensor's value also makes the host wait for the device. What
follows one is often compiled again and again, until the limit, and then runs without the compiler; a break in a loop
leaves the whole function to Python.

## When not to
A line that `torch.compiler.disable` or `torch._dynamo.graph_break` asks for is left alone, and so is one that no
training step reaches. Statistics stay where CUDA graphs are asked for (`mode="reduce-overhead"`), whose outputs are
overwritten by the next step, where sizes are fixed (`dynamic=False`), and where the module may run in copies or twice.
A list of tensors is no way out: its length is a guard, and one more element makes the function compile again. With a
NaN among its values the condition of a clamp is false; without the condition its other values are clamped all the same.

## Fix safety
NUMERICS: values and gradients of the operations are the same, but the compiler fuses larger pieces and rounds in
another order.

## References
- "Graph breaks", "Programming model", PyTorch documentation, torch.compiler
- isayevlab/aimnetcentral#109: 41 breaks to 3, from 0.5-0.85 of eager to 1.6-1.8 times as fast
- pytorch/pytorch#93724: a list that grows is compiled for every length
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from advisor import codemod
from advisor.model import Break, Decline, Evidence, Finding, Rewrite, Safety, Span
from advisor.patterns import breaks as patterns
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode.places import is_own

GAIN = 1 / 2  # of the compiled module's time: the most that closing breaks was reported to bring
BACKENDS = ("inductor", "eager", "aot_eager")
ASKED = ("compiler.disable", "_dynamo.disable", "graph_break()", "call to `torch._dynamo.graph_break`")
QUIET = "put the line under `if not torch.compiler.is_compiling():`, or outside of the model"
SAYS = (  # words of Dynamo's reasons, what they say, and what to do
    (
        ("Tensor.item", ".item()", "_local_scalar_dense", "Tensor.tolist"),
        "the host reads a number of a tensor",
        "keep the tensor, and read it outside of the model",
    ),
    (
        ("generic_jump", "Data-dependent branching", "Data dependent"),
        "a branch depends on the value of a tensor",
        "write the branch with torch.where",
    ),
    (
        ("Dynamic shape operator", "nonzero"),
        "the size of a result depends on the values of a tensor",
        "keep the size and mask with torch.where",
    ),
    (("builtin operator `print`", "builtin `print`", "builtin operator: `print`"), "something is printed", QUIET),
    (("logging.Logger",), "something is logged", QUIET),
    (("numpy",), "numpy computes on a tensor", "compute it with torch"),
    (("data pointer", "backward()", "autograd.grad"), "gradients are asked for", "take it out of what is compiled"),
)
CLAMPED, STATISTIC = "clamp without the condition", "keep the statistic as a tensor"
ELSE = "write it otherwise, or take it out of what is compiled"
UNREACHED = "nothing of its function was recorded in a training step"
HEAD = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.stats = []

    def forward(self, x):
        h = self.linear(x)
"""
LOOP = """\
        return x + h


model = torch.compile(Block())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches:
    model(batch).sum().backward()
    optimizer.step()
print(f"{sum(model.stats) / len(model.stats):.3f}")
"""
CLAMP = "        if h.abs().max().item() > 1e3:  # keep it finite\n            h = h.clamp(-1e3, 1e3)\n"
KEPT = """        self.stats.append(h.mean().item())\n"""
ITEM = "Unsupported Tensor.item() call with capture_scalar_outputs=False"


def _with(lines: str) -> str:
    return HEAD + lines + LOOP


class GraphBreak(Rule):
    """if h.abs().max().item() > limit: h = h.clamp(-limit, limit) -> h = h.clamp(-limit, limit)."""

    id = "graph-break"
    safety = Safety.NUMERICS
    needs = ("steps",)
    worth = 0.03
    order = 38
    examples = (
        Example(
            before=_with(CLAMP),
            after=_with("        # keep it finite\n        h = h.clamp(-1e3, 1e3)\n"),
            profile=step(
                10_000,
                breaks={"h.abs().max().item()": ITEM},
                values={"h.abs()": "float32"},
                calls={"torch.compile": (0, 0)},
            ),
            saves=(0, 5_000),
        ),
        Example(
            before=_with(KEPT),
            after=_with(
                "        self.stats = torch.cat((self.stats.to(h.device), h.mean().detach().reshape(1)))\n"
            ).replace("self.stats = []", "self.stats = torch.zeros(0, dtype=torch.float64)"),
            profile=step(
                10_000,
                breaks={"h.mean().item()": ITEM},
                values={"h.mean()": "float32"},
                calls={"torch.compile": (0, 0)},
                device="cpu",
            ),
            saves=(0, 5_000),
        ),
        Example(  # told: a list of numbers is written to a file
            before=_with(KEPT).replace('print(f"{sum', 'json.dump(model.stats, file)\nprint(f"{sum'),
            after=_with(KEPT).replace('print(f"{sum', 'json.dump(model.stats, file)\nprint(f"{sum'),
            profile=step(10_000, breaks={"h.mean().item()": ITEM}, values={"h.mean()": "float32"}),
        ),
        Example(  # told: guard the line with torch.compiler.is_compiling()
            before=_with("        print(h.shape)\n"),
            after=_with("        print(h.shape)\n"),
            profile=step(10_000, breaks={"print(h.shape)": "Failed to trace builtin operator: `print`"}),
        ),
        Example(
            before=_with("        h = fixed(h)\n"),
            after=None,
            profile=step(10_000, breaks={"fixed(h)": "Skip calling `torch.compiler.disable()`d function"}),
            because="the script asks for it: torch.compiler.disable",
        ),
        Example(
            before=_with(CLAMP),
            after=None,
            profile=step(10_000, breaks={"h.abs().max().item()": ITEM}, optimizer=[9_900]),
            because="all but the optimizer and the loader takes 1.0% of the step",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        if "breaks" in ctx.profile.missing and ctx.calls("torch.compile"):
            yield self.decline(None, f"cannot tell: {ctx.profile.missing['breaks']}")
        places = _places(ctx.profile.breaks)
        judged: list[Finding | Decline] = [self._judge(ctx, span, found, len(places)) for span, found in places]
        closed: dict[str, list[str]] = {}
        for one in judged:
            if isinstance(one, Finding) and "told" not in one.values:
                closed.setdefault(one.span.path, []).append(str(one.span.line))
        for one in judged:  # with one break left the frame is cut all the same: those of a file are closed together
            if isinstance(one, Finding) and "told" not in one.values:
                one = replace(one, values={"lines": " ".join(closed[one.span.path])})
            yield one

    def _judge(self, ctx: Context, span: Span, found: Sequence[Break], lines: int) -> Finding | Decline:
        if all(any(word in one.reason for word in ASKED) for one in found):
            return self.decline(span, "the script asks for it: torch.compiler.disable")
        source = ctx.read(span.path)
        if not _reached(ctx, source, span):
            return self.decline(span, UNREACHED)
        spent = [use.step_us or 0.0 for use in ctx.profile.optimizers]
        spent += [loader.wait_us_per_step or 0.0 for loader in ctx.profile.loaders]
        most = max(0.0, ctx.step_us - sum(spent))
        if most / ctx.step_us < ctx.gate(self) or not most:
            share = f"{most / ctx.step_us:.1%}"
            return self.decline(span, f"all but the optimizer and the loader takes {share} of the step")
        library = next((str(f) for one in found for f in one.frames[-1:] if not is_own(f)), None)
        statement = _statement(source, span)
        told = _told(ctx, source, found[0].reason, statement, library)
        why = list(dict.fromkeys(_plain(one.reason) for one in found))
        return self.finding(
            source.span(statement) if statement is not None and not hasattr(statement, "body") else span,
            f"the compiled graph ends at `{_shown(source, span)}`: {'; '.join(why)}",
            cited_us=most,
            high_us=GAIN * most / lines,
            basis="model",
            evidence=(
                Evidence(what="breaks while the script compiled", value=sum(one.count for one in found), unit="breaks"),
                Evidence(what="Dynamo's reason", value="; ".join(dict.fromkeys(one.reason for one in found)), unit=""),
                Evidence(what="time of the step but for optimizer and loader", value=round(most, 1), unit="us"),
                *_behind(ctx, span),
            ),
            values={} if told is None else {"told": told},
            library=library,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        edits: list[codemod.Edit] = []
        titles: list[str] = []
        for line in finding.values["lines"].split():
            statement = _statement(source, Span(path=source.path, line=int(line)))
            assert statement is not None
            try:
                edits += _edits(source, statement)
            except codemod.CannotEdit as error:
                return self.decline(finding.span, str(error))
            titles.append(CLAMPED if isinstance(statement, ast.If) else STATISTIC)
        rewrite = self.edit(finding, ", ".join(dict.fromkeys(titles)), dict.fromkeys(edits))
        return rewrite if len(titles) == 1 else replace(rewrite, group=f"{self.id} in {source.path}")


def _places(found: Sequence[Break]) -> list[tuple[Span, list[Break]]]:
    """The breaks by the line of the user's where they are, in the order of their places."""
    places: dict[tuple[str, int], list[Break]] = {}
    for one in found:
        if one.span is not None:
            places.setdefault((one.span.path, one.span.line), []).append(one)
    return [(next(o.span for o in places[key] if o.span is not None), places[key]) for key in sorted(places)]


def _reached(ctx: Context, source: Source, span: Span) -> bool:
    """Whether an operation of the function around a line was recorded in a training step, or nothing was recorded."""
    function = source.function_at(span.line)
    if function is None or not any(graph.nodes for graph in ctx.graphs):
        return True
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    spans = (frame for g in ctx.graphs for node in g.nodes for frame in (*node.frames, node.span))
    return any(frame is not None and frame.path == span.path and frame.line in lines for frame in spans)


def _told(ctx: Context, source: Source, reason: str, statement: ast.stmt | None, library: str | None) -> str | None:
    """Why a break is told and not closed; None where an edit closes it."""
    if library is not None:
        return f"it is in code of a library: {library}"
    if statement is None:
        return "more than one statement stands on the line"
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and _is_message(source, call):
        return QUIET
    if not isinstance(statement, ast.If) and patterns.statistic(source, statement) is None:
        return next((advice for words, _, advice in SAYS if any(word in reason for word in words)), ELSE)
    try:
        _edits(source, statement)
    except codemod.CannotEdit as error:
        return str(error)
    dtypes = {n.dtype for g in ctx.graphs for n in g.nodes if n.span is not None and _within(n.span, source, statement)}
    if not any(dtype is not None and dtype.startswith(("float", "bfloat")) for dtype in dtypes):
        return "cannot tell that its tensor is of a floating type: nothing of the line was recorded"
    if isinstance(statement, ast.If):
        return None
    return _unlike(ctx) or patterns.read_alike(ctx.sources, source, statement)


def _unlike(ctx: Context) -> str | None:
    """Why what is compiled could not hold a tensor that outlives the step, or grows."""
    for call in ctx.calls("torch.compile"):
        mode = str(call.facts.get("mode", ""))
        if "options" in call.facts or mode not in ("", "default", "max-autotune-no-cudagraphs"):
            return "CUDA graphs may be asked for, which overwrite a tensor that is kept over the next step"
        if call.facts.get("backend", "inductor") not in BACKENDS:
            return f"what `backend={call.facts['backend']}` makes of a tensor that outlives the step is not known"
        if call.facts.get("dynamic") is False:
            return "`dynamic=False` compiles again for every size, and the tensor grows"
    return None


def _within(span: Span, source: Source, statement: ast.stmt) -> bool:
    return span.path == source.path and statement.lineno <= span.line <= (statement.end_lineno or statement.lineno)


def _edits(source: Source, statement: ast.stmt) -> list[codemod.Edit]:
    if isinstance(statement, ast.If):
        return patterns.unconditional(source, statement)
    return patterns.on_the_device(source, statement)


def _statement(source: Source, span: Span) -> ast.stmt | None:
    """The one statement that holds a line, the innermost; None where several share it."""
    holding = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.stmt) and node.lineno <= span.line <= (node.end_lineno or node.lineno)
    ]
    found = max(holding, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)
    if found is None or len(codemod.sharing_lines(source, found)) > 1:
        return None
    if isinstance(source.parents.get(found), ast.If) and source.parents[found].lineno == found.lineno:  # type: ignore[attr-defined]
        return source.parents[found]  # type: ignore[return-value]
    return found


def _is_message(source: Source, call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("print", "info", "debug", "warning", "error", "warn", "log")


def _plain(reason: str) -> str:
    """A reason of Dynamo's in plain words, else its own first line."""
    known = next((said for words, said, _ in SAYS if any(word in reason for word in words)), None)
    return known or reason.split(":")[0].strip() or "Dynamo gives no reason"


def _shown(source: Source, span: Span) -> str:
    line = source.lines[span.line - 1].strip()
    return line if len(line) <= 60 else line[:57] + "..."


def _behind(ctx: Context, span: Span) -> Iterator[Evidence]:
    """How often what follows the line in its function was compiled again."""
    found = [r for r in ctx.profile.recompiled if r.resumes and (r.place.path, r.place.line) == (span.path, span.line)]
    if found:
        yield Evidence(what="compiled again behind it", value=sum(r.count for r in found), unit="times")
    if any(r.limit for r in found):
        yield Evidence(what="the limit of recompilation was reached", value="yes", unit="")
