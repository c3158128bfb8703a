"""The distilled cases: what must be reported is, what must be refused is not rewritten, nothing forbidden is said."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from examiner import Answer, Entry, ask, near

from advisor.rule import ON_A_GPU

DATA = Path(__file__).with_name("data")
SHARED = Path(__file__).parents[3] / "shared" / "cases"
CASES = {case["case"]: case for case in json.loads((DATA / "cases.json").read_text(encoding="utf-8"))}

# From the vocabulary of the cases to rules; a tuple names every rule that may answer for the id.
GRAPH_IDS: Mapping[str, tuple[str, ...]] = {
    "attn-naive": ("naive-attention",),
    "attn-need-weights": ("mha-need-weights", "naive-attention"),
    "attn-mask-blocks-flash": ("materialised-causal-mask",),
    "norm-unfused": ("unfused-rmsnorm", "unfused-layernorm"),
    "vocab-unaligned": ("misaligned-dims",),
    "logits-chunking": ("logits-memory",),
    "channels-last": ("channels-last",),
    "ema-loop": ("ema-loop",),
}
# Rules of the training loop: what only a GPU shows may be answered with "cannot tell: needs a GPU profile" at the line.
LOOP_IDS: Mapping[str, tuple[str, ...]] = {
    "optim-not-fused": ("optimizer-not-fused",),
    "optim-loop": ("optimizer-not-fused",),
    "zero-grad-zeros": ("zero-grad-fill",),
    "tf32-off": ("tf32-off",),
    "amp-missing": ("no-mixed-precision",),
    "collate-slow": ("collate-slow",),
    "graph-break": ("graph-break",),
    "recompile": ("recompile",),
    "batch-too-small": ("headroom-batch",),
    "loader-no-workers": ("dataloader-bound",),
    "loader-not-persistent": ("dataloader-bound",),
    "loader-no-pin": ("pageable-h2d", "dataloader-bound"),
    "sync-item": ("host-sync",),
    "sync-control-flow": ("host-sync",),
    "sync-index": ("host-sync",),
    "sync-d2h": ("host-sync",),
    "explicit-sync": ("host-sync", "debug-left-on"),
    "cache-flush": ("debug-left-on",),
    "debug-mode": ("debug-left-on",),
    "ddp-find-unused": ("ddp-settings",),
    "ddp-no-sync": ("ddp-settings",),
    "padding-waste": ("padding-waste",),
    "ckpt-unneeded": ("needless-checkpoint",),
    "overhead-bound": ("launch-bound",),
    "compile-missing": ("pointwise-chain", "launch-bound"),
    "h2d-in-step": ("cpu-create-then-copy", "pageable-h2d"),
}
# Nothing asks for these yet.
NOT_YET: Mapping[str, tuple[str, ...]] = {
    "compile-order-fsdp": ("fsdp-graph-break",),
}
RULES = {**GRAPH_IDS, **LOOP_IDS, **NOT_YET}
# Refusals that name an edit instead of an id: text that no diff may hold.
FORBIDDEN_TEXT = {
    "is_causal without bias": "is_causal=True",
    "sparse=False": "sparse=False",
    "drop or move unscale_": "-    scaler.unscale_",
    "num_workers>0 alone": "num_workers",
}
# Refusals of any edit at their line.
FORBIDDEN_EDIT = ("constant only", "untie", "merge micro-batches")

MEASURED = [number for number in CASES if number != 23]  # which ends before its graph could be recorded


def stripped(text: str) -> str:
    """A case without its docstring, which holds the answers; the line numbers stay."""
    first = ast.parse(text).body[0]
    assert isinstance(first, ast.Expr) and first.end_lineno is not None
    return "\n" * first.end_lineno + "\n".join(text.split("\n")[first.end_lineno :])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Answer]:
    """What is said of the cases, each asked at most once."""

    class Asked(dict[int, Answer]):
        def __missing__(self, number: int) -> Answer:
            script = tmp_path_factory.mktemp(f"case{number}") / f"{CASES[number]['name']}.py"
            script.write_text((DATA / f"{CASES[number]['name']}.txt").read_text(encoding="utf-8"), encoding="utf-8")
            self[number] = ask(script, environment={"STEPS": "24"})
            return self[number]

    return Asked()


def at(found: Entry, item: Mapping[str, Any]) -> bool:
    """Whether a finding is of the line of an expectation."""
    return near(found, item["line"])


ASKED = {**GRAPH_IDS, **LOOP_IDS}
WANTED = [(n, i) for n, case in CASES.items() for i in case["expected"]["must_report"] if i["id"] in ASKED]
REFUSED = [(n, i) for n, case in CASES.items() for i in case["expected"]["must_refuse"] if isinstance(i, dict)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "item"), WANTED, ids=[f"{n}-{i['id']}-{i['line']}" for n, i in WANTED])
def test_reported(answers: Mapping[int, Answer], number: int, item: Mapping[str, Any]) -> None:
    here = [e for e in answers[number].entries if e.rule in RULES[item["id"]]]
    told = [e for e in here if (e.found or ON_A_GPU in e.text) and (at(e, item) or item["id"] == "tf32-off")]
    assert told, ([(e.line, e.text) for e in here], answers[number].trouble)
    found = [e for e in told if e.found]
    if item["action"] == "suggest":
        assert not any(e.diff for e in found), "it may be told, not changed"
    elif found and item["id"] in LOOP_IDS:
        assert any(e.diff for e in found), "it is told, not changed"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "item"), REFUSED, ids=[f"{n}-{i['rewrite']}" for n, i in REFUSED])
def test_refused(answers: Mapping[int, Answer], number: int, item: Mapping[str, Any]) -> None:
    findings = answers[number].findings
    name = item["rewrite"]
    if name in FORBIDDEN_TEXT:
        assert not [e for e in findings if FORBIDDEN_TEXT[name] in e.diff]
    elif name in FORBIDDEN_EDIT:
        assert not [e for e in findings if e.diff and at(e, item)]
    else:
        spared = [i for i in CASES[number]["expected"]["must_report"] if i["id"] == name]
        found = [e for e in findings if e.rule in RULES.get(name, ()) and e.line == item["line"]]
        found += [e for e in findings if e.rule in RULES.get(name, ()) and at(e, item) and not _any(e, spared)]
        assert not found


def _any(found: Entry, items: list[Mapping[str, Any]]) -> bool:
    return any(at(found, item) for item in items)


@pytest.mark.slow
@pytest.mark.parametrize("number", MEASURED)
def test_measured(answers: Mapping[int, Answer], number: int) -> None:
    """Silence counts only where the script ran and its graph was read."""
    assert not answers[number].trouble


@pytest.mark.slow
@pytest.mark.parametrize("number", CASES)
def test_nothing_forbidden_is_said(answers: Mapping[int, Answer], number: int) -> None:
    expected = CASES[number]["expected"]
    forbidden = {rule for name in expected["must_not_report"] for rule in RULES[name]}
    forbidden -= {rule for item in expected["must_report"] for rule in RULES[item["id"]]}
    assert not [(e.rule, e.line, e.text) for e in answers[number].findings if e.rule in forbidden]


@pytest.mark.slow
@pytest.mark.parametrize("number", CASES)
def test_only_known_findings(answers: Mapping[int, Answer], number: int) -> None:
    """A graph rule reports nothing that the case neither asks for nor allows."""
    expected = CASES[number]["expected"]
    named = [item if isinstance(item, str) else item["id"] for item in expected["must_report"] + expected["may_report"]]
    allowed = {rule for name in named for rule in RULES[name]}
    graph_rules = {rule for rules in GRAPH_IDS.values() for rule in rules}
    assert not [(e.rule, e.line, e.text) for e in answers[number].findings if e.rule in graph_rules - allowed]


def test_every_case_is_there() -> None:
    assert sorted(CASES) == list(range(1, 25))
    for case in CASES.values():
        ids = {item["id"] for item in case["expected"]["must_report"]} | set(case["expected"]["must_not_report"])
        assert ids <= set(RULES), case["name"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the cases with their docstrings are not here")
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case["name"])
def test_copies_are_those_of_the_shared_cases(case: Mapping[str, Any]) -> None:
    text = (SHARED / f"{case['name']}.py").read_text(encoding="utf-8")
    assert (DATA / f"{case['name']}.txt").read_text(encoding="utf-8") == stripped(text)
