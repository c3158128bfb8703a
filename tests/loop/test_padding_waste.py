"""Padding among the tokens of a batch: what shows it in recorded values, and when it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_loops import record

from advisor import registry, testing
from advisor.model import Decline, Finding, Graph

RULE = registry.load()[0]["padding-waste"].rule
EXAMPLE = RULE.examples[0]


def test_what_recorded_values_show() -> None:
    torch = pytest.importorskip("torch")
    from advisor.capture.annotate import padding_facts

    lengths = torch.tensor([[10], [4], [6], [2]])
    real = torch.arange(10) < lengths
    tokens = torch.arange(1, 11).repeat(4, 1)
    assert padding_facts(tokens.where(real, 0)) == {"padded": "0.4500", "padding": "0"}
    assert padding_facts(tokens.where(real, -100)) == {"padded": "0.4500", "padding": "-100"}
    assert padding_facts(real) == padding_facts(real.long()) == padding_facts(real.flip(1))
    assert padding_facts(real).items() >= {"zeros": "0.4500"}.items()
    assert padding_facts(~real).items() >= {"zeros": "0.5500"}.items()
    filled = torch.arange(9) < lengths.clamp(max=9)
    assert padding_facts(filled)["real"] == padding_facts(filled.flip(1))["real"] == "1"
    assert padding_facts(~filled)["real"] == padding_facts(~filled.flip(1))["real"] == "0"
    assert "real" not in padding_facts(filled[1:])  # every row ends in padding
    assert padding_facts(tokens) == {}
    assert padding_facts(torch.ones(4, 10, dtype=torch.long)) == {}
    assert padding_facts(torch.tensor([[1, 0, 1, 0, 1, 0, 0, 0, 1, 1]])) == {}  # no mask of a sequence
    last = tokens.clone()
    last[:, -1] = -100  # labels of the next token
    assert padding_facts(last) == {}
    last[0, 5:], last[1, 5:] = 7, 8  # rows that end each in another element
    assert padding_facts(last) == {}
    assert padding_facts(tokens.where(real, 0).float()) == {}
    assert padding_facts(tokens[:, :4].contiguous()) == {}


def with_facts(folder: Path, *masks: tuple[str, dict[str, str]]) -> list[Finding | Decline]:
    ctx, _ = testing.context_of(RULE, EXAMPLE.before, EXAMPLE.profile, folder)
    (graph,) = ctx.profile.graphs
    labels, linear = graph.nodes
    values = [
        replace(labels, index=2 + i, name=name, target=name, facts=facts) for i, (name, facts) in enumerate(masks)
    ]
    graphs = (Graph(index=graph.index, nodes=(replace(labels, facts={}), linear, *values), span=graph.span),)
    return list(RULE.match(replace(ctx, profile=replace(ctx.profile, graphs=graphs))))


@pytest.mark.parametrize(
    ("name", "facts", "share"),
    [
        ("L_kwargs_attention_mask_", {"zeros": "0.3000"}, "30%"),
        ("src_key_padding_mask", {"zeros": "0.7000"}, "30%"),
        ("src_key_padding_mask", {"zeros": "0.7000", "real": "0"}, "30%"),
        ("padding_mask", {"zeros": "0.3000", "real": "1"}, "30%"),
        ("p_3", {"padded": "0.2500", "padding": "0"}, "25%"),
    ],
)
def test_masks_and_ids(name: str, facts: dict[str, str], share: str, tmp_path: Path) -> None:
    (found,) = with_facts(tmp_path, (name, facts))
    assert isinstance(found, Finding) and found.message.startswith(share)


def test_the_surest_of_several_and_none(tmp_path: Path) -> None:
    labels = ("y", {"padded": "0.9000", "padding": "-100"})
    (found,) = with_facts(tmp_path, labels, ("attention_mask", {"zeros": "0.1000"}))
    assert isinstance(found, Decline) and found.reason.startswith("10%")
    (found,) = with_facts(tmp_path, labels, ("y2", {"padded": "0.1000", "padding": "-100"}))
    assert isinstance(found, Finding) and found.message.startswith("50%")
    assert with_facts(tmp_path, ("flags", {"zeros": "0.5000"})) == []
    assert with_facts(tmp_path, ("ids", {"padded": "0.0400", "padding": "0"})) == []
    assert with_facts(tmp_path, ("attn_mask", {"zeros": "0.4900", "keep": "causal", "real": "0"})) == []


def test_counts_are_no_tokens(tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULE, EXAMPLE.before, EXAMPLE.profile, tmp_path)
    (graph,) = ctx.profile.graphs
    labels, linear = graph.nodes
    counts = replace(labels, index=2, facts={"padded": "0.4000", "padding": "0"}, users=(3,))
    cast = replace(linear, index=3, target="method.float", dtype="float32")
    for nodes, answers in (((counts, cast), 0), ((replace(counts, users=()), cast), 1)):
        graphs = (replace(graph, nodes=(replace(labels, facts={}), linear, *nodes)),)
        assert len(list(RULE.match(replace(ctx, profile=replace(ctx.profile, graphs=graphs))))) == answers


SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 300))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    x = torch.randint(1, 300, (8, 64))
    y = x.masked_fill(torch.arange(64) >= torch.randint(2, {most}, (8, 1)), -100)
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_recorded_script(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    recorded = record(SCRIPT.replace("{most}", "40"), tmp_path)
    (found,) = RULE.match(replace(recorded.ctx, worth=0.0))
    assert isinstance(found, Finding)
    assert found.span.line == 10
    assert 0.0 < found.estimate.high_us < recorded.ctx.step_us
