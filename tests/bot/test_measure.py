"""The measuring job on scripts that fail, are missing or lie elsewhere; the ones that train are run end to end."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from handed import NAIVE, proposal_of, report_of

from advisor import comparing
from advisor.bot import handover
from advisor.bot.measure import Order, measure
from advisor.commands.common import progress
from advisor.config import BotConfig, Config
from advisor.errors import UsageError
from advisor.model import Profile, Utilisation
from advisor.proposals import Examination

STAGES = ("capture", "ingest", "analyze", "match", "plan", "patch", "verify", "report")


def tree(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "found", "--allow-empty"]):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True)
    return folder


def measured(base: Path, head: Path, *commands: str, purpose: str = "examine") -> Examination:
    config = Config(bot=BotConfig(enabled=True, scripts=commands, time_s=5.0))
    order = Order(
        purpose=purpose,
        base=base,
        head=head,
        base_commit="1" * 40,
        head_commit="2" * 40 if head != base else "1" * 40,
        config=config,
        out=head.parent / "out",
    )
    return measure(order, progress(True, STAGES))


def test_no_script_is_an_error_of_the_owner(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", {})
    with pytest.raises(UsageError, match="no script to measure"):
        measured(root, root)


@pytest.mark.parametrize(
    "command", ["/etc/passwd", "../x.py", "a/../../x.py", "missing.py", "-m x", "--", "-- --", ".", "''"]
)
def test_a_script_that_is_not_in_the_repository_is_part_of_the_answer(tmp_path: Path, command: str) -> None:
    root = tree(tmp_path / "a", {"x.py": "x = 1\n"})
    for purpose in ("examine", "propose"):
        (script,) = measured(root, root, command, purpose=purpose).scripts
        assert script.error
        assert script.report is None
        assert str(tmp_path) not in repr(script)


def test_rules_that_are_gone_are_left_out_of_what_is_asked(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", {})
    config = Config(bot=BotConfig(enabled=True, scripts=("missing.py",)))
    sha = "1" * 40
    order = Order(
        purpose="propose",
        base=root,
        head=root,
        base_commit=sha,
        head_commit=sha,
        config=config,
        out=tmp_path / "out",
        rules=("naive-attention", "of-old"),
    )
    assert measure(order, progress(True, STAGES)).rules == ("naive-attention",)
    with pytest.raises(UsageError, match="there is no rule of-old"):
        measure(dataclasses.replace(order, rules=("of-old",)), progress(True, STAGES))


@pytest.mark.slow
def test_a_script_that_fails_keeps_no_other_from_being_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    good = {"good.py": "import torch\nraise ValueError('first')\n"}
    base = tree(tmp_path / "base", good)
    head = tree(tmp_path / "head", {**good, "new.py": "raise KeyError('second')\n"})
    first, second = measured(base, head, "good.py", "new.py").scripts
    assert first.comparison is not None
    assert first.comparison.outcome == "failed"
    assert "first" in first.comparison.reasons[0]
    assert first.error is not None
    assert second.comparison is not None
    assert "is not there at the base" in second.comparison.reasons[0]
    assert second.error is not None
    assert "second" in second.error


def test_the_command_asks_for_work_trees_and_takes_the_settings_of_the_owner(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    root = tree(tmp_path / "a", {"advisor.toml": '[bot]\nenabled = true\nscripts = ["missing.py"]\n'})
    other = tree(tmp_path / "b", {"advisor.toml": '[bot]\nscripts = ["theirs.py"]\n'})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "advisor", "bot", "measure", "--purpose", "examine", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), check=False)

    done = run("--base", str(plain), "--head", str(plain), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no git work tree" in done.stderr
    done = run("--base", str(other), "--head", str(other), "--settings", str(root), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert '"command": "missing.py"' in (tmp_path / "out" / handover.NAME).read_text(encoding="utf-8")


def test_the_recording_is_what_the_job_writes() -> None:
    assert proposal_of().rules == ("naive-attention",)
    assert report_of().script == "train.py"
    assert (NAIVE / "train.py").is_file()


# ------------------------------------------------------------------------------------------------------------- figures


def profile(**changed: Any) -> Profile:
    found = report_of()
    fields = {"environment": found.environment, "hardware": found.hardware, "steps": (), **changed}
    return Profile(utilisation=Utilisation(), **fields)


@pytest.mark.parametrize(
    ("base", "head", "said"),
    [
        ((512, "input_ids"), (512, "input_ids"), None),
        ((512, "input_ids"), (512, "tokens"), None),
        ((512, "input_ids"), (1024, "input_ids"), "512 tokens at the base, 1,024 tokens at the head"),
        ((512, "input_ids"), (8, "samples: first dimension"), "512 tokens at the base, 8 samples at the head"),
        ((None, None), (1024, "input_ids"), None),
    ],
)
def test_steps_of_other_batches_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, base: tuple[Any, Any], head: tuple[Any, Any], said: str | None
) -> None:
    """A pull request that doubles the batch makes a step slower and is no regression."""
    timing = report_of().timing
    assert timing is not None
    monkeypatch.setattr(comparing, "_race", lambda *_: timing)
    before, after = (profile(tokens_per_step=n, tokens_source=source) for n, source in (base, head))
    job: Any = SimpleNamespace(config=Config(min_quads=6))
    found = comparing.compare(job, job, before, after, seconds=1.0)
    assert found.outcome == ("improved" if said is None else "inconclusive")
    assert said is None or said in found.reasons[0]


def test_other_devices_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_race", lambda *_: report_of().timing)
    job: Any = SimpleNamespace(config=Config(min_quads=6))
    other = dataclasses.replace(report_of().hardware, name="NVIDIA H100")
    found = comparing.compare(job, job, profile(), profile(hardware=other), seconds=1.0)
    assert found.outcome == "inconclusive"


def test_use_is_told_at_the_step_time_of_the_race() -> None:
    from advisor.comparing import use_of

    found = report_of()
    profile = Profile(
        environment=found.environment,
        hardware=found.hardware,
        steps=(),
        utilisation=Utilisation(mfu=0.2, peak_flops=1e12, peak_source="given"),
        step_us=(10_000.0,),
        tokens_per_step=100,
        tokens_source="samples: first dimension",
    )
    use = use_of(profile, (20_000.0, 20_000.0, 40_000.0), 2 << 30)
    assert (use.step_ms, use.tokens_per_s, use.mfu, use.peak_gib) == (20.0, 5000.0, pytest.approx(0.1), 2.0)
    assert (use.throughput_unit, use.peak_flops) == ("samples", 1e12)
