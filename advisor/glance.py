"""What a source file shows without being run: patterns that are certain from the syntax alone.

For scripts that cannot run here. Nothing of this is measured, so it is told and never applied, and only what needs no
guess is told: every operation of the pattern is visible in one function, no intermediate is used elsewhere, and the
code is reachable from the script.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from advisor.errors import RuleError
from advisor.glancing import attentions, elementwise, norms
from advisor.model import Graph, Span
from advisor.rule import Rule
from advisor.semantics import Array, erf, gelu_tanh, layer_norm
from advisor.source import Source
from advisor.usercode.sourcegraph import function_graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """A pattern that the source alone shows for certain; nothing was measured."""

    span: Span
    message: str

    def fingerprint(self, rule: str) -> str:
        """A name that stays when lines move."""
        text = f"{rule}\0{self.span.path}\0{self.span.function}\0{self.message}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@runtime_checkable
class Glancing(Protocol):
    """A rule that can tell something from the source alone; most can not."""

    def glance(self, source: Source) -> Iterator[Glance]:
        """What the source shows for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How a pattern is searched, what is said of it, and the names of fused forms of it.

    Code beside a fused form (`if self.fused: ... else: ...`) may be the branch that never runs: a class or function
    with one of `fused` in it is left alone, with `whole_file` a file.
    """

    search: Callable[[Graph], Iterator[int]]
    message: str
    fused: frozenset[str]
    whole_file: bool = False


def _gelu_erf(x: Array) -> Array:
    """GELU (Hendrycks and Gimpel 2016): x Phi(x), with the normal distribution's Phi by the error function."""
    return np.asarray(0.5 * x * (1.0 + erf(x / np.sqrt(2.0))))


def _rms_norm(x: Array, eps: float) -> Array:
    """RMSNorm over the last axis without a weight (Zhang and Sennrich 2019)."""
    return np.asarray(x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps))


KINDS: Mapping[str, _Kind] = {
    "attention": _Kind(
        search=attentions,
        message="softmax attention is written out: scaled_dot_product_attention computes it without the score matrix",
        fused=frozenset({"scaled_dot_product_attention", "flash_attn", "memory_efficient_attention", "flex_attention"}),
        whole_file=True,
    ),
    "layernorm": _Kind(
        search=lambda graph: norms(graph, lambda x, eps: layer_norm(x, None, None, eps)),
        message="LayerNorm is written out: F.layer_norm computes it in one pass",
        fused=frozenset({"layer_norm", "LayerNorm"}),
    ),
    "rmsnorm": _Kind(
        search=lambda graph: norms(graph, _rms_norm),
        message="RMSNorm is written out: F.rms_norm computes it in one pass",
        fused=frozenset({"rms_norm", "rmsnorm_func", "FusedRMSNorm"}),
    ),
    "gelu": _Kind(
        search=lambda graph: elementwise(graph, {"tanh": gelu_tanh, "erf": _gelu_erf}),
        message="GELU is written out: F.gelu computes it in one pass",
        fused=frozenset(
            {
                "gelu",
            }
        ),
    ),
}


def glances(source: Source, kind: str) -> Iterator[Glance]:
    """Every place of a file that shows a pattern of KINDS for certain, in the order of the file.

    Raises SourceError for a file that cannot be parsed, KeyError for a kind that is not in the table.
    """
    sought = KINDS[kind]
    if sought.whole_file and _mentions(source.tree, sought.fused):
        return
    places = [
        (node.lineno, node.end_lineno or 0) for node in _reached(source.tree) if not _mentions(node, sought.fused)
    ]
    found: set[Span] = set()
    for graph in function_graphs(source):
        for index in sought.search(graph):
            span = graph.nodes[index].span
            if span is not None and any(first <= span.line <= last for first, last in places):
                found.add(span)
    for span in sorted(found, key=lambda s: (s.line, s.column)):
        yield Glance(span=span, message=sought.message)


def look(rules: Mapping[str, Rule], source: Source) -> tuple[list[tuple[str, Glance]], tuple[RuleError, ...]]:
    """What the rules see in a source, as (rule id, glance), and the errors of rules that raised."""
    found: list[tuple[str, Glance]] = []
    errors: list[RuleError] = []
    for name, rule in sorted(rules.items()):
        if not isinstance(rule, Glancing):
            continue
        try:
            found += [(name, seen) for seen in rule.glance(source)]
        except Exception as error:  # noqa: BLE001 - a rule that raises is reported by id, the others still count
            errors.append(RuleError.raised(name, error))
    return found, tuple(errors)


# --------------------------------------------------------------------------------------------------------- reachability

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _mentions(tree: ast.AST, names: frozenset[str]) -> bool:
    """Whether a tree takes one of the names from a module or an object, imports it, or asks for it by its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
        if isinstance(node, ast.alias) and not names.isdisjoint(node.name.split(".")):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            return True
    return False


def _reached(tree: ast.Module) -> list[Definition]:
    """The top-level definitions that the script uses, directly or through others.

    A file whose own statements use none of its definitions is a library: all of it may be used.
    """
    defined = {node.name: node for node in tree.body if isinstance(node, Definition)}
    pending = [name for node in tree.body if not isinstance(node, Definition) for name in _used(node, defined)]
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += _used(defined[name], defined)
    return [node for name, node in defined.items() if name in reached or not reached]


def _used(tree: ast.AST, defined: Mapping[str, Definition]) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in defined]
