"""Counts of the host's side agree with plain scripts on every trace; waits are told by what asked for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import CORPUS, NOT_HERE, call, copy, corpus, h200, kernel, launch, op, readable, span, table_of, truth

from advisor.columns.joins import launching_calls, parents
from advisor.columns.table import Table
from advisor.metrics.hostfacts import HostFacts, Wait, host_facts
from advisor.metrics.steps import find_steps


def facts(table: Table) -> HostFacts:
    calls = launching_calls(table)
    return host_facts(table, calls, parents(table.operators), find_steps(table, calls))


def counts(found: HostFacts, call: str) -> dict[tuple[str, ...], int]:
    return {wait.operators: wait.count for wait in found.waits if wait.call == call}


@pytest.mark.skipif(not CORPUS.exists(), reason=NOT_HERE)
@pytest.mark.parametrize("path", readable())
def test_every_trace_agrees_with_the_plain_count(path: str) -> None:
    right, extra = truth()[path]["right"], truth()[path].get("right_extra", {})
    found = facts(corpus(path))
    if "gpu_ops" not in extra:
        return  # one of the cut files: no plain script can read it
    assert dict(found.sync_calls) == right.get("sync_calls", {})
    assert found.short_kernels == extra["short_lt10us"]
    assert [found.pageable_h2d, round(found.pageable_h2d_us, 1)] == extra["pageable_h2d"]
    assert [found.data_ranges, round(found.data_us, 1)] == extra["dataloader"]
    assert found.data_ranges == right["dataloader_ranges"]
    if extra["no_launch"] is not None:  # None where the file links no activity to any launch
        assert found.without_launch == extra["no_launch"]


@pytest.mark.parametrize(
    ("path", "waits"),
    [
        ("hta-gp100-sgd-10steps.json.gz", 10),
        ("param-2080ti-resnet-cifar-30steps.json.gz", 61),
        ("hta-a100x16-torchrec-rank0.json.gz", 75),
    ],
)
def test_blocking_copies_are_no_scalars(path: str, waits: int) -> None:
    """Every cudaStreamSynchronize of these traces belongs to a copy that `aten::to` makes, none to `.item()`."""
    found = facts(corpus(path))
    assert counts(found, "cudaStreamSynchronize") == {("aten::to", "aten::_to_copy", "aten::copy_"): waits}
    assert not any(wait.reads_scalar for wait in found.waits)


def test_a_loss_that_is_read_in_each_step() -> None:
    found = facts(h200("gpt_launch_bound_fp32"))
    scalar = [wait for wait in found.waits if wait.reads_scalar]
    assert [(wait.call, wait.operators[0], wait.count) for wait in scalar] == [
        ("cudaStreamSynchronize", "aten::item", 2)
    ]


@pytest.mark.parametrize(
    ("name", "least", "most", "delay_us"),
    [
        ("gpt_launch_bound_fp32", 0.9, 1.0, 10.0),
        ("gpt_naive_bf16", 0.0, 0.05, None),
        ("gpt_fused_compiled_bf16", 0.0, 0.05, None),
    ],
)
def test_who_sets_the_pace(name: str, least: float, most: float, delay_us: float | None) -> None:
    found = facts(h200(name))
    assert found.starved is not None and least <= found.starved <= most
    assert found.queue_delay_us is not None
    assert found.queue_delay_us < delay_us if delay_us else found.queue_delay_us > 1e4


@pytest.mark.parametrize(
    ("path", "share"),
    [
        ("kineto-resnet50-nw0-steps5-10.pt.trace.json.gz", 0.396),
        ("kineto-resnet50-nw4-steps5-10.pt.trace.json.gz", 0.010),
    ],
)
def test_the_loaders_share_of_the_host(path: str, share: float) -> None:
    """415,791 us of 6 x 174,829 us, and 8,522 us of 6 x 139,692 us."""
    assert facts(corpus(path)).data_share == pytest.approx(share, abs=0.001)


def test_waits_count_within_the_steps(tmp_path: Path) -> None:
    """The profiler synchronises when it stops; that is no wait of the script."""
    table = table_of(
        tmp_path,
        [
            span("ProfilerStep#1", 0.0, 100.0),
            op("aten::item", 10.0, 30.0),
            op("aten::_local_scalar_dense", 11.0, 28.0),
            call("cudaMemcpyAsync", 12.0, 5.0, 1),
            copy("Memcpy DtoH (Device -> Pageable)", 13.0, 2.0, 1),
            call("cudaStreamSynchronize", 20.0, 15.0),
            call("cudaStreamSynchronize", 60.0, 3.0),
            call("cudaDeviceSynchronize", 120.0, 40.0),
        ],
    )
    found = facts(table)
    chain = ("aten::item", "aten::_local_scalar_dense")
    assert found.waits == (
        Wait(call="cudaStreamSynchronize", operators=chain, count=1, time_us=15.0),
        Wait(call="cudaMemcpyAsync", operators=chain, count=1, time_us=5.0),
        Wait(call="cudaStreamSynchronize", operators=(), count=1, time_us=3.0),
    )
    assert [wait.reads_scalar for wait in found.waits] == [True, True, False]
    assert found.sync_calls == {"cudaStreamSynchronize": 2, "cudaDeviceSynchronize": 1} and found.sync_us == 58.0


def test_a_graph_is_one_launch(tmp_path: Path) -> None:
    replayed = [kernel("gemm", 10.0 + 5.0 * place, 4.0, 1) for place in range(9)]
    found = facts(
        table_of(
            tmp_path, [call("cudaGraphLaunch", 0.0, 4.0, 1), *replayed, launch(2, 5.0), kernel("gemm", 60.0, 1.0, 2)]
        )
    )
    assert (found.queue_delay_us, found.starved) == ((6.0 + 54.0) / 2, 0.5)


def test_absent_is_none(tmp_path: Path) -> None:
    found = facts(table_of(tmp_path, [op("aten::mm", 0.0, 1.0)]))
    assert (found.queue_delay_us, found.starved, found.data_share) == (None, None, None)
