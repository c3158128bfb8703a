"""Samples NVML counters of the device beside a run: SM activity, occupancy, tensor pipe, memory, utilisation, power.

Runs in a thread of the command, not in the user's process. GPM counters exist from Hopper on and cover the whole
device; what a device or machine does not offer is absent from the samples and has its reason in `missing`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.errors import ArtifactError
from advisor.model import Metric

SCHEMA = 1
PERIOD_S = 0.1  # GPM windows much shorter than this return noise
GPM = {"sm_active": 2, "sm_occupancy": 3, "tensor_active": 5, "dram_active": 10, "fp32_active": 12}  # NVML metric ids
UNITS = {**dict.fromkeys(GPM, "%"), "gpu_utilisation": "%", "power": "W"}
INSTALL = "install nvidia-ml-py to sample device counters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counters over one window, seconds of the machine's monotonic clock; values in the unit `UNITS` gives."""

    begin_s: float
    end_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The samples of one run, and why counters are missing (counter -> reason)."""

    device: str | None
    samples: tuple[Sample, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write counters.json."""
        path.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote; raises ArtifactError."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != SCHEMA:
                raise ArtifactError(f"{path.name} is of another schema: record the run again with this version")
            samples = tuple(Sample(**item) for item in data.pop("samples"))
            return Recording(samples=samples, **data)
        except OSError as error:
            raise ArtifactError(f"{path.name} cannot be read ({error.strerror}): record the run again") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path.name} has another form than expected ({error}): record the run again") from None


def summarise(samples: Sequence[Sample], begin_s: float, end_s: float) -> tuple[Metric, ...]:
    """Mean of each counter over [begin_s, end_s]; see `summarise_windows`."""
    return summarise_windows(samples, [(begin_s, end_s)])


def summarise_windows(samples: Sequence[Sample], windows: Sequence[tuple[float, float]]) -> tuple[Metric, ...]:
    """Mean of each counter over the samples that lie wholly inside one of the windows, weighted by their length.

    Windows are begin and end in seconds of the samples' clock. A sample across a border mixes in what is not asked for
    and does not count, a sample inside several windows counts once. A counter without a sample is absent.
    """
    inside = [
        s
        for s in samples
        if s.end_s > s.begin_s and any(begin <= s.begin_s and s.end_s <= end for begin, end in windows)
    ]
    found = []
    for name, unit in UNITS.items():
        pairs = [(s.values[name], s.end_s - s.begin_s) for s in inside if name in s.values]
        if pairs:
            mean = sum(value * length for value, length in pairs) / sum(length for _, length in pairs)
            found.append(Metric(name=name, value=mean, unit=unit, source="gpm" if name in GPM else "nvml"))
    return tuple(found)


def visible_device(variables: Mapping[str, str], ordinal: int = 0) -> int | str:
    """The physical device that CUDA calls `ordinal`: an index, or a UUID where CUDA_VISIBLE_DEVICES holds those.

    NVML knows nothing of that variable. Indices agree when both order devices by bus (CUDA_DEVICE_ORDER=PCI_BUS_ID) or
    all devices are of one model.
    """
    listed = [item.strip() for item in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    if ordinal >= len(listed):
        return ordinal
    return int(listed[ordinal]) if listed[ordinal].isdigit() else listed[ordinal]


class Sampler:
    """Samples one device in a thread between `start` and `stop`; never raises for a device that lacks something."""

    def __init__(self, device: int | str = 0, period_s: float = PERIOD_S) -> None:
        self._device = device
        self._period_s = period_s
        self._halt = threading.Event()
        self._thread: threading.Thread | None = None
        self._reader: _Reader | None = None
        self._samples: list[Sample] = []
        self._missing: dict[str, str] = {}

    def start(self) -> None:
        """Begin sampling; without NVML or a device the recording only says why it is empty."""
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self._missing["counters"] = INSTALL
            return
        try:
            self._reader = _Reader(nvml, self._device)
        except nvml.NVMLError as error:
            self._missing["counters"] = f"NVML gives no access to the device: {error}"
            return
        self._thread = threading.Thread(target=self._run, args=(self._reader,), name="counters", daemon=True)
        self._thread.start()

    def stop(self) -> Recording:
        """End sampling and return what was seen."""
        self._halt.set()
        if self._thread is not None:
            self._thread.join()
        reader = self._reader
        missing = {**self._missing, **(reader.missing if reader is not None else {})}
        if reader is not None:
            reader.close()
            if not self._samples:
                missing.setdefault("counters", f"the run ended within one window of {self._period_s:g} s")
        return Recording(device=reader.name if reader else None, samples=tuple(self._samples), missing=missing)

    def _run(self, reader: _Reader) -> None:
        begin = time.monotonic()
        while not self._halt.wait(self._period_s):
            values = reader.read()
            end = time.monotonic()
            if values:
                self._samples.append(Sample(begin_s=begin, end_s=end, values=values))
            begin = end


class _Reader:
    """One NVML device; `read` returns the counters since the previous call. What fails is dropped with its reason."""

    def __init__(self, nvml: Any, device: int | str) -> None:
        self.missing: dict[str, str] = {}
        self._nvml = nvml
        nvml.nvmlInit()
        by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
        self._handle = by_index(device) if isinstance(device, int) else by_uuid(device)
        name = nvml.nvmlDeviceGetName(self._handle)
        self.name: str = name.decode() if isinstance(name, bytes) else name
        self._plain: dict[str, Callable[[], float]] = {
            "gpu_utilisation": lambda: float(nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,  # milliwatts
        }
        self._before: Any = None
        self._after: Any = None
        try:
            self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
            nvml.nvmlGpmSampleGet(self._handle, self._before)
        except nvml.NVMLError as error:
            self._drop_gpm(f"the device offers no GPM counters ({error}); they exist from Hopper on")

    def read(self) -> dict[str, float]:
        """The counters that could be read."""
        values = self._read_gpm() if self._before is not None else {}
        for name, get in list(self._plain.items()):
            try:
                values[name] = get()
            except self._nvml.NVMLError as error:
                self.missing[name] = f"NVML does not report it: {error}"
                del self._plain[name]
        return values

    def _read_gpm(self) -> dict[str, float]:
        """GPM counters in percent over the time since the previous sample."""
        nvml = self._nvml
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = 1
        query.numMetrics = len(GPM)
        for place, number in enumerate(GPM.values()):
            query.metrics[place].metricId = number
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._after)
            query.sample1, query.sample2 = self._before, self._after
            nvml.nvmlGpmMetricsGet(query)
        except nvml.NVMLError as error:
            self._drop_gpm(f"GPM stopped answering: {error}")
            return {}
        self._before, self._after = self._after, self._before
        found = {name: query.metrics[place] for place, name in enumerate(GPM)}
        return {name: float(m.value) for name, m in found.items() if m.nvmlReturn == 0 and math.isfinite(m.value)}

    def _drop_gpm(self, reason: str) -> None:
        self.missing["gpm"] = reason
        for sample in (self._before, self._after):
            if sample is not None:
                self._nvml.nvmlGpmSampleFree(sample)
        self._before = self._after = None

    def close(self) -> None:
        """Free the samples and leave NVML."""
        if self._before is not None:
            for sample in (self._before, self._after):
                self._nvml.nvmlGpmSampleFree(sample)
            self._before = self._after = None
        self._nvml.nvmlShutdown()
