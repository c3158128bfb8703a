"""The file between the jobs: sound ones pass unchanged, whatever was done to one is refused before it is used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from handed import NAIVE, RECORDED, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.bot import handover
from advisor.config import BotConfig, Config, config_in
from advisor.errors import ArtifactError
from advisor.proposals import Examination
from advisor.source import digest

COMMIT = recorded().head
FILES = {path.name: path.read_bytes() for path in NAIVE.glob("*.py")}
CONFIG = config_in(NAIVE) or Config()
SECRET = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"


def read(data: bytes, files: Callable[[str], bytes | None] = FILES.get, **changed: Any) -> Examination:
    expected: dict[str, Any] = {"base": COMMIT, "head": COMMIT, "purpose": "propose", "config": CONFIG, **changed}
    return handover.read(data, files=files, **expected)


def tampered(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(RECORDED)
    change(document)
    return json.dumps(document).encode()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read(RECORDED)
    assert found.scripts[0].proposals[0].files == recorded().scripts[0].proposals[0].files
    handover.write(found, tmp_path / handover.NAME)
    assert read((tmp_path / handover.NAME).read_bytes()) == found


def test_the_diff_is_made_anew_from_the_edits() -> None:
    def change(document: dict[str, Any]) -> None:
        document["scripts"][0]["proposals"][0]["report"]["diff"] = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+harmless\n"

    diff = read(tampered(change)).scripts[0].proposals[0].report.diff
    assert "harmless" not in diff
    assert "+        y = nn.functional.scaled_dot_product_attention(" in diff


def at(*keys: str | int) -> Callable[[dict[str, Any], Any], None]:
    """Sets what lies at a path of keys in the first script."""

    def put(document: dict[str, Any], value: Any) -> None:
        inner = document["scripts"][0]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return put


PROPOSAL = ("proposals", 0)
FILE = (*PROPOSAL, "files", "train.py")
TAMPERED = [
    ("another commit", lambda d: d.update(head="0" * 40), "other commits"),
    ("another purpose", lambda d: d.update(purpose="examine"), "measured to"),
    ("a later schema", lambda d: d.update(schema=2), "schema 2"),
    ("a script of its own", lambda d: at("command")(d, "evil.py"), "the owner did not"),
    ("a better ratio", lambda d: at(*PROPOSAL, "report", "speedup")(d, 9.0), "not that of its timing"),
    ("a better ratio throughout", lambda d: _faster(d), "does not follow from its blocks"),
    ("an interval", lambda d: at(*PROPOSAL, "report", "interval")(d, [8.0, 9.0]), "an interval is not"),
    ("a narrower interval", lambda d: _sure(d, interval=[2.08, 2.083]), "narrower than that of its blocks"),
    ("a surer interval", lambda d: _sure(d, confidence=0.999), "surer than that of its blocks"),
    ("no noise", lambda d: _sure(d, noise=0.0), "noise is less"),
    ("no control", lambda d: _sure(d, noise=None), "noise is less"),
    ("no timing", lambda d: at(*PROPOSAL, "report", "timing")(d, None), "no timing behind it"),
    ("no proof", lambda d: at(*PROPOSAL, "report", "numerics")(d, None), "not proven"),
    ("a failed proof", lambda d: at(*PROPOSAL, "report", "numerics", "ok")(d, False), "not proven"),
    ("a neutral one", lambda d: at(*PROPOSAL, "report", "outcome")(d, "neutral"), "not proven"),
    ("an outcome", lambda d: at("report", "outcome")(d, "<b>improved</b>"), "an outcome is none"),
    ("a rule", lambda d: at(*PROPOSAL, "rule")(d, "../../x"), "a rule has no id"),
    ("rules", lambda d: at(*PROPOSAL, "rules")(d, ["a b"]), "a rule has no id"),
    ("undecided", lambda d: at("undecided")(d, ["A"]), "a rule has no id"),
    ("a fingerprint", lambda d: at(*PROPOSAL, "fingerprint")(d, "../../main"), "a fingerprint is none"),
    ("other text", lambda d: at(*FILE, "replacements", 0, 2)(d, "import os; os.system('x')\n"), "edits of train.py"),
    ("not Python", lambda d: at(*FILE, "replacements", 0, 2)(d, "((("), "do not give a Python source"),
    ("out of order", lambda d: at(*FILE, "replacements")(d, [[9, 10, "a"], [3, 12, "b"]]), "edits of train.py"),
    ("outside", lambda d: at(*FILE, "replacements")(d, [[0, 10**9, ""]]), "edits of train.py"),
    ("negative", lambda d: at(*FILE, "replacements")(d, [[-5, 3, ""]]), "edits of train.py"),
    ("nothing", lambda d: at(*FILE, "replacements")(d, []), "do not give the text"),
    ("no file", lambda d: at(*PROPOSAL, "files")(d, {}), "no file, or too many"),
    ("another base", lambda d: at(*FILE, "base")(d, "0" * 64), "not the text that was measured"),
    ("a number", lambda d: at("report", "step_ms_before")(d, "fast"), "damaged"),
    ("a missing field", lambda d: d.pop("scripts"), "damaged"),
    ("a step time", lambda d: at(*PROPOSAL, "report", "step_ms_after")(d, 0.001), "not that of its blocks"),
    ("no step time", lambda d: at(*PROPOSAL, "report", "step_ms_before")(d, None), "not that of its blocks"),
    ("a rule of its own", lambda d: at(*PROPOSAL, "rule")(d, "unfused-gelu"), "one rule holds others"),
    ("rules of its own", lambda d: at(*PROPOSAL, "rules")(d, ["naive-attention", "x"]), "one rule holds others"),
    (
        "other rules",
        lambda d: [at(*PROPOSAL, k)(d, v) for k, v in (("rule", "x"), ("rules", ["x"]))],
        "not of the rules",
    ),
    ("a level", lambda d: _level(d, "semantics"), "does not allow"),
    ("no level", lambda d: _level(d, None), "does not allow"),
    ("rewrites", lambda d: at("rewrites")(d, {"a" * 12: {}}), "not measured to propose"),
    ("a comparison", lambda d: at("comparison")(d, _comparison(d)), "not measured to propose"),
    ("what it was narrowed to", lambda d: d.update(rules=["../x"]), "a rule has no id"),
]


def _sure(document: dict[str, Any], **changed: Any) -> None:
    report = document["scripts"][0]["proposals"][0]["report"]
    report["timing"].update(changed)
    report["interval"], report["confidence"] = report["timing"]["interval"], report["timing"]["confidence"]


def _level(document: dict[str, Any], level: str | None) -> None:
    for finding in document["scripts"][0]["proposals"][0]["report"]["findings"]:
        finding["safety"] = level


def _comparison(document: dict[str, Any]) -> dict[str, Any]:
    report = document["scripts"][0]["report"]
    use = {"throughput_unit": "tokens", "missing": {}}
    use |= dict.fromkeys(("tokens_per_s", "peak_gib", "mfu", "peak_flops", "peak_source"))
    sides = {
        "before": {"step_ms": report["step_ms_before"], **use},
        "after": {"step_ms": report["step_ms_after"], **use},
    }
    shared = {key: report[key] for key in ("reasons", "timing", "environment", "hardware")}
    return {"outcome": "improved", **shared, **sides}


def examined(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The recorded document as if it were of a pull request."""

    def examine(document: dict[str, Any]) -> None:
        script = document["scripts"][0]
        edits = script["proposals"][0]["files"]
        script.update(proposals=[], rewrites={"a" * 12: edits}, comparison=_comparison(document))
        document.update(purpose="examine", base=OTHER_COMMIT)
        change(document)

    return tampered(examine)


OTHER_COMMIT = "2" * 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: at("comparison", "before", "step_ms")(d, 1e6), "not that of its blocks"),
        (lambda d: at("comparison", "after", "step_ms")(d, None), "not that of its blocks"),
        (lambda d: at("comparison", "outcome")(d, "regressed"), "does not follow"),
        (lambda d: at("report", "outcome")(d, "neutral"), "a rewrite is not proven"),
        (lambda d: at("report")(d, None), "a rewrite is not proven"),
        (lambda d: at("proposals")(d, json.loads(RECORDED)["scripts"][0]["proposals"]), "not measured to examine"),
        (lambda d: d.update(base=COMMIT), "other commits"),
    ],
)
def test_what_was_tampered_with_of_a_pull_request_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    assert read(examined(lambda d: None), purpose="examine", base=OTHER_COMMIT)
    with pytest.raises(ArtifactError, match=message):
        read(examined(change), purpose="examine", base=OTHER_COMMIT)


def test_a_commit_is_not_compared_with_itself() -> None:
    with pytest.raises(ArtifactError, match="with itself"):
        read(examined(lambda d: d.update(base=COMMIT)), purpose="examine")


def test_a_script_that_the_file_leaves_out_was_not_measured() -> None:
    bot = dataclasses.replace(CONFIG.bot, scripts=(*CONFIG.bot.scripts, "slow.py"))
    found = read(RECORDED, config=dataclasses.replace(CONFIG, bot=bot))
    assert [(s.command, s.error) for s in found.scripts[1:]] == [("slow.py", "it was not measured")]
    assert read(tampered(lambda d: d.update(scripts=[]))).scripts[0].report is None


def _faster(document: dict[str, Any]) -> None:
    report = document["scripts"][0]["proposals"][0]["report"]
    report["speedup"], report["interval"] = 9.0, [8.0, 10.0]
    report["timing"]["speedup"], report["timing"]["interval"] = 9.0, [8.0, 10.0]


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=name) for name, c, m in TAMPERED])
def test_what_was_tampered_with_is_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read(tampered(change))


PATHS = [
    "../train.py",
    "/etc/x.py",
    "a/../train.py",
    "./train.py",
    "a//train.py",
    ".git/hooks/x.py",
    "a/.GIT/x.py",
    ".github/x.py",
    "train.sh",
    ".github/workflows/ci.yml",
    "setup.cfg",
    "a\\x.py",
    "x\n.py",
    "a\u202ex.py",
    "",
    "x" * 2000 + ".py",
    ".hidden/train.py",
    "a/.x.py",
    "a /x.py",
    "a./x.py",
    "x:y.py",
    "PROGRA~1/x.py",
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leaves_the_sources(path: str) -> None:
    assert not handover.is_source(path)

    def change(document: dict[str, Any]) -> None:
        files = document["scripts"][0]["proposals"][0]["files"]
        files[path] = files.pop("train.py")

    with pytest.raises(ArtifactError, match="no Python source"):
        read(tampered(change), files=lambda name: FILES["train.py"])


def test_sources_are_sources() -> None:
    for path in ("train.py", "a/b/train.py", "a b/c.py", "src/\u00e9.py"):
        assert handover.is_source(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": NaN}'])
def test_what_is_no_examination_is_damaged(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="damaged"):
        read(data)


def test_a_file_that_never_ends_is_not_parsed() -> None:
    with pytest.raises(ArtifactError, match="more than 32 MiB"):
        read(b" " * (handover.MOST_BYTES + 1))


def test_text_with_a_secret_is_redacted_when_written_and_again_when_read(tmp_path: Path) -> None:
    found = recorded()
    script = dataclasses.replace(found.scripts[0], error=f"token {SECRET}")
    handover.write(dataclasses.replace(found, scripts=(script,)), tmp_path / "x")
    assert SECRET not in (tmp_path / "x").read_text(encoding="utf-8")

    def change(document: dict[str, Any]) -> None:
        document["scripts"][0]["report"]["reasons"] = [f"token {SECRET}"]

    assert SECRET not in repr(read(tampered(change)))


def test_only_scripts_of_the_owner_count_and_his_settings() -> None:
    other = Config(bot=BotConfig(enabled=True, scripts=("other.py",)))
    with pytest.raises(ArtifactError, match="the owner did not"):
        read(RECORDED, config=other)
    strict = dataclasses.replace(CONFIG, min_quads=40)
    with pytest.raises(ArtifactError, match="no timing behind it"):
        read(RECORDED, config=strict)


def test_a_file_that_is_gone_or_a_link_at_the_commit_is_not_edited() -> None:
    with pytest.raises(ArtifactError, match="not the text that was measured"):
        read(RECORDED, files=lambda path: None)


def test_line_ends_are_those_of_the_file() -> None:
    edit = recorded().scripts[0].proposals[0].files["train.py"]
    text = FILES["train.py"].decode()
    assert digest(text) == edit.base
    after = handover.results({"train.py": edit}, FILES.get)["train.py"]
    assert digest(after) == edit.result


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_of_the_document_ends_in_anything_but_a_refusal_or_the_same_edits(data: st.DataObject) -> None:
    """Replace one value anywhere by another JSON value: what passes proposes what was proved, to the letter."""
    document = json.loads(RECORDED)
    inner: Any = document
    while True:
        keys = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        value = inner[key]
        if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 5)) > 0:
            inner = value
            continue
        break
    inner[key] = data.draw(
        st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=8), st.just([]), st.just({}))
    )
    try:
        found = read(json.dumps(document).encode())
    except ArtifactError:
        return
    for script in found.scripts:
        for proposal in script.proposals:
            assert handover.results(proposal.files, FILES.get)
            assert not list(handover.wrong_edits(proposal.files, FILES.get))
