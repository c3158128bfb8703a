"""A recorded examination: `advisor bot measure --purpose propose` on the folder naive/, made on two CPU cores."""

from __future__ import annotations

import json
from pathlib import Path

from advisor.model import Report
from advisor.proposals import Examination, Proposal
from advisor.reports.jsonform import decode

NAIVE = Path(__file__).parent / "naive"
RECORDED = (NAIVE / "propose.json").read_bytes()


def recorded() -> Examination:
    """The examination as it was written."""
    found: Examination = decode(Examination, json.loads(RECORDED), "examination")
    return found


def report_of() -> Report:
    """The report of its one script: naive-attention was applied."""
    report = recorded().scripts[0].report
    assert report is not None
    return report


def proposal_of() -> Proposal:
    """Its one proposal."""
    return recorded().scripts[0].proposals[0]
