"""Whether the source shows that a mask is a causal triangle for every instance, and stays one."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from advisor.source import Source
from advisor.usercode.writes import bases_of, derived_from, own_name, written_in_place

WRAPPERS = frozenset(
    {"view", "reshape", "unsqueeze", "bool", "to", "float", "byte", "type", "contiguous", "logical_not"}
)
MADE = frozenset({"ones", "full", "zeros", "ones_like", "full_like", "empty", "fill_"})


def made_as_triangle(source: Source, mask: ast.expr, others: Iterable[Source] = ()) -> bool:
    """Whether a mask expression reads one attribute that its class makes by tril or triu with a literal diagonal.

    False where the attribute comes from a parameter, is made elsewhere, or is written again by this file or `others`.
    An expression that reads no attribute is judged by the graph alone: True.
    """
    function = source.function_at(mask.lineno)
    itself = function.args.args[0].arg if function is not None and function.args.args else None
    read = {
        n.attr
        for n in ast.walk(mask)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == itself
        if not isinstance(source.parents.get(n), ast.Slice)  # where the triangle is cut off
    }
    if not read:
        return True
    owner: ast.AST | None = mask
    while owner is not None and not isinstance(owner, ast.ClassDef):
        owner = source.parents.get(owner)
    if len(read) != 1 or owner is None:
        return False
    (name,) = read
    given = _given(owner, name)
    if len(given) != 1 or not _is_triangle(source, *given[0]):
        return False
    return not _changed(source, owner, name, others)


def attribute_changes(source: Source, mask: ast.expr, others: Iterable[Source]) -> bool:
    """Whether a mask expression reads an attribute of `self` that a file writes into in place."""
    function = source.function_at(mask.lineno)
    owner, itself = source.parents.get(function) if function is not None else None, own_name(source, function)
    if not isinstance(owner, ast.ClassDef):
        return False
    read = {
        n.attr
        for n in ast.walk(mask)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == itself
        if any(isinstance(c, ast.Call) and _registers(c, n.attr) for c in ast.walk(owner))
    }
    return any(written_in_place(source, owner, name, others) for name in read)


def _registers(call: ast.Call, name: str) -> bool:
    registers = isinstance(call.func, ast.Attribute) and call.func.attr == "register_buffer"
    return registers and any(isinstance(a, ast.Constant) and a.value == name for a in call.args[:1])


SQUARE_MASK = "torch.nn.Transformer.generate_square_subsequent_mask"


def shows_triangle(source: Source, mask: ast.expr) -> bool:
    """Whether every part of a mask's expression is seen to keep it the same triangle at every length and for every
    caller: made by tril or triu of one number with a literal diagonal, by torch's own function, or cut from the corner
    of an attribute that is."""
    return _shown(source, mask, source.function_at(mask.lineno), 6)


def _shown(source: Source, value: ast.expr, function: ast.AST | None, depth: int) -> bool:
    if depth == 0 or not isinstance(function, ast.FunctionDef):
        return False
    if isinstance(value, ast.Name):
        stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == value.id and not _loads(n)]
        parents = [source.parents[n] for n in stored]
        taken = any(a.arg == value.id for a in ast.walk(function.args) if isinstance(a, ast.arg))
        once = len(parents) == 1 and isinstance(parents[0], ast.Assign) and not taken
        return once and isinstance(parents[0], ast.Assign) and _shown(source, parents[0].value, function, depth - 1)
    if isinstance(value, ast.Attribute):
        return _shown_attribute(source, value, function, depth)
    if isinstance(value, ast.Subscript):
        return _from_corner(value.slice) and _shown(source, value.value, function, depth)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Invert):
        return _shown(source, value.operand, function, depth)
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.comparators[0], ast.Constant):
        return _shown(source, value.left, function, depth)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr in ("tril", "triu"):
        return _literal_triangle(value, function) and _one_number(source, value, function)
    if source.qualified(value.func) == SQUARE_MASK:
        return True
    return value.func.attr in WRAPPERS and _shown(source, value.func.value, function, depth)


def _shown_attribute(source: Source, value: ast.Attribute, function: ast.FunctionDef, depth: int) -> bool:
    owner = source.parents.get(function)
    itself = function.args.args[0].arg if function.args.args else None
    if not isinstance(owner, ast.ClassDef) or not isinstance(value.value, ast.Name) or value.value.id != itself:
        return False
    given = _given(owner, value.attr)
    if len(given) != 1 or _changed(source, owner, value.attr, ()):
        return False
    return _shown(source, *given[0], depth - 1)


def _from_corner(index: ast.expr) -> bool:
    """Whether an index takes leading axes away or cuts from the first element on."""
    for part in index.elts if isinstance(index, ast.Tuple) else [index]:
        first = isinstance(part, ast.Constant) and part.value in (None, 0, ...)
        cut = (
            isinstance(part, ast.Slice) and part.step is None and (part.lower is None or ast.unparse(part.lower) == "0")
        )
        if not first and not cut:
            return False
    return True


def _one_number(source: Source, call: ast.Call, function: ast.FunctionDef) -> bool:
    """Whether what a triangle is cut from is filled with a number that is written out."""
    whole = _whole(call)
    if isinstance(whole, ast.Name):  # `_literal_triangle` has seen that it is assigned once
        assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
        given = [n.value for n in assigned if any(isinstance(t, ast.Name) and t.id == whole.id for t in n.targets)]
        whole = given[0] if len(given) == 1 else whole
    if not isinstance(whole, ast.Call) or not isinstance(whole.func, ast.Attribute):
        return False
    if not whole.func.attr.startswith(("full", "fill")):
        return True
    number = whole.args[0 if whole.func.attr == "fill_" else 1 :]
    number += [k.value for k in whole.keywords if k.arg in ("fill_value", "value")]
    names = {n.id for value in number for n in ast.walk(value) if isinstance(n, ast.Name)}
    return bool(number) and names <= {"float", *source.imports}


def _given(owner: ast.AST, name: str) -> list[tuple[ast.expr, ast.FunctionDef]]:
    """The expressions that give an attribute its value in a class: register_buffer and assignments."""
    found = []
    for function in (n for n in ast.walk(owner) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
                first = node.args[0]
                if node.func.attr == "register_buffer" and isinstance(first, ast.Constant) and first.value == name:
                    found.append((node.args[1], function))
            elif isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Attribute) and t.attr == name for t in node.targets
            ):
                found.append((node.value, function))
    return found


def _changed(source: Source, owner: ast.ClassDef, name: str, others: Iterable[Source]) -> bool:
    """Whether the attribute that a class makes is given another value, or written into, by any of the files."""
    files = (source, *(other for other in others if other.path != source.path))
    derived = derived_from(owner.name, bases_of(files))
    given = any(_given_by_others(one, owner, name, derived) for one in files)
    return given or written_in_place(source, owner, name, files)


def _given_by_others(source: Source, owner: ast.ClassDef, name: str, derived: set[str]) -> bool:
    """Whether a class derived from the owner, or code outside of classes, gives the attribute another value."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node is not owner and node.name in derived and _given(node, name):
            return True
        called = ast.unparse(node.func).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and called in ("register_buffer", "setattr", "__setattr__"):
            named = any(isinstance(a, ast.Constant) and a.value == name for a in node.args[:2])
            holder: ast.AST | None = node
            while holder is not None and not isinstance(holder, ast.ClassDef):
                holder = source.parents.get(holder)
            if named and (holder is None or called != "register_buffer"):
                return True
    return False


def made_by_helper(source: Source, call: ast.expr) -> bool:
    """Whether a call of a function of the same file makes a triangle without a choice: its parameters are sizes,
    dtypes and devices."""
    function = _helper(source, call)
    if function is None or function.decorator_list:
        return False
    nodes = [n for statement in function.body for n in ast.walk(statement)]
    returned = [n for n in nodes if isinstance(n, ast.Return)]
    if any(isinstance(n, CHOOSES) for n in nodes) or len(returned) != 1 or returned[0].value is None:
        return False
    given = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    reads = [n for n in nodes if isinstance(n, ast.Name) and n.id in given]
    itself = function.args.args[0].arg if function.args.args else None
    sizes = all((n.id == itself and _is_method(source, function)) or _is_size(source, n) for n in reads)
    return sizes and not _changes(function) and shows_triangle(source, returned[0].value)


def _helper(source: Source, call: ast.expr) -> ast.FunctionDef | None:
    """The only function of the file that a call can mean: one of the module by its name, or a method of the class
    around the call."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, (ast.Name, ast.Attribute)):
        return None
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    around, owner = source.function_at(call.lineno), None
    if isinstance(call.func, ast.Attribute):
        itself = around.args.args[0].arg if around is not None and around.args.args else None
        owner = source.parents.get(around) if around is not None and ast.unparse(call.func.value) == itself else None
    bound = any(
        (isinstance(n, ast.arg) and n.arg == name)
        or (isinstance(n, ast.Name) and n.id == name and not _loads(n))
        or (isinstance(n, ast.Attribute) and n.attr == name and not isinstance(n.ctx, ast.Load))
        for n in ast.walk(source.tree)
    )
    held = source.parents.get(found[0]) if len(found) == 1 and not bound else None
    wanted = owner if isinstance(call.func, ast.Attribute) else source.tree
    return found[0] if held is not None and held is wanted else None


CHOOSES = (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try, ast.Match, ast.Lambda, ast.NamedExpr)


def _is_method(source: Source, function: ast.FunctionDef) -> bool:
    return isinstance(source.parents.get(function), ast.ClassDef)


def _is_size(source: Source, name: ast.Name) -> bool:
    """Whether a name stands for a size or for a dtype or device: in the shape of a new tensor, in a slice."""
    if source.reads_only_shape(name):
        return True
    node: ast.AST = name
    parent = source.parents.get(node)
    while isinstance(parent, (ast.Tuple, ast.Slice)):
        node, parent = parent, source.parents.get(parent)
    if isinstance(parent, ast.Subscript):
        return node is parent.slice
    if isinstance(parent, ast.keyword):
        return parent.arg in ("dtype", "device")
    if not isinstance(parent, ast.Call) or not isinstance(parent.func, ast.Attribute):
        return False
    place = parent.args.index(node) if isinstance(node, ast.expr) and node in parent.args else -1
    return place >= 0 and (
        parent.func.attr in ("ones", "zeros", "empty", "to") or (parent.func.attr, place) == ("full", 0)
    )


def _changes(function: ast.FunctionDef) -> bool:
    """Whether a function writes into elements of a tensor."""
    for node in ast.walk(function):
        stored = isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load)
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if stored or isinstance(node, ast.AugAssign) or (method.endswith("_") and not method.endswith("__")):
            return True
    return False


FROM_ONE = frozenset({"from_numpy", "tensor", "as_tensor"})  # functions that give their first argument as a tensor


def _is_triangle(source: Source, value: ast.expr, function: ast.FunctionDef, depth: int = 4) -> bool:
    """tril or triu with a literal diagonal, of a tensor made there and then, within changes of shape and type."""
    if depth == 0:
        return False
    if isinstance(value, ast.Name):
        given = [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == value.id for t in n.targets)
        ]
        stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == value.id and not _loads(n)]
        changed = any(_writes_into(node, value.id) for node in ast.walk(function))
        return len(given) == len(stored) == 1 and not changed and _is_triangle(source, given[0], function, depth - 1)
    if isinstance(value, ast.Subscript):
        return _is_triangle(source, value.value, function, depth)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Invert):
        return _is_triangle(source, value.operand, function, depth)
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and isinstance(value.comparators[0], ast.Constant):
        return _is_triangle(source, value.left, function, depth)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if value.func.attr in ("tril", "triu"):
        return _literal_triangle(value, function)
    if source.qualified(value.func) == SQUARE_MASK:
        return True
    if source.qualified(value.func) in {f"torch.{name}" for name in FROM_ONE} and value.args:
        return _is_triangle(source, value.args[0], function, depth)
    return value.func.attr in WRAPPERS and _is_triangle(source, value.func.value, function, depth)


def _writes_into(node: ast.AST, name: str) -> bool:
    """Whether a node changes elements of a name: `m[0] = 1`, `m.fill_(0)`."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return isinstance(node.value, ast.Name) and node.value.id == name
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    inside = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
    return inside and isinstance(node.func.value, ast.Name) and node.func.value.id == name


def _loads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _literal_triangle(call: ast.Call, function: ast.FunctionDef) -> bool:
    whole = _whole(call)
    if isinstance(whole, ast.Name):
        given = [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == whole.id for t in n.targets)
        ]
        whole = given[0] if len(given) == 1 else whole
    made = isinstance(whole, ast.Call) and isinstance(whole.func, ast.Attribute) and whole.func.attr in MADE
    return made and has_literal_diagonal(call)


def _whole(call: ast.Call) -> ast.expr:
    """What a triangle is cut from: the argument of torch.tril(x), the object of x.tril()."""
    assert isinstance(call.func, ast.Attribute)
    return call.args[0] if _is_function(call) else call.func.value


def _is_function(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    return isinstance(call.func.value, ast.Name) and call.func.value.id in ("torch", "np", "numpy") and bool(call.args)


def has_literal_diagonal(call: ast.Call) -> bool:
    """Whether the diagonal of a call of tril or triu is written as a number, or left out."""
    given = [*call.args[1 if _is_function(call) else 0 :], *(k.value for k in call.keywords if k.arg == "diagonal")]
    return all(not any(isinstance(n, (ast.Name, ast.Call)) for n in ast.walk(d)) for d in given)


def written_again(source: Source, name: str) -> bool:
    """Whether the file writes into an attribute of this name anywhere but in constructors."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or node.attr != name:
            continue
        parent = source.parents.get(node)
        stored = not isinstance(node.ctx, ast.Load)
        element: ast.AST = node
        while isinstance(parent, (ast.Subscript, ast.Attribute)) and parent.value is element:
            stored = stored or not isinstance(parent.ctx, ast.Load)
            changes = isinstance(parent, ast.Attribute) and parent.attr.endswith("_") and not parent.attr.endswith("__")
            stored = stored or changes
            element, parent = parent, source.parents.get(parent)
        function = source.function_at(node.lineno)
        if stored and (function is None or function.name not in ("__init__", "__post_init__")):
            return True
    return False
