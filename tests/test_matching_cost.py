"""What matching costs: the recorded graph of nano_gpt on an H200, repeated, with all rules."""

from __future__ import annotations

import functools
import gzip
from dataclasses import replace
from pathlib import Path

import pytest
from costs import processor_s, repeated, slowness
from profiles import GPU, blank

from advisor import match, registry
from advisor.ingest.graph import read_graphs
from advisor.model import Graph, NodeCost, Profile
from advisor.rule import Rule
from advisor.source import Source

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "samples" / "nano_gpt" / "h200" / "graph.json.gz"
RULES = [loaded.rule for loaded in registry.load()[0].values()]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    path.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    (found,), _ = read_graphs(path, ROOT)
    return found


def profile(graph: Graph, nodes: int) -> Profile:
    """Copies of the graph in which every node takes two microseconds."""
    large, _ = repeated(graph, nodes)
    costs = tuple(
        NodeCost(graph=0, node=n.index, forward_us=1.0, backward_us=1.0, launches=1.0, provenance="made up")
        for n in large.nodes
    )
    made = blank(GPU, graphs=(replace(large, index=0),), costs=costs)
    return replace(made, step_us=(2.0 * len(large.nodes),) * 3)


def seconds(measured: Profile, rules: list[Rule]) -> float:
    """Processor time of matching, the sources read anew each time."""

    def work() -> None:
        read = functools.lru_cache(maxsize=None)(functools.partial(Source.read, ROOT))
        found = match.match(match.context(measured, read, 0.0), rules)
        assert not found.errors

    return processor_s(work)


def test_ten_thousand_nodes_with_all_rules_take_under_two_seconds(graph: Graph) -> None:
    large = profile(graph, 10_000)
    found = match.match(match.context(large, functools.partial(Source.read, ROOT), 0.0), RULES)
    assert {"naive-attention", "unfused-gelu", "unfused-layernorm"} <= {f.rule for f in found.findings}
    assert seconds(large, RULES) < 2.0 * slowness()


def test_the_cost_of_all_rules_grows_with_the_nodes_alone(graph: Graph) -> None:
    assert seconds(profile(graph, 10_000), RULES) < 6 * seconds(profile(graph, 2_500), RULES)


def test_rules_do_not_make_each_other_slower(graph: Graph) -> None:
    measured = profile(graph, 5_000)
    assert seconds(measured, RULES) < 1.25 * sum(seconds(measured, [rule]) for rule in RULES)
