"""The device waits for the DataLoader, which fetches every batch in the training process.

## What it does
Gives a map-style DataLoader worker processes (`num_workers`) and, in front of a GPU, pinned memory. The number of
workers comes from the measured wait for batches, the rest of the step and the cores of the machine.

## Why it costs
With `num_workers=0` the loop fetches, decodes and collates a batch while the device has nothing to do. With workers the
next batches are made while the device works on this one.

## When not to
When the wait is hidden behind device work: a wait of the host that the device does not feel costs nothing, and the
rule is silent. An IterableDataset would be read once per worker; a dataset that draws from the global random stream
would give other data; a machine without spare cores has nobody to do the work. Each is declined with its reason.

## Fix safety
EXACT: same batches in the same order, bit-identical losses are demanded. `persistent_workers` is left alone: with it
the shuffling seed of later epochs is drawn at another time, and their order changes.

## References
- torch.utils.data, PyTorch documentation, multi-process data loading
- stas00/ml-engineering, dataloader chapter: 5.39 s to 1.33 s with two workers in a toy
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Loader, Rewrite, Safety
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source

IMPORT = "from torch.utils.data import DataLoader\n"
MOST_WORKERS = 8


class DataLoaderBound(Rule):
    """DataLoader(ds, ...) -> DataLoader(ds, ..., num_workers=N, pin_memory=True)."""

    id = "dataloader-bound"
    safety = Safety.EXACT
    needs = ("steps", "loaders")
    worth = 0.05
    order = 10
    examples = (
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32, shuffle=True)\n",
            after=IMPORT
            + "loader = DataLoader(data, batch_size=32, shuffle=True, "
            + "num_workers=2, pin_memory=True)\n",
            profile=step(10_000, loader_wait_us=5_000, device_idle_us=5_000),
            saves=(0, 5_000),
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32)\n",
            after=None,
            profile=step(10_000, loader_wait_us=5_000, device_idle_us=100),
            because="the loop waits 5000 us a step for it, but the device is idle in only 100 us of them",
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32)\n",
            after=None,
            profile=step(10_000, loader_wait_us=100, device_idle_us=100),
            because="waiting for it takes 1.0% of the step",
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32)\n",
            after=None,
            profile=step(10_000, loader_wait_us=5_000, device_idle_us=5_000, draws_global_rng=True),
            because="fetching draws from the global random stream: workers would change the data",
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32)\n",
            after=None,
            profile=step(10_000, loader_wait_us=5_000, device_idle_us=5_000, iterable=True),
            because="its dataset is iterable and does not shard itself: every worker would yield every sample",
        ),
    )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        for loader in ctx.profile.loaders:
            yield self._judge(ctx, loader)

    def _judge(self, ctx: Context, loader: Loader) -> Finding | Decline:
        wait = loader.wait_us_per_step
        if wait is None:
            return self.decline(loader.span, "cannot tell: no wait was recorded in the timed steps", needs=("loaders",))
        share = wait / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(loader.span, f"waiting for it takes {share:.1%} of the step")
        idle = ctx.profile.facts.get("data_idle_us")
        felt = wait if idle is None else min(wait, float(idle))
        if felt / ctx.step_us < ctx.gate(self):
            return self.decline(
                loader.span,
                f"the loop waits {wait:.0f} us a step for it, but the device is idle in only {felt:.0f} us of them",
            )
        reason = self._unsuitable(ctx, loader)
        if reason is not None:
            return self.decline(loader.span, reason)
        assert loader.span is not None
        workers = _workers(wait, ctx.step_us - wait, _cores(ctx))
        return self.finding(
            loader.span,
            f"the device waits for {loader.dataset}: every batch is fetched in the training process",
            cited_us=felt,
            high_us=felt,
            basis="model",
            evidence=(
                Evidence(what="wait for a batch per step", value=round(wait, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="of it felt by the device", value=round(felt, 1), unit="us"),
                Evidence(what="workers that hide it", value=workers, unit="processes"),
            ),
            values={"workers": str(workers), "pin": str(ctx.profile.hardware.kind == "cuda")},
        )

    def _unsuitable(self, ctx: Context, loader: Loader) -> str | None:
        if loader.arguments.get("num_workers"):
            return f"it has {loader.arguments['num_workers']} workers already"
        if loader.iterable:
            return "its dataset is iterable and does not shard itself: every worker would yield every sample"
        if loader.draws_global_rng:
            return "fetching draws from the global random stream: workers would change the data"
        if loader.draws_global_rng is None:
            return "cannot tell whether fetching draws random numbers"
        if loader.picklable is False:
            return "its dataset or collate function cannot be sent to a worker process"
        if _cores(ctx) < 2:
            return "the machine has no second core for a worker"
        if loader.span is None:
            return "it is constructed inside a library: ask it for worker processes"
        return None

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        keywords = {"num_workers": finding.values["workers"]}
        if finding.values["pin"] == "True":
            keywords["pin_memory"] = "True"
        try:
            span, text = codemod.set_keywords(source, finding.span, keywords)
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the DataLoader is not constructed at this line ({error})")
        if "DataLoader" not in text.split("(", 1)[0]:
            return self.decline(
                finding.span, "this call does not name DataLoader: set num_workers where it is constructed"
            )
        return self.edit(finding, f"fetch batches in {finding.values['workers']} worker processes", [(span, text)])


def _cores(ctx: Context) -> int:
    return ctx.profile.environment.cpu_count or 1


def _workers(wait_us: float, compute_us: float, cores: int) -> int:
    """Enough workers that fetching in parallel is faster than the rest of a step, plus one, within the spare cores."""
    needed = math.ceil(wait_us / max(compute_us, 1.0)) + 1
    return max(1, min(needed, cores - 1, MOST_WORKERS))
