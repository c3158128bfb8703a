"""`advisor analyze` and `advisor doctor` as a user meets them: exit status, what stands where, and what never does."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from made_traces import H200, UNKNOWN, Loop, training

from advisor import survey as module
from advisor.cli import cli
from advisor.measured import FileProfile

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "data" / "corpus" / "traces"
SAMPLE = ROOT / "samples" / "nano_gpt" / "h200"
T4 = ROOT / "tests" / "data" / "dcgm" / "k8sconf-t4-busy.prom.txt"
STABLE = (
    "path", "status", "reason", "events", "kernels", "kernel_us", "busy_us", "span_us", "steps", "step_mean_us",
    "nccl_kernels", "exposed_comm_us", "device", "rank", "world_size", "mfu", "mfu_causal", "mfu_own_peak", "hfu",
)  # fmt: skip

Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of their own: nothing of this machine is read or written."""
    folder = tmp_path / "home" / "ada"
    folder.mkdir(parents=True)
    for name, place in (("HOME", "."), ("XDG_CACHE_HOME", "cache"), ("XDG_CONFIG_HOME", "config")):
        monkeypatch.setenv(name, str(folder / place))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def advisor() -> Command:
    """A function that runs the command in this process; whatever is no error of ours is raised."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run as `advisor optimize` leaves it."""
    folder = tmp_path / "runs" / "20261129-101500-3f2a"
    shown = folder / "tensorboard" / folder.name / "rank_0.pt.trace.json.gz"
    shown.parent.mkdir(parents=True)
    for name in ("trace.json.gz", "annotated.json.gz", "capture.json", "probe.json", "singles.json", "report.json"):
        shutil.copyfile(SAMPLE / name, folder / name)
    (folder / "counters.json").write_bytes(gzip.decompress((SAMPLE / "counters.json.gz").read_bytes()))
    shutil.copyfile(folder / "trace.json.gz", shown)
    return folder


def document(result: Result) -> dict[str, Any]:
    assert result.stderr == ""
    found = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert isinstance(found, dict)
    return found


def one_error(result: Result) -> str:
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# --------------------------------------------------------------------------------------------------------- exit status


def test_a_trace(advisor: Command, home: Path) -> None:
    result = advisor("analyze", training().save(home / "trace.json"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("800.0 us per step")
    for words in ("NVIDIA H200", "12 kernels", "of 989.4 TFLOP/s", "where a step goes", "matmul", "trace.json"):
        assert words in result.stdout
    assert "what the data does not support" not in result.stdout


@pytest.mark.parametrize(
    ("names", "status"), [(("bad",), 4), (("bad", "worse"), 4), (("bad", "good"), 0), (("cut",), 0), (("good",), 0)]
)
def test_refused_files_decide_only_where_all_are(
    advisor: Command, home: Path, names: tuple[str, ...], status: int
) -> None:
    text = json.dumps(training().document())
    texts = {"bad": "{}", "worse": "hello", "good": text, "cut": text[: len(text) // 2]}
    paths = [home / f"{name}.json" for name in names]
    for path in paths:
        path.write_text(texts[path.stem], encoding="utf-8")
    for form in ((), ("--json",)):
        result = advisor("analyze", *paths, *form)
        assert (result.exit_code, result.stderr) == (status, "")
    statuses = {"bad": "refused", "worse": "refused", "good": "ok", "cut": "partial"}
    files = document(advisor("analyze", *paths, "--json"))["files"]
    assert {Path(file["path"]).stem: file["status"] for file in files} == {name: statuses[name] for name in names}
    assert all(bool(file["reason"]) == (file["status"] != "ok") for file in files)


def test_nothing_to_analyze_is_a_wrong_argument(advisor: Command, home: Path) -> None:
    (home / "empty").mkdir()
    advice = "give a trace, a folder of ranks or a run folder"
    for path, words in ((home / "gone.json", "does not exist"), (home / "empty", "no trace (.json, .json.gz) in")):
        result = advisor("analyze", path)
        message = one_error(result)
        assert result.exit_code == 2 and words in message and message.endswith(advice)
    assert advisor("analyze").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "0"),
        ("--workers", "many"),
        ("--peak", "fast"),
        ("--peak", "-1e15"),
        ("--peak", "nan"),
        ("--counters", "gone.txt"),
        ("--html", "."),
        ("--nonsense",),
    ],
)
def test_wrong_options(advisor: Command, home: Path, arguments: tuple[str, ...]) -> None:
    result = advisor("analyze", training(1).save(home / "trace.json"), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rror: " in result.stderr and "Traceback" not in result.stderr


def test_counters_of_several_recordings(advisor: Command, home: Path) -> None:
    paths = [training(1).save(home / f"{name}.json") for name in "ab"]
    result = advisor("analyze", *paths, "--counters", T4)
    assert result.exit_code == 2
    assert one_error(result) == "--counters belong to one recording, 2 are given: analyze that one alone"


def test_counters_of_another_device_are_refused(advisor: Command, home: Path) -> None:
    path = training(1).save(home / "trace.json")
    result = advisor("analyze", path, "--counters", T4)
    assert result.exit_code == 2
    assert "is of a Tesla T4, the trace of a" in one_error(result)


def test_counters_that_are_none(advisor: Command, home: Path) -> None:
    path = training(1).save(home / "trace.json")
    result = advisor("analyze", path, "--counters", path)
    assert result.exit_code == 4
    assert "holds no counters of a GPU" in one_error(result)


# ---------------------------------------------------------------------------------------------------------------- forms


def test_the_document(advisor: Command, home: Path) -> None:
    """The first fields of a file are stable, in their order; what is not known is null."""
    path = training().save(home / "trace.json", distributedInfo={"rank": 3, "world_size": 8})
    found = document(advisor("analyze", path, "--json"))
    assert list(found)[:2] == ["schema", "files"] and found["schema"] == 1
    (file,) = found["files"]
    assert (
        tuple(file)[: len(STABLE)]
        == STABLE
        == tuple(field.name for field in dataclasses.fields(FileProfile))[: len(STABLE)]
    )
    known = {name: file[name] for name in STABLE}
    flops = 2 * 4096 * (4096 * 4096 + 2 * 4096 * 1024)
    mfu = pytest.approx(flops / (800e-6 * 989.4e12))
    marks = [event["dur"] for event in training().events if event["name"].startswith("ProfilerStep")]
    assert known == {
        "path": str(path), "status": "ok", "reason": None, "events": 3 * (4 * 3 + 1), "kernels": 12, "kernel_us": 2400,
        "busy_us": 2400, "span_us": 2400, "steps": 3, "step_mean_us": pytest.approx(sum(marks) / 3), "nccl_kernels": 0,
        "exposed_comm_us": 0, "device": "NVIDIA H200", "rank": 3, "world_size": 8, "mfu": mfu, "mfu_causal": None,
        "mfu_own_peak": mfu, "hfu": mfu,
    }  # fmt: skip


def test_the_document_of_a_refused_file(advisor: Command, home: Path) -> None:
    (home / "bad.json").write_text("{}", encoding="utf-8")
    result = advisor("analyze", home / "bad.json", "--json")
    assert result.exit_code == 4
    (file,) = document(result)["files"]
    assert file["status"] == "refused" and file["reason"]
    assert all(file[name] is None for name in STABLE[4:])


def figures(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from figures(item)
    elif isinstance(value, int | float):
        yield float(value)


def test_every_recording_is_valid_json(advisor: Command) -> None:
    result = advisor("analyze", CORPUS, "--json")
    found = document(result)
    assert result.exit_code == 0
    assert len(found["files"]) == len(list(CORPUS.rglob("*.json*")))
    assert all(math.isfinite(figure) for figure in figures(found))
    assert {file["status"] for file in found["files"]} == {"ok", "partial", "refused"}
    assert result.stdout.isascii()


def test_a_page(advisor: Command, home: Path) -> None:
    path, page = training().save(home / "trace.json"), home / "page.html"
    plain, both = advisor("analyze", path), advisor("analyze", path, "--html", page)
    assert (both.exit_code, both.stdout) == (0, plain.stdout)
    text = page.read_text(encoding="utf-8")
    assert text.lower().startswith("<!doctype html>") and "NVIDIA H200" in text
    assert not re.search(r"(?:src|href)=\"https?://", text)
    asked = advisor("analyze", path, "--html", home / "second.html", "--json")
    assert document(asked)["files"][0]["status"] == "ok"
    assert (home / "second.html").read_text(encoding="utf-8") == text


def test_a_page_of_refused_files(advisor: Command, home: Path) -> None:
    (home / "bad.json").write_text("{}", encoding="utf-8")
    result = advisor("analyze", home / "bad.json", "--html", home / "page.html")
    assert result.exit_code == 4 and "refused" in (home / "page.html").read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written(advisor: Command, home: Path) -> None:
    path = training(1).save(home / "trace.json")
    result = advisor("analyze", path, "--html", path / "page.html")
    assert result.exit_code == 6
    assert one_error(result) == "cannot write page.html: Not a directory: give another file"


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_shows_what_was_counted(advisor: Command, run_folder: Path) -> None:
    result = advisor("analyze", run_folder)
    assert result.exit_code == 0
    assert re.search(r"counters +sm_active 97\.\d %, sm_occupancy \d+\.\d %, tensor_active 1[67]\.\d %", result.stdout)
    below = result.stdout.split("aten::mm [16384, 2048] x [2048, 50257] bfloat16\n")[1].splitlines()[:2]
    assert "sm_active 99.8 %" in below[1] and "tensor_active 20.3 %" in below[1]  # of the operator replayed alone
    assert "achieved_occupancy" in result.stdout  # of kernels by Nsight Compute


def test_the_document_of_a_run(advisor: Command, run_folder: Path) -> None:
    (file,) = document(advisor("analyze", run_folder, "--json"))["files"]
    assert file["path"] == str(run_folder / "trace.json.gz")
    assert {metric["source"] for metric in file["counters"]} == {"gpm", "nvml"}
    alone = {(cost["kind"], metric["source"]) for cost in file["costs"] for metric in cost["counters"]}
    assert alone == {("kernel", "ncu"), ("operator", "gpm")}
    assert file["mfu"] == pytest.approx(0.1486, abs=1e-4)


def test_a_folder_of_runs_has_each_once(advisor: Command, run_folder: Path) -> None:
    second = run_folder.with_name("20261130-090000-aaaa")
    shutil.copytree(run_folder, second)
    files = document(advisor("analyze", run_folder.parent, "--json"))["files"]
    assert [file["path"] for file in files] == [str(folder / "trace.json.gz") for folder in (run_folder, second)]


def test_ranks(advisor: Command) -> None:
    result = advisor("analyze", CORPUS / "param-dlrm8")
    assert (result.exit_code, result.stderr) == (0, "")
    found = document(advisor("analyze", CORPUS / "param-dlrm8", "--json"))
    assert [file["rank"] for file in found["files"]] == list(range(8))


# --------------------------------------------------------------------------------------------------------------- peaks


def test_a_given_peak(advisor: Command, home: Path) -> None:
    path = training().save(home / "trace.json")
    result = advisor("analyze", path, "--peak", "1e15")
    assert "of 1,000 TFLOP/s (given with --peak)" in result.stdout
    given, usual = (document(advisor("analyze", path, "--json", *more)) for more in (("--peak", "1e15"), ()))
    assert given["files"][0]["mfu"] == pytest.approx(usual["files"][0]["mfu"] * 0.9894)


def test_an_unknown_device_until_it_is_calibrated(advisor: Command, home: Path) -> None:
    """No MFU and why; then `doctor --calibrate`, here with the answer of the measuring process recorded; then MFU."""
    path = training().save(home / "trace.json", UNKNOWN)
    before = advisor("analyze", path)
    assert "cannot say MFU because no datasheet on record for Experimental GPU" in before.stdout
    assert document(advisor("analyze", path, "--json"))["files"][0]["mfu"] is None
    figures = {"device": "Experimental GPU", "sm_count": 100, "torch": "2.11.0", "measured_flops": {"bfloat16": 4e14}}
    measured = advisor("doctor", "--calibrate", "--python", python(home, {**figures, "measured_bandwidth": 1.5e12}))
    assert (measured.exit_code, measured.stderr) == (0, "")
    assert measured.stdout.split() == "bfloat16 400.0 TFLOP/s copy 1.50 TB/s, read and written".split()
    assert (home / "config" / "advisor" / "devices.json").is_file()
    after = advisor("analyze", path)
    assert "of 400.0 TFLOP/s (bfloat16 matmul rate of Experimental GPU, measured by advisor doctor" in shown(after)
    (file,) = document(advisor("analyze", path, "--json"))["files"]
    assert file["mfu"] == pytest.approx(2 * 4096 * (4096 * 4096 + 2 * 4096 * 1024) / (800e-6 * 4e14))
    assert file["mfu_own_peak"] is None


def shown(result: Result) -> str:
    """The output with its lines joined."""
    return " ".join(result.stdout.split())


def python(folder: Path, answer: dict[str, Any], status: int = 0) -> Path:
    """A program that gives one answer, whatever it is asked."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# -------------------------------------------------------------------------------------------------------------- doctor


def test_doctor(advisor: Command, home: Path) -> None:
    cpu = {"torch": "2.13.0+cpu", "cuda": None, "hip": None, "devices": []}
    result = advisor("doctor", "--python", python(home, cpu))
    assert (result.exit_code, result.stderr) == (0, "")
    rows = dict(reversed(line.split(maxsplit=2)[:2]) for line in result.stdout.splitlines())
    assert list(rows) == ["python", "torch", "device", "counters", "ncu", "git", "polars", "networkx"]
    assert (rows["torch"], rows["device"], rows["polars"]) == ("ok", "-", "ok")
    assert all(line == line.rstrip() for line in result.stdout.splitlines())


def test_doctor_without_torch(advisor: Command, home: Path) -> None:
    result = advisor("doctor", "--python", python(home, {}, status=1))
    assert result.exit_code == 0
    assert re.search(r"missing +torch +.*pip install torch", result.stdout)


def test_doctor_without_an_interpreter(advisor: Command) -> None:
    for more in ((), ("--calibrate",)):
        result = advisor("doctor", "--python", "/nowhere/python", *more)
        assert result.exit_code == 2 and "name an interpreter with --python" in one_error(result)


def test_nothing_is_calibrated_without_a_gpu(advisor: Command, home: Path) -> None:
    result = advisor("doctor", "--calibrate", "--python", python(home, {"device": None, "torch": "2.13.0+cpu"}))
    assert result.exit_code == 2
    assert one_error(result).startswith("torch sees no GPU to calibrate: check the driver")
    assert not (home / "config").exists()


# --------------------------------------------------------------------------------------------------------------- cache


def test_a_second_look_reads_the_cache(advisor: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training().save(home / "trace.json")
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    first = advisor("analyze", path, "--json")
    assert len(list((home / "cache" / "advisor" / "traces").iterdir())) == 1
    monkeypatch.setattr(module, "read_table", lambda *_: pytest.fail("it was read again"))
    assert advisor("analyze", path, "--json").stdout == first.stdout


def test_without_a_cache_nothing_is_written(advisor: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training().save(home / "trace.json")
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    assert advisor("analyze", path, "--no-cache").exit_code == 0
    assert list(home.iterdir()) == [path]


def test_processes_change_nothing(advisor: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BESIDE_FROM_BYTES", 0)
    said = [advisor("analyze", CORPUS / "param-dlrm8", "--json", "--workers", count).stdout for count in (1, 2)]
    assert said[0] == said[1]


# -------------------------------------------------------------------------------------------------------------- secrets

TOKEN = "hf_" + "Ab1Cd2Ef3G" * 3 + "Hi4j"  # made up, of the shape of a token


@pytest.mark.parametrize("name", ["tracelens-h100-vit-nsfw.json.gz", "tracelens-mi300-vit-nsfw.json.gz"])
def test_the_environment_in_a_trace_is_never_shown(
    advisor: Command, home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Published traces hold the environment of their process, with a live token in it (here: a made-up one)."""
    text = gzip.decompress((CORPUS / name).read_bytes()).decode()
    assert '"HF_TOKEN": "' in text
    path = home / "trace.json"
    path.write_text(re.sub(r'("HF_TOKEN": ")[^"]*', rf"\1{TOKEN}", text), encoding="utf-8")
    monkeypatch.setattr(module, "KEEP_FROM_BYTES", 0)
    said = [advisor("analyze", path, *more, "--html", home / "page.html").stdout for more in ((), ("--json",))]
    written = [file.read_bytes() for file in home.rglob("*") if file.is_file() and file != path]
    assert len(written) > 5  # the page and the cache
    for output in (*(text.encode() for text in said), *written):
        assert b"hf_" not in output and b"HF_TOKEN" not in output and b"HOSTNAME" not in output


def test_a_secret_in_a_name_is_hidden(advisor: Command, home: Path) -> None:
    """Names of operators, kernels, devices and modules are whatever a user's program calls them."""
    loop = Loop()
    for _ in range(3):
        with loop.step():
            loop.call(f"mine::{TOKEN}", [[8]], ["float"], f"kernel --token {TOKEN}", 20.0)
            loop.mm(64, 64, 64, 5.0)
    path = loop.save(home / "trace.json", {**H200, "name": f"GPU of {TOKEN}"})
    page = home / "page.html"
    for more in ((), ("--json",)):
        result = advisor("analyze", path, *more, "--html", page)
        assert result.exit_code == 0
        assert TOKEN not in result.stdout and TOKEN not in page.read_text(encoding="utf-8")
        assert "mine::" in result.stdout


def test_paths_are_shown_short_and_given_back_whole(advisor: Command, home: Path) -> None:
    """A person reads `~`; a program finds the path it gave."""
    path, page = training().save(home / "trace.json"), home / "page.html"
    assert "/home/ada" in str(path)
    read = advisor("analyze", path, "--html", page)
    assert str(home) not in read.stdout and "~/trace.json" in read.stdout
    assert str(home) not in page.read_text(encoding="utf-8")
    assert document(advisor("analyze", path, "--json"))["files"][0]["path"] == str(path)
    assert document(advisor("analyze", "trace.json", "--json"))["files"][0]["path"] == "trace.json"


def test_control_characters_in_names_reach_no_terminal(advisor: Command, home: Path) -> None:
    loop = Loop()
    for _ in range(2):
        with loop.step():
            loop.call("mine::\x1b[31mred\x07", [[8]], ["float"], "kernel\x1b]0;title\x07\r\n\u202e", 20.0)
    result = advisor("analyze", loop.save(home / "trace.json"))
    assert result.exit_code == 0
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", result.stdout)


# ----------------------------------------------------------------------------------------------- processes of their own


def started(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )


def test_torch_is_not_imported(home: Path, run_folder: Path) -> None:
    """Also not by the processes beside it, and not for the counters of a run."""
    code = (
        "import sys\n"
        "from advisor.cli import main\n"
        f"sys.argv = ['advisor', 'analyze', {str(run_folder)!r}, '--html', 'page.html']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = started("-c", code)
    assert done.stderr.splitlines()[-1] == "0 False", done.stderr
    hidden = home / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise RuntimeError('torch was imported')\n", encoding="utf-8")
    done = started("-m", "advisor", "analyze", CORPUS / "param-dlrm8", "--workers", 2, PYTHONPATH=str(hidden))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command(home: Path) -> None:
    path = training().save(home / "trace.json")
    plain = started("-m", "advisor", "analyze", path, PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.isascii() and "###" in plain.stdout  # bars, where the terminal has no blocks
    gone = started("-m", "advisor", "analyze", home / "gone.json")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith("error: ") and gone.stderr.count("\n") == 1
    refused = home / "bad.json"
    refused.write_text("{}", encoding="utf-8")
    assert started("-m", "advisor", "analyze", refused).returncode == 4


def test_doctor_on_this_machine() -> None:
    torch = pytest.importorskip("torch")
    done = started("-m", "advisor", "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(rf"^ok +torch +{re.escape(torch.__version__)}, ", done.stdout, re.MULTILINE)
    if not torch.cuda.is_available():
        assert re.search(r"^- +device +none: scripts run on the CPU", done.stdout, re.MULTILINE)
        done = started("-m", "advisor", "doctor", "--calibrate")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: torch sees no GPU to calibrate")
