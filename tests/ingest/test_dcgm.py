"""Counters that DCGM and nvidia-smi reported, against the values in the files; what does not count; what is refused."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.capture.counters import UNITS
from advisor.errors import ArtifactError
from advisor.ingest import lines as limits
from advisor.ingest.dcgm import read_counters
from advisor.ingest.gpu_counters import BLANK, POWER, GpuCounters, convert, percent, ratio

DATA = Path(__file__).parents[1] / "data" / "dcgm"
T4 = DATA / "k8sconf-t4-busy.prom.txt"
L4 = DATA / "k8sconf-l4.prom.txt"
L40S = DATA / "k8sconf-l40s-upcloud.prom.txt"


def values(gpu: GpuCounters) -> dict[str, float]:
    return {metric.name: metric.value for metric in gpu.metrics}


def read(tmp_path: Path, text: str) -> tuple[GpuCounters, ...]:
    path = tmp_path / "counters.txt"
    path.write_text(text)
    return read_counters(path)


# --------------------------------------------------------------------------------------------- scrapes of dcgm-exporter


def test_a_busy_t4() -> None:
    (gpu,) = read_counters(T4)
    assert (gpu.entity, gpu.gpu, gpu.model, gpu.series, gpu.samples) == ("GPU 0", 0, "Tesla T4", 20, 1)
    # Utilisation of 91 % with 0.6 % of the tensor pipe: utilisation is not efficiency.
    assert values(gpu) == {
        "gpu_utilisation": 91.0,
        "graphics_active": 15.6205,
        "tensor_active": 0.5822,
        "dram_active": 9.2781,
        "memory_utilisation": 73.0,
        "power": 68.244,
        "memory_used": 5120 * 2**20,
    }
    assert not gpu.missing  # SM activity is not among the series: it is absent, not zero
    assert {metric.source for metric in gpu.metrics} == {"dcgm"}


def test_two_scrapes_in_one_file_are_one_gpu() -> None:
    text = L4.read_text().splitlines()
    assert (sum(not line.startswith("#") for line in text), sum(line.startswith("#") for line in text)) == (46, 92)
    (gpu,) = read_counters(L4)
    assert (gpu.series, gpu.samples) == (23, 1)
    found = values(gpu)
    assert found.pop("power") == 16.365
    assert set(found.values()) == {0.0}


def test_an_idle_l40s() -> None:
    text = L40S.read_text().splitlines()
    assert sum(line.startswith("#") for line in text) == 46
    (gpu,) = read_counters(L40S)
    assert (gpu.series, gpu.model) == (23, "NVIDIA L40S")
    assert values(gpu)["dram_active"] == 0.0131 and values(gpu)["power"] == 35.686


@pytest.mark.parametrize(
    ("series", "name"),
    [
        ("DCGM_FI_PROF_SM_ACTIVE", "sm_active"),
        ("DCGM_FI_PROF_SM_UTIL_RATIO", "sm_active"),
        ("DCGM_FI_PROF_SM_OCCUPANCY", "sm_occupancy"),
        ("DCGM_FI_PROF_SM_OCCUPANCY_RATIO", "sm_occupancy"),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "tensor_active"),
        ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "tensor_active"),
        ("DCGM_FI_PROF_DRAM_ACTIVE", "dram_active"),
        ("DCGM_FI_PROF_DRAM_UTIL_RATIO", "dram_active"),
        ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "fp32_active"),
        ("DCGM_FI_PROF_FP32_UTIL_RATIO", "fp32_active"),
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "graphics_active"),
        ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", "graphics_active"),
    ],
)
def test_older_and_newer_names_of_a_field(tmp_path: Path, series: str, name: str) -> None:
    (gpu,) = read(tmp_path, f'{series}{{gpu="3",UUID="GPU-3"}} 0.25\n')
    assert values(gpu) == {name: 25.0} and (gpu.gpu, gpu.uuid) == (3, "GPU-3")


def test_names_and_units_are_those_of_the_sampler(tmp_path: Path) -> None:
    fields = ("PROF_SM_ACTIVE", "PROF_SM_OCCUPANCY", "PROF_PIPE_TENSOR_ACTIVE", "PROF_DRAM_ACTIVE")
    fields += ("PROF_PIPE_FP32_ACTIVE", "DEV_GPU_UTIL", "DEV_POWER_USAGE")
    (gpu,) = read(tmp_path, "".join(f'DCGM_FI_{field}{{gpu="0"}} 0.5\n' for field in fields))
    assert {metric.name: metric.unit for metric in gpu.metrics} == UNITS


@pytest.mark.parametrize(
    ("text", "expected"), [("0.910000", 91.0), ("1.000000", 100.0), ("91", 91.0), ("0", 0.0), ("1", None)]
)
def test_the_utilisation_that_changed_its_meaning(tmp_path: Path, text: str, expected: float | None) -> None:
    """Whole percent up to DCGM 4.6, a ratio from 4.7 on; a bare 1 can be either and is neither."""
    (gpu,) = read(tmp_path, f'DCGM_FI_DEV_GPU_UTIL_RATIO{{gpu="0"}} {text}\n')
    assert values(gpu).get("gpu_utilisation") == expected
    assert ("gpu_utilisation" in gpu.missing) == (expected is None)


def test_labels_timestamps_and_several_gpus(tmp_path: Path) -> None:
    gpus = read(
        tmp_path,
        "# HELP go_goroutines Number of goroutines.\ngo_goroutines 11\n"
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",modelName="A \\"quoted\\", \\\\ name",pod="x{}"} 300 1700002\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",pod="y"} 200 1700001\n'
        'DCGM_FI_DEV_POWER_USAGE{ gpu="0" , UUID="GPU-a", } 1.5e2 # {trace_id="1"} 0.5\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b",GPU_I_PROFILE="1g.5gb",GPU_I_ID="7"} 90\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-c",Hostname="other"} 80\n'
        'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0"} 40\nDCGM_FI_DEV_COUNT 2\n',
    )
    assert [(gpu.entity, gpu.uuid, values(gpu)["power"]) for gpu in gpus] == [
        ("GPU 0", "GPU-a", 150.0),
        ("GPU 0", "GPU-c", 80.0),
        ("GPU 1", "GPU-b", 300.0),  # the newer timestamp, though further up
        ("GPU 1 instance 7", "GPU-b", 90.0),
    ]
    assert gpus[2].model == 'A "quoted", \\ name'


@pytest.mark.parametrize("text", ["NaN", "+Inf", "-Inf", "-1", "1.000001", "140737488355328.000000", "x"])
def test_what_is_no_ratio_is_absent_with_a_reason(tmp_path: Path, text: str) -> None:
    series = "DCGM_FI_PROF_SM_ACTIVE"
    (gpu,) = read(tmp_path, f'{series}{{gpu="0"}} 0.5\n{series}{{gpu="0"}} {text}\n')
    assert gpu.metrics == () and text in gpu.missing["sm_active"]


def test_the_reason_says_what_is_wrong() -> None:
    for counter, text, reason in (
        (ratio("sm_active"), "1.02", "1.02 is outside 0..1"),
        (percent("gpu_utilisation"), "101", "101 is outside 0..100"),
        (POWER, str(BLANK + 2), "DCGM's mark for a value it does not have"),
        (POWER, "-3", "-3 is outside 0 and above"),
        (POWER, "1_0", "'1_0' is not a number"),
        (POWER, "9" * 500, "is no measurement"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            convert(counter, text)


# ----------------------------------------------------------------------------------------------------------- dcgmi dmon

# The forms of DCGM 3 and 4 (left aligned, "#Entity") and of DCGM 2 (right aligned, "# Entity").
MONITOR = """\
#Entity   SMACT        SMOCC        TENSO        DRAMA        POWER        GPUTL
ID                                                            W
GPU 1     N/A          N/A          N/A          N/A          71.230       0
GPU 0     N/A          N/A          N/A          N/A          70.120       0
GPU 1     0.900        0.500        0.120        0.300        300.000      100
GPU 0     0.100        0.050        0.000        0.010        100.000      10
Switch 0  N/A          N/A          N/A          N/A          N/A          N/A

#Entity   SMACT        SMOCC        TENSO        DRAMA        POWER        GPUTL
ID                                                            W
GPU 1     0.800        0.400        0.100        0.200        290.000      98
"""
OLDER = """\
# Entity  SMACT  TENSO
      Id
   GPU 0  0.900  0.100
 GPU-I 2  0.700  0.200
   GPU 0  0.700    N/A
dmon was stopped due to receiving a signal.
"""


def test_monitor_means_are_per_gpu_and_counter(tmp_path: Path) -> None:
    first, second = read(tmp_path, MONITOR)
    assert (first.entity, first.gpu, first.samples, first.series) == ("GPU 0", 0, 2, 6)
    assert values(second) == pytest.approx(
        {
            "sm_active": 85.0,
            "sm_occupancy": 45.0,
            "tensor_active": 11.0,
            "dram_active": 25.0,
            "power": (71.23 + 300 + 290) / 3,
            "gpu_utilisation": 66.0,
        }
    )
    assert not second.missing and second.samples == 3


def test_monitor_of_older_versions(tmp_path: Path) -> None:
    gpu, instance = read(tmp_path, OLDER)
    assert values(gpu) == pytest.approx({"sm_active": 80.0, "tensor_active": 10.0})
    assert (instance.entity, instance.gpu) == ("GPU-I 2", None) and values(instance)["tensor_active"] == 20.0


def test_monitor_keeps_what_counts_and_says_what_does_not(tmp_path: Path) -> None:
    (gpu,) = read(
        tmp_path,
        "#Entity   SMACT        DRAMA        TENSO\nID\nGPU 0     0.500        1.700        N/A\n"
        "GPU 0     1.200        3.000        N/A\nGPU 0     0.300        2.000        N/A\n",
    )
    assert values(gpu) == {"sm_active": 40.0}
    assert gpu.missing == {
        "sm_active": "1 of 3 samples left out: 1.200 is outside 0..1",
        "dram_active": "3 of 3 samples left out: 1.700 is outside 0..1",
        "tensor_active": "no sample has a value",
    }


def test_monitor_with_a_gap_goes_by_columns(tmp_path: Path) -> None:
    (gpu,) = read(
        tmp_path,
        "#Entity   SMACT        XYZZY        DRAMA\nID\nGPU 0     0.500                     0.250\n",
    )
    assert values(gpu) == {"sm_active": 50.0, "dram_active": 25.0}


def test_monitor_cut_in_its_last_row(tmp_path: Path) -> None:
    whole = read(tmp_path, MONITOR)
    for length in range(1, len(MONITOR.splitlines()[-1])):
        assert read(tmp_path, MONITOR[: -length - 1])[1].samples in (2, 3)
        assert read(tmp_path, MONITOR[: -length - 1])[0] == whole[0]
    with pytest.raises(ArtifactError, match="line 5: the row has 2 of 6 values"):
        read(tmp_path, MONITOR.replace("0.120        0.300        300.000      100", ""))


# ----------------------------------------------------------------------------------------------------------- nvidia-smi


def test_nvidia_smi_monitor(tmp_path: Path) -> None:
    (gpu, second) = read(
        tmp_path,
        "# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     smutil\n"
        "# Idx      W      C      C      %      %      %      %    MHz    MHz      GPM:%\n"
        "    0    117     45      -     90      6      0      0   7001   1492          -\n"
        "    1      -     45      -     10      6      0      0   7001   1492          -\n"
        "    0    119     45      -    100      8      0      0   7001   1492         40\n",
    )
    found = {metric.name: (metric.value, metric.unit, metric.source) for metric in gpu.metrics}
    assert found == {
        "power": (118.0, "W", "nvml"),
        "gpu_utilisation": (95.0, "%", "nvml"),  # "sm" is not the share of SMs
        "memory_utilisation": (7.0, "%", "nvml"),
        "sm_active": (40.0, "%", "gpm"),
    }
    assert second.missing == {"power": "no sample has a value", "sm_active": "no sample has a value"}


def test_nvidia_smi_monitor_with_date_and_time(tmp_path: Path) -> None:
    (gpu,) = read(
        tmp_path,
        "#Date       Time        gpu     fb     sm    mem\n#YYYYMMDD   HH:MM:SS    Idx     MB      %      %\n"
        " 20240104   13:54:35      0    239      6      1\n 20240104   13:54:36      0     74      0      0\n",
    )
    assert values(gpu) == {"gpu_utilisation": 3.0, "memory_utilisation": 0.5}


def test_nvidia_smi_query(tmp_path: Path) -> None:
    header = "index, name, utilization.gpu [%], power.draw [W], memory.used [MiB]\n"
    rows = "0, NVIDIA H100, 91 %, 68.24 W, 1024 MiB\n1, NVIDIA H100, [N/A], [Not Supported], 0 MiB\n"
    first, second = read(tmp_path, header + rows + "0, NVIDIA H100, 93 %, 70.24 W, 3072 MiB\n")
    assert (first.gpu, first.model, first.samples) == (0, "NVIDIA H100", 2)
    assert values(first) == pytest.approx({"gpu_utilisation": 92.0, "power": 69.24, "memory_used": 2048 * 2**20})
    assert {metric.source for metric in first.metrics} == {"nvml"}
    assert values(second) == {"memory_used": 0.0} and set(second.missing) == {"gpu_utilisation", "power"}
    bare = re.sub(r"(\d) (%|W|MiB)", r"\1", rows)
    assert values(read(tmp_path, header + bare)[0])["power"] == 68.24


def test_a_query_that_does_not_say_which_gpu(tmp_path: Path) -> None:
    (gpu,) = read(tmp_path, "utilization.gpu [%]\n91 %\n")
    assert (gpu.entity, gpu.gpu) == ("GPU", None) and values(gpu) == {"gpu_utilisation": 91.0}
    with pytest.raises(ArtifactError, match="add index to --query-gpu"):
        read(tmp_path, "utilization.gpu [%]\n91 %\n90 %\n")


# -------------------------------------------------------------------------------------------------------------- refused

REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no counters of a GPU"),
    "binary": (bytes(range(256)), "is no text"),
    "latin": (b"# Entity \xe9\xff\n", "is no text"),
    "another text": (b"loss 1.2\nloss 1.1\n", "holds no counters of a GPU"),
    "another exporter": (b"# TYPE go_goroutines gauge\ngo_goroutines 11\n", "holds no counters of a GPU"),
    "no gpu": (b'DCGM_FI_DEV_FAN{nvswitch="0"} 1\n', "has counters of no GPU"),
    "cut in the labels": (b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU\n', "line 1: the series is damaged or truncated"),
    "cut before the value": (b'DCGM_FI_DEV_GPU_UTIL{gpu="0"}\n', "damaged or truncated"),
    "cut in the value": (b'DCGM_FI_PROF_DRAM_ACTIVE{gpu="0"} 0.09', "damaged or truncated"),
    "a broken timestamp": (b'DCGM_FI_PROF_DRAM_ACTIVE{gpu="0"} 0.09 1.2.3\n', "damaged or truncated"),
    "a long label": (b'DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="' + b"x" * 10**5 + b"\n", "damaged or truncated"),
    "monitor without rows": (b"#Entity   SMACT\nID\n", "has counters of no GPU"),
    "monitor with too many values": (b"#Entity   SMACT\nID\nGPU 0     0.100   0.2   0.3\n", "3 of 1 values"),
    "smi with too few values": (b"# gpu    pwr     sm\n# Idx      W      %\n    0    117\n", "2 of 3 values"),
    "smi without an index": (b"# gpu    pwr     sm\n# Idx      W      %\n    x    117  3\n", "no index of a GPU"),
    "query with another unit": (b"index, power.draw [W]\n0, 68.24 kW\n", "another unit than W"),
    "query with too few values": (b"index, power.draw [W]\n0\n", "1 of 2 values"),
    "query with an open quote": (b'index, power.draw [W]\n"0, 68.24 W\n', "damaged or truncated"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "given.txt"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=re.escape(message)) as caught:
        read_counters(path)
    assert "given.txt" in str(caught.value) and "dcgmi dmon" in str(caught.value)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_limits(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    with pytest.raises(ArtifactError, match="larger than 64 MiB"):
        read_counters(path)
    with pytest.raises(ArtifactError, match="is not a file"):
        read_counters(tmp_path)


@pytest.mark.parametrize("source", [T4, L4], ids=lambda path: path.name)
def test_a_scrape_cut_anywhere_has_right_values_or_is_an_error(tmp_path: Path, source: Path) -> None:
    text = source.read_text()
    (whole,) = read_counters(source)
    chosen = random.Random(5)
    for _ in range(60):
        with contextlib.suppress(ArtifactError):
            (found,) = read(tmp_path, text[: chosen.randrange(len(text))])
            assert values(found).items() <= values(whole).items()


@given(st.binary(max_size=80), st.sampled_from([T4.read_bytes()[:900], MONITOR.encode(), OLDER.encode()]), st.data())
def test_damaged_text_is_read_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, text: bytes, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.getbasetemp() / "damaged.txt"
    path.write_bytes(text[:place] + junk + text[place:])
    with contextlib.suppress(ArtifactError):
        for gpu in read_counters(path):
            assert all(metric.value >= 0 for metric in gpu.metrics)
            assert all(metric.value <= 100 for metric in gpu.metrics if metric.unit == "%")
