"""Reading whole files: the same table whatever the layout, the blocks and the processes; whatever they hold."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import resource
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tables import Event, differences, some_events, table_of

from advisor import workers
from advisor.columns.table import Table
from advisor.errors import ArtifactError
from advisor.ingest import reader, stream
from advisor.ingest.reader import read_table
from advisor.survey import Options, analyze_file

CORPUS = Path(__file__).parents[1] / "data" / "corpus" / "traces"
HEAD = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "world_size": 8}}


def pretty(events: list[Event]) -> str:
    """As Kineto lays a trace out."""
    parts = ",\n".join("  " + json.dumps(event, indent=4) for event in events)
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in HEAD.items())
    return f'{{\n  {head},\n  "traceEvents": [\n{parts}\n  ],\n  "traceName": "x.json"\n}}'


LAYOUTS = {
    "pretty": pretty,
    "array": json.dumps,
    "object": lambda events: json.dumps({**HEAD, "traceEvents": events}),
    "sorted": lambda events: json.dumps({**HEAD, "traceEvents": events}, sort_keys=True),
    "compact": lambda events: json.dumps({"traceEvents": events, **HEAD}, separators=(",", ":"), ensure_ascii=False),
    "windows": lambda events: "\ufeff" + pretty(events).replace("\n", "\r\n"),
}


def stored(path: Path, text: str | bytes) -> Path:
    content = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_layouts_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, name: str) -> None:
    for seed in range(4):
        events = some_events(seed)
        expected = table_of(events, **({} if layout == "array" else HEAD))
        path = stored(tmp_path / name, LAYOUTS[layout](events))
        for size in (4 << 20, 1, 7, 64, 501, 3000):
            monkeypatch.setattr(stream, "BLOCK_BYTES", size)
            assert differences(expected, read_table(path, 1), layout=True) == []


def test_every_size_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = pretty(some_events(7, 12))
    path = stored(tmp_path / "t.json", text)
    expected = read_table(path, 1)
    for size in (*range(1, 400), *range(400, len(text) + 2, 37)):
        monkeypatch.setattr(stream, "BLOCK_BYTES", size)
        assert differences(expected, read_table(path, 1)) == [], size


@pytest.mark.parametrize("workers", [2, 3])
def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Helpers take the chunks as they come: which of them took which must not show."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 3000)
    for path in (
        stored(tmp_path / "t.json", pretty(some_events(5, 400))),
        CORPUS / "hta-128rank-sampled-rank0.json.gz",
    ):
        assert differences(read_table(path, 1), read_table(path, workers)) == []


def test_real_traces_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "kineto-gpu-metrics-input.json",
        "hta-no-gpu-events-rank-missing.json.gz",
        "tracelens-synth-attn-fused.json",
    ):
        monkeypatch.setattr(stream, "BLOCK_BYTES", 4 << 20)
        expected = read_table(CORPUS / name, 1)
        for size in (997, 20_011):
            monkeypatch.setattr(stream, "BLOCK_BYTES", size)
            assert differences(expected, read_table(CORPUS / name, 1)) == []


def test_shuffled_events_of_a_real_trace(tmp_path: Path) -> None:
    document = json.loads((CORPUS / "kineto-gpu-metrics-input.json").read_bytes())
    expected = read_table(stored(tmp_path / "t.json", json.dumps(document)), 1)
    for seed in range(5):
        random.Random(seed).shuffle(document["traceEvents"])
        mixed = stored(tmp_path / f"t{seed}.json", json.dumps(document))
        assert differences(expected, read_table(mixed, 1)) == []


def test_objects_in_arguments_that_look_like_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick cut falls into such arguments; it is noticed, and the file is read exactly."""
    inner = [{"ph": "X", "name": "no event", "ts": 1, "dur": 1, "cat": "kernel"}] * 5
    events: list[Event] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": place, "dur": 1, "args": {"x": inner}} for place in range(40)
    ]
    expected = table_of(events)
    assert len(expected.activities) == 40
    path = stored(tmp_path / "t.json", json.dumps(events))
    for size in (100, 1000, 4000):
        monkeypatch.setattr(stream, "BLOCK_BYTES", size)
        for count in (1, 2)[: 1 + (size == 4000)]:
            assert differences(expected, read_table(path, count)) == []


def test_a_second_list_of_events(tmp_path: Path) -> None:
    events = some_events(2)
    text = json.dumps({"traceEvents": events})[:-1] + f', "other": {json.dumps(events)}, "traceEvents": []}}'
    table = read_table(stored(tmp_path / "t.json", text), 1)
    assert table.lost == ("a second list of traceEvents was not read",)
    assert (table.events, table.skipped) == (len(events), 0)


# -- truncation


def whole_events(text: bytes) -> int | None:
    """How many whole events a cut text begins with, one by one with json; None where it has no list."""
    rest = text.decode("utf-8", "replace")
    start = re.search(r'"traceEvents"\s*:\s*\[|^\s*\[', rest)
    if start is None:
        return None
    place, count = start.end(), 0
    while True:
        place = re.compile(r"[\s,]*").match(rest, place).end()  # type: ignore[union-attr]
        try:
            _, place = json.JSONDecoder().raw_decode(rest, place)
        except json.JSONDecodeError:
            return count
        count += 1


def read_or_refused(path: Path) -> Table | None:
    """The table of a file; None, with a message that names it, where it is refused."""
    try:
        return read_table(path, 1)
    except ArtifactError as error:
        message = str(error)
    assert message.startswith(path.name)
    return None


@pytest.mark.parametrize("layout", ["pretty", "array", "sorted"])
def test_cut_at_every_byte(tmp_path: Path, layout: str) -> None:
    text = LAYOUTS[layout](some_events(11, 9)).encode()
    whole = read_table(stored(tmp_path / "t.json", text), 1)
    assert (whole.lost, whole.skipped) == ((), 0)
    for length in range(len(text)):
        table = read_or_refused(stored(tmp_path / "t.json", text[:length]))
        expected = whole_events(text[:length])
        assert (None if table is None else table.events) == expected, length
        if table is not None:
            assert table.lost and table.skipped <= 1


def test_gzip_cut_at_every_byte(tmp_path: Path) -> None:
    packed = gzip.compress(pretty(some_events(12, 30)).encode(), mtime=0)
    path = tmp_path / "t.json.gz"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        table = read_or_refused(path)
        text = zlib.decompressobj(31).decompress(packed[:length]) if length > 1 else b""
        assert (None if table is None else table.events) == whole_events(text), length
        assert table is None or table.lost[0] == "truncated: the gzip stream ends early"


def test_a_refused_file_says_that_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "metadata": {}')[:-9])
    with pytest.raises(ArtifactError, match=r"has no list of traceEvents: .*; truncated: the gzip stream ends early$"):
        read_table(path)


# -- damage anywhere: whatever is in a file, it is read, read in part or refused


def mutated(content: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    text = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 40))):
        place = draw.randrange(len(text) + 1)
        match draw.randrange(7):
            case 0:
                text[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del text[place : place + draw.choice((1, 3, 50, 400))]
            case 2:
                text[place:place] = bytes(
                    draw.choice(b'{}[]",:\\ \n\0\xff0123456789eE-') for _ in range(draw.randrange(4))
                )
            case 3:
                start = draw.randrange(len(text) + 1)
                text[place:place] = text[start : start + draw.randrange(300)]
            case 4:
                pieces = (
                    b"NaN",
                    b"-inf",
                    b"1e999",
                    b"null",
                    b'{"ph":',
                    b'"traceEvents":[',
                    b"9" * 400,
                    b"\\ud800",
                    b"]}",
                )
                text[place:place] = draw.choice(pieces)
            case 5:
                text = text.replace(
                    *draw.choice(((b":", b"=", 3), (b"1", b"-1"), (b'"', b"'", 2), (b", ", b" "), (b"0", b"")))
                )
            case _:
                text[place:place] = draw.choice((b"[", b"{", b'{"a":')) * draw.choice((1, 2000))
    return bytes(text)


@pytest.mark.parametrize("layout", ["pretty", "array", "sorted"])
@pytest.mark.parametrize("part", range(4))
def test_damage(tmp_path: Path, layout: str, part: int) -> None:
    content = LAYOUTS[layout](some_events(20 + part, 25)).encode()
    path, began = tmp_path / "t.json", time.process_time()
    for seed in range(part * 60, part * 60 + 60):
        stored(path, mutated(content, seed))
        table = read_or_refused(path)
        assert table is None or table.events >= 0
        profile = analyze_file(path, Options(workers=1))
        assert profile.status in ("ok", "partial", "refused")
        assert (profile.status == "ok") <= (profile.reason is None)
    assert time.process_time() - began < 10


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(pretty(some_events(30, 60)).encode(), mtime=0)
    path = tmp_path / "t.json.gz"
    for seed in range(200):
        path.write_bytes(mutated(packed, seed))
        read_or_refused(path)
        assert analyze_file(path, Options(workers=1)).status in ("ok", "partial", "refused")


def test_damage_does_not_depend_on_processes_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    for seed in range(40):
        monkeypatch.setattr(stream, "BLOCK_BYTES", 4 << 20)
        stored(path, mutated(pretty(some_events(seed, 30)).encode(), seed))
        expected = read_or_refused(path)
        for size in (2000, 333):
            monkeypatch.setattr(stream, "BLOCK_BYTES", size)
            table = read_or_refused(path)
            assert (table is None) == (expected is None), seed
            if table is not None and expected is not None:
                assert differences(expected, table) == [], seed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        b"\x7fELF" + bytes(range(256)) * 20,
        b"[1, 2, 3]",
        b"{}",
        b"null",
        b'"text"',
        b'{"traceEvents": []}',
        b'{"traceEvents": [{}]}',
        b'{"traceEvents": [[]]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"traceEvents":' * 20_000,
        b'{"traceEvents":[' * 20_000,
        b'{"traceEvents":[{"ph":"X","cat":"kernel","ts":1,"dur":1,"args":' + b"[" * 100_000,
        b'{"traceEvents":[{"ph":"X","cat":"kernel","name":"' + b"x" * 100_000 + b'","ts":1,"dur":1}]}',
        '{"traceEvents":[{"ph":"X","cat":"kernel","ts":1,"dur":1}]}'.encode("utf-16"),
    ],
)
def test_odd_files(tmp_path: Path, content: bytes) -> None:
    began = time.process_time()
    for name in ("t.json", "t.json.gz"):
        read_or_refused(stored(tmp_path / name, content))
        profile = analyze_file(tmp_path / name, Options(workers=1, store=tmp_path / "cache"))
        assert profile.status == "refused" or (profile.kernels, b"kernel" in content) == (1, True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "folder", "device"]
)
def test_no_file(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "t.json")
    with pytest.raises(ArtifactError, match=r"t\.json is no file"):
        read_table(tmp_path / "t.json")
    assert analyze_file(tmp_path / "t.json", Options()).status == "refused"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"t\.json is missing"):
        read_table(tmp_path / "t.json")


# -- helpers that end before their time


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started."""
    found: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def starting(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        found.append(start(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", starting)
    return found


def ended(processes: list[subprocess.Popen[bytes]]) -> bool:
    """Whether none is left, not even as a zombie."""
    return all(process.returncode is not None and not Path(f"/proc/{process.pid}").exists() for process in processes)


PIECE = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1}'


@pytest.mark.parametrize("when", [0, 1, 40])
def test_a_killed_helper(started: list[subprocess.Popen[bytes]], when: int) -> None:
    def pieces() -> Iterator[bytes]:
        for place in range(60):
            if place == when:
                started[0].kill()
            yield PIECE + (b"," + PIECE) * 2000

    began = time.monotonic()
    with pytest.raises(ArtifactError, match=r"ended with status -9: where memory is short, use --workers 1"):
        workers.share("advisor.ingest.worker", pieces(), 2, str(1 << 30), "")
    assert time.monotonic() - began < 30
    assert len(started) == 2 and ended(started)


def test_a_helper_that_fails(started: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArtifactError, match="ended with status 1"):
        workers.share("advisor.no_such_module", iter([PIECE] * 50), 2)
    assert ended(started) and "No module named advisor.no_such_module" in capfd.readouterr().err


@pytest.mark.parametrize("error", [ArtifactError("not read"), KeyboardInterrupt(), MemoryError()])
def test_an_error_while_pieces_are_made(started: list[subprocess.Popen[bytes]], error: BaseException) -> None:
    def pieces() -> Iterator[bytes]:
        yield PIECE
        raise error

    with pytest.raises(type(error)):
        workers.share("advisor.ingest.worker", pieces(), 2, str(1 << 30), "")
    assert len(started) == 2 and ended(started)


def test_no_process_to_be_had(monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]) -> None:
    start = workers.subprocess.Popen

    def refuse(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args, **kwargs)

    monkeypatch.setattr(workers.subprocess, "Popen", refuse)
    with pytest.raises(ArtifactError, match=r"can be started \(Resource temporarily unavailable\): use --workers 1"):
        workers.share("advisor.ingest.worker", iter([PIECE]), 3, str(1 << 30), "")
    assert len(started) == 1 and ended(started)


def test_an_unreadable_file_with_helpers(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(ArtifactError, match="is no JSON"):
        read_table(stored(tmp_path / "t.json", "no"), 2)
    assert ended(started)


def test_files_of_the_working_folder_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's folder may hold files named like modules; helpers do not import them."""
    for name in ("json", "queue", "numpy", "msgspec", "pickle", "advisor", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    path = stored(tmp_path / "t.json", pretty(some_events(1)))
    assert differences(read_table(path, 1), read_table(path, 2)) == []


# -- memory


def test_no_more_is_kept_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "KEPT_BYTES", 20_000)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 3000)
    path = stored(tmp_path / "t.json", pretty(some_events(5, 2000)))
    table = read_table(path, 1)
    assert 100 < table.events < 1000
    assert table.lost == ("its events take too much memory: the rest was not read",)
    assert differences(table, read_table(path, 2)) == []
    assert analyze_file(path, Options(workers=1)).status == "partial"


BOMBS = r"""
    import contextlib, json, re, sys, time, zlib
    from pathlib import Path
    from advisor.errors import ArtifactError
    from advisor.ingest.reader import read_table

    MIB = 1 << 20
    START = b'{"traceEvents":['
    EVENT = json.dumps({"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 123456, "dur": 5,
                        "args": {"correlation": 5, "stream": 7, "grid": [1, 1, 1], "block": [32, 1, 1]}}).encode()
    EVENT += b","
    SMALL = b'{"ph":"X","cat":"cpu_op","ts":1,"dur":1},'
    BOMBS = {
        "zeros": [(b"\0", 3000)],
        "space": [(START, 0), (b" ", 3000)],
        "space before": [(b" ", 3000)],
        "events": [(START, 0), (EVENT, 3000)],
        "small events": [(START, 0), (SMALL, 1000)],
        "name": [(START + b'{"ph":"X","name":"', 0), (b"n", 2000)],
        "digits": [(START + b'{"ph":"X","ts":1', 0), (b"0", 500)],
        "brackets": [(START + b'{"ph":"X","args":', 0), (b"[", 500)],
        "lists": [(START + b'{"ph":"X","args":{"a":[[]', 0), (b",[]", 500)],
        "objects": [(START + b'{"ph":"X","args":{"a":[1', 0), (b',{"ph":1}', 500)],
        "names": [(START + b'{"ph":"X","args":{"a":["ph"', 0), (b',"ph"', 500)],
        "damage": [(START, 0), (b'{"ph":1 ', 300)],
        "head": [(b'{"deviceProperties":[[]', 0), (b",[]", 50), (b'],"traceEvents":[' + EVENT[:-1] + b"]}", 0)],
        "keys": [(b'{"a":1', 0), (b',"a":1', 50), (b',"traceEvents":[' + EVENT[:-1] + b"]}", 0)],
        "tail": [(START + EVENT[:-1] + b'],"a":[[]', 0), (b",[]", 50), (b"]}", 0)],
        "long head": [(b'{"a":[[]', 0), (b",[]", 500)],
    }

    def stored(path, parts):
        pieces = [b"\x1f\x8b\x08\0\0\0\0\0\0\xff"]
        for text, mebibytes in parts:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            whole = text * (MIB // len(text)) if mebibytes else text
            pieces.append((packer.compress(whole) + packer.flush(zlib.Z_FULL_FLUSH)) * max(1, mebibytes))
        path.write_bytes(b"".join(pieces))

    path, answers = Path(sys.argv[1]) / "bomb.json.gz", {}
    for name, parts in BOMBS.items():
        stored(path, parts)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        began = time.process_time()
        try:
            table = read_table(path, 1)
            says, events = "; ".join(table.lost), table.events
            del table
        except ArtifactError as error:
            says, events = str(error), 0
        peak = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
        answers[name] = (says, events, time.process_time() - began, peak >> 10)
    print(json.dumps(answers))
"""


def test_bombs(tmp_path: Path) -> None:
    """Small files that would inflate to gigabytes: the time and the memory that they take are bound."""
    command = [sys.executable, "-c", textwrap.dedent(BOMBS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for name, (says, events, seconds, mebibytes) in answers.items():
        assert says, name
        assert seconds < 10, (name, seconds)
        assert mebibytes < 400, (name, mebibytes)
        if name in ("head", "keys", "tail"):
            assert events == 1, name
    assert "its events take too much memory" in answers["events"][0]
    assert "it inflates to more than" in answers["space"][0]
    assert "an event is longer than 4 MiB" in answers["name"][0]


def test_memory_is_bound_by_the_events_that_are_kept(tmp_path: Path) -> None:
    """A plain file of 130 MiB of events of which only a count is kept takes no memory."""
    line = b'{"ph":"X","cat":"python_function","name":"f.py(3): g","pid":1,"tid":1,"ts":5,"dur":1,"args":{"x":1}},\n'
    with (tmp_path / "t.json").open("wb") as file:
        file.write(b'{"traceEvents":[')
        for _ in range(130):
            file.write(line * ((1 << 20) // len(line)))
        file.write(b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1}]}')
    code = (
        "import re, sys; from pathlib import Path; from advisor.ingest.reader import read_table\n"
        "table = read_table(Path(sys.argv[1]), 1)\n"
        "peak = re.search('VmHWM: *(.*) kB', Path('/proc/self/status').read_text().expandtabs())[1]\n"
        "print(table.events, len(table.lost), int(peak) >> 10)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "t.json")], capture_output=True, text=True, check=True
    )
    events, lost, mebibytes = map(int, done.stdout.split())
    assert (events, lost) == (130 * ((1 << 20) // len(line)) + 1, 0)
    assert mebibytes < 160


def test_limits_are_not_changed() -> None:
    """Reading sets no limit of the process."""
    before = resource.getrlimit(resource.RLIMIT_AS), sys.getrecursionlimit()
    read_table(CORPUS / "hta-uint64-comms-id.json.gz")
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.getrecursionlimit()) == before
