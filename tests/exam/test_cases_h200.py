"""The distilled cases at the sizes of a GPU, as recorded on one NVIDIA H200 and replayed here: no answer may wait for a
GPU any more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from examiner import Answer, near, read
from recorded_runs import job_of, restore
from test_cases_exam import CASES, DATA, FORBIDDEN_EDIT, FORBIDDEN_TEXT, LOOP_IDS, REFUSED, RULES

from advisor import patch, stages
from advisor.cli import cli
from advisor.rule import ON_A_GPU

RECORDED = Path(__file__).with_name("h200")
WANTED = [(n, i) for n, case in CASES.items() for i in case["expected"]["must_report"]]


def restored(number: int, root: Path) -> Path:
    """The folder of a recorded run, beside the script that it is of."""
    script = f"{CASES[number]['name']}.py"
    (root / script).write_text((DATA / f"{CASES[number]['name']}.txt").read_text(encoding="utf-8"), encoding="utf-8")
    run = root / "runs" / "h200"
    run.mkdir(parents=True)
    restore(RECORDED / f"case_{number:02d}", run)
    request = {"schema": 1, "script": script, "arguments": [], "entry": None, "root": "../..", "folder": "."}
    request["arguments_sha256"] = hashlib.sha256(b"").hexdigest()
    (run / "run.json").write_text(json.dumps({**request, "config": {}}), encoding="utf-8")
    return run


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Answer]:
    """What is said of the recordings, each asked at most once, with the gates of every rule as they are."""

    class Asked(dict[int, Answer]):
        def __missing__(self, number: int) -> Answer:
            run = restored(number, tmp_path_factory.mktemp(f"case{number}"))
            told = CliRunner().invoke(cli, ["check", str(run), "--json", "-q"], catch_exceptions=False)
            self[number] = read(json.loads(told.stdout))
            return self[number]

    return Asked()


@pytest.mark.parametrize("number", CASES)
def test_measured(answers: Mapping[int, Answer], number: int) -> None:
    assert not answers[number].trouble


@pytest.mark.parametrize("number", CASES)
def test_nothing_waits_for_a_gpu(answers: Mapping[int, Answer], number: int) -> None:
    assert not [entry for entry in answers[number].entries if ON_A_GPU in entry.text]


@pytest.mark.parametrize(("number", "item"), WANTED, ids=[f"{n}-{i['id']}-{i['line']}" for n, i in WANTED])
def test_reported(answers: Mapping[int, Answer], number: int, item: Mapping[str, Any]) -> None:
    here = [e for e in answers[number].entries if e.rule in RULES[item["id"]]]
    told = [e for e in here if near(e, item["line"]) or item["id"] == "tf32-off"]
    found = [e for e in told if e.found]
    assert found, [(e.line, e.text) for e in here]
    if item["action"] == "suggest":
        assert not any(e.diff for e in found if e.line == item["line"]), "it may be told, not changed"
    elif item["id"] in LOOP_IDS:
        assert any(e.diff for e in found), "it is told, not changed"


@pytest.mark.parametrize(("number", "item"), REFUSED, ids=[f"{n}-{i['rewrite']}" for n, i in REFUSED])
def test_refused(answers: Mapping[int, Answer], number: int, item: Mapping[str, Any]) -> None:
    """What must not be rewritten may be told."""
    edited = [e for e in answers[number].findings if e.diff]
    name = item["rewrite"]
    if name in FORBIDDEN_TEXT:
        assert not [e for e in edited if FORBIDDEN_TEXT[name] in e.diff]
    elif name in FORBIDDEN_EDIT:
        assert not [e for e in edited if (e.line or 0) <= item["line"] <= (e.end_line or 0)]
    else:
        spared = [i for i in CASES[number]["expected"]["must_report"] if i["id"] == name]
        found = [e for e in edited if e.rule in RULES.get(name, ()) and near(e, item["line"])]
        assert not [e for e in found if e.line == item["line"] or not any(near(e, i["line"]) for i in spared)]


@pytest.mark.parametrize("number", CASES)
def test_nothing_forbidden_is_said(answers: Mapping[int, Answer], number: int) -> None:
    expected = CASES[number]["expected"]
    forbidden = {rule for name in expected["must_not_report"] for rule in RULES[name]}
    forbidden -= {rule for item in expected["must_report"] for rule in RULES[item["id"]]}
    assert not [(e.rule, e.line, e.text) for e in answers[number].findings if e.rule in forbidden]


def test_workers_pinned_memory_and_copies_in_one_patch(tmp_path: Path) -> None:
    """The call that gets workers and pinned memory is edited once, the copies of its batches beside it."""
    run = restored(11, tmp_path)
    job = job_of(tmp_path / f"{CASES[11]['name']}.py", (), tmp_path, run)
    planned = stages.order(job, stages.find(job, stages.analyse(job, stages.ingest(job))))
    workers, both, copies = planned.rewrites
    assert [(r.finding.rule, r.form) for r in planned.rewrites] == [
        ("dataloader-bound", None), ("pageable-h2d", None), ("pageable-h2d", "copies")
    ]  # fmt: skip
    assert copies.requires == ("dataloader-bound",)
    assert [other.id for other, _ in patch.build([workers, both], job.read).skipped] == [both.id]
    whole = patch.build([workers, copies], job.read)
    assert not whole.skipped
    assert "num_workers" in whole.diff and "pin_memory=True" in whole.diff and "non_blocking=True" in whole.diff
