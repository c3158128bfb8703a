"""Does a model compute the same in the channels-last memory format, and which line of a file makes and calls it?"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.model import Graph, Node, Span
from advisor.patterns.callsites import Function, around, scope_of
from advisor.patterns.convolutions import VIEWS, Convolution, flattened_activation
from advisor.patterns.regions import calls
from advisor.patterns.sites import argument, called_name, construction_of, origins
from advisor.semantics import operation
from advisor.source import Source
from advisor.usercode.made import IN_PLACE, own_class
from advisor.usercode.reaching import stored_attributes

DRAWS = (
    "dropout",
    "alpha_dropout",
    "rand_like",
    "randn_like",
    "bernoulli",
    "bernoulli_",
    "normal_",
    "uniform_",
    "rrelu",
)
DRAWING = re.compile(  # how functions and methods are called that draw for the elements of a tensor in memory order
    r"(rand|randn|randint)_like|(normal|uniform|bernoulli|exponential|cauchy|log_normal|geometric|random)_|rrelu_?"
    r"|(xavier|kaiming|glorot|he)_\w+|trunc_normal_?\w*|orthogonal_?|sparse_|reset_parameters|bernoulli|poisson"
)
FRESH = frozenset({"empty", "zeros", "ones", "new_empty", "new_zeros", "new_ones", "Tensor", "FloatTensor"})
DISTRIBUTIONS = re.compile(
    r"\b(Normal|Bernoulli|Poisson|Exponential)\b"
)  # whose `sample` draws for a tensor's elements
OTHER_RANDOM = ("numpy.", "random.")
DROPOUT = frozenset({"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"})  # per element; others draw per channel
DROPOUTS = frozenset({"Dropout", "AlphaDropout", "RReLU"})
VOLUME = re.compile(r"(Lazy)?(Conv|ConvTranspose|BatchNorm|InstanceNorm)3d|conv(_transpose)?3d")
READS_LAYOUT = frozenset({"stride", "is_contiguous", "as_strided", "data_ptr", "storage", "untyped_storage"})
FLATTENED = frozenset({"parameters_to_vector", "vector_to_parameters"})
OF_PARAMETERS = frozenset({"parameters", "named_parameters", "state_dict", "grad", "weight", "data"})
WRAPPERS = frozenset(f"torch.{name}" for name in ("compile", "nn.DataParallel", "nn.parallel.DistributedDataParallel"))
LIBRARIES = ("torchvision.models.", "timm.", "torch.nn.Sequential")
ARGUMENT = "L_args_0_"  # what capture names a tensor that is the model's first argument itself


def depends_on_layout(graphs: Sequence[Graph], sources: Sequence[Source]) -> str | None:
    """Why a model whose activations lie in another order in memory may compute something else, or fail."""
    flat = next((f for graph in graphs if (f := flattened_activation(graph)) is not None), None)
    if flat is not None:
        return f"`{flat.name}` reads an activation in the order of its memory: in another layout it copies or fails"
    drawn = next((n for graph in graphs for n in calls(graph, *DRAWS) if _is_image(n) and _may_draw(n)), None)
    if drawn is not None:
        return f"`{drawn.name}` draws in the order of memory: in another layout each element gets another number"
    for source in sources:
        for node in ast.walk(source.tree):
            name, line = _reads_layout(source, node), getattr(node, "lineno", 0)
            if name is not None:
                return f"`{name}` in {source.path}:{line} reads the order in memory"
        line = _unseen_view(sources, source, graphs)
        if line is not None:
            return f"{source.path}:{line} views a tensor and did not run: of an activation or weight it may fail"
    return None


def unfit_model(graph: Graph) -> str | None:
    """Why a model and its argument cannot be converted together, None where they can; `graph` is its first."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.facts.get("origin") != "state"]
    images = len(inputs) == 1 and inputs[0].target == ARGUMENT and len(inputs[0].shape or ()) == 4
    if not images:
        return "the model takes something else than one batch of images"
    volume = next((n for n in graph.nodes if n.facts.get("origin") == "state" and len(n.shape or ()) == 5), None)
    if volume is not None:
        return f"`{volume.name}` has five dimensions, which the layout does not know"
    return None


def _is_image(node: Node) -> bool:
    shape = node.shape or ()
    return len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1


def _may_draw(node: Node) -> bool:
    """Dropout with the probability 0, or in evaluation, draws nothing that is seen."""
    given = [*node.args[1:], *node.kwargs.values()]
    return operation(node) != "dropout" or not (0.0 in given[:1] or any(value is False for value in given[1:2]))


def _reads_layout(source: Source, node: ast.AST) -> str | None:
    """What of a node of the tree reads the order in memory of a tensor or flattens parameters."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in FLATTENED and not isinstance(source.parents.get(node), ast.alias):
            return name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS_LAYOUT:
        return None if own_class(source, node.func.value) is not None else node.func.attr
    return None


def _unseen_view(sources: Sequence[Source], source: Source, graphs: Sequence[Graph]) -> int | None:
    """The line of a view that did not run, in a method of a module or of what parameters hold."""
    ran = {
        frame.line
        for graph in graphs
        for node in graph.nodes
        if operation(node) in VIEWS
        for frame in node.frames
        if frame.path == source.path
    }
    modules = {id(n) for owner in source.classes if _is_module(owner) for n in ast.walk(owner)}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in VIEWS:
            continue
        lines = {line for line, _ in source.starts(node)}
        if not lines & ran and (id(node) in modules or _of_parameters(sources, source, node)):
            return min(lines)
    return None


def _of_parameters(sources: Sequence[Source], source: Source, call: ast.Call) -> bool:
    """Whether what is viewed may be a parameter or gradient: by its attribute, or by what its names are given."""
    assert isinstance(call.func, ast.Attribute)
    direct = {n.attr for n in ast.walk(call.func.value) if isinstance(n, ast.Attribute)}
    return bool(direct & OF_PARAMETERS) or any(
        (isinstance(n, ast.Attribute) and n.attr in OF_PARAMETERS - {"data"} | {"param_groups"})
        or (isinstance(n, ast.Constant) and n.value == "params")
        for _, one in origins(sources, source, call.func.value)
        for n in ast.walk(one)
    )


def _is_module(owner: ast.ClassDef) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name == "forward" for n in owner.body)


# ------------------------------------------------------------------------------------------ other callers and settings


def unfit_elsewhere(graphs: Sequence[Graph], sources: Sequence[Source], source: Source, called: Called) -> str | None:
    """Why another configuration or caller may fail in the other layout or draw other numbers, None where none may."""
    given = _passed_by_callers(source, called)
    if given is not None:
        return f"`{given}` is passed by callers, which may pass one image without a batch"
    for other in sources:
        for node in ast.walk(other.tree):
            name = next((v for f in ("id", "attr", "name") if isinstance(v := getattr(node, f, None), str)), "")
            if VOLUME.fullmatch(name.rsplit(".", 1)[-1]):
                return f"`{name}` ({other.path}:{getattr(node, 'lineno', 1)}) has weights of five dimensions"
    drawn = _drawn_elsewhere(graphs, sources, called)
    if drawn is not None:
        return f"{drawn} may draw in the order of memory: in another layout each element gets another number"
    return None


def _passed_by_callers(source: Source, called: Called) -> str | None:
    """The parameter of the function around that is what the model is called with, None where it is taken of a loop."""
    function = scope_of(source, called.argument)
    arguments = getattr(function, "args", None)
    parameters = {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)} if arguments is not None else set()
    pending, seen = [called.argument], set[str]()
    while pending:
        name = _root(source, pending.pop())
        if name in parameters:
            return name
        if name is None or name in seen:
            continue
        seen.add(name)
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                stored = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                pending += [node.value] if name in stored else []
    return None


def _root(source: Source, expression: ast.expr) -> str | None:
    """The name of the tensor an expression is made of: `x` of `x.to(device)[0]` and of `torch.flip(x, (3,))`."""
    while not isinstance(expression, ast.Name):
        if isinstance(expression, (ast.Attribute, ast.Subscript, ast.Starred)):
            expression = expression.value
        elif isinstance(expression, ast.BinOp):
            expression = expression.left
        elif isinstance(expression, ast.Call):
            free = not isinstance(expression.func, ast.Attribute) or source.qualified(expression.func) is not None
            if free and not expression.args:
                return None
            expression = expression.args[0] if free else expression.func
        else:
            return None
    return expression.id


def _drawn_elsewhere(graphs: Sequence[Graph], sources: Sequence[Source], called: Called) -> str | None:
    """The first draw of the files that neither ran for something else than an image nor comes before the layout."""
    plain = [(g, n) for g in graphs for n in calls(g, *DRAWS) if not _is_image(n)]
    lines = {(frame.path, frame.line) for _, node in plain for frame in node.frames}
    for source in sources:
        made = [c for g, n in plain if n.module and (c := construction_of(source, g, n)) is not None]
        ran = {id(found.call) for found in made}
        for node in ast.walk(source.tree):
            if not isinstance(node, (ast.Call, ast.Name, ast.Attribute)) or id(node) in ran:
                continue
            place = f"`{ast.unparse(node.func if isinstance(node, ast.Call) else node)}` ({source.path}:{node.lineno})"
            if _makes_dropout(source, node):
                return place
            if not isinstance(node, ast.Call) or not _draws(sources, source, node):
                continue
            here = any((source.path, line) in lines for line, _ in source.starts(node))
            if not here and not _while_made(sources, source, node, called, frozenset()):
                return place
    return None


def _makes_dropout(source: Source, node: ast.Call | ast.Name | ast.Attribute) -> bool:
    """Whether a module that drops elements is made, or its class handed on, with a probability other than 0."""
    function = node.func if isinstance(node, ast.Call) else node
    name = source.qualified(function) or ""
    if not name.startswith("torch.nn.") or name.rsplit(".", 1)[-1] not in DROPOUTS:
        return False
    if isinstance(node, ast.Call):
        given = argument(node, 0, "p")
        return not (isinstance(given, ast.Constant) and given.value == 0)
    parent = source.parents.get(node)
    tested = any(isinstance(n, ast.Call) and called_name(n) == "isinstance" for n in around(source, node))
    return not tested and not (isinstance(parent, ast.Call) and parent.func is node)


def _draws(sources: Sequence[Source], source: Source, call: ast.Call) -> bool:
    """Whether a call draws numbers for the elements of a tensor that is not made on the spot, or may initialise."""
    name, qualified = called_name(call) or "", source.qualified(call.func) or ""
    if qualified.startswith(OTHER_RANDOM):
        return False
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(receiver, ast.Call) and called_name(receiver) in FRESH:
        return False
    if name in DROPOUT or qualified == "torch.normal":
        return qualified.startswith("torch.")
    if name == "sample":
        return "distributions" in source.text and DISTRIBUTIONS.search(source.text) is not None
    if name == "apply" and len(call.args) == 1 and not isinstance(call.args[0], ast.Lambda):
        given = ast.unparse(call.args[0]).rsplit(".", 1)[-1]
        classes = {c.name for s in sources for c in s.classes}
        of_class = receiver is not None and ast.unparse(receiver) in classes
        return not of_class and not any(f"def {given}(" in s.text for s in sources)
    return DRAWING.fullmatch(name) is not None


def _while_made(sources: Sequence[Source], source: Source, node: ast.AST, called: Called, seen: frozenset[int]) -> bool:
    """Whether code runs only while a module is constructed, so before the model gets its layout."""
    outer = around(source, node)
    function = next((n for n in outer if isinstance(n, Function)), None)
    if function is None or called.statement in outer or called.statement in ast.walk(function):
        return False
    if id(function) in seen:
        return True
    owner = source.parents.get(function)
    if function.name == "__init__":
        return isinstance(owner, ast.ClassDef) and _is_module(owner) and not _given_model(sources, owner, called)
    mentions = [
        (s, n)
        for s in sources
        for n in (ast.walk(s.tree) if function.name in s.text else ())
        if getattr(n, "id", getattr(n, "attr", None)) == function.name and function not in around(s, n)
    ]
    return bool(mentions) and all(_while_made(sources, s, n, called, seen | {id(function)}) for s, n in mentions)


def _given_model(sources: Sequence[Source], owner: ast.ClassDef, called: Called) -> bool:
    """Whether a class is called with the model, whose weights it may then initialise."""
    model = ast.unparse(called.statement.targets[0])
    return any(
        isinstance(n, ast.Call)
        and called_name(n) == owner.name
        and any(isinstance(a, ast.Name) and a.id == model for v in (*n.args, *n.keywords) for a in ast.walk(v))
        for s in sources
        for n in (ast.walk(s.tree) if owner.name in s.text else ())
    )


# ------------------------------------------------------------------------------------------------------ where it stands


@dataclass(frozen=True)
class Called:
    """A model's construction (`made`, the whole assignment `statement`) and the only argument it is called with."""

    made: ast.Call
    statement: ast.Assign
    argument: ast.expr


def called_model(sources: Sequence[Source], source: Source, at: Span, found: Convolution) -> Called | None:
    """The model that holds a convolution and is called at a place; None where the file does not show exactly one."""
    fitting: list[Called | None] = []
    column = at.column if at.end_column is not None else None
    for call in (e for e in source.expressions_at(at.line, column) if isinstance(e, ast.Call)):
        if not isinstance(call.func, ast.Name):
            continue
        statement = _only_assignment(source, call.func.id)
        if statement is None or not isinstance(statement.value, ast.Call):
            continue
        if not _holds(sources, source, statement.value, found):
            continue
        alone = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)
        fitting.append(Called(statement.value, statement, call.args[0]) if alone else None)
    return fitting[0] if len(fitting) == 1 else None


def viewed_result(source: Source, called: Called) -> bool:
    """Whether the function around a call views the model's result: `model(x).view(...)`, `y = model(x)`, `y.view()`."""
    statement = source.statement_of(called.argument)
    names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    function = source.function_at(called.argument.lineno) or source.tree
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
            inside = list(ast.walk(node.func.value))
            if called.argument in inside or any(isinstance(n, ast.Name) and n.id in names for n in inside):
                return True
    return False


def returns_image(graph: Graph) -> bool:
    """Whether a graph gives an activation of four dimensions back."""
    given = (i for n in graph.nodes if n.op == "output" for i in n.inputs())
    return any(_is_image(graph.nodes[index]) for index in given)


def _holds(sources: Sequence[Source], source: Source, value: ast.expr, found: Convolution) -> bool:
    """Whether a construction makes a module of a class that may hold a convolution."""
    if not isinstance(value, ast.Call):
        return False
    name = source.qualified(value.func) or ""
    if name in WRAPPERS:
        return bool(value.args) and _holds(sources, source, value.args[0], found)
    if isinstance(value.func, ast.Attribute) and value.func.attr in IN_PLACE and isinstance(value.func.value, ast.Call):
        return _holds(sources, source, value.func.value, found)
    if name.startswith(LIBRARIES):
        return True
    own = ast.unparse(value.func).rsplit(".", 1)[-1]
    first = (found.node.module or "").split(".")[0]
    return any(first in stored_attributes(owner) for owner in _with_bases(sources, own))


def _with_bases(sources: Sequence[Source], name: str) -> list[ast.ClassDef]:
    """The classes of a name in the files, with those they are made from."""
    every = [c for source in sources for c in source.classes]
    found = [c for c in every if c.name == name]
    for owner in found:
        names = {ast.unparse(base).rsplit(".", 1)[-1] for base in owner.bases}
        found += [c for c in every if c.name in names and c not in found]
    return found


def _only_assignment(source: Source, name: str) -> ast.Assign | None:
    """The statement `name = ...` where nothing else in the file gives the name a value."""
    stores = [
        n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)
    ]
    parameters = [a for a in ast.walk(source.tree) if isinstance(a, ast.arg) and a.arg == name]
    statement = source.statement_of(stores[0]) if len(stores) == 1 and not parameters else None
    alone = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and statement.targets[0] is stores[0]
    return statement if alone and isinstance(statement, ast.Assign) else None
