"""Every rule against the contract of advisor.testing: examples, page, estimate, needs, second run."""

from __future__ import annotations

import pytest

from advisor import registry, skeleton, testing

LOADED, ERRORS = registry.load()
EXAMPLES = [(name, number) for name, item in LOADED.items() for number in range(len(item.rule.examples))]


def test_every_rule_loads() -> None:
    assert not ERRORS
    assert {"naive-attention", "unfused-layernorm", "unfused-gelu", "optimizer-not-fused", "dataloader-bound"} <= set(
        LOADED
    )


@pytest.mark.parametrize("name", LOADED)
def test_the_file_name_is_the_id(name: str) -> None:
    assert type(LOADED[name].rule).__module__ == f"advisor.rules.{name.replace('-', '_')}"


@pytest.mark.parametrize("name", LOADED)
def test_the_page_has_its_headings_and_both_kinds_of_example(name: str) -> None:
    item = LOADED[name]
    assert not [h for h in registry.HEADINGS if f"## {h}" not in item.page]
    assert skeleton.FILL_IN not in item.page
    assert {example.after is None for example in item.rule.examples} == {True, False}


@pytest.mark.parametrize(("name", "number"), EXAMPLES)
def test_example(name: str, number: int) -> None:
    rule = LOADED[name].rule
    testing.run_example(rule, rule.examples[number], f"{name} example {number}")
