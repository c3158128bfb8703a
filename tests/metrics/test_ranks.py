"""Ranks of one job: what is transfer, what is waiting, who is waited for, and what cannot be said."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import Event, corpus, kernel, launch, span, table_of

from advisor.columns.joins import launching_calls
from advisor.columns.table import Table
from advisor.ingest.recorded import place
from advisor.measured import Ranks
from advisor.metrics.breakdown import breakdown
from advisor.metrics.ranks import Collectives, RankInput, collectives_of, ranks
from advisor.metrics.steps import Steps, find_steps

REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def steps_of(table: Table) -> Steps:
    return find_steps(table, launching_calls(table))


def input_of(path: str) -> RankInput:
    """What a composer takes from one trace of the corpus."""
    table = corpus(path)
    launches = launching_calls(table)
    steps = find_steps(table, launches)
    split = breakdown(table, launches, steps.windows)
    assert split is not None
    where = place(table.head)
    return RankInput(
        path=path,
        rank=where.rank,
        world_size=where.world_size,
        step_us=steps.median_us,
        compute_us=split.compute_us / len(steps),
        exposed_comm_us=split.exposed_comm_us / len(steps),
        collectives=collectives_of(table, steps),
    )


def rank(
    number: int | None,
    durations: tuple[float, ...],
    *,
    world: int | None = None,
    steps: tuple[int, ...] | None = None,
    key: str = "stream 20: ncclKernel_AllReduce",
    size: int | None = None,
    named: bool = False,
    path: str | None = None,
    step_us: float | None = 1000.0,
    compute_us: float | None = None,
) -> RankInput:
    """A rank with one kind of collective."""
    kind = Collectives(
        key=key, group_size=size, named=named, steps=steps or (0,) * len(durations), durations_us=durations
    )
    return RankInput(
        path=path or f"rank{number}.json",
        rank=number,
        world_size=world,
        step_us=step_us,
        compute_us=compute_us,
        collectives=(kind,) if durations else (),
    )


def waits(found: Ranks) -> list[float | None]:
    return [item.wait_us for item in found.ranks]


# ----------------------------------------------------------------------------------------------------------- recordings


def test_eight_ranks_of_a_recommendation_model() -> None:
    """NCCL takes 5798, 11336, 3492, 9774, 6587, 6251, 3558 and 1746 us on ranks 0 to 7, in eight collectives. The
    shortest of each are 10, 8, 7, 7, 86, 10, 20 and 69 us (ranks 7, 7, 7, 7, 7, 5, 5, 4), in all 217 us."""
    inputs = [input_of(f"param-dlrm8/rank{number}.pt.trace.json.gz") for number in range(8)]
    found = ranks(inputs)
    assert [item.rank for item in found.ranks] == list(range(8))
    assert [item.transfer_us for item in found.ranks] == [217.0] * 8
    totals = [5798, 11336, 3492, 9774, 6587, 6251, 3558, 1746]
    assert waits(found) == [total - 217.0 for total in totals]
    assert found.straggler == 7
    assert found.missing == () and found.notes == ()
    assert found.imbalance == pytest.approx(0.0615, abs=1e-3)
    assert found.ranks[0].exposed_comm_us == pytest.approx(5537, abs=1)

    for order in (inputs[::-1], random.Random(1).sample(inputs, 8)):
        assert ranks(order) == found

    seven = ranks(inputs[:7])
    assert seven.missing == (7,) and seven.straggler is None
    assert any("not all ranks are known to be there" in note for note in seven.notes)
    assert waits(seven)[0] is not None and waits(seven)[0] < 5581


def test_two_of_many_ranks() -> None:
    found = ranks([input_of(f"hta-128rank-sampled-rank{number}.json.gz") for number in (1, 0)])
    assert [item.rank for item in found.ranks] == [0, 1]
    assert found.missing == tuple(range(2, 128))
    assert found.straggler is None
    assert all(item.transfer_us is not None and item.wait_us is not None for item in found.ranks)


def test_one_rank_says_nothing_of_waiting() -> None:
    found = ranks([input_of("hta-a100-ddp-nccl-meta-rank0.json.gz")])
    assert waits(found) == [None] and found.straggler is None and found.imbalance is None
    assert found.missing == (1,) and found.notes == ()


def test_recorded_collectives_are_kept_by_group_and_step() -> None:
    table = corpus("hta-a100-ddp-nccl-meta-rank0.json.gz")
    found = {item.key: item for item in collectives_of(table, steps_of(table))}
    assert set(found) == {"group 0 [0, 1]: allreduce", "group 0 [0, 1]: broadcast"}
    reduced = found["group 0 [0, 1]: allreduce"]
    assert reduced.group_size == 2 and reduced.named
    assert reduced.steps == (4,) * 5 + (5,) * 5 + (6,) * 5
    assert reduced.durations_us[0] == pytest.approx(3306.963)
    assert len(found["group 0 [0, 1]: broadcast"].durations_us) == 6


# --------------------------------------------------------------------------------------------- what a trace contributes


def collective(start: float, duration: float, correlation: int, name: str = "", group: str = "") -> Event:
    found = kernel(REDUCE, start, duration, correlation, stream=20)
    if name:
        found["args"] |= {"Collective name": name, "Process Group Name": group, "Group size": 2, "dtype": "Float"}
    return found


def test_collectives_of_a_trace(tmp_path: Path) -> None:
    """Those outside of the steps and transfers between two ranks are left out; the rest is in order of time."""
    events = [
        span("ProfilerStep#3", 100, 100),
        span("ProfilerStep#4", 200, 100),
        collective(50, 5, 99),
        launch(1, 110),
        collective(120, 30, 1),
        launch(2, 210),
        collective(220, 40, 2),
        launch(3, 230),
        collective(270, 10, 3, "allreduce", "tp"),
        launch(4, 240),
        collective(285, 11, 4, "send", "pp"),
    ]
    table = table_of(tmp_path, random.Random(0).sample(events, len(events)))
    assert collectives_of(table, steps_of(table)) == (
        Collectives(key="group tp : allreduce", group_size=2, named=False, steps=(4,), durations_us=(10.0,)),
        Collectives(
            key="stream 20: ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            group_size=None,
            named=False,
            steps=(3, 4),
            durations_us=(30.0, 40.0),
        ),
    )


def test_without_steps_all_collectives_count_as_one(tmp_path: Path) -> None:
    table = table_of(tmp_path, [launch(1, 0), collective(10, 30, 1), launch(2, 20), collective(50, 40, 2)])
    (found,) = collectives_of(table, steps_of(table))
    assert found.steps == (0, 0) and found.durations_us == (30.0, 40.0)


@pytest.mark.parametrize("info", [None, [], {"pg_config": "x"}, {"pg_config": [1, {"pg_name": 3}, {"ranks": [0]}]}])
def test_odd_descriptions_of_groups_are_no_error(tmp_path: Path, info: object) -> None:
    table = table_of(tmp_path, [launch(1, 0), collective(10, 30, 1, "allreduce", "0")], distributedInfo=info)
    (found,) = collectives_of(table, steps_of(table))
    assert found.key == "group 0 : allreduce" and not found.named


# ---------------------------------------------------------------------------------------------------------- comparisons


def test_waiting_is_per_step() -> None:
    found = ranks(
        [
            rank(0, (10.0, 110.0, 30.0, 150.0), steps=(4, 4, 5, 5), world=2),
            rank(1, (310.0, 10.0, 410.0, 50.0), steps=(4, 4, 5, 5), world=2),
        ]
    )
    assert [item.transfer_us for item in found.ranks] == [(10 + 10 + 30 + 50) / 2] * 2
    assert waits(found) == [(100 + 100) / 2, (300 + 380) / 2]
    assert found.straggler == 0 and found.notes == ()


def test_only_steps_that_all_ranks_recorded_are_compared() -> None:
    found = ranks(
        [
            rank(0, (10.0, 20.0), steps=(4, 5), world=2),
            rank(1, (60.0, 1000.0), steps=(5, 6), world=2),
        ]
    )
    assert waits(found) == [0.0, 40.0]
    apart = ranks([rank(0, (10.0,), steps=(4,), world=2), rank(1, (60.0,), steps=(5,), world=2)])
    assert waits(apart) == [None, None] and "no step in common" in apart.notes[0]


def test_collectives_that_do_not_match_are_not_compared() -> None:
    found = ranks([rank(0, (10.0, 20.0), world=2), rank(1, (60.0,), world=2)])
    assert waits(found) == [None, None] and found.straggler is None
    assert found.notes == ("the ranks' collectives do not match: waiting cannot be told from transfer",)
    silent = ranks([rank(0, (10.0,), world=2), rank(1, (), world=2)])
    assert waits(silent) == [None, None] and silent.notes == ("1 of 2 ranks recorded no collective",)
    assert ranks([rank(0, (), world=2), rank(1, (), world=2)]).notes == ()


def test_how_much_could_be_matched_is_said() -> None:
    def both(number: int, matching: float, *odd: float) -> RankInput:
        first = rank(number, (matching,), world=2)
        second = rank(number, odd, world=2, key="stream 21: ncclKernel_Broadcast")
        return RankInput(
            path=first.path,
            rank=number,
            world_size=2,
            step_us=1000.0,
            collectives=(*first.collectives, *second.collectives),
        )

    found = ranks([both(0, 100.0, 50.0), both(1, 150.0, 50.0, 50.0)])
    assert waits(found) == [0.0, 50.0]
    assert found.notes == ("62% of the communication could be matched over the ranks and is split",)


def test_groups_are_compared_within_themselves() -> None:
    """Two groups of two ranks. Where their ranks are recorded the names do not matter; where they are not, groups of
    one name cannot be told apart."""
    sizes = {0: (10.0,), 1: (90.0,), 2: (500.0,), 3: (700.0,)}
    listed = [
        rank(number, time, world=4, size=2, named=True, key=f"group tp {[0, 1] if number < 2 else [2, 3]}: allreduce")
        for number, time in sizes.items()
    ]
    assert waits(ranks(listed)) == [0.0, 80.0, 0.0, 200.0]
    assert waits(ranks(listed[1:])) == [None, 0.0, 200.0]
    numbered = [
        rank(number, time, world=4, size=2, key=f"group {number // 2} : allreduce") for number, time in sizes.items()
    ]
    assert waits(ranks(numbered)) == [0.0, 80.0, 0.0, 200.0]
    same = [rank(number, time, world=4, size=2, key="group tp : allreduce") for number, time in sizes.items()]
    assert waits(ranks(same)) == [None] * 4
    assert waits(ranks(same[1:3])) == [None] * 2


def test_the_straggler_needs_the_others_to_wait() -> None:
    def of(*durations: float, world: int | None = None) -> int | None:
        return ranks([rank(n, (time,), world=world or len(durations)) for n, time in enumerate(durations)]).straggler

    assert of(100.0, 20.0, 100.0) == 1
    assert of(100.0, 90.0, 100.0) is None  # 1 % of a step of 1000 us
    assert of(100.0, 20.0, 20.0) is None  # two come last
    assert of(100.0, 20.0, world=3) is None  # the third may be later
    assert ranks([rank(0, (9.0,)), rank(1, (90.0,))]).straggler is None  # how many there are is not known
    assert ranks([rank(n, (50.0 * n,), world=2, step_us=None) for n in (0, 1)]).straggler is None


def test_imbalance_is_of_the_slowest_rank() -> None:
    def of(*compute: float | None) -> float | None:
        found = [rank(n, (1.0,), world=len(compute), compute_us=time) for n, time in enumerate(compute)]
        return ranks(found).imbalance

    assert of(100.0, 100.0, 130.0, 70.0) == pytest.approx(0.3)
    assert of(100.0, None) is None and of(100.0) is None and of(0.0, 0.0) is None


def test_files_that_do_not_fit_are_told() -> None:
    found = ranks([rank(0, (10.0,), world=2, path="b"), rank(0, (70.0,), world=2, path="a"), rank(1, (30.0,), world=2)])
    assert [item.path for item in found.ranks] == ["a", "b", "rank1.json"]
    assert waits(found) == [40.0, None, 0.0]
    assert found.notes == ("more than one file says that it is rank 0: the first by path is compared",)

    found = ranks([rank(None, (10.0,), world=2, path="x"), rank(0, (70.0,), world=2), rank(1, (30.0,), world=2)])
    assert [item.rank for item in found.ranks] == [0, 1, None] and waits(found) == [40.0, 0.0, None]
    assert found.notes == ("1 of 3 files do not say which rank they are and are not compared",)

    mixed = ranks([rank(0, (10.0,), world=2), rank(1, (70.0,), world=8)])
    assert waits(mixed) == [None, None] and mixed.missing == () and mixed.imbalance is None
    assert mixed.notes == ("the files come from jobs of different sizes (2, 8 ranks): give one job at a time",)

    assert ranks([rank(0, (1.0,), world=1 << 62), rank(1, (1.0,), world=1 << 62)]).missing == ()
    assert ranks([]) == Ranks(ranks=())


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(1, 4))
def test_transfer_and_waiting_sum_to_the_communication(data: st.DataObject, count: int, collectives: int) -> None:
    times = st.lists(st.floats(0, 1e6), min_size=collectives, max_size=collectives)
    inputs = [rank(number, tuple(data.draw(times)), world=count) for number in range(count)]
    found = ranks(inputs)
    for item, given_ in zip(found.ranks, inputs, strict=True):
        assert item.transfer_us is not None and item.wait_us is not None
        assert item.transfer_us >= 0 and item.wait_us >= 0
        assert item.transfer_us + item.wait_us == pytest.approx(sum(given_.collectives[0].durations_us))
    assert len({item.transfer_us for item in found.ranks}) == 1
    for order in itertools.islice(itertools.permutations(inputs), 6):
        assert ranks(order) == found
