"""The real laboratory: prove and race patches in child processes, and remember what was measured before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from advisor.errors import AdvisorError, OutputError, ScriptError, ScriptTimeout
from advisor.machine import sources_digest
from advisor.model import Baseline, Difference, Numerics, Patch, Rewrite, Safety, Timing
from advisor.session import Process, Spawn, Spec
from advisor.verify.numerics import compare, differing_bits, inconclusive, reference_follows, rounded_alike
from advisor.verify.pair import ResidentArm, race
from advisor.verify.search import OUT_OF_TIME, TrialFailed

NUMERICS_PLAN = "advisor.verify.arm:NumericsPlan"
BASELINE_PLAN = "advisor.verify.resident:BaselinePlan"
DIVISORS = (1, 2, 4, 8, 16)  # of the batch, tried in turn where an arm runs out of memory
LEAST_START_S = 120.0  # a start may always take this long, whatever is left of the budget
BASELINE_BLOCKS = 3
BASELINE_BLOCK_S = 1.0
TRAJECTORY_SHARE = 0.05  # of the time budget, for the compared loss curve of one arm
COMPARED_WITH_ITSELF = "the script does not run in higher precision: compared with a second run of itself"
NOT_REPEATED = "two runs of the script as found are not bit-identical"
CRITERION = 2  # of a proof; what an earlier one has judged is not remembered
LOOSENESS = (Safety.EXACT, Safety.NUMERICS, Safety.SEMANTICS, Safety.PRECISION)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a laboratory works.

    `reference` is float32, float64 or auto (float64 for float32 training on the CPU). Times are seconds;
    `step_timeout_s` is the longest a step may take, `trajectory_s` bounds the compared loss curve. `full_limit` is the
    size in bytes up to which tensors are compared whole. `context` names what makes measurements comparable (torch,
    device, driver); `trials` is the folder where results are kept by fingerprint.
    `first_divisor` is the part of the batch the proof begins with, where the whole would not fit in memory.
    """

    seconds: float = 600.0
    trajectory_steps: int = 20
    trajectory_s: float = 60.0
    min_quads: int = 8
    max_quads: int = 40
    block_s: float = 0.5
    floor: float = 0.01
    reference: str = "auto"
    step_timeout_s: float = 600.0
    full_limit: int = 512 << 20
    context: str = ""
    trials: Path | None = None
    first_divisor: int = 1


@dataclass
class _Originals:
    """Recordings of the script as found and in higher precision, and how they were made."""

    base: Path
    ref: Path
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    apart: list[str | None] = field(default_factory=list)  # see `_apart_by_itself`, once it was asked


class _ArmFailed(Exception):
    """An arm of the proof did not reach its end."""

    def __init__(self, error: AdvisorError, out_of_memory: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.out_of_memory = out_of_memory


class ProcessLab:
    """A `search.Lab` over child processes; close it, or use it as a context manager, so that none is left behind.

    `spec` is the run of the script as found (its plan and output folder are replaced), `work` a folder of the run.
    """

    def __init__(
        self,
        spawn: Spawn,
        spec: Spec,
        work: Path,
        settings: Settings,
        *,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._spawn, self._spec, self._work, self._settings = spawn, spec, work, settings
        self._say = on_progress
        self._deadline = time.monotonic() + settings.seconds
        self._arms: dict[str, ResidentArm] = {}
        self._windows: dict[str, list[list[tuple[float, float]]]] = {}
        self._originals: _Originals | None = None
        self._sources = sources_digest(Path(spec.script), Path(spec.root))
        self._runs = 0

    def seconds_left(self) -> float:
        """What is left of the time budget, never negative."""
        return max(0.0, self._deadline - time.monotonic())

    # ---------------------------------------------------------------------------------------------------------- prove

    def prove(self, patch: Patch) -> Numerics:
        """Compare the patched script with the original. Raises ScriptError when the original itself fails."""
        safety = max((r.safety for r in patch.rewrites), key=LOOSENESS.index, default=Safety.EXACT)
        tolerance = max((r.tolerance for r in patch.rewrites), default=0.0)
        settings = (CRITERION, self._settings.trajectory_steps, self._settings.reference, safety.value, tolerance)
        digest = self._digest("prove", patch, *settings)
        stored = self._stored(digest)
        if stored is not None:
            return numerics_from(stored)
        divisors = [n for n in DIVISORS if n >= self._settings.first_divisor]
        while True:
            try:
                numerics = self._prove(patch, divisors[0], tolerance, safety)
                break
            except _ArmFailed as failed:
                if not failed.out_of_memory or len(divisors) == 1:
                    raise failed.error from failed
                if self._arms:  # they wait, and hold memory of the device
                    self.release()
                else:
                    self._originals = None
                    divisors.pop(0)
        if numerics.compared and not inconclusive(numerics):
            self._store(digest, asdict(numerics))
        return numerics

    def _prove(self, patch: Patch, divisor: int, tolerance: float, safety: Safety) -> Numerics:
        known = self._originals
        if known is None:
            known = self._originals = self._record_originals(divisor)
        try:
            cand = self._record("cand", patch, arm="cand", **known.options)
        except _ArmFailed as failed:
            if failed.out_of_memory and self._arms:
                raise
            reason = f"the rewritten script fails: {failed.error}"
            reference = str(json.loads((known.ref / "numerics.json").read_text(encoding="utf-8"))["reference"])
            return Numerics(ok=False, reference=reference, compared=0, reasons=(reason,))
        numerics = compare(known.base, cand, known.ref, tolerance=tolerance, safety=safety)
        notes = [*numerics.notes, *known.notes]
        if safety is Safety.EXACT and numerics.compared and not numerics.ok:
            rounded = compare(known.base, cand, known.ref, safety=Safety.NUMERICS)
            apart = self._apart_by_itself(known) if rounded.ok else None
            if apart is not None:
                numerics = rounded
                notes = [*numerics.notes, *known.notes, f"{NOT_REPEATED} ({apart}): compared as where rounding differs"]
        rows = int(known.options["batch_divisor"])
        if rows > 1:
            notes.append(f"compared on the first 1/{rows} of every batch: the whole did not fit in memory in every arm")
        before, later = _facts(known.base), _facts(cand)
        gone, new = changed_operators(before, later)
        return replace(
            numerics,
            notes=tuple(notes),
            fallbacks=tuple(wrong_operators(before, later, patch.rewrites)),
            operators_gone=gone,
            operators_new=new,
        )

    def _record_originals(self, divisor: int) -> _Originals:
        """Run the script as found, then in higher precision; all arms take as many steps as the first one managed."""
        self._say("recording the script as found")
        options: dict[str, Any] = {
            "batch_divisor": divisor,
            "trajectory_steps": self._settings.trajectory_steps,
            "max_seconds": min(self._settings.trajectory_s, TRAJECTORY_SHARE * self._settings.seconds),
        }
        base = self._record("base", None, arm="base", **options)
        facts = _facts(base)
        if facts["steps"] < self._settings.trajectory_steps:  # it ended by itself, or the time was up
            options["trajectory_steps"] = facts["steps"]
            if "skipped" in facts["evaluation"]:
                base = self._record("base", None, arm="base", **options)
        options["max_seconds"] = 1e9  # the other arms take the same number of steps, however long
        self._say("recording the reference in higher precision")
        ref, notes = self._record_reference(base, facts, options)
        return _Originals(base, ref, options, notes)

    def _apart_by_itself(self, known: _Originals) -> str | None:
        """In what a second run of the script as found is not the first bit for bit: some operators of a GPU add in any
        order, even where torch is asked for deterministic ones. None, so that bits are demanded, where they are alike,
        by chance maybe, where they differ by more than rounding, and where the second run fails."""
        if not known.apart:
            known.apart.append(self._differing_bits(known))
        return known.apart[0]

    def _differing_bits(self, known: _Originals) -> str | None:
        if COMPARED_WITH_ITSELF in known.notes:  # nothing in higher precision could take the place of the bits
            return None
        self._say("recording the script as found again: it may not repeat itself bit for bit")
        try:
            again = self._record("again", None, arm="ref", reference="as-found", **known.options)
        except _ArmFailed as failed:
            if failed.out_of_memory:
                raise
            return None
        return differing_bits(known.base, again) if rounded_alike(known.base, again) else None

    def _record_reference(
        self, base: Path, facts: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Path, tuple[str, ...]]:
        """The reference and what is to be noted about it.

        It is float64 where asked for or cheap and the script allows it, else float32 without shortcuts; for a script
        that runs in neither, a second run of the script as found.
        """
        wanted = self._settings.reference
        single = facts["compute"] == "float32"
        if wanted == "float64" or (wanted == "auto" and single and facts["device"] == "cpu"):
            with contextlib.suppress(_ArmFailed):  # a script that insists on float32 somewhere
                ref = self._record("ref64", None, arm="ref", reference="float64", **options)
                if reference_follows(base, ref):
                    return ref, ()
        try:
            return self._record("ref32", None, arm="ref", reference="float32", **options), ()
        except _ArmFailed as failed:
            if failed.out_of_memory:
                raise
        self._say("recording the script as found again: it does not run in higher precision")
        return self._record("again", None, arm="ref", reference="as-found", **options), (COMPARED_WITH_ITSELF,)

    def _record(self, name: str, patch: Patch | None, **options: Any) -> Path:
        """Run one arm of the proof to its end and return its folder."""
        higher = options["arm"] == "ref" and options["reference"] != "as-found"
        environment = {"TORCHDYNAMO_DISABLE": "1"} if higher else {}
        self._runs += 1
        out = self._folder(f"{self._runs:02d}-{name}")
        spec = replace(
            self._spec,
            plan=NUMERICS_PLAN,
            out=str(out),
            overlay=self._overlay(patch),
            options={
                "deterministic": True,
                "environment": environment,
                "full_limit": self._settings.full_limit,
                **options,
            },
        )
        process = self._spawn(spec)
        try:
            _run_to_end(process, self._settings.step_timeout_s)
        except ScriptError as error:
            raise _ArmFailed(error, bool(process.status().get("out_of_memory"))) from error
        finally:
            process.close()
        return out

    # ----------------------------------------------------------------------------------------------------------- race

    def race(self, kept: Patch, candidate: Patch, seconds: float) -> Timing:
        """Time two patches against each other; both scripts stay loaded for the next race."""
        settings = (self._settings.min_quads, self._settings.block_s, self._settings.floor)
        digest = self._digest("race", candidate, self._patch_digest(kept), *settings)
        stored = self._stored(digest)
        if stored is not None:
            return timing_from(stored)
        wanted = {self._patch_digest(kept), self._patch_digest(candidate)}
        for name in [name for name in self._arms if name not in wanted]:
            self._arms.pop(name).close()
        base, cand = self._arm(kept), self._arm(candidate)
        start_s = max(LEAST_START_S, 2 * seconds)
        try:
            base.start(start_s)
            timing = race(
                base,
                cand,
                seconds=seconds,
                min_quads=self._settings.min_quads,
                max_quads=self._settings.max_quads,
                block_s=self._settings.block_s,
                floor=self._settings.floor,
                start_s=start_s,
            )
        except ScriptError as error:
            at_fault = cand.failed
            self.release()
            if not at_fault:
                raise
            raise TrialFailed(f"the rewritten script fails: {error}", detail=error.detail) from error
        if timing.quads >= self._settings.min_quads:
            self._store(digest, asdict(timing))
        return timing

    def _arm(self, patch: Patch) -> ResidentArm:
        name = self._patch_digest(patch)
        if name not in self._arms:
            self._runs += 1
            out = self._folder(f"{self._runs:02d}-timed")
            spec = replace(self._spec, out=str(out), overlay=self._overlay(patch), options={})
            arm = self._arms[name] = ResidentArm(self._spawn, spec, step_timeout=self._settings.step_timeout_s)
            self._windows.setdefault(name, []).append(arm.windows)
        return self._arms[name]

    def block_windows(self, patch: Patch) -> tuple[tuple[float, float], ...]:
        """When blocks of a patch ran alone on the device, seconds of the monotonic clock: where counters are its
        own."""
        return tuple(window for windows in self._windows.get(self._patch_digest(patch), ()) for window in windows)

    # ------------------------------------------------------------------------------------------------------ baselines

    def baseline(self, label: str, variant: str, patch: Patch) -> Baseline:
        """Step time of a variant of the patched script: the median of a few blocks."""
        digest = self._digest("baseline", patch, variant)
        stored = self._stored(digest)
        if stored is not None:
            return Baseline(label=label, step_us=stored["step_us"], speedup=None)
        self.release()
        self._runs += 1
        out = self._folder(f"{self._runs:02d}-{variant}")
        spec = replace(self._spec, out=str(out), overlay=self._overlay(patch), options={"variant": variant})
        limit = self.seconds_left()
        with ResidentArm(self._spawn, spec, plan=BASELINE_PLAN, step_timeout=limit) as arm:
            try:
                arm.start(limit)
                if variant == "tf32" and not arm.on_cuda:
                    return Baseline(label=label, step_us=None, speedup=None, reason="TF32 exists on NVIDIA GPUs only")
                assert arm.step_us is not None
                steps = min(50, max(3, round(BASELINE_BLOCK_S * 1e6 / arm.step_us)))
                means = [statistics.fmean(arm.run_block(steps).step_us) for _ in range(BASELINE_BLOCKS)]
            except ScriptTimeout:
                return Baseline(label=label, step_us=None, speedup=None, reason=f"not measured: {OUT_OF_TIME}")
            except ScriptError as error:
                return Baseline(label=label, step_us=None, speedup=None, reason=str(error))
        step_us = statistics.median(means)
        self._store(digest, {"step_us": step_us})
        return Baseline(label=label, step_us=step_us, speedup=None)

    # ------------------------------------------------------------------------------------------------------ the rest

    def release(self) -> None:
        """End the waiting arms and with them the memory they hold."""
        while self._arms:
            self._arms.popitem()[1].close()

    def close(self) -> None:
        """End everything this laboratory started."""
        self.release()

    def __enter__(self) -> ProcessLab:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _folder(self, name: str) -> Path:
        folder = self._work / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write {name} in the run directory: {error.strerror}") from error
        return folder

    def _overlay(self, patch: Patch | None) -> dict[str, str]:
        """Write the patched sources into the run directory; maps the real paths to them."""
        if patch is None or not patch.sources:
            return {}
        folder = self._folder(f"patched/{self._patch_digest(patch)[:16]}")
        found: dict[str, str] = {}
        for path, text in patch.sources.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="")
            found[os.path.join(self._spec.root, path)] = str(target.resolve())
        return found

    def _patch_digest(self, patch: Patch) -> str:
        return _digest(sorted(patch.sources.items()))

    def _digest(self, kind: str, patch: Patch, *more: Any) -> str:
        """Fingerprint of a measurement: sources, environment, device, what was measured and how."""
        spec = self._spec
        where = [self._sources, self._settings.context, spec.argv, spec.seed, spec.entry]
        return _digest([kind, *where, self._patch_digest(patch), more])

    def _stored(self, digest: str) -> dict[str, Any] | None:
        if self._settings.trials is None:
            return None
        try:
            found: dict[str, Any] = json.loads((self._settings.trials / f"{digest}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def _store(self, digest: str, value: Mapping[str, Any]) -> None:
        if self._settings.trials is None:
            return
        try:
            self._settings.trials.mkdir(parents=True, exist_ok=True)
            path = self._settings.trials / f"{digest}.json"
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(value), encoding="utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise OutputError(f"cannot keep a trial in the run directory: {error.strerror}") from error


def _run_to_end(process: Process, timeout: float) -> None:
    """Wait for an arm; raises the script's error unless it was stopped at its end or ended after at least one step."""
    while process.receive(timeout) is not None:
        continue
    process.wait(timeout)
    status = process.status()
    done = status.get("status") == "stopped" or (status.get("status") == "ended" and int(status.get("steps", 0)) > 0)
    if not done:
        raise process.failure()


def wrong_operators(base: Mapping[str, Any], cand: Mapping[str, Any], rewrites: Sequence[Rewrite]) -> Iterator[str]:
    """Why the operators that ran are not those the rewrites are for; silent where an arm ended before they were
    seen. Beside compiled code, which may hold them under no name, their absence says nothing."""
    if "operators" not in base or "operators" not in cand:
        return
    ran, before = set(cand["operators"]), set(base["operators"])
    for rewrite in rewrites:
        fallback = sorted((ran - before) & set(rewrite.avoids))
        if fallback:
            yield f"{rewrite.title} fell back to {fallback[0]}, which is no gain"
        elif rewrite.runs and not cand.get("compiled") and not ran & set(rewrite.runs):
            yield f"{rewrite.title} has no effect: none of {', '.join(rewrite.runs)} ran"


def changed_operators(base: Mapping[str, Any], cand: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of operators that no longer run, and of those that did not run before; none where an arm saw none."""
    if "operators" not in base or "operators" not in cand:
        return (), ()
    before, after = set(base["operators"]), set(cand["operators"])
    return tuple(sorted(before - after)), tuple(sorted(after - before))


def _facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "numerics.json").read_text(encoding="utf-8"))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def timing_from(data: Mapping[str, Any]) -> Timing:
    """The Timing that `dataclasses.asdict` and JSON made a dictionary of."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Timing(**fields)


def numerics_from(data: Mapping[str, Any]) -> Numerics:
    """The Numerics that `dataclasses.asdict` and JSON made a dictionary of."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields["worst"] = tuple(Difference(**entry) for entry in data["worst"])
    return Numerics(**fields)
