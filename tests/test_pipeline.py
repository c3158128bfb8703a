"""The stages after capture on a recorded run: files left behind, interruption in each stage, apply, bad rules.

`FakeLab` stands in for the processes of the proof, which have their own tests: it agrees with every number and measures
whatever speed-up a test asks for.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from advisor import cli, stages
from advisor.config import Config
from advisor.job import Request, begin
from advisor.model import Baseline, Numerics, Patch, Timing
from advisor.progress import Progress
from advisor.reports.jsonform import from_document
from advisor.reports.terminal import render_terminal

DATA = Path(__file__).parent / "data" / "tiny_gpt"
RUN = "20260101-000000-test"


class FakeLab:
    """A mock of ProcessLab: no process runs; every patch is right and each rewrite makes it `speedup` times as fast."""

    speedup = 1.25

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.left = 600.0

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_error: object) -> None:
        return

    def seconds_left(self) -> float:
        return self.left

    def prove(self, patch: Patch) -> Numerics:
        return Numerics(ok=True, reference="float64", compared=10)

    def race(self, kept: Patch, candidate: Patch, seconds: float) -> Timing:
        value = self.speedup ** (len(candidate.rewrites) - len(kept.rewrites))
        return Timing(
            speedup=value,
            interval=(value * 0.99, value * 1.01),
            confidence=0.95,
            quads=8,
            noise=0.001,
            base_step_us=(1000.0,) * 16,
            step_us=(1000.0 / value,) * 16,
        )

    def baseline(self, label: str, variant: str, patch: Patch) -> Baseline:
        return Baseline(label=label, step_us=1000.0, speedup=1.0)

    def block_windows(self, _patch: Patch) -> tuple[tuple[float, float], ...]:
        return ()


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with the recorded script, and a run of it that ended after capture."""
    shutil.copy(DATA / "train.py", tmp_path / "train.py")
    run = tmp_path / ".advisor" / "runs" / RUN
    run.mkdir(parents=True)
    (tmp_path / ".advisor" / ".gitignore").write_text("*\n", encoding="utf-8")
    for name in ("trace.json.gz", "annotated.json.gz", "graph.json", "probe.json"):
        shutil.copy(DATA / name, run / name)
    request = {"schema": 1, "script": "train.py", "arguments": ["--width", "8"], "entry": None}
    (run / "run.json").write_text(json.dumps({**request, "root": "../../.."}), encoding="utf-8")
    digest = hashlib.sha256((DATA / "train.py").read_bytes()).hexdigest()
    capture = {"steps": 20, "timed_s": [], "sources": {"train.py": digest}}
    (run / "capture.json").write_text(json.dumps(capture), encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "ProcessLab", FakeLab)
    return tmp_path


def advisor(*arguments: str) -> int:
    """Run the command in this process and give its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["advisor", *arguments])
        try:
            cli.main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
    return 0


def resume(*more: str) -> int:
    return advisor("optimize", "--resume", RUN, "--worth", "0", "-q", *more)


def report(project: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / ".advisor/runs" / RUN / "report.json").read_text(encoding="utf-8"))
    return found


def tree(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts and ".advisor" not in p.parts)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_a_run_leaves_its_files_and_touches_nothing_else(project: Path) -> None:
    before = tree(project)
    assert resume() == 0
    assert tree(project) == before
    run = project / ".advisor/runs" / RUN
    names = {p.name for p in run.iterdir()}
    assert {
        "patch.diff",
        "report.html",
        "report.json",
        "verdicts.json",
        "findings.json",
        "plan.json",
        "env.json",
    } <= names
    assert not (run / "work").exists()
    found = report(project)
    assert found["outcome"] == "improved"
    applied = [f for f in found["findings"] if f["status"] == "applied"]
    assert {"naive-attention", "optimizer-not-fused"} <= {f["rule"] for f in applied}
    assert found["speedup"] == pytest.approx(1.25 ** len(applied))
    for finding in applied:
        assert finding["path"] == "train.py"
        assert finding["estimate_us"][0] <= finding["estimate_us"][1]
        assert finding["saved_us"] > 0


def test_the_stable_fields_are_there_and_mfu_is_a_fraction_or_unknown(project: Path) -> None:
    resume("--peak-flops", "1e12")
    found = report(project)
    for name in (
        "schema outcome speedup interval mfu_before mfu_after step_ms_before step_ms_after tokens_per_s_before "
        "tokens_per_s_after environment findings baselines"
    ).split():
        assert name in found, name
    assert 0 < found["mfu_before"] < found["mfu_after"] < 1
    assert found["mfu_after"] == pytest.approx(found["mfu_before"] * found["speedup"])


def test_an_unknown_device_has_no_mfu_but_a_reason(project: Path) -> None:
    resume()
    found = report(project)
    assert found["mfu_before"] is None
    assert "--peak" in found["missing"]["mfu"]


def test_a_secret_argument_is_stored_nowhere_and_given_again_to_resume(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = ["--token", "ghp_" + "a1B2" * 9]
    request = Request(script=Path("train.py"), arguments=tuple(secret), config=Config())
    job = begin(request, Progress(Console(quiet=True)))
    for name in ("trace.json.gz", "annotated.json.gz", "graph.json", "probe.json", "capture.json"):
        shutil.copy(project / ".advisor/runs" / RUN / name, job.run.path / name)
    again = ["optimize", "--resume", job.run.id, "--worth", "0", "-q"]
    assert advisor(*again) == 2
    assert "repeat them" in capsys.readouterr().err
    assert advisor(*again, "train.py", "--", *secret) == 0
    for path in job.run.path.iterdir():
        assert path.is_dir() or b"ghp_a1B2" not in path.read_bytes(), path.name


def test_a_resumed_run_keeps_its_settings_and_notices_changed_sources(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project / ".advisor/runs" / RUN
    request = json.loads((run / "run.json").read_text(encoding="utf-8"))
    request["config"] = {"seed": 7, "allow": ["precision"]}
    (run / "run.json").write_text(json.dumps(request), encoding="utf-8")
    resume()
    assert {f["safety"] for f in report(project)["findings"] if f["status"] == "applied"} <= {"exact"}
    assert report(project)["environment"]["seed"] == 7
    capsys.readouterr()
    (project / "train.py").write_text("\n" + (project / "train.py").read_text(encoding="utf-8"), encoding="utf-8")
    assert resume() == 4
    assert "has changed since" in capsys.readouterr().err


def test_a_path_in_a_rewritten_call_survives_apply(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the redactor would change in a stored patch must not reach the user's file."""
    text = (project / "train.py").read_text(encoding="utf-8")
    call = "torch.optim.AdamW(model.parameters(), lr=1e-3)"
    longer = 'torch.optim.AdamW(list(model.parameters()) + list("/home/alice/x"[:0]), lr=1e-3)'
    assert call in text
    text = text.replace(call, longer)
    (project / "train.py").write_text(text, encoding="utf-8")
    git(project, "commit", "-qam", "path")
    run = project / ".advisor/runs" / RUN
    capture = json.loads((run / "capture.json").read_text(encoding="utf-8"))
    capture["sources"]["train.py"] = hashlib.sha256(text.encode()).hexdigest()
    (run / "capture.json").write_text(json.dumps(capture), encoding="utf-8")
    probe = json.loads((run / "probe.json").read_text(encoding="utf-8"))
    probe["optimizers"][0]["span"]["columns"] = None
    (line,) = [n for n, found in enumerate(text.splitlines(), start=1) if longer in found]
    column = text.splitlines()[line - 1].index(longer)
    probe["optimizers"][0]["span"] = {
        "path": "train.py", "line": line, "function": "main", "columns": [line, line, column, column + len(longer)],
    }  # fmt: skip
    (run / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    assert resume("--select", "optimizer-not-fused") == 0
    assert advisor("apply") == 0
    after = (project / "train.py").read_text(encoding="utf-8")
    assert '"/home/alice/x"[:0]), lr=1e-3, fused=True)' in after


def test_an_unconfirmed_gain_ends_with_status_1_and_changes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLab, "speedup", 1.0)
    assert resume() == 1
    found = report(project)
    assert found["outcome"] != "improved"
    assert found["step_ms_after"] is None
    assert {f["status"] for f in found["findings"]} <= {"rejected", "declined", "suggested"}
    assert advisor("apply", RUN) == 2


def test_apply_gives_the_text_of_the_patch(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume()
    diff = project / ".advisor/runs" / RUN / "patch.diff"
    git(project, "apply", str(diff))
    wanted = (project / "train.py").read_text(encoding="utf-8")
    git(project, "checkout", "-q", "train.py")
    assert advisor("apply") == 0
    assert "changed train.py" in capsys.readouterr().out
    assert (project / "train.py").read_text(encoding="utf-8") == wanted
    compile(wanted, "train.py", "exec")
    assert advisor("apply", "--allow-dirty") == 4  # the file is no longer the one the patch was proved on


def test_one_patch_per_rewrite_applies_in_order(project: Path) -> None:
    resume()
    run = project / ".advisor/runs" / RUN
    for part in sorted(run.glob("[0-9][0-9]-*.patch")):
        git(project, "apply", str(part))
    stepwise = (project / "train.py").read_bytes()
    git(project, "checkout", "-q", "train.py")
    git(project, "apply", str(run / "patch.diff"))
    assert (project / "train.py").read_bytes() == stepwise


def test_apply_refuses_a_dirty_tree_unless_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume()
    (project / "other.py").write_text("x = 1\n", encoding="utf-8")
    git(project, "add", "other.py")
    before = (project / "train.py").read_bytes()
    assert advisor("apply") == 2
    assert "uncommitted changes" in capsys.readouterr().err
    assert (project / "train.py").read_bytes() == before
    assert advisor("apply", "--allow-dirty") == 0
    assert (project / "train.py").read_bytes() != before


def test_apply_refuses_a_changed_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume()
    with (project / "train.py").open("a", encoding="utf-8") as stream:
        stream.write("# more\n")
    git(project, "commit", "-qam", "more")
    assert advisor("apply") == 4
    assert "has changed since" in capsys.readouterr().err


def test_optimize_can_apply_at_once(project: Path) -> None:
    before = (project / "train.py").read_bytes()
    assert resume("--apply") == 0
    assert (project / "train.py").read_bytes() != before


def test_report_shows_it_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume()
    capsys.readouterr()
    assert advisor("report") == 0
    assert "x faster" in capsys.readouterr().out
    assert advisor("report", RUN, "--json") == 0
    assert json.loads(capsys.readouterr().out) == report(project)


def test_json_is_one_document_on_standard_output(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume("--json")
    assert json.loads(capsys.readouterr().out)["outcome"] == "improved"


INTERRUPTED: dict[str, tuple[object, str]] = {
    "ingest": (stages, "read_probe"),
    "analyze": (stages.analyze, "analyze"),
    "match": (stages.match, "match"),
    "plan": (stages.plan, "plan"),
    "patch": (stages.patch, "build"),
    "verify": (stages, "search"),
    "report": (stages.summary, "report_of"),
}


def interrupt(*_args: Any, **_kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("stage", INTERRUPTED)
def test_an_interrupted_stage_leaves_a_resumable_run(
    project: Path, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(project)
    with monkeypatch.context() as broken:
        broken.setattr(*INTERRUPTED[stage], interrupt)
        assert resume() == 130
    message = capsys.readouterr().err
    assert f"interrupted in {stage}" in message
    assert f"--resume {RUN}" in message
    assert tree(project) == before
    assert resume() == 0
    assert report(project)["outcome"] == "improved"


BROKEN_RULE = '''\
"""A rule that raises.

## What it does
## Why it costs
## When not to
## Fix safety
## References
"""

from advisor.model import Safety
from advisor.rule import Rule


class Broken(Rule):
    id = "broken"
    safety = Safety.NUMERICS

    def match(self, ctx):
        raise RuntimeError("a bug in the rule")

    def rewrite(self, finding, source):
        raise AssertionError
'''


def test_a_rule_that_raises_is_named_and_the_others_count(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine").mkdir()
    (project / "mine" / "broken.py").write_text(BROKEN_RULE, encoding="utf-8")
    assert resume("--rules", "mine") == 5
    errors = capsys.readouterr().err
    assert "rule broken raised RuntimeError: a bug in the rule" in errors
    assert "Traceback" in errors
    found = report(project)
    assert found["outcome"] == "improved"
    assert any("broken" in text for text in found["rule_errors"])


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (lambda run: (run / "probe.json").write_text("{"), 4),
        (lambda run: (run / "graph.json").write_text("[]"), 4),
        (lambda run: (run / "trace.json.gz").write_bytes(b"\x1f\x8b truncated"), 4),
        (lambda run: (run / "run.json").write_text("no json"), 4),
    ],
)
def test_a_damaged_run_is_one_message(
    project: Path, damage: Callable[[Path], object], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(project / ".advisor/runs" / RUN)
    assert resume() == status
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("name", "text", "command"),
    [
        ("run.json", "{}", "apply"),
        ("run.json", "[]", "apply"),
        ("run.json", '{"script": 1, "arguments": 2, "root": 3, "entry": null}', "apply"),
        ("patch.json", "[]", "apply"),
        ("patch.json", "{}", "apply"),
        ("patch.json", '{"files": {"train.py": {"base": "", "result": "", "replacements": [[1]]}}}', "apply"),
        ("report.json", "{}", "report"),
        ("report.json", "[]", "report"),
        ("report.json", '{"schema": 99}', "report"),
        ("capture.json", "[]", "optimize"),
    ],
)
def test_a_damaged_artifact_is_one_message(
    project: Path, name: str, text: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / ".advisor/runs" / RUN / name).write_text(text, encoding="utf-8")
    assert (resume() if command == "optimize" else advisor(command)) == 4
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors


def test_a_damaged_report_does_not_matter_to_apply(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeLab, "speedup", 1.0)
    resume()
    (project / ".advisor/runs" / RUN / "report.json").write_text("{}", encoding="utf-8")
    capsys.readouterr()
    assert advisor("apply") == 2
    assert "has no proven patch" in capsys.readouterr().err


def test_apply_says_that_a_run_without_a_verdict_proved_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advisor("apply") == 2
    errors = capsys.readouterr().err
    assert "no proven patch, because it did not reach its verdict" in errors
    assert f"--resume {RUN}" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--select", "nope"), "there is no rule nope"),
        (("--ignore", "nope"), "there is no rule nope"),
        (("--rules", "nowhere"), "does not exist"),
        (("--python", "./no/such"), "--python"),
        (("--entry", "train"), "module:function"),
        (("--entry", "train:"), "module:function"),
    ],
)
def test_a_wrong_option_is_said_before_anything_runs(
    project: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advisor("optimize", "train.py", "-q", *arguments) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in (project / ".advisor/runs").iterdir()] == [RUN]


def test_apply_writes_the_target_of_a_link(project: Path) -> None:
    resume()
    (project / "real").mkdir()
    git(project, "mv", "train.py", "real/train.py")
    (project / "train.py").symlink_to("real/train.py")
    git(project, "add", "train.py")
    git(project, "commit", "-qm", "link")
    before = (project / "real/train.py").read_bytes()
    assert advisor("apply") == 0
    assert (project / "train.py").is_symlink()
    assert (project / "real/train.py").read_bytes() != before


def test_the_page_of_a_rule_that_cannot_load_is_an_error_of_that_rule(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "mine").mkdir()
    (project / "mine" / "half_written.py").write_text("raise ValueError('half written')\n", encoding="utf-8")
    assert advisor("explain", "half-written", "--rules", "mine") == 5
    assert capsys.readouterr().err.count("error: ") == 1
    assert advisor("explain", "naive-attention", "--rules", "mine") == 0
    assert advisor("explain", "other", "--rules", "mine") == 2


def test_what_is_no_token_is_not_called_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume()
    assert report(project)["throughput_unit"] == "tokens"
    assert "tokens/s" in capsys.readouterr().out
    path = project / ".advisor/runs" / RUN / "probe.json"
    probe = json.loads(path.read_text(encoding="utf-8"))
    for call in probe["root_calls"]:
        call["inputs"] = [{"shape": [4, 16], "dtype": "float32"}]
    path.write_text(json.dumps(probe), encoding="utf-8")
    resume()
    assert report(project)["throughput_unit"] == "samples"
    shown = capsys.readouterr().out
    assert "samples/s" in shown
    assert "tokens/s" not in shown
    page = (project / ".advisor/runs" / RUN / "report.html").read_text(encoding="utf-8")
    assert "samples/s" in page
    assert "tokens/s" not in page


def test_a_report_written_before_a_field_existed_can_be_read() -> None:
    recorded = Path(__file__).parents[1] / "samples" / "nano_gpt" / "h200" / "report.json"
    found = from_document(json.loads(recorded.read_text(encoding="utf-8")))
    assert found.throughput_unit == "tokens"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_reason_goes_on_in_a_second_line(terminal: bool) -> None:
    recorded = Path(__file__).parents[1] / "samples" / "nano_gpt" / "h200" / "report.json"
    found = from_document(json.loads(recorded.read_text(encoding="utf-8")))
    reason = "it was left alone because " + "of this and that " * 6 + "and so on"
    place = replace(found.findings[0], status="declined", reason=reason, path="a.py", line=1, rule="r", needs=())
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=terminal, color_system=None)
    render_terminal(replace(found, findings=(place,)), console)
    shown = stream.getvalue()
    assert reason in " ".join(shown.split())
    assert all(len(line) <= 100 for line in shown.splitlines() if not line.startswith("report "))
    stream.truncate(0)
    render_terminal(replace(found, findings=(replace(place, reason=reason * 9),) * 40), console)
    assert len(stream.getvalue().splitlines()) <= 40
