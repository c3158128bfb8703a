"""What a script's files say about the precision of its products: named already, or not to be lowered."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from advisor.model import LoopCall
from advisor.patterns.callsites import differentiates_twice
from advisor.source import Source
from advisor.usercode.unreached import asleep

ALREADY = {
    "autocast": "the files use autocast already",
    "GradScaler": "the files use a GradScaler already",
    "custom_fwd": "the files use autocast already",
}
HALF = frozenset({"torch.half", "torch.float16", "torch.bfloat16"})
SINGLE = frozenset({"torch.float32", "torch.float"})
REFUSED = {
    "torch.nn.BCELoss": "autocast refuses binary_cross_entropy: use binary_cross_entropy_with_logits",
    "torch.nn.functional.binary_cross_entropy": "autocast refuses it: use binary_cross_entropy_with_logits",
    "torch.nn.DataParallel": "DataParallel calls the model in threads, which autocast in the loop does not reach",
    "torch.autograd.Function": "an autograd function of the files' own does not say what autocast may make of it",
    "torch.autograd.grad": "gradients are taken inside the forward pass, where autocast would round them",
    "torch.cuda.graph": "a CUDA graph is captured, which autocast's copies of weights do not outlive",
    "torch.cuda.CUDAGraph": "a CUDA graph is captured, which autocast's copies of weights do not outlive",
    "torch.cuda.make_graphed_callables": "a CUDA graph is captured, which autocast's copies of weights do not outlive",
    "torch.set_default_dtype": "the files set the default dtype",
    "torch.ao.quantization": "the files quantize the model",
}
REFUSED |= {
    f"torch.nn.{name}": "autocast computes recurrent layers in float16, which needs a GradScaler"
    for name in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
}
LIBRARIES = {
    "accelerate.Accelerator": 'Accelerator(mixed_precision="bf16")',
    "lightning.fabric.Fabric": 'Fabric(precision="bf16-mixed")',
    "lightning.Fabric": 'Fabric(precision="bf16-mixed")',
    "lightning_fabric.Fabric": 'Fabric(precision="bf16-mixed")',
    "lightning.Trainer": 'Trainer(precision="bf16-mixed")',
    "lightning.pytorch.Trainer": 'Trainer(precision="bf16-mixed")',
    "pytorch_lightning.Trainer": 'Trainer(precision="bf16-mixed")',
    "transformers.Trainer": "TrainingArguments(bf16=True)",
    "transformers.Seq2SeqTrainer": "Seq2SeqTrainingArguments(bf16=True)",
    "deepspeed.initialize": '"bf16": {"enabled": true} in its configuration',
    "torch.distributed.fsdp.FullyShardedDataParallel": "MixedPrecision(param_dtype=torch.bfloat16)",
    "torch.distributed.fsdp.fully_shard": "MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
}


def settled(sources: Sequence[Source], script: str | None = None) -> str | None:
    """What in some files settles the precision of the products or forbids to lower it, with its place; else None.

    Code that does not run when the script is started settles nothing.
    """
    sleeping = asleep(sources, script)
    for source in sources:
        for node, reason in _reasons(source):
            if node not in sleeping:
                return f"{reason} ({source.path}:{node.lineno})"
        twice = differentiates_twice(source)
        if twice is not None:
            return f"gradients are differentiated again (`{twice}`, {source.path})"
    return None


def _reasons(source: Source) -> Iterator[tuple[ast.expr, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and not node.args and getattr(node.func, "attr", "") in ("half", "bfloat16"):
            yield node, "the files use half precision themselves"
        if isinstance(node, ast.Compare) and _compares_dtypes(source, node):
            yield node, "a dtype is compared, which autocast would change"
        if isinstance(node, ast.Call) and _is_chosen_dtype(source, node):
            yield node, "the dtype is chosen when the script runs"
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        name = source.qualified(node)
        if name is None:
            continue
        last = name.rpartition(".")[2]
        if last in ALREADY:
            yield node, ALREADY[last]
        elif name in HALF:
            yield node, "the files use half precision themselves"
        elif name in REFUSED:
            yield node, REFUSED[name]
        elif name in LIBRARIES:
            yield node, f"a library decides it: for bfloat16 give it `{LIBRARIES[name]}`"
        elif "Trainer" in last and name.startswith(("trl.", "sentence_transformers.")):
            yield node, "a library decides it: for bfloat16 give its arguments `bf16=True`"


def _compares_dtypes(source: Source, test: ast.Compare) -> bool:
    """Whether the dtype of a tensor is compared with float32, or with that of another."""
    sides = [test.left, *test.comparators]
    if any(isinstance(side, (ast.Tuple, ast.List, ast.Set)) for side in sides):
        sides += [part for side in sides if isinstance(side, (ast.Tuple, ast.List, ast.Set)) for part in side.elts]
    asked = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "dtype"]
    return len(asked) > 1 or (bool(asked) and any(source.qualified(side) in SINGLE for side in sides))


def _is_chosen_dtype(source: Source, call: ast.Call) -> bool:
    """`getattr(torch, name)`, unless the name is there to be read."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1):
        return False
    return source.qualified(call.args[0]) == "torch" and not isinstance(call.args[1], ast.Constant)


def holds_the_loop(source: Source, backward: LoopCall) -> str | None:
    """That the loop which differentiates the loss is not the user's; None where it is."""
    span = backward.frames[-1]
    if span.path != source.path or span.end_line is None:
        return None
    here = [n for n in source.expressions_at(span.line, span.column) if isinstance(n, ast.Call)]
    names = {ast.unparse(n.func).rpartition(".")[2] for n in here}
    if not here or "backward" in names:
        return None
    return f"`{ast.unparse(here[0].func)}` differentiates the loss inside a library: ask it for bfloat16"
