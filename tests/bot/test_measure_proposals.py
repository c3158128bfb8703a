"""Which runs stand behind a proposal: one with every rule, then one for each rule alone. The search is stood in for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from handed import NAIVE, report_of

from advisor.bot import measure as module
from advisor.bot.measure import Order, measure
from advisor.commands.common import progress
from advisor.config import BotConfig, Config
from advisor.job import Request
from advisor.model import Estimate, Finding, Patch, Report, Rewrite, Safety, Span
from advisor.pipeline import Result
from advisor.proposals import Examined

TEXT = (NAIVE / "train.py").read_text(encoding="utf-8")
LINES = {"slow-rule": 1, "fast-rule": 3, "small-rule": 5}
SAVED = {"slow-rule": 10.0, "fast-rule": 900.0, "small-rule": 1.0}


def rewrite(rule: str) -> Rewrite:
    span = Span(path="train.py", line=LINES[rule], column=0, end_line=LINES[rule], end_column=0)
    estimate = Estimate(low_us=0.0, high_us=1.0, basis="bound")
    finding = Finding(
        rule=rule, span=span, message="m", evidence=(), estimate=estimate, fingerprint=f"{LINES[rule]:016x}"
    )
    return Rewrite(finding=finding, title=f"mend {rule}", safety=Safety.EXACT, edits=((span, "# better\n"),))


class Searches:
    """Stands in for `optimize`: what it was asked for, and an answer for each selection of rules."""

    def __init__(self, outcomes: dict[str, str]) -> None:
        self.outcomes = outcomes
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, request: Request, _: object) -> Result:
        rules = tuple(request.config.select)
        self.asked.append(rules)
        assert request.config.baselines is False
        outcome = self.outcomes[" ".join(rules)]
        kept = tuple(rewrite(rule) for rule in (rules or tuple(LINES))) if outcome == "improved" else ()
        root = Path.cwd()
        patch = module.patch.build(kept, module._reader(root))
        assert isinstance(patch, Patch)
        return Result(self._report(outcome, kept), root, root, patch, ())

    def _report(self, outcome: str, kept: tuple[Rewrite, ...]) -> Report:
        found = report_of()
        one = next(f for f in found.findings if f.status == "applied")
        findings = tuple(dataclasses.replace(one, rule=r.finding.rule, saved_us=SAVED[r.finding.rule]) for r in kept)
        return dataclasses.replace(found, outcome=outcome, findings=findings)


def proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, str], **bot: object
) -> tuple[Examined, list[tuple[str, ...]]]:
    (tmp_path / "train.py").write_text(TEXT, encoding="utf-8")
    searches = Searches(outcomes)
    monkeypatch.setattr(module, "optimize", searches)
    config = Config(bot=BotConfig(enabled=True, scripts=("train.py",), **bot))  # type: ignore[arg-type]
    order = Order(
        purpose="propose",
        base=tmp_path,
        head=tmp_path,
        base_commit="1" * 40,
        head_commit="1" * 40,
        config=config,
        out=tmp_path / "out",
    )
    (script,) = measure(order, progress(True, ())).scripts
    return script, searches.asked


EACH = {"slow-rule": "improved", "fast-rule": "improved", "small-rule": "improved"}


def test_every_rule_is_measured_alone_the_largest_gain_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, asked = proposed(tmp_path, monkeypatch, {"": "improved", **EACH})
    assert asked == [(), ("fast-rule",), ("slow-rule",), ("small-rule",)]
    assert [proposal.rule for proposal in script.proposals] == ["fast-rule", "slow-rule", "small-rule"]
    assert all(proposal.rules == (proposal.rule,) for proposal in script.proposals)
    assert [len(p.files["train.py"].replacements) for p in script.proposals] == [1, 1, 1]
    assert len({proposal.fingerprint for proposal in script.proposals}) == 3
    assert script.proposals[0].title == "mend fast-rule in train.py"


def test_what_pays_only_beside_others_is_not_proposed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"": "improved", **EACH, "small-rule": "neutral", "slow-rule": "inconclusive"}
    script, _ = proposed(tmp_path, monkeypatch, outcomes)
    assert [proposal.rule for proposal in script.proposals] == ["fast-rule"]
    assert script.undecided == ("slow-rule",)


def test_stacked_is_one_proposal_of_the_one_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, asked = proposed(tmp_path, monkeypatch, {"": "improved"}, stacked=True)
    assert asked == [()]
    (proposal,) = script.proposals
    assert (proposal.rule, proposal.rules) == (None, ("slow-rule", "fast-rule", "small-rule"))
    assert proposal.title == "3 rewrites for train.py"
    assert len(proposal.files["train.py"].replacements) == 3


def test_nothing_proven_is_nothing_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in ("neutral", "inconclusive", "regressed", "wrong"):
        script, asked = proposed(tmp_path, monkeypatch, {"": outcome})
        assert script.proposals == ()
        assert asked == [()]


def test_a_rewrite_that_would_be_redacted_is_not_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    whole = rewrite("fast-rule")
    span = whole.edits[0][0]
    monkeypatch.setattr(
        __name__ + ".rewrite", lambda rule: dataclasses.replace(whole, edits=((span, f"# {secret}\n"),))
    )
    monkeypatch.setitem(globals(), "LINES", {"fast-rule": 3})
    script, _ = proposed(tmp_path, monkeypatch, {"": "improved"})
    assert script.proposals == ()
