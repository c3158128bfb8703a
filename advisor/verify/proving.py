"""Inside the child: runs regions alone, original against replacement, forward and backward, on drawn inputs.

Every draw is computed in several dtypes by the recorded operations, by the replacement, and by the recorded operations
in float64, which both are measured against. (`python -m advisor.verify.proving JOBS RESULTS`)
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from advisor.verify.arms import Arms, Variant
from advisor.verify.closeness import UNRESOLVED, Item, Judge, excess, said
from advisor.verify.recompute import (
    CannotRun,
    DropoutOff,
    Failed,
    Run,
    probability,
    random_cotangent,
    same_cotangent,
)
from advisor.verify.recording import dtype_name
from advisor.verify.regiondraws import Draw, draws_of
from advisor.verify.rounding import Rounding

SECONDS = 10.0  # of one region; what does not fit is counted as skipped
DISTURBED_RUNS = 2
ROUNDINGS = 2.0  # epsilons a declared floor may always excuse: bfloat16's own is above the cap of a floor
SMALL = 1 << 20  # elements of the largest tensor below which more threads only wait for each other
WORST = 8  # quantities kept for the report
REASONS = 4


def main(jobs: Path, results: Path) -> None:
    """Prove the regions of a file one after the other; the results so far are written after each."""
    found = []
    threads = torch.get_num_threads()
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        torch.set_num_threads(1 if _largest(job) < SMALL else threads)
        found.append(prove(job))
        results.write_text(json.dumps(found), encoding="utf-8")


def prove(job: Mapping[str, Any]) -> dict[str, Any]:
    """The proof of one region, as `advisor.verify.regions` describes it.

    The result has "ok", "reasons", "compared" (draws), "skipped" (reason -> draws), "dtypes", "worst" (quantities by
    error over limit) and "notes". It is never ok where nothing was compared.
    """
    wanted = job["device"] == "cuda"
    device = torch.device("cuda" if wanted and torch.cuda.is_available() else "cpu")
    try:
        proof = _Proof(Arms(job, device))
        proof.run()
    except CannotRun as error:
        reason = f"the region cannot be run alone: {error}"
        return {"ok": False, "reasons": [reason], "compared": 0, "skipped": {}, "dtypes": [], "worst": [], "notes": []}
    if wanted and device.type == "cpu":
        proof.notes.append("compared on the CPU: no GPU was there")
    return proof.result()


class _Proof:
    """One proof in progress."""

    def __init__(self, arms: Arms) -> None:
        self.arms = arms
        self.job = arms.job
        self.deadline = time.monotonic() + float(self.job.get("seconds", SECONDS))
        self.reasons: list[str] = []
        self.notes: list[str] = list(arms.notes)
        self.skipped: dict[str, int] = {}
        self.worst: list[Item] = []
        self.compared = 0
        self.dtypes: list[str] = []
        self.epsilon = 0.0  # of the recorded run: a coarser dtype than it had is held to the declared floor alone

    def run(self) -> None:
        """Compare in every dtype; raises CannotRun where the recorded operations do not run as they were recorded."""
        self._check_dropout()
        for variant in self.arms.variants():
            self._compare_in(variant)
        for reason in self.arms.skipped:
            self._skip(reason)

    def result(self) -> dict[str, Any]:
        """The record of the proof."""
        reasons = list(dict.fromkeys(self.reasons))
        if not self.worst and not reasons:
            why = "; ".join(self.skipped) or "the original itself is lost in rounding"
            reasons = [f"nothing could be compared: {why}"]
        ranked = sorted(self.worst, key=lambda d: -excess(d))
        return {
            "ok": not reasons,
            "reasons": reasons[:REASONS],
            "compared": self.compared,
            "skipped": self.skipped,
            "dtypes": self.dtypes,
            "worst": [{**d, "error": d["error"] if math.isfinite(d["error"]) else None} for d in ranked[:WORST]],
            "notes": list(dict.fromkeys(self.notes)),
        }

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    # ------------------------------------------------------------------------------------------------------ comparing

    def _check_dropout(self) -> None:
        """The replacement must drop from as many elements, with the same probability, as the recorded calls.

        A probability of 0 is one that the proof has switched off.
        """
        arms = self.arms
        inputs = arms.inputs(Draw("normal values", sizes=arms.base), arms.as_recorded)
        with torch.no_grad(), arms.program.under(arms.autocast), DropoutOff() as off:
            values = arms.program.run(arms.leaves(inputs), {})
        calls = [node for node in self.job["nodes"] if node["dropout"]]
        passed = [(values[node["id"]].numel(), probability(node["args"], node["kwargs"])) for node in calls]
        mine = sorted([*off.seen, *passed])
        try:
            _, theirs = arms.replacement(inputs, arms.as_recorded, None)
        except Failed:
            return  # the comparison says why
        needed = [call for call in mine if call[1]]
        pairs = list(zip(needed if len(theirs) == len(needed) else mine, sorted(theirs), strict=False))
        matched = len(pairs) == len(theirs) >= len(needed)
        if not matched or any(one[0] != two[0] or two[1] not in (0.0, one[1]) for one, two in pairs):
            self.reasons.append(f"the replacement drops {_drops(theirs)} where the original drops {_drops(mine)}")

    def _compare_in(self, variant: Variant) -> None:
        dtypes = [dtype_name(variant.inputs.get(kind, kind)) for kind in sorted(self.arms.recorded, key=str)]
        self.dtypes += [name for name in dtypes if name not in self.dtypes]
        label = "/".join(dtypes)
        for number, draw in enumerate(draws_of(self.job, self.arms.base, self.arms.sizes.varied(self.arms.base))):
            late = time.monotonic() > self.deadline
            if late and (variant.inputs or not draw.always):
                self._skip("the time is used up")
                continue
            try:
                found, problem = self._compare(draw, variant, f"{draw.label}, {label}", number), ""
            except CannotRun as error:
                self._skip(f"{draw.label}: {error}")
                if number == 0 and not variant.inputs:
                    self.reasons.append(f"the original cannot be run on {draw.label}: {error}")
                continue
            except Failed as error:
                found, problem = [], f"the replacement {error} ({draw.label}, {label})"
            reasons = [problem] if problem else [said(item) for item in found if not item["ok"]]
            if draw.doubt and reasons:
                self._skip(f"{draw.label}: {draw.doubt}")
            elif reasons or found:
                self.compared += 1
                self.worst += [item for item in found if not item["ok"] or item["base_error"] <= UNRESOLVED]
                self.reasons += reasons
            else:
                self._skip(f"{draw.label}: the original gives no finite number")

    def _compare(self, draw: Draw, variant: Variant, label: str, number: int) -> list[Item]:
        """One draw; raises CannotRun where the original does not take it and Failed where the replacement differs."""
        inputs = self.arms.inputs(draw, variant)
        old = self.arms.original(inputs, variant, random_cotangent(draw.turned) if draw.training else None)
        given = old.cotangent
        back = None if given is None else partial(same_cotangent, given)
        new, _ = self.arms.replacement(inputs, variant, back)
        self._check_kind(old, new, variant)
        reference = self.arms.original(inputs, variant, back, double=True)
        kinds = {node: kind for node, (kind, _) in old.seen.items()}
        floats = [d for d in (*kinds.values(), *(t.dtype for t in inputs.values())) if d.is_floating_point]
        epsilon = max((torch.finfo(d).eps for d in floats), default=torch.finfo(torch.float32).eps)
        floor = float(self.job["tolerance"]) * epsilon
        if variant == self.arms.as_recorded:
            self.epsilon = epsilon
        if epsilon <= self.epsilon:
            floor = min(floor, max(float(self.job["floor"]), ROUNDINGS * epsilon))
        judge = Judge(label, floor, float(self.job["ratio"]))
        noise: list[Run] = []

        def disturbed(node: int | None) -> list[torch.Tensor]:
            for turn in range(DISTURBED_RUNS - len(noise)):
                rounding = Rounding(kinds, epsilon, 31 * number + turn, self.arms.device)
                noise.append(self.arms.original(inputs, variant, back, rounding, double=True))
            return [value for run in noise if (value := run.part(node)) is not None]

        found: list[Item] = []
        for node in (None, *old.gradients):
            mine, theirs, exact = old.part(node), new.part(node), reference.part(node)
            name = "the result" if node is None else f"the gradient of {self._named(node)}"
            if (mine is None) != (theirs is None):
                raise Failed(
                    f"gives {'no' if theirs is None else 'a'} gradient of {self._named(node)}, other than it is"
                )
            if mine is not None and theirs is not None and exact is not None:
                mine = mine.to(theirs.dtype)  # autocast may round the result where its reader would
                found += judge.quantity(name, mine, theirs, exact, partial(disturbed, node))
        return found

    def _named(self, node: int | None) -> str:
        return next(str(name) for name, given in sorted(self.job["inputs"].items()) if given["node"] == node)

    def _check_kind(self, before: Run, after: Run, variant: Variant) -> None:
        old, new = before.output, after.output
        if new.shape != old.shape:
            raise Failed(f"has shape {tuple(new.shape)} instead of {tuple(old.shape)}")
        if new.device != old.device:
            raise Failed(f"lies on {new.device} instead of {old.device}")
        if after.differentiable != before.differentiable:
            raise Failed("requires a gradient" if after.differentiable else "requires no gradient")
        shared = sorted(after.shares - before.shares)
        if shared:
            raise Failed(
                f"lies in the memory of {self._named(shared[0])}: the original's result is a tensor of its own"
            )
        rounded = variant.autocast is not None and self.job["rounded"] and new.dtype is variant.autocast
        if new.dtype is not old.dtype and not rounded and variant.doubtful:
            raise CannotRun(f"the region names the dtype of its inputs, which may be {dtype_name(new.dtype)} here")
        if new.dtype is not old.dtype and not rounded:
            raise Failed(f"has dtype {dtype_name(new.dtype)} instead of {dtype_name(old.dtype)}")
        if self.job["viewed"] and old.is_contiguous() and not new.is_contiguous():
            self.notes.append("the result is not contiguous where the original's is, and `view` reads it")


# ------------------------------------------------------------------------------------------------------------- helpers


def _largest(job: Mapping[str, Any]) -> int:
    """The elements of the largest tensor of a region."""
    return max((math.prod(part["shape"] or ()) for part in (*job["inputs"].values(), *job["nodes"])), default=0)


def _drops(calls: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"{p:g} of {n:,} elements" for n, p in sorted(calls)) or "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
