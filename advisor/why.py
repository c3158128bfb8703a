"""Why there is or is no finding at a line: what every rule made of the graph nodes that the line computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.graphrule import GraphRule
from advisor.match import Matches
from advisor.model import Decline, Explanation, Finding, Graph, Looked, Node, Profile, Span
from advisor.patterns import NearMiss, Region
from advisor.rule import Rule

NEAR = 3  # lines between the asked line and the start of what is told


def explain(profile: Profile, rules: Sequence[Rule], matches: Matches, path: str, line: int) -> Explanation:
    """Every finding, decline and near miss at or near a line of a file, and what was recorded there.

    Near is a span that contains the line or starts within three lines of it.
    """
    every = [
        *_told(matches.findings, path),
        *_told(matches.declines, path),
        *(told for rule in sorted(rules, key=lambda r: r.id) for told in _searched(profile, rule, path, line)),
    ]
    looked = [told for span, told in every if _near(span, path, line)]
    spans = [(node, node.span) for graph in profile.graphs if graph.training for node in graph.nodes if node.span]
    lines = {span.line for _, span in spans if span.path == path}
    closest = min(every, key=lambda pair: (abs(pair[0].line - line), pair[0].line), default=None)
    return Explanation(
        path=path,
        line=line,
        looked=tuple(dict.fromkeys(looked)),
        recorded=tuple(dict.fromkeys(_seen(node) for node, span in spans if _on_line(span, path, line))),
        nearest=None if line in lines else min(lines, key=lambda other: (abs(other - line), other), default=None),
        closest=None if looked or closest is None else closest[1],
        missing=profile.missing,
    )


def _told(results: Sequence[Finding | Decline], path: str) -> Iterator[tuple[Span, Looked]]:
    """What rules said of places in a file, with the places."""
    for result in results:
        span = result.span
        if span is None or span.path != path:
            continue
        finding = isinstance(result, Finding)
        yield (
            span,
            Looked(
                rule=result.rule,
                kind="finding" if finding else "decline",
                path=span.path,
                line=span.line,
                reason=result.message if isinstance(result, Finding) else result.reason,
            ),
        )


def _searched(profile: Profile, rule: Rule, path: str, line: int) -> Iterator[tuple[Span, Looked]]:
    """What a graph rule's own search says of nodes in the file, before costs and source are looked at.

    The place is that of the node where the match ends or stopped, or of another of its nodes where that is closer.
    """
    if not isinstance(rule, GraphRule):
        return
    for graph in profile.graphs:
        for found in _found(rule, graph) if graph.training else ():
            node = graph.nodes[found.root if isinstance(found, Region) else found.node]
            inner = sorted(found.inner) if isinstance(found, Region) else []
            spans = [s for index in (node.index, *inner) for s in (graph.nodes[index].span, *graph.nodes[index].frames)]
            places = [span for span in spans if span is not None and span.path == path]
            if not places:
                continue
            place = min(places, key=lambda span: abs(span.line - line))
            missed = isinstance(found, NearMiss)
            yield (
                place,
                Looked(
                    rule=rule.id,
                    kind="near miss" if missed else "region",
                    path=place.path,
                    line=place.line,
                    reason=found.reason if isinstance(found, NearMiss) else "the pattern matches; it ends in this node",
                    node=node.name,
                    seen=_seen(node),
                ),
            )


def _found(rule: GraphRule, graph: Graph) -> list[Region | NearMiss]:
    try:
        return list(rule.search(graph))
    except Exception:  # noqa: BLE001 - matching has reported the rule by id already
        return []


def _near(span: Span, path: str, line: int) -> bool:
    return span.path == path and (span.line <= line <= (span.end_line or span.line) or abs(span.line - line) <= NEAR)


def _on_line(span: Span | None, path: str, line: int) -> bool:
    return span is not None and span.path == path and span.line <= line <= (span.end_line or span.line)


def _seen(node: Node) -> str:
    """A node as one line: `att = method.softmax (2, 4, 32, 32) float32 in blocks.0.attn`."""
    shape = f" {node.shape}" if node.shape is not None else ""
    dtype = f" {node.dtype}" if node.dtype is not None else ""
    module = f" in {node.module}" if node.module else ""
    return f"{node.name} = {node.target}{shape}{dtype}{module}"
