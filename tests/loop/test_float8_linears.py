"""Float8 training of large linear layers: only on request, and only in front of the call that compiles the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor import codemod, registry, testing
from advisor.model import Decline, Finding, Rewrite, Safety
from advisor.plan import plan

RULE = registry.load()[0]["float8-linears"].rule
EXAMPLE = RULE.examples[0]
PLAIN = "model = torch.compile(model)\n"


def said(folder: Path, compiled: str = PLAIN, **parts: Any) -> Finding | Decline | Rewrite:
    text = EXAMPLE.before.replace(PLAIN, compiled)
    ctx, source = testing.context_of(RULE, text, replace(EXAMPLE.profile, **parts), folder)
    (found,) = RULE.match(ctx)
    return RULE.rewrite(found, source) if isinstance(found, Finding) else found


@pytest.mark.parametrize(
    ("compiled", "model"),
    [
        (PLAIN, "model"),
        ("model = torch.compile(net, mode='max-autotune')\n", "net"),
        ("model.compile()\n", "model"),
        ("for block in model.blocks:\n    block.compile()\n", "model"),
    ],
)
def test_in_front_of_the_call_that_compiles(compiled: str, model: str, tmp_path: Path) -> None:
    rewrite = said(tmp_path, compiled)
    assert isinstance(rewrite, Rewrite)
    ctx, source = testing.context_of(RULE, EXAMPLE.before.replace(PLAIN, compiled), EXAMPLE.profile, tmp_path)
    text = codemod.apply(source, rewrite.edits)
    compile(text, "train.py", "exec")
    before, _, behind = text.partition("convert_to_float8_training(\n")
    assert behind.startswith(f"    {model},\n") and compiled in behind
    assert "from torchao.float8 import convert_to_float8_training\n" in before
    assert ctx.profile.environment.packages == {"torchao": "0.18.0"}


@pytest.mark.parametrize(
    "compiled",
    [
        "if args.compile:\n    model = torch.compile(model)\n",
        "model = torch.compile(GPT())\n",
        "for layer in self.net.layers:\n    layer.compile()\n",
        "model.inner.compile()\n",
        "model = DDP(model)\nmodel = torch.compile(model)\n",
        "model = torch.compile(model)\nother = torch.compile(other)\n",
    ],
)
def test_what_is_told(compiled: str, tmp_path: Path) -> None:
    text = EXAMPLE.before.replace(PLAIN, compiled)
    ctx, source = testing.context_of(RULE, text, EXAMPLE.profile, tmp_path)
    found = next(iter(RULE.match(ctx)))
    assert isinstance(found, Finding)
    assert isinstance(RULE.rewrite(found, source), Decline)


def test_an_odd_size_and_another_precision(tmp_path: Path) -> None:
    for parts in ({"sizes": ((16384, 4096), (4096, 4100))}, {"sizes": ((512, 4096), (4096, 4096))}):
        answer = said(tmp_path, **parts)
        assert isinstance(answer, Decline) and "0.0% of the step" in answer.reason
    small = (("aten::mm", "bfloat16", 100.0),) * 15
    answer = said(tmp_path, products=small)
    assert isinstance(answer, Decline) and "15.0% of the step" in answer.reason
    floats = replace(EXAMPLE.profile, products=(("aten::mm", "float32", 400.0),) * 15)
    ctx, _ = testing.context_of(RULE, EXAMPLE.before, floats, tmp_path)
    assert list(RULE.match(ctx)) == []


def test_tried_only_where_it_is_asked_for_by_name(tmp_path: Path) -> None:
    ctx, source = testing.context_of(RULE, EXAMPLE.before, EXAMPLE.profile, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Finding)
    given = [found], {RULE.id: RULE}, lambda _: source, frozenset({Safety.PRECISION})
    made = plan(*given)
    assert not made.rewrites and "--select float8-linears" in made.suggestions[0][1]
    assert len(plan(*given, frozenset({RULE.id})).rewrites) == 1
