"""Inside the child: run recorded operator calls again, alone, with the device's queue kept full.

Device counters need windows of about a tenth of a second, far more than one operator takes. A call repeated back to
back fills such a window with nothing else. A stretch in which the queue ran dry mixes idle time in and is given up.
(`python -m advisor.capture.replay PLAN RESULT`)
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from advisor.operators.families import POINTWISE, plain_name

DEVICE = "cuda"
SETTLE_S = 0.1  # from the first repetition to where a window begins
BATCH_S = 0.02  # work enqueued at once
ATTEMPTS = 3
GRAPH_BELOW_S = 50e-6  # shorter calls take the host longer to launch than the device to run
REPETITIONS = 200  # of a short call in one device graph
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint64",
        "uint32",
        "uint16",
        "bool",
        "complex64",
        "complex128",
    )
    if hasattr(torch, name)
}
NUMBERS = ("float64", "int64", "complex128", "bool")  # what torch makes of a Python number


class CannotReplay(Exception):
    """Why a recorded call cannot be made again."""


def main(plan: Path, result: Path) -> None:
    """Replay the calls of a plan file one after the other and write where in time each of them ran alone.

    The plan is {"calls": [{"name", "shapes", "dtypes", "strides", "concrete"}], "seconds", "once"}; the result has one
    entry per call: {"begin_s", "end_s" (monotonic clock), "time_us"} or {"reason"}. With `once` every call runs
    one time between cudaProfilerStart and cudaProfilerStop, for a profiler outside.
    """
    asked = json.loads(plan.read_text(encoding="utf-8"))
    found = []
    for call in asked["calls"]:
        try:
            run = prepare(call)
            found.append(_once(run) if asked.get("once") else _window(run, float(asked["seconds"])))
        except CannotReplay as error:
            found.append({"reason": str(error)})
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # what torch says of arguments it refuses
            found.append({"reason": f"torch refuses the recorded arguments: {_first_line(error)}"})
        torch.cuda.empty_cache()
        result.write_text(json.dumps(found), encoding="utf-8")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


# ----------------------------------------------------------------------------------------------------------- arguments


def prepare(call: Mapping[str, Any]) -> Callable[[], object]:
    """The call with arguments of the recorded sizes, dtypes and strides; raises CannotReplay.

    Inference mode leaves autograd out, which takes no undefined tensor where a backward operator does.
    """
    name = str(call["name"])
    space, _, plain = name.partition("::")
    if space != "aten" or not hasattr(torch.ops.aten, plain):
        raise CannotReplay(f"{name} is no operator that torch brings")
    packet = getattr(torch.ops.aten, plain)
    reasons = []
    for overload in packet.overloads():
        operator = getattr(packet, overload)
        try:
            arguments, named = _arguments(operator._schema.arguments, call)
            with torch.inference_mode():
                operator(*arguments, **named)
        except (CannotReplay, RuntimeError, TypeError) as error:
            reasons.append(_first_line(error))
            continue
        return lambda: operator(*arguments, **named)
    raise CannotReplay(reasons[0] if reasons else f"{name} has no overload")


def _arguments(schema: Sequence[Any], call: Mapping[str, Any]) -> tuple[list[object], dict[str, object]]:
    """The arguments by position and by name."""
    shapes, dtypes, strides = call["shapes"], call["dtypes"], call["strides"]
    concrete = call["concrete"]
    if len(shapes) > len(schema):
        raise CannotReplay("no overload takes so many arguments")
    found: list[object] = []
    named: dict[str, object] = {}
    for place, argument in enumerate(schema):
        if place >= len(shapes):
            if not argument.has_default_value():
                raise CannotReplay("no overload takes so few arguments")
            break
        text = concrete[place] if place < len(concrete) else ""
        if _is_number(call, place):
            value: object = torch.ones((), dtype=DTYPES[dtypes[place]])
        else:
            layout = strides[place] if place < len(strides) else None
            value = _value(argument, shapes[place], dtypes[place], layout, text)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            found.append(value)
    return found, named


def _is_number(call: Mapping[str, Any], place: int) -> bool:
    """Whether an input of a pointwise call is a Python number, which torch records as a tensor without dimensions.

    It stays on the host and the kernel gets its value; one in device memory would make it another kernel.
    """
    shapes, dtypes = call["shapes"], call["dtypes"]
    pointwise = plain_name(str(call["name"])) in POINTWISE and any(len(shape) for shape in shapes)
    return pointwise and not shapes[place] and dtypes[place] in NUMBERS


def _value(argument: Any, shape: Sequence[int], dtype: str, strides: Sequence[int] | None, text: str) -> object:
    kind = str(argument.type)
    if dtype and "Tensor" in kind and "List" not in kind:
        return _tensor(shape, dtype, strides)
    if "Tensor" not in kind:
        return _constant(kind, text, argument)
    if "List" in kind:
        raise CannotReplay("lists of tensors are not recorded one by one")
    if shape or text:
        raise CannotReplay("the dtype of an input is not known")
    return None  # an undefined tensor, also where the schema has no Optional


def _constant(kind: str, text: str, argument: Any) -> object:
    """A constant argument out of its recorded text; devices and generators take their default."""
    if kind in ("str", "Optional[str]"):
        raise CannotReplay(f"the text of the argument {argument.name} is not recorded")
    if text in ("", "None") or any(word in kind for word in ("Device", "Layout", "Generator", "MemoryFormat")):
        if argument.has_default_value():
            return argument.default_value
        if kind.startswith("Optional"):
            return None
        raise CannotReplay(f"the argument {argument.name} is not recorded")
    if text in ("True", "False"):
        return text == "True"
    try:
        if text[0] == "[":
            return json.loads(text.replace("True", "true").replace("False", "false"))
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise CannotReplay(f"the constant argument {text[:40]!r} cannot be read") from None


def _tensor(shape: Sequence[int], dtype: str, strides: Sequence[int] | None) -> torch.Tensor:
    """Random values, of integers zeros (valid as an index), in the recorded memory layout."""
    kind = DTYPES.get(dtype)
    if kind is None:
        raise CannotReplay(f"dtype {dtype} is not known to this torch")
    layout = tuple(strides) if strides is not None and len(strides) == len(shape) else None
    size = 1 + sum((n - 1) * s for n, s in zip(shape, layout, strict=True)) if layout else math.prod(shape)
    if math.prod(shape) == 0:
        return torch.empty(tuple(shape), dtype=kind, device=DEVICE)
    if kind.is_floating_point:
        flat = torch.randn(size, device=DEVICE, dtype=torch.float32 if kind.itemsize < 2 else kind).to(kind)
    else:
        flat = torch.zeros(size, device=DEVICE, dtype=kind)
    return flat.as_strided(tuple(shape), layout) if layout else flat.reshape(tuple(shape))


# ------------------------------------------------------------------------------------------------------------- running


def _once(run: Callable[[], object]) -> dict[str, Any]:
    with torch.inference_mode():
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return {}


def _window(run: Callable[[], object], seconds: float) -> dict[str, Any]:
    """The stretch of time in which the call ran back to back; raises CannotReplay where the queue did not stay full.

    As a device graph where the call is short, and where the host takes longer to launch it than the device to run it.
    """
    with torch.inference_mode():
        single = _time(run)
        found = _repeated(run, single, seconds) if single >= GRAPH_BELOW_S else None
        if found is None:
            graph = _graph(run)
            single = _time(graph) / REPETITIONS
            found = _repeated(graph, single * REPETITIONS, seconds)
    if found is None:
        raise CannotReplay("the queue ran dry: the host launches this call more slowly than the device runs it")
    return {**found, "time_us": single * 1e6}


def _repeated(run: Callable[[], object], time_s: float, seconds: float) -> dict[str, Any] | None:
    count = max(1, round(BATCH_S / time_s))
    tries = (_filled(run, count, seconds) for _ in range(ATTEMPTS))
    return next((found for found in tries if found is not None), None)


def _time(run: Callable[[], object]) -> float:
    """Seconds of one call on the device."""
    for _ in range(3):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        run()
    end.record()
    end.synchronize()
    return max(float(begin.elapsed_time(end)) / 5e3, 1e-6)


def _graph(run: Callable[[], object]) -> Callable[[], object]:
    """Many repetitions as one device graph, which the host launches in one go."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPETITIONS):
            run()
    return graph.replay


def _filled(run: Callable[[], object], count: int, seconds: float) -> dict[str, Any] | None:
    """Keep two batches in the queue; None when the device had ended both before the next one was enqueued."""
    ends = [_enqueue(run, count), _enqueue(run, count)]
    begin = time.monotonic() + SETTLE_S
    while True:
        while not ends[0].query():
            time.sleep(BATCH_S / 20)
        now = time.monotonic()
        ends = [ends[1], _enqueue(run, count)]
        dry, over = ends[0].query(), now >= begin + seconds
        if dry or over:
            torch.cuda.synchronize()
            return None if dry else {"begin_s": begin, "end_s": now}


def _enqueue(run: Callable[[], object], count: int) -> Any:
    for _ in range(count):
        run()
    end = torch.cuda.Event()
    end.record()
    return end


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
