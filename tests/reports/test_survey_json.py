"""The JSON of `advisor analyze`: stable names first, null for what is not known, the same text for equal surveys."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable

import pytest
import surveys
from figures import with_figures
from surveys import EVERY

from advisor.measured import Cost, FileProfile, Survey
from advisor.reports.survey_json import render_json, to_document

STABLE = (
    "path status reason events kernels kernel_us busy_us span_us steps step_mean_us nccl_kernels exposed_comm_us "
    "device rank world_size mfu mfu_causal mfu_own_peak hfu"
).split()
NEVER = re.compile(r"\b(NaN|Infinity)\b")


def test_the_stable_fields_come_first_and_in_order() -> None:
    document = to_document(surveys.mixed())
    assert list(document) == ["schema", "files", "ranks"]
    assert document["schema"] == 1
    assert document["ranks"] is None
    for file in document["files"]:
        assert list(file)[: len(STABLE)] == STABLE


def test_the_values_are_those_of_the_survey() -> None:
    file = to_document(surveys.dlrm())["files"][3]
    assert [file[name] for name in STABLE] == [
        "param-dlrm8/rank3.pt.trace.json.gz", "ok", None, 3474, 315, 11014.0, 10708.0, 18853.0, 1, 19313.0, 8, 9450.0,
        "Tesla V100-SXM2-32GB", 3, 8, None, None, None, None,
    ]  # fmt: skip


def test_every_field_of_a_file_has_a_place() -> None:
    file = to_document(surveys.one(surveys.training()))["files"][0]
    assert len(file) == len(dataclasses.fields(FileProfile))
    assert set(file["costs"][0]) == {field.name for field in dataclasses.fields(Cost)} | {"recoverable_us"}
    assert file["breakdown"]["idle_by_cause_us"]["launch"] == 7_900.0
    assert file["occupancy"]["known_share"] == 0.93
    assert file["utilisation"]["peak_flops_per_s"] == 989.4e12
    assert file["critical_path"]["what_if"][1] == {"name": "attention", "measured_us": 535_300.0, "step_us": 334_300.0}
    assert file["gaps"][0]["qualifies"] is True
    assert file["counters"][2] == {"name": "power", "value": 512.0, "unit": "W", "source": "nvml"}


def test_what_can_be_recovered_is_written_although_it_is_derived() -> None:
    costs = {each["name"]: each for each in to_document(surveys.one(surveys.training()))["files"][0]["costs"]}
    assert costs["attention"]["recoverable_us"] == 201_000.0
    assert costs["attention"]["tensor_cores"] is None
    assert costs["matmul"]["tensor_cores"] is True
    assert costs["other"]["recoverable_us"] is None


def test_ranks() -> None:
    ranks = to_document(surveys.dlrm())["ranks"]
    assert (ranks["straggler"], ranks["imbalance"], ranks["missing"]) == (7, 0.214, [])
    assert ranks["ranks"][7]["wait_us"] == 0.0
    assert ranks["ranks"][1] == {
        "path": "param-dlrm8/rank1.pt.trace.json.gz", "rank": 1, "step_us": 19901.0, "compute_us": 1246.0,
        "exposed_comm_us": 11056.0, "transfer_us": 1746.0, "wait_us": 9590.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_the_text_is_ascii_and_ends_in_a_newline(name: str) -> None:
    survey = EVERY[name]
    text = render_json(survey)
    assert text.isascii()
    assert text.endswith("}\n")
    assert NEVER.search(text) is None
    assert json.loads(text) == to_document(survey)
    assert render_json(survey) == text


def test_equal_surveys_give_the_same_text() -> None:
    survey = surveys.one(surveys.training())
    file = survey.files[0]
    assert file.breakdown is not None
    causes = dict(reversed(list(file.breakdown.idle_by_cause_us.items())))
    other = dataclasses.replace(
        file,
        breakdown=dataclasses.replace(file.breakdown, idle_by_cause_us=causes),
        tensor_time=dict(reversed(list(file.tensor_time.items()))),
    )
    assert surveys.one(other) == survey
    assert render_json(surveys.one(other)) == render_json(survey)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_null(bad: float) -> None:
    for survey in EVERY.values():
        text = render_json(with_figures(survey, bad))
        assert NEVER.search(text) is None
    file = to_document(with_figures(surveys.one(surveys.training()), bad))["files"][0]
    assert {file[name] for name in STABLE if name.endswith("_us") or "mf" in name} == {None}
    assert file["costs"][0]["recoverable_us"] is None
    assert file["breakdown"]["length_us"] is None


def test_nothing_known_is_null_and_not_zero() -> None:
    file = to_document(surveys.one(surveys.bare()))["files"][0]
    assert [file[name] for name in STABLE[2:]] == [None] * (len(STABLE) - 2)
    assert (file["breakdown"], file["critical_path"], file["costs"], file["gaps"]) == (None, None, [], [])
    assert file["occupancy"]["percent"] is None


def test_no_file_is_a_document() -> None:
    assert json.loads(render_json(Survey(files=()))) == {"schema": 1, "files": [], "ranks": None}


def test_hostile_text_is_kept_and_escaped(poison: Callable[[Survey, str], Survey]) -> None:
    text = '"\\</script>\x00\x1b[31m\u202e\ud800\r\n\u2028' * 3
    for survey in EVERY.values():
        written = render_json(poison(survey, text))
        assert written.isascii()
        assert all(file["path"] == text for file in json.loads(written)["files"])


def test_whole_numbers_in_place_of_fractions_are_fractions() -> None:
    text = render_json(surveys.one(surveys.training(busy_us=3, mfu=0)))
    assert '"busy_us": 3.0,' in text
    assert '"mfu": 0.0,' in text
