"""Judge whether a rewritten script computes the same training step as the original, against a higher-precision run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from advisor.model import Difference, Numerics, Safety
from advisor.verify.recorded import Recording
from advisor.verify.spread import spread_reasons

RATIO = 1.5  # how much further from the reference than the original a rewrite may be
DRIFTED_RATIO = 4.0  # the same after steps that amplify rounding: a single draw of the drift, not its size
FLOOR_CAP = 0.005  # a declared floor never excuses more than this, about one rounding to bfloat16; PRECISION is exempt
DRIFTED_FLOOR = 1e-2  # relative, for values that several steps of training lie behind
TRAJECTORY_FLOOR = 1e-3  # relative, of a loss
SHARE = 1e-3  # of the norm a tensor would have if the whole gradient were spread evenly: see `_denominator`
UNRESOLVED = 0.1  # relative error of the original from which a nearly zero gradient counts as noise
NEARLY_ZERO = 1e-2  # share of the evenly spread norm below which a gradient counts as nearly zero
NOISE_RATIO = 8.0  # what noise may differ by between two orders of summation
SAME_PRECISION = 16.0  # widening of the floor where the reference is no more precise than the original
FOLLOWS = 1e-3  # relative difference of loss and gradient from which a float64 run computes something else
ROUNDING = 1e-4  # relative difference of loss and gradient that adding up in another order may make
LOST = 0.5  # relative difference of the gradient from which no reference does
RESOLVED = 0.25  # relative error of a gradient's element up to which its sign is certain
NORM_RATIO = 3.0  # of a parameter's step
WORST = 8  # differences kept for the report
NAMED = 3  # parameters named in one reason

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "tf32": 2.0**-10,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

NOT_REPRODUCIBLE = "the script is not reproducible under a fixed seed"
NO_REFERENCE = "the higher-precision run does not follow the original"


def inconclusive(numerics: Numerics) -> bool:
    """Whether the proof failed because runs of the original already differ: that says nothing about the rewrite."""
    return any(reason.startswith((NOT_REPRODUCIBLE, NO_REFERENCE)) for reason in numerics.reasons)


def compare(
    base_dir: Path, cand_dir: Path, ref_dir: Path, *, tolerance: float = 16.0, safety: Safety = Safety.NUMERICS
) -> Numerics:
    """Compare a rewritten script with the original, both against a run of the original in higher precision.

    `tolerance` is the declared floor in multiples of the epsilon of the compute dtype. The loss of the first step,
    every parameter gradient, every parameter step, buffer and evaluation output must be at most 1.5 times as far from
    the reference as the original is, plus the floor; the later losses must stay close to the original's. Whatever is
    missing is a reason to fail. Raises ArtifactError when a recording is missing or truncated.
    """
    base, cand, ref = Recording(base_dir), Recording(cand_dir), Recording(ref_dir)
    check = _Check(base, cand, ref, tolerance, safety)
    reasons = check.structure()
    if not reasons:
        reasons = [*check.randomness(), *check.finite_losses()] or check.buffers()
    if not reasons:
        check.measure()
        reasons = check.failures()
    if safety is Safety.EXACT and not reasons:
        reasons = [apart] if (apart := _apart(base, cand)) else []
    if not reasons:
        reasons = check.trajectory() or spread_reasons(base.facts, cand.facts)
    ranked = sorted(check.differences, key=lambda d: -_excess(d))
    return Numerics(
        ok=not reasons,
        reference=str(ref.facts["reference"]),
        compared=len(check.differences),
        worst=tuple(ranked[:WORST]),
        losses=tuple(cand.losses),
        base_losses=tuple(base.losses),
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(check.notes),
    )


def reference_follows(base_dir: Path, ref_dir: Path) -> bool:
    """Whether a double-precision run followed the same computation: same start, data, first loss and first gradient.

    It does not where the script draws noise in the model's dtype; the reference is then float32.
    """
    base, ref = Recording(base_dir), Recording(ref_dir)
    names = base.names("gradient")
    if not base.same_data(ref):
        return False
    if not base.losses or not ref.losses or _starts(base) != _starts(ref) or names != ref.names("gradient"):
        return False
    apart, size = _gradient_distance(base, ref)
    return abs(base.losses[0] - ref.losses[0]) <= FOLLOWS * max(abs(ref.losses[0]), FOLLOWS) and apart <= FOLLOWS * size


def differing_bits(one_dir: Path, other_dir: Path) -> str | None:
    """What of the losses and of the first gradients of two runs is not bit-identical, None where all are.

    Raises ArtifactError when a recording is missing or truncated.
    """
    return _apart(Recording(one_dir), Recording(other_dir))


def rounded_alike(one_dir: Path, other_dir: Path) -> bool:
    """Whether the first loss and gradients of two runs differ by rounding at most: `ROUNDING` relative to their size.

    Raises ArtifactError when a recording is missing or truncated.
    """
    one, other = Recording(one_dir), Recording(other_dir)
    if not one.losses or not other.losses or one.names("gradient") != other.names("gradient"):
        return False
    apart, size = _gradient_distance(other, one)
    near = abs(one.losses[0] - other.losses[0]) <= ROUNDING * abs(one.losses[0])
    return near and apart <= ROUNDING * size


def _gradient_distance(run: Recording, other: Recording) -> tuple[float, float]:
    """How far the whole first gradient of a run is from that of another, and the norm of the other's."""
    names = other.names("gradient")
    apart = math.hypot(*(np.linalg.norm(run.vector("gradient", n) - other.vector("gradient", n)) for n in names))
    return apart, math.hypot(*(other.norm("gradient", name) for name in names))


def _apart(one: Recording, other: Recording) -> str | None:
    """The first thing that is not bit-identical."""
    for step, (first, second) in enumerate(zip(one.losses, other.losses, strict=False)):
        if first != second and not (math.isnan(first) and math.isnan(second)):
            return f"loss {step} is not bit-identical: {second!r} instead of {first!r}"
    before, after = one.parameters, other.parameters
    names = [n for n in before if n not in after or before[n]["gradient"] != after[n]["gradient"]]
    return f"gradients are not bit-identical: {_list(names)}" if names else None


def _starts(recording: Recording) -> dict[str, str]:
    return {name: facts["start"] for name, facts in recording.parameters.items()}


def _excess(difference: Difference) -> float:
    if not math.isfinite(difference.error):
        return math.inf
    return difference.error / difference.limit if difference.limit else difference.error


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


@dataclass
class _Scale:
    """Norms that say how large a tensor's gradient would be if the whole gradient were spread evenly."""

    total: float
    elements: int

    def share(self, count: int) -> float:
        """The evenly spread norm of a tensor of `count` elements."""
        return self.total * math.sqrt(count / max(1, self.elements))


class _Check:
    """One comparison in progress: collects differences and notes, answers with reasons."""

    def __init__(self, base: Recording, cand: Recording, ref: Recording, tolerance: float, safety: Safety) -> None:
        self.base, self.cand, self.ref = base, cand, ref
        self.safety = safety
        self.differences: list[Difference] = []
        self.doubts: list[str] = []
        self.gradient_limits: dict[str, float] = {}
        self._nearly_zero: dict[str, bool] = {}
        self.notes: list[str] = list(base.facts["notes"])
        self.kind = str(cand.facts["compute"] if safety is Safety.PRECISION else base.facts["compute"])
        self.epsilon = EPSILON.get(self.kind, EPSILON["float32"])
        declared = tolerance * self.epsilon
        self.floor = declared if safety is Safety.PRECISION else min(declared, FLOOR_CAP)
        self.same_precision = bool(base.facts["compute"] == ref.facts["reference"])
        if self.same_precision:
            most = max(FLOOR_CAP, 4 * self.epsilon)  # no second precision shows how far bfloat16 rounds
            self.floor = max(self.floor, min(SAME_PRECISION * declared, most))
            self.notes.append(f"the reference is no more precise than the original: floor widened to {self.floor:.2g}")
        self.notes.append(f"compared by {base.facts['method']}, dropout off in every arm")

    # ------------------------------------------------------------------------------------------------------ structure

    def structure(self) -> list[str]:
        """Same starting point, same data, same parameters, nothing missing."""
        if self.base.whole != self.cand.whole or self.base.whole != self.ref.whole:
            return ["the arms were recorded by different methods: run the proof again"]
        for names, where in ((self._other_starts(self.ref), "parameters"), (self._other_data(self.ref), "batches")):
            if names:
                return [f"{NOT_REPRODUCIBLE}: two runs of the original have different {where} ({names})"]
        found = list(self._parameter_reasons())
        starts = self._other_starts(self.cand)
        if starts and not found:
            found.append(f"parameters start from other values: {starts}")
        data = self._other_data(self.cand)
        if data:
            found.append(f"the training data differ: {data}")
        if EPSILON.get(self.cand.facts["compute"], 0) > self.epsilon:
            found.append(f"computes in {self.cand.facts['compute']} where the original computes in {self.kind}")
        return found

    def _parameter_reasons(self) -> Iterator[str]:
        before, after = self.base.parameters, self.cand.parameters
        missing, extra = [n for n in before if n not in after], [n for n in after if n not in before]
        if missing:
            yield f"parameter missing: {_list(missing)}"
        if extra:
            yield f"parameter the original does not have: {_list(extra)}"
        common = [name for name in before if name in after]
        for fact, word in (("shape", "shape"), ("dtype", "dtype"), ("requires_grad", "requires_grad")):
            changed = [n for n in common if before[n][fact] != after[n][fact]]
            if changed:
                yield f"{word} of a parameter changed: {_list(changed)}"
        lost = [n for n in common if before[n]["gradient"] and not after[n]["gradient"]]
        if lost:
            noun, verb = ("parameter", "has") if len(lost) == 1 else ("parameters", "have")
            yield f"{noun} {_list(lost)} {verb} no gradient"
        gained = [n for n in common if after[n]["gradient"] and not before[n]["gradient"]]
        if gained:
            yield f"a gradient where the original has none: {_list(gained)}"
        if not any(facts["gradient"] for facts in before.values()):
            yield "the original has no gradient to compare"

    def _other_starts(self, other: Recording) -> str:
        mine, theirs = _starts(self.base), _starts(other)
        return _list([name for name in mine if name in theirs and mine[name] != theirs[name]])

    def _other_data(self, other: Recording) -> str:
        """Which batch differs first; model inputs stand in where there is no DataLoader."""
        for what, word in (("batches", "batch"), ("inputs", "model input of step")):
            mine, theirs = self.base.facts[what], other.facts[what]
            if mine and theirs:
                pairs = zip(mine, theirs, strict=False)
                return next((f"{word} {number}" for number, (a, b) in enumerate(pairs) if a != b), "")
        return ""

    def buffers(self) -> list[str]:
        """The buffers of a checkpoint: the same ones, updated or left alone as in the original."""
        before, after = self.base.facts.get("buffers", {}), self.cand.facts.get("buffers", {})
        found = []
        missing, extra = [n for n in before if n not in after], [n for n in after if n not in before]
        if missing:
            found.append(f"buffer missing: {_list(missing)}")
        if extra:
            found.append(f"buffer the original does not have: {_list(extra)}")
        for name in before:
            if name not in after:
                continue
            one, two = before[name], after[name]
            if one["changed"] != two["changed"]:
                found.append(f"buffer {name} {'is not' if one['changed'] else 'is'} updated by the rewritten script")
            elif one["shape"] != two["shape"]:
                found.append(f"shape of buffer {name} changed")
            elif not self.base.has("buffer", name) and one["checksum"] != two["checksum"]:
                found.append(f"buffer {name} has another value")
        return found

    # ----------------------------------------------------------------------------------------------------- randomness

    def randomness(self) -> list[str]:
        """Dropout is off in every arm, so the calls that would have dropped must be the same ones."""
        found = []
        before, after = self.base.facts.get("dropout", {}), self.cand.facts.get("dropout", {})
        for mode in ("training", "evaluation"):
            mine, theirs = before.get(mode, []), after.get(mode, [])
            exact = not any(compiled for _, _, compiled, _ in (*mine, *theirs))
            if not exact:
                self.notes.append(f"dropout in {mode} was counted inside compiled code: kinds compared, not numbers")
            one, two = _dropouts(mine, exact), _dropouts(theirs, exact)
            for (p, elements), times in one.items():
                lacking = times - two.get((p, elements), 0)
                if lacking > 0:
                    found.append(f"dropout p={p:g} over {elements:,} elements in {mode} is missing{_times(lacking)}")
            for (p, elements), times in two.items():
                surplus = times - one.get((p, elements), 0)
                if surplus > 0:
                    found.append(f"dropout p={p:g} over {elements:,} elements in {mode} is new{_times(surplus)}")
        return found

    def finite_losses(self) -> list[str]:
        """As many losses as the original, none of them NaN or infinite where the original is finite."""
        mine, theirs = self.base.losses, self.cand.losses
        for step, (one, two) in enumerate(zip(mine, theirs, strict=False)):
            if math.isfinite(one) and not math.isfinite(two):
                return [f"loss {step} is {two} where the original has {one:.6g}"]
        if len(theirs) < len(mine) or self.cand.facts["steps"] < self.base.facts["steps"]:
            return [f"fewer losses than the original: {len(theirs)} instead of {len(mine)}"]
        if len(theirs) > len(mine):
            return [f"more backward passes than the original: {len(theirs)} instead of {len(mine)}"]
        return [] if mine else ["no loss was seen: the script never calls backward()"]

    # -------------------------------------------------------------------------------------------------------- numbers

    def measure(self) -> None:
        """Errors of the first step and of the evaluation."""
        self._measure_loss()
        self._measure_gradients()
        self._measure_updates()
        self._measure_named("buffer", "first step")
        self._measure_named("buffer", "last step")
        self._measure_outputs()

    def failures(self) -> list[str]:
        """One reason per kind of quantity, naming the worst."""
        if self.doubts and not self._repeats():
            return self.doubts
        found = list(self._evaluation_reasons)
        kinds: dict[str, list[Difference]] = {}
        for difference in self.differences:
            if not difference.ok:
                kinds.setdefault(difference.name.split(" ")[0], []).append(difference)
        for failing in kinds.values():
            worst = max(failing, key=_excess)
            others = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
            found.append(
                f"{worst.name} is off by {worst.error:.2g}, more than the allowed {worst.limit:.2g}; "
                f"the original itself is off by {worst.base_error:.2g}{others}"
            )
        return found

    def _repeats(self) -> bool:
        """Whether the rewritten script computes every bit of the original, which needs no reference to be right."""
        return not _apart(self.base, self.cand) and all(d.error == d.base_error for d in self.differences)

    def _add(self, name: str, base_error: float, error: float, limit: float, ulp: float | None = None) -> None:
        ok = math.isfinite(error) and error <= limit
        self.differences.append(
            Difference(name=name, base_error=base_error, error=error, limit=limit, ok=ok, max_ulp=ulp)
        )

    def _measure_loss(self) -> None:
        base, cand, ref = self.base.losses[0], self.cand.losses[0], self.ref.losses[0]
        size = max(abs(ref), 1e-12)
        error = abs(base - ref) / size
        self._add("loss of the first step", error, abs(cand - ref) / size, RATIO * error + self.floor)

    def _distances(self, kind: str, name: str) -> tuple[float, float]:
        """Distance of the original and of the rewritten script from the reference."""
        reference = self.ref.vector(kind, name)
        return (
            float(np.linalg.norm(self.base.vector(kind, name) - reference)),
            float(np.linalg.norm(self.cand.vector(kind, name) - reference)),
        )

    def _scale(self, norms: Mapping[str, float]) -> _Scale:
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        return _Scale(total, sum(self.ref.count("gradient", name) for name in norms))

    def _denominator(self, norm: float, share: float) -> float:
        """What an error is relative to: the tensor's own norm, but at least a thousandth of its even share.

        A gradient that is zero in exact arithmetic (the key bias of attention) is all rounding noise in every arm;
        relative to itself it would be wrong by 100 % always. For PRECISION the whole share is the least denominator.
        """
        return max(norm, share * (1.0 if self.safety is Safety.PRECISION else SHARE), 1e-30)

    def _limit(self, distance: float, norm: float, share: float, pooled: float) -> float:
        """Allowed relative error; `pooled` is the original's error over all tensors, for those too small to average."""
        size = self._denominator(norm, share)
        unresolved = self.same_precision or distance > UNRESOLVED * norm
        if unresolved and norm < NEARLY_ZERO * share:  # only the size of its noise counts
            return (NOISE_RATIO * distance + self.floor * share) / size
        return RATIO * max(distance / size, pooled) + self.floor

    def _measure_gradients(self) -> None:
        names = [name for name in self.base.names("gradient") if self.ref.has("gradient", name)]
        norms = {name: self.ref.norm("gradient", name) for name in names}
        scale = self._scale(norms)
        distances = {name: self._distances("gradient", name) for name in names}
        pooled = math.sqrt(sum(d[0] ** 2 for d in distances.values())) / max(scale.total, 1e-30)
        if pooled > LOST:
            self.doubts.append(f"{NO_REFERENCE}: their gradients differ by {pooled:.0%} (noise in the model's dtype?)")
        for name in names:
            mine, theirs = distances[name]
            share = scale.share(self.ref.count("gradient", name))
            size = self._denominator(norms[name], share)
            limit = self.gradient_limits[name] = self._limit(mine, norms[name], share, pooled)
            self._nearly_zero[name] = norms[name] < NEARLY_ZERO * share
            self._add(f"gradient of {name}", mine / size, theirs / size, limit, self._max_ulp(name))

    def _max_ulp(self, name: str) -> float | None:
        """Largest gradient error in units of the last place of the parameter's dtype, of typical elements or more."""
        digits = MANTISSA.get(self.base.parameters[name]["dtype"])
        if not self.base.whole or digits is None:
            return None
        reference = self.ref.elements("gradient", name)
        if not reference.size:
            return None
        magnitude = np.maximum(np.abs(reference), float(np.sqrt(np.mean(reference**2))) + 1e-300)
        ulp = np.exp2(np.floor(np.log2(magnitude)) - digits)
        return float(np.max(np.abs(self.cand.elements("gradient", name) - reference) / ulp))

    def _measure_updates(self) -> None:
        """Compare parameter steps weighted by the gradient: see `recording.Recorder.add_update`."""
        names = [n for n in self.base.names("gradient") if self.base.has("update", n) and self.ref.has("update", n)]
        found = {name: self._weighted(name) for name in names if self.cand.has("update", name)}
        scale = self._scale({name: norm for name, (_, _, norm) in found.items()})
        pooled = math.sqrt(sum(mine**2 for mine, _, _ in found.values())) / max(scale.total, 1e-30)
        for name in names:
            if name not in found:
                self._add(f"update of {name}", 0.0, math.inf, self.floor)
                continue
            mine, theirs, norm = found[name]
            share = scale.share(self.ref.count("gradient", name))
            size = self._denominator(norm, share)
            facts = self.base.parameters[name]
            rounding = EPSILON.get(facts["dtype"], self.epsilon) * facts.get("weight", 0.0)  # of parameter + step
            limit = self._limit(mine, norm, share, pooled) + rounding / size
            if not self.base.whole:  # elements whose sign flips cost twice their gradient's error
                limit = max(limit, 2 * self.gradient_limits[name])
            self._add(f"update of {name}", mine / size, theirs / size, limit)
            self._measure_plain_update(name, facts)

    def _weighted(self, name: str) -> tuple[float, float, float]:
        """Distances of both arms from the reference, and its norm, of step times gradient.

        Whole tensors are weighted with the reference's gradient, and with zero where an arm does not resolve that
        gradient's sign: Adam moves such an element one way or the other. Sketches hold each arm's own product.
        """
        if not self.base.whole:
            return (*self._distances("product", name), self.ref.norm("product", name))
        weight, step = self.ref.vector("gradient", name), self.ref.vector("update", name)
        for arm in (self.base, self.cand):
            error = np.abs(arm.vector("gradient", name) - self.ref.vector("gradient", name))
            weight = np.where(error < RESOLVED * np.abs(weight), weight, 0.0)
        return (
            float(np.linalg.norm(weight * (self.base.vector("update", name) - step))),
            float(np.linalg.norm(weight * (self.cand.vector("update", name) - step))),
            float(np.linalg.norm(weight * step)),
        )

    def _measure_plain_update(self, name: str, facts: Mapping[str, Any]) -> None:
        """What the weighting hides: steps where the gradient is exactly zero, and the size of the whole step."""
        rounding = EPSILON.get(facts["dtype"], self.epsilon) * facts["start_norm"]
        arms = (self.base, self.cand, self.ref)
        zero = np.logical_and.reduce([arm.elements("gradient", name) == 0 for arm in arms])
        if zero.any():
            base, cand, ref = (arm.elements("update", name)[zero] for arm in arms)
            size = max(float(np.linalg.norm(ref)), rounding, 1e-30)
            mine, theirs = float(np.linalg.norm(base - ref)) / size, float(np.linalg.norm(cand - ref)) / size
            limit = RATIO * mine + self.floor + rounding / size
            self._add(f"update of {name} where its gradient is zero", mine, theirs, limit)
        if self._nearly_zero[name]:  # the step follows noise, and Adam's depends on how that compares with its eps
            return
        one, two = self.base.norm("update", name), self.cand.norm("update", name)
        if max(one, two) > NORM_RATIO * min(one, two) + rounding:
            size = max(one, 1e-30)
            self._add(f"update size of {name}", 0.0, abs(two - one) / size, NORM_RATIO - 1)

    def _measure_named(self, kind: str, when: str) -> None:
        """Buffers or outputs of one moment; those after more than one step have drifted."""
        names = [name for name in self.base.names(kind) if name.startswith(f"{when}:")]
        names = [name for name in names if self.cand.has(kind, name) and self.ref.has(kind, name)]
        sizes = {name: max(self.ref.norm(kind, name), 1e-30) for name in names}
        mine = {name: self._distances(kind, name) for name in names if self._same_count(kind, name)}
        pooled = max((distance[0] / sizes[name] for name, distance in mine.items()), default=0.0)
        drifted = when in ("last step", "trained")
        ratio = DRIFTED_RATIO if drifted or self._buffers_move else RATIO
        floor = max(self.floor, DRIFTED_FLOOR, 4 * self.epsilon) if drifted else self.floor
        if self._buffers_move and self.same_precision:  # no second precision shows how far they drift
            floor = max(floor, TRAJECTORY_FLOOR)
        for name, (one, two) in mine.items():
            label = f"evaluation, {name}" if kind == "output" else f"buffer, {name}"
            self._add(label, one / sizes[name], two / sizes[name], ratio * pooled + floor)

    def _same_count(self, kind: str, name: str) -> bool:
        return self.base.count(kind, name) == self.cand.count(kind, name) == self.ref.count(kind, name)

    @property
    def _buffers_move(self) -> bool:
        return any(facts["changed"] for facts in self.base.facts.get("buffers", {}).values())

    def _measure_outputs(self) -> None:
        self._evaluation_reasons: list[str] = []
        base, cand = self.base.facts["evaluation"], self.cand.facts["evaluation"]
        problem = base.get("error") or base.get("skipped")
        if problem:
            self.notes.append(f"evaluation not compared, it does not work in the original: {problem}")
            return
        if cand.get("error") or cand.get("skipped"):
            self._evaluation_reasons = [f"evaluation fails: {cand.get('error') or cand.get('skipped')}"]
            return
        if base.get("repeatable") and not cand.get("repeatable"):
            self._evaluation_reasons.append("evaluation is not repeatable, the original's is")
        elif not base.get("repeatable"):
            self.notes.append("evaluation of the original is not repeatable bit for bit")
        mine, theirs = self.base.names("output"), self.cand.names("output")
        if mine != theirs or any(self.base.count("output", n) != self.cand.count("output", n) for n in mine):
            self._evaluation_reasons.append("evaluation returns other outputs than the original's")
            return
        self._measure_named("output", "start")
        self._measure_named("output", "trained")

    # ------------------------------------------------------------------------------------------------------- the rest

    def trajectory(self) -> list[str]:
        """Later losses stay in a band around the original's, as wide as the reference has drifted from it so far."""
        floor = max(TRAJECTORY_FLOOR, 4 * self.epsilon)
        gap = 0.0
        for step, (one, two) in enumerate(zip(self.base.losses, self.cand.losses, strict=False)):
            if step < len(self.ref.losses):
                gap = max(gap, abs(self.ref.losses[step] - one))
            limit = DRIFTED_RATIO * gap + floor * abs(one)
            if math.isfinite(one) and not abs(two - one) <= limit:
                return [f"loss {step} is {two:.6g} where the original has {one:.6g}, outside +-{limit:.2g}"]
        return []


def _dropouts(calls: list[list[Any]], exact: bool) -> dict[tuple[float, int], int]:
    found: dict[tuple[float, int], int] = {}
    for p, elements, _, times in calls:
        key = (float(p), int(elements))
        found[key] = found.get(key, 0) + int(times) if exact else 1
    return found


def _times(count: int) -> str:
    return f" {count} times" if count > 1 else ""
