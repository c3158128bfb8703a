"""The grading of the exams: what counts as met, as missed and as wrong."""

from __future__ import annotations

from examiner import Answer, Entry, Expectation, grade, near, read


def entry(rule: str = "unfused-gelu", line: int | None = 10, *, found: bool = True, text: str = "") -> Entry:
    return Entry(rule=rule, path="model.py", line=line, end_line=line, found=found, text=text)


def wanted(answer: str, first: int = 8, last: int = 12) -> Expectation:
    return Expectation(answer=answer, rules=("unfused-gelu",), file="model.py", lines=(first, last))


def test_a_finding_meets_what_must_be_found_and_a_decline_does_not() -> None:
    assert grade([wanted("find")], Answer((entry(),))).met
    missed = grade([wanted("find")], Answer((entry(found=False, text="it is small"),))).missed
    assert missed == [(wanted("find"), "it is small")]
    assert grade([wanted("say")], Answer((entry(found=False),))).met


def test_silence_and_trouble_are_reasons() -> None:
    assert grade([wanted("say")], Answer(())).missed[0][1] == "nothing was said"
    assert grade([wanted("say")], Answer((), ("it did not run",))).missed[0][1] == "it did not run"


def test_a_finding_that_nothing_allows_is_wrong() -> None:
    assert grade([wanted("refuse")], Answer((entry(),))).wrong == [entry()]
    assert grade([], Answer((entry(),))).wrong == [entry()]
    assert grade([wanted("find", 20, 22)], Answer((entry(),))).wrong == [entry()]
    assert not grade([wanted("may")], Answer((entry(),))).wrong
    assert not grade([], Answer((entry(found=False),))).wrong


def test_a_refused_place_stays_refused_inside_an_allowed_one() -> None:
    assert grade([wanted("may", 1, 90), wanted("refuse")], Answer((entry(),))).wrong


def test_rules_of_other_exams_are_not_graded() -> None:
    assert not grade([], Answer((entry("optimizer-not-fused"),))).wrong


def test_near_is_within_the_span_or_three_lines_from_its_end() -> None:
    assert near(entry(line=10), 13) and near(entry(line=10), 7)
    assert not near(entry(line=10), 14)
    assert not near(entry(line=None), 14)


def test_the_place_in_a_library_is_read_from_the_text() -> None:
    each = {
        "rule": "unfused-rmsnorm",
        "path": "train.py",
        "line": 3,
        "end_line": 3,
        "title": "unfused-rmsnorm in transformers/models/llama/modeling_llama.py:67",
        "reason": None,
    }
    file = {"status": "partial", "reason": "no graph", "rule_errors": []}
    document = {"findings": [each], "declines": [], "files": [file]}
    answer = read(document)
    assert answer.trouble == ("partial: no graph",)
    assert answer.entries[0].places == [("train.py", 3, 3), ("transformers/models/llama/modeling_llama.py", 67, 67)]
    key = [Expectation(answer="find", rules=("unfused-rmsnorm",), file="llama/modeling_llama.py")]
    assert grade(key, answer).met
