"""Starting a script in a child, hearing from it, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.capture.launch import Child, child_environment, describe_failure
from advisor.errors import NoStepsError, OutputError, ScriptError, ScriptTimeout
from advisor.session import Spec

MakeSpec = Callable[..., Spec]
NO_PLAN = "advisor.session:SessionPlan"
TRAIN = """
    import torch
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(3):
        w.sum().backward()
        optimizer.step()
"""


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    def make(text: str, **more: object) -> Spec:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(text), encoding="utf-8")
        options = {
            "script": str(script),
            "argv": (),
            "root": str(tmp_path),
            "out": str(tmp_path / "out"),
            "plan": NO_PLAN,
        }
        return Spec(**(options | more))  # type: ignore[arg-type]

    return make


def run(spec: Spec, **options: object) -> Child:
    """Run to the end and return the finished child."""
    with Child(spec, **options) as child:  # type: ignore[arg-type]
        while child.receive() is not None:
            continue
        child.wait(10.0)
    return child


def log(child: Child) -> str:
    return (child.out / "output.log").read_text(encoding="utf-8")


def test_output_is_redacted_and_filtered(make_spec: MakeSpec) -> None:
    text = """
        import sys
        print("token=SECRET out")
        print("SECRET err", file=sys.stderr)
        print("USDT: torch's own")
        print("no newline at the end", end="")
    """
    child = run(make_spec(text), redact=lambda line: line.replace("SECRET", "[redacted]"))
    assert sorted(log(child).splitlines()) == ["[redacted] err", "no newline at the end", "token=[redacted] out"]
    assert child.status() == {"status": "ended", "steps": 0}


def test_an_ended_script_without_steps(make_spec: MakeSpec) -> None:
    error = run(make_spec("print('nothing to do')")).failure()
    assert isinstance(error, NoStepsError)
    assert error.detail == "nothing to do\n"


def test_a_traceback_is_the_users_own(make_spec: MakeSpec) -> None:
    spec = make_spec(TRAIN + "        if step == 2: raise KeyError('lost')\n")
    error = run(spec).failure()
    assert type(error) is ScriptError
    assert str(error) == "the script raised KeyError: 'lost'"
    assert error.detail is not None
    assert error.detail.startswith("Traceback (most recent call last):\n")
    assert f'File "{spec.script}", line 8' in error.detail
    assert "child.py" not in error.detail


def test_texts_of_errors_are_redacted(make_spec: MakeSpec) -> None:
    error = run(make_spec("raise RuntimeError('SECRET')"), redact=lambda text: text.replace("SECRET", "***")).failure()
    assert str(error) == "the script raised RuntimeError: ***"
    assert "SECRET" not in (error.detail or "")


def test_standard_input_is_closed(make_spec: MakeSpec) -> None:
    assert str(run(make_spec("input()")).failure()) == "the script reads standard input, which it does not have here"


def test_exit_status_is_told(make_spec: MakeSpec) -> None:
    assert str(run(make_spec("raise SystemExit(7)")).failure()) == "the script left with exit status 7"
    said = "the script stopped: no data in /data"
    assert str(run(make_spec("raise SystemExit('no data in /data')")).failure()) == said
    message = str(run(make_spec("import os; os._exit(9)")).failure())
    assert message == "the script's process ended with exit status 9 and left no record"


def test_an_optimizer_step_that_is_compiled_is_told(make_spec: MakeSpec) -> None:
    """Hooks inside of compiled code would be compiled again in every step, or not be seen."""
    update = "    update = torch.compile(lambda: optimizer.step(), backend='eager')\n    for step"
    compiled = TRAIN.replace("        optimizer.step()\n", "        update()\n").replace("    for step", update)
    told = "the script stopped: it calls optimizer.step() inside of what it compiles"
    for steps in (3, 100_000_000):
        message = str(run(make_spec(compiled.replace("range(3)", f"range({steps})"))).failure())
        assert message.startswith(told), steps
    first = "    w.sum().backward(); update()\n    for step"
    tried = TRAIN.replace("    for step", update.replace("    for step", first))
    assert run(make_spec(tried)).status() == {"status": "ended", "steps": 3}


def test_a_script_killed_by_the_system(make_spec: MakeSpec) -> None:
    error = run(make_spec("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")).failure()
    assert "probably because the machine ran out of memory" in str(error)
    assert "ended by signal SIGTERM" in str(describe_failure({}, -signal.SIGTERM))


def test_a_silent_script_is_killed(make_spec: MakeSpec) -> None:
    with Child(make_spec("import time; print('waiting', flush=True); time.sleep(600)"), step_timeout=8.0) as child:
        with pytest.raises(ScriptTimeout, match="did not reach its next step within 8 s") as caught:
            child.receive()
        assert child.wait(0) is not None
    assert caught.value.detail == "waiting\n"


def test_steps_are_signs_of_life(make_spec: MakeSpec) -> None:
    spec = make_spec(TRAIN.replace("range(3)", "range(6)") + "        import time; time.sleep(1.5)\n")
    assert run(spec, step_timeout=8.0).status() == {"status": "ended", "steps": 6}


def test_nothing_is_left_behind(make_spec: MakeSpec, tmp_path: Path) -> None:
    text = """
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path("pids").write_text(str(other.pid))
        print("ready", flush=True)
        time.sleep(600)
    """
    pids = tmp_path / "pids"
    child = Child(make_spec(text), cwd=str(tmp_path))

    def interrupted() -> None:
        with child:
            deadline = time.monotonic() + 60
            while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
                time.sleep(0.1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    grandchild = int(pids.read_text())
    assert child.wait(0) == -signal.SIGKILL
    assert not _runs(grandchild)


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie nobody has collected yet."""
    for _ in range(20):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_messages_go_both_ways(make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = """
        from advisor.session import SessionPlan
        class Echo(SessionPlan):
            def step_end(self, step):
                message = self.session.channel.receive()
                self.session.progress(event="echo", got=message)
                if message["stop"]:
                    self.session.stop()
    """
    (tmp_path / "echo_plan.py").write_text(textwrap.dedent(plan))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with Child(make_spec(TRAIN, plan="echo_plan:Echo")) as child:
        for stop in (False, True):
            child.send({"stop": stop})
            assert child.receive() == {"event": "echo", "got": {"stop": stop}}
        end = child.receive()
        assert end is not None
        assert (end["event"], end["status"], end["steps"]) == ("end", "stopped", 2)
        assert child.receive() is None
        child.send({"stop": True})  # nobody listens any more


def test_patched_sources_reach_spawned_processes(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 'as found'\n")
    (tmp_path / "patched.py").write_text("VALUE = 'patched'\n")
    text = """
        import subprocess, sys
        import helper
        print("here", helper.VALUE, flush=True)
        subprocess.run([sys.executable, "-c", "import helper; print('there', helper.VALUE)"], check=True)
    """
    overlay = {str(tmp_path / "helper.py"): str(tmp_path / "patched.py")}
    child = run(make_spec(text, overlay=overlay), cwd=str(tmp_path))
    assert log(child).splitlines() == ["here patched", "there patched"]
    assert (tmp_path / "helper.py").read_text() == "VALUE = 'as found'\n"


def test_the_environment_is_the_users_plus_what_the_plan_asks(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    spec = make_spec("", options={"deterministic": True, "environment": {"TORCHDYNAMO_DISABLE": 1}})
    Path(spec.out).mkdir()
    found = child_environment(spec, sys.executable)
    assert found["MINE"] == "kept"
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["TORCHDYNAMO_DISABLE"] == "1"
    assert "ADVISOR_OVERLAY" not in found
    first, second, *_ = found["PYTHONPATH"].split(os.pathsep)
    assert first.endswith(os.path.join("capture", "site"))
    assert second == "/somewhere"


def test_sys_path_is_the_scripts(make_spec: MakeSpec, tmp_path: Path) -> None:
    child = run(make_spec("import sys; print(sys.path[0]); print(__name__, sys.argv)", argv=("--flag", "1")))
    where = str(tmp_path / "script.py")
    assert log(child).splitlines() == [str(tmp_path), f"__main__ {[where, '--flag', '1']}"]


def test_an_interpreter_that_is_not_there(make_spec: MakeSpec) -> None:
    with pytest.raises(OutputError, match="cannot start the script: No such file or directory"):
        Child(make_spec(""), interpreter="/nowhere/python")
