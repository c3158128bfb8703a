"""The view of the machine that bubblewrap gives to hostile code: what it sees, what it may write, what is not there.

The whole machine is there read-only, except for the places where people and services keep what is theirs: those are
empty, with only the named folders put back. Devices are a fixed handful and the GPUs, never the whole of /dev: as root,
even without capabilities, a process may open the disk itself there. As root the program that runs has given up root
besides (`keeper.py become`), so that what only root may read is out of reach even where nothing covers it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.errors import UsageError

# Empty for the code, whether or not anything secret is known to lie there.
_COVERED = ("/tmp", "/var/tmp", "/home", "/root", "/run", "/var/run", "/var/spool", "/var/log")
_SECRETS = (
    *("/etc/shadow", "/etc/gshadow", "/etc/shadow-", "/etc/gshadow-", "/etc/sudoers", "/etc/ssh", "/etc/krb5.keytab"),
    *("/etc/docker", "/etc/kubernetes", "/etc/ssl/private", "/etc/letsencrypt", "/var/lib/kubelet", "/var/lib/docker"),
    *("/etc/gitconfig", "/etc/netrc", "/sys/kernel/debug", "/sys/kernel/security", "/sys/firmware", "/sys/fs/bpf"),
)
_RUNNER = (".credentials", ".credentials_rsaparams", ".runner", ".env", ".path")  # of a runner of GitHub Actions
_PERSONAL = (
    ".netrc",
    ".git-credentials",
    ".gitconfig",
    ".config",
    ".ssh",
    ".aws",
    ".docker",
    ".kube",
    ".gnupg",
    ".cache",
)
_NAMING = re.compile(
    r".*(?:CREDENTIALS|KUBECONFIG|NETRC|(?:KEY|TOKEN|SECRET|PASSWORD|CERT)S?_?(?:FILE|PATH)|AUTH_SOCK)"
)
_DEVICES = ("nvidia*", "dri", "kfd", "dxg", "accel*", "infiniband")
_PARTS = ("bin", "lib", "lib64", "include")  # of an interpreter that is installed among other things


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the code of one run gets: folders as real absolute paths, sizes in bytes; `program` is what is started."""

    program: str
    cwd: Path
    writable: tuple[Path, ...]
    readable: tuple[Path, ...]
    hidden: tuple[Path, ...]
    network: bool
    shm_bytes: int
    tmp_bytes: int


def arguments(program: str, view: View, *, options: str, command: Sequence[str], dropped: bool) -> list[str]:
    """The command line of bubblewrap; `options` is its help text, `dropped` that the command gives up root by itself.

    Raises UsageError for folders that contradict each other.
    """
    said = [program, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    said += ["--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if not view.network:
        said += ["--unshare-net"]
    if dropped:
        said += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        said += ["--unshare-user", *(["--disable-userns"] if "--disable-userns" in options else [])]
    said += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    said += _empty(Path("/dev/shm"), view.shm_bytes, options)
    for pattern in _DEVICES:
        for device in sorted(Path("/dev").glob(pattern)):
            said += ["--dev-bind-try", str(device), str(device)]
    plan = _plan(view, dropped=dropped)
    for path, what in sorted(plan.items(), key=lambda item: (len(item[0].parts), item[0])):
        if what in {"see", "write"} and _covered_by(path, plan):  # made on the way to it, such folders would be closed
            said += [*_mode("0755", options), "--dir", str(path.parent)]
        if what == "write":
            said += ["--bind", str(path), str(path)]
        elif what == "see":
            said += ["--ro-bind", str(path), str(path)]
        elif _nearest(path, plan) in {"cover", "hide"}:
            continue  # nothing is there any more
        elif path.is_dir():
            said += _empty(path, view.tmp_bytes if path == Path("/tmp") else 1 << 20, options)
        else:
            said += ["--ro-bind", "/dev/null", str(path)]
    return [*said, "--chdir", str(view.cwd), "--", *command]


def _empty(path: Path, size: int, options: str) -> list[str]:
    """An empty folder; versions of bubblewrap before 0.5 and 0.8 can set neither its mode nor its size."""
    shared = path in {Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")}
    room = ["--size", str(size)] if "--size" in options else []
    return [*_mode("1777" if shared else "0755", options), *room, "--tmpfs", str(path)]


def _mode(mode: str, options: str) -> list[str]:
    return ["--perms", mode] if "--perms" in options else []


def _plan(view: View, *, dropped: bool) -> dict[Path, str]:
    """What is done at which path; a deeper path counts over the one it lies in."""
    plan = dict.fromkeys(covers(os.environ), "cover")
    for path in view.hidden:
        if os.path.lexists(path):
            plan[Path(os.path.realpath(path))] = "hide"
    asked = dict.fromkeys((*view.readable, view.cwd), "see") | dict.fromkeys(view.writable, "write")
    for path in asked:
        if path in plan:
            raise UsageError(
                f"{path} is hidden from the code and cannot be given to it as well: name a folder below it"
            )
        if dropped:
            plan |= {parent: "cover" for parent in _closed_parent(path) if parent not in asked and parent not in plan}
    started = shutil.which(view.program) or view.program
    for path in (*interpreter_folders(sys.executable), *interpreter_folders(started)):
        if path not in plan and _covered_by(path, plan):
            plan[path] = "see"
    if view.network:
        resolver = Path(os.path.realpath("/etc/resolv.conf"))
        if resolver.is_file() and _covered_by(resolver, plan):
            plan[resolver] = "see"
    return plan | asked


def covers(environ: Mapping[str, str]) -> set[Path]:
    """Places that are empty in every sandbox, those that are there, as real paths.

    Besides the usual ones: homes, the folder of a runner of workflows, files of secrets that `environ` names.
    """
    homes = {os.path.expanduser("~")}
    with contextlib.suppress(KeyError):  # an account without an entry in the user database
        homes.add(pwd.getpwuid(os.geteuid()).pw_dir)
    named = {*_COVERED, *_SECRETS, *homes, *(os.path.join(home, name) for home in homes for name in _PERSONAL)}
    named |= {value for name, value in environ.items() if _NAMING.fullmatch(name) and os.path.isabs(value)}
    runner = environ.get("RUNNER_TEMP")
    if runner:
        named |= {runner, *(str(Path(runner).parent.parent / name) for name in _RUNNER)}
    real = {Path(os.path.realpath(name)) for name in named if os.path.exists(name)}
    return real - {Path("/")}


def _covered_by(path: Path, plan: Mapping[Path, str]) -> bool:
    return any(parent in plan for parent in path.parents)


def _nearest(path: Path, plan: Mapping[Path, str]) -> str | None:
    return next((plan[parent] for parent in path.parents if parent in plan), None)


def _closed_parent(path: Path) -> Iterator[Path]:
    """The outermost folder on the way that other accounts cannot enter: emptied, it lets them through."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            yield parent
            return


def interpreter_folders(executable: str) -> Iterator[Path]:
    """Folders that an interpreter and this package need, as real paths; never more of a home than that."""
    given = Path(os.path.abspath(executable))
    yield from _prefix(given.parent.parent)
    yield from _prefix(Path(os.path.realpath(given)).parent.parent)
    if os.path.realpath(executable) == os.path.realpath(sys.executable):
        for prefix in (sys.prefix, sys.base_prefix):
            yield from _prefix(Path(prefix))
        yield from _real(Path(entry) for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages"})
    for package in ("advisor", "advisor.rules", "advisor.reports"):
        found = importlib.util.find_spec(package)
        yield from _real(map(Path, (found.submodule_search_locations if found is not None else None) or ()))


def _prefix(prefix: Path) -> Iterator[Path]:
    whole = (prefix / "pyvenv.cfg").is_file() or (prefix / "conda-meta").is_dir()
    if whole:
        yield from _real((prefix,))
    elif any(prefix.glob("lib/python3*")):
        yield from _real(prefix / part for part in _PARTS)


def _real(paths: Iterable[Path]) -> Iterator[Path]:
    yield from (Path(os.path.realpath(path)) for path in paths if path.exists())
