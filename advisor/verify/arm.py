"""Inside the child: record the loss, gradients, parameter steps and evaluation of one arm of the proof."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as tree

from advisor import clock
from advisor.session import SessionPlan
from advisor.verify.draws import spread_of
from advisor.verify.interventions import AutocastWatch, DropoutLog, HigherPrecision, first_rows
from advisor.verify.recording import FULL_LIMIT, Recorder, checksum, dtype_name, value_checksum

REPEATS = 2  # evaluation passes on the same batch
MAX_RECORDED_BATCHES = 10_000
COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")  # what the profiler shows of it


class NumericsPlan(SessionPlan):
    """Record one arm of the numerics proof, then stop the script.

    Options: arm (base, cand or ref), reference (float32, float64 or as-found, for ref), trajectory_steps, max_seconds
    (of the trajectory), batch_divisor, full_limit (bytes). Writes numerics.json and tensors.npz.
    """

    watch_modules = True

    def start(self) -> None:
        options = self.session.spec.options
        self.steps = int(options.get("trajectory_steps", 20))
        self.max_seconds = float(options.get("max_seconds", 120.0))
        self.divisor = int(options.get("batch_divisor", 1))
        self.full_limit = int(options.get("full_limit", FULL_LIMIT))
        asked = options.get("reference", "float32") if options["arm"] == "ref" else None
        self.again = asked == "as-found"  # a second run of the original takes the place of one in higher precision
        self.reference = None if self.again else asked
        self.roots: list[nn.Module] = []
        self.losses: list[list[Any]] = [[]]
        self.batches: list[str] = []
        self.inputs: list[str] = []
        self.first_call: _Call | None = None
        self.before: dict[int, torch.Tensor] = {}
        self.starts: dict[int, str] = {}
        self.buffers_before: dict[str, str] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.parameters: dict[str, dict[str, Any]] = {}
        self.record: Recorder | None = None
        self.operators: Any = None
        self.noted: tuple[int, bool] | None = None  # size and mode of the module whose call was noted in this step
        self.evaluating = False
        self.begun = 0.0
        self._intervene()

    def _intervene(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        self.dropout = DropoutLog()
        self.dropout.install()
        self.dropout.active = True
        self.autocast = AutocastWatch(off=self.reference is not None)
        self.autocast.install()
        self.higher = HigherPrecision(self.reference) if self.reference is not None else None
        if self.higher is not None:
            self.higher.install()

    # ------------------------------------------------------------------------------------------------------ callbacks

    def batch(self, value: Any) -> Any:
        if len(self.batches) < MAX_RECORDED_BATCHES:
            tensors = [leaf for leaf in tree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            self.batches.append(" ".join(value_checksum(tensor) for tensor in tensors))
        return first_rows(value, self.divisor)

    def module_call(self, module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.evaluating:
            self._note_call(module, args, kwargs)
        if self.higher is not None:
            args, kwargs = self.higher.prepare(module, args, kwargs)
        if self.record is None and torch.is_grad_enabled():
            if all(module is not known for known in self.roots):
                self.roots.append(module)
                self.buffers_before |= {name: checksum(value) for name, value in _buffers(module, len(self.roots) - 1)}
            self._note_first_call(module, args, kwargs)
        return call(module, *args, **kwargs)

    def backward(self, loss: Any) -> None:
        self.losses[-1].append(loss.double().mean())

    def gradients_ready(self, optimizer: Any) -> None:
        """Record every gradient of an optimizer that steps for the first time."""
        if self.evaluating:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        fresh = [p for p in parameters if id(p) not in self.before]
        if not fresh or self.session.hooks.steps > 1:
            return
        if self.record is None:
            self._begin_recording()
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler that leaves unscaling to a fused optimizer
        for parameter in fresh:
            self._record_gradient(parameter, scale)

    def step_end(self, step: int) -> None:
        if self.evaluating:
            return
        if step == 0:
            for known in self.session.hooks.optimizers:  # the hook of the one that has just stepped comes too late
                self._record_updates(known.optimizer, (), {})
            self._end_first_step()
        self.noted = None
        self._watch_operators(step)
        spent = time.monotonic() - self.begun
        if step + 1 >= self.steps or spent > self.max_seconds:
            self.evaluating = True
            self._evaluate()
            self.session.stop()
        self.losses.append([])

    def finish(self) -> None:
        """Write what was recorded, also when the script ended before all steps asked for."""
        if self.record is None:
            return
        facts = self.record.facts
        facts["losses"] = [float(loss) for losses in self.losses for loss in losses]
        facts["steps"] = self.session.hooks.steps
        facts["batches"] = self.batches
        facts["inputs"] = self.inputs
        facts["parameters"] = list(self.parameters.values())
        facts["arm"] = self.session.spec.options["arm"]
        facts["reference"] = facts["compute"] if self.again else self.reference
        facts.setdefault("evaluation", {"skipped": "the script ended before the evaluation pass"})
        self.record.write()

    # ----------------------------------------------------------------------------------------------------- first step

    def _note_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """Checksum what the first outermost call of a step is given; later ones see results of earlier ones.

        A call in training mode takes the place of one of the same module, or of a copy of it, in evaluation mode, which
        may come without gradients as well.
        """
        if not torch.is_grad_enabled():
            return
        if self.noted is not None:
            if not module.training or self.noted != (_size(module), False):
                return
            self.inputs.pop()
        if len(self.inputs) >= MAX_RECORDED_BATCHES:
            return
        self.noted = (_size(module), module.training)
        leaves = [t for t in tree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and not t.requires_grad]
        self.inputs.append(" ".join(value_checksum(tensor) for tensor in leaves))

    def _note_first_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the inputs of the largest module for the evaluation pass: of its first call in training mode, if any."""
        size, known = _size(module), self.first_call
        trains = known is not None and known.size == size and module.training and not known.training
        if known is None or size > known.size or trains:
            self.first_call = _Call(module, args, kwargs, size, module.training)

    def _begin_recording(self) -> None:
        optimizers = [record.optimizer for record in self.session.hooks.optimizers]
        self.names = parameter_names(self.roots, optimizers)
        tensors = _all_parameters(self.roots, optimizers)
        total = 2 * 8 * sum(p.numel() for p in tensors)  # as for a float64 reference: all arms take the same way
        self.record = Recorder(self.session.out, whole=total <= self.full_limit)
        self.record.facts["compute"] = self._compute_dtype()
        self.record.facts["device"] = tensors[0].device.type if tensors else "cpu"
        for parameter in tensors:
            self._describe(parameter)

    def _describe(self, parameter: Any) -> None:
        name = self.names[id(parameter)]
        self.parameters[name] = {
            "name": name,
            "shape": list(parameter.shape),
            "dtype": dtype_name(parameter.dtype),
            "requires_grad": parameter.requires_grad,
            "start": value_checksum(parameter),
            "start_norm": float(torch.linalg.vector_norm(parameter.detach(), dtype=torch.float64)),
            "gradient": None,
        }

    def _compute_dtype(self) -> str:
        """The lowest precision the first step was seen to compute in."""
        if self.autocast.dtypes:
            return dtype_name(min(self.autocast.dtypes, key=lambda dtype: -torch.finfo(dtype).eps))
        kinds = {p.dtype for root in self.roots for p in root.parameters() if p.is_floating_point()}
        lowest = max(kinds, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        on_cuda = any(p.is_cuda for root in self.roots for p in root.parameters())
        if lowest is torch.float32 and on_cuda and clock.matmul_precision() != "highest":
            return "tf32"
        return dtype_name(lowest)

    def _record_gradient(self, parameter: Any, scale: Any) -> None:
        assert self.record is not None
        key = id(parameter)
        if key not in self.names:
            self.names[key] = f"unnamed{len(self.names)}"
        name = self.names[key]
        if name not in self.parameters:
            self._describe(parameter)
        if not self.before:
            register_optimizer_step_post_hook(self._record_updates)
        self.before[key] = parameter.detach().to("cpu", copy=True)
        if parameter.grad is None:
            return
        gradient = parameter.grad.detach()
        if scale is not None:
            gradient = gradient / scale.to(gradient.device)
        self.parameters[name]["gradient"] = checksum(gradient)
        self.record.add("gradient", name, gradient)
        self.gradients[key] = gradient.clone()

    def _record_updates(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """After an optimizer's first step: how far every parameter moved."""
        if self.record is None or self.evaluating:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                facts = self.parameters.get(self.names.get(id(parameter), ""))
                if facts is None or id(parameter) not in self.before or "weight" in facts:
                    continue
                gradient = self.gradients.pop(id(parameter), None)
                before = self.before[id(parameter)]
                facts["weight"] = self.record.add_update(facts["name"], before, parameter, gradient)

    def _end_first_step(self) -> None:
        self.begun = time.monotonic()
        self.dropout.active = False
        if self.record is None:
            return
        self.record.facts["dropout"] = {"training": self.dropout.take()}
        self._record_buffers("first step")

    def _watch_operators(self, step: int) -> None:
        """Note the names of the operators that run in the second step: a fused kernel that falls back is seen here.

        What runs as compiled code has no names of its own; that there is such code is noted.
        """
        if step == 0 and self.steps > 1:
            self.operators = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.operators.start()
        elif self.operators is not None:
            self.operators.stop()
            if self.record is not None:
                names = {event.key for event in self.operators.key_averages()}
                self.record.facts["operators"] = sorted(name for name in names if name.startswith("aten::"))
                self.record.facts["compiled"] = any(name.startswith(COMPILED) for name in names)
            self.operators = None

    def _record_buffers(self, when: str) -> None:
        """Record the persistent buffers that have changed since the first call."""
        assert self.record is not None
        seen = self.record.facts.setdefault("buffers", {})
        for number, root in enumerate(self.roots):
            for name, value in _buffers(root, number):
                changed = checksum(value) != self.buffers_before.get(name)
                seen[f"{when}: {name}"] = {"changed": changed, "checksum": checksum(value), "shape": list(value.shape)}
                if changed and value.is_floating_point():
                    self.record.add("buffer", f"{when}: {name}", value)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self) -> None:
        """Evaluate on the first batch as trained, then again with the parameters all arms started from."""
        if self.record is None or self.first_call is None:
            return
        self._record_buffers("last step")
        facts: dict[str, Any] = {}
        self.record.facts["evaluation"] = facts
        training = self.first_call.module.training
        try:
            self.first_call.module.eval()
            facts["repeatable"] = self._record_outputs("trained")
            self.record.facts["dropout"]["evaluation"] = self.dropout.take()
            with torch.no_grad():
                for parameter in _all_parameters(self.roots, []):
                    start = self.before.get(id(parameter))
                    if start is not None:
                        parameter.copy_(start)
            self._record_outputs("start")
            if self.record.facts["dropout"]["training"]:
                self.record.facts["spread"] = self._spread()
        except Exception as error:  # noqa: BLE001 - the user's model may not support evaluation; the comparison decides
            facts["error"] = f"{type(error).__qualname__}: {error}"
        finally:
            self.first_call.module.train(training)

    def _spread(self) -> list[dict[str, Any]]:
        """The outputs in training mode with dropout on, over seeded draws."""
        assert self.first_call is not None
        call = self.first_call
        call.module.train()
        self.dropout.off = False
        try:
            return spread_of(lambda: tree.tree_leaves(call.again()))
        finally:
            self.dropout.off = True

    def _record_outputs(self, when: str) -> bool:
        """Call the model on the kept inputs; record the outputs once and whether a second call repeats them."""
        assert self.record is not None and self.first_call is not None
        seen: list[list[str]] = []
        for turn in range(REPEATS):
            self.dropout.active = turn == 0
            outputs = [t for t in tree.tree_leaves(self.first_call.again()) if isinstance(t, torch.Tensor)]
            seen.append([checksum(tensor) for tensor in outputs])
            for number, output in enumerate(outputs if turn == 0 else ()):
                if output.is_floating_point():
                    self.record.add("output", f"{when}: output {number}", output)
        return all(other == seen[0] for other in seen)


def _size(module: nn.Module) -> int:
    """The number of parameters, by which a module and a copy of it are known to be the same; a loss has none."""
    return sum(p.numel() for p in module.parameters())


class _Call:
    """A module call that can be made again, under the autocast setting it was made under."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any, size: int, training: bool) -> None:
        self.module = module
        self.size = size
        self.training = training
        self._args, self._kwargs = tree.tree_map(_copy, (args, kwargs))
        leaves = [t for t in tree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        self._device = leaves[0].device.type if leaves else "cpu"
        self._autocast = torch.is_autocast_enabled(self._device)
        self._dtype = torch.get_autocast_dtype(self._device)

    def again(self) -> Any:
        """Call it without gradients."""
        with torch.no_grad(), torch.autocast(self._device, dtype=self._dtype, enabled=self._autocast):
            args, kwargs = tree.tree_map(_copy, (self._args, self._kwargs))
            return self.module(*args, **kwargs)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _plain_name(name: str) -> str:
    """A parameter's name without what compilation and data parallelism put around a module."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if parts and parts[0] == "module" and len(parts) > 1 else parts)


def parameter_names(roots: list[nn.Module], optimizers: list[Any]) -> dict[int, str]:
    """Names of parameters by identity: from the outermost modules, else from the optimizer's groups."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, root in enumerate(roots):
        for name, parameter in root.named_parameters():
            if id(parameter) in names:
                continue
            plain = _plain_name(name)
            names[id(parameter)] = plain if plain not in taken else f"module{number}.{plain}"
            taken.add(names[id(parameter)])
    for which, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                prefix = f"optimizer{which}." if which else ""
                names.setdefault(id(parameter), f"{prefix}group{group_number}.{index}")
    return names


def _all_parameters(roots: list[nn.Module], optimizers: list[Any]) -> list[Any]:
    found = {id(p): p for root in roots for p in root.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found |= {id(p): p for p in group["params"]}
    return list(found.values())


def _buffers(root: nn.Module, number: int) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to a checkpoint, by name; the ones marked non-persistent may come and go."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in root.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                plain = _plain_name(f"{path}.{name}" if path else name)
                found.append((f"module{number}.{plain}" if number else plain, value))
    return found
