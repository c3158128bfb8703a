"""The file that `advisor rules new` writes: a rule that loads and passes its examples, and says what to fill in."""

from __future__ import annotations

import re
from pathlib import Path

from advisor.errors import OutputError, UsageError

FILL_IN = "FILL IN"  # what stands in a page that is not written yet
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

# `slow` is an argument of no optimizer: until the rule is written it finds nothing in a real run.
TEMPLATE = '''\
"""FILL IN: what is slow, in one sentence.

## What it does
FILL IN: the edit, and where it is made.

## Why it costs
FILL IN: what the device or the host does in that time.

## When not to
FILL IN: every condition under which the rule declines, and where it gains nothing.

## Fix safety
NUMERICS: FILL IN why the rewrite computes the same.

## References
- FILL IN: documentation, a paper, an issue with a measurement
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, OptimizerUse, Rewrite, Safety
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source

BEFORE = "import torch\\nopt = torch.optim.AdamW(params, slow=True)\\n"


class CLASS(Rule):
    """AdamW(params, slow=True) -> AdamW(params, slow=False)."""

    id = "IDENTIFIER"
    safety = Safety.NUMERICS  # EXACT, NUMERICS, PRECISION, SEMANTICS, or SUGGEST for what is never edited
    needs = ("steps", "optimizers")  # words of advisor.rule.NEEDS: without them the rule is not asked
    order = 60  # starvation 10, precision 20, structure 30, compile 40, memory 50, communication 55, optimizer 60
    examples = (
        Example(  # fires: the source after it, byte for byte, and what may be saved in microseconds
            before=BEFORE,
            after=BEFORE.replace("True", "False"),
            profile=step(10_000, optimizer=[150] * 12),
            saves=(0, 1_800),
        ),
        Example(  # stays silent: one such example for every condition of "When not to"
            before=BEFORE,
            after=None,
            profile=step(10_000, optimizer=[20]),
            because="the optimizer takes 0.2% of the step",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for use in ctx.profile.optimizers:  # or ctx.calls(...), ctx.loops, ctx.profile.loaders, ctx.graphs
            if use.arguments.get("slow") is True:
                yield self._judge(ctx, use)

    def _judge(self, ctx: Context, use: OptimizerUse) -> Finding | Decline:
        if use.span is None or use.step_us is None:
            return self.decline(use.span, "cannot tell: its place or its time is not known", needs=("kineto",))
        share = use.step_us / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(use.span, f"the optimizer takes {share:.1%} of the step")
        return self.finding(
            use.span,
            "the optimizer is told to be slow",
            cited_us=use.step_us,  # measured time, the most that can be saved
            high_us=use.step_us,
            evidence=(Evidence(what="time of the optimizer per step", value=round(use.step_us, 1), unit="us"),),
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        try:
            edit = codemod.set_keywords(source, finding.span, {"slow": "False"})
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the optimizer is not constructed at this line: {error}")
        return self.edit(finding, "an optimizer that is not slow", [edit])
'''


def text_of(name: str) -> str:
    """The file of a rule that is still to be written; raises UsageError for what can be no id."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name} can be no id of a rule: lower case words joined by dashes, such as slow-optimizer")
    words = "".join(word.capitalize() for word in name.split("-"))
    return TEMPLATE.replace("CLASS", words).replace("IDENTIFIER", name)


def write(name: str, folder: Path) -> Path:
    """Write the file into a folder, which is made when missing; raises UsageError, OutputError."""
    text = text_of(name)
    path = folder / f"{name.replace('-', '_')}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already: give the rule another name") from error
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}: give another folder with --rules") from error
    return path
