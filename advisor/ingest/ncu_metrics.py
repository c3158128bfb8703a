"""What the figures of Nsight Compute are called there and here, and how their text becomes a number.

Sources. The labels of the details page and the metrics behind them are those of the section files that come with
Nsight Compute (SpeedOfLight, Occupancy, LaunchStats, MemoryWorkloadAnalysis, ComputeWorkloadAnalysis and
WorkloadDistribution .section). The structure of the names (unit, counter, roll-up, `pct_of_peak_sustained_elapsed`
against `..._active`) is in "Metrics Structure" and "Metrics Decoder" of the Nsight Compute Profiling Guide; that
`sm__warps_active.avg.pct_of_peak_sustained_active` is achieved occupancy also in the "Nvprof Transition Guide" of the
Nsight Compute CLI manual.

Denominators differ and are kept apart. `achieved_occupancy`, `tensor_active`, `tc_active` and `l1_throughput` are
measured over the cycles in which the unit was active; `sm_active`, `tensor_active_elapsed` and the other throughputs
over all elapsed cycles. The `tensor_active` of DCGM and GPM is over elapsed cycles: compare `tensor_active_elapsed`.

`sm_active` has no entry for the details page: that page has active cycles of SMs beside elapsed cycles of GPCs, whose
quotient is another figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from advisor.model import Metric

SOURCE = "ncu"


class Reading(NamedTuple):
    """A figure as the file has it: its text, and its unit or an empty string."""

    text: str
    unit: str


class Quantity(NamedTuple):
    """One of our figures, in `unit`: the metrics it is read from, the first present wins, and its label.

    The label is "Section: Label" as the details page prints it.
    """

    name: str
    unit: str
    metrics: tuple[str, ...]
    label: str = ""


_LIGHT = "GPU Speed Of Light Throughput"
_ELAPSED, _ACTIVE = ".avg.pct_of_peak_sustained_elapsed", ".avg.pct_of_peak_sustained_active"

QUANTITIES: tuple[Quantity, ...] = (
    # A launch has one duration: the roll-ups of this counter are equal. A trace shows others, since Nsight Compute
    # fixes the clocks to their base and flushes caches unless told otherwise (--clock-control, --cache-control).
    Quantity("duration_us", "us", ("gpu__time_duration.sum", "gpu__time_duration.avg"), f"{_LIGHT}: Duration"),
    Quantity("sm_active", "%", (f"sm__cycles_active{_ELAPSED}",)),
    Quantity("achieved_occupancy", "%", (f"sm__warps_active{_ACTIVE}",), "Occupancy: Achieved Occupancy"),
    Quantity(
        "theoretical_occupancy", "%", ("sm__maximum_warps_per_active_cycle_pct",), "Occupancy: Theoretical Occupancy"
    ),
    # On compute capability 8.9 the counter of the tensor pipe is the _v2 one (ComputeWorkloadAnalysis.section).
    Quantity(
        "tensor_active", "%", (f"sm__pipe_tensor_cycles_active_v2{_ACTIVE}", f"sm__pipe_tensor_cycles_active{_ACTIVE}")
    ),
    Quantity(
        "tensor_active_elapsed",
        "%",
        (f"sm__pipe_tensor_cycles_active_v2{_ELAPSED}", f"sm__pipe_tensor_cycles_active{_ELAPSED}"),
    ),
    # The pipe of the UTC*MMA operations of compute capability 10.x and 11.0, which stands beside the tensor pipe there.
    Quantity("tc_active", "%", (f"sm__pipe_tc_cycles_active{_ACTIVE}",)),
    # Instructions, not busy cycles: a Hopper warp-group instruction keeps the pipe busy for many cycles.
    Quantity("tensor_instructions", "inst", ("sm__inst_executed_pipe_tensor.sum",)),
    Quantity("sm_throughput", "%", (f"sm__throughput{_ELAPSED}",), f"{_LIGHT}: Compute (SM) Throughput"),
    Quantity("memory_throughput", "%", (f"gpu__compute_memory_throughput{_ELAPSED}",), f"{_LIGHT}: Memory Throughput"),
    # The first is what the details page calls DRAM Throughput, so that both pages of one report agree.
    Quantity(
        "dram_throughput",
        "%",
        (f"gpu__dram_throughput{_ELAPSED}", f"dram__throughput{_ELAPSED}"),
        f"{_LIGHT}: DRAM Throughput",
    ),
    Quantity("l1_throughput", "%", (f"l1tex__throughput{_ACTIVE}",), f"{_LIGHT}: L1/TEX Cache Throughput"),
    Quantity("l2_throughput", "%", (f"lts__throughput{_ELAPSED}",), f"{_LIGHT}: L2 Cache Throughput"),
    Quantity("dram_read_bytes", "byte", ("dram__bytes_read.sum",)),
    Quantity("dram_write_bytes", "byte", ("dram__bytes_write.sum",)),
    Quantity(
        "dram_bandwidth", "byte/s", ("dram__bytes.sum.per_second",), "Memory Workload Analysis: Memory Throughput"
    ),
    Quantity("elapsed_cycles", "cycle", ("gpc__cycles_elapsed.max",), f"{_LIGHT}: Elapsed Cycles"),
    Quantity("sm_active_cycles", "cycle", ("sm__cycles_active.avg",), f"{_LIGHT}: SM Active Cycles"),
    Quantity("sm_frequency", "Hz", ("gpc__cycles_elapsed.avg.per_second",), f"{_LIGHT}: SM Frequency"),
    Quantity("dram_frequency", "Hz", ("dram__cycles_elapsed.avg.per_second",), f"{_LIGHT}: DRAM Frequency"),
    Quantity(
        "registers", "register/thread", ("launch__registers_per_thread",), "Launch Statistics: Registers Per Thread"
    ),
    Quantity(
        "static_shared_bytes",
        "byte",
        ("launch__shared_mem_per_block_static",),
        "Launch Statistics: Static Shared Memory Per Block",
    ),
    Quantity(
        "dynamic_shared_bytes",
        "byte",
        ("launch__shared_mem_per_block_dynamic",),
        "Launch Statistics: Dynamic Shared Memory Per Block",
    ),
    Quantity(
        "driver_shared_bytes",
        "byte",
        ("launch__shared_mem_per_block_driver",),
        "Launch Statistics: Driver Shared Memory Per Block",
    ),
    Quantity(
        "shared_config_bytes",
        "byte",
        ("launch__shared_mem_config_size",),
        "Launch Statistics: Shared Memory Configuration Size",
    ),
    Quantity("waves_per_sm", "", ("launch__waves_per_multiprocessor",), "Launch Statistics: Waves Per SM"),
    Quantity("sm_count", "SM", ("launch__sm_count",), "Launch Statistics: # SMs"),
    Quantity(
        "achieved_warps", "warp", ("sm__warps_active.avg.per_cycle_active",), "Occupancy: Achieved Active Warps Per SM"
    ),
    Quantity(
        "theoretical_warps",
        "warp",
        ("sm__maximum_warps_avg_per_active_cycle",),
        "Occupancy: Theoretical Active Warps per SM",
    ),
    Quantity("block_limit_blocks", "block", ("launch__occupancy_limit_blocks",), "Occupancy: Block Limit SM"),
    Quantity(
        "block_limit_registers", "block", ("launch__occupancy_limit_registers",), "Occupancy: Block Limit Registers"
    ),
    Quantity(
        "block_limit_shared", "block", ("launch__occupancy_limit_shared_mem",), "Occupancy: Block Limit Shared Mem"
    ),
    Quantity("block_limit_warps", "block", ("launch__occupancy_limit_warps",), "Occupancy: Block Limit Warps"),
    Quantity("block_limit_barriers", "block", ("launch__occupancy_limit_barriers",), "Occupancy: Block Limit Barriers"),
)

_SI = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_PER_SECOND = {"second": 1.0, "s": 1.0, "msecond": 1e3, "ms": 1e3, "usecond": 1e6, "us": 1e6, "nsecond": 1e9, "ns": 1e9}
# Unit as printed -> factor to our unit. Prefixes are decimal: 32768 bytes are printed as 32.77 Kbyte.
_FACTORS: Mapping[str, Mapping[str, float]] = {
    "us": {unit: 1e6 / per_second for unit, per_second in _PER_SECOND.items()},
    "byte": {f"{prefix}byte{per}": factor for prefix, factor in _SI.items() for per in ("", "/block")},
    "byte/s": {f"{prefix}byte/{unit}": factor for prefix, factor in _SI.items() for unit in ("second", "s")},
    "Hz": {f"{prefix}hz".lower(): factor for prefix, factor in _SI.items()}
    | {f"cycle/{unit}": factor for unit, factor in _PER_SECOND.items()},
    "%": {"%": 1.0},
}
_ABSENT = frozenset({"", "n/a", "nan", "-nan", "inf", "-inf", "no data"})
_NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][+-]?\d{1,3})?")
_THREE_DECIMALS = re.compile(r"\d{1,3}\.\d{3}")
_INTEGRAL = frozenset({"ns", "nsecond", "byte", "byte/block"})


def number(reading: Reading) -> float | None:
    """The number a reading shows, in its own unit; None where Nsight Compute has none ("n/a", "(!) nan", empty).

    Raises ValueError for other text. A comma groups thousands and a dot begins the decimals, as with the English number
    format; a file of another format would be misread by factors of a thousand, so any sign of one is an error:
    "99,78", "1.205.632", and "269.472" in a unit that is only ever counted in whole.
    """
    text = reading.text.strip().removeprefix("(!)").strip()
    if text.lower() in _ABSENT:
        return None
    whole_only = reading.unit in _INTEGRAL and _THREE_DECIMALS.fullmatch(text)
    if whole_only or not _NUMBER.fullmatch(text):
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{shown!r} is not a number of the English format (1,234.5); run ncu with LC_ALL=C")
    value = float(text.replace(",", ""))
    if not math.isfinite(value):
        raise ValueError(f"a number of {len(text)} digits is out of range")
    return value


def measure(raw: Mapping[str, Reading]) -> tuple[tuple[Metric, ...], dict[str, str]]:
    """Our figures of one launch, and for those that are there but unreadable the reason (figure -> reason).

    Raises ValueError, with the name of the metric, where a figure we read is no number. Figures that Nsight Compute
    scaled to a larger unit keep the two decimals it printed; `--print-units base` exports them in full.
    """
    found: list[Metric] = []
    missing: dict[str, str] = {}
    for quantity in QUANTITIES:
        for key in (*quantity.metrics, quantity.label):
            reading = raw.get(key)
            if reading is None:
                continue
            try:
                value = number(reading)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            factor = _factor(quantity.unit, reading.unit)
            if value is not None and factor is not None:
                value = float(f"{value * factor:.15g}")  # 16.38 Kbyte are 16380 bytes, not 16379.999999999998
                found.append(Metric(name=quantity.name, value=value, unit=quantity.unit, source=SOURCE))
                missing.pop(quantity.name, None)
                break
            missing[quantity.name] = (
                f"{key} has no value" if factor is not None else f"{key} has the unknown unit {reading.unit!r}"
            )
    return tuple(found), missing


def _factor(wanted: str, printed: str) -> float | None:
    """What a number in the unit `printed` is multiplied with to be in `wanted`; counts may come without a unit."""
    if wanted in _FACTORS:
        return _FACTORS[wanted].get(printed.lower() if wanted == "Hz" else printed)
    if printed in ("", wanted):
        return 1.0
    return _SI.get(printed[0]) if printed[1:] == wanted else None
