"""Recorded operator calls made again: their arguments, the window in which one ran alone, and Nsight Compute beside.

Nothing here needs a GPU: arguments are made on the host or without storage, the device's clock and queue are played.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from advisor.capture import calibrate, counted, ncu, replay, replaying  # noqa: E402
from advisor.capture.counters import Recording, Sample  # noqa: E402
from advisor.capture.replay import CannotReplay, prepare  # noqa: E402
from advisor.capture.replaying import RecordedCall, run_calls  # noqa: E402
from advisor.errors import ScriptError, UsageError  # noqa: E402
from advisor.ingest.ncu import read_ncu  # noqa: E402
from advisor.ingest.reader import read_table  # noqa: E402
from advisor.metrics import floors as least  # noqa: E402
from advisor.session import Spec  # noqa: E402
from advisor.singles import _call  # noqa: E402

ROOT = Path(__file__).parents[2]
DATA, SAMPLE = ROOT / "tests" / "data", ROOT / "samples" / "nano_gpt" / "h200" / "trace.json.gz"
MM = RecordedCall(name="aten::mm", shapes=((4, 8), (8, 2)), dtypes=("float32", "float32"))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host in place of the device."""
    monkeypatch.setattr(replay, "DEVICE", "cpu")


def call(
    name: str,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[str],
    concrete: Sequence[str] = (),
    strides: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    return {"name": name, "shapes": shapes, "dtypes": dtypes, "strides": strides, "concrete": concrete}


def arguments(asked: dict[str, Any], overload: str = "default") -> tuple[list[Any], dict[str, Any]]:
    operator = getattr(getattr(torch.ops.aten, asked["name"].removeprefix("aten::")), overload)
    return replay._arguments(operator._schema.arguments, asked)


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("asked", "shape", "dtype"),
    [
        (call("aten::mm", [[4, 8], [8, 2]], ["float32"] * 2), (4, 2), torch.float32),
        (
            call("aten::addmm", [[2], [4, 8], [8, 2], [], []], ["bfloat16"] * 3 + ["", ""], ["", "", "", "1", "1"]),
            (4, 2),
            torch.bfloat16,
        ),
        (call("aten::_softmax", [[4, 8], [], []], ["float32", "", ""], ["", "-1", "False"]), (4, 8), torch.float32),
        (
            call("aten::sum", [[4, 8], [], [], []], ["float32", "", "", ""], ["", "[1]", "True", ""]),
            (4, 1),
            torch.float32,
        ),
        (
            call("aten::masked_fill_", [[4, 8], [4, 8], []], ["float32", "bool", ""], ["", "", "-inf"]),
            (4, 8),
            torch.float32,
        ),
        (
            call(
                "aten::embedding",
                [[9, 3], [5], [], [], []],
                ["float32", "int64", "", "", ""],
                ["", "", "-1", "False", "False"],
            ),
            (5, 3),
            torch.float32,
        ),
        (
            call(
                "aten::_to_copy",
                [[4], [], [], [], [], [], []],
                ["float32", *[""] * 6],
                ["", "15", "0", "", "", "False", ""],
            ),
            (4,),
            torch.bfloat16,
        ),
        (call("aten::add", [[4, 8], [], []], ["float32", "", ""], ["", "2.5", "1"]), (4, 8), torch.float32),
        (call("aten::div", [[4, 8], []], ["float32", "float64"], ["", ""]), (4, 8), torch.float32),
        (call("aten::empty_like", [[0, 8]], ["float32"]), (0, 8), torch.float32),
    ],
)
def test_calls_are_made_again(host: None, asked: dict[str, Any], shape: tuple[int, ...], dtype: Any) -> None:
    result = prepare(asked)()
    assert (tuple(result.shape), result.dtype) == (shape, dtype)


def test_backward_of_a_convolution_has_its_list_of_flags(host: None) -> None:
    concrete = ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]
    asked = call(
        "aten::convolution_backward",
        [[2, 4, 8, 8], [2, 3, 8, 8], [4, 3, 3, 3], *[[]] * 8],
        ["float32"] * 3 + [""] * 8,
        concrete,
    )
    data, weight, bias = prepare(asked)()
    assert (tuple(data.shape), tuple(weight.shape), bias) == ((2, 3, 8, 8), (4, 3, 3, 3), None)


def test_layer_norm_has_its_optional_tensors(host: None) -> None:
    asked = call(
        "aten::native_layer_norm", [[4, 8], [], [], [], []], ["float32", "", "", "", ""], ["", "[8]", "", "", "1e-05"]
    )
    assert tuple(prepare(asked)()[0].shape) == (4, 8)


def test_strides_are_those_of_the_record(host: None) -> None:
    """A transposed weight and a mask that is one row for all: other layouts would be other kernels."""
    asked = call("aten::bmm", [[2, 4, 8], [2, 8, 3]], ["float32"] * 2, strides=[[32, 8, 1], [24, 1, 8]])
    (left, right), named = arguments(asked)
    assert (left.stride(), right.stride(), named) == ((32, 8, 1), (24, 1, 8), {})
    asked = call("aten::where", [[6, 5]] * 3, ["bool", "float32", "float32"], strides=[[0, 1], [5, 1]])
    (mask, here, there), _ = arguments(asked, "self")
    assert (mask.stride(), here.stride(), there.stride()) == ((0, 1), (5, 1), (5, 1))
    assert mask.untyped_storage().nbytes() == 5


def test_integers_are_zeros_and_floats_are_not(host: None) -> None:
    """Zero is a valid index; products of zeros take less power than others."""
    (data, index), _ = arguments(call("aten::take", [[64], [8]], ["float16", "int64"]))
    assert index.sum() == 0 and data.abs().sum() > 0
    for dtype in ("float8_e4m3fn", "float64", "bfloat16"):
        assert replay._tensor([256], dtype, None).float().std() > 0.5


def test_a_number_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch records `x * 2.0` as a tensor without dimensions; in device memory it would make another kernel run."""
    monkeypatch.setattr(replay, "DEVICE", "meta")
    (left, right), _ = arguments(call("aten::mul", [[4, 8], []], ["float32", "float64"]), "Tensor")
    assert (left.device.type, right.device.type, right.dtype, right.item()) == ("meta", "cpu", torch.float64, 1)
    for shapes, dtypes in (([[4, 8], []], ["float32", "float32"]), ([[], []], ["float64", "float64"])):
        (_, right), _ = arguments(call("aten::mul", shapes, dtypes), "Tensor")
        assert right.device.type == "meta"
    (_, index), _ = arguments(call("aten::take", [[4, 8], []], ["float32", "int64"]))
    assert index.device.type == "meta"


def test_keywords_are_passed_as_such(host: None) -> None:
    positional, named = arguments(call("aten::add", [[4], [4], []], ["float32"] * 2 + [""], ["", "", "2"]), "Tensor")
    assert (len(positional), named) == (2, {"alpha": 2})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (call("triton_poi_fused_add_0", [[4]], ["float32"]), "is no operator that torch brings"),
        (call("mine::work", [[4]], ["float32"]), "mine::work is no operator that torch brings"),
        (call("aten::no_such_operator", [[4]], ["float32"]), "is no operator that torch brings"),
        (call("aten::mm", [[4, 8]], ["float32"]), "no overload takes so few arguments"),
        (call("aten::mm", [[4, 8]] * 9, ["float32"] * 9), "no overload takes so many arguments"),
        (call("aten::mm", [[4, 8], [9, 2]], ["float32"] * 2), "cannot be multiplied|size"),
        (call("aten::mm", [[4, 8], [8, 2]], ["float32", "bfloat16"]), "same dtype"),
        (call("aten::mm", [[4, 8], [8, 2]], ["float32", "float3"]), "dtype float3 is not known to this torch"),
        (call("aten::mm", [[4, 8], [8, 2]], ["float32", ""]), "the dtype of an input is not known"),
        (call("aten::cat", [[], []], ["", ""], ["", "0"]), "lists of tensors are not recorded one by one"),
        (
            call("aten::gelu", [[4], []], ["float32", ""], ["", ""]),
            "the text of the argument approximate is not recorded",
        ),
        (call("aten::_softmax", [[4, 8], [], []], ["float32", "", ""]), "the argument dim is not recorded"),
        (call("aten::_softmax", [[4, 8], [], []], ["float32", "", ""], ["", "<odd>", ""]), "'<odd>' cannot be read"),
        (call("aten::sum", [[4, 8], [], []], ["float32", "", ""], ["", "[1, None", "False"]), "cannot be read"),
    ],
)
def test_what_cannot_be_made_again_says_why(host: None, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotReplay, match=words) as raised:
        prepare(asked)
    assert "\n" not in str(raised.value) and len(str(raised.value)) <= 250


def distinct_calls(path: Path) -> list[RecordedCall]:
    """Every kind of call of a trace that launched a kernel and whose inputs are not lists."""
    table = read_table(path, 1)
    links = least.link(table)
    kinds = least.kinds(table, links)
    used = sorted(set(kinds.of_row[links.operator[links.operator >= 0]].tolist()))
    calls = (_call(kinds.name[place], kinds.inputs[place]) for place in used)
    return [item for item in calls if item is not None]


# Operators that torch has no rule of shapes for, or none without values: they need a device.
ON_DEVICE = re.compile(r"cudnn|miopen|_local_scalar_dense|_flash_attention|_efficient_attention|_fused_")
LISTS = re.compile(r"_foreach_|aten::(cat|stack|index)")


@pytest.mark.parametrize("path", [SAMPLE, DATA / "h200_calls" / "trace.json.gz"], ids=lambda path: path.parent.name)
def test_what_was_recorded_on_an_h200_can_be_made_again(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """All distinct calls of two recordings, made without storage: torch's own rules check every argument."""
    monkeypatch.setattr(replay, "DEVICE", "meta")
    failed: Counter[str] = Counter()
    calls = distinct_calls(path)
    for item in calls:
        try:
            prepare(dataclasses.asdict(item))
        except CannotReplay as error:
            if not LISTS.search(item.name) and not ON_DEVICE.search(item.name):
                failed[f"{item.name}: {error}"] += 1
    assert len(calls) > 100
    allowed = (
        "aten::gelu: the text of",
        "aten::fill_: the dtype of",
        "aten::_conv_depthwise2d: no overload takes so few",
    )
    assert [reason for reason in failed if not reason.startswith(allowed)] == []


# ---------------------------------------------------------------------------------------------------- inside the child


def plan(folder: Path, calls: Sequence[dict[str, Any]], **more: Any) -> tuple[Path, Path]:
    path = folder / "plan.json"
    path.write_text(json.dumps({"calls": list(calls), "seconds": 0.6, "once": False, **more}), encoding="utf-8")
    return path, folder / "result.json"


def test_every_call_has_its_record(host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What one call does to torch does not end the others, and each record is there before the next call starts."""
    calls = [dataclasses.asdict(MM), call("mine::work", [], []), dataclasses.asdict(MM), dataclasses.asdict(MM)]
    path, result = plan(tmp_path, calls)
    errors: list[Exception | None] = [None, RuntimeError("CUDA error\nand more"), ValueError()]
    written = []

    def window(run: Callable[[], Any], seconds: float) -> dict[str, Any]:
        written.append(len(json.loads(result.read_text(encoding="utf-8"))) if result.exists() else 0)
        assert (tuple(run().shape), seconds) == ((4, 2), 0.6)
        error = errors.pop(0)
        if error is not None:
            raise error
        return {"begin_s": 1.0, "end_s": 2.0, "time_us": 3.0}

    monkeypatch.setattr(replay, "_window", window)
    replay.main(path, result)
    found = json.loads(result.read_text(encoding="utf-8"))
    refused = "torch refuses the recorded arguments: "
    assert found == [
        {"begin_s": 1.0, "end_s": 2.0, "time_us": 3.0},
        {"reason": "mine::work is no operator that torch brings"},
        {"reason": f"{refused}CUDA error"},
        {"reason": f"{refused}ValueError"},
    ]
    assert written == [0, 2, 3]


def test_once_for_a_profiler_outside(host: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made once before and once between the marks, so that what is set up at first is not seen."""
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(replay, "prepare", lambda asked: lambda: said.append(asked["name"]))
    path, result = plan(tmp_path, [dataclasses.asdict(MM)], once=True)
    replay.main(path, result)
    assert said == ["aten::mm", "synchronize", "start", "aten::mm", "synchronize", "stop"]
    assert json.loads(result.read_text(encoding="utf-8")) == [{}]


class Device:
    """A queue that runs calls of a fixed length one after the other, and a host whose launches take time."""

    def __init__(self, call_s: float, launch_s: float, graph_launch_s: float = 20e-6) -> None:
        self.now, self.free, self.launched, self.graphs = 0.0, 0.0, 0, 0
        self.call_s, self.launch_s, self.graph_launch_s = call_s, launch_s, graph_launch_s
        self.pause = (math.inf, 0.0)  # when the host stands still, and how long

    def run(self) -> None:
        self._launch(self.launch_s, self.call_s)
        self.launched += 1

    def graph(self, _: Callable[[], None]) -> Callable[[], None]:
        self.graphs += 1
        return lambda: self._launch(self.graph_launch_s, replay.REPETITIONS * self.call_s)

    def _launch(self, host_s: float, device_s: float) -> None:
        self.now += host_s
        if self.now >= self.pause[0]:
            self.now, self.pause = self.now + self.pause[1], (math.inf, 0.0)
        self.free = max(self.free, self.now) + device_s

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.end = 0.0

            def record(self) -> None:
                self.end = max(device.free, device.now)

            def query(self) -> bool:
                return device.now >= self.end

            def synchronize(self) -> None:
                device.now = max(device.now, self.end)

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.end - self.end)

        monkeypatch.setattr(replay, "_graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(device, "now", max(device.now, device.free)))
        monkeypatch.setattr(replay.time, "monotonic", lambda: device.now)
        monkeypatch.setattr(replay.time, "sleep", lambda seconds: setattr(device, "now", device.now + seconds))


def test_the_window_lies_where_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins a tenth of a second after the first repetition and is as long as was asked for."""
    device = Device(call_s=4e-3, launch_s=10e-6)
    device.install(monkeypatch)
    found = replay._window(device.run, 0.6)
    assert found["time_us"] == pytest.approx(4000)
    assert found["end_s"] - found["begin_s"] == pytest.approx(0.6, abs=0.05)
    assert device.launched * 4e-3 == pytest.approx(0.1 + 0.6, abs=0.15)
    assert device.now >= device.free  # the device is done before the next call is replayed


def test_a_host_that_launches_more_slowly_than_the_device_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as slowly: the device waits between any two calls, although one is always in the queue.

    Counters of such a time would be those of an idle device; as a graph the call runs back to back.
    """
    device = Device(call_s=100e-6, launch_s=300e-6)
    device.install(monkeypatch)
    assert replay._time(device.run) > 250e-6  # what the host takes
    assert replay._filled(device.run, 200, 0.6) is None
    found = replay._window(device.run, 0.6)
    assert device.graphs > 0
    assert found["time_us"] == pytest.approx(100, rel=0.05)
    assert found["end_s"] - found["begin_s"] == pytest.approx(0.6, abs=0.05)


def test_a_queue_that_runs_dry_all_the_same_gives_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(call_s=100e-6, launch_s=300e-6, graph_launch_s=0.1)
    device.install(monkeypatch)
    with pytest.raises(CannotReplay, match="the queue ran dry: the host launches this call more slowly"):
        replay._window(device.run, 0.6)


def test_a_pause_of_the_host_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took the core for a while: that stretch is given up, not reported."""
    device = Device(call_s=4e-3, launch_s=10e-6)
    device.install(monkeypatch)
    device.pause = (0.3, 0.5)
    found = replay._window(device.run, 0.6)
    assert found["begin_s"] > 0.5 and device.graphs == 0


def test_short_calls_run_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred in one launch; the time is that of one."""
    device = Device(call_s=5e-6, launch_s=8e-6)
    device.install(monkeypatch)
    found = replay._window(device.run, 0.6)
    assert found["time_us"] == pytest.approx(5, rel=0.01)
    assert found["end_s"] - found["begin_s"] == pytest.approx(0.6, abs=0.05)


# ------------------------------------------------------------------------------------------------- outside of the child


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., str]:
    """A function that makes a program in place of Python: it writes a text as the result and ends."""

    def make(result: str | None, status: int = 0, error: str = "", first: str = "") -> str:
        path = tmp_path / "python"
        lines = ["#!/bin/sh", first, f"printf '%s\\n' \"$@\" > '{tmp_path}/asked'"]
        lines += [f'printf %s {shlex.quote(result)} > "$4"'] if result is not None else []
        lines += [f"printf %s {shlex.quote(error)} >&2", f"exit {status}"]
        path.write_text("\n".join(lines), encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return make


RAN = {"begin_s": 1.0, "end_s": 2.0, "time_us": 40.0}
Make = Callable[..., str]


def test_the_child_is_told_what_to_replay(interpreter: Make, tmp_path: Path) -> None:
    found = run_calls([MM], tmp_path, interpreter=interpreter(json.dumps([RAN])))
    assert found == [RAN]
    module = ["-m", "advisor.capture.replay", str(tmp_path / "plan.json"), str(tmp_path / "result.json")]
    assert (tmp_path / "asked").read_text(encoding="utf-8").splitlines() == module
    asked = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    one = call("aten::mm", [[4, 8], [8, 2]], ["float32", "float32"], [], [])
    assert asked == {"calls": [one], "seconds": replaying.SECONDS, "once": False}


def test_calls_behind_the_end_of_the_child_are_lost(interpreter: Make, tmp_path: Path) -> None:
    """It crashed in the second of three calls: the first one counts."""
    found = run_calls([MM, MM, MM], tmp_path, interpreter=interpreter(json.dumps([RAN]), status=139))
    assert found == [RAN, *[{"reason": "the process that replays calls ended before this one"}] * 2]


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (None, "ModuleNotFoundError: No module named 'torch'\n", "cannot be replayed: ModuleNotFoundError"),
        (None, "", "cannot be replayed: it printed nothing"),
        ("[]", "", "cannot be replayed: it printed nothing"),
        ('[{"begin_s": 1', "killed\n", "cannot be replayed: killed"),
    ],
)
def test_a_child_that_does_not_start(
    interpreter: Make, tmp_path: Path, result: str | None, error: str, words: str
) -> None:
    with pytest.raises(ScriptError, match=words) as raised:
        run_calls([MM], tmp_path, interpreter=interpreter(result, status=1, error=error))
    assert raised.value.exit_status == 3
    assert raised.value.detail == (error or None)


def test_no_such_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="cannot be replayed: No such file or directory: /nowhere/python"):
        run_calls([MM], tmp_path, interpreter="/nowhere/python")


def test_a_child_that_hangs(interpreter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "START_S", 0.2)
    with pytest.raises(ScriptError, match=r"replaying 0 operator calls did not end within 0\.2 s"):
        run_calls([], tmp_path, interpreter=interpreter(None, first="exec sleep 60"))


class Sampler:
    """Counters of a device that are known beforehand."""

    recording = Recording(device="NVIDIA H200")
    states: ClassVar[list[str]] = []

    def __init__(self, device: int | str) -> None:
        self.states.append(f"device {device}")

    def start(self) -> None:
        self.states.append("start")

    def stop(self) -> Recording:
        self.states.append("stop")
        return self.recording


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> type[Sampler]:
    monkeypatch.setattr(replaying, "Sampler", Sampler)
    monkeypatch.setattr(Sampler, "states", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return Sampler


def sampled(*values: float) -> tuple[Sample, ...]:
    """Windows of a tenth of a second from 1 s on."""
    return tuple(
        Sample(begin_s=1 + place / 10, end_s=1.1 + place / 10, values={"sm_active": value, "power": 500.0})
        for place, value in enumerate(values)
    )


def test_counters_are_those_of_the_window(sampler: type[Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples across its borders belong to something else as well."""
    recording = Recording(device="NVIDIA H200", samples=sampled(10.0, 50.0, 70.0, 90.0, 20.0))
    monkeypatch.setattr(sampler, "recording", recording)
    answers = [
        {"begin_s": 1.05, "end_s": 1.42, "time_us": 7.0},
        {"reason": "no"},
        {"begin_s": 8.0, "end_s": 9.0, "time_us": 1.0},
    ]
    monkeypatch.setattr(replaying, "run_calls", lambda *_, **__: answers)
    ran, refused, late = replaying.replay([MM, MM, MM])
    assert [(metric.name, metric.value, metric.source) for metric in ran.counters] == [
        ("sm_active", pytest.approx(70), "gpm")
    ]
    assert (ran.time_us, ran.reason, ran.call) == (7.0, None, MM)
    assert (refused.counters, refused.reason, refused.time_us) == ((), "no", None)
    assert (late.counters, late.reason) == ((), "no window of the counters fell inside")
    assert sampler.states == ["device 3", "start", "stop"]


def test_a_device_without_counters_says_so(sampler: type[Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"gpm": "the device offers no GPM counters; they exist from Hopper on"}
    monkeypatch.setattr(sampler, "recording", Recording(device="NVIDIA A100", missing=missing))
    monkeypatch.setattr(replaying, "run_calls", lambda *_, **__: [RAN])
    (found,) = replaying.replay([MM])
    assert (found.counters, found.reason, found.time_us) == ((), missing["gpm"], 40.0)


def test_sampling_ends_with_the_child(sampler: type[Sampler], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ScriptError("no")

    monkeypatch.setattr(replaying, "run_calls", fail)
    with pytest.raises(ScriptError):
        replaying.replay([MM])
    assert sampler.states[-1] == "stop"


def test_nothing_to_replay_starts_nothing(sampler: type[Sampler]) -> None:
    assert replaying.replay([], interpreter="/nowhere/python") == ()
    assert sampler.states == []


# ------------------------------------------------------------------------------------------------------- Nsight Compute

LAMBDA = "at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (
            f"void at::native::vectorized_elementwise_kernel<4, {LAMBDA}::operator()() const>(int, {LAMBDA})",
            "vectorized_elementwise_kernel",
        ),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*, int)", "cunn_SoftMaxForward"),
        ("(anonymous namespace)::softmax_warp_forward", "softmax_warp_forward"),
        ("void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm>(cutlass_75::Params)", "Kernel2"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(cublasGemvParamsEx<int>)", "kernel"),
        ("ncclDevKernel_AllReduce_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_RING_LL"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("void scan<float, std::plus<float> >(float) [clone .kd]", "scan"),
        ("odd->name", "odd->name"),
        ("", ""),
    ],
)
def test_the_function_of_a_kernel(kernel: str, name: str) -> None:
    assert ncu.function_name(kernel) == name


def test_functions_of_recorded_kernels() -> None:
    """No name of a function has brackets or blanks, and the profiler's pattern takes each of them whole."""
    for path in (SAMPLE, DATA / "h200_operators" / "operators.json.gz"):
        table = read_table(path, 1)
        kernels = sorted(set(table.named(table.activities.name[table.activities.kind == 0])))
        line = ncu.command("ncu", kernels, Path("log"))
        pattern = re.compile(line[line.index("--kernel-name") + 1].removeprefix("regex:"))
        for kernel in kernels:
            name = ncu.function_name(kernel)
            assert re.fullmatch(r"[\w$]+", name), kernel
            assert pattern.fullmatch(name) and not pattern.fullmatch(f"{name}2x")


def test_the_command_line() -> None:
    line = ncu.command("/opt/ncu", ["void b<int>(int)", "a", "a", "c.d", ""], Path("page.csv"))
    assert line[:6] == ["/opt/ncu", "--csv", "--page", "raw", "--log-file", "page.csv"]
    options = dict(pairwise(line))
    assert options["--kernel-name"] == r"regex:^(a|b|c\.d)$"
    assert options["--kernel-name-base"] == "function"
    assert (options["--clock-control"], options["--profile-from-start"]) == ("none", "off")
    assert int(options["--launch-count"]) == ncu.LAUNCHES
    assert line[-2] == "--metrics" and set(line[-1].split(",")) == set(ncu.METRICS)


ALLOWED = DATA / "ncu" / "ncu_attention_raw.csv"
FORBIDDEN = """\
==PROF== Connected to process 1046 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
"""
NOTHING = (
    "==PROF== Connected to process 7\n==PROF== Disconnected from process 7\n==WARNING== No kernels were profiled.\n"
)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (FORBIDDEN, r"forbids its counters to users \(ERR_NVGPUCTRPERM\): ask .* or use --replay"),
        (NOTHING, "Nsight Compute recorded no kernel: ==WARNING== No kernels were profiled."),
        ("", "Nsight Compute recorded no kernel: it printed nothing"),
        (None, "Nsight Compute recorded no kernel: it printed nothing"),
    ],
)
def test_a_log_without_kernels(tmp_path: Path, said: str | None, words: str) -> None:
    log = tmp_path / "page.csv"
    if said is not None:
        log.write_text(said, encoding="utf-8")
    with pytest.raises(ScriptError, match=words):
        ncu.check(log)


def test_recorded_pages_pass() -> None:
    ncu.check(ALLOWED)
    assert len(read_ncu(ALLOWED)) == 20


@pytest.fixture
def profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that puts an `ncu` on the path: it writes a page as its log and runs the program, or does not."""

    def install(page: str, runs: bool = True, first: str = "") -> None:
        (tmp_path / "page").write_text(page, encoding="utf-8")
        after = 'while [ "$1" != --metrics ]; do shift; done; shift 2; exec "$@"' if runs else "exit 9"
        script = f"#!/bin/sh\n{first}\ncp '{tmp_path}/page' \"$5\"\n{after}\n"
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "ncu").write_text(script, encoding="utf-8")
        (tmp_path / "bin" / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")

    return install


def test_calls_under_the_profiler(profiler: Callable[..., None], interpreter: Make, tmp_path: Path) -> None:
    profiler(ALLOWED.read_text(encoding="utf-8"))
    log = tmp_path / "ncu.csv"
    ncu.profile_calls([MM], ["kernel"], log, tmp_path, interpreter=interpreter("[{}]"))
    assert len(read_ncu(log)) == 20
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["once"] is True


def test_a_machine_that_forbids_counters_says_so_whatever_became_of_the_calls(
    profiler: Callable[..., None], interpreter: Make, tmp_path: Path
) -> None:
    for runs in (True, False):
        profiler(FORBIDDEN, runs=runs)
        with pytest.raises(ScriptError, match="forbids its counters"):
            ncu.profile_calls([MM], ["kernel"], tmp_path / "ncu.csv", tmp_path, interpreter=interpreter("[{}]"))


def test_calls_that_fail_under_the_profiler_show_why(
    profiler: Callable[..., None], interpreter: Make, tmp_path: Path
) -> None:
    profiler(NOTHING)
    python = interpreter(None, status=1, error="RuntimeError: CUDA out of memory\n")
    with pytest.raises(ScriptError, match="cannot be replayed: RuntimeError: CUDA out of memory"):
        ncu.profile_calls([MM], ["kernel"], tmp_path / "ncu.csv", tmp_path, interpreter=python)


def test_a_step_of_the_script_under_the_profiler(
    profiler: Callable[..., None], interpreter: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler(ALLOWED.read_text(encoding="utf-8"))
    spec = Spec(script="train.py", argv=(), root=".", out=str(tmp_path / "work"), plan=ncu.PLAN, options={"warmup": 2})
    ncu.profile_script(spec, ["kernel"], tmp_path / "ncu.csv", interpreter=interpreter(None))
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == ["-m", "advisor.capture.child", str(tmp_path / "work" / "spec.json")]
    assert Spec.load(tmp_path / "work" / "spec.json").options == {"warmup": 2}
    monkeypatch.setattr(ncu, "SECONDS", 0.2)
    profiler("", first="exec sleep 60")
    with pytest.raises(ScriptError, match=r"a step under Nsight Compute did not end within 0\.2 s"):
        ncu.profile_script(spec, ["kernel"], tmp_path / "ncu.csv", interpreter=interpreter(None))


def test_without_nsight_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"ncu is not on PATH: install Nsight Compute .*, or use --replay"):
        ncu.find_ncu()


def test_one_warm_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))

    class Session:
        spec = Spec(script="", argv=(), root="", out="", plan=ncu.PLAN, options={"warmup": 2})

        def stop(self) -> None:
            said.append("end of the script")

    module, _, name = ncu.PLAN.partition(":")
    assert (module, name) == (counted.__name__, counted.CountedPlan.__name__)
    plan = counted.CountedPlan()
    plan.session = Session()
    plan.start()
    for step in range(4):
        said.append(f"step {step}")
        plan.step_end(step)
    marks = ["synchronize", "start", "step 3", "synchronize", "stop", "end of the script"]
    assert said == ["step 0", "step 1", "step 2", *marks]


# ------------------------------------------------------------------------------------------------------------ calibrate


def test_rates_of_the_host() -> None:
    """A few GFLOP/s at least, a few TB/s at most; a GPU would be asked for every dtype."""
    found = calibrate.measure_rates()
    assert list(found["measured_flops"]) == (["bfloat16", "float32"] if torch.cuda.is_available() else ["float32"])
    assert 1e8 < found["measured_flops"]["float32"] < 1e15
    assert 1e8 < found["measured_bandwidth"] < 2e13


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has a GPU to measure")
def test_without_a_gpu_nothing_is_measured() -> None:
    assert calibrate.describe() == {"device": None, "torch": torch.__version__}


def test_the_dtypes_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, names in ((7, ["float16", "float32"]), (9, ["float16", "bfloat16", "tfloat32", "float32"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert [name for name, _, _ in calibrate._dtypes(True, True)] == names
    assert [name for name, _, _ in calibrate._dtypes(True, False)] == ["bfloat16", "float32"]


def test_the_precision_of_the_script_is_left_as_it_was() -> None:
    before = torch.get_float32_matmul_precision()
    for wanted in ("high", None):
        with calibrate._precision(wanted):
            assert torch.get_float32_matmul_precision() == (wanted or before)
    assert torch.get_float32_matmul_precision() == before


def test_the_module_prints_what_it_found() -> None:
    if torch.cuda.is_available():
        pytest.skip("it measures a GPU for a minute")
    done = subprocess.run(
        [sys.executable, "-m", "advisor.capture.calibrate"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"device": None, "torch": torch.__version__}
