"""What of a model is worth compiling: its repeated blocks in place, or the whole of it, and what forbids either."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from advisor import blocks, codemod
from advisor.forms import transforms
from advisor.model import Graph, LoopCall, Node, Ref, Span, Symbol
from advisor.patterns.callsites import differentiates_twice
from advisor.rule import Context, Rule
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.origin import Origin, Unclear, always_has, origin
from advisor.usercode.unreached import asleep

VARIANTS = 4  # kinds of blocks; Dynamo gives up on a function after eight compilations, and evaluation needs some too
SIZED = frozenset({"aten::linear", "aten::embedding", "aten::convolution", "aten::conv2d", "aten::layer_norm"})
RANDOM = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ multinomial normal normal_"
    " uniform_ exponential_ rrelu gumbel_softmax alpha_dropout feature_alpha_dropout random_ log_normal_ cauchy_"
    " geometric_ poisson binomial fractional_max_pool2d".split()
)
DROPOUT = frozenset("dropout dropout1d dropout2d dropout3d".split())
HOOKS = frozenset(
    "register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook"
    " register_backward_hook register_module_forward_hook register_module_forward_pre_hook".split()
)
TRACERS = frozenset("FlopCountAnalysis symbolic_trace draw_graph".split())
LIBRARIES = frozenset("Trainer Seq2SeqTrainer SFTTrainer LightningModule Fabric Accelerator".split())
# where retain_graph stands among the arguments
RETAINED, RETAINED_BY_METHOD = {"torch.autograd.grad": 3, "torch.autograd.backward": 2}, 1
NAMES = ("block", "layer", "module", "part")
COMPILE_S, NODE_S, LONGEST_S = 10.0, 0.05, 60.0  # to compile at all, per recorded operation, and at most
OWN = "the script has a call of the compiler of its own"
VARY = "sizes vary from step to step, and for each new one something is compiled again"


@dataclass(frozen=True)
class Repeated:
    """Containers of blocks that are alike: attribute paths, "*" for every element of an outer container."""

    containers: tuple[str, ...]
    members: frozenset[str]  # module paths of the blocks
    count: int

    def holds(self, module: str | None) -> bool:
        """Whether a module is one of the blocks or inside of one."""
        return module is not None and any(module == m or module.startswith(f"{m}.") for m in self.members)


@dataclass(frozen=True)
class Compilation:
    """A model with the place where it is ready, and its blocks where they can be compiled one by one."""

    graph: Graph
    call: LoopCall
    origin: Origin
    repeated: Repeated | None
    reason: str | None  # why its blocks are not compiled one by one

    @property
    def span(self) -> Span:
        """The statement behind which the model is compiled."""
        return self.origin.source.span(_simple(self.origin.behind))

    def compile_us(self) -> float:
        """A rough time for compiling it, forward and backward."""
        called = [n for n in self.graph.nodes if n.op.startswith("call_")]
        if self.repeated is not None:
            called = [n for n in called if self.repeated.holds(n.module)]
            return min(COMPILE_S + NODE_S * len(called) / self.repeated.count, LONGEST_S) * 1e6
        return min(COMPILE_S + NODE_S * len(called), LONGEST_S) * 1e6


def _simple(statement: ast.stmt) -> ast.stmt:
    """The last plain statement of a block: the one that a reader looks for under a `with`."""
    body = getattr(statement, "body", None)
    return _simple(body[-1]) if isinstance(body, list) and body else statement


# --------------------------------------------------------------------------------------------------------------- blocks


def repeated(graph: Graph) -> Repeated | None:
    """The blocks of a captured model, outermost containers whose elements compute alike; None where there are none."""
    calls = [node for node in graph.nodes if node.op.startswith("call_") and node.module]
    places: dict[str, dict[str, list[Node]]] = {}
    for node in calls:
        parts = (node.module or "").split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                places.setdefault(".".join(parts[:place]), {}).setdefault(part, []).append(node)
    found: dict[str, set[str]] = {}
    kinds: set[tuple[object, ...]] = set()
    for container in sorted(places, key=lambda path: (path.count("."), path)):
        inside = any(container == m or container.startswith(f"{m}.") for ms in found.values() for m in ms)
        if inside or len(places[container]) < 2:
            continue
        mine = {_signature(nodes, f"{container}.{i}".strip(".")) for i, nodes in places[container].items()}
        if len(mine) == 1 and len(next(iter(places[container].values()))) > 1:
            found[container] = {f"{container}.{i}".strip(".") for i in places[container]}
            kinds |= mine
    if not found or len(kinds) > VARIANTS:
        return None
    containers = tuple(dict.fromkeys(_starred(path) for path in found))
    members = frozenset(member for members in found.values() for member in members)
    return Repeated(containers, members, len(members))


def _starred(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _signature(nodes: Sequence[Node], member: str) -> tuple[object, ...]:
    """What a block computes: its operations with their modules, sizes and constants."""
    return tuple(
        (
            node.target,
            (node.module or "").removeprefix(member),
            node.module_class,
            node.shape,
            node.dtype,
            repr([_constant(arg) for arg in (*node.args, *node.kwargs.values())]),
        )
        for node in nodes
    )


def _constant(arg: object) -> object:
    if isinstance(arg, Ref):
        return "tensor"
    if isinstance(arg, tuple):
        return tuple(_constant(item) for item in arg)
    return (arg.kind, arg.text) if isinstance(arg, Symbol) else arg


# ------------------------------------------------------------------------------------------------------------- the plan


def models(ctx: Context) -> list[Graph]:
    """The captured graphs of models, of those that were called at one place the one that costs most."""
    places: dict[tuple[str, int] | int, list[Graph]] = {}
    for graph in ctx.graphs:
        if graph.kind == "dynamo":
            key = graph.index if graph.span is None else (graph.span.path, graph.span.line)
            places.setdefault(key, []).append(graph)
    return [max(here, key=lambda g: ctx.cost_us(g.index, range(len(g.nodes))) or 0.0) for here in places.values()]


def left(ctx: Context) -> float:
    """The share of a step that the largest finding leaves; all where it compiles the model, which is done once."""
    return 1.0 if ctx.left_compiles else ctx.left


def gate(ctx: Context, rule: Rule) -> float:
    """Share of a step below which a rule that compiles models stays silent."""
    return ctx.gate(rule) if ctx.worth is not None else rule.worth * left(ctx)


def compilation(ctx: Context, graph: Graph) -> Compilation:
    """How the model of a captured graph could be compiled; raises `Unclear` with what stands in the way."""
    call = _call_of(ctx, graph)
    if call is None:
        raise Unclear("the call of the model in the training loop was not recorded", graph.span)
    made = origin(ctx.sources, ctx.read, call)
    found, reason = repeated(graph), None
    if found is not None and made.wrapped:
        found = _unwrapped(found)
    if found is None:
        reason = "its blocks are not alike, or there are none"
    elif made.kind is None:
        found, reason = None, f"`{made.text}` may be of another class in another run"
    elif len({path.count("*") for path in found.containers}) > 1 or not _everywhere(graph, found):
        found, reason = None, "its blocks stand among other modules in one container"
    elif len(found.containers) > 1 and any("*" in path for path in found.containers):
        found, reason = None, "its blocks lie in containers of several depths"
    elif _never_called(ctx.sources, graph, found):
        found, reason = None, "its blocks are lists of modules, which are not called themselves"
    elif not all(always_has(ctx.sources, made.kind, _names(made, path)) for path in found.containers):
        found, reason = None, f"a `{made.kind.name}` may be built without the blocks"
    if made.wrapped and found is None:
        why = f"{reason}, and compiled as a whole its gradients would be reduced over processes at its very end"
        raise Unclear(why, made.source.span(_simple(made.behind)))
    return Compilation(graph, call, made, found, reason)


def _everywhere(graph: Graph, found: Repeated) -> bool:
    """Whether the containers have names, and each element of an outer one has the blocks: those with operations, with
    none between them."""
    if {"", "*"} & {path.partition(".")[0] for path in found.containers}:
        return False
    for outer, star, inner in (path.partition(".*") for path in found.containers):
        paths = [node.module or "" for node in graph.nodes]
        modules = [path.removeprefix(f"{outer}.") for path in paths if path.startswith(f"{outer}.")]
        elements: dict[str, set[str]] = {}
        for element, _, rest in (module.partition(".") for module in modules):
            elements.setdefault(element, set()).add(f"{rest}.")
        within = f"{inner[1:]}." if inner else ""
        having = [any(rest.startswith(within) for rest in rests) for rests in elements.values()]
        if star and not inner.count("*") and not (all(having) and set(elements) == set(map(str, range(len(elements))))):
            return False
    return True


def _never_called(sources: Sequence[Source], graph: Graph, found: Repeated) -> bool:
    """Whether blocks may be lists that the model takes modules from, as in `for attention, mlp in self.layers`: none of
    their operations is their own, and a list of modules stands in another one."""
    if any(node.module in found.members and node.op.startswith("call_") for node in graph.nodes):
        return False
    calls = ((s, n) for s in sources for n in ast.walk(s.tree) if isinstance(n, ast.Call))
    for source, call in calls:
        if (source.qualified(call.func) or "").rpartition(".")[2] in ("ModuleList", "ModuleDict"):
            parent = source.parents[call]
            targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
            if not any(isinstance(target, ast.Attribute) for target in targets):
                return True
    return False


def _call_of(ctx: Context, graph: Graph) -> LoopCall | None:
    """The recorded call of the user's that ran a graph's module; the only one where the graph does not say.

    Of several in its line, as in `criterion(model(x), y)`, that which runs first.
    """
    calls = {c.span: c for c in ctx.calls("module") if c.span is not None}
    if graph.span is None:
        return next(iter(calls.values())) if len(calls) == 1 else None
    here = (graph.span.path, graph.span.line)
    mine = [span for span in calls if (span.path, span.line) == here]
    inner = [span for span in mine if not any(_holds(span, other) for other in mine)]
    return calls[min(inner, key=lambda span: span.column)] if inner else None


def _holds(span: Span, other: Span) -> bool:
    """Whether a position lies inside of another one of the same line."""
    if span == other or span.end_column is None or other.end_column is None:
        return False
    begins = span.column <= other.column
    return begins and (other.end_line or 0, other.end_column) <= (span.end_line or 0, span.end_column)


def _unwrapped(found: Repeated) -> Repeated | None:
    """The blocks as seen from the module that a wrapper holds."""
    if not all(path.startswith("module.") for path in found.containers):
        return found
    plain = tuple(path.removeprefix("module.") for path in found.containers)
    return Repeated(plain, found.members, found.count)


def _names(made: Origin, path: str) -> list[str]:
    """The attributes from the model that is made to a container, up to where elements are taken."""
    return [*made.inside, *path.split("*")[0].strip(".").split(".")]


# ---------------------------------------------------------------------------------------------------------------- edits


def compiled_blocks(found: Compilation, arguments: str = "") -> list[codemod.Edit]:
    """Compile every block in place behind the statement that makes the model ready."""
    assert found.repeated is not None
    source, made = found.origin.source, found.origin
    taken = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and _seen(source, n, made.behind)}
    free = [name for name in NAMES if name not in taken]
    if not free:
        raise codemod.CannotEdit("no name is free for the loop over the blocks")
    unit = "    "
    if not isinstance(source.parents[made.behind], ast.Module):
        unit = blocks.unit_of(source, made.behind)
    containers = found.repeated.containers
    if "*" in containers[0]:
        if len(free) < 2:
            raise codemod.CannotEdit("no name is free for the loop over the blocks")
        outer, inner = containers[0].split("*")[0].strip("."), containers[0].split("*")[1].strip(".")
        if containers[0].count("*") > 1:
            raise codemod.CannotEdit("the blocks lie in containers three deep")
        over = f"{free[1]}.{inner}" if inner else free[1]
        lines = [
            f"for {free[1]} in {made.text}.{outer}:",
            f"{unit}for {free[0]} in {over}:",
            f"{unit}{unit}{free[0]}.compile({arguments})",
        ]
    else:
        paths = [f"{made.text}.{path}" for path in containers]
        over = paths[0] if len(paths) == 1 else f"({', '.join(f'*{path}' for path in paths)})"
        lines = [f"for {free[0]} in {over}:", f"{unit}{free[0]}.compile({arguments})"]
    return [blocks.put_behind(source, made.behind, lines)]


def compiled_whole(found: Compilation, arguments: str = "") -> list[codemod.Edit]:
    """Compile the model in place behind the statement that makes it ready."""
    made = found.origin
    return [blocks.put_behind(made.source, made.behind, [f"{made.text}.compile({arguments})"])]


def noted(found: Compilation, arguments: tuple[str, str]) -> tuple[dict[str, str], dict[str, Span]]:
    """The edits as values and bindings of a finding: "text" of the blocks where they can be compiled one by one, else
    of the model, "whole" of the model, but of the blocks where gradients are reduced over processes; `arguments` are
    those of the one and of the other."""
    model = found.origin.text
    ((place, whole),) = compiled_whole(found, arguments[1])
    if found.repeated is None:
        return {"model": model, "first": "whole", "text": whole, "whole": whole}, {"place": place}
    ((place, text),) = compiled_blocks(found, arguments[0])
    if found.origin.wrapped:  # gradients of a block can be reduced while those of the next are computed
        whole = text
    return {"model": model, "first": "blocks", "text": text, "whole": whole}, {"place": place}


def too_short(steps: int | None, saved_us: float, compile_us: float) -> str | None:
    """Why a run of so many steps does not make up for a compilation; None where it does, or its length is unknown."""
    if steps is None or steps * saved_us >= compile_us:
        return None
    return (
        f"{steps} steps save at most {steps * saved_us / 1e6:.0f} s, and compiling takes about {compile_us / 1e6:.0f} s"
    )


def _seen(source: Source, name: ast.Name, statement: ast.stmt) -> bool:
    """Whether a name is read or bound in the scope of a statement, or may be read there from outside."""
    here, there = source.function_at(statement.lineno), source.function_at(name.lineno)
    if here is None:
        return there is None or (isinstance(name.ctx, ast.Load) and not _binds(there, name.id))
    return there is here or (there is not None and here.lineno < there.lineno <= (here.end_lineno or here.lineno))


def _binds(function: ast.AST, name: str) -> bool:
    stored = any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(function))
    return stored or any(isinstance(n, ast.arg) and n.arg == name for n in ast.walk(function))


# ------------------------------------------------------------------------------------------------------------ obstacles


def obstacle(ctx: Context, graph: Graph) -> tuple[Span | None, str] | None:
    """What in the files or in the recorded graph forbids to compile its model, with its place; else None.

    A statement that does not run when the script is started, such as those of another script beside it, forbids
    nothing; derivatives of derivatives and what transforms functions forbid it wherever they stand.
    """
    if ctx.calls("torch.compile") or ctx.profile.breaks or ctx.profile.recompiled or "compiled" in ctx.profile.missing:
        return None, "the script compiles already"
    sleeping = asleep(ctx.sources, ctx.script)
    for source in ctx.sources:
        for node, reason in _in_source(source):
            if node not in sleeping:
                return source.span(node), reason
        twice = differentiates_twice(source)
        if twice is not None:
            return None, f"`{twice}` in {source.path} differentiates gradients again, which compiled code cannot"
        if transforms(source):
            return None, f"{source.path} uses torch.func, torch.jit or distributed tensors"
    if graph.breaks:
        return graph.breaks[0].span, f"the compiler has to leave the graph here: {graph.breaks[0].reason}"
    drawing = next((n for n in graph.nodes if n.op.startswith("call_") and (_draws(n) or _drops(n))), None)
    if drawing is not None:
        return drawing.span, "it draws random numbers: compiled code draws others"
    if varying(ctx, graph):
        return None, VARY
    return None


def _in_source(source: Source) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "compile":
            yield node.body[0], "a class has a `compile` of its own"
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = source.qualified(node) or ""
            last = name.rpartition(".")[2]
            if name == "torch.compile":
                yield node, OWN
            elif name.startswith(("torch._dynamo", "torch.compiler", "torch._inductor")):
                yield node, "the script prepares for the compiler itself"
            elif name.startswith(("random.", "numpy.random.")) and _in_forward(source, node):
                yield node, "Python draws random numbers inside the model"
            elif name in ("torch.onnx.export", "torch.onnx.dynamo_export") or last in TRACERS:
                yield node, f"`{last}` traces the model, which fails for compiled code"
            elif name.startswith(("torch.cuda.graph", "torch.cuda.CUDAGraph", "torch.cuda.make_graphed")):
                yield node, "the script captures CUDA graphs itself"
            elif last == "DataParallel":
                yield node, "its replicas would run the compiled original"
            elif last in LIBRARIES:
                yield node, f"`{last}` prepares the model: ask it to compile"
            elif last == "FullyShardedDataParallel":
                yield node, "its blocks are wrapped by FullyShardedDataParallel"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "compile" and (source.qualified(node.func) or "") not in (
                "re.compile",
                "regex.compile",
            ):
                yield node, OWN
            elif node.func.attr == "add_graph":
                yield node, "`add_graph` traces the model, which fails for compiled code"
            elif node.func.attr in HOOKS:
                yield node, "a hook runs on a module, which compiled code may not call"
        if isinstance(node, ast.Call) and _keeps_graph(source, node):
            yield node, "the graph of a backward pass is kept, whose memory compiled code gives away"
        if isinstance(node, ast.Call) and _keeps_whole(source, node):
            yield node, "the whole model is copied or saved: compile the copy as well, or save its state"


def _keeps_graph(source: Source, node: ast.Call) -> bool:
    """Whether a call may ask to keep the graph of a backward pass for another one."""
    given = next((k.value for k in node.keywords if k.arg == "retain_graph"), None)
    name = source.qualified(node.func) or ""
    method = isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    place = RETAINED.get(name, RETAINED_BY_METHOD if method else None)
    if given is None and place is not None and len(node.args) > place:
        given = node.args[place]
    return given is not None and not (isinstance(given, ast.Constant) and not given.value)


def _in_forward(source: Source, node: ast.expr) -> bool:
    """Whether an expression stands in the forward pass of a module."""
    function = source.function_at(node.lineno)
    return function is not None and function.name == "forward"


def _keeps_whole(source: Source, call: ast.Call) -> bool:
    """Whether a model as a whole is copied or pickled; a layer that is multiplied while a model is built is not."""
    name = source.qualified(call.func) or ""
    given = call.args[0] if call.args else None
    if name in ("torch.save", "pickle.dump", "pickle.dumps"):
        return isinstance(given, (ast.Name, ast.Attribute)) and _model_like(given)
    if name in ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel"):
        return isinstance(given, (ast.Name, ast.Attribute)) and _model_like(given)
    return False


def _model_like(node: ast.expr) -> bool:
    last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return any(word in last.lower() for word in ("model", "net", "module")) and last not in ("module",)


def _draws(node: Node) -> bool:
    return operation(node) in RANDOM


def _drops(node: Node) -> bool:
    """Whether a recorded dropout drops anything."""
    if operation(node) in DROPOUT:
        chance = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        trains = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return bool(trains) and chance not in (0, 0.0)
    if operation(node) == "scaled_dot_product_attention":
        chance = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return chance not in (0, 0.0)
    return False


def varying(ctx: Context, graph: Graph) -> bool:
    """Whether layers were given other sizes in one of the recorded steps than in another, or than in the graph."""
    alike = [other for other in ctx.graphs if other.kind == graph.kind and other.span == graph.span]
    if len({_sizes(other) for other in alike if _targets(other) == _targets(graph)}) > 1:
        return True
    table = ctx.profile.operators
    seen: dict[int, set[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for row, name in enumerate(table.name):
        if name in SIZED and table.step[row] >= 0 and len(table.shapes[row]) > 1 and not table.forward_thread[row]:
            shapes = table.shapes[row]
            seen.setdefault(table.step[row], set()).add((name, shapes[0], shapes[1]))
    steps = list(seen.values())
    if any(one != steps[0] for one in steps[1:]):
        return True
    ran = {(given, weight) for name, given, weight in (steps[0] if steps else ()) if name == "aten::linear"}
    recorded = {found for node in graph.nodes if operation(node) == "linear" for found in _given(graph, node)}
    return bool(ran) and not recorded <= ran


def _targets(graph: Graph) -> tuple[tuple[str, str | None], ...]:
    return tuple((node.target, node.module) for node in graph.nodes if node.op.startswith("call_"))


def _sizes(graph: Graph) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(node.shape for node in graph.nodes if node.op.startswith("call_"))


def _given(graph: Graph, node: Node) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes of what a layer reads, input and weight, where both are known."""
    shapes = [graph.nodes[arg.index].shape for arg in node.args[:2] if isinstance(arg, Ref)]
    known = [shape for shape in shapes if shape is not None]
    return [(known[0], known[1])] if len(known) == 2 else []
