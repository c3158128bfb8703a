"""Counters beside a trace: of Nsight Compute, DCGM and nvidia-smi, of a run, and of kernels and operators alone."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
from functools import cache
from pathlib import Path

import pytest
from made_traces import BF16, FLOAT, GEMM, POINTWISE, Loop

from advisor import singles
from advisor.besides import of_run, with_counters
from advisor.capture.counters import Recording, summarise
from advisor.capture.replaying import RecordedCall, Replayed
from advisor.columns.table import Table
from advisor.errors import ArtifactError, UsageError
from advisor.fileprofile import machine_of, profile_of
from advisor.ingest.ncu import read_ncu
from advisor.ingest.reader import read_table
from advisor.measured import Cost, FileProfile
from advisor.model import Metric

ROOT = Path(__file__).parents[1]
DATA, SAMPLE = ROOT / "tests" / "data", ROOT / "samples" / "nano_gpt" / "h200"
OPERATORS = DATA / "h200_operators"
T4 = DATA / "dcgm" / "k8sconf-t4-busy.prom.txt"
HEADER = "ID,Process ID,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC".replace(",", '","')
ACTIVE = "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"


@cache
def sample() -> tuple[Table, FileProfile]:
    """Two steps of the sample on an H200."""
    return singles.look(SAMPLE / "trace.json.gz")


@cache
def operators() -> tuple[Table, FileProfile]:
    """Ninety-one operators on an H200."""
    return singles.look(OPERATORS / "operators.json.gz")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """What Nsight Compute said of the same operators."""
    path = tmp_path / "ncu.csv"
    path.write_bytes(gzip.decompress((OPERATORS / "ncu.csv.gz").read_bytes()))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder as `advisor optimize` leaves it, without its reports."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("trace.json.gz", "capture.json", "probe.json", "singles.json"):
        shutil.copyfile(SAMPLE / name, folder / name)
    (folder / "counters.json").write_bytes(gzip.decompress((SAMPLE / "counters.json.gz").read_bytes()))
    return folder


def made(loop: Loop, folder: Path) -> tuple[Table, FileProfile]:
    path = loop.save(folder / "trace.json")
    table = read_table(path, 1)
    return table, profile_of(path, table, machine_of(table, None, None))


def page_of(*launches: tuple[str, str, str]) -> str:
    """A raw page: kernel, grid and percentage of cycles in which multiprocessors were active."""
    lines = [f'"{HEADER}","{ACTIVE}"\n', '"","","","","","","","","","%"\n']
    lines += [
        f'"{number}","1","{name}","1","7","(128, 1, 1)","{grid}","0","9.0","{percent}"\n'
        for number, (name, grid, percent) in enumerate(launches)
    ]
    return "".join(lines)


def values(metrics: tuple[Metric, ...]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


# ------------------------------------------------------------------------------------------------------- Nsight Compute


def test_kernels_have_the_counters_of_their_launches(page: Path) -> None:
    """The mean over the launches of one kernel, here from the bare page where the names are the same."""
    table, profile = operators()
    found = with_counters(profile, table, [page])
    kernels = [cost for cost in found.costs if cost.kind == "kernel"]
    assert len(kernels) >= 40 and all(cost.counters for cost in kernels)
    assert {metric.source for cost in kernels for metric in cost.counters} == {"ncu"}
    launches = read_ncu(page)
    same = [cost for cost in kernels if any(kernel.name == cost.name for kernel in launches)]
    assert len(same) > 10  # the two profilers demangle some names differently
    for cost in same:
        mine = [kernel for kernel in launches if kernel.name == cost.name]
        for name in ("sm_active", "achieved_occupancy", "tensor_active"):
            seen = [value for kernel in mine if (value := kernel.value(name)) is not None]
            assert values(cost.counters)[name] == pytest.approx(sum(seen) / len(seen))
    assert all(not cost.counters for cost in found.costs if cost.kind != "kernel")
    assert [dataclasses.replace(cost, counters=()) for cost in found.costs] == list(profile.costs)
    assert found.notes[:-1] == profile.notes
    assert found.notes[-1].startswith("Nsight Compute: 184 of 184 launches in ncu.csv are in this trace")


def test_occupancy_agrees_with_what_was_counted(page: Path) -> None:
    """Ours is from registers, threads and shared memory: a kernel can come near it and not above.

    Multiprocessors without a block count in ours and not in Nsight Compute's: launches with few blocks are left out.
    """
    table, profile = operators()
    pairs = [
        (cost.occupancy_percent, values(cost.counters)["achieved_occupancy"])
        for cost in with_counters(profile, table, [page]).costs
        if cost.kind == "kernel" and cost.occupancy_percent is not None and cost.limiter != "grid"
    ]
    assert len(pairs) >= 25
    assert all(counted <= ours + 3 for ours, counted in pairs)


def test_a_page_of_other_kernels_is_noted(tmp_path: Path) -> None:
    table, profile = operators()
    path = tmp_path / "other.csv"
    path.write_text(page_of(("elsewhere", "(1, 1, 1)", "50")), encoding="utf-8")
    found = with_counters(profile, table, [path])
    assert found.costs == profile.costs
    assert found.notes[-1] == (
        "0 of the 1 launches in other.csv are in this trace by name, grid and block: it is of another run, and its "
        "counters are left out"
    )


def test_a_damaged_page_is_refused(page: Path) -> None:
    table, profile = operators()
    page.write_text(page.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"ncu\.csv"):
        with_counters(profile, table, [page])


# ------------------------------------------------------------------------------------------------------ whole devices


def test_counters_of_a_device_stand_for_the_whole_run(page: Path, tmp_path: Path) -> None:
    table, profile = operators()
    with pytest.raises(UsageError, match="is of a Tesla T4, the trace of a NVIDIA H200"):
        with_counters(profile, table, [T4])
    scrape = tmp_path / "scrape.txt"
    scrape.write_text(T4.read_text(encoding="utf-8").replace("Tesla T4", "NVIDIA H200"), encoding="utf-8")
    found = with_counters(profile, table, [scrape, page])
    assert values(found.counters)["tensor_active"] == 0.5822
    assert {metric.source for metric in found.counters} == {"dcgm"}
    assert any(cost.counters for cost in found.costs)


def test_files_of_several_devices_do_not_say_which(tmp_path: Path) -> None:
    table, profile = operators()
    path = tmp_path / "two.txt"
    lines = [f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",UUID="GPU-{gpu}"}} 90\n' for gpu in range(2)]
    path.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(UsageError, match=r"two\.txt holds the counters of 2 GPUs .*: keep the lines of that one"):
        with_counters(profile, table, [path])


def test_what_holds_no_counters_is_refused(tmp_path: Path) -> None:
    table, profile = operators()
    path = tmp_path / "notes.txt"
    path.write_text("nothing here\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match="holds no counters of a GPU"):
        with_counters(profile, table, [path])
    with pytest.raises(UsageError, match=r"^gone\.txt cannot be read: No such file or directory$"):
        with_counters(profile, table, [tmp_path / "gone.txt"])


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_brings_its_counters(run: Path) -> None:
    """Those sampled while the timed steps ran, not those of start-up: a mean over all samples is far lower."""
    _, profile = sample()
    found = of_run(profile, run / "trace.json.gz")
    recording = Recording.load(run / "counters.json")
    begin, end = json.loads((run / "capture.json").read_text(encoding="utf-8"))["timed_s"]
    inside = [item for item in recording.samples if begin <= item.begin_s and item.end_s <= end]
    assert 20 < len(inside) < len(recording.samples) / 2
    time = sum(item.end_s - item.begin_s for item in inside)
    for name, value in values(found.counters).items():
        mean = sum(item.values[name] * (item.end_s - item.begin_s) for item in inside) / time
        assert value == pytest.approx(mean)
    seen = values(found.counters)
    assert (seen["sm_active"], seen["tensor_active"]) == (pytest.approx(97.6, abs=0.2), pytest.approx(17.1, abs=0.5))
    assert values(summarise(recording.samples, 0, math.inf))["sm_active"] < seen["sm_active"] - 10
    assert found.notes == ()


def test_a_run_brings_counters_of_kernels_and_operators_alone(run: Path) -> None:
    _, profile = sample()
    found = of_run(profile, run / "trace.json.gz")
    stored = json.loads((run / "singles.json").read_text(encoding="utf-8"))
    shown = {(cost.kind, cost.title): values(cost.counters) for cost in found.costs if cost.counters}
    assert shown == {
        (item["kind"], item["name"]): {metric["name"]: metric["value"] for metric in item["counters"]}
        for item in stored
    }
    head = shown["operator", "aten::mm [16384, 2048] x [2048, 50257] bfloat16"]
    assert head["tensor_active"] == pytest.approx(20.3, abs=0.1)  # METRICS.md


def test_a_trace_that_is_not_a_runs_has_no_counters(run: Path) -> None:
    _, profile = sample()
    assert of_run(profile, run / "annotated.json.gz") == profile
    for name in ("counters.json", "singles.json"):
        (run / name).unlink()
    assert of_run(profile, run / "trace.json.gz") == profile


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("counters.json", "{", "counters.json has another form"),
        ("counters.json", '{"schema": 99, "samples": []}', "counters.json is of another schema"),
        ("capture.json", "[", "capture.json is truncated or no JSON"),
        ("capture.json", '{"timed_s": "long"}', "capture.json has another form"),
        ("singles.json", '{"kind": 3}', "singles.json has another form"),
        ("singles.json", "[{", "singles.json is truncated or no JSON"),
    ],
)
def test_a_damaged_file_of_a_run_is_noted_and_the_rest_is_kept(run: Path, name: str, text: str, words: str) -> None:
    _, profile = sample()
    (run / name).write_text(text, encoding="utf-8")
    found = of_run(profile, run / "trace.json.gz")
    (note,) = found.notes
    assert note.startswith(f"counters of the run are left out: {words}")
    assert bool(found.counters) == (name == "singles.json")
    assert any(cost.counters for cost in found.costs) == (name != "singles.json")


@pytest.mark.parametrize("window", [[], [3.0], [5.0, 1.0], [math.nan, math.nan]])
def test_a_run_that_was_not_timed_has_no_counters(run: Path, window: list[float]) -> None:
    _, profile = sample()
    (run / "capture.json").write_text(json.dumps({"timed_s": window}), encoding="utf-8")
    found = of_run(profile, run / "trace.json.gz")
    assert (found.counters, found.notes) == ((), ())


def test_what_is_no_number_is_left_out(run: Path) -> None:
    _, profile = sample()
    document = json.loads((run / "counters.json").read_text(encoding="utf-8"))
    for item in document["samples"]:
        item["values"] |= {"power": math.nan, "tensor_active": math.inf}
    (run / "counters.json").write_text(json.dumps(document), encoding="utf-8")
    found = of_run(profile, run / "trace.json.gz")
    assert found.counters and not {"power", "tensor_active"} & values(found.counters).keys()


# ------------------------------------------------------------------------------------------ which kernels and operators


def test_those_with_most_recoverable_time_are_asked_for() -> None:
    _, profile = sample()
    for kind, count in (("kernel", singles.KERNELS), ("operator", singles.OPERATORS)):
        chosen = singles.top(profile, kind, count)
        gains = [cost.recoverable_us or 0 for cost in chosen]
        assert len(chosen) == count and gains == sorted(gains, reverse=True)
        rest = [cost.recoverable_us or 0 for cost in profile.costs if cost.kind == kind and cost not in chosen]
        assert max(rest) <= gains[-1]


def test_the_recorded_call_of_an_operator() -> None:
    table, profile = sample()
    (head,) = [cost for cost in profile.costs if cost.title == "aten::mm [16384, 2048] x [2048, 50257] bfloat16"]
    assert singles.recorded_calls(table, [head])[0] == RecordedCall(
        name="aten::mm",
        shapes=((16384, 2048), (2048, 50257)),
        dtypes=("bfloat16", "bfloat16"),
        strides=((2048, 1), (1, 2048)),  # the weight is stored the other way round
        concrete=("", ""),
    )
    absent = Cost(kind="operator", name="aten::mm", shapes="[1, 1] x [1, 1] bfloat16", count=1, time_us=1)
    assert singles.recorded_calls(table, [absent]) == [None]


def test_the_longest_of_the_calls_behind_one_operator(tmp_path: Path) -> None:
    """A copy into float32 is called the same whatever it is a copy of."""
    loop = Loop()
    for dtype, us in (("long int", 10.0), (BF16, 60.0), (FLOAT, 40.0)):
        loop.call("aten::copy_", [[64], [64], []], [FLOAT, dtype, "Scalar"], "copy_kernel", us)
    table, profile = made(loop, tmp_path)
    (cost,) = [cost for cost in profile.costs if cost.kind == "operator"]
    assert cost.time_us == 110
    (call,) = singles.recorded_calls(table, [cost])
    assert call is not None and call.dtypes == ("float32", "bfloat16", "")


def test_calls_that_launch_the_kernels() -> None:
    table, profile = sample()
    names = [cost.name for cost in singles.top(profile, "kernel", 3)]
    calls = singles.launching(table, names)
    assert [call.name for call in calls] == ["aten::masked_fill_", "aten::mm", "aten::copy_"]


def test_a_kernel_without_an_operator_is_launched_by_no_call(tmp_path: Path) -> None:
    loop = Loop()
    loop.kernel("bare", 10.0)
    loop.call("aten::cat", [[[4], [4]], []], ["TensorList", "Scalar"], "cat_kernel", 10.0)
    loop.mm(8, 8, 8, 10.0)
    table, _ = made(loop, tmp_path)
    assert [call.name for call in singles.launching(table, ["bare", "cat_kernel", GEMM, GEMM])] == ["aten::mm"]


# ------------------------------------------------------------------------------------------------ what was said of them


def test_what_nsight_compute_did_not_see_has_its_reason(page: Path) -> None:
    table, profile = operators()
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    page.write_text("".join(lines[:23]), encoding="utf-8")  # the first twenty launches
    found = singles.counted(table, profile, [page])
    assert [item.name for item in found] == [cost.name for cost in singles.top(profile, "kernel", singles.KERNELS)]
    assert all(bool(item.counters) == (item.reason is None) for item in found)
    reasons = {item.reason for item in found}
    assert reasons == {None, "Nsight Compute saw no launch of it"}
    assert all(item.reason for item in singles.counted(table, profile, []))


def test_replayed_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One answer per operator in their order; what hides its sizes in a list is not asked for."""
    loop = Loop()
    loop.mm(64, 64, 64, 300.0)
    loop.call("aten::cat", [[[4], [4]], []], [FLOAT, "Scalar"], "cat_kernel", 200.0)
    loop.add(64, 100.0)
    table, profile = made(loop, tmp_path)
    asked: list[RecordedCall] = []
    counters = (Metric(name="sm_active", value=50.0, unit="%", source="gpm"),)

    def replay(calls: list[RecordedCall], *, interpreter: str) -> tuple[Replayed, ...]:
        asked.extend(calls)
        assert interpreter == "python"
        return (Replayed(call=calls[0], time_us=1.0, counters=counters), Replayed(call=calls[1], reason="no queue"))

    monkeypatch.setattr(singles, "replay", replay)
    found = singles.replayed(table, profile, "python")
    assert [call.name for call in asked] == ["aten::mm", "aten::add"]
    listed = "its inputs are lists of tensors, which are not recorded one by one"
    said = {item.name.split()[0]: (item.counters, item.reason, item.time_us) for item in found}
    assert said == {
        "aten::mm": (counters, None, 300.0),
        "aten::cat": ((), listed, 200.0),
        "aten::add": ((), "no queue", 100.0),
    }


def test_nothing_to_replay_starts_nothing(tmp_path: Path) -> None:
    loop = Loop()
    loop.kernel("bare", 10.0)
    table, profile = made(loop, tmp_path)
    assert singles.replayed(table, profile, "/nowhere/python") == ()


def test_kernels_are_joined_by_name_grid_and_block(tmp_path: Path) -> None:
    """Two launches of one name and size count for the kernel, one of another grid does not."""
    loop = Loop()
    for _ in range(2):
        loop.add(1024, 10.0, grid=[8, 1, 1], block=[128, 1, 1])
    table, _ = made(loop, tmp_path)
    rows = [(POINTWISE, "(8, 1, 1)", "40"), (POINTWISE, "(8, 1, 1)", "60"), (POINTWISE, "(9, 1, 1)", "99")]
    path = tmp_path / "ncu.csv"
    path.write_text(page_of(*rows), encoding="utf-8")
    (found,) = singles.kernel_counters(table, [path]).by_name.values()
    assert values(found)["sm_active"] == 50
