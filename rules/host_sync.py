"""The host reads a value from the device in every step, and the device runs dry meanwhile.

## What it does
Looks at every `.item()`, `float(t)`, `.tolist()`, `.cpu()`, `if t:`, printed tensor, `nonzero` and boolean index of a
training step. Numbers that are only added up, compared or collected for a log stay on the device (`total +=
loss.detach().double()`), and are read where the log is written. What the step has to know, because the value decides
what is done next or is handed on in every step, is told with the line that needs it, and never rewritten.

## Why it costs
A read returns when the device has done everything that was queued before. Then nothing is queued: until the host has
launched the next operations the device has too little to do.

## When not to
Where the device stays busy, or the host is behind all the time, a read costs nothing: the rule is silent unless the
trace shows both a wait of the host and idle time of the device behind it. A list of losses on the device takes one
small allocation per step. Times taken on the host around a read no longer include the work of the device.

## Fix safety
EXACT: Python adds in double precision, and so does the device with `.double()`; what is trained does not change.
NUMERICS where the loop divides what it adds up, which a GPU may round another way in the last bit.

## References
- PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization"
- Lightning-AI/pytorch-lightning#7093, huggingface/trl#6842: reads for logging taken out of the step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from advisor.model import UNLINKED_READS, Decline, Evidence, Finding, Rewrite, Safety, Span
from advisor.patterns.deferred import Deferred, Needed, deferred
from advisor.patterns.hostreads import Read, reads
from advisor.rule import ON_A_GPU, Context, Example, Rule, step
from advisor.source import Source

LOOP = """\
import torch

total = 0.0
for step in range(100):
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
{lines}
"""
LOG = """\
    if step % 10 == 0:
        print(total / 10)
        total = 0.0
"""
SUM = LOOP.replace("{lines}\n", "    total += loss.item()\n" + LOG)
PEAK = LOOP.replace("{lines}\n", "    total = max(total, float(loss))\n" + LOG)
DECIDES = LOOP.replace("{lines}", "    total = loss.item()\n    if total > 9:\n        break")
SHOWN = LOOP.replace("{lines}", "    print(loss.item())")
HELD = {"loss.item()": (6_000.0, 900.0)}


@dataclass(frozen=True)
class _Cost:
    """What a read costs per step: the host's wait, and what of it the device feels, in microseconds."""

    host_us: float
    felt_us: float


class HostSync(Rule):
    """total += loss.item() -> total += loss.detach().double(), read where it is shown."""

    id = "host-sync"
    safety = Safety.EXACT
    needs = ("steps", "calls", "graph")
    worth = 0.02
    order = 14
    examples = (
        Example(
            before=SUM,
            after=SUM.replace("loss.item()", "loss.detach().double()").replace("print(total", "print(float(total)"),
            profile=step(10_000, reads=HELD, busy=0.8),
            saves=(0, 900),
        ),
        Example(
            before=PEAK,
            after=PEAK.replace(
                "max(total, float(loss))",
                "torch.where(loss.detach().double() > total, loss.detach().double(), total)",
            ).replace("print(total", "print(float(total)"),
            profile=step(10_000, reads={"float(loss)": (6_000.0, 900.0)}, busy=0.8),
            saves=(0, 900),
        ),
        Example(before=DECIDES, after=DECIDES, profile=step(10_000, reads=HELD, busy=0.8), saves=(0, 900)),
        Example(before=SHOWN, after=SHOWN, profile=step(10_000, reads=HELD, busy=0.8), saves=(0, 900)),
        Example(
            before=SUM,
            after=None,
            profile=step(100_000, reads={"loss.item()": (90_000.0, 40.0)}, busy=0.99),
            because="the host waits in it for 90000 us a step, and of that the device has nothing to do for 40 us: "
            "0.0% of the step",
        ),
        Example(before=SUM, after=None, profile=step(9_000, reads=HELD, device="cpu"), because=ON_A_GPU),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        gpu = ctx.profile.hardware.kind == "cuda"
        found = reads(ctx.graphs, ctx.loops, ctx.read, gpu)
        if not gpu:
            yield from (self.decline(read.span, ON_A_GPU, needs=("gpu",)) for read in found)
            return
        measured = ctx.profile.facts.get("reads_us")
        if measured is None or ctx.idle_us is None:
            why = "cannot tell: the device's idle time is not known"
            yield from (self.decline(read.span, why, needs=("kineto",)) for read in found)
            return
        later, now = _sorted(found, ctx.sources)
        for read, reason in now:
            yield from self._judge(ctx, [read], _cost([read], measured, ctx.idle_us), {"why": reason})
        for loop in dict.fromkeys(read.loop for read, _ in later):
            mine = [(read, kept) for read, kept in later if read.loop == loop]
            yield from self._together(ctx, mine, _cost([read for read, _ in mine], measured, ctx.idle_us))

    def _together(
        self, ctx: Context, later: Sequence[tuple[Read, Deferred]], cost: _Cost
    ) -> Iterator[Finding | Decline]:
        """The reads of one loop that can be left for later: one that stays waits for what the others waited for."""
        edits = list(dict.fromkeys(edit for _, kept in later for edit in kept.edits))
        values = {f"text {number}": text for number, (_, text) in enumerate(edits)}
        values["exact"] = "yes" if all(kept.exact for _, kept in later) else ""
        bindings = {f"place {number}": span for number, (span, _) in enumerate(edits)}
        groups = _neighbours([read for read, _ in later])
        yield from self._judge(ctx, groups[0], cost, values, bindings)
        for group in groups[1:]:
            line = groups[0][0].statement.lineno
            yield from self._judge(ctx, group, cost, {"why": f"it is read later together with what line {line} reads"})

    def _judge(
        self,
        ctx: Context,
        group: Sequence[Read],
        cost: _Cost,
        values: Mapping[str, str],
        bindings: Mapping[str, Span] | None = None,
    ) -> Iterator[Finding | Decline]:
        """One finding over neighbouring statements where the device feels the wait."""
        if cost.felt_us <= 0.0 or cost.felt_us / ctx.step_us < ctx.gate(self):
            why = f"the host waits in it for {cost.host_us:.0f} us a step, and of that the device has nothing to do "
            why += f"for {cost.felt_us:.0f} us: {cost.felt_us / ctx.step_us:.1%} of the step"
            if cost.host_us <= 0.0:
                why = "the trace shows no wait of the host for the device in it"
            yield from (self.decline(read.span, why) for read in group)
            return
        last = group[-1].span
        yield self.finding(
            replace(group[0].span, end_line=last.end_line, end_column=last.end_column),
            "the host waits in every step to read a value from the device",
            cited_us=cost.host_us,
            high_us=cost.felt_us,
            evidence=(
                Evidence(what="the host's wait in the read per step", value=round(cost.host_us, 1), unit="us"),
                Evidence(what="of that, the device has nothing to do", value=round(cost.felt_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(cost.felt_us / ctx.step_us, 4), unit="share"),
            ),
            values=values,
            bindings=bindings,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "why" in finding.values:
            return self.decline(finding.span, finding.values["why"])
        edits = [(span, finding.values[name.replace("place", "text")]) for name, span in finding.bindings.items()]
        result = self.edit(finding, "keep it on the device until it is shown", edits)
        return result if finding.values["exact"] else replace(result, safety=Safety.NUMERICS)


def _sorted(
    found: Sequence[Read], sources: Sequence[Source]
) -> tuple[list[tuple[Read, Deferred]], list[tuple[Read, str]]]:
    """The reads that can be left for later with their edits, and the others with what needs their value now."""
    later: list[tuple[Read, Deferred]] = []
    now: list[tuple[Read, str]] = []
    for read in found:
        try:
            later.append((read, deferred(read, [other for other in found if other.loop == read.loop], sources)))
        except Needed as error:
            now.append((read, str(error)))
    return later, now


def _cost(group: Sequence[Read], measured: Mapping[tuple[int, int], tuple[float, float]], idle_us: float) -> _Cost:
    """What some reads cost together; those that the trace could not link count with all that it could not link."""
    nodes = dict.fromkeys(node for read in group for node in read.nodes if node in measured)
    if any(not set(read.nodes) & set(nodes) for read in group) and UNLINKED_READS in measured:
        nodes[UNLINKED_READS] = None
    felt_us = min(idle_us, sum(measured[node][1] for node in nodes))
    return _Cost(host_us=sum(measured[node][0] for node in nodes), felt_us=felt_us)


def _neighbours(group: Sequence[Read]) -> list[list[Read]]:
    """Reads in statements that follow each other, in the order of their places."""
    found: list[list[Read]] = []
    for read in sorted(group, key=lambda r: r.statement.lineno):
        last = found[-1][-1].statement if found else None
        block = read.source.block_of(read.statement)
        follows = last in block and block.index(read.statement) == block.index(last) + 1 if last is not None else False
        if follows:
            found[-1].append(read)
        else:
            found.append([read])
    return found
