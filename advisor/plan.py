"""Stage 5: turn findings into rewrites, in the order in which they are to be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from advisor.codemod import CannotEdit
from advisor.errors import RuleError
from advisor.model import Decline, Finding, RegionProof, Rewrite, Safety
from advisor.rule import Rule
from advisor.source import Source


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rewrites to try in order, and the findings that stay suggestions, each with its reason.

    `rejected` are rewrites whose region is not the same function, `proofs` what was compared of the others (by id).
    """

    rewrites: tuple[Rewrite, ...]
    suggestions: tuple[tuple[Finding, str], ...]
    errors: tuple[RuleError, ...] = ()
    rejected: tuple[tuple[Rewrite, str], ...] = ()
    proofs: Mapping[str, RegionProof] = field(default_factory=dict)


def plan(
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    read: Callable[[str], Source],
    allow: frozenset[Safety],
    named: frozenset[str] = frozenset(),
) -> Plan:
    """Order: starvation, precision, structure, compile, memory, communication, optimizer; then by what could be
    saved. `named` are the rules that were asked for by name."""
    rewrites: list[Rewrite] = []
    suggestions: list[tuple[Finding, str]] = []
    errors: list[RuleError] = []
    ordered = sorted(findings, key=lambda f: (rules[f.rule].order, -f.estimate.high_us, f.rule, str(f.span)))
    for finding in ordered:
        rule = rules[finding.rule]
        if rule.safety is Safety.SUGGEST:
            suggestions.append((finding, finding.values.get("not applied", "the rule only suggests")))
            continue
        if finding.library is not None:
            suggestions.append((finding, f"installed packages are never edited: {rule.in_library}"))
            continue
        try:
            result, others = _answers(rule, finding, read(finding.span.path))
        except CannotEdit as error:
            suggestions.append((finding, f"the source cannot be edited there: {error}"))
            continue
        except Exception as error:  # noqa: BLE001 - a rule that raises is reported by id, the others still count
            errors.append(RuleError.raised(rule.id, error))
            continue
        if isinstance(result, Decline):
            suggestions.append((finding, result.reason))
        elif rule.on_request and rule.id not in named:
            suggestions.append((finding, f"on request only: ask for it with --select {rule.id}"))
        elif result.safety is not Safety.EXACT and result.safety not in allow:
            suggestions.append((finding, f"changes {result.safety.value}: allow it with --allow {result.safety.value}"))
        elif others:
            group = result.group or result.id
            rewrites += [replace(rewrite, group=group) for rewrite in (result, *others)]
        else:
            rewrites.append(result)
    return Plan(rewrites=tuple(rewrites), suggestions=tuple(suggestions), errors=tuple(errors))


def _answers(rule: Rule, finding: Finding, source: Source) -> tuple[Rewrite | Decline, list[Rewrite]]:
    """What a rule makes of a finding, with the other forms as far as they can be written at this place."""
    result = rule.rewrite(finding, source)
    forms: list[Rewrite] = []
    with suppress(CannotEdit):  # the first form stands
        forms += rule.forms(finding, source)
    for given, kinds in ((result, (Rewrite, Decline)), *((form, (Rewrite,)) for form in forms)):
        if not isinstance(given, kinds):
            raise TypeError(f"it gave {given!r} where a rewrite is due")
    return result, forms
