"""Nsight Compute's output against values read off the files by hand and by a plain csv reader; what is refused."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.errors import ArtifactError
from advisor.ingest import lines as limits
from advisor.ingest.ncu import NcuKernel, read_ncu
from advisor.ingest.ncu_join import Basis, Match, TraceKernels, comparable_name, join, metrics_by_row
from advisor.ingest.ncu_metrics import QUANTITIES, Reading, measure, number
from advisor.model import Metric

DATA = Path(__file__).parents[1] / "data" / "ncu"
RAW = DATA / "ncu_attention_raw.csv"
DETAILS = DATA / "superbench-b200-cublaslt-details.csv.log"
TEXT = DATA / "gpumode-a100-square-details.txt"

# name of the launch -> SM active, achieved occupancy, tensor pipe active, DRAM throughput, all in percent
ATTENTION = {
    "masked_fill_kernel": (99.8, 93, 2.3, 30),
    "softmax_warp_forward": (99.5, 32, 1.5, 42),
    "flash_fprop": (91.9, 14, 64, 9),
}


def values(kernel: NcuKernel) -> dict[str, float]:
    return {metric.name: metric.value for metric in kernel.metrics}


# ------------------------------------------------------------------------------------------------------------ raw page


def test_raw_page_of_attention() -> None:
    kernels = read_ncu(RAW)
    assert [kernel.order for kernel in kernels] == list(range(20))
    for part, expected in ATTENTION.items():
        chosen = [kernel for kernel in kernels if part in kernel.name]
        assert len(chosen) == 2
        found = values(chosen[-1])
        names = ("sm_active", "achieved_occupancy", "tensor_active", "dram_throughput")
        for name, value in zip(names, expected, strict=True):
            assert found[name] == pytest.approx(value, abs=0.5 if value > 10 else 0.13), (part, name)


def test_raw_page_names_the_launch() -> None:
    kernel = read_ncu(RAW)[4]
    assert kernel.name == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert (kernel.grid, kernel.block) == ((2, 66, 1), (384, 1, 1))
    assert (kernel.stream, kernel.device, kernel.compute_capability, kernel.process) == (7, 0, "9.0", 1046)
    found = values(kernel)
    # 12 of 64 warps, one block of 384 threads on an SM: METRICS.md. Kineto says 0.
    assert (found["achieved_occupancy"], found["theoretical_occupancy"]) == (14.84, 18.75)
    assert found["duration_us"] == pytest.approx(311.392)
    assert found["dynamic_shared_bytes"] == 213_188
    assert (found["registers"], found["waves_per_sm"], found["block_limit_shared"]) == (168, 1, 1)


def test_raw_page_is_kept_whole() -> None:
    """Every cell of the file, against the bare split of its lines."""
    table = [line for line in RAW.read_text().splitlines() if not line.startswith("==")]
    header, units, *rows = ([cell.strip('"') for cell in line.split('","')] for line in table)
    kernels = read_ncu(RAW)
    for row, kernel in zip(rows, kernels, strict=True):
        expected = {
            name: Reading(cell, unit)
            for name, unit, cell in zip(header[11:], units[11:], row[11:], strict=True)
            if cell
        }
        assert kernel.raw == expected and len(kernel.raw) == len(expected)
    assert kernels[0].raw["gpu__time_duration.sum"] == Reading("1,205,632", "ns")
    assert "launch__kernel_name" not in kernels[0].raw  # an empty cell
    assert not {"Host Name", "Process Name"} & kernels[0].raw.keys()


def test_every_metric_has_its_unit_and_source() -> None:
    units = {quantity.name: quantity.unit for quantity in QUANTITIES}
    assert len(units) == len(QUANTITIES)
    for path in (RAW, DETAILS, TEXT):
        for kernel in read_ncu(path):
            assert not kernel.missing
            assert all(metric.source == "ncu" and metric.unit == units[metric.name] for metric in kernel.metrics)
            assert len(values(kernel)) == len(kernel.metrics)
            assert kernel.value("duration_us") and kernel.value("unheard_of") is None


# -------------------------------------------------------------------------------------------------------- details page


def test_details_page_as_csv() -> None:
    (kernel,) = read_ncu(DETAILS)
    assert "tensorop" in kernel.name
    assert (kernel.grid, kernel.block, kernel.compute_capability) == ((9, 32, 1), (384, 1, 1), "10.0")
    found = values(kernel)
    assert {
        "duration_us": 406.24,
        "sm_throughput": 23.59,
        "memory_throughput": 21.68,
        "dram_throughput": 0.74,
        "theoretical_occupancy": 18.75,
        "achieved_occupancy": 15.53,
        "registers": 168,
        "waves_per_sm": 1.89,
        "elapsed_cycles": 508_757,
    }.items() <= found.items()
    assert "sm_active" not in found and "tensor_active" not in found  # this page has neither
    rules = ("SOLBottleneck", *["LaunchConfiguration"] * 2, "TheoreticalOccupancy", *["WorkloadImbalance"] * 4)
    assert kernel.rules == rules
    assert len(kernel.raw) + len(kernel.rules) == 58
    assert kernel.raw["Launch Statistics: Cluster Scheduling Policy"] == Reading("PolicySpread", "")


def test_details_page_as_text() -> None:
    kernels = read_ncu(TEXT)
    assert len(kernels) == 17
    rows = (
        ("duration_us", "14.46 10.85 8.80 11.71 8.86 8.77 8.93 11.78 8.83 8.70 7.78 7.84 7.58 11.62 7.90 7.26 13.02"),
        (
            "sm_throughput",
            "56.42 10.24 5.87 8.37 5.84 5.72 6.17 4.88 5.85 5.88 12.38 12.52 20.64 10.27 20.39 18.85 20.67",
        ),
        (
            "achieved_occupancy",
            "58.78 60.71 64.12 71.12 65.17 63.38 64.42 70.27 64.63 63.80 65.15 66.58 56.17 71.40 55.70 54.71 39.18",
        ),
    )
    for name, figures in rows:
        assert [kernel.value(name) for kernel in kernels] == pytest.approx([float(text) for text in figures.split()])
    assert (kernels[1].name, kernels[1].grid, kernels[1].block) == ("square_kernel_0d1d234", (1823, 1, 1), (128, 1, 1))
    last = kernels[16]
    assert last.name.endswith(
        "and_kernel_cuda(at::TensorIterator &)::[lambda() (instance 1)]::operator ()() const::"
        "[lambda() (instance 12)]::operator ()() const::[lambda(bool, bool) (instance 1)]>, "
        "unsigned int, bool, (int)4>>(T3)"
    )
    assert (last.grid, last.block, last.stream, last.device, last.compute_capability) == (
        (1, 174, 1),
        (512, 1, 1),
        7,
        0,
        "8.0",
    )
    found = values(last)
    assert found["sm_frequency"] == pytest.approx(977.72e6)  # cycle/usecond where the others are in cycle/nsecond
    assert found["shared_config_bytes"] == 16_380  # 16.38 Kbyte, as printed
    assert last.raw["Launch Statistics: Function Cache Configuration"] == Reading("CachePreferNone", "")


def test_details_page_with_metric_names(tmp_path: Path) -> None:
    """`ncu --csv --metrics ...` prints the names themselves; the grid may not be among the columns."""
    path = tmp_path / "metrics.csv"
    path.write_text(
        "==PROF== Connected to process 1\n"
        '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","f(int, float)","Command line profiler metrics","gpu__time_duration.sum","msecond","1.50"\n'
        '"0","f(int, float)","Command line profiler metrics","dram__bytes_read.sum","Mbyte","2.50"\n'
        '"0","f(int, float)","Memory Workload Analysis","Memory Throughput","Gbyte/second","1,200.00"\n'
        '"1","g","GPU Speed Of Light","Memory Throughput","%","12.00"\n'
        '"1","g","Command line profiler metrics","sm__throughput.avg.pct_of_peak_sustained_elapsed","%","n/a"\n'
        "==PROF== Disconnected from process 1\n"
    )
    first, second = read_ncu(path)
    assert (first.name, first.grid, first.block) == ("f(int, float)", None, None)
    assert values(first) == {"duration_us": 1500.0, "dram_read_bytes": 2.5e6, "dram_bandwidth": 1.2e12}
    assert values(second) == {"memory_throughput": 12.0}
    assert "no value" in second.missing["sm_throughput"]


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,205,632", 1_205_632),
        ("16,880.48", 16_880.48),
        ("0.00", 0),
        ("-3", -3),
        ("1.5e+03", 1500),
        ("n/a", None),
        ("(!) nan", None),
        ("", None),
        ("no data", None),
    ],
)
def test_numbers(text: str, expected: float | None) -> None:
    assert number(Reading(text, "%")) == expected


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("99,78", "%"),
        ("1.205.632", "ns"),
        ("1.205,63", "us"),
        ("269.472", "ns"),
        ("1 205 632", "ns"),
        ("1\u202f205", "ns"),
        ("12,34,567", "byte"),
        ("PolicySpread", ""),
        ("1_000", "ns"),
        ("0x10", "byte"),
        ("9" * 400, "ns"),
        ("1e999", "ns"),
    ],
)
def test_what_is_no_number_here(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=r"is not a number of the English format|out of range"):
        number(Reading(text, unit))


@pytest.mark.parametrize(
    ("metric", "unit", "text", "expected"),
    [
        ("gpu__time_duration.sum", "nsecond", "1,500", 1.5),
        ("gpu__time_duration.sum", "ns", "1,500", 1.5),
        ("gpu__time_duration.sum", "usecond", "1.50", 1.5),
        ("gpu__time_duration.sum", "us", "1.50", 1.5),
        ("gpu__time_duration.sum", "ms", "1.50", 1500),
        ("gpu__time_duration.sum", "second", "1.50", 1.5e6),
        ("dram__bytes_read.sum", "byte", "7", 7),
        ("dram__bytes_read.sum", "Kbyte", "7.25", 7250),
        ("dram__bytes_read.sum", "Gbyte", "7.25", 7.25e9),
        ("launch__shared_mem_per_block_static", "Kbyte/block", "1.02", 1020),
        ("dram__bytes.sum.per_second", "Tbyte/s", "3.3", 3.3e12),
        ("gpc__cycles_elapsed.avg.per_second", "cycle/nsecond", "1.21", 1.21e9),
        ("gpc__cycles_elapsed.avg.per_second", "Ghz", "1.21", 1.21e9),
        ("gpc__cycles_elapsed.max", "cycle", "508,757", 508_757),
        ("sm__inst_executed_pipe_tensor.sum", "Kinst", "1.50", 1500),
        ("launch__registers_per_thread", "", "168", 168),
    ],
)
def test_units(metric: str, unit: str, text: str, expected: float) -> None:
    (found,), missing = measure({metric: Reading(text, unit)})
    assert found.value == pytest.approx(expected, rel=1e-12) and not missing


def test_an_unknown_unit_is_a_reason_and_no_number() -> None:
    found, missing = measure({"gpu__time_duration.sum": Reading("3", "fortnight")})
    assert not found and "fortnight" in missing["duration_us"]


def test_the_tensor_pipe_over_active_and_over_elapsed_cycles_are_two_figures() -> None:
    name = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained"
    found, _ = measure({f"{name}_elapsed": Reading("30.00", "%"), f"{name}_active": Reading("60.00", "%")})
    assert {metric.name: metric.value for metric in found} == {"tensor_active": 60.0, "tensor_active_elapsed": 30.0}
    only, _ = measure({f"{name}_elapsed": Reading("30.00", "%")})
    assert [metric.name for metric in only] == ["tensor_active_elapsed"]


# -------------------------------------------------------------------------------------------------------- odd but right

SMALL = (
    '"ID","Kernel Name","Stream","Block Size","Grid Size","Device","CC","gpu__time_duration.sum"\n'
    '"","","","","","","","ns"\n'
)


def small(*names: str) -> str:
    return SMALL + "".join(
        f'"{order}","{name}","7","(128, 1, 1)","(4, 1, 1)","0","9.0","1,000"\n' for order, name in enumerate(names)
    )


def test_program_output_around_and_between_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "mixed.csv"
    first, second, row = small("f<int, 2>(T1)").partition('"0"')
    path.write_text(f'loss 1.25, 3\n==PROF== x\n{first}step 3\n==WARNING== y\n{second}{row}tail, of, output\n"')
    with pytest.raises(ArtifactError, match="damaged or truncated"):
        read_ncu(path)
    path.write_text(path.read_text()[:-1])
    (kernel,) = read_ncu(path)
    assert (kernel.name, kernel.value("duration_us")) == ("f<int, 2>(T1)", 1.0)


def test_tables_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(small("f") + small("g", "h"))
    assert [kernel.name for kernel in read_ncu(path)] == ["f", "g", "h"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_windows_forms(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "windows.csv"
    path.write_bytes(small("f").replace("\n", "\r\n").encode(encoding))
    assert [kernel.name for kernel in read_ncu(path)] == ["f"]


def test_a_table_that_went_through_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "unquoted.csv"
    path.write_text(
        "ID,Kernel Name,Block Size,Grid Size,gpu__time_duration.sum\n,,,,ns\n"
        '0,"f<1, 2>","(1, 2, 3)","(4, 5, 6)","1,000"\n'
    )
    (kernel,) = read_ncu(path)
    assert (kernel.name, kernel.block, kernel.grid) == ("f<1, 2>", (1, 2, 3), (4, 5, 6))


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    name = "at::" * 25_000 + "f"
    path.write_text(small(name))
    (kernel,) = read_ncu(path)
    assert kernel.name == name
    trace = TraceKernels(["f"], [(4, 1, 1)], [(128, 1, 1)])
    assert join([kernel], trace)[0].row == 0
    path.write_text(small("x" * 10**6))
    with pytest.raises(ArtifactError, match="field larger than field limit"):
        read_ncu(path)
    path.write_text(f"  {name} (4, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0\n")
    assert read_ncu(path)[0].name == name


# ------------------------------------------------------------------------------------------------------------- refused

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no table of Nsight Compute"),
    "binary": (b"NVR\0" + bytes(range(256)), "is no text"),
    "latin": (b'"ID","Kernel Name"\n\xff\xfe\xe9', "is no text"),
    "header only": (SMALL.splitlines(keepends=True)[0].encode(), "without a kernel"),
    "units only": (SMALL.encode(), "without a kernel"),
    "no units": (small("f").replace('"","","","","","","","ns"\n', "").encode(), "row of units"),
    "wrong header": (b'"ID","Name","gpu__time_duration.sum"\n"0","f","1"\n', "holds no table"),
    "another csv": (b"a,b,c\n1,2,3\n", "holds no table of Nsight Compute"),
    "truncated row": (small("f", "g")[:-20].encode(), "damaged or truncated"),
    "row of too few fields": ((small("f") + '"1","g","7"\n').encode(), "3 of 8 fields"),
    "european": (small("f").replace("1,000", "1,00").encode(), "LC_ALL=C"),
    "huge number": (small("f").replace("1,000", "9" * 5000).encode(), "5000 digits"),
    "huge grid": (small("f").replace("(4, 1, 1)", f"({'9' * 5000}, 1, 1)").encode(), "Grid Size is"),
    "negative stream": (small("f").replace('"7"', '"-7"').encode(), "Stream is '-7'"),
    "open quote": ((small("f") + '"1","g').encode(), "damaged or truncated"),
    "details without values": (b'"ID","Kernel Name","Metric Name"\n"0","f","x"\n', "Metric Value is missing"),
    "a launch with an open table": (
        b"  f (4, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0\n    Section: Occupancy\n    --- --- ---\n",
        "truncated",
    ),
    "permissions": (
        b"==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n==WARNING== No kernels were profiled.\n",
        "ncu said: ==ERROR== ERR_NVGPUCTRPERM",
    ),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "given.csv"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        read_ncu(path)
    assert "given.csv" in str(caught.value) and "ncu --import REPORT --csv --page raw" in str(caught.value)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_counters_of_an_amd_device_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"AMD device \(rocprof-compute\)"):
        read_ncu(DATA / "rocprofcompute-mi300x-pmc_perf-cut.csv")


def test_reports_folders_and_absent_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is a binary report"):
        read_ncu(tmp_path / "x.ncu-rep")
    with pytest.raises(ArtifactError, match="does not exist"):
        read_ncu(tmp_path / "x.csv")
    with pytest.raises(ArtifactError, match="is not a file"):
        read_ncu(tmp_path)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.csv"
    with path.open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    with pytest.raises(ArtifactError, match="larger than 64 MiB"):
        read_ncu(path)
    monkeypatch.setattr(limits, "MAX_LINE", 2**20)
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(ArtifactError, match="line longer than 1 MiB"):
        read_ncu(path)


def cuts(text: str) -> Iterator[int]:
    chosen = random.Random(7)
    yield from (chosen.randrange(len(text)) for _ in range(40))


@pytest.mark.parametrize("source", [RAW, DETAILS, TEXT], ids=lambda path: path.name)
def test_a_file_cut_anywhere_is_whole_launches_or_an_error(tmp_path: Path, source: Path) -> None:
    text = source.read_text()
    whole = read_ncu(source)
    path = tmp_path / "cut"
    for length in cuts(text):
        path.write_text(text[:length])
        try:
            found = read_ncu(path)
        except ArtifactError:
            continue
        assert [kernel.name for kernel in found] == [kernel.name for kernel in whole[: len(found)]]
        for kernel, original in zip(found, whole, strict=False):
            assert kernel.raw.items() <= original.raw.items()


@pytest.mark.parametrize("source", [RAW, DETAILS, TEXT], ids=lambda path: path.name)
def test_a_damaged_file_is_read_or_an_error(tmp_path: Path, source: Path) -> None:
    chosen = random.Random(11)
    path = tmp_path / "damaged"
    original = source.read_bytes()
    for _ in range(25):
        data = bytearray(original)
        for _ in range(chosen.randrange(1, 40)):
            place = chosen.randrange(len(data))
            data[place : place + chosen.randrange(3)] = chosen.choice(
                [b"", b'"', b",", b"\n", b"-", b"\xff", b"9" * 50]
            )
        path.write_bytes(bytes(data))
        with contextlib.suppress(ArtifactError):
            assert read_ncu(path)


# --------------------------------------------------------------------------------------------------------------- names

# Names of one kernel as the profiler of PyTorch and as Nsight Compute print it, from traces and profiles of an H200.
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int, "
    "at::native::FillFunctor<float>, std::array<char*, 1ul>)",
    "void at::vectorized_elementwise_kernel<4, at::FillFunctor<float>, std::array<char *, 1>>(int, T2, T3)",
)
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>(float*, float const*, "
    "int, int, int, bool const*, int, bool)",
    "void <unnamed>::softmax_warp_forward<float, float, float, 11, 0, 0>(T2 *, const T1 *, int, int, int, "
    "const bool *, int, bool)",
)
FUNCTOR = (
    "at::native::(anonymous namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}"
    "::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16, bool)#1}"
)
CALL = f"at::native::gpu_kernel_impl_nocast<{FUNCTOR}>(at::TensorIteratorBase&, {FUNCTOR} const&)::{{lambda(int)#1}}"
MASKED_FILL = (
    f"void at::native::elementwise_kernel<128, 4, {CALL}>(int, {CALL})",
    "void at::elementwise_kernel<128, 4, void at::gpu_kernel_impl_nocast<at::<unnamed>::masked_fill_kernel("
    "at::TensorIterator &, const c10::Scalar &)::[lambda() (instance 1)]::operator ()() const::[lambda() (instance 12)]"
    "::operator ()() const::[lambda(c10::BFloat16, bool) (instance 1)]>(at::TensorIteratorBase &, const T1 &)::"
    "[lambda(int) (instance 1)]>(int, T3)",
)
COPY = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda(float)#1}, std::array<char*, 2ul> >(int, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda(float)#1}, std::array<char*, 2ul>)",
    "void at::vectorized_elementwise_kernel<8, at::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) "
    "(instance 1)], std::array<char *, 2>>(int, T2, T3)",
)
OLDER = (  # a cast before each literal, as in 2022
    "void at::native::vectorized_elementwise_kernel<4, at::native::AbsFunctor<float>, at::detail::Array<char*, 2> >("
    "int, at::native::AbsFunctor<float>, at::detail::Array<char*, 2>)",
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::AbsFunctor<float>, at::detail::Array<char *, "
    "(int)2>>(int, T2, T3)",
)
PAIRS = (FILL, SOFTMAX, MASKED_FILL, COPY, OLDER)


@pytest.mark.parametrize(("traced", "profiled"), PAIRS)
def test_two_spellings_of_one_name(traced: str, profiled: str) -> None:
    assert comparable_name(traced) == comparable_name(profiled)


def test_different_kernels_keep_different_names() -> None:
    spelled = {comparable_name(name) for pair in PAIRS for name in pair}
    assert len(spelled) == len(PAIRS)
    assert comparable_name(FILL[0]) == "vectorized_elementwise_kernel<4,FillFunctor<float>,array<char*,1>>"
    log = COPY[0].replace("bfloat16_copy_kernel_cuda", "log_kernel_cuda")
    assert comparable_name(log) != comparable_name(COPY[0])
    assert comparable_name(COPY[0].replace("float)#1", "float)#2")) != comparable_name(COPY[0])


@given(st.text("ab:<>(){}[]#&* 0123456789ul,", max_size=60))
def test_any_name_has_a_comparable_form(name: str) -> None:
    assert " " not in comparable_name(name)


# ---------------------------------------------------------------------------------------------------------------- join

SHAPE = ((8, 1, 1), (128, 1, 1))


def profiled(*names: str, value: float = 0.0) -> list[NcuKernel]:
    return [
        NcuKernel(
            order=order,
            name=name,
            grid=SHAPE[0],
            block=SHAPE[1],
            metrics=(Metric(name="sm_active", value=value + order, unit="%", source="ncu"),),
        )
        for order, name in enumerate(names)
    ]


def traced(*names: str) -> TraceKernels:
    return TraceKernels(names, [SHAPE[0]] * len(names), [SHAPE[1]] * len(names))


def test_join_of_the_real_profile_with_the_names_of_a_trace() -> None:
    """The profile's own launches under the names a trace gives them: each finds its place."""
    kernels = read_ncu(RAW)
    spelling = {comparable_name(ours): theirs for theirs, ours in PAIRS}
    names = [spelling.get(comparable_name(kernel.name), kernel.name) for kernel in kernels]
    assert sum(name != kernel.name for name, kernel in zip(names, kernels, strict=True)) == 7
    trace = TraceKernels(names, [kernel.grid for kernel in kernels], [kernel.block for kernel in kernels])
    matches = join(kernels, trace)
    assert [match.row for match in matches] == list(range(20))
    assert {match.basis for match in matches} == {Basis.ONLY, Basis.ORDER}
    assert metrics_by_row(kernels, matches) == {row: kernel.metrics for row, kernel in enumerate(kernels)}


def test_equal_launches_match_in_order_and_say_so() -> None:
    matches = join(profiled("f", "g", "f"), traced("f", "memcpy", "f", "g"))
    assert [(match.row, match.basis) for match in matches] == [(0, Basis.ORDER), (3, Basis.ONLY), (2, Basis.ORDER)]
    assert matches[2].reason == "number 2 of 2 equal launches in both"


@pytest.mark.parametrize(("ncu", "trace"), [(2, 5), (5, 2), (1, 3)])
def test_a_part_of_equal_launches_matches_as_a_group(ncu: int, trace: int) -> None:
    kernels = profiled(*["f"] * ncu, value=10.0)
    matches = join(kernels, traced("g", *["f"] * trace))
    rows = tuple(range(1, trace + 1))
    assert {(match.row, match.rows, match.basis) for match in matches} == {(None, rows, Basis.GROUP)}
    assert f"{ncu} equal launches in the profile, {trace} in the trace" in matches[0].reason
    mean = 10.0 + (ncu - 1) / 2
    assert metrics_by_row(kernels, matches) == {
        row: (Metric(name="sm_active", value=mean, unit="%", source="ncu"),) for row in rows
    }


def test_name_grid_and_block_all_count() -> None:
    kernels = profiled("f", "g")
    trace = TraceKernels(["f", "f", "f"], [(9, 1, 1), (8, 1, 1), None], [(128, 1, 1), (64, 1, 1), None])
    found, absent = join(kernels, trace)
    assert (found.row, found.basis) == (None, Basis.NONE) and "another grid or block" in found.reason
    assert "no kernel of this name" in absent.reason
    assert metrics_by_row(kernels, (found, absent)) == {}


def test_a_profile_without_shapes_matches_nothing() -> None:
    (match,) = join([NcuKernel(order=0, name="f", grid=None, block=None)], traced("f"))
    assert match == Match(row=None, rows=(), basis=Basis.NONE, reason="the profile does not give its grid and block")


@pytest.mark.parametrize("name", ["softmax_warp_forward", "void <unnamed>::softmax_warp_forward"])
def test_a_name_without_template_arguments_matches_what_it_can_only_be(name: str) -> None:
    (match,) = join(profiled(name), traced(FILL[0], SOFTMAX[0]))
    assert (match.row, match.basis) == (1, Basis.ONLY)
    other = SOFTMAX[0].replace("11", "10")
    (match,) = join(profiled(name), traced(SOFTMAX[0], other))
    assert match.basis is Basis.NONE and "the trace has several kernels" in match.reason


def test_a_name_the_trace_cut_off_matches_what_it_can_only_be() -> None:
    cut = SOFTMAX[0][:70]
    assert join(profiled(SOFTMAX[1]), traced(cut))[0].row == 0
    matches = join(profiled(SOFTMAX[1], SOFTMAX[1].replace("11", "10")), traced(cut))
    assert {match.basis for match in matches} == {Basis.NONE}
    assert "the profile has several kernels" in matches[0].reason


def test_names_that_differ_only_in_what_is_left_out_do_not_match() -> None:
    """Two kernels of the trace that differ in a namespace only: nobody knows which the profile means."""
    matches = join(profiled("a::f<int>"), traced("a::f<int>(int)", "b::f<int>(int)"))
    assert matches[0].basis is Basis.NONE and "the trace has several kernels" in matches[0].reason


def test_join_does_not_depend_on_the_order_of_the_kinds() -> None:
    names = ["f", "g", "f", "h"]
    matches = join(profiled(*names), traced(*names))
    assert [(match.row, match.basis) for match in matches] == [
        (0, Basis.ORDER),
        (1, Basis.ONLY),
        (2, Basis.ORDER),
        (3, Basis.ONLY),
    ]
    for order in permutations(range(4)):
        kernels = profiled(*(names[place] for place in order))
        rows = sorted(match.row for match in join(kernels, traced(*names)) if match.row is not None)
        assert rows == [0, 1, 2, 3]


@given(st.lists(st.sampled_from("fgh"), max_size=12), st.lists(st.sampled_from("fgh"), max_size=12))
def test_matches_are_injective_and_of_equal_names(ours: list[str], theirs: list[str]) -> None:
    matches = join(profiled(*ours), traced(*theirs))
    rows = [match.row for match in matches if match.row is not None]
    assert len(set(rows)) == len(rows)
    for name, match in zip(ours, matches, strict=True):
        assert match.reason and all(theirs[row] == name for row in match.rows)
        assert (match.row is None) == (match.basis in (Basis.GROUP, Basis.NONE))
        assert bool(match.rows) == (match.basis is not Basis.NONE)
