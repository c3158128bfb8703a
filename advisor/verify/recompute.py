"""Inside the child: runs the recorded operations of a region again on given tensors, as captured or in float64."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Values: TypeAlias = dict[int, Any]
Cast: TypeAlias = Mapping[torch.dtype, torch.dtype]

PLACEHOLDER = re.compile(r"\{(\w+)\}")
CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
DOUBLE: Cast = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
DROPOUTS = ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
            "feature_dropout", "native_dropout")  # fmt: skip


class CannotRun(Exception):
    """Why a recorded operation cannot be run again."""


# ------------------------------------------------------------------------------------------------------------- program


class Watch:
    """Sees every operation of a run; `seen` holds dtype and shape of the nodes' values."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[torch.dtype, tuple[int, ...]]] = {}

    def before(self, node: Mapping[str, Any], arguments: list[Any]) -> None:
        """An operation is about to run on `arguments`, which may be exchanged."""

    def after(self, node: Mapping[str, Any], value: Any) -> None:
        """It has run."""
        if isinstance(value, torch.Tensor):
            self.seen[node["id"]] = (value.dtype, tuple(value.shape))


@dataclass(frozen=True)
class Program:
    """The operations of a region in order; `root` is the node whose value is the result."""

    nodes: Sequence[Mapping[str, Any]]
    root: int
    device: torch.device
    functions: Mapping[int, Callable[..., Any]]

    @staticmethod
    def of(nodes: Sequence[Mapping[str, Any]], root: int, device: torch.device) -> Program:
        """Look every target up; raises CannotRun for what cannot be called again."""
        functions = {}
        for node in nodes:
            if node["op"] not in ("call_function", "call_method"):
                raise CannotRun(f"`{node['name']}` ({node['op']}) was not recorded as an operation")
            _check(node)
            functions[node["id"]] = _function(str(node["target"]))
        return Program(nodes, root, device, functions)

    def under(self, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
        """The autocast state of the recorded run."""
        if autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=autocast, cache_enabled=False)

    def run(self, given: Mapping[int, Any], cast: Cast, watch: Watch | None = None) -> Values:
        """Every node's value; dtypes named in arguments are replaced by `cast`, dropout passes its input on."""
        values: Values = dict(given)
        for node in self.nodes:
            name = node["id"]
            arguments = [self._argument(arg, values, cast) for arg in node["args"]]
            keywords = {key: self._argument(arg, values, cast) for key, arg in node["kwargs"].items()}
            if node["dropout"]:
                values[name] = arguments[0] if arguments else keywords["input"]
                continue
            if watch is not None:
                watch.before(node, arguments)
            method = str(node["target"]).rpartition(".")[2] if node["op"] == "call_method" else ""
            if method in CASTS and not arguments[1:]:
                named = CASTS[method]  # never the dtype of an input, as `.to(x.dtype)` is
                values[name] = arguments[0].to(DOUBLE.get(named, named) if cast is DOUBLE else named)
            else:
                values[name] = self.functions[name](*arguments, **keywords)
            if watch is not None:
                watch.after(node, values[name])
        return values

    def _argument(self, arg: Any, values: Values, cast: Cast) -> Any:
        if not isinstance(arg, dict):
            return arg
        kind, content = next(iter(arg.items()))
        if kind == "ref":
            return values[content]
        if kind == "tuple":
            return tuple(self._argument(item, values, cast) for item in content)
        if kind == "slice":
            return slice(*(self._argument(item, values, cast) for item in content))
        if kind == "dtype":
            found = getattr(torch, content)
            return cast.get(found, found)
        return self.device if kind == "device" else constant(arg)


def constant(arg: Any) -> Any:
    """A recorded argument that is no tensor, dtype or slice of tensors; raises CannotRun for what was not recorded."""
    if not isinstance(arg, dict):
        return arg
    kind, content = next(iter(arg.items()))
    if kind == "float":
        return float(content)
    if kind == "ellipsis":
        return ...
    if kind == "tuple":
        return tuple(constant(item) for item in content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    raise CannotRun(f"an argument of type {content} was not recorded")


def _check(node: Mapping[str, Any]) -> None:
    """Raises CannotRun where an argument was not recorded."""

    def walk(arg: Any) -> None:
        if not isinstance(arg, dict):
            return
        kind, content = next(iter(arg.items()))
        if kind in ("opaque", "layout"):
            raise CannotRun(f"`{node['name']}` ({node['target']}) takes a {content} that was not recorded")
        if kind == "dtype" and not isinstance(getattr(torch, content, None), torch.dtype):
            raise CannotRun(f"dtype {content} is not known to this torch")
        for item in content if kind in ("tuple", "slice") else ():
            walk(item)

    for arg in (*node["args"], *node["kwargs"].values()):
        walk(arg)


def _function(target: str) -> Callable[..., Any]:
    """What a recorded target calls: an operator, a method by name, `getattr`, or something of torch itself."""
    home, _, name = target.partition(".")
    if home == "method":
        return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    found: Any = getattr if target == "builtins.getattr" else None
    if home in ("operator", "_operator"):
        found = getattr(operator, name, None)
    elif home == "torch":
        found = torch
        for part in target.split(".")[1:]:
            found = getattr(found, part, None)
    if not callable(found):
        raise CannotRun(f"{target} is not an operation of torch")
    return found  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------------- dropout


class DropoutOff(TorchFunctionMode):
    """Passes on what a replacement would drop elements of; `seen` has (elements, probability) of every such call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            tensor = args[0] if args else kwargs["input"]
            self.seen.append((tensor.numel(), probability(args, kwargs)))
            return tensor * 1.0  # a tensor of its own, as dropout gives
        if name == "scaled_dot_product_attention":
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            named |= kwargs
            query, key = named.pop("query"), named.pop("key")
            if "dropout_p" in named:
                scores = query.numel() // max(1, query.shape[-1]) * key.shape[-2]
                self.seen.append((scores, float(named.pop("dropout_p"))))
            return func(query, key, named.pop("value"), **named)
        return func(*args, **kwargs)


def probability(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """With which probability a dropout call drops an element, 0 outside training (torch's defaults: 0.5, training)."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    trains = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return float(p) if trains else 0.0


# ---------------------------------------------------------------------------------------------------------------- runs

Cotangent: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Result and input gradients of one run, by node; what the gradients came from, and what was seen.

    `shares` are the inputs in whose memory the result lies.
    """

    output: torch.Tensor
    differentiable: bool
    gradients: Mapping[int, torch.Tensor | None]
    cotangent: torch.Tensor | None
    seen: Mapping[int, tuple[torch.dtype, tuple[int, ...]]]
    shares: frozenset[int]

    def part(self, node: int | None) -> torch.Tensor | None:
        """The result, or the gradient of an input."""
        return self.output if node is None else self.gradients[node]


class Failed(Exception):
    """What is wrong with the replacement beyond its numbers."""


def compiled(
    template: str, inputs: Mapping[str, Any], constants: Mapping[str, Any], imports: Sequence[str] = ()
) -> Callable[[Mapping[str, torch.Tensor]], Any]:
    """The template as a function of its tensors by name; raises CannotRun where it cannot be spelled or imported."""
    names = set(PLACEHOLDER.findall(template))
    unknown = sorted(names - set(inputs) - set(constants))
    if unknown:
        raise CannotRun(f"the replacement reads {', '.join(unknown)}, whose values are not known")
    names_of: dict[str, Any] = {"torch": torch, "F": F}
    try:
        exec("\n".join(imports), names_of)
    except ImportError as error:
        raise CannotRun(f"the replacement needs what is not there: {error}") from error
    code = compile(PLACEHOLDER.sub(r"_\1_", template).strip(), "<replacement>", "eval")
    fixed = {f"_{name}_": constant(value) for name, value in constants.items()}

    def function(tensors: Mapping[str, torch.Tensor]) -> Any:
        given = {f"_{name}_": tensor for name, tensor in tensors.items()}
        return eval(code, {**names_of, **fixed, **given})

    return function


def random_cotangent(swapped: bool) -> Cotangent:
    """A random gradient of a result, in its dtype; with swapped strides where they are wanted."""

    def cotangent(output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(17)
        values = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        found = values.to(device=output.device, dtype=output.dtype)
        turned = swapped and found.dim() > 1
        return found.transpose(-1, -2).contiguous().transpose(-1, -2) if turned else found

    return cotangent


def same_cotangent(given: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    if output.shape != given.shape:
        raise Failed(f"has shape {tuple(output.shape)} instead of {tuple(given.shape)}")
    return given.to(output.dtype)


def finish(
    compute: Callable[[], Any],
    leaves: Mapping[int, torch.Tensor],
    cotangent: Cotangent | None,
    seen: Mapping[int, tuple[torch.dtype, tuple[int, ...]]],
) -> Run:
    """Run forward, and backward from a cotangent; raises Failed for what is no result of its own."""
    versions = {n: leaf._version for n, leaf in leaves.items()}
    with torch.set_grad_enabled(cotangent is not None):
        output = compute()
    if not isinstance(output, torch.Tensor):
        raise Failed("does not give one tensor")
    if any(leaf._version != versions[n] for n, leaf in leaves.items()):
        raise Failed("changes its input in place")
    wanted = {n: leaf for n, leaf in leaves.items() if leaf.requires_grad}
    gradients: dict[int, torch.Tensor | None] = dict.fromkeys(wanted)
    back = None
    if cotangent is not None and output.requires_grad and wanted:
        back = cotangent(output)
        found = torch.autograd.grad(output, list(wanted.values()), back, allow_unused=True)
        gradients = dict(zip(wanted, found, strict=True))
    place = output.untyped_storage().data_ptr()
    shares = frozenset(n for n, leaf in leaves.items() if place and leaf.untyped_storage().data_ptr() == place)
    return Run(output.detach(), output.requires_grad, gradients, back, seen, shares)


def copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A copy in the same memory layout, in another dtype densely."""
    if dtype is not None and dtype is not tensor.dtype:
        return tensor.to(dtype)
    if any(step == 0 and n > 1 for step, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.detach()
    flat = torch.zeros_like(tensor.as_strided((_extent(tensor),), (1,)))
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor).detach()


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
