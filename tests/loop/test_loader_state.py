"""What a run sees of a loader: generators, open files, samplers that count, and odd batches that disturb nothing."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from advisor.capture.builds import Builds
from advisor.capture.fetches import Fetches
from advisor.capture.hooks import LoaderRecord

GENERATOR = random.Random(0)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2), index


class Noisy(Rows):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(self.draw())), index


class Holder:
    def __init__(self, draw: Any) -> None:
        self.steps = [draw]

    def __call__(self) -> float:
        return float(self.steps[0]())


class Global(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), GENERATOR.random()), index


class Reader(Rows):
    def __init__(self, file: Any) -> None:
        self.file = file


class Counting:
    def __init__(self) -> None:
        self.consumed = 0

    def __iter__(self) -> Any:
        for index in range(64):
            self.consumed += 1
            yield index

    def __len__(self) -> int:
        return 64


class Batch:
    """A batch with a field that is named like the method of a mapping."""

    def __init__(self, rows: list[Any]) -> None:
        self.items, self.x = [1], torch.stack([row[0] for row in rows])


def facts(dataset: Any, batches: int = 3, **arguments: Any) -> dict[str, Any]:
    loader: Any = DataLoader(dataset, batch_size=4, **arguments)
    record, fetches, iterator = LoaderRecord(None, [], loader), Fetches(), iter(loader)
    for _ in range(batches):
        fetches.fetch(record, iterator, iterator.__next__)
    return record.facts


@pytest.mark.parametrize(
    "dataset",
    [
        Noisy(np.random.default_rng(0).random),
        Noisy(Holder(random.Random(0).random)),
        Noisy(functools.partial(torch.rand, (), generator=torch.Generator())),
        Global(),
    ],
    ids=["numpy", "held deeper", "torch", "global"],
)
def test_a_generator_of_its_own_is_data(dataset: Any) -> None:
    assert facts(dataset).get("changed_by_fetch")


def test_a_dataset_that_only_reads(tmp_path: Path) -> None:
    assert not {"changed_by_fetch", "changed_by_loop", "sampler_moves", "handles"} & set(facts(Rows(), shuffle=True))
    (tmp_path / "rows").write_text("1")
    with open(tmp_path / "rows") as file:
        assert facts(Reader(file))["handles"] == ["open file"]
    assert "handles" not in facts(Reader(file))  # it is closed
    assert facts(Reader(iter([1])))["handles"] == ["list_iterator"]
    assert facts(Reader(torch.device("cuda", 0)))["handles"] == ["something on a GPU"]


def test_a_sampler_that_counts_would_run_ahead() -> None:
    assert facts(Rows(), sampler=Counting())["sampler_moves"]


def test_a_batch_that_looks_like_a_mapping() -> None:
    assert facts(Rows(), collate_fn=Batch)["batch_bytes"] == 0


def test_the_old_classes_can_be_named_while_calls_are_noted() -> None:
    builds, known, original = Builds(), torch.FloatTensor, torch.tensor
    with builds.noting():
        assert torch.ones(2, dtype=torch.float64).type(torch.FloatTensor).dtype == torch.float32
        assert torch.FloatTensor == known
        assert isinstance(torch.ones(2), torch.FloatTensor)
        with builds.noting():
            assert torch.tensor is not original
        assert torch.tensor is not original
    assert torch.tensor is original
    assert torch.FloatTensor is known
    assert "type" not in vars(torch.Tensor)
