"""The command line on bad input: one clear message, its exit status, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.cli import cli

pytest.importorskip("torch")

LOOP = """\
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    {body}
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "advisor", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return "train.py"


def one_message(done: subprocess.CompletedProcess[str]) -> str:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "advisor/" not in done.stderr.replace(".advisor/", ""), "a traceback of ours"
    return errors[0]


def test_no_such_file(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", "missing.py")
    assert (done.returncode, one_message(done)) == (2, "error: no such file: missing.py")
    assert not (tmp_path / ".advisor").exists()


def test_a_directory(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", ".")
    assert done.returncode == 2
    assert "directory" in one_message(done)


def test_no_script(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize")
    assert done.returncode == 2
    assert "name the training script" in one_message(done)


def test_syntax_error(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "x = 1\nfor for\n"))
    assert done.returncode == 2
    assert "train.py:2" in one_message(done)
    assert "for for" in done.stderr


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"\xff\xfe\x00")
    done = run(tmp_path, "optimize", "train.py")
    assert done.returncode == 2
    assert "UTF-8" in one_message(done)


def test_script_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    body = "if step == 2: raise RuntimeError('bad batch')"
    done = run(tmp_path, "optimize", script(tmp_path, LOOP.format(steps=50, body=body)))
    assert done.returncode == 3
    assert "bad batch" in one_message(done)
    assert 'train.py", line 6' in done.stderr
    assert done.stderr.count("Traceback") == 1


def test_a_failed_run_keeps_what_the_script_printed_and_no_place_of_this_machine(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "print('hello')\nraise RuntimeError('no data')\n"))
    assert done.returncode == 3
    (kept,) = (tmp_path / ".advisor" / "runs").iterdir()
    assert not (kept / "work").exists()
    assert "hello" in (kept / "output.log").read_text(encoding="utf-8")
    done = run(tmp_path, "apply")
    assert done.returncode == 2
    assert "did not reach its verdict" in one_message(done)


@pytest.mark.parametrize("entry", ["nowhere:main", "train:nothing"])
def test_an_entry_that_cannot_be_imported_is_the_scripts_error(tmp_path: Path, entry: str) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "x = 1\n"), "--entry", entry)
    assert done.returncode == 3
    assert entry.partition(":")[entry.startswith("train") * 2] in one_message(done)


def test_script_without_a_step_gets_the_ten_lines(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "import torch\nprint(torch.ones(2))\n"))
    assert done.returncode == 3
    assert "without an optimizer step" in one_message(done)
    assert "get_init_inputs" in done.stderr
    assert "--entry" in done.stderr


def test_script_with_too_few_steps(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, LOOP.format(steps=5, body="pass")))
    assert done.returncode == 3
    assert "after 5 optimizer steps" in one_message(done)


def test_script_that_reads_stdin(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "answer = input()\n"))
    assert done.returncode == 3
    assert "standard input" in one_message(done)


def test_script_that_exits(tmp_path: Path) -> None:
    done = run(tmp_path, "optimize", script(tmp_path, "import sys\nsys.exit('no data found')\n"))
    assert done.returncode == 3
    assert "no data found" in one_message(done)


def test_unwritable_output(tmp_path: Path) -> None:
    name = script(tmp_path, LOOP.format(steps=5, body="pass"))
    done = run(tmp_path, "optimize", name, "--out", "/proc/advisor")
    assert done.returncode == 6
    assert "--out" in one_message(done)


def test_output_is_a_file(tmp_path: Path) -> None:
    name = script(tmp_path, LOOP.format(steps=5, body="pass"))
    done = run(tmp_path, "optimize", name, "--out", name)
    assert done.returncode == 6
    one_message(done)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "naive-atention"), "did you mean naive-attention"),
        (("report",), "there is no run"),
        (("apply",), "there is no run"),
        (("report", "20990101"), "there is no run"),
        (("rules", "--rules", "nowhere"), "does not exist"),
    ],
)
def test_other_commands(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in one_message(done)


def test_unknown_configuration_key(tmp_path: Path) -> None:
    (tmp_path / "advisor.toml").write_text("stepz = 3\n", encoding="utf-8")
    done = run(tmp_path, "optimize", script(tmp_path, "x = 1\n"))
    assert done.returncode == 2
    assert "stepz" in one_message(done)


def test_unknown_option(tmp_path: Path) -> None:
    assert run(tmp_path, "optimize", "--frobnicate").returncode == 2


def test_rules_lists_and_explains(tmp_path: Path) -> None:
    done = run(tmp_path, "rules")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert "naive-attention" in names
    for name in names:
        page = CliRunner().invoke(cli, ["explain", name])  # in this process: rules are loaded once
        assert page.exit_code == 0
        assert page.output.startswith(f"# {name}\n")
        assert "## When not to" in page.output
    page_alone = run(tmp_path, "explain", "naive-attention")
    assert (page_alone.returncode, page_alone.stdout.splitlines()[0]) == (0, "# naive-attention")


def test_a_user_rule_that_cannot_load_is_named_and_the_others_listed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "broken.py").write_text("raise ValueError('half written')\n", encoding="utf-8")
    done = run(tmp_path, "rules", "--rules", "mine")
    assert done.returncode == 5
    assert "half written" in done.stderr
    assert "naive-attention" in done.stdout
