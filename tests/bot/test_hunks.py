"""Hunks of unified diffs, as forges hand them out and as git writes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.bot.forges.hunks import ShownLine, new_lines, shown_lines


@pytest.mark.parametrize(
    ("patch", "shown", "added"),
    [
        ("", set(), set()),
        ("@@ -1,3 +1,3 @@\n a\n-b\n+B\n c", {1, 2, 3}, {2}),
        ("@@ -1 +1 @@\n-a\n+b", {1}, {1}),
        ("@@ -0,0 +1,2 @@\n+a\n+b\n", {1, 2}, {1, 2}),
        ("@@ -1,2 +0,0 @@\n-a\n-b\n", set(), set()),
        ("@@ -1 +1 @@ def f():\n-a\n\\ No newline at end of file\n+b\n\\ No newline at end of file", {1}, {1}),
        ("--- a/x\n+++ b/x\n@@ -5,0 +6 @@\n+x\n@@ -9 +11 @@\n-y\n+z\n", {6, 11}, {6, 11}),
        ("@@ -1,2 +1,3 @@\n a\n+@@ -7 +70 @@\n b\n", {1, 2, 3}, {2}),
        ("@@ -1,2 +1,2 @@\n-++ a\n+++ b\n @@ -3 +3 @@\n", {1, 2}, {1}),
        ("@@ -1,2 +1,2 @@\n--- a\n+++ b\n c\n", {1, 2}, {1}),
        ("@@ -1,2 +1,2 @@\r\n a\r\n-b\r\n+c\r\n", {1, 2}, {2}),
        ("@@ -1,2 +1,2 @@\n a\rx\n-b\n+c\r+d\n", {1, 2}, {2}),
        ("@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n", {1, 2, 3}, {3}),
        ("@@ -1,3 +1,3 @@\n a\n\r\n-b\n+c\n", {1, 2, 3}, {3}),
        ("@@ -1,3 +1,3 @@\n a\ndiff --git a/y b/y\n+c\n", {1}, set()),
        ("@@ -1,9 +1,9 @@\n a\n", {1}, set()),
        ("@@ -1 +1 @@\n-a\n+b\n+c\n", {1}, {1}),
        ("@@@ -1,2 -1,2 +1,2 @@@\n++a\n", set(), set()),
        ("Binary files a/x and b/x differ\n", set(), set()),
        ("@@ -1 +9999999999999 @@\n+a\n", set(), set()),
    ],
)
def test_the_lines_of_the_new_text(patch: str, shown: set[int], added: set[int]) -> None:
    assert shown_lines(patch) == (shown, added)


def test_the_old_number_of_a_context_line() -> None:
    assert new_lines("@@ -3,3 +3,3 @@\n a\n-b\n+x\n c\n") == (
        ShownLine(3, 3, False),
        ShownLine(5, 4, True),
        ShownLine(5, 5, False),
    )


LINES = st.lists(
    st.sampled_from(["", "a", "@@ -1 +1 @@", "++ b/x", "-- a/x", "+", "-", "\\", "x\ry", " "]), max_size=12
)


@settings(max_examples=25, deadline=None)
@given(old=LINES, new=LINES, context=st.integers(0, 4), ending=st.sampled_from(["\n", "\r\n"]), cut=st.booleans())
def test_git_agrees(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str], context: int, ending: str, cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("hunks", numbered=True)
    for name, lines in (("old", old), ("new", new)):
        text = ending.join(lines) + ("" if cut or not lines else ending)
        (folder / name).write_bytes(text.encode())
    command = ["git", "diff", "--no-index", "--text", f"-U{context}", "old", "new"]
    patch = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout.decode()
    _, added = shown_lines(patch)
    texts = (folder / "new").read_bytes().decode().split("\n")
    by_git = [line[1:] for line in patch.partition("\n@@")[2].split("\n")[1:] if line.startswith("+")]
    assert [texts[number - 1] for number in sorted(added)] == by_git


@given(st.text(alphabet="@ -+0123,\\\n\ra", max_size=200))
def test_any_text_is_taken(patch: str) -> None:
    shown, added = shown_lines(patch)
    assert added <= shown


def test_a_long_patch_is_read_in_linear_time(tmp_path: Path) -> None:
    count = 200_000
    assert len(shown_lines(f"@@ -0,0 +1,{count} @@\n" + "+x\n" * count)[1]) == count
