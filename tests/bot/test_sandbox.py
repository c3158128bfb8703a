"""What runs in a sandbox gets no secret, writes nowhere else, and is gone when its time is over."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.bot.sandboxes.bubblewrap import View, arguments, covers
from advisor.bot.sandboxes.logtail import Tail
from advisor.bot.sandboxes.sandbox import (
    NOBODY,
    Finished,
    Limits,
    Sandbox,
    allowed_environment,
    discard,
    find_sandbox,
    read_result,
)
from advisor.errors import ArtifactError, UsageError
from advisor.redact import Redactor

TOKEN = "ghs_Planted0123456789abcdef01234567"
HERE = Path(__file__).parent
PLAIN = "/usr/bin/python3"  # one that every account may run
SYSTEM = "/bin/sh"

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give code another account")
plain = pytest.mark.skipif(not os.access(PLAIN, os.X_OK), reason=f"needs {PLAIN}")
KINDS = [
    pytest.param("bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")),
    pytest.param("user", marks=root),
]
wrapped = KINDS[0].marks
WRAPPED = KINDS[:1]


@functools.cache
def of_kind(kind: str) -> Sandbox:
    return Sandbox(kind="user", uid=NOBODY, gid=NOBODY) if kind == "user" else find_sandbox(kind)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other accounts can enter, as the bot's folder for runs has to be; those of pytest are closed."""
    place = Path(os.path.realpath(tempfile.mkdtemp(prefix="advisor-test-")))
    place.chmod(0o755)
    (place / "out").mkdir()
    yield place
    discard(place)


def run(
    box: Sandbox,
    folder: Path,
    command: Sequence[str],
    *,
    seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    network: bool = False,
    limits: Mapping[str, Any] | None = None,
    **more: Any,
) -> Finished:
    return box.run(
        command,
        cwd=more.pop("cwd", folder / "out"),
        writable=more.pop("writable", [folder / "out"]),
        hidden=more.pop("hidden", []),
        environment=os.environ if environment is None else environment,
        network=network,
        limits=Limits(**({"seconds": seconds, "grace_s": 0.5} | dict(limits or {}))),
        log=more.pop("log", folder / "log"),
        redact=Redactor.of_machine().text,
        **more,
    )


def locked(path: Path) -> bool:
    """Whether a process holds the lock."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def eventually(wanted: Any, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if wanted():
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------------- thieves


def meet(kind: str, folder: Path) -> dict[str, Any]:
    """Let hostile code meet the bot in a sandbox; what came of it."""
    home = folder / "home"
    home.mkdir()
    environment = dict(os.environ) | {"HOME": str(home), "BOT_TOKEN": TOKEN, "GITHUB_TOKEN": TOKEN, "TORCH_X": TOKEN}
    interpreter = PLAIN if kind == "user" else sys.executable
    (folder / "out").rmdir()
    done = subprocess.run(
        [sys.executable, str(HERE / "victim.py"), kind, str(folder), interpreter],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@root
def test_the_thief_finds_everything_where_nothing_protects(folder: Path) -> None:
    """Shows that it knows how to look: what it does not find below was kept from it."""
    found = meet("none", folder)["found"]
    assert {name for name, got in found.items() if got == TOKEN} >= {
        "process environ", "process mem", "process fd", "process root", "file", "loopback", "abstract socket",
    }  # fmt: skip
    assert "trace" in found and "hard link" in found


@pytest.mark.parametrize("kind", KINDS)
def test_the_thief_finds_nothing(kind: str, folder: Path) -> None:
    if kind == "user" and not os.access(PLAIN, os.X_OK):
        pytest.skip(f"needs {PLAIN}")
    told = meet(kind, folder)
    assert told["found"] == {} and told["planted"] == []
    assert told["taken"] == [], "a link, a pipe or a second name was taken for a result"
    assert told["alive"], "a process of the bot was killed"
    assert told["status"] == 0 and 1000 < told["log"] <= (64 << 10) + 200
    assert TOKEN not in (folder / "run.log").read_text()


# ----------------------------------------------------------------------------------------------------------------- end


@pytest.mark.parametrize("kind", KINDS)
def test_time_runs_out_for_all_that_was_started(kind: str, folder: Path) -> None:
    script = "trap '' TERM; (trap '' TERM HUP; setsid sleep 600 9>held) & exec 9>mine; flock 9; echo started; sleep 600"
    script = f"flock held -c 'trap \"\" TERM; setsid sleep 600' & {script}"
    finished = run(of_kind(kind), folder, [SYSTEM, "-c", script], seconds=1.0)
    assert finished.timed_out and finished.status != 0 and 1.0 <= finished.seconds < 20
    assert finished.left_behind >= 1
    assert not locked(folder / "out" / "held") and not locked(folder / "out" / "mine")
    assert "started" in (folder / "log").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_may_tidy_up_when_its_time_runs_out(kind: str, folder: Path) -> None:
    script = "trap 'echo tidy > tidy; exit 7' TERM; sleep 600 & wait"
    finished = run(of_kind(kind), folder, [SYSTEM, "-c", script], seconds=1.0, limits={"grace_s": 20.0})
    assert finished.timed_out and finished.status == 7 and finished.seconds < 15
    assert read_result(folder / "out", "tidy", 100) == b"tidy\n"


@pytest.mark.parametrize("kind", KINDS)
def test_status_is_that_of_the_command(kind: str, folder: Path) -> None:
    box = of_kind(kind)
    for script, status in (("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", 139), ("exec /nonexistent", 127)):
        finished = run(box, folder, [SYSTEM, "-c", script])
        assert (finished.status, finished.timed_out) == (status, False), script


DRIVER = """
import os, sys
from pathlib import Path
from advisor.bot.sandboxes.sandbox import Limits, Sandbox, find_sandbox
box = find_sandbox("bubblewrap") if sys.argv[1] == "bubblewrap" else Sandbox(kind="user", uid=65534, gid=65534)
out = Path(sys.argv[2])
box.run(["/bin/sh", "-c", "setsid flock held -c 'echo up > up; sleep 600'"], cwd=out, writable=[out], hidden=[],
    environment={}, network=False, limits=Limits(seconds=600), log=out.parent / "log", redact=str)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_bot(kind: str, number: signal.Signals, folder: Path) -> None:
    out = folder / "out"
    command = [sys.executable, "-c", DRIVER, kind, str(out)]
    environment = dict(os.environ) | {"TMPDIR": str(folder)}  # where a killed bot leaves its temporary folder
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            assert eventually((out / "up").exists) and locked(out / "held")
            process.send_signal(number)
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert eventually(lambda: not locked(out / "held"))


# ---------------------------------------------------------------------------------------------------------------- view


@pytest.mark.parametrize("kind", WRAPPED)
def test_homes_and_temporary_folders_are_empty_and_the_rest_is_read_only(kind: str, folder: Path) -> None:
    (folder / "out" / "mine").write_text("1")
    (folder / "neighbour").write_text("1")
    script = (
        f"ls {folder}; ls -d /home/* /run/* /var/tmp/*; touch {folder}/out/x {HERE}/x /usr/x; echo 2 > mine; ls /dev"
    )
    run(of_kind(kind), folder, [SYSTEM, "-c", script])
    said = (folder / "log").read_text().split()
    assert "out" in said and "neighbour" not in said and "log" not in said
    assert "Read-only" in said and not (HERE / "x").exists()
    assert (folder / "out" / "x").exists() and (folder / "out" / "mine").read_text() == "2\n"
    assert not {"vda", "sda", "mem", "kmsg", "loop0"} & set(said)


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_hidden_place_within_a_given_one_stays_hidden(kind: str, folder: Path) -> None:
    (folder / "tree" / "deep" / "state").mkdir(parents=True)
    (folder / "tree" / "deep" / "state" / "key").write_text("secret")
    (folder / "tree" / "app.pem").write_text("secret")
    (folder / "tree" / "alias.pem").symlink_to(folder / "tree" / "app.pem")
    (folder / "tree" / "data").write_text("data")
    finished = run(
        of_kind(kind),
        folder,
        [SYSTEM, "-c", f"cd {folder}/tree; cat data deep/state/key app.pem alias.pem"],
        readable=[folder / "tree"],
        hidden=[folder / "tree" / "deep" / "state", folder / "tree" / "alias.pem", folder / "tree" / "none"],
    )
    assert finished.status != 0
    said = (folder / "log").read_text()
    assert "data" in said and "secret" not in said


def test_folders_that_contradict_each_other_are_refused(folder: Path) -> None:
    def planned(**places: Any) -> list[str]:
        view = {"program": "x", "cwd": folder / "out", "writable": (), "readable": (), "hidden": (), "network": False}
        return arguments(
            "bwrap", View(**(view | places), shm_bytes=1, tmp_bytes=1), options="", command=["x"], dropped=False
        )

    assert planned()[-2:] == ["--", "x"]
    home = Path(os.path.realpath(Path.home()))
    for places in (
        {"writable": (folder / "out",), "hidden": (folder / "out",)},
        {"readable": (home,)},
        {"writable": (Path("/tmp"),)},
        {"cwd": Path("/tmp")},
    ):
        with pytest.raises(UsageError, match="hidden"):
            planned(**places)


def test_links_to_writable_folders_and_logs_within_are_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "out")
    box = Sandbox(kind="none")
    for places in (
        {"writable": [folder / "link"]},
        {"cwd": folder / "link"},
        {"writable": [folder / "none"]},
        {"log": folder / "out" / "log"},
        {"log": folder / "link" / "log"},
    ):
        with pytest.raises(UsageError):
            run(box, folder, ["true"], **places)


def test_a_log_is_never_written_through_a_link(folder: Path) -> None:
    (folder / "precious").write_text("precious")
    (folder / "log").symlink_to(folder / "precious")
    run(Sandbox(kind="none"), folder, ["echo", "said"], network=True)
    assert (folder / "precious").read_text() == "precious"
    assert (folder / "log").read_text() == "said\n" and (folder / "log").stat().st_mode & 0o777 == 0o600


def test_files_of_secrets_that_the_environment_names_are_covered(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "KUBECONFIG", "APP_PRIVATE_KEY_PATH", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        assert tmp_path / "key" in covers({name: str(tmp_path / "key")}), name
    assert tmp_path / "key" not in covers({"PATH": str(tmp_path / "key")})


def test_the_runner_of_a_workflow_is_covered(tmp_path: Path) -> None:
    temp = tmp_path / "runner" / "_work" / "_temp"
    temp.mkdir(parents=True)
    (tmp_path / "runner" / ".credentials").touch()
    assert covers({"RUNNER_TEMP": str(temp)}) >= {temp, tmp_path / "runner" / ".credentials"}


# ------------------------------------------------------------------------------------------------------------- network


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_cut_unless_it_is_allowed(kind: str, folder: Path) -> None:
    own = "(echo > /dev/tcp/127.0.0.1/1) 2>&1 | grep -q refused && echo loopback"
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"(echo > /dev/tcp/127.0.0.1/{server.getsockname()[1]}) 2>/dev/null && echo reached"
        for network in (False, True):
            run(of_kind(kind), folder, ["/bin/bash", "-c", f"{own}; {reach}"], network=network)
            said = (folder / "log").read_text().split()
            assert "loopback" in said, "a loopback interface of its own is up"
            assert ("reached" in said) is network


# -------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", KINDS)
def test_files_cores_and_priority_are_bounded(kind: str, folder: Path) -> None:
    script = "ulimit -c; nice; umask; head -c 3000000 /dev/zero > big; stat -c %s big"
    run(of_kind(kind), folder, [SYSTEM, "-c", script], limits={"file_bytes": 1 << 20, "nice": 7})
    said = (folder / "log").read_text().split()
    assert said[:2] == ["0", str(os.nice(0) + 7)] and str(1 << 20) in said


@root
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_bomb_ends(kind: str, folder: Path) -> None:
    script = "f() { f | f & }; f; exec sleep 600"
    finished = run(of_kind(kind), folder, [SYSTEM, "-c", script], seconds=1.0, limits={"processes": 200})
    assert finished.timed_out and finished.seconds < 20
    mine = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and _runs(entry, script)]
    assert mine == []


def _runs(entry: Path, script: str) -> bool:
    try:
        return script.encode() in (entry / "cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("kind", WRAPPED)
def test_memory_folders_have_a_size(kind: str, folder: Path) -> None:
    run(
        of_kind(kind),
        folder,
        [SYSTEM, "-c", "df --output=size -B1 /dev/shm /tmp; touch /dev/shm/x /tmp/x && echo both"],
        limits={"shm_bytes": 5 << 20, "tmp_bytes": 7 << 20},
    )
    said = (folder / "log").read_text().split()
    assert {str(5 << 20), str(7 << 20), "both"} <= set(said)


@given(st.lists(st.binary(max_size=200)), st.integers(min_value=4, max_value=300))
def test_an_output_is_kept_in_bounds(blocks: list[bytes], limit: int) -> None:
    tail = Tail(limit)
    for block in blocks:
        tail.add(block)
    whole = b"".join(blocks)
    kept = tail.text()
    if len(whole) <= limit:
        assert kept == whole.decode("utf-8", "replace")
    else:
        assert len(kept) <= limit + 60 and "bytes left out" in kept


def test_a_secret_that_is_cut_in_two_is_not_shown(folder: Path) -> None:
    for shift in range(0, 40, 3):
        tail = Tail(400)
        tail.add(b"x" * (80 + shift) + b"\n" + TOKEN.encode() + b"\n" + b"ha\n" * 1000)
        assert "Planted" not in tail.text() or TOKEN in tail.text()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_printed_is_redacted(kind: str, folder: Path) -> None:
    finished = run(of_kind(kind), folder, [SYSTEM, "-c", "printf 'a ghp_%s b' 0123456789abcdef0123456789"])
    assert finished.status == 0 and (folder / "log").read_text() == "a <redacted> b"


# --------------------------------------------------------------------------------------------------------- environment


def test_few_variables_pass_and_none_that_looks_like_a_secret() -> None:
    offered = {
        "PATH": "/usr/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "+dynamo", "OMP_NUM_THREADS": "2",
        "HOME": "/home/ada", "GITHUB_TOKEN": "x", "SSH_AUTH_SOCK": "/x", "LD_PRELOAD": "/x.so", "PYTHONPATH": "/x",
        "PYTHONSTARTUP": "/x", "TORCH_HUB_TOKEN": "abcdef", "TRITON_X": TOKEN, "NVIDIA_API_KEY": "zzz",
        "CUDA_URL": "https://ada:pw@example.org/", "DATA": "/data", "OWN_SECRET": "x", "PYTORCH_HIDE": "literal-secret",
        "GIT_ASKPASS": "x", "GIT_CONFIG_COUNT": "1", "ACTIONS_RUNTIME_TOKEN": "x", "http_proxy": "http://proxy:3128",
    }  # fmt: skip
    redact = Redactor(extra=("literal-secret",)).text
    assert allowed_environment(offered, redact, {"DATA", "OWN_SECRET"}) == {
        name: offered[name]
        for name in ("PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "TORCH_LOGS", "OMP_NUM_THREADS", "DATA")
    }
    assert allowed_environment({}) == {"PATH": os.defpath}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_in_the_environment(kind: str, folder: Path) -> None:
    run(of_kind(kind), folder, ["/usr/bin/env"], environment={"GITHUB_TOKEN": TOKEN, "LANG": "C", "SECRET": "s"})
    names = {line.partition("=")[0] for line in (folder / "log").read_text().splitlines()}
    assert names <= {"PATH", "LANG", "LC_CTYPE", "HOME", "TMPDIR", "USER", "LOGNAME", "PWD", "GIT_CONFIG_NOSYSTEM"}
    assert {"HOME", "TMPDIR"} <= names


# ------------------------------------------------------------------------------------------------------------- results


def test_a_result_is_a_regular_file_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "r.json").write_bytes(b"12345")
    assert read_result(tmp_path, "deep/r.json", 5) == b"12345"
    (tmp_path / "away").symlink_to(tmp_path / "deep")
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "r.json")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        unix.bind("socket")
    for name, limit in (
        ("deep/r.json", 4), ("away/r.json", 9), ("link", 9), ("pipe", 9), ("socket", 9), ("deep", 9), ("none", 9),
        ("../x", 9), ("", 9), ("/etc/passwd", 9), ("deep/../deep/r.json", 9), ("./deep/r.json", 9), ("a\0b", 9),
    ):  # fmt: skip
        with pytest.raises(ArtifactError):
            read_result(tmp_path, name, limit)
    with pytest.raises(ArtifactError):
        read_result(tmp_path / "away", "r.json", 9)
    os.link(tmp_path / "deep" / "r.json", tmp_path / "deep" / "second")
    with pytest.raises(ArtifactError):
        read_result(tmp_path, "deep/r.json", 9)


def test_what_hostile_code_has_closed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "run" / "a" / "b").mkdir(parents=True)
    (tmp_path / "run" / "a" / "away").symlink_to(tmp_path / "keep")
    (tmp_path / "run" / "a" / "b").chmod(0)
    (tmp_path / "run" / "a").chmod(0)
    discard(tmp_path / "run")
    assert not (tmp_path / "run").exists() and (tmp_path / "keep").stat().st_mode & 0o777 == 0o755


# ------------------------------------------------------------------------------------------------------------ choosing


def test_without_a_way_to_protect_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for wanted in ("auto", "bubblewrap", "user"):
        with pytest.raises(UsageError, match="install bubblewrap"):
            find_sandbox(wanted)
    assert find_sandbox("none").kind == "none"
    with pytest.raises(UsageError, match="no sandbox is called"):
        find_sandbox("docker")


@root
def test_code_does_not_run_as_root() -> None:
    for account in ({"uid": 0}, {"gid": 0}):
        with pytest.raises(UsageError, match="root"):
            find_sandbox("auto", **account)


def test_a_bubblewrap_that_may_not_make_namespaces_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stands for a container or a kernel that allows none: the program is there and fails as the real one does."""
    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match="Operation not permitted"):
        find_sandbox("bubblewrap")


@root
def test_another_account_that_could_read_what_is_hidden_is_refused(folder: Path) -> None:
    box = of_kind("user")
    (folder / "key.pem").write_text("secret")
    (folder / "key.pem").chmod(0o644)
    with pytest.raises(UsageError, match=r"can read .*key\.pem"):
        run(box, folder, ["true"], hidden=[folder / "key.pem"])
    (folder / "state").mkdir(mode=0o711)
    with pytest.raises(UsageError, match="can read"):
        run(box, folder, ["true"], hidden=[folder / "state"])
    (folder / "state").chmod(0o700)
    (folder / "key.pem").chmod(0o600)
    assert run(box, folder, ["true"], hidden=[folder / "state", folder / "key.pem"]).status == 0


@root
def test_another_account_that_cannot_reach_the_interpreter_is_refused(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    (closed / "python").symlink_to(PLAIN)
    with pytest.raises(UsageError, match="cannot reach"):
        run(of_kind("user"), folder, [str(closed / "python"), "-V"])


@root
def test_what_is_handed_over_holds_no_second_names(folder: Path) -> None:
    """A hard link that an earlier run has left must not give it the file it is a name of."""
    (folder / "precious").write_text("1")
    os.link(folder / "precious", folder / "out" / "link")
    (folder / "out" / "away").symlink_to(folder / "precious")
    assert run(of_kind("user"), folder, ["true"]).status == 0
    assert (folder / "precious").stat().st_uid == 0 and (folder / "out").stat().st_uid == NOBODY


# --------------------------------------------------------------------------------------------------------- the real use

TRAINING = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4, num_workers=2)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in data:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_script_is_checked_inside(kind: str, folder: Path) -> None:
    pytest.importorskip("torch")
    out = folder / "out"
    (out / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "advisor", "check", "train.py", "--json", "--out", str(out / "runs")]
    finished = run(of_kind(kind), folder, command, seconds=120)
    said = (folder / "log").read_text()
    assert finished.status == 0 and not finished.timed_out, said
    assert list((out / "runs").iterdir()), said
    assert "not measured" not in said
