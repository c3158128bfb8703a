"""Files, folders of ranks and runs: what is a trace, what is refused; order, cache and processes do not matter."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import ALL_REDUCE, BF16, H200, Loop, loops, training

from advisor import survey as module
from advisor.errors import AdvisorError, ArtifactError, UsageError
from advisor.ingest.reader import read_table
from advisor.measured import Survey
from advisor.survey import Options, analyze_file, survey

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "data" / "corpus" / "traces"
SAMPLE = ROOT / "samples" / "nano_gpt" / "h200"
ALONE = Options(workers=1)


def seen(paths: list[Path], **options: Any) -> Survey:
    return survey(paths, Options(workers=1, **options))


def moved(found: Survey) -> Survey:
    """The survey without what names the files."""
    files = tuple(dataclasses.replace(file, path="") for file in found.files)
    ranks = found.ranks
    if ranks is not None:
        ranks = dataclasses.replace(ranks, ranks=tuple(dataclasses.replace(each, path="") for each in ranks.ranks))
    return dataclasses.replace(found, files=files, ranks=ranks)


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Path]:
    """A function that makes the folder of a run, with everything that one may hold."""

    def make(name: str) -> Path:
        folder = tmp_path / "runs" / name
        (folder / "trials").mkdir(parents=True)
        for file in ("trace.json.gz", "annotated.json.gz", "capture.json", "probe.json", "singles.json", "env.json"):
            shutil.copyfile(SAMPLE / file, folder / file)
        for file in ("counters.json", "graph.json"):
            (folder / file).write_bytes(gzip.decompress((SAMPLE / f"{file}.gz").read_bytes()))
        for file in ("run.json", "report.json", "verdicts.json", "patch.json", "trials/0123.json"):
            (folder / file).write_text("{}", encoding="utf-8")
        shown = folder / "tensorboard" / name / "rank_0.pt.trace.json.gz"
        shown.parent.mkdir(parents=True)
        os.link(folder / "trace.json.gz", shown)
        return folder

    return make


# ------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_of_ranks_comes_in_the_order_of_ranks() -> None:
    found = seen([CORPUS / "param-dlrm8"])
    assert [file.rank for file in found.files] == list(range(8))
    assert {file.world_size for file in found.files} == {8}
    assert all(file.status == "ok" for file in found.files)


def test_a_run_is_one_trace_with_its_counters(run: Callable[[str], Path]) -> None:
    folder = run("20261129-101500-3f2a")
    (file,) = seen([folder]).files
    assert file.path == str(folder / "trace.json.gz")
    assert {metric.name for metric in file.counters} >= {"sm_active", "sm_occupancy", "tensor_active", "dram_active"}
    assert {metric.source for metric in file.counters} == {"gpm", "nvml"}
    kinds = {cost.kind for cost in file.costs if cost.counters}
    assert kinds == {"kernel", "operator"}


def test_a_folder_of_runs_has_each_run_once(run: Callable[[str], Path], tmp_path: Path) -> None:
    names = ("20261129-101500-3f2a", "20261130-090000-aaaa")
    folders = [run(name) for name in names]
    failed = tmp_path / "runs" / "20261130-100000-bbbb"  # the script raised: nothing was recorded
    failed.mkdir()
    for file in ("run.json", "env.json"):
        (failed / file).write_text("{}", encoding="utf-8")
    (failed / "output.log").write_text("RuntimeError\n", encoding="utf-8")
    found = seen([tmp_path / "runs"])
    assert [file.path for file in found.files] == [str(folder / "trace.json.gz") for folder in folders]
    with pytest.raises(UsageError, match="no trace"):
        seen([failed])


def test_what_tensorboard_is_given_can_be_analyzed_alone(run: Callable[[str], Path]) -> None:
    folder = run("20261129-101500-3f2a")
    (file,) = seen([folder / "tensorboard"]).files
    assert file.path.endswith("rank_0.pt.trace.json.gz")
    (original,) = seen([folder]).files
    plain = dataclasses.replace(original, path=file.path, counters=(), costs=file.costs)
    assert file == plain


def test_a_folder_that_is_called_tensorboard_is_a_folder(tmp_path: Path) -> None:
    """As users call theirs: torch.profiler.tensorboard_trace_handler("tensorboard/resnet")."""
    folder = tmp_path / "tensorboard" / "resnet"
    folder.mkdir(parents=True)
    training().save(folder / "worker0.pt.trace.json")
    for path in (tmp_path, tmp_path / "tensorboard", folder):
        assert [file.status for file in seen([path]).files] == ["ok"]


def test_files_named_run_json_make_no_run(tmp_path: Path) -> None:
    training().save(tmp_path / "run.json")
    training().save(tmp_path / "other.json")
    assert [file.status for file in seen([tmp_path]).files] == ["ok", "ok"]


def test_a_mixed_folder_refuses_what_is_none(tmp_path: Path) -> None:
    training().save(tmp_path / "good.json")
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "packed.json.gz").write_bytes(gzip.compress(json.dumps(training().document()).encode()))
    (tmp_path / "config.json").write_text('{"lr": 0.1}', encoding="utf-8")
    (tmp_path / "list.json").write_text("[1, 2]", encoding="utf-8")
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    (tmp_path / "empty.json").write_text("", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no trace", encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    found = {Path(file.path).name: file for file in seen([tmp_path]).files}
    assert {name: file.status for name, file in found.items()} == {
        "good.json": "ok",
        "packed.json.gz": "ok",
        **dict.fromkeys(("config.json", "list.json", "text.json", "empty.json"), "refused"),
    }
    for file in found.values():
        if file.status == "refused":
            assert file.reason and (file.kernels, file.busy_us, file.mfu) == (None, None, None)
            assert "Traceback" not in file.reason and len(file.reason) < 300


def test_files_without_a_rank_follow_those_with_one(tmp_path: Path) -> None:
    for name, rank in (("a", None), ("b", 3), ("c", 0), ("d", None), ("e", 3)):
        more = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4}}
        training(1).save(tmp_path / f"{name}.json", **more)
    found = seen([tmp_path])
    assert [Path(file.path).stem for file in found.files] == ["c", "b", "e", "a", "d"]


@pytest.mark.parametrize("what", ["missing", "empty", "folder of folders", "broken link"])
def test_nothing_to_analyze(tmp_path: Path, what: str) -> None:
    path = tmp_path / "given"
    if what == "broken link":
        path.symlink_to(tmp_path / "gone")
    elif what != "missing":
        (path / "inner").mkdir(parents=True)
    words = "does not exist" if what in ("missing", "broken link") else "no trace"
    with pytest.raises(UsageError, match=words) as raised:
        seen([path])
    assert raised.value.exit_status == 2
    assert str(raised.value).endswith("give a trace, a folder of ranks or a run folder")


def test_counters_are_those_of_one_recording(tmp_path: Path) -> None:
    for name in ("a", "b"):
        training(1).save(tmp_path / f"{name}.json")
    text = tmp_path / "counters.txt"
    text.write_text('DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0"} 90\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"^--counters belong to one recording, 2 are given: analyze that one alone$"):
        seen([tmp_path], counters=(text,))
    (file,) = seen([tmp_path / "a.json"], counters=(text,)).files
    assert [(metric.name, metric.value) for metric in file.counters] == [("gpu_utilisation", 90)]


@pytest.mark.parametrize("peak", [0.0, -1e15, float("nan"), float("inf")])
def test_a_peak_that_is_none_is_refused(tmp_path: Path, peak: float) -> None:
    with pytest.raises(UsageError, match="is none: give the dense peak"):
        seen([training(1).save(tmp_path / "a.json")], peak_flops=peak)


# ---------------------------------------------------------------------------------------------------------- damaged


def test_a_file_that_ends_early_says_what_is_whole(tmp_path: Path) -> None:
    text = json.dumps(training(3).document())
    path = tmp_path / "cut.json"
    path.write_text(text[: text.rindex("ProfilerStep#2")], encoding="utf-8")
    (file,) = seen([path]).files
    assert (file.status, file.steps, file.kernels) == ("partial", 2, 12)
    assert file.reason is not None
    assert file.reason.startswith("truncated: the text ends inside the list of events")
    assert file.reason.endswith("; what is whole was read")
    assert file.kernel_us == 2400


@pytest.mark.parametrize(("count", "noun"), [(1, "1 event"), (2, "2 events")])
def test_events_that_cannot_be_read_are_counted(tmp_path: Path, count: int, noun: str) -> None:
    loop = training(2)
    for _ in range(count):
        loop.events.append({"ph": "X", "cat": "kernel", "name": 5, "ts": "soon", "dur": [], "args": {}})
    (file,) = seen([loop.save(tmp_path / "odd.json")]).files
    assert (file.status, file.reason) == ("partial", f"{noun} could not be read; what is whole was read")
    assert file.kernels == 8


def test_events_without_work_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    events = [{"ph": "X", "cat": "gpu_op", "name": "Conv2D", "ts": 1, "dur": 2, "pid": 1, "tid": 1}] * 3
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    (file,) = seen([path]).files
    assert (file.status, file.events) == ("refused", 3)
    assert file.reason == (
        "none of its events is an operator, a launch or a kernel: give a trace that torch.profiler exported"
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_cut_raises(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut anywhere, packed or not: what is said is partial or refused, or nothing but the closing brackets was lost."""
    text = json.dumps(training(2).document()).encode()
    packed = data.draw(st.booleans())
    stored = gzip.compress(text, mtime=0) if packed else text
    path = tmp_path_factory.getbasetemp() / f"cut.json{'.gz' if packed else ''}"
    path.write_bytes(stored[: data.draw(st.integers(0, len(stored) - 1))])
    (file,) = seen([path]).files
    assert file.status in ("partial", "refused")
    assert file.reason and (file.status == "refused" or "truncated" in file.reason)


def test_a_refused_file_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside each other in processes of their own."""
    monkeypatch.setattr(module, "BESIDE_FROM_BYTES", 0)
    training(1).save(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("nothing", encoding="utf-8")
    found = survey([tmp_path], Options(workers=2))
    assert [(Path(file.path).name, file.status) for file in found.files] == [
        ("bad.json", "refused"),
        ("good.json", "ok"),
    ]


def test_a_damaged_run_does_not_end_the_others(
    run: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BESIDE_FROM_BYTES", 0)
    for name in ("20261129-101500-3f2a", "20261130-090000-aaaa"):
        run(name)
    (tmp_path / "runs" / "20261130-090000-aaaa" / "counters.json").write_text("{", encoding="utf-8")
    first, second = survey([tmp_path / "runs"], Options(workers=2)).files
    assert first.counters and not first.notes
    assert not second.counters and "counters.json" in second.notes[0]
    assert first.mfu == second.mfu is not None


# -------------------------------------------------------------------------------------------- order, processes, cache


def test_ranks_in_any_order_say_the_same() -> None:
    paths = sorted((CORPUS / "param-dlrm8").iterdir())
    first = seen([paths[0].parent])
    assert seen(random.Random(1).sample(paths, len(paths))) == first


def test_processes_and_cache_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, one per file, columns kept and columns found again."""
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    paths = [CORPUS / name for name in ("tracelens-h100-vit-nsfw.json.gz", "hta-a100-alexnet-bench.json.gz")]
    paths.append(SAMPLE / "trace.json.gz")
    store = tmp_path / "store"
    first = survey(paths, ALONE)
    kept = seen(paths, store=store)
    assert len(list(store.iterdir())) == len(paths)
    monkeypatch.setattr(module, "read_table", lambda *_: pytest.fail("it was read again"))
    again = seen(paths, store=store)
    monkeypatch.undo()
    monkeypatch.setattr(module, "BESIDE_FROM_BYTES", 0)
    beside = survey(paths, Options(workers=2))
    assert first == kept == again == beside


def test_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    path, store = tmp_path / "trace.json", tmp_path / "store"
    training(2).save(path)
    assert seen([path], store=store).files[0].steps == 2
    training(3).save(path)
    assert seen([path], store=store).files[0].steps == 3


def test_a_small_file_is_not_kept(tmp_path: Path) -> None:
    store = tmp_path / "store"
    seen([training(2).save(tmp_path / "trace.json")], store=store)
    assert not store.exists()


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = training(2).save(tmp_path / "trace.json")
    assert seen([path], store=tmp_path / "file" / "store") == seen([path])


def test_packing_and_form_do_not_matter(tmp_path: Path) -> None:
    """Plain, packed, indented, and a bare list of events, which names no device."""
    document = training(2).document()
    texts = [json.dumps(document), json.dumps(document, indent=1), json.dumps({**document, "more": {"deep": [1, 2]}})]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text, encoding="utf-8")
        (tmp_path / f"{number}.json.gz").write_bytes(gzip.compress(text.encode()))
    found = [moved(seen([path])) for path in sorted(tmp_path.iterdir())]
    assert all(each == found[0] for each in found)
    (tmp_path / "bare.json").write_text(json.dumps(document["traceEvents"]), encoding="utf-8")
    (bare,) = seen([tmp_path / "bare.json"]).files
    (whole,) = found[0].files
    assert (bare.device, bare.mfu) == (None, None)
    assert (bare.kernel_us, bare.device_step_us) == (whole.kernel_us, whole.device_step_us)


@pytest.mark.parametrize(
    "name",
    [
        "tracelens-h100-vit-nsfw.json.gz",
        "hta-mi250-toy-train.json.gz",
        "kineto-gpu-metrics-input.json",
        "hta-a100-event-sync.json.gz",
        "hta-gp100-sgd-10steps.json.gz",
        "tracelens-mi300-torch-compile.json.gz",
        "param-dlrm8/rank3.pt.trace.json.gz",
    ],
)
def test_the_order_of_recorded_events_does_not_matter(tmp_path: Path, name: str) -> None:
    stored = (CORPUS / name).read_bytes()
    document = json.loads(gzip.decompress(stored) if name.endswith(".gz") else stored)
    random.Random(7).shuffle(document["traceEvents"])
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert moved(seen([path])) == moved(seen([CORPUS / name]))


@settings(max_examples=20, deadline=None)
@given(members=st.lists(loops(), min_size=2, max_size=3), seed=st.randoms(use_true_random=False))
def test_made_up_ranks_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, members: list[Loop], seed: random.Random
) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    paths = [
        loop.save(folder / f"{rank}.json", distributedInfo={"rank": rank, "world_size": len(members)})
        for rank, loop in enumerate(members)
    ]
    first = seen(paths)
    seed.shuffle(paths)
    assert seen(paths) == first
    ranks = [file.rank for file in first.files if file.status == "ok"]  # a loop that does nothing is no trace
    assert ranks == [rank for rank, loop in enumerate(members) if loop.events]


def test_one_slow_rank_is_waited_for(tmp_path: Path) -> None:
    """Rank 1 computes 300 us longer: the collective of the others lasts that much longer."""
    for rank in range(3):
        loop = Loop()
        for _ in range(3):
            with loop.step():
                loop.mm(4096, 4096, 4096, 500.0 if rank == 1 else 200.0)
                with loop.operator("c10d::allreduce_", [[1024]], [BF16]):
                    loop.kernel(ALL_REDUCE, 50.0 if rank == 1 else 350.0)
        loop.save(tmp_path / f"{rank}.json", distributedInfo={"rank": rank, "world_size": 3})
    found = seen([tmp_path])
    assert [file.exposed_comm_us for file in found.files] == [1050, 150, 1050]
    if found.ranks is not None:
        assert found.ranks.straggler == 1
        assert [each.rank for each in found.ranks.ranks] == [0, 1, 2]


def test_analyze_file_never_raises_for_what_a_file_holds(tmp_path: Path) -> None:
    odd: tuple[Any, ...] = (None, 0, -1, 1e400, "x", [], {}, [[]], True)
    for number, (key, value) in enumerate(itertools.product(("ts", "dur", "name", "cat", "args", "pid", "ph"), odd)):
        loop = training(1)
        loop.events[3][key] = value
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(loop.document()), encoding="utf-8")
        file = analyze_file(path, ALONE)
        assert file.status in ("ok", "partial"), (key, value)
        assert file.kernels in (3, 4)


@pytest.mark.parametrize(
    "head", [{"deviceProperties": value} for value in (3, [3], [{}], [{"id": "a", "name": 5}], None)]
)
def test_odd_device_lists_are_devices_without_a_name(tmp_path: Path, head: dict[str, Any]) -> None:
    (file,) = seen([training().save(tmp_path / "trace.json", **head)]).files
    assert (file.status, file.device, file.mfu, file.kernels) == ("ok", None, None, 12)


def test_errors_are_ours(tmp_path: Path) -> None:
    """What is given wrongly is an AdvisorError, whatever its kind."""
    path = training(1).save(tmp_path / "trace.json")
    (tmp_path / "none.txt").write_text("", encoding="utf-8")
    with pytest.raises(ArtifactError):
        seen([path], counters=(tmp_path / "none.txt",))
    assert issubclass(ArtifactError, AdvisorError)


def test_the_table_is_the_one_of_the_reader(tmp_path: Path) -> None:
    path = training(2).save(tmp_path / "trace.json", {**H200, "id": 3})
    (file,) = seen([path]).files
    assert file.events == read_table(path, 1).events == 2 * (4 * 3 + 1)
    assert file.device == "NVIDIA H200"  # the only one that is listed
