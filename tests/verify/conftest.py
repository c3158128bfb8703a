"""Benches over the attention script and over scripts a test brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verify_bench import QUICK, SCRIPT, Bench

from advisor.verify.lab import Settings

MakeBench = Callable[..., Bench]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The attention script in float32 with dropout 0.1."""
    made = Bench(tmp_path_factory.mktemp("attention"), SCRIPT, settings=QUICK)
    with made.lab:
        yield made


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    """Benches over other scripts, closed at the end of the test."""
    made: list[Bench] = []

    def make(text: str, *argv: str, settings: Settings = QUICK, step_timeout: float = 60.0) -> Bench:
        made.append(Bench(tmp_path / str(len(made)), text, *argv, settings=settings, step_timeout=step_timeout))
        return made[-1]

    yield make
    for one in made:
        one.lab.close()
