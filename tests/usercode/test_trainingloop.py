"""The user's loop around a step, as the source shows it."""

from __future__ import annotations

import pytest

from advisor import blocks, codemod
from advisor.model import LoopCall, Span
from advisor.source import Source
from advisor.usercode.trainingloop import TrainingLoop, loop_of, loops_around

TEXT = """\
import torch
from helpers import tidy


def wait():
    if ready:
        torch.cuda.synchronize()


def train(model):
    for epoch in range(3):
        for batch in data():
            model(batch).sum().backward()
            opt.step()
            wait()
            if epoch % 2:
                tidy(model)
            later = lambda: torch.cuda.empty_cache()
        wait()


train(model)
"""
HELPERS = "import torch\n\n\ndef tidy(model):\n    torch.cuda.empty_cache()\n    tidy(model)\n"
MAIN, OTHER = Source("main.py", TEXT), Source("helpers.py", HELPERS)


def step_at(*lines: int) -> LoopCall:
    frames = tuple(Span(path="main.py", line=line) for line in lines)
    return LoopCall(name="optimizer.step", frames=frames, calls=1, per_step=1.0, host_us=0.0)


def loop(*lines: int) -> TrainingLoop | None:
    return loop_of(step_at(*lines), {"main.py": MAIN, "helpers.py": OTHER}.__getitem__, (MAIN, OTHER))


def test_the_innermost_loop_of_the_innermost_function_that_has_one() -> None:
    found = loop(23, 14)
    assert found is not None
    assert found.node.lineno == 12
    assert loop(23) is None


def test_a_method_is_followed_where_its_name_is_the_only_one() -> None:
    text = "import torch\n\n\nclass Timer:\n    def tick(self):\n        torch.cuda.synchronize()\n\n\n"
    text += "for x in data:\n    opt.step()\n    timer.tick()\n    torch.tick()\n"
    for more, expected in (("", [11]), ("class Other:\n    def tick(self):\n        pass\n", [])):
        found = loop_of(step_at(10), {"main.py": Source("main.py", text + more)}.__getitem__)
        assert found is not None
        assert [r.at.lineno for r in found.reached() if r.name == "torch.cuda.synchronize"] == expected


def test_the_loops_around_innermost_first() -> None:
    around = loops_around(step_at(23, 14), {"main.py": MAIN}.__getitem__)
    assert [found.node.lineno for found in around] == [12, 11]


def test_an_iterable_is_no_part_of_its_loop() -> None:
    found = loop(23, 12)
    assert found is not None
    assert found.node.lineno == 11


def test_what_an_iteration_calls_also_through_functions() -> None:
    found = loop(23, 14)
    assert found is not None
    named = [(r.name, r.at.lineno, r.source.path) for r in found.reached() if (r.name or "").startswith("torch.cuda")]
    assert named == [("torch.cuda.synchronize", 15, "main.py"), ("torch.cuda.empty_cache", 17, "helpers.py")]
    conditions = {r.at.lineno: [c.lineno for c in found.conditions(r.at)] for r in found.reached()}
    assert conditions[15] == []
    assert conditions[17] == [16]


def test_a_call_from_elsewhere_has_no_place_in_it() -> None:
    found = loop(23, 14)
    assert found is not None
    assert found.place(step_at(23, 14)) == Span(path="main.py", line=14)
    assert found.place(step_at(23, 19)) is None


BLOCK = "if a:\n\n    b(1,\n      2)\n    c()  # why\nd()"


def edited(text: str, edit: object) -> str:
    source = Source("x.py", text)
    return codemod.apply(source, edit(source))  # type: ignore[operator]


def test_statements_under_a_header() -> None:
    def edit(source: Source) -> list[codemod.Edit]:
        return blocks.put_under(source, source.tree.body[0].body, "with f():")  # type: ignore[attr-defined]

    expected = "if a:\n\n    with f():\n        b(1,\n          2)\n        c()  # why\nd()"
    assert edited(BLOCK, edit) == expected
    assert edited(BLOCK.replace("\n", "\r\n"), edit) == expected.replace("\n", "\r\n")


@pytest.mark.parametrize("text", ["if a: b(); c()\n", 'if a:\n    b("""\n""")\n', "if a: b()\n"])
def test_statements_that_cannot_be_put_under_a_header(text: str) -> None:
    source = Source("x.py", text)
    with pytest.raises(codemod.CannotEdit):
        blocks.put_under(source, source.tree.body[0].body[:1], "with f():")  # type: ignore[attr-defined]


def test_the_only_statement_of_a_block_becomes_pass() -> None:
    assert edited("if a:\n    b()\n", lambda s: blocks.removed(s, s.tree.body[0].body[0])) == "if a:\n    pass\n"
    assert edited(BLOCK, lambda s: blocks.removed(s, s.tree.body[0].body[0])) == "if a:\n\n    c()  # why\nd()"


def test_lines_before_and_behind_a_statement() -> None:
    assert edited(BLOCK, lambda s: [blocks.put_before(s, s.tree.body[1], ["x", "y"])]) == BLOCK[:-3] + "x\ny\nd()"
    assert edited(BLOCK, lambda s: [blocks.put_behind(s, s.tree.body[1], ["x"])]) == BLOCK + "\nx"
    inner = edited(BLOCK, lambda s: [blocks.put_behind(s, s.tree.body[0].body[1], ["x"])])
    assert inner == "if a:\n\n    b(1,\n      2)\n    c()  # why\n    x\nd()"
