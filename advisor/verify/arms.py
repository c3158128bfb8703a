"""Inside the child: the two arms of a region, its recorded operations and its replacement, in any dtype and size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from advisor.verify.recompute import (
    DOUBLE,
    CannotRun,
    Cast,
    Cotangent,
    DropoutOff,
    Failed,
    Program,
    Run,
    Watch,
    compiled,
    copied,
    finish,
    first_line,
)
from advisor.verify.recording import dtype_name
from advisor.verify.regiondraws import Draw, Sizes, drawn, laid_out
from advisor.verify.rounding import Rounding

ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}  # of the largest tensor, where the sizes may be changed
MOST_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}


@dataclass(frozen=True)
class Variant:
    """One dtype a region is computed in: what inputs and the dtypes named in the region become."""

    inputs: Cast
    named: Cast
    autocast: torch.dtype | None = None
    doubtful: bool = False  # whether the region names a dtype that may be its inputs' own


class Arms:
    """A region as it can be run here. `base` are the sizes it is compared at, `skipped` the dtypes it does not run in.

    Raises CannotRun for a region that cannot be run as it was recorded.
    """

    def __init__(self, job: Mapping[str, Any], device: torch.device) -> None:
        self.job = job
        self.device = device
        self.program = Program.of(job["nodes"], job["root"], device)
        self.function = compiled(job["template"], job["inputs"], job["constants"], job["imports"])
        self.sizes = Sizes(job)
        self.recorded = {getattr(torch, given["dtype"]) for given in job["inputs"].values() if _is_float(given)}
        if not self.recorded:
            raise CannotRun("it has no floating-point input")
        self.skipped: list[str] = []
        self.notes: list[str] = []
        self.autocast: torch.dtype | None = None
        self._high = 2  # whole numbers are drawn below it
        self.base = self._base()

    @property
    def as_recorded(self) -> Variant:
        """The recorded dtypes, under the recorded autocast."""
        return Variant({}, {}, self.autocast)

    def _base(self) -> dict[int, int]:
        """The sizes to compare at: as recorded, or smaller where that is too much and literals allow it.

        The region must give the recorded dtypes there, and the same values twice.
        """
        kind = self.device.type
        change = self.sizes.shrunk(ELEMENTS[kind])
        if self.sizes.elements(change) > MOST_ELEMENTS[kind]:
            raise CannotRun(f"its tensors have {self.sizes.elements(change):,} elements and its sizes are literals")
        try:
            self._settle(change)
        except CannotRun:
            if not change:
                raise
            if self.sizes.elements({}) > MOST_ELEMENTS[kind]:
                raise
            change = {}
            self._settle(change)
        if change:
            self.notes.append("sizes: " + ", ".join(f"{old} -> {new}" for old, new in sorted(change.items())))
        return change

    def _settle(self, change: Mapping[int, int]) -> None:
        """Find the autocast state and the bound of indices under which the region runs as it was recorded."""
        draw = Draw("normal values", sizes=change)
        plain = Variant({}, {})
        self._high = self._bound(draw, plain)
        low = [torch.bfloat16, torch.float16]
        lowest = [d for d in low if any(node["dtype"] == dtype_name(d) for node in self.job["nodes"])]
        problems = []
        for autocast in (None, *lowest):
            variant = Variant({}, {}, autocast)
            try:
                first = self.original(self.inputs(draw, variant), variant, None)
                again = self.original(self.inputs(draw, variant), variant, None)
            except CannotRun as error:
                problems.append(str(error))
                continue
            other = self._unlike(first.seen, bool(change))
            if other is None:
                if _differ(first.output, again.output):
                    raise CannotRun("it draws random numbers")
                self.autocast = autocast
                return
            problems.append(other)
        raise CannotRun(problems[0])

    def _unlike(self, seen: Mapping[int, tuple[torch.dtype, tuple[int, ...]]], resized: bool) -> str | None:
        """A value that is not what was recorded there: the region is then not run as the script ran it."""
        for node in self.job["nodes"]:
            kind, shape = seen.get(node["id"], (None, None))
            if kind is None or node["dtype"] is None:
                continue
            if dtype_name(kind) != node["dtype"]:
                return f"`{node['name']}` gives {dtype_name(kind)} where {node['dtype']} was recorded"
            if not resized and node["shape"] is not None and shape != tuple(node["shape"]):
                return f"`{node['name']}` has shape {shape} where {tuple(node['shape'])} was recorded"
        return None

    def _bound(self, draw: Draw, variant: Variant) -> int:
        """The largest size of an input below which whole numbers are valid indices."""
        whole = [given for given in self.job["inputs"].values() if _is_whole(given)]
        sizes = {n for given in self.job["inputs"].values() if _is_float(given) for n in given["shape"][-2:]}
        if not whole:
            return 2
        host = Program.of(self.job["nodes"], self.job["root"], torch.device("cpu"))
        for high in (*sorted((draw.sizes.get(n, n) for n in sizes), reverse=True), 1):
            self._high = high
            try:
                given = self.inputs(draw, variant, torch.device("cpu"))
                host.run(given, {})
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
                continue
            return int(high)
        return 1

    def variants(self) -> Iterator[Variant]:
        """The recorded dtype, float32 and bfloat16, as far as the region runs in them."""
        yield self.as_recorded
        one = next(iter(self.recorded)) if len(self.recorded) == 1 else None
        for wanted in (torch.float32, torch.bfloat16):
            if self.autocast is None and one is wanted:
                continue
            if one is None and wanted is torch.bfloat16:
                continue  # which of the dtypes would become it was not recorded
            found = self._runs_in(wanted)
            if found is not None:
                yield found

    def _runs_in(self, wanted: torch.dtype) -> Variant | None:
        """The region in another dtype: those named in it are literals or that of its inputs, whichever gives it back.

        A shape is recorded as numbers and `x.dtype` as a dtype: where the region names the inputs' dtype, a result of
        another dtype than the replacement's proves nothing.
        """
        inputs = dict.fromkeys(self.recorded, wanted)
        half = [d for d in self.recorded if d in (torch.float16, torch.bfloat16)]
        readings: list[Cast] = [{}, inputs] if not half else [inputs, {}]
        doubt = json.dumps(self.job["nodes"])
        doubtful = any(f'{{"dtype": "{dtype_name(kind)}"}}' in doubt for kind in self.recorded)
        problem, runs = "", list[Variant]()
        for named in readings:
            variant = Variant(inputs, named, doubtful=doubtful)
            try:
                found = self.original(self.inputs(Draw("normal values", sizes=self.base), variant), variant, None)
            except CannotRun as error:
                problem = problem or str(error)
                continue
            if found.output.dtype is wanted:
                return variant
            runs.append(variant)
        if runs:
            return runs[0]
        self.skipped.append(f"the region does not run in {dtype_name(wanted)}: {problem}")
        return None

    # ----------------------------------------------------------------------------------------------------------- runs

    def inputs(self, draw: Draw, variant: Variant, device: torch.device | None = None) -> dict[int, torch.Tensor]:
        """The inputs of one draw by node, in the variant's dtypes and the draw's layout."""
        found: dict[int, torch.Tensor] = {}
        for position, (name, given) in enumerate(sorted(self.job["inputs"].items())):
            if given["node"] in found:
                continue
            values = drawn(given, self.sizes.shape(name, draw.sizes), draw, self._high, 1000 * position + 7)
            kind = getattr(torch, given["dtype"])
            tensor = laid_out(values.to(variant.inputs.get(kind, kind)), given, draw, device or self.device)
            found[given["node"]] = tensor
        return found

    def leaves(self, inputs: Mapping[int, torch.Tensor], double: bool = False) -> dict[int, torch.Tensor]:
        """Copies of inputs in their layout, that take gradients where the recorded ones did."""
        wanted = {given["node"] for given in self.job["inputs"].values() if given["requires_grad"]}
        return {
            n: copied(t, DOUBLE.get(t.dtype) if double else None).requires_grad_(n in wanted) for n, t in inputs.items()
        }

    def original(
        self,
        inputs: Mapping[int, torch.Tensor],
        variant: Variant,
        cotangent: Cotangent | None,
        rounding: Rounding | None = None,
        double: bool = False,
    ) -> Run:
        """The recorded operations; raises CannotRun with what torch says where they do not take these inputs."""
        watch = rounding or Watch()
        leaves = self.leaves(inputs, double)

        def compute() -> Any:
            with self.program.under(variant.autocast if not double else None), DropoutOff():
                return self.program.run(leaves, DOUBLE if double else variant.named, watch)[self.job["root"]]

        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64 if double else before)
            if rounding is None:
                return finish(compute, leaves, cotangent, watch.seen)
            with rounding.saved():
                return finish(compute, leaves, cotangent, watch.seen)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise CannotRun(first_line(error)) from error
        except Failed as error:
            raise CannotRun(f"it {error}") from error
        finally:
            torch.set_default_dtype(before)

    def replacement(
        self, inputs: Mapping[int, torch.Tensor], variant: Variant, cotangent: Cotangent | None
    ) -> tuple[Run, list[tuple[int, float]]]:
        """The replacement without dropout, and what it would have dropped; raises Failed where it raises."""
        leaves = self.leaves(inputs)
        named = {name: leaves[given["node"]] for name, given in self.job["inputs"].items()}

        off = DropoutOff()

        def compute() -> Any:
            with self.program.under(variant.autocast), off:
                return self.function(named)

        try:
            return finish(compute, leaves, cotangent, {}), off.seen
        except Failed:
            raise
        except Exception as error:  # whatever a replacement raises is a reason to reject it
            raise Failed(f"raises {type(error).__name__}: {first_line(error)}") from error


def _differ(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two runs differ; on a GPU sums by atomics may, in their last digits."""
    one, two = one.nan_to_num(), two.nan_to_num()
    if one.device.type == "cpu":
        return not torch.equal(one, two)
    return float((one - two).abs().max()) > 1e-3 * float(one.abs().max()) if one.numel() else False


def _is_float(given: Mapping[str, Any]) -> bool:
    kind: torch.dtype = getattr(torch, given["dtype"])
    return kind.is_floating_point or kind.is_complex


def _is_whole(given: Mapping[str, Any]) -> bool:
    return not _is_float(given) and given["dtype"] != "bool" and not given["mask"]
