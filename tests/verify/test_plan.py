"""What a plan makes of the answers of rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from verify_bench import rewrite

from advisor.codemod import CannotEdit
from advisor.model import Finding, Rewrite, Safety
from advisor.plan import plan
from advisor.rule import Rule
from advisor.source import Source

ALLOWED = frozenset({Safety.NUMERICS})
FIRST = rewrite("answers")


class Answers(Rule):
    """Gives what it is made with."""

    id = "answers"
    safety = Safety.NUMERICS
    order = 30

    def __init__(self, first: Any, *others: Any) -> None:
        self.first, self.others = first, others

    def match(self, ctx: object) -> Any:
        return iter(())

    def rewrite(self, finding: Finding, source: Source) -> Any:
        return self.first

    def forms(self, finding: Finding, source: Source) -> Any:
        for other in self.others:
            if isinstance(other, Exception):
                raise other
            yield other


def planned(*answers: Any) -> Any:
    return plan([FIRST.finding], {"answers": Answers(*answers)}, lambda path: Source(path, ""), ALLOWED)


@pytest.mark.parametrize("answers", [(None,), ("text",), (FIRST, None), (FIRST, ValueError("bad"))])
def test_a_rule_that_answers_with_something_else_has_a_bug(answers: Any) -> None:
    found = planned(*answers)
    assert not found.rewrites
    (error,) = found.errors
    assert "rule answers raised" in str(error)


def test_the_forms_of_one_finding_exclude_each_other() -> None:
    other = replace(FIRST, form="other")
    found = planned(FIRST, other)
    assert [item.form for item in found.rewrites] == [None, "other"]
    assert len({item.group for item in found.rewrites}) == 1
    assert found.rewrites[0].group is not None


def test_a_form_that_cannot_be_written_leaves_the_first() -> None:
    found = planned(FIRST, CannotEdit("no place"))
    assert [type(item) for item in found.rewrites] == [Rewrite]
    assert not found.errors
