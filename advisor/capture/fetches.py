"""Inside the child: what is learnt of how a DataLoader fetches, beside the wait for it.

The first fetches are looked at, before the timed steps. A loader with worker processes is looked at when the script has
ended: one of its batches is fetched here, where everything can be seen.
"""

from __future__ import annotations

import dis
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils.data import _utils as loader_parts

from advisor.capture.builds import Builds
from advisor.capture.hooks import LoaderRecord, caller_spans, outermost_tensors, random_states
from advisor.capture.loaderstate import LoaderState

LOOKS = 3  # fetches of a loader that are looked at
LIMIT_S = 20.0  # the fetch after the script's end may take this long


class Fetches:
    """Looks at the first fetches of every loader of a run and fills `LoaderRecord.facts`."""

    def __init__(self) -> None:
        self._seen: dict[int, _Looks] = {}

    def fetch(self, record: LoaderRecord, iterator: Any, advance: Callable[[], Any]) -> Any:
        """Fetch a batch; the first ones of a loader are looked at."""
        looks = self._seen.setdefault(id(record), _Looks(record))
        looks.count += 1
        record.looked_at = looks.count >= LOOKS
        record.through = record.through or caller_spans()
        drawn, begun = vars(iterator).pop("_advisor_drawn", None), random_states()
        batch = looks.fetch(advance) if record.loader.num_workers == 0 else advance()
        if looks.count == 1:
            record.facts |= _describe_batch(batch) | _describe_memory()
            record.facts["shards"] = _shards(record.loader.dataset)
            record.facts["late"] = drawn not in (None, begun) and begun != random_states()
        return batch

    def fetch_again(self, records: list[LoaderRecord], waits_us: Callable[[LoaderRecord], float]) -> bool:
        """Once the script has ended: fetch one batch of each loader with workers that was waited for. True where
        anything was learnt."""
        learnt = False
        for record in records:
            fits = record.loader.num_workers > 0 and not isinstance(record.loader.dataset, torch_data.IterableDataset)
            if fits and waits_us(record) > 0.0:
                looks = self._seen.setdefault(id(record), _Looks(record))
                looker = threading.Thread(target=looks.fetch_here, daemon=True)
                looker.start()
                looker.join(LIMIT_S)
                learnt = learnt or not looker.is_alive()
        return learnt

    def describe(self, records: list[LoaderRecord], waits_us: Callable[[LoaderRecord], float]) -> list[dict[str, Any]]:
        """The calls in fetches that build tensors from lists of arrays, as calls of the loop: of a step's wait for the
        loader they take the share they have of a fetch."""
        found: list[dict[str, Any]] = []
        for number, record in enumerate(record for record in records if record.waits):
            looks = self._seen.get(id(record))
            whole = sum(looks.seconds) if looks is not None else 0.0
            if looks is None or whole <= 0.0:
                continue
            for built in (item for item in looks.builds.found.values() if item.arrays):
                share = min(1.0, built.seconds / whole)
                found.append(
                    {
                        "name": built.name,
                        "frames": built.frames,
                        "calls": built.calls,
                        "per_step": built.calls / len(looks.seconds),
                        "host_us": waits_us(record) * share,
                        "facts": built.facts() | {"loader": number, "share": share},
                    }
                )
        return found


class _Looks:
    """The looks at one loader."""

    def __init__(self, record: LoaderRecord) -> None:
        self.record = record
        self.count = 0
        self.seconds: list[float] = []
        self.builds = Builds()
        self._state: LoaderState | None = None

    def fetch(self, advance: Callable[[], Any]) -> Any:
        """Fetch in this process; what the first look finds new is what a dataset opens only once."""
        before = LoaderState(self.record.loader)
        if self._state is not None and before.data != self._state.data:
            self.record.facts["changed_by_loop"] = True
        begin = time.perf_counter()
        with self.builds.noting():
            batch = advance()
        self.seconds.append(time.perf_counter() - begin)
        after = LoaderState(self.record.loader)
        if self.count > 1 and after.data != before.data:
            self.record.facts["changed_by_fetch"] = True
        if self.count > 1 and after.order != before.order:
            self.record.facts["sampler_moves"] = True
        if after.handles:
            self.record.facts["handles"] = after.handles
        self._state = after
        self.record.facts["fetch_us"] = statistics.median(self.seconds[1:] or self.seconds) * 1e6
        return batch

    def fetch_here(self) -> None:
        """Fetch a batch as a worker would; twice, since the first may open files."""
        loader = self.record.loader
        try:
            indices = iter(loader._index_sampler)
            fetcher = loader_parts.fetch._MapDatasetFetcher(
                loader.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
            )
            fetcher.fetch(next(indices))
            before = random_states()
            self.count = LOOKS
            self.fetch(lambda: fetcher.fetch(next(indices)))
            self.record.draws_global_rng = before != random_states()
        except Exception:  # noqa: BLE001 - what a dataset raises outside of its worker says nothing of the script
            self.record.facts["only_in_workers"] = True


def _describe_batch(batch: Any) -> dict[str, Any]:
    tensors = list(outermost_tensors(batch))
    return {
        "batch": type(batch).__name__,
        "batch_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "batch_devices": sorted({tensor.device.type for tensor in tensors}),
        "only_tensors": _holds_only_tensors(batch),
    }


def _holds_only_tensors(value: Any) -> bool:
    """Whether everything in a batch that can be moved to a device is a tensor of torch's own class."""
    if type(value) in (list, tuple):
        return all(map(_holds_only_tensors, value))
    if type(value) is dict:
        return all(map(_holds_only_tensors, value.values()))
    return type(value) is torch.Tensor or not hasattr(value, "to")


def _describe_memory() -> dict[str, Any]:
    """Bytes free in shared memory, through which workers hand over batches."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return {}
    return {"shared_memory": status.f_bavail * status.f_frsize}


def _shards(dataset: Any) -> bool:
    """Whether an iterable dataset asks which worker it runs in."""
    methods = (getattr(cls, name, None) for cls in type(dataset).__mro__ for name in ("__iter__", "__init__"))
    return any("get_worker_info" in _names(getattr(method, "__code__", None)) for method in methods)


def _names(code: Any) -> set[str]:
    if code is None:
        return set()
    inner = (const for const in code.co_consts if isinstance(const, type(code)))
    return {str(i.argval) for i in dis.get_instructions(code) if i.argval is not None}.union(*map(_names, inner))
