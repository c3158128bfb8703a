"""Surveys to render: one training run, ranks of one job, and files that say little or nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from advisor.measured import (
    Breakdown,
    Cost,
    CriticalPath,
    FileProfile,
    Gap,
    Occupancy,
    Ranks,
    RankTime,
    Survey,
    WhatIf,
)
from advisor.model import Metric, Utilisation

GEMM = "nvjet_sm90_tst_320x128_64x3_2x1_v_bz_coopB_TNT"
MASKED = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::masked_fill_kernel(at::Tensor"
    "Iterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::{lambda()#8}::operator()() const::{lambda(float,"
    " bool)#1}, std::array<char*, 3ul> >(int, at::native::(anonymous namespace)::masked_fill_kernel, std::array<char*>)"
)
SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous "
    "namespace)::SoftMaxForwardEpilogue>(float*, float const*, int)"
)

# What ../shared/corpus/README.md gives for the eight files of param-dlrm8: events, kernels, and in microseconds the sum
# of the kernels, the unions of all activities and of kernels, GPU span, ProfilerStep, NCCL kernels, exposed
# communication.
DLRM = (
    (3290, 245, 6832.0, 6590.0, 6571.0, 13009.0, 14455.0, 5798.0, 5537.0),
    (3424, 310, 12582.0, 12321.0, 12302.0, 18749.0, 19901.0, 11336.0, 11056.0),
    (3268, 246, 4560.0, 4304.0, 4285.0, 11350.0, 13017.0, 3492.0, 3217.0),
    (3474, 315, 11014.0, 10708.0, 10690.0, 18853.0, 19313.0, 9774.0, 9450.0),
    (3310, 251, 7713.0, 7702.0, 7676.0, 16589.0, 17979.0, 6587.0, 6550.0),
    (3250, 245, 7292.0, 7271.0, 7252.0, 16392.0, 17797.0, 6251.0, 6211.0),
    (3272, 246, 4609.0, 4359.0, 4340.0, 11410.0, 13091.0, 3558.0, 3289.0),
    (3250, 246, 2805.0, 2659.0, 2639.0, 10967.0, 12509.0, 1746.0, 1580.0),
)


def cost(kind: str, name: str, time_us: float, floor_us: float | None = None, **more: Any) -> Cost:
    """A cost that is bound by memory where it has a floor."""
    given: dict[str, Any] = {"count": 12.0, "bound": None if floor_us is None else "memory"}
    return Cost(kind=kind, name=name, time_us=time_us, floor_us=floor_us, **(given | more))


def costs() -> tuple[Cost, ...]:
    """Every kind of cost of a step of 535.3 ms, with and without a floor."""
    return (
        cost("family", "attention", 218_000.0, 17_000.0, count=156.0, occupancy_percent=71.4),
        cost("family", "matmul", 155_500.0, 98_300.0, bound="compute", tensor_cores=True, occupancy_percent=18.75,
             limiter="shared memory", flops=9.7e13),
        cost("family", "GELU", 74_000.0, 4_100.0, tensor_cores=False, occupancy_percent=88.0, limiter="registers"),
        cost("family", "norm", 52_000.0, 5_800.0, tensor_cores=False, occupancy_percent=91.0, limiter="warps"),
        cost("family", "optimizer", 12_300.0, 3_400.0, tensor_cores=False),
        cost("family", "other", 11_500.0),
        cost("module", "GPT.blocks.0.attention", 18_200.0, 1_420.0),
        cost("module", "GPT.head", 34_500.0, 4_300.0, bound="compute", tensor_cores=True),
        cost("operator", "aten::masked_fill", 66_100.0, 9_050.0, tensor_cores=False),
        cost("operator", "aten::mm", 120_900.0, 98_300.0, bound="compute", tensor_cores=True,
             counters=(Metric(name="sm_active", value=99.7, unit="%", source="gpm replay"),
                       Metric(name="tensor_active", value=20.3, unit="%", source="gpm replay"))),
        cost("operator", "aten::_softmax", 58_000.0, 8_900.0, tensor_cores=False),
        cost("kernel", GEMM, 86_000.0, 71_200.0, bound="compute", tensor_cores=True, occupancy_percent=18.75,
             limiter="shared memory"),
        cost("kernel", MASKED, 66_100.0, 9_050.0, tensor_cores=False, occupancy_percent=93.2, limiter="warps"),
        cost("kernel", SOFTMAX, 31_000.0, 4_500.0, tensor_cores=False, occupancy_percent=32.1,
             limiter="registers and shared memory"),
        cost("kernel", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80", 9_000.0, None, tensor_cores=True),
    )  # fmt: skip


def training(**changes: Any) -> FileProfile:
    """The slow GPT of the design page on one H200, everything known."""
    use = Utilisation(
        busy=0.9808, model_flops_per_step=7.94e13, achieved_flops=1.4841e14, mfu=0.150, mfu_own_peak=0.150,
        mfu_causal=0.1395, hfu=0.153, of_measured=0.188, peak_flops=989.4e12, peak_source="datasheet, dense bfloat16",
        definition="matmul and attention FLOPs of the model, causal not halved, recomputation not counted",
    )  # fmt: skip
    path = CriticalPath(
        length_us=535_300.0,
        parts_us={"compute": 524_200.0, "copy": 1_200.0, "launch": 8_000.0, "data": 1_100.0, "host": 800.0},
        what_if=(
            WhatIf(name="GELU", measured_us=535_300.0, step_us=465_400.0),
            WhatIf(name="attention", measured_us=535_300.0, step_us=334_300.0),
            WhatIf(name="copies", measured_us=535_300.0, step_us=535_300.0),
        ),
    )
    given: dict[str, Any] = {
        "path": "runs/gpt/trace.json.gz", "status": "ok", "events": 174_220, "kernels": 8_620, "kernel_us": 2_621_000.0,
        "busy_us": 2_625_400.0, "span_us": 2_688_000.0, "steps": 5, "step_mean_us": 293_800.0, "nccl_kernels": 0,
        "exposed_comm_us": 0.0, "device": "NVIDIA H200", "mfu": 0.150, "mfu_causal": 0.1395, "mfu_own_peak": 0.150,
        "hfu": 0.153, "memcpys": 20, "memsets": 5, "nccl_us": 0.0, "kernels_busy_us": 2_620_900.0, "without_launch": 0,
        "busy_in_steps": 0.812, "kernels_busy_in_steps": 0.810, "steps_from": "optimizer",
        "device_step_us": 535_300.0, "utilisation": use,
        "breakdown": Breakdown(
            length_us=535_300.0, compute_us=524_200.0, exposed_comm_us=0.0, exposed_copy_us=800.0, idle_us=10_300.0,
            idle_by_cause_us={"other": 300.0, "launch": 7_900.0, "queued": 500.0, "sync": 500.0, "data": 1_100.0},
        ),
        "occupancy": Occupancy(
            recorded_percent=41.0, percent=58.9, known=0.93, sm_efficiency=0.984, wave_efficiency=0.913,
            limiters={"warps": 0.51, "shared memory": 0.29, "registers": 0.20},
        ),
        "tensor_time": {"yes": 0.292, "no": 0.667, "unknown": 0.041}, "recoverable_us": 384_200.0, "costs": costs(),
        "critical_path": path,
        "counters": (
            Metric(name="sm_active", value=97.6, unit="%", source="gpm"),
            Metric(name="tensor_active", value=17.1, unit="%", source="gpm"),
            Metric(name="power", value=512.0, unit="W", source="nvml"),
        ),
        "gaps": (
            Gap(what="step times", why="the steps are not marked; they were found by optimizer steps",
                collect="record with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, "
                "active=3)) and call profiler.step() at the end of each step", qualifies=True),
            Gap(what="time by module", why="no range of a module is recorded",
                collect="record with torch.profiler.profile(with_stack=True, with_modules=True)"),
        ),
        "notes": ("the first ProfilerStep was left out: it is 2.31 times as long as the median",),
    }  # fmt: skip
    return FileProfile(**(given | changes))


def rank_file(rank: int) -> FileProfile:
    """One of the eight ranks that trained DLRM."""
    events, kernels, kernel_us, busy_us, kernels_us, span_us, step_us, nccl_us, exposed_us = DLRM[rank]
    computing = kernels_us - exposed_us
    return FileProfile(
        path=f"param-dlrm8/rank{rank}.pt.trace.json.gz", status="ok", events=events, kernels=kernels,
        kernel_us=kernel_us, busy_us=busy_us, span_us=span_us, steps=1, step_mean_us=step_us, nccl_kernels=8,
        exposed_comm_us=exposed_us, device="Tesla V100-SXM2-32GB", rank=rank, world_size=8, memcpys=16, memsets=0,
        nccl_us=nccl_us, kernels_busy_us=kernels_us, busy_in_steps=busy_us / step_us, steps_from="ProfilerStep",
        device_step_us=step_us, utilisation=Utilisation(busy=busy_us / step_us),
        breakdown=Breakdown(
            length_us=step_us, compute_us=computing, exposed_comm_us=exposed_us, exposed_copy_us=busy_us - kernels_us,
            idle_us=step_us - busy_us, idle_by_cause_us={"launch": step_us - busy_us - 1_000.0, "data": 1_000.0},
        ),
        costs=(
            cost("kernel", "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", nccl_us, count=8.0),
            cost("kernel", "volta_sgemm_128x32_sliced1x4_tn", 171.0, 24.0, bound="compute", tensor_cores=False),
        ),
        gaps=(
            Gap(what="MFU", why="the dense peak of Tesla V100-SXM2-32GB is not known",
                collect="advisor doctor --calibrate on that machine, or --peak FLOP/S here"),
        ),
    )  # fmt: skip


def rank_time(file: FileProfile, transfer_us: float) -> RankTime:
    """The row of a rank: what its collectives take beyond `transfer_us` is waiting."""
    assert file.breakdown is not None
    assert file.nccl_us is not None
    return RankTime(
        path=file.path, rank=file.rank, step_us=file.device_step_us, compute_us=file.breakdown.compute_us,
        exposed_comm_us=file.exposed_comm_us, transfer_us=transfer_us, wait_us=file.nccl_us - transfer_us,
    )  # fmt: skip


def together(files: Sequence[FileProfile], **more: Any) -> Survey:
    """Several ranks of one job."""
    transfer_us = min(file.nccl_us or 0.0 for file in files)
    ranks = Ranks(ranks=tuple(rank_time(file, transfer_us) for file in files), **more)
    return Survey(files=tuple(files), ranks=ranks)


def dlrm() -> Survey:
    """The eight ranks of DLRM."""
    files = [rank_file(rank) for rank in range(8)]
    return together(files, straggler=7, imbalance=0.214, notes=("one step only: a rank can be late by chance",))


def many(count: int = 128) -> Survey:
    """A job of many ranks with one slow one and some that were not recorded."""
    files = []
    for rank in (rank for rank in range(count + 3) if rank not in (5, 6, 90)):
        file = rank_file(rank % 7)
        slow = 4_000.0 if rank == 77 else 10.0 * (rank % 13)
        assert file.breakdown is not None
        longer = dataclasses.replace(file.breakdown, compute_us=file.breakdown.compute_us + slow)
        path = f"traces/rank{rank}.json.gz"
        files.append(dataclasses.replace(file, path=path, rank=rank, world_size=count + 3, breakdown=longer))
    return together(files, straggler=77, imbalance=0.38, missing=(5, 6, 90))


def refused(path: str = "traces/trace.json") -> FileProfile:
    """A file that is no trace."""
    reason = "none of its events is an operator, a launch or a kernel: give a trace that torch.profiler exported"
    return FileProfile(path=path, status="refused", reason=reason, events=37)


def partial() -> FileProfile:
    """A file that ends early."""
    return FileProfile(
        path="traces/bert-small.json.gz", status="partial",
        reason="the compressed stream ends after 38,355 bytes: 1,532 events were whole; what is whole was read",
        events=1_532, kernels=34, kernel_us=171.2, busy_us=171.2, span_us=2_310.0, device="NVIDIA H100 80GB HBM3",
        gaps=(
            Gap(what="step times, device time, idle time", why="the file ends inside the second step",
                collect="export the trace again and copy the whole file"),
            Gap(what="MFU", why="the recording has no steps that can be told apart",
                collect="call profiler.step() at the end of each step"),
        ),
    )  # fmt: skip


def host_only() -> FileProfile:
    """A file that holds operators of the host and nothing of a device."""
    return FileProfile(
        path="traces/gloo-rank34.json", status="ok", events=21_313, kernels=0, steps=1, step_mean_us=1_840_000.0,
        rank=34, world_size=300,
        gaps=(
            Gap(what="device time, idle time, causes of idle time, share of the peak",
                why="nothing of a device is recorded: times are those of the host",
                collect="on a machine with a GPU record with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
                "ProfilerActivity.CUDA]), no other CUDA profiler attached"),
        ),
    )  # fmt: skip


def bare(status: str = "ok") -> FileProfile:
    """A file of which nothing is known."""
    return FileProfile(path="x.json", status=status)


def barest() -> Survey:
    """Every noun, with everything absent that may be."""
    none = RankTime(
        path="x.json", rank=None, step_us=None, compute_us=None, exposed_comm_us=None, transfer_us=None, wait_us=None
    )
    split = Breakdown(length_us=0.0, compute_us=0.0, exposed_comm_us=0.0, exposed_copy_us=0.0, idle_us=0.0)
    chain = CriticalPath(length_us=0.0, parts_us={})
    work = Cost(kind="kernel", name="", count=0.0, time_us=0.0)
    full = dataclasses.replace(bare(), breakdown=split, critical_path=chain, costs=(work,))
    return Survey(files=(bare(), full, bare("partial"), bare("refused")), ranks=Ranks(ranks=(none, none)))


def mixed() -> Survey:
    """Files that have nothing to do with each other."""
    return Survey(files=(training(), partial(), host_only(), refused(), rank_file(0)))


def one(file: FileProfile) -> Survey:
    """A survey of one file."""
    return Survey(files=(file,))


EVERY = {
    "training": one(training()),
    "ranks": dlrm(),
    "many": many(),
    "mixed": mixed(),
    "partial": one(partial()),
    "refused": one(refused()),
    "host": one(host_only()),
    "bare": one(bare()),
    "barest": barest(),
    "empty": Survey(files=()),
}
