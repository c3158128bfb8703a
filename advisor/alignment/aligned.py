"""What an alignment of a region with its source is made of: bound expressions, branches, the region's statements."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from advisor.source import Source


@dataclass(eq=False)
class Miss(Exception):
    """Why a region could not be aligned or rewritten."""

    reason: str
    line: int | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Bound:
    """A source expression and the statement it is evaluated in."""

    expression: ast.expr
    statement: ast.stmt


@dataclass(frozen=True)
class Branch:
    """A condition that decided what was computed in this run; `taken` is the outcome of its test.

    `lost` is the line of code in the branch that did not run and that a replacement without a guard would lose; None
    where the other outcome only leaves the branch's own operations out.
    """

    at: ast.If | ast.IfExp
    statement: ast.stmt
    taken: bool
    lost: int | None

    @property
    def test(self) -> ast.expr:
        """The condition's expression."""
        return self.at.test


@dataclass(frozen=True)
class Guard:
    """The test under which all branches go as they did in this run, and where it must stand: before `first`.

    From `first` to the statement of the result every statement belongs to the region.
    """

    first: ast.stmt
    text: str


@dataclass
class Alignment:
    """The source of one region: `root` computes its result, `consumed` are statements only the region needs.

    `values` binds boundary nodes, `constants` non-tensor arguments by (node, argument position or name), `calls` the
    callee expression of every call walked through. A constant that cannot be spelled at the result, because it stands
    in a helper, is absent; one that reads an intermediate is in `left_out`. `branches` are the conditions between the
    first of these statements and the result, in the order of the source; `conditions` lists for a node (boundary or
    walked through) or a constant those it is under.
    """

    source: Source
    root: Bound
    values: dict[int, Bound] = field(default_factory=dict)
    constants: dict[tuple[int, int | str], Bound] = field(default_factory=dict)
    calls: dict[int, ast.expr] = field(default_factory=dict)
    consumed: list[ast.stmt] = field(default_factory=list)
    branches: tuple[Branch, ...] = ()
    conditions: dict[int | tuple[int, int | str], tuple[Branch, ...]] = field(default_factory=dict)
    guard: Guard | Miss | None = None
    left_out: dict[tuple[int, int | str], Bound] = field(default_factory=dict)

    @property
    def unran(self) -> tuple[Branch, ...]:
        """The branches whose other side holds code that did not run and that only a guard keeps."""
        return tuple(branch for branch in self.branches if branch.lost is not None)

    def guarded(self) -> Guard:
        """The guard of a rewrite that leaves what did not run as it is; raises `Miss` where there can be none."""
        if isinstance(self.guard, Miss):
            raise self.guard
        if self.guard is None:
            raise Miss("nothing here depends on a condition", self.root.statement.lineno)
        return self.guard


def outcome(source: Source, branch: Branch) -> str:
    """The test of a branch, negated where it was false in this run, as a condition that holds in this run."""
    return source.segment(branch.test) if branch.taken else negated(source, branch.test)


def negated(source: Source, test: ast.expr) -> str:
    """Source of the opposite of a test."""
    opposites = {ast.Is: "is not", ast.IsNot: "is", ast.Eq: "!=", ast.NotEq: "=="}
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return source.segment(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in opposites:
        left, right = source.segment(test.left), source.segment(test.comparators[0])
        return f"{left} {opposites[type(test.ops[0])]} {right}"
    text = source.segment(test)
    tight = isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return f"not {text}" if tight else f"not ({text})"
