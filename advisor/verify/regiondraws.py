"""Inside the child: sizes, values and memory layouts of the tensors on which a region is compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

AXES = frozenset(
    "softmax log_softmax mean sum var std transpose swapaxes permute unsqueeze squeeze amax amin argmax logsumexp "
    "cumsum cat stack norm flatten pow chunk unbind movedim var_mean std_mean".split()
)  # operations whose whole numbers are axes, exponents or counts, never sizes
AXIS_WORDS = frozenset("dim dims axis dim0 dim1 p training _stacklevel start_dim end_dim".split())
BOUND = 1e3  # of heavy-tailed values: beyond it float16 squares overflow


@dataclass(frozen=True)
class Draw:
    """One set of inputs.

    `values` names the distribution, `mask` what masks are ("recorded", "random", "empty": a row keeps nothing, "full":
    a row keeps everything), `turned` stores tensors with their last two axes swapped, `sizes` maps a recorded size to
    another, `training` is False without gradients. `doubt` is why a difference at these sizes proves nothing; an
    `always` draw is made whatever the time it takes.
    """

    label: str
    values: str = "normal"
    mask: str = "recorded"
    turned: bool = False
    training: bool = True
    sizes: Mapping[int, int] = field(default_factory=dict)
    doubt: str | None = None
    always: bool = False


VALUES = (
    ("normal", "normal values"),
    ("small", "small values"),
    ("large", "large values"),
    ("heavy", "heavy-tailed values"),
    ("mixed", "rows of mixed magnitudes"),
    ("zeros", "zeros"),
    ("constant", "constant rows"),
    ("uniform", "values between 0 and 1"),
)
MASKS = (("random", "other elements"), ("empty", "an empty row"), ("full", "a full row"))


def draws_of(job: Mapping[str, Any], sizes: Mapping[int, int], varied: Sequence[Draw]) -> list[Draw]:
    """What is compared, the most telling first; masks that the batch decides also take values it did not show."""
    found = [Draw(label, values=kind, sizes=sizes, always=True) for kind, label in VALUES[:4]]
    if any(given["mask"] and given["from_batch"] for given in job["inputs"].values()):
        found += [Draw(f"a mask with {label}", mask=kind, sizes=sizes, always=True) for kind, label in MASKS]
    found += [Draw("swapped strides", turned=True, sizes=sizes), Draw("evaluation", training=False, sizes=sizes)]
    return found + [*varied] + [Draw(label, values=kind, sizes=sizes) for kind, label in VALUES[4:]]


# --------------------------------------------------------------------------------------------------------------- sizes


class Sizes:
    """Which recorded sizes of a region may become others: those that no literal in it depends on.

    Shapes are plain numbers in a captured graph: `x.view(B, T, D)` and `1 / sqrt(D)` keep the sizes of the recorded
    run. The last axis of the result is the feature axis, whose size is never changed.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._inputs: Mapping[str, Mapping[str, Any]] = job["inputs"]
        self._shapes = [tuple(node["shape"]) for node in job["nodes"] if node["shape"] is not None]
        self._shapes += [tuple(given["shape"]) for given in self._inputs.values()]
        root = next(node for node in job["nodes"] if node["id"] == job["root"])
        widest = max((tuple(given["shape"]) for given in self._inputs.values()), key=lambda s: (len(s), math.prod(s)))
        self.guide: tuple[int, ...] = tuple(root["shape"]) if len(root["shape"] or ()) > 1 else widest
        self._literals = tuple(_literals(job))

    def elements(self, change: Mapping[int, int]) -> int:
        """Elements of the largest tensor of the region."""
        return max(math.prod(change.get(n, n) for n in shape) for shape in self._shapes)

    def fixed(self, size: int) -> str | None:
        """Why a size cannot be another, or None."""
        if size < 2:
            return "the axis has one element"
        if len(self.guide) < 2:
            return "the region has one axis"
        made = self._made_of(size)
        if any(any(math.isclose(abs(literal), value, rel_tol=1e-9) for value in made) for literal in self._literals):
            return f"a literal in the region may come from the size {size}"
        return None

    def _made_of(self, size: int) -> set[float]:
        """Numbers that source code commonly makes of a size: counts, counts less one, halves, their roots and
        inverses."""
        counts: set[int] = set()
        for shape in (tuple(given["shape"]) for given in self._inputs.values()):
            for chosen in itertools.product((False, True), repeat=len(shape)):
                part = [n for n, taken in zip(shape, chosen, strict=True) if taken]
                if size in part:
                    counts |= {math.prod(part)}
        counts |= {n - 1 for n in counts} | {n // 2 for n in counts}
        found: set[float] = set()
        for n in counts - {0, 1}:
            found |= {float(n), 1.0 / n, math.sqrt(n), 1.0 / math.sqrt(n)}
        return found

    def shape(self, name: str, change: Mapping[int, int]) -> tuple[int, ...]:
        """The shape of an input; a feature axis keeps its size where another axis has the same one."""
        given = self._inputs[name]
        shape = tuple(given["shape"])
        features = bool(shape) and shape[-1] == self.guide[-1] and not given["mask"]
        kept = len(shape) - 1 if features else None
        return tuple(n if axis == kept else change.get(n, n) for axis, n in enumerate(shape))

    def shrunk(self, limit: int) -> dict[int, int]:
        """Smaller sizes, leading axes first, so that no tensor has more than `limit` elements, as far as they may."""
        change: dict[int, int] = {}
        for axis, size in enumerate(self.guide[:-1]):
            if self.elements(change) <= limit:
                break
            least = 1 if axis < len(self.guide) - 2 else 32
            if size > least and size not in change and self.fixed(size) is None:
                change[size] = max(least, size * limit // self.elements(change))
        return change

    def varied(self, base: Mapping[int, int]) -> list[Draw]:
        """Draws of another batch and length than the base."""
        found = []
        wanted = [("a batch of one", 0), *([("an odd length", len(self.guide) - 2)] if len(self.guide) > 2 else [])]
        for label, axis in wanted if len(self.guide) > 1 else []:
            size = self.guide[axis]
            now = base.get(size, size)
            other = 1 if axis == 0 else now - 1 if now % 2 == 0 else max(1, now - 2)
            found.append(Draw(label, sizes={**base, size: other}, doubt=self.fixed(size)))
        return found


def _literals(job: Mapping[str, Any]) -> Iterator[float]:
    """Numbers in arguments and constants that may come from a size."""

    def walk(arg: Any) -> Iterator[float]:
        if isinstance(arg, dict):
            kind, content = next(iter(arg.items()))
            for item in content if kind in ("tuple", "slice") else ():
                yield from walk(item)
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool) and math.isfinite(arg):
            yield float(arg)

    for node in job["nodes"]:
        name = str(node["target"]).rpartition(".")[2].rstrip("_")
        for arg in node["args"]:
            yield from (n for n in walk(arg) if name not in AXES or n != int(n))
        for word, arg in node["kwargs"].items():
            yield from (n for n in walk(arg) if word not in AXIS_WORDS)
    for value in job["constants"].values():
        yield from walk(value)


# -------------------------------------------------------------------------------------------------------------- values


def drawn(given: Mapping[str, Any], shape: tuple[int, ...], draw: Draw, high: int, seed: int) -> torch.Tensor:
    """The values of an input in float64 (bool and whole numbers in their own dtype), on the host.

    Whole numbers are indices below `high`; vectors of parameters keep to normal values, whatever the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, given["dtype"])
    if given["mask"]:
        return _mask(given, shape, draw.mask if given["from_batch"] else "recorded", generator)
    if kind is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int64).to(kind)
    values = "normal" if not given["from_batch"] and len(shape) < 2 else draw.values
    if kind.is_complex:
        real, imaginary = (_numbers(values, shape, generator) for _ in range(2))
        return torch.complex(real, imaginary)
    return _numbers(values, shape, generator)


def _numbers(values: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    def normal(size: tuple[int, ...] = shape) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rows = (*shape[:-1], 1) if shape else ()
    if values == "small":
        return normal() * 1e-3
    if values == "large":
        return normal() * 1e2
    if values == "heavy":  # a quotient of two normal variables has the Cauchy distribution
        return (normal() / normal()).clamp(-BOUND, BOUND)
    if values == "zeros":
        return torch.zeros(shape, dtype=torch.float64)
    if values == "constant":
        return normal(rows).expand(shape).clone()
    if values == "mixed":
        powers = torch.rand(rows, generator=generator, dtype=torch.float64) * 6.0 - 4.0
        return normal() * 10.0**powers
    if values == "uniform":
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    return normal()


def _mask(given: Mapping[str, Any], shape: tuple[int, ...], how: str, generator: torch.Generator) -> torch.Tensor:
    """A mask of the recorded kind, or another its producer may give.

    The facts tell of the pattern of True, non-zero or kept elements, and of that of the others.
    """
    facts = given["facts"]
    number = getattr(torch, given["dtype"])
    names = ("keep", "drop") if number is torch.bool or "nonzero" not in facts else ("nonzero", "zero")
    kept = _kept(facts, names, shape, how, generator)
    if number is torch.bool:
        return kept
    if names[0] == "nonzero":
        return kept.to(torch.float64 if number.is_floating_point else number)
    fill = float(facts.get("fill", "-inf"))
    return torch.where(kept, 0.0, fill).to(torch.float64)


def _kept(
    facts: Mapping[str, str], names: tuple[str, str], shape: tuple[int, ...], how: str, generator: torch.Generator
) -> torch.Tensor:
    ones = torch.ones(shape, dtype=torch.bool)
    kept, dropped = facts.get(names[0]), facts.get(names[1])
    if how == "recorded" and "causal" in (kept, dropped):
        return ones.tril() if kept == "causal" else ~ones.tril()
    if how == "recorded" and "all" in (kept, dropped):
        return ones if kept == "all" else ~ones
    found = torch.rand(shape, generator=generator) < 0.5
    if shape and shape[-1] > 1:  # every row has both kinds, unless the recorded mask had rows without
        if f"{names[1]}_empty" not in facts or how != "recorded":
            found[..., -1] = False
        if f"{names[0]}_empty" not in facts or how != "recorded":
            found[..., 0] = True
    if how in ("empty", "full"):
        found.reshape(-1, shape[-1] if shape else 1)[0] = how == "full"
    return found


# ------------------------------------------------------------------------------------------------------------- layouts


def laid_out(values: torch.Tensor, given: Mapping[str, Any], draw: Draw, device: torch.device) -> torch.Tensor:
    """The values in the recorded memory layout, or with their last two axes stored the other way round.

    At other sizes than recorded the order of the axes is kept. An axis of stride 0 repeats its first element.
    """
    shape, steps = tuple(values.shape), given["stride"]
    steps = tuple(steps) if steps is not None and len(steps) == len(shape) else None
    repeated = [axis for axis, step in enumerate(steps or ()) if step == 0 and shape[axis] > 1]
    for axis in repeated:
        values = values.narrow(axis, 0, 1)
    order = sorted(range(len(shape)), key=lambda axis: (-(steps[axis] if steps else 0), axis))
    if draw.turned and len(order) > 1:
        order = [*order[:-2], order[-1], order[-2]]
    exact = steps is not None and shape == tuple(given["shape"]) and not draw.turned
    if exact and steps is not None and values.numel():
        last = sum((n - 1) * step for n, step in zip(values.shape, steps, strict=True))
        flat = torch.zeros(last + 1, dtype=values.dtype, device=device)
        stored = flat.as_strided(tuple(values.shape), steps)
        stored.copy_(values)
    else:
        gap = 2 if draw.turned and len(order) == 1 else 1
        flat = torch.zeros((*(values.shape[axis] for axis in order), gap), dtype=values.dtype, device=device)
        back = sorted(range(len(order)), key=lambda place: order[place])
        stored = flat.select(-1, 0).permute(back)
        stored.copy_(values)
    return stored.expand(shape) if repeated else stored
