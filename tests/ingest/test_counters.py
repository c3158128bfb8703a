"""The counter sampler against a stand-in for NVML: no GPU is involved, only the order and meaning of the calls."""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from advisor.capture.counters import (
    INSTALL,
    Recording,
    Sample,
    Sampler,
    summarise,
    summarise_windows,
    visible_device,
)
from advisor.errors import ArtifactError


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


class FakeNvml:
    """A mock of the parts of pynvml the sampler calls; `broken` names calls that fail."""

    NVMLError = FakeError
    VALUES: ClassVar = {2: 97.5, 3: 58.0, 5: 17.0, 10: math.nan, 12: 3.0}

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.allocated = 0
        self.opened: list[Any] = []
        self.shut = False

    def _check(self, name: str) -> None:
        if name in self.broken:
            raise FakeError("Not Supported")

    def nvmlInit(self) -> None:
        self._check("init")

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.opened.append(index)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.opened.append(uuid)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._check("utilisation")
        return SimpleNamespace(gpu=100)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 612_000

    def nvmlGpmSampleAlloc(self) -> object:
        self.allocated += 1
        return object()

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: object) -> None:
        self._check("sample")

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(16)]
        return SimpleNamespace(version=0, numMetrics=0, metrics=metrics)

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.version == 1 and query.sample1 is not query.sample2
        for metric in query.metrics[: query.numMetrics]:
            metric.value = self.VALUES[metric.metricId]
            metric.nvmlReturn = 3 if metric.metricId == 12 else 0


def record(monkeypatch: pytest.MonkeyPatch, nvml: Any, device: int | str = 0) -> Recording:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = Sampler(device, period_s=0.01)
    sampler.start()
    time.sleep(0.08)
    return sampler.stop()


def test_samples_hold_what_the_device_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    recording = record(monkeypatch, nvml)
    assert recording.device == "NVIDIA H200" and recording.missing == {}
    assert recording.samples
    values = {"sm_active": 97.5, "sm_occupancy": 58.0, "tensor_active": 17.0, "gpu_utilisation": 100.0, "power": 612.0}
    assert all(sample.values == values for sample in recording.samples)  # no NaN, no failed counter
    windows = [(sample.begin_s, sample.end_s) for sample in recording.samples]
    assert all(end == begin for (_, end), (begin, _) in pairwise(windows))
    assert nvml.allocated == 0 and nvml.shut


def test_before_hopper_there_is_utilisation_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(monkeypatch, FakeNvml("sample"))
    assert set(recording.samples[0].values) == {"gpu_utilisation", "power"}
    assert "from Hopper on" in recording.missing["gpm"]


def test_a_counter_that_fails_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(monkeypatch, FakeNvml("utilisation"))
    assert "gpu_utilisation" not in recording.samples[0].values
    assert "Not Supported" in recording.missing["gpu_utilisation"]


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(monkeypatch, FakeNvml("init"))
    assert recording.samples == () and "no access" in recording.missing["counters"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = record(monkeypatch, None)
    assert recording == Recording(device=None, missing={"counters": INSTALL})


def test_a_run_shorter_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    sampler = Sampler(period_s=60.0)
    sampler.start()
    recording = sampler.stop()
    assert recording.samples == () and "within one window" in recording.missing["counters"]


def test_a_device_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    record(monkeypatch, nvml, visible_device({"CUDA_VISIBLE_DEVICES": "GPU-1234, GPU-5678"}, 1))
    assert nvml.opened == ["GPU-5678"]


@pytest.mark.parametrize(
    ("variables", "ordinal", "expected"),
    [({}, 0, 0), ({"CUDA_VISIBLE_DEVICES": "3,5"}, 1, 5), ({"CUDA_VISIBLE_DEVICES": ""}, 0, 0)],
)
def test_visible_devices(variables: dict[str, str], ordinal: int, expected: int) -> None:
    assert visible_device(variables, ordinal) == expected


def test_summary_takes_whole_windows_weighted_by_length() -> None:
    samples = [
        Sample(begin_s=0.0, end_s=1.0, values={"sm_active": 10.0}),
        Sample(begin_s=1.0, end_s=2.0, values={"sm_active": 50.0, "power": 300.0}),
        Sample(begin_s=2.0, end_s=5.0, values={"sm_active": 90.0}),
        Sample(begin_s=5.0, end_s=7.0, values={"sm_active": 0.0}),
    ]
    found = {metric.name: metric for metric in summarise(samples, 0.5, 6.0)}
    assert found["sm_active"].value == pytest.approx((50 + 3 * 90) / 4)
    assert (found["sm_active"].unit, found["sm_active"].source) == ("%", "gpm")
    assert (found["power"].value, found["power"].unit, found["power"].source) == (300.0, "W", "nvml")
    assert summarise(samples, 5.5, 6.0) == ()


def test_summary_of_several_windows_takes_the_samples_inside_any_of_them() -> None:
    samples = [
        Sample(begin_s=0.0, end_s=1.0, values={"sm_active": 10.0}),
        Sample(begin_s=1.0, end_s=2.0, values={"sm_active": 99.0}),  # across the end of the first window
        Sample(begin_s=4.0, end_s=4.0, values={"sm_active": 99.0}),  # of no length
        Sample(begin_s=4.0, end_s=7.0, values={"sm_active": 90.0, "power": 300.0}),
        Sample(begin_s=8.0, end_s=9.0, values={"dram_active": 5.0}),  # in neither
    ]
    windows = [(0.0, 1.5), (3.0, 7.0), (4.0, 7.0)]
    found = {metric.name: metric.value for metric in summarise_windows(samples, windows)}
    assert found == {"sm_active": pytest.approx((10 + 3 * 90) / 4), "power": 300.0}
    assert summarise_windows(samples, [(0.5, 1.5), (7.5, 8.5)]) == ()
    assert summarise_windows(samples, []) == ()


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    sample = Sample(begin_s=1.0, end_s=2.0, values={"sm_active": 12.5})
    recording = Recording(device="d", samples=(sample,), missing={"power": "x"})
    recording.save(path)
    assert Recording.load(path) == recording
    path.write_text('{"schema": 1, "samples": [{"end": 1}]}', encoding="utf-8")
    with pytest.raises(ArtifactError, match="another form"):
        Recording.load(path)
    path.write_text('{"schema": 9}', encoding="utf-8")
    with pytest.raises(ArtifactError, match="another schema"):
        Recording.load(path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        Recording.load(tmp_path / "none.json")
