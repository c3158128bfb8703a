"""What `advisor analyze` prints: figures with their unit and denominator, in any width, whatever the names say."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable

import pytest
import surveys
from figures import with_figures
from rich.cells import cell_len
from rich.console import Console
from surveys import EVERY

from advisor.measured import FileProfile, Survey
from advisor.model import Metric
from advisor.redact import Redactor
from advisor.reports.survey_terminal import render_terminal

HOSTILE = "<script>[red]bold[/red]\x1b[31m\x1b]8;;http://evil.example\x07\x00\x9b2J\u202eabc\u2066\ud800\r\n:smile:[/]"
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(survey: Survey, width: int = 100, *, color: bool = False, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", newline="", write_through=True)
    console = Console(file=stream, width=width, force_terminal=color, color_system="truecolor" if color else None)
    render_terminal(survey, console)
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode(encoding)


def said(file: FileProfile, width: int = 140) -> str:
    return shown(surveys.one(file), width)


def test_the_answer_comes_first() -> None:
    lines = said(surveys.training(), 120).splitlines()
    assert lines[0] == "535.3 ms per step   384.2 ms (71.8 % of the mean step) above the floor"
    assert lines[1] == "  runs/gpt/trace.json.gz: NVIDIA H200, 174,220 events, 8,620 kernels"
    assert lines[3] == "  step           535.3 ms median on the device, steps that end with the optimizer"
    assert lines[4] == "                 293.8 ms mean of 5 ProfilerStep ranges on the host"
    assert "  MFU            15.0 % of 989.4 TFLOP/s (datasheet, dense bfloat16)" in lines
    assert (
        lines[9] == " " * 17 + "15.0 % of its own peaks, 14.0 % causal, HFU 15.3 %, 18.8 % of the measured matmul rate"
    )


def test_gpu_busy_never_stands_without_its_denominator() -> None:
    lines = said(surveys.training()).splitlines()
    first = next(index for index, line in enumerate(lines) if "GPU busy" in line)
    assert [line[17:] for line in lines[first : first + 3]] == [
        "98.1 % of the steps on the device",
        "81.2 % of the ProfilerStep window",
        "97.7 % of the GPU span",
    ]
    table = shown(surveys.mixed(), 120)
    assert re.search(r"traces/bert-small.json.gz .* 7.4 % of GPU span ", table)
    assert re.search(r"runs/gpt/trace.json.gz .* 98.1 % of steps ", table)


def test_the_recording_is_no_step() -> None:
    loose = surveys.training(steps_from=None, device_step_us=None, step_mean_us=None, steps=None)
    text = said(loose)
    assert text.startswith("no step was found   2.69 s from the first GPU work to the last; 384.2 ms")
    assert "where the recorded time goes (535.3 ms)" in text
    assert "kernels by recoverable time, over the recording" in text
    assert "of span" in text
    assert "per step" not in text
    assert "of the steps on the device" not in text


def test_why_mfu_is_not_known() -> None:
    text = said(surveys.rank_file(0))
    assert "MFU            not known (the dense peak of Tesla V100-SXM2-32GB is not known)" in text
    assert "cannot say MFU because the dense peak of Tesla V100-SXM2-32GB is not known" in text
    assert "collect: advisor doctor --calibrate on that machine, or --peak FLOP/S here" in text


def test_where_a_step_goes() -> None:
    text = said(surveys.training())
    assert re.search(r"^where a step goes \(535.3 ms mean\)$", text, re.MULTILINE)
    assert re.search(r"^  compute +524.2 ms +97.9 %  \u2588+$", text, re.MULTILINE)
    assert re.search(r"^  idle +10.3 ms +1.9 %$", text, re.MULTILINE)
    causes = re.findall(r"^    ([a-z ]+?)  +[\d.]+ [mu]s +\d+\.\d %$", text, re.MULTILINE)
    assert causes == ["data loader", "synchronization", "host launch", "between queued work", "other"]
    assert "exposed communication" not in text
    assert re.search(r"^  exposed communication +5.54 ms +38.3 %", said(surveys.rank_file(0)), re.MULTILINE)


def test_costs_by_what_can_be_recovered() -> None:
    text = said(surveys.training())
    families = text[text.index("families by") : text.index("modules by")].splitlines()
    assert [line.split()[0] for line in families[2:7]] == ["attention", "GELU", "matmul", "norm", "optimizer"]
    assert re.search(
        r"matmul +155.5 ms +29.0 % +98.3 ms +57.2 ms  compute  yes +18.8 % shared memory$", text, re.MULTILINE
    )
    assert re.search(r"attention +218.0 ms +40.7 % +17.0 ms +201.0 ms  memory   unknown  71.4 %$", text, re.MULTILINE)
    assert re.search(r"fmha_cutlassF_bf16_aligned_64x128_rf_sm80 +9.00 ms +1.7 % +- +-  - +yes +-$", text, re.MULTILINE)
    assert "sm_active 99.7 %, tensor_active 20.3 % (from gpm replay)" in text


def test_what_a_table_leaves_out_is_counted_with_its_longest_that_no_floor_places() -> None:
    some = tuple(surveys.cost("kernel", f"k{i}", 10.0 + i, 1.0) for i in range(7))
    text = said(surveys.training(costs=(*some, surveys.cost("kernel", "ncclAllReduce", 9_000.0))))
    assert "  and 3 more in --json; longest without a floor: 9.00 ms ncclAllReduce" in text


def test_a_narrow_terminal_gives_a_name_its_own_line() -> None:
    lines = said(surveys.training(), 80).splitlines()
    at = lines.index("  nvjet_sm90_tst_320x128_64x3_2x1_v_bz_coopB_TNT")
    assert lines[at + 1] == "    86.0 ms  16.1 %  71.2 ms     14.8 ms  compute  yes      18.8 % shared memory"


def test_end_to_end() -> None:
    lines = said(surveys.training()).splitlines()
    at = lines.index("end to end, critical path of 535.3 ms")
    assert lines[at + 1 : at + 5] == [
        "  compute 524.2 ms, calls that launch 8.00 ms, copy 1.20 ms, data loader 1.10 ms, "
        "host between launches 800.0 us",
        "  if attention took its floor, the step would take 334.3 ms instead of 535.3 ms",
        "  if GELU took its floor, the step would take 465.4 ms instead of 535.3 ms",
        "  if copies took its floor, the step would still take 535.3 ms",
    ]


def test_what_is_said_with_care_is_no_refusal() -> None:
    text = said(surveys.training())
    assert "  step times, with care: the steps are not marked; they were found by optimizer steps" in text
    assert "  cannot say time by module because no range of a module is recorded" in text
    assert "  the first ProfilerStep was left out: it is 2.31 times as long as the median" in text


def test_a_percentage_is_never_called_x() -> None:
    for survey in EVERY.values():
        assert re.search(r"%\s*x\b|\dx\s*%|\d+(\.\d+)?x\b(?!\d)", re.sub(r"\S*_\S*", "", shown(survey, 140))) is None


def test_a_file_that_is_refused_says_why_and_nothing_else() -> None:
    assert said(surveys.refused()).splitlines() == [
        "refused",
        "  none of its events is an operator, a launch or a kernel: give a trace that torch.profiler exported",
        "  traces/trace.json: 37 events",
    ]


def test_a_file_that_was_read_in_part_says_what_was_lost() -> None:
    text = said(surveys.partial())
    assert "  partial: the compressed stream ends after 38,355 bytes: 1,532 events were whole" in text
    assert "step           not known (the file ends inside the second step)" in text


@pytest.mark.parametrize(
    ("kernels", "first"), [(0, "no GPU work was recorded"), (None, "no step was found"), (12, "no step was found")]
)
def test_no_kernel_is_not_the_same_as_not_knowing(kernels: int | None, first: str) -> None:
    assert said(dataclasses.replace(surveys.bare(), kernels=kernels)).splitlines()[0] == first


def test_ranks() -> None:
    lines = shown(surveys.dlrm(), 100).splitlines()
    assert lines[0] == "8 ranks, the others wait for rank 7   the slowest computes 21.4 % longer than the mean"
    assert lines[1] == "  8 ok; Tesla V100-SXM2-32GB"
    assert "       1    19.9 ms    1.25 ms       11.1 ms    1.75 ms    9.59 ms" in lines
    assert "       7    12.5 ms    1.06 ms       1.58 ms    1.75 ms       0 us  <- straggler" in lines
    assert "  median    16.1 ms    1.06 ms       5.87 ms    1.75 ms    4.28 ms" in lines
    assert "  one step only: a rank can be late by chance" in lines
    assert "Rank 7" in lines
    assert "Rank 0" not in lines
    assert "param-dlrm8/rank3.pt.trace.json.gz" in shown(surveys.dlrm(), 140)


def test_many_ranks_show_both_ends_and_a_summary() -> None:
    lines = shown(surveys.many(), 80).splitlines()
    table = lines[lines.index(next(line for line in lines if "exposed comm" in line)) : lines.index("Rank 77")]
    assert len(table) < 20
    assert table[1].split()[0] == "77"
    assert "  ... 118 ranks between ..." in table
    assert [line.split()[0] for line in table[12:15]] == ["least", "median", "most"]
    assert "  not among the files: ranks 5-6, 90" in table
    assert len(lines) < 60


def test_a_rank_without_a_number_or_times_has_a_row() -> None:
    text = shown(surveys.barest())
    assert "       -          -          -             -          -          -" in text
    assert "None" not in text


def test_files_of_no_one_job() -> None:
    text = shown(surveys.mixed(), 120)
    assert text.startswith("5 files   3 ok, 1 partial, 1 refused\n")
    assert "NVIDIA H100 80GB HBM3 (1), NVIDIA H200 (1), Tesla V100-SXM2-32GB (1)" in text
    assert "refused: traces/trace.json: none of its events is an operator" in text
    assert "give one file alone to see where its time goes" in text
    two = shown(Survey(files=(surveys.training(), surveys.partial())))
    assert "give one file alone" not in two
    assert two.count("what the data does not support") == 2


def test_hundreds_of_files_do_not_flood() -> None:
    files = tuple(dataclasses.replace(surveys.refused(f"{i}.json")) for i in range(400))
    lines = shown(Survey(files=(*files, *(surveys.rank_file(0) for _ in range(400)))), 80).splitlines()
    assert "  and 380 more in --json" in lines
    assert len(lines) < 120


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 140, 240])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    lines = shown(EVERY[name], width).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert all(line == line.rstrip() for line in lines)
    assert "\n\n\n" not in shown(EVERY[name], width)


@pytest.mark.parametrize("name", EVERY)
def test_nothing_known_is_not_called_none_or_zero(name: str) -> None:
    text = shown(EVERY[name], 140)
    assert "None" not in text
    assert re.search(r"\b(nan|inf)\b", text) is None


def test_no_colour_and_no_markup_without_a_terminal() -> None:
    assert "\x1b" not in shown(EVERY["training"])
    assert "\x1b[" in shown(EVERY["training"], color=True)


@pytest.mark.parametrize("name", EVERY)
def test_colour_changes_no_letter(name: str) -> None:
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown(EVERY[name], 80, color=True)) == shown(EVERY[name], 80)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("width", [80, 140, 300])
def test_hostile_text_is_shown_and_not_obeyed(name: str, width: int, poison: Callable[[Survey, str], Survey]) -> None:
    text = shown(poison(EVERY[name], HOSTILE), width)
    assert not CONTROLS.search(text)
    assert len(text.splitlines()) < 200
    if name != "empty":
        assert "[red]bold[/red]" in text
    colored = re.sub(r"\x1b\[[0-9;]*m", "", shown(poison(EVERY[name], HOSTILE), width, color=True))
    assert "\x1b" not in colored
    assert "\x07" not in colored


def test_a_kind_and_a_status_of_no_one_are_shown() -> None:
    strange = surveys.training(status=HOSTILE, costs=(surveys.cost(HOSTILE, "a", 3.0, 1.0),), steps_from=HOSTILE)
    text = shown(Survey(files=(strange, strange)), 200)
    assert not CONTROLS.search(text)
    assert ":smile:" in text


@pytest.mark.parametrize("width", [80, 140])
def test_very_long_names_do_not_flood(width: int, poison: Callable[[Survey, str], Survey]) -> None:
    for name in ("training", "many", "mixed"):
        text = shown(poison(EVERY[name], "n" * 100_000), width)
        assert len(text) < 30_000
        assert len(text.splitlines()) < 160


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1.7e308])
@pytest.mark.parametrize("name", EVERY)
def test_figures_that_no_machine_has(name: str, figure: float) -> None:
    text = shown(with_figures(EVERY[name], figure), 140)
    assert re.search(r"\b(nan|inf)\b|[\d,]{30}", text) is None


def test_counters_are_counted_where_they_are_many() -> None:
    many = tuple(Metric(name=f"c{i}", value=1.0, unit="%", source="ncu") for i in range(30))
    assert "c7 1.00 %, 22 more (from ncu)" in said(surveys.training(counters=many))


def test_a_terminal_without_unicode() -> None:
    text = shown(surveys.one(surveys.training(path="tr\u00e4ce\u4e2d.json")), 80, encoding="ascii")
    assert r"tr\xe4ce\u4e2d.json" in text
    assert re.search(r"^  compute +524.2 ms +97.9 %  #+$", text, re.MULTILINE)


def test_what_the_redactor_took_stays_out(poison: Callable[[Survey, str], Survey]) -> None:
    text = "/home/jane/run on box17 with hf_abcdefghijklmnopqrstuvwxyzABCDEFGH"
    redactor = Redactor(home="/home/jane", user="jane", host="box17")
    for survey in EVERY.values():
        shown_text = shown(redactor.value(poison(survey, text)), 300)
        assert not re.search(r"jane|box17|hf_a", shown_text)
