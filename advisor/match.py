"""Stage 4: ask every rule about the profile and collect findings, declines and the errors of rules that raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from advisor.errors import RuleError
from advisor.model import Decline, Finding, Profile, Rewrite, Safety
from advisor.rule import Context, Rule
from advisor.source import Source

ALIKE = 0.8  # of a step: what is left when the largest finding is taken out, from which gates stay as they are
LEAST = 0.02


@dataclass(frozen=True, kw_only=True)
class Matches:
    """What the rules said, in the order of rule id and place."""

    findings: tuple[Finding, ...]
    declines: tuple[Decline, ...]
    errors: tuple[RuleError, ...]


def context(
    profile: Profile,
    read: Callable[[str], Source],
    worth: float | None = None,
    script: str | None = None,
    files_in: Callable[[str], tuple[str, ...]] = lambda folder: (),
) -> Context:
    """The read-only view the rules get."""
    return Context(profile, read, worth, {(c.graph, c.node): c for c in profile.costs}, script, files_in)


def available(profile: Profile) -> frozenset[str]:
    """What the profile holds, in the words rules use for their needs."""
    present = {
        "steps": bool(profile.step_us),
        "kineto": bool(len(profile.operators)) and "trace" not in profile.missing,
        "links": bool(profile.costs) and "trace" not in profile.missing,
        "graph": bool(profile.graphs),
        "optimizers": bool(profile.optimizers),
        "loaders": bool(profile.loaders),
        "calls": bool(profile.calls),
        "gpu": profile.hardware.kind == "cuda",
    }
    return frozenset(name for name, there in present.items() if there and name not in profile.missing)


def match(
    ctx: Context, rules: Sequence[Rule], allow: frozenset[Safety] = frozenset({Safety.NUMERICS, Safety.PRECISION})
) -> Matches:
    """Run the rules; a rule that raises is reported by id and the others are kept.

    Where one finding that can be applied takes most of a step, what is small beside it is large without it: an
    optimizer beside products in float32, the copies of batches that the device waits for. The rules are asked once
    more then, with shares of the step that this finding leaves as their gates.
    """
    found = _asked(ctx, rules)
    if ctx.worth is not None:
        return found
    largest = _largest(ctx, found.findings, rules, allow)
    if largest is None:
        return found
    left = 1.0 - largest.estimate.high_us / ctx.step_us
    compiles = next(rule.compiles for rule in rules if rule.id == largest.rule)
    return _asked(replace(ctx, left=max(left, LEAST), largest=largest.rule, left_compiles=compiles), rules)


def _largest(
    ctx: Context, findings: Sequence[Finding], rules: Sequence[Rule], allow: frozenset[Safety]
) -> Finding | None:
    """The largest finding that can be applied, where it leaves a step that differs."""
    by_id = {rule.id: rule for rule in rules}
    for finding in sorted(findings, key=lambda f: -f.estimate.high_us):
        rule = by_id[finding.rule]
        if 1.0 - finding.estimate.high_us / ctx.step_us > ALIKE:
            return None
        if rule.on_request or finding.library is not None:
            continue
        try:
            result = rule.rewrite(finding, ctx.read(finding.span.path))
        except Exception:  # noqa: BLE001 - the plan asks again, and reports a rule that raises
            continue
        if isinstance(result, Rewrite) and result.safety in {Safety.EXACT, *allow}:
            return finding
    return None


def _asked(ctx: Context, rules: Sequence[Rule]) -> Matches:
    findings: list[Finding] = []
    declines: list[Decline] = []
    errors: list[RuleError] = []
    held = available(ctx.profile)
    for rule in sorted(rules, key=lambda r: r.id):
        absent = tuple(need for need in rule.needs if need not in held)
        if absent:
            declines.append(_cannot_tell(ctx.profile, rule, absent))
            continue
        try:
            results = list(rule.match(ctx))
        except Exception as error:  # noqa: BLE001 - a rule that raises is reported by id, the others still count
            errors.append(RuleError.raised(rule.id, error))
            continue
        findings += [r for r in results if isinstance(r, Finding)]
        declines += [r for r in results if isinstance(r, Decline)]
    return Matches(findings=tuple(findings), declines=tuple(declines), errors=tuple(errors))


def _cannot_tell(profile: Profile, rule: Rule, absent: tuple[str, ...]) -> Decline:
    unfit = profile.missing.get("trace")  # why operators and links are withheld, where the trace is not fit for use
    reasons = {"kineto": unfit, "links": unfit} if unfit is not None else {}
    whys = (profile.missing.get(need) or reasons.get(need) or f"the profile holds no {need}" for need in absent)
    why = "; ".join(dict.fromkeys(whys))
    return Decline(rule=rule.id, span=None, reason=f"cannot tell: {why}", needs=absent)
