"""A rule that looks for regions of the captured graphs and rewrites the lines that computed them."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from advisor import codemod
from advisor.alignment import align as alignment
from advisor.forms import compiled_form
from advisor.guarded import guarded_instead
from advisor.model import (
    Decline,
    Evidence,
    Finding,
    Form,
    Graph,
    Node,
    Place,
    Replacement,
    Rewrite,
    Span,
)
from advisor.patterns import NearMiss, Region
from advisor.patterns.shown_axes import unshown_axis
from advisor.rule import Context, Rule, tensor_bytes
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.buffers import dead_buffers
from advisor.usercode.draws import draws
from advisor.usercode.learned import maybe_tensor
from advisor.usercode.swallowed import check_swallowed

# operations whose arguments are sizes or selections, which the shapes of the inputs repeat
BY_THE_TENSORS = frozenset(
    "view reshape expand unflatten getitem getattr to split chunk full empty new_empty zeros new_zeros".split()
)


def is_fixed(source: Source, expression: ast.expr, said: frozenset[str] = frozenset(), depth: int = 3) -> bool:
    """Whether an expression has one value for every call: literals, constants of modules, names set once in the file,
    the sizes of tensors, and what is `said` elsewhere."""
    for node in ast.walk(expression):
        if not isinstance(node, ast.Name) or node.id in source.imports or node.id in ("float", "int"):
            continue
        parent = source.parents.get(node)
        if (isinstance(parent, ast.Attribute) and ast.unparse(parent) in said) or node.id in said:
            continue
        above = source.parents.get(parent) if parent is not None else None
        if isinstance(above, ast.expr) and re.fullmatch(
            rf"{node.id}\.(shape\[-?\d\]|size\(-?\d\))", ast.unparse(above)
        ):
            continue
        given = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == node.id and _stored(n)]
        statements = [s for s in source.tree.body if isinstance(s, ast.Assign) and s.targets[0] in given]
        if depth == 0 or len(given) != 1 or not statements:
            return False
        if not is_fixed(source, statements[0].value, said, depth - 1):
            return False
    return True


def _stored(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


@dataclass(frozen=True)
class Site:
    """One place in the source that computes a pattern, with every region of the graphs that it computed."""

    span: Span
    regions: tuple[Region, ...]
    alignment: alignment.Alignment
    cost_us: float
    graphs: tuple[Graph, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def consumed(self) -> tuple[Span, ...]:
        """The statements that only the region needs."""
        return tuple(self.alignment.source.span(s) for s in self.alignment.consumed)

    def text(self, node: int) -> str:
        """Source of the expression bound to a boundary node."""
        return self.alignment.source.segment(self.alignment.values[node].expression)

    def pairs(self, ctx: Context) -> list[tuple[Region, Graph]]:
        """Every region with the graph it lies in."""
        graphs = {g.index: g for g in ctx.graphs}
        return [(region, graphs[region.graph]) for region in self.regions]

    def replacement(
        self,
        template: str,
        constants: Mapping[str, tuple[str, Any]] | None = None,
        *,
        says_branches: bool = False,
        followed: frozenset[tuple[int, int | str]] = frozenset(),
        axes_followed: bool = False,
        **texts: str,
    ) -> Replacement:
        """The expression to stand here instead; every input of the region is a placeholder by its name.

        `constants` adds placeholders that are no tensors: name -> (text in the source, value as captured); `texts`
        overrides how an input is spelled. Where a condition decides what is computed, the expression stands under a
        guard, unless it says the conditions itself (`says_branches`). `followed` are constants (node, argument) that
        the rule itself has seen to follow the tensors, `axes_followed` tells this of the axes. Raises `align.Miss`
        where no guard can be put, and where the source allows another function than the one that was recorded.
        """
        given = constants or {}
        wanted = [name for name in codemod.PLACEHOLDER.findall(template) if name not in given and name not in texts]
        region = self.regions[0]
        self._check_dropped(region, frozenset(text for text, _ in given.values()), followed)
        if not axes_followed:
            self._check_axes(region)
        self._check_numbers(given)
        self._check_drawn_once(region, [name for name in wanted if wanted.count(name) > 1])
        mine = {name: self.text(region.inputs[name]) for name in wanted}
        return Replacement(
            template=template,
            texts={**mine, **texts, **{name: text for name, (text, _) in given.items()}},
            places=tuple(
                Place(graph=r.graph, root=r.root, inputs=dict(r.inputs), dropout=r.dropout) for r in self.regions
            ),
            constants={name: value for name, (_, value) in given.items()},
            guard=None if says_branches else self._guard(),
        )

    def _check_numbers(self, constants: Mapping[str, tuple[str, Any]]) -> None:
        """No number that is said again may be a tensor in another instance or call; raises `align.Miss`."""
        source, line = self.alignment.source, self.alignment.root.expression.lineno
        for text, value in constants.values():
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            spelled = ast.parse(f"({text})", mode="eval").body
            tensor = maybe_tensor(self.sources or (source,), source, spelled, line)
            if tensor is not None:
                raise alignment.Miss(f"`{' '.join(text.split())}` may be a tensor in another call: {tensor}")

    def _check_drawn_once(self, region: Region, repeated: Iterable[str]) -> None:
        """No input that is said several times may draw random numbers; raises `align.Miss`."""
        for name in repeated:
            expression = self.alignment.values[region.inputs[name]].expression
            if any(draws(self.alignment.source, expression)):
                text = self.text(region.inputs[name])
                raise alignment.Miss(f"`{text}` would draw random numbers several times", expression.lineno)

    def _check_axes(self, region: Region) -> None:
        """No axis may be another one for a tensor with more axes; raises `align.Miss`."""
        graph = next(g for g in self.graphs if g.index == region.graph)
        found = unshown_axis(self.alignment, graph, region)
        if found is not None:
            span = graph.nodes[found[0]].span
            raise alignment.Miss(found[1], span.line if span is not None else None)

    def _check_dropped(
        self, region: Region, spelled: frozenset[str], followed: frozenset[tuple[int, int | str]]
    ) -> None:
        """What the replacement does not say again must be fixed in the source; raises `align.Miss`.

        Sizes of views and dtypes are given by the tensors themselves.
        """
        said = {(node, position) for _, node, position in region.constants.values()}
        graph = next(g for g in self.graphs if g.index == region.graph)
        texts = frozenset(ast.unparse(b.expression) for key, b in self.alignment.constants.items() if key in said)
        for (node, position), bound in self.alignment.constants.items():
            given = (node, position) in said | followed or node in region.dropout
            given = given or position in ("dtype", "device", "inplace")
            if given or operation(graph.nodes[node]) in BY_THE_TENSORS:
                continue
            text = self.alignment.source.segment(bound.expression)
            if text not in spelled and not is_fixed(self.alignment.source, bound.expression, texts):
                text = " ".join(text.split())
                raise alignment.Miss(f"`{text}` may be something else in another call", bound.expression.lineno)

    def _guard(self) -> tuple[Span, str] | None:
        if not self.alignment.branches:
            return None
        guard = self.alignment.guarded()
        return self.alignment.source.span(guard.first), guard.text


class GraphRule(Rule):
    """A rule that looks for regions of the captured graphs and rewrites the lines that computed them."""

    needs: ClassVar[tuple[str, ...]] = ("steps", "graph", "links")
    order = 30
    title: ClassVar[str] = "use the fused operation"  # of the rewrite
    compiler_fuses: ClassVar[bool] = False  # nothing is left to do in a module that the script compiles

    def rewrite(self, finding: Finding, source: Source) -> Rewrite | Decline:
        """Put the finding's replacement in place of the expression and of the statements only that needed.

        A finding without one says in its value "not applied" why.
        """
        if finding.replacement is None:
            return self.decline(finding.span, finding.values["not applied"])
        return self.edit(finding, self.title, _edits(source, finding, finding.replacement))

    def forms(self, finding: Finding, source: Source) -> Iterator[Rewrite]:
        for form in finding.forms:
            if form.replacement is None:
                edits = codemod.decorated(source, finding.span.line, "torch.compile")
            else:
                edits = _edits(source, finding, form.replacement)
            found = replace(finding, replacement=form.replacement)
            yield replace(self.edit(found, form.title, edits), form=form.name, runs=(), avoids=())

    def search(self, graph: Graph) -> Iterator[Region | NearMiss]:
        """Every region of one graph, and what nearly is one; a rule that overrides `match` may do without."""
        raise NotImplementedError

    def describe(self, ctx: Context, graph: Graph, site: Site) -> Finding | Decline:
        """The finding for one place in the source; `site.regions[0]` lies in `graph`.

        A rule whose places need no alignment overrides `match` and does without.
        """
        raise NotImplementedError

    def memory_bound(
        self,
        ctx: Context,
        site: Site,
        message: str,
        cited: str,
        *,
        bindings: Mapping[str, Span] | None = None,
        values: Mapping[str, str] | None = None,
        replacement: Replacement | None = None,
    ) -> Finding:
        """The finding for a region whose fused form only moves its input "x": twice forward, three times backward."""
        traffic = sum(5 * tensor_bytes(graph.nodes[region.inputs["x"]]) for region, graph in site.pairs(ctx))
        floor = ctx.floor_us(0.0, traffic, None)
        return self.finding(
            site.span,
            message,
            cited_us=site.cost_us,
            high_us=site.cost_us - floor,
            evidence=(
                Evidence(what=cited, value=round(site.cost_us, 1), unit="us"),
                Evidence(what="share of the step", value=round(site.cost_us / ctx.step_us, 4), unit="share"),
                Evidence(what="floor: two passes forward, three backward", value=round(floor, 1), unit="us"),
                Evidence(what="calls of this code per step", value=len(site.regions), unit="calls"),
            ),
            bindings=bindings,
            values=values,
            consumed=site.consumed,
            replacement=replacement,
        )

    def match(self, ctx: Context) -> Iterator[Finding | Decline]:
        """Group what `search` finds by source position; an edit must suit every call of the code."""
        places: dict[tuple[str, int, int], list[Region]] = {}
        library: dict[str, list[Region]] = {}
        missed: dict[tuple[str, int, str], NearMiss] = {}
        graphs = {g.index: g for g in ctx.graphs}
        for graph in ctx.graphs:
            for found in self.search(graph):
                node = graph.nodes[found.root if isinstance(found, Region) else found.node]
                span = node.span
                if isinstance(found, NearMiss):
                    missed.setdefault((span.path, span.line, found.reason) if span else ("", 0, found.reason), found)
                elif span is None:
                    library.setdefault(_library_place(node), []).append(found)
                else:
                    places.setdefault((span.path, span.line, span.column), []).append(found)
        for _, regions in sorted(places.items()):
            yield self._place(ctx, graphs, regions)
        for place, regions in sorted(library.items()):
            yield self._in_library(ctx, graphs, place, regions)
        for _, near in sorted(missed.items()):
            yield self.decline(graphs[near.graph].nodes[near.node].span, near.reason)

    def check_form(self, ctx: Context, aligned: alignment.Alignment, region: Region) -> None:
        """Raise `align.Miss` where a region's other form (`Region.alternatives`) would suit the source better."""

    def _place(self, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]) -> Finding | Decline:
        first = regions[0]
        graph = graphs[first.graph]
        span = graph.nodes[first.root].span
        assert span is not None
        other = _unmatched(graphs, regions, span)
        if other is not None:
            return self.decline(span, f"the same code also computes something else: {other}")
        cost = _cost_of(ctx, regions)
        if cost is None:
            return self.decline(span, UNLINKED, needs=("links",))
        share = cost / ctx.step_us
        if share < ctx.gate(self):
            return self.decline(span, f"it takes {share:.1%} of the step")
        aligned, regions = _aligned(self, ctx, graphs, regions)
        if isinstance(aligned, alignment.Miss):
            return self._unsafe(span, aligned)
        cost = _cost_of(ctx, regions) or cost
        site = Site(
            aligned.source.span(aligned.root.expression), tuple(regions), aligned, cost, ctx.graphs, ctx.sources
        )
        if self.compiler_fuses and "compiled" in ctx.profile.missing:
            return self.decline(site.span, COMPILED)
        try:
            found = self.describe(ctx, graph, site)
            if isinstance(found, Finding) and found.replacement is not None:
                check_swallowed(ctx.sources, aligned, regions[0], graph)
                return self._completed(ctx, graph, site, found, found.replacement)
        except alignment.Miss as miss:  # a condition that no guard can hold, a module that may be another
            return self._unsafe(span, miss)
        return found

    def _completed(self, ctx: Context, graph: Graph, site: Site, finding: Finding, plain: Replacement) -> Finding:
        """A finding with the buffers that nothing reads once it is rewritten, and with its other forms."""
        return replace(
            finding,
            consumed=(*finding.consumed, *_dead(ctx, site, plain)),
            forms=(*self.kernels(ctx, graph, site, plain), *self._compiled(ctx, site)),
        )

    def kernels(self, ctx: Context, graph: Graph, site: Site, plain: Replacement) -> Iterator[Form]:
        """Kernels of other packages that could stand in place of `plain`, the first form, where they are installed."""
        return iter(())

    def _compiled(self, ctx: Context, site: Site) -> Iterator[Form]:
        """The form that leaves the region to the compiler, where that is what a GPU gains most from."""
        if self.compiler_fuses and ctx.profile.hardware.kind == "cuda":
            form = compiled_form(ctx.sources, site.alignment.source, site.span.line, ctx.graphs)
            if form is not None:
                yield form

    def _unsafe(self, span: Span, miss: alignment.Miss) -> Decline:
        where = f" (line {miss.line})" if miss.line else ""
        return self.decline(span, f"the source cannot be rewritten safely: {miss.reason}{where}")

    def _in_library(
        self, ctx: Context, graphs: Mapping[int, Graph], place: str, regions: list[Region]
    ) -> Finding | Decline:
        """A finding at the user's call of the library; it is shown, never rewritten."""
        span = graphs[regions[0].graph].span
        cost = _cost_of(ctx, regions)
        if cost is None:
            return self.decline(span, f"{place}: {UNLINKED}", needs=("links",))
        share = cost / ctx.step_us
        if span is None or share < ctx.gate(self):
            return self.decline(span, f"{place} takes {share:.1%} of the step")
        return self.finding(
            span,
            f"{self.id} in {place}",
            cited_us=cost,
            high_us=cost,
            evidence=(
                Evidence(what="time of this code per step", value=round(cost, 1), unit="us"),
                Evidence(what="share of the step", value=round(share, 4), unit="share"),
                Evidence(what="calls of this code per step", value=len(regions), unit="calls"),
            ),
            library=place,
        )


def _aligned(
    rule: GraphRule, ctx: Context, graphs: Mapping[int, Graph], regions: list[Region]
) -> tuple[alignment.Alignment | alignment.Miss, list[Region]]:
    """The first form of the regions that the source suits, with the regions in that form; else the first miss."""
    missed: alignment.Miss | None = None
    span = graphs[regions[0].graph].nodes[regions[0].root].span
    assert span is not None
    for turn in range(1 + min(len(r.alternatives) for r in regions)):
        form = [r if turn == 0 else r.alternatives[turn - 1] for r in regions]
        places = [(graphs[r.graph], r.root, {**r.inputs, **r.scalars}) for r in form]
        try:
            aligned = alignment.align_all(ctx.read(span.path), places, branches=True, read=ctx.read)
            rule.check_form(ctx, aligned, form[0])
            return aligned, form
        except alignment.Miss as miss:
            missed = missed or miss
    assert missed is not None
    return missed, regions


def _dead(ctx: Context, site: Site, chosen: Replacement) -> tuple[Span, ...]:
    """The statements that register buffers which only the replaced code reads."""
    source, inputs = site.alignment.source, site.regions[0].inputs
    spelled = [inputs[name] for name in codemod.PLACEHOLDER.findall(chosen.template) if name in inputs]
    found = dead_buffers(source, site.alignment, spelled, ctx.sources)
    return tuple(b.span for b in found if not any(f"self.{b.name}" in text for text in chosen.texts.values()))


def _edits(source: Source, finding: Finding, chosen: Replacement) -> list[codemod.Edit]:
    """Put a replacement where the finding's expression stands, under its guard where it has one."""
    imports = [codemod.add_import(source, statement) for statement in chosen.imports]
    if chosen.guard is not None:
        first, test = chosen.guard
        return [*guarded_instead(source, finding.span, chosen.template, chosen.texts, first, test), *imports]
    text = codemod.expression_instead(source, finding.span, chosen.template, chosen.texts, finding.consumed)
    return [*text, *imports]


COMPILED = "inside a compiled region: the compiler fuses it already"
UNLINKED = "cannot tell: no measured time could be linked to it"


def _cost_of(ctx: Context, regions: Iterable[Region]) -> float | None:
    """Measured time per step of several regions, None where none could be linked."""
    known = [cost for r in regions if (cost := ctx.cost_us(r.graph, r.inner)) is not None]
    return sum(known) if known else None


def _library_place(node: Node) -> str:
    """The innermost frame as package file and line: "transformers/models/llama/modeling_llama.py:199"."""
    if not node.frames:
        return "code without a recorded position"
    frame = node.frames[-1]
    path = frame.path.replace("\\", "/")
    return f"{path.rsplit('-packages/', 1)[-1]}:{frame.line}"


def _unmatched(graphs: Mapping[int, Graph], regions: list[Region], span: Span) -> str | None:
    """A node computed by the same expression that belongs to no matched region."""
    matched = {(r.graph, index) for r in regions for index in r.inner}
    kinds = {graphs[r.graph].nodes[r.root].target for r in regions}
    here = (span.path, span.line, span.column, span.end_line, span.end_column)
    for graph in graphs.values():
        for node in itertools.chain(*(graph.by_target.get(kind, ()) for kind in sorted(kinds))):
            place = node.span
            if place is None or (graph.index, node.index) in matched:
                continue
            if (place.path, place.line, place.column, place.end_line, place.end_column) == here:
                return f"`{node.name}` in module {node.module or 'of the script'}"
    return None
