"""Counters of single kernels and operators, recorded on an H200, in every form of a report."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import msgspec
from rich.console import Console

from advisor.model import Report, SingleCounters
from advisor.reports.html import render_html
from advisor.reports.jsonform import from_document, render_json
from advisor.reports.terminal import render_terminal

RECORDED = Path(__file__).parents[2] / "samples" / "nano_gpt" / "h200"


def recorded() -> Report:
    report = from_document(json.loads((RECORDED / "report.json").read_text(encoding="utf-8")))
    found = msgspec.json.decode((RECORDED / "singles.json").read_bytes(), type=tuple[SingleCounters, ...])
    return dataclasses.replace(report, single_counters=found)


def test_the_recording_has_what_the_design_measured() -> None:
    """Nsight Compute and the replay under GPM agree; METRICS.md has 99.8, 93, 2.3 and 30 % for the masked fill."""
    by_name = {item.name: {m.name: m.value for m in item.counters} for item in recorded().single_counters}
    replayed = by_name["aten::masked_fill_ [8, 16, 2048, 2048] x [1, 1, 2048, 2048] bfloat16"]
    masked = "void at::native::elementwise_kernel<128, 4"
    kernel = next(found for name, found in by_name.items() if name.startswith(masked))
    for found, dram in ((replayed, "dram_active"), (kernel, "dram_throughput")):
        assert abs(found["sm_active"] - 99.8) < 1
        assert abs(found["tensor_active"] - 2.3) < 0.5
        assert abs(found[dram] - 30) < 3
    assert abs(replayed["sm_occupancy"] - kernel["achieved_occupancy"]) < 2


def test_they_come_back_from_json_and_stand_in_page_and_terminal() -> None:
    report = recorded()
    assert from_document(json.loads(render_json(report))) == report
    page = render_html(report)
    assert "Counters of single kernels and operators" in page and "replayed alone" in page
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=100))
    assert "counters of 20 kernels and operators are in the page" in out.getvalue()
