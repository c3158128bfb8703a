"""The device waits for the DataLoader: it fetches in the training process, or has too few workers.

## What it does
Gives a map-style DataLoader worker processes (`num_workers`) and, in front of a GPU, pinned memory. One that has
workers, and is waited for, gets more of them, or batches fetched further ahead (`prefetch_factor`) where they are many
enough on average. The number of workers comes from the measured time of a fetch, the rest of the step, the cores of the
machine and the room in shared memory. A setting is changed where it is written: at the call, at its
`functools.partial`, in the dict that the call unpacks, or in the constant, the default of a parameter, of an option or
of a class's field that it comes from, where nothing else reads that. Else the place is told.

## Why it costs
With `num_workers=0` the loop fetches, decodes and collates a batch while the device has nothing to do. With workers the
next batches are made while the device works on this one.

## When not to
When the wait is hidden behind device work: a wait of the host that the device does not feel costs nothing, and the
rule is silent. A dataset that draws from the global random stream or from a generator of its own, that fetching or the
loop changes, or that reads from an open file, which workers would share, would give other data; a sampler that counts
what it has handed out would be ahead of the loop; batches made on the device cannot be made by workers; a machine
without spare cores has nobody to do the work. Each is declined with its reason. An IterableDataset is told and left:
every worker would read the whole of it unless its `__iter__` asks `get_worker_info()` for its share, and then the order
of the samples changes. `persistent_workers` is told where a step waits for workers that start anew, and left
alone: with it the shuffling seed of later epochs is drawn at another time, and their order changes.

## Fix safety
EXACT: same batches in the same order, bit-identical losses are demanded.

## References
- torch.utils.data, PyTorch documentation, multi-process data loading
- huggingface/datasets#3423, pytorch/pytorch#47577: workers over an iterable dataset repeat its samples
- stas00/ml-engineering, dataloader chapter: 5.39 s to 1.33 s with two workers in a toy
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping

from advisor import codemod
from advisor.model import Decline, Evidence, Finding, Loader, Rewrite, Safety, Span
from advisor.rule import Context, Example, Rule, step
from advisor.source import Source
from advisor.usercode import given
from advisor.usercode.trainingloop import enclosing_loop

IMPORT = "from torch.utils.data import DataLoader\n"
LOADER = "torch.utils.data.DataLoader"
MOST_WORKERS = 8
AHEAD = 4  # batches per worker that are fetched ahead, where two are too few
SHARED = 0.5  # of what is free in shared memory may be filled with batches
CHANGES = (  # how methods begin that change what they belong to
    "set", "update", "add", "append", "extend", "insert", "remove", "pop", "clear", "reset", "resize", "step", "next",
    "advance", "shuffle", "increase", "decrease", "change", "grow", "enable", "disable",
)  # fmt: skip
SLOW = {"loader_wait_us": 5_000, "device_idle_us": 5_000}


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
            profile=step(10_000, **SLOW, cores=3),
            saves=(0, 5_000),
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, num_workers=1)\n",
            after=IMPORT + "loader = DataLoader(data, num_workers=3)\n",
            profile=step(10_000, **SLOW, device="cpu", cores=4),
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
            profile=step(10_000, **SLOW, draws_global_rng=True),
            because="fetching draws from the global random stream: workers would change the data",
        ),
        Example(
            before=IMPORT + "loader = DataLoader(data, batch_size=32)\n",
            after=None,
            profile=step(10_000, **SLOW, fetching={"changed_by_fetch": True}),
            because="fetching changes its dataset, of which every worker would have a copy of its own",
        ),
        Example(
            before=IMPORT + "loader = DataLoader(stream, batch_size=32)\n",
            after=IMPORT + "loader = DataLoader(stream, batch_size=32)\n",
            profile=step(10_000, **SLOW, iterable=True),
            saves=(0, 5_000),
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
        if loader.span is None:
            return self.decline(None, "it is constructed inside a library: ask it for worker processes")
        told = _told(loader)
        if told is not None:
            return self._finding(ctx, loader, felt, told[0], {"told": told[1]}, {})
        reason = _unsuitable(ctx, loader) or _changed_later(ctx, loader) or _unlike(ctx, loader)
        settings = {} if reason is not None else _settings(ctx, loader)
        if reason is not None or not settings:
            return self.decline(loader.span, reason or _enough(ctx, loader))
        workers = loader.arguments.get("num_workers")
        at_fault = (
            f"its {_counted(workers)} cannot keep up" if workers else "every batch is fetched in the training process"
        )
        values, bindings = _places(ctx, loader, settings)
        return self._finding(ctx, loader, felt, at_fault, values, bindings)

    def _finding(
        self,
        ctx: Context,
        loader: Loader,
        felt: float,
        at_fault: str,
        values: Mapping[str, str],
        bindings: Mapping[str, Span],
    ) -> Finding:
        assert loader.span is not None and loader.wait_us_per_step is not None
        evidence = [
            Evidence(what="wait for a batch per step", value=round(loader.wait_us_per_step, 1), unit="us"),
            Evidence(what="share of the step", value=round(loader.wait_us_per_step / ctx.step_us, 4), unit="share"),
            Evidence(what="of it felt by the device", value=round(felt, 1), unit="us"),
        ]
        if "workers" in values:
            evidence.append(Evidence(what="workers that hide it", value=int(values["workers"]), unit="processes"))
        return self.finding(
            loader.span,
            f"the device waits for {loader.dataset}: {at_fault}",
            cited_us=felt,
            high_us=felt,
            basis="model",
            evidence=tuple(evidence),
            values=values,
            bindings=bindings,
        )

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        if "told" in finding.values:
            return self.decline(finding.span, finding.values["told"])
        settings = {name: finding.values[name] for name in SETTINGS if name in finding.values}
        edits = [(finding.bindings[name], text) for name, text in settings.items() if name in finding.bindings]
        here = {name: text for name, text in settings.items() if name not in finding.bindings}
        try:
            if here:
                edits.append(codemod.set_keywords(source, finding.bindings.get("call", finding.span), here))
        except codemod.CannotEdit as error:
            return self.decline(finding.span, f"the DataLoader is not constructed at this line ({error})")
        workers = finding.values.get("workers")
        title = f"fetch batches in {_counted(int(workers))}" if workers else "fetch batches further ahead"
        return self.edit(finding, title, edits)


SETTINGS = ("num_workers", "prefetch_factor", "pin_memory")


def _told(loader: Loader) -> tuple[str, str] | None:
    """What is at fault, and what to do by hand, where every edit would change the data or its order."""
    if loader.iterable and loader.facts.get("shards"):
        return (
            "its iterable dataset is read by too few processes",
            "its dataset asks for its worker's share, so more workers are possible, but the order of the samples "
            "changes: set num_workers by hand",
        )
    if loader.iterable:
        return (
            "an iterable dataset is read in the training process",
            "its dataset is iterable and does not shard itself, so every worker would yield every sample: first take "
            "each worker's share in its __iter__ (torch.utils.data.get_worker_info), then set num_workers; the order "
            "of the samples changes",
        )
    start = float(loader.facts.get("start_us_per_step", 0.0))
    if loader.arguments.get("num_workers") and start > (loader.wait_us_per_step or 0.0) / 2:
        return (
            "its workers start anew in every pass over it",
            "persistent_workers=True keeps the workers, but the order of the samples changes from the second epoch on: "
            "set it by hand",
        )
    return None


def _unsuitable(ctx: Context, loader: Loader) -> str | None:
    """Why fetching in other, or more, processes would give other batches or none."""
    facts = loader.facts
    if loader.draws_global_rng:
        return "fetching draws from the global random stream: workers would change the data"
    if loader.draws_global_rng is None:
        return "cannot tell whether fetching draws random numbers"
    if facts.get("handles"):
        return f"its dataset holds an object that worker processes cannot share: {facts['handles'][0]}"
    if facts.get("sampler_moves"):
        return "fetching changes its sampler, which workers ask for batches ahead of the loop"
    if facts.get("changed_by_fetch"):
        return "fetching changes its dataset, of which every worker would have a copy of its own"
    if facts.get("changed_by_loop"):
        return "the loop changes its dataset between batches, which a worker would not see"
    if facts.get("late"):
        return "random numbers are drawn between iter() and the first batch: workers would draw its order before them"
    if set(facts.get("batch_devices", ())) - {"cpu"}:
        return "its batches are made on the device: worker processes cannot hand them over"
    if loader.picklable is False:
        return "its dataset or collate function cannot be sent to a worker process"
    if facts.get("start_method", "fork") != "fork" and _is_unguarded(ctx):
        return 'worker processes would run the script again: put its work under `if __name__ == "__main__"`'
    return None


def _changed_later(ctx: Context, loader: Loader) -> str | None:
    """Where the loop over the batches changes the dataset, which workers that have begun would not see."""
    if loader.span is None or loader.fetched is None:
        return None
    source = ctx.read(loader.span.path)
    call = given.construction(source, loader.span, LOADER)
    first = None if call is None or not call.args else call.args[0]
    dataset = first.id if isinstance(first, ast.Name) and loader.span.path == loader.fetched.path else None
    around = ctx.read(loader.fetched.path)
    loops = [n for n in ast.walk(around.tree) if isinstance(n, ast.For)]
    asking = (n for n in loops if loader.fetched.line in (n.lineno, n.iter.lineno))
    loop = next(asking, None) or enclosing_loop(around, loader.fetched)
    for node in () if loop is None else (n for statement in loop.body for n in ast.walk(statement)):
        owner = _changed_owner(node)
        parts = [] if owner is None else [n for n in ast.walk(owner) if isinstance(n, (ast.Name, ast.Attribute))]
        if any(isinstance(n, ast.Attribute) and n.attr == "dataset" for n in parts) or any(
            isinstance(n, ast.Name) and n.id == dataset for n in parts
        ):
            return f"line {node.lineno} changes its dataset between batches, which a worker would not see"  # type: ignore[attr-defined]
    return None


def _changed_owner(node: ast.AST) -> ast.expr | None:
    """What a statement or a call may change: `ds` of `ds.size = 2`, `ds.rows[0] = 2` and `ds.set_size(2)`."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        return node.value
    called = node.func if isinstance(node, ast.Call) else None
    return called.value if isinstance(called, ast.Attribute) and called.attr.startswith(CHANGES) else None


def _unlike(ctx: Context, loader: Loader) -> str | None:
    """Why what would be changed is more than this loader, or nobody could do the work."""
    beside = loader.facts.get("beside")
    if beside:
        return f"the same line makes a loader of {beside[0]}, which was not read in this run"
    if _cores(ctx) < 2:
        return "the machine has no second core for a worker"
    if _room(loader) < 1:
        batch, free = (loader.facts[name] / 2**20 for name in ("batch_bytes", "shared_memory"))
        return f"workers hand batches of {batch:.0f} MiB over in shared memory, of which {free:.0f} MiB are free"
    return None


def _is_unguarded(ctx: Context) -> bool:
    """Whether the loop is reached from the top of the script without a test of `__name__`."""
    for call in ctx.calls("optimizer.step"):
        outermost = call.frames[0]
        source = ctx.read(outermost.path)
        around = [n for n in source.tree.body if n.lineno <= outermost.line <= (n.end_lineno or n.lineno)]
        if not any(isinstance(n, ast.If) and "__name__" in ast.unparse(n.test) for n in around):
            return True
    return False


def _settings(ctx: Context, loader: Loader) -> dict[str, str]:
    """The arguments to give the loader, empty where it has all that helps."""
    now = int(loader.arguments.get("num_workers") or 0)
    workers = _workers(ctx, loader)
    settings: dict[str, str] = {}
    if workers > now:
        settings["num_workers"] = str(workers)
    elif now and _are_fast(ctx, loader) and int(loader.arguments.get("prefetch_factor") or 0) < AHEAD <= _room(loader):
        settings["prefetch_factor"] = str(AHEAD)
    on_gpu = ctx.profile.hardware.kind == "cuda"
    if settings and on_gpu and not loader.arguments.get("pin_memory"):
        settings["pin_memory"] = "True"
    return settings


def _enough(ctx: Context, loader: Loader) -> str:
    now = int(loader.arguments.get("num_workers") or 0)
    if _are_fast(ctx, loader):
        return f"it has {_counted(now)} already, fast enough on average, that fetch {AHEAD} batches ahead each"
    return f"it has {_counted(now)} already, all that {_cores(ctx)} cores and shared memory have room for"


def _places(ctx: Context, loader: Loader, settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Span]]:
    """What is to be written where: texts and positions by argument; "told" says why one is to be set by hand."""
    assert loader.span is not None
    source = ctx.read(loader.span.path)
    call = given.construction(source, loader.span, LOADER)
    values = {"workers": settings["num_workers"]} if "num_workers" in settings else {}
    if call is None:
        return values | {"told": "this call does not name DataLoader: set num_workers where it is constructed"}, {}
    if "prefetch_factor" in settings and not _has_workers(call):  # without workers the argument raises
        return values | {"told": f"where it has workers, set prefetch_factor={settings['prefetch_factor']}"}, {}
    bindings = {"call": source.span(call)}
    for name, text in settings.items():
        now = loader.arguments.get(name)
        place = given.written(source, ctx.sources, call, name, now, ctx.profile.environment.command)
        if place.reason is not None and name == "pin_memory":  # it helps, the other setting does not need it
            continue
        if place.reason is not None:
            return values | {"told": f"{place.reason}, to {text}"}, {}
        values[name] = place.text.format(value=text)
        if place.span is not None:
            bindings[name] = place.span
    return values, bindings


def _has_workers(call: ast.Call) -> bool:
    """Whether a call asks for worker processes in every run."""
    value = next((k.value for k in call.keywords if k.arg == "num_workers"), None)
    return isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value > 0


def _cores(ctx: Context) -> int:
    return ctx.profile.environment.cpu_count or 1


def _room(loader: Loader) -> int:
    """Batches that shared memory holds; more than any number of workers fills where that is not known."""
    free, batch = loader.facts.get("shared_memory"), loader.facts.get("batch_bytes")
    return int(SHARED * free / batch) if free is not None and batch else 1 << 20


def _fetch_us(ctx: Context, loader: Loader) -> float:
    """Time per step that fetching takes in one process: measured there, else what keeps the present workers busy."""
    wait = loader.wait_us_per_step or 0.0
    now = int(loader.arguments.get("num_workers") or 0)
    if not now:
        return wait
    known = loader.facts.get("fetch_us")
    return float(known) * _batches(loader) if known else now * ctx.step_us


def _batches(loader: Loader) -> float:
    """Batches of a step."""
    return (loader.wait_us_per_step or 0.0) / loader.fetch_us if loader.fetch_us else 1.0


def _rest_us(ctx: Context, loader: Loader) -> float:
    return max(ctx.step_us - (loader.wait_us_per_step or 0.0), 1.0)


def _are_fast(ctx: Context, loader: Loader) -> bool:
    """Whether the present workers fetch faster than the rest of a step, so that only some batches come late."""
    now = int(loader.arguments.get("num_workers") or 0)
    return bool(now and loader.facts.get("fetch_us")) and _fetch_us(ctx, loader) / now < 0.8 * _rest_us(ctx, loader)


def _workers(ctx: Context, loader: Loader) -> int:
    """Enough workers that fetching in parallel is faster than the rest of a step, plus one, within the spare cores and
    the room for two batches of each in shared memory."""
    needed = math.ceil(_fetch_us(ctx, loader) / _rest_us(ctx, loader)) + 1
    return max(1, min(needed, _cores(ctx) - 1, MOST_WORKERS, _room(loader) // 2))


def _counted(workers: int) -> str:
    return f"{workers} worker process{'es' if workers > 1 else ''}"
