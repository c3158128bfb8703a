"""Blocks of trace files: gzip in all its forms, damage and bombs, and what is no file."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import pytest

from advisor.errors import ArtifactError
from advisor.ingest import stream
from advisor.ingest.stream import Stream

TEXT = b"".join(b'{"ph":"X","ts":%d},' % (place * place) for place in range(3000))
PACKED = gzip.compress(TEXT, mtime=0)


def contents(path: Path) -> tuple[bytes, str | None]:
    found = Stream(path)
    return b"".join(found.blocks()), found.lost


def stored(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("block", [1, 100, 1 << 12, 4 << 20])
@pytest.mark.parametrize("content", [TEXT, PACKED], ids=["plain", "gzip"])
def test_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, block: int) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", block)
    found = Stream(stored(tmp_path, content))
    blocks = list(found.blocks())
    assert b"".join(blocks) == TEXT and found.lost is None
    assert max(map(len, blocks)) <= 2 * block


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        (b"", None),
        (b"\x1f", None),
        (gzip.compress(b"", mtime=0), None),
        (gzip.compress(b"", mtime=0) * 3, None),
        (PACKED + b"\0" * 1000, None),
        (PACKED + gzip.compress(b"", mtime=0) + PACKED, None),
        (
            PACKED[:-8] + b"\0" * 8,
            "the gzip stream is damaged (Error -3 while decompressing data: incorrect data check)",
        ),
        (PACKED[:-4], "truncated: the gzip stream ends early"),
        (PACKED + b"more", "the gzip stream is damaged (Error -3 while decompressing data: incorrect header check)"),
        (PACKED + PACKED[:10], "truncated: the gzip stream ends early"),
        (b"\x1f\x8b", "truncated: the gzip stream ends early"),
        (b"\x1f\x8bnot gzip", "the gzip stream is damaged (Error -3 while decompressing data: unknown compression"),
    ],
)
def test_members(tmp_path: Path, content: bytes, lost: str | None) -> None:
    text, why = contents(stored(tmp_path, content))
    assert text == TEXT * content.count(PACKED[:40]) or content in (b"\x1f", PACKED + PACKED[:10])
    assert why == lost if lost is None else why is not None and why.startswith(lost)


@pytest.mark.parametrize("block", [300, 4 << 20])
def test_gzip_cut_at_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """All that can be inflated of what is there comes out."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", block)
    packed = gzip.compress(TEXT[:4000], mtime=0)
    for length in range(2, len(packed)):
        text, why = contents(stored(tmp_path, packed[:length]))
        assert text == zlib.decompressobj(31).decompress(packed[:length]), length
        assert why == "truncated: the gzip stream ends early"


def test_damage_at_every_byte(tmp_path: Path) -> None:
    """What stands before a damaged byte comes out; what comes out is never more than was there."""
    packed = bytearray(gzip.compress(TEXT[:4000], mtime=0))
    for place in range(10, len(packed), 7):
        kept = packed[place]
        packed[place] ^= 0xFF
        text, why = contents(stored(tmp_path, bytes(packed)))
        packed[place] = kept
        before = zlib.decompressobj(31).decompress(bytes(packed[:place]))
        assert text[: len(before)] == before
        assert why is not None


def bomb(piece: bytes, times: int) -> bytes:
    """A gzip stream of a piece so many times, made in no time."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + block * times


def test_a_bomb_is_not_read_on(tmp_path: Path) -> None:
    found = Stream(stored(tmp_path, bomb(b" " * (1 << 20), 5000)))
    total = sum(map(len, found.blocks()))
    assert found.stored_bytes < 6 << 20
    most = max(stream.RATIO_APPLIES_FROM, stream.MAX_RATIO * found.stored_bytes)
    assert most < total <= most + stream.BLOCK_BYTES
    assert found.lost is not None and found.lost.startswith("it inflates to more than ")


def test_a_trace_that_deflates_well_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "RATIO_APPLIES_FROM", 0)
    text = b"".join(b'{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":%d,"dur":5},' % place for place in range(20_000))
    packed = gzip.compress(text, 9)
    assert len(text) > 10 * len(packed)
    assert contents(stored(tmp_path, packed)) == (text, None)


def test_many_members_cost_linear_time(tmp_path: Path) -> None:
    text, why = contents(stored(tmp_path, gzip.compress(b"", mtime=0) * 20_000 + PACKED))
    assert (text, why) == (TEXT, None)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "t.json is missing: give the path of a trace"),
        (lambda path: path.mkdir(), "t.json is no file: give the path of a trace"),
        (lambda path: os.mkfifo(path), "t.json is no file: give the path of a trace"),
        (lambda path: path.symlink_to("/dev/zero"), "t.json is no file: give the path of a trace"),
        (lambda path: path.symlink_to(path), "t.json cannot be read (Too many levels of symbolic links)"),
    ],
    ids=["missing", "folder", "pipe", "device", "loop"],
)
def test_no_file(tmp_path: Path, make: object, says: str) -> None:
    make(tmp_path / "t.json")  # type: ignore[operator]
    with pytest.raises(ArtifactError, match="^" + says.replace("(", r"\(").replace(")", r"\)")):
        Stream(tmp_path / "t.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = stored(tmp_path, TEXT)
    path.chmod(0)
    with pytest.raises(ArtifactError, match=r"t\.json cannot be read \(Permission denied\)"):
        list(Stream(path).blocks())


def test_a_failing_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, TEXT)

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ArtifactError, match=r"t\.json cannot be read \(Permission denied\)"):
        list(Stream(path).blocks())


@pytest.mark.parametrize("how", ["longer", "shorter", "other"])
def test_a_file_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1000)
    path = stored(tmp_path, TEXT)
    found = Stream(path)
    for place, _ in enumerate(found.blocks()):
        if place == 2:
            state = path.stat()
            with path.open("r+b") as file:
                file.seek(20_000)
                file.write(b"?")
                file.truncate({"longer": len(TEXT) + 9, "shorter": 10_000, "other": len(TEXT)}[how])
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert found.lost == "the file changed while it was read"
