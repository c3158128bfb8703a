"""Verdicts that depend on how quiet the machine is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def improved(report: Mapping[str, Any]) -> None:
    """The run must have improved the script; where the machine was too busy to decide, the test is skipped."""
    if report["outcome"] == "inconclusive":
        pytest.skip(f"the machine was too busy for a verdict: {'; '.join(report['reasons'])}")
    assert report["outcome"] == "improved", report["reasons"]
