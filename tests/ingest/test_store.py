"""The cache of tables: what it finds again, what it does not, and that nothing goes wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tables import differences, some_events, table_of

from advisor import survey
from advisor.columns.schema import COLUMNS
from advisor.columns.table import Table
from advisor.ingest import store as module
from advisor.ingest.reader import read_table
from advisor.ingest.store import Store, default_folder
from advisor.survey import Options, analyze_file

CORPUS = Path(__file__).parents[1] / "data" / "corpus" / "traces"
FILES = sorted((*(f"{table}.parquet" for table in COLUMNS), "texts.json", "seal.json"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": some_events(3, 80)}))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache" / "traces")


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "traces").iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "hta-128rank-sampled-rank0.json.gz",
        "tracelens-h100-bert-small.json.gz",
        "kineto-gpu-metrics-input.json",
        "hta-uint64-comms-id.json.gz",
        "derived-tracelens-bert-cut-gzip.json.gz",
        "hta-no-gpu-events-rank-missing.json.gz",
    ],
)
def test_the_same_table_comes_back(store: Store, name: str) -> None:
    table = read_table(CORPUS / name, 1)
    assert store.get(CORPUS / name) is None
    store.put(CORPUS / name, table)
    found = store.get(CORPUS / name)
    assert found is not None and differences(table, found) == []


def test_odd_texts_come_back(store: Store, trace: Path) -> None:
    odd_name = {"ph": "X", "cat": "kernel", "name": "\0\x7f\u2028\U0001f600", "ts": 1, "dur": 1}
    events = [*some_events(8, 60), {**odd_name, "args": {"Collective name": "ü"}}]
    odd = b'{"ph":"X","cat":"cpu_op","ts":1,"dur":1,"args":{"Input Dims":[["\xff\xfe"]]}}'
    trace.write_bytes(b"[" + odd + b"," + json.dumps(events, ensure_ascii=False).encode()[1:])
    table = read_table(trace, 1)
    assert b'[["\xff\xfe"]]' in [item.dims for item in table.signatures]
    store.put(trace, table)
    found = store.get(trace)
    assert found is not None and differences(table, found) == []
    assert repr(found) == repr(table)


def test_an_empty_table_comes_back(store: Store, trace: Path) -> None:
    store.put(trace, table_of([]))
    found = store.get(trace)
    assert found is not None and differences(table_of([]), found) == []


# -- what counts as the same file


def test_a_changed_file_is_another(store: Store, trace: Path) -> None:
    store.put(trace, read_table(trace, 1))
    content, state = trace.read_bytes(), trace.stat()

    def restored() -> None:
        trace.write_bytes(content)
        os.utime(trace, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert store.get(trace) is not None

    restored()
    os.utime(trace, ns=(state.st_atime_ns, state.st_mtime_ns + 1))  # touched
    assert store.get(trace) is None
    for changed in (content + b" ", b" " + content[1:], content[:-1] + b" ", content[:-1]):
        restored()
        trace.write_bytes(changed)
        os.utime(trace, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert store.get(trace) is None
    restored()
    trace.rename(trace.with_name("other.json"))
    assert store.get(trace) is None and store.get(trace.with_name("other.json")) is None


def test_one_file_by_two_paths(store: Store, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(trace, read_table(trace, 1))
    (trace.parent / "link.json").symlink_to(trace)
    assert store.get(trace.parent / "link.json") is not None
    monkeypatch.chdir(trace.parent)
    assert store.get(Path("t.json")) is not None


def test_a_file_that_changes_while_it_is_read(store: Store, trace: Path) -> None:
    """What was read is kept as the table of the file that was looked up, not of the one that is there now."""
    assert store.get(trace) is None
    table = read_table(trace, 1)
    trace.write_text(json.dumps(some_events(4)))
    store.put(trace, table)
    assert store.get(trace) is None


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["missing", "folder"])
def test_no_file(store: Store, tmp_path: Path, make: object) -> None:
    make(tmp_path / "x.json")  # type: ignore[operator]
    assert store.get(tmp_path / "x.json") is None
    store.put(tmp_path / "x.json", table_of([]))
    assert not (tmp_path / "cache").exists()


def test_another_schema_is_another_entry(store: Store, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(trace, read_table(trace, 1))
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    assert store.get(trace) is None


# -- entries that are damaged


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "half", "zeros", "one bit", "longer", "other"])
def test_a_damaged_entry_is_read_again(store: Store, trace: Path, tmp_path: Path, name: str, how: str) -> None:
    table = read_table(trace, 1)
    store.put(trace, table)
    [entry] = entries(tmp_path)
    assert sorted(file.name for file in entry.iterdir()) == FILES
    file = entry / name
    content = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    else:
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        changed = {
            "empty": b"",
            "half": content[: len(content) // 2],
            "zeros": bytes(len(content)),
            "one bit": flipped,
            "longer": content + b"x",
            "other": b"[]",
        }
        file.write_bytes(changed[how])
    assert store.get(trace) is None
    store.put(trace, table)  # the damaged entry does not stand in the way
    found = store.get(trace)
    assert found is not None and differences(table, found) == []
    assert len(entries(tmp_path)) == 1


def test_an_entry_that_is_a_file(store: Store, trace: Path, tmp_path: Path) -> None:
    store.put(trace, read_table(trace, 1))
    [entry] = entries(tmp_path)
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()
    entry.write_bytes(b"")
    assert store.get(trace) is None
    store.put(trace, read_table(trace, 1))  # costs time only


# -- folders that cannot be used


def test_a_folder_that_is_a_file(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        store = Store(folder)
        assert store.get(trace) is None
        store.put(trace, read_table(trace, 1))
        assert store.get(trace) is None


@pytest.mark.parametrize("call", ["mkdtemp", "rename", "write_bytes", "utime", "iterdir"])
def test_a_folder_that_cannot_be_written(
    trace: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whichever step fails, the table is returned by the reader all the same, and nothing is left half written."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    table = read_table(trace, 1)
    if call == "utime":
        store.put(trace, table)
        monkeypatch.setattr(module.os, "utime", refuse)
        assert store.get(trace) is not None
        return
    monkeypatch.setattr(*{"mkdtemp": (module.tempfile, "mkdtemp")}.get(call, (Path, call)), refuse)  # type: ignore[arg-type]
    store.put(trace, table)
    monkeypatch.undo()
    left = entries(tmp_path) if (tmp_path / "cache").exists() else []
    assert left == [] or (call == "iterdir" and store.get(trace) is not None)


def test_without_a_parquet_library(trace: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    store.put(trace, read_table(trace, 1))
    assert store.get(trace) is None and entries(tmp_path) == []


def test_analysis_goes_on_without_a_cache(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "KEEP_FROM_BYTES", 0)
    (tmp_path / "taken").write_bytes(b"")
    expected = analyze_file(trace, Options(workers=1))
    assert analyze_file(trace, Options(workers=1, store=tmp_path / "taken")) == expected
    for _ in range(2):
        assert analyze_file(trace, Options(workers=1, store=tmp_path / "cache")) == expected
    assert len(list((tmp_path / "cache").iterdir())) == 1


# -- many writers, many entries


def test_many_writers(store: Store, trace: Path, tmp_path: Path) -> None:
    table = read_table(trace, 1)

    def look(_: int) -> Table | None:
        mine = Store(tmp_path / "cache" / "traces")
        mine.put(trace, table)
        return mine.get(trace)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(look, range(48)))
    assert all(item is None or differences(table, item) == [] for item in found)
    kept = store.get(trace)
    assert kept is not None and differences(table, kept) == []
    assert len(entries(tmp_path)) == 1


def test_writers_in_processes(trace: Path, store: Store, tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from advisor.ingest.reader import read_table
        from advisor.ingest.store import Store
        trace, folder = Path(sys.argv[1]), Path(sys.argv[2])
        table = read_table(trace, 1)
        for _ in range(10):
            Store(folder).put(trace, table)
            Store(folder).get(trace)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(trace), str(tmp_path / "cache" / "traces")]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    kept = store.get(trace)
    assert kept is not None and differences(read_table(trace, 1), kept) == []
    assert len(entries(tmp_path)) == 1


def test_the_least_used_entries_go(store: Store, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 3)
    table = read_table(trace, 1)
    paths = []
    for place in range(5):
        paths.append(trace.with_name(f"t{place}.json"))
        paths[-1].write_bytes(trace.read_bytes())
        store.put(paths[-1], table)
        for age, entry in enumerate(sorted(entries(tmp_path), key=lambda item: item.stat().st_mtime_ns, reverse=True)):
            os.utime(entry, (1e9 - age, 1e9 - age))
        if place == 2:
            assert store.get(paths[0]) is not None  # used again: stays
    assert len(entries(tmp_path)) == 3
    kept = [place for place, path in enumerate(paths) if store.get(path) is not None]
    assert kept == [0, 3, 4]


def test_only_the_user_can_look(store: Store, trace: Path, tmp_path: Path) -> None:
    store.put(trace, read_table(trace, 1))
    [entry] = entries(tmp_path)
    assert entry.stat().st_mode & 0o077 == 0 and entry.parent.stat().st_mode & 0o077 == 0


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "advisor" / "traces"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_folder() == Path("/home/someone/.cache/advisor/traces")


# -- secrets


def test_nothing_of_the_head_but_what_is_read(store: Store, trace: Path, tmp_path: Path) -> None:
    secret = "hf_" + "x" * 34
    head = {
        "schemaVersion": 1,
        "metadata": {"system": {"env": {"HF_TOKEN": secret, "HOSTNAME": "node"}}, "argv": ["--token", secret]},
        "traceName": f"/home/someone/{secret}.json",
        "hostname": secret,
        "distributedInfo": {"rank": 1},
    }
    trace.write_text(json.dumps({**head, "traceEvents": some_events(1), "env": {"TOKEN": secret}}))
    store.put(trace, read_table(trace, 1))
    [entry] = entries(tmp_path)
    for file in entry.iterdir():
        content = file.read_bytes()
        assert secret.encode() not in content and b"someone" not in content and b"HF_TOKEN" not in content
    assert json.loads((entry / "texts.json").read_text())["head"] == {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 1},
    }
