"""How many axes a tensor has, and which numbers are sizes of it, as far as the source of a function shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from advisor.source import Source
from advisor.usercode.reaching import Definition, Function, reaching
from advisor.usercode.scalars import Scalars

DEPTH = 10  # expressions that are followed one into the other
# operations whose result has as many axes as their first tensor
KEEPING = frozenset(
    "transpose swapaxes swapdims contiguous clone detach to float double half bfloat16 type type_as softmax "
    "log_softmax masked_fill relu gelu silu sigmoid tanh exp log sqrt rsqrt abs neg clamp clip dropout requires_grad "
    "cuda cpu roll flip tril triu layer_norm rms_norm normalize index_select narrow cat concat square pow".split()
)
BROADCASTING = frozenset("add sub mul div where maximum minimum".split())
KEEPING_MODULES = frozenset(
    "Linear Dropout LayerNorm RMSNorm Identity ReLU GELU SiLU Tanh Sigmoid Softmax LogSoftmax".split()
)
REDUCING = frozenset("mean sum var std amax amin norm prod logsumexp argmax argmin".split())
SEVERAL = frozenset({"chunk", "split", "tensor_split", "unbind"})


@dataclass(frozen=True)
class Size:
    """A number that is the size of a tensor: `axis` is counted from the last; `statement` is where it is read."""

    tensor: ast.expr
    axis: int
    statement: ast.stmt


class Extents:
    """Answers for one file; what cannot be seen is None. `ranks` tells the number of axes of some expressions."""

    def __init__(self, source: Source, ranks: Mapping[str, int] | None = None) -> None:
        self.source = source
        self.ranks = ranks or {}

    # ----------------------------------------------------------------------------------------------------------- axes

    def rank(self, node: ast.expr, statement: ast.stmt, depth: int = DEPTH) -> int | None:
        """The number of axes that an expression has in every call that gets to its statement."""
        if depth == 0 or ast.unparse(node) in self.ranks:
            return self.ranks.get(ast.unparse(node))
        if isinstance(node, ast.Name):
            return self._rank_of_name(node, statement, depth)
        if isinstance(node, ast.Call):
            return self._rank_of_call(node, statement, depth)
        if isinstance(node, ast.Subscript):
            return self._rank_of_part(node, statement, depth)
        if isinstance(node, ast.Attribute):
            return self.rank(node.value, statement, depth - 1) if node.attr in ("mT", "T", "data", "H") else None
        if isinstance(node, ast.UnaryOp):
            return self.rank(node.operand, statement, depth - 1)
        if isinstance(node, ast.IfExp):
            return _one([self.rank(side, statement, depth - 1) for side in (node.body, node.orelse)])
        return self._broadcast([node.left, node.right], statement, depth) if isinstance(node, ast.BinOp) else None

    def _rank_of_name(self, name: ast.Name, statement: ast.stmt, depth: int) -> int | None:
        if self._rebound(name):
            return None
        stated = self._stated(name.id, statement)
        if stated is not None:
            return stated
        return _one([self._rank_of(d, depth - 1) for d in reaching(self.source, name.id, statement)])

    def _rank_of(self, found: Definition, depth: int) -> int | None:
        if found.statement is None or found.value is None:
            return None
        take = self.rank if found.item is None else self._rank_of_item
        return take(found.value, found.statement, depth)

    def _rebound(self, name: ast.Name) -> bool:
        """Whether a lambda or comprehension around a name may bind it to something else."""
        node: ast.AST | None = self.source.parents.get(name)
        while node is not None and not isinstance(node, ast.stmt):
            if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                return True
            node = self.source.parents.get(node)
        return False

    def _stated(self, name: str, before: ast.stmt) -> int | None:
        """The number of axes a statement before this one takes a name to have: `B, T, C = x.shape`."""
        for statement in self._passed(before):
            shown = _unpacked(statement, name) or _asserted(statement, name)
            if shown is not None and self.same(name, statement, before):
                return shown
        return None

    def _passed(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements of its function that every run passes on the way to a statement."""
        while not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            block = self.source.block_of(statement)
            yield from block[: block.index(statement)]
            parent = self.source.parents.get(statement)
            if not isinstance(parent, ast.stmt):
                return
            statement = parent

    def same(self, name: str, first: ast.stmt, second: ast.stmt) -> bool:
        """Whether a name has one value at two statements."""
        return _places(reaching(self.source, name, first)) == _places(reaching(self.source, name, second))

    def _rank_of_item(self, value: ast.expr, statement: ast.stmt, depth: int) -> int | None:
        """The number of axes of each element that is unpacked from a value."""
        if depth == 0:
            return None
        if isinstance(value, ast.Name):
            found = reaching(self.source, value.id, statement)
            several = [d for d in found if d.value is not None and d.item is None and _gives_several(d.value)]
            if several and len(several) == len(found):
                items = [(d.value, d.statement) for d in several if d.value is not None and d.statement is not None]
                return _one([self._rank_of_item(v, s, depth - 1) for v, s in items])
        if isinstance(value, (ast.GeneratorExp, ast.ListComp)):
            return self.rank(value.elt, statement, depth - 1)
        if isinstance(value, ast.Call):
            name = _called(value)
            if name == "map" and value.args and isinstance(value.args[0], ast.Lambda):
                return self.rank(value.args[0].body, statement, depth - 1)
            if name in SEVERAL:
                whole = self.rank(self._arguments(value)[0], statement, depth - 1)
                return whole - 1 if name == "unbind" and whole is not None else whole
        whole = self.rank(value, statement, depth - 1)
        return whole - 1 if whole is not None else None

    def _rank_of_part(self, node: ast.Subscript, statement: ast.stmt, depth: int) -> int | None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(parts) == 1 and _number(parts[0]) is not None:
            return self._rank_of_item(node.value, statement, depth)
        if isinstance(node.value, ast.Call) and _called(node.value) in SEVERAL:
            return None
        whole, added = self.rank(node.value, statement, depth - 1), 0
        for part in parts:
            if isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and part.value is ...):
                continue
            if isinstance(part, ast.Constant) and part.value is None:
                added += 1
            elif _number(part) is not None:
                added -= 1
            else:
                return None
        return None if whole is None else whole + added

    def _broadcast(self, operands: Sequence[ast.expr], statement: ast.stmt, depth: int) -> int | None:
        """The number of axes of what is computed element by element; numbers have none."""
        found = [0 if self._is_number(o, statement) else self.rank(o, statement, depth - 1) for o in operands]
        known = [rank for rank in found if rank is not None]
        return max(known) if known and len(known) == len(found) else None

    def _is_number(self, node: ast.expr, statement: ast.stmt) -> bool:
        function = self.source.function_at(statement.lineno)
        return _number(node) is not None or (function is not None and Scalars(self.source, function).is_number(node))

    # ---------------------------------------------------------------------------------------------------------- calls

    def _arguments(self, call: ast.Call) -> list[ast.expr]:
        """The tensor of a method, or all arguments of a function."""
        method = isinstance(call.func, ast.Attribute) and self.source.qualified(call.func) is None
        return [call.func.value, *call.args] if method and isinstance(call.func, ast.Attribute) else list(call.args)

    def _rank_of_call(self, call: ast.Call, statement: ast.stmt, depth: int) -> int | None:
        name, given = _called(call).rstrip("_"), self._arguments(call)
        own = self._of_own(call, statement, depth)
        starred = any(isinstance(a, ast.Starred) for a in given)
        if own is not None or not given or starred or self._is_object(given[0], statement):
            return own
        if name in ("view", "reshape", "expand", "permute"):
            return _listed(given[1:])
        if name == "bmm":
            return 3
        if name in ("einsum", "rearrange", "repeat") and len(given) > 1:
            pattern = next((a for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)), None)
            return _axes_of(str(pattern.value), name == "einsum") if pattern is not None else None
        if name in BROADCASTING:
            return self._broadcast(given, statement, depth)
        first = given[0]
        if name in ("cat", "concat") and isinstance(first, (ast.List, ast.Tuple)) and first.elts:
            first = first.elts[0]
        if name == "flatten":
            begin, end = _argument(call, given, 1, "start_dim", 0), _argument(call, given, 2, "end_dim", -1)
            return begin - end if begin is not None and end is not None and begin >= 0 > end else None
        whole = self.rank(first, statement, depth - 1)
        return None if whole is None else _after(name, whole, call, given)

    def _is_object(self, node: ast.expr, statement: ast.stmt) -> bool:
        function = self.source.function_at(statement.lineno)
        this = Scalars(self.source, function).this if function is not None else None
        return isinstance(node, ast.Name) and node.id == this

    def _of_own(self, call: ast.Call, statement: ast.stmt, depth: int) -> int | None:
        """The number of axes that a function of the file, or a module of torch in the object, returns."""
        function = self.source.function_at(statement.lineno)
        made = Scalars(self.source, function).held(call.func) if function is not None else None
        if made is not None and len(call.args) == 1:
            module, _, kind = (self.source.qualified(made.func) or "").rpartition(".")
            keeps = kind in KEEPING_MODULES and module.startswith("torch.nn")
            return self.rank(call.args[0], statement, depth - 1) if keeps else None
        if isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name):
            return None
        named = [n for n in ast.walk(self.source.tree) if isinstance(n, Function) and n.name == _called(call)]
        if len(named) != 1 or named[0] is function or self.source.qualified(call.func) is not None:
            return None
        results = [n for n in ast.walk(named[0]) if isinstance(n, ast.Return) and n.value is not None]
        return _one([self.rank(r.value, r, depth - 1) for r in results if r.value is not None])

    # ---------------------------------------------------------------------------------------------------------- sizes

    def size(self, node: ast.expr, statement: ast.stmt, depth: int = DEPTH) -> Size | None:
        """The tensor and axis of which an expression is the size: `x.shape[-1]`, `x.size(2)`, a name unpacked."""
        if depth and isinstance(node, ast.Name) and not self._rebound(node):
            found = reaching(self.source, node.id, statement)
            return self._size_of(found[0], node.id, depth - 1) if len(found) == 1 else None
        if isinstance(node, ast.Subscript):
            tensor, place = _shaped(node.value), _number(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
            tensor, place = node.func.value, _argument(node, [node.func.value, *node.args], 1, "dim", None)
        else:
            return None
        if tensor is None or place is None:
            return None
        rank = self.rank(tensor, statement) if place >= 0 else 0
        return None if rank is None else Size(tensor, place - rank, statement)

    def _size_of(self, found: Definition, name: str, depth: int) -> Size | None:
        statement, value = found.statement, found.value
        if isinstance(statement, ast.Assign) and value is None:
            value = statement.value  # `*rest, width = x.shape`
        tensor = _shaped(value) if value is not None else None
        if statement is None or value is None:
            return None
        if tensor is None:
            return self.size(value, statement, depth) if found.item is None else None
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        names = targets[0].elts if len(targets) == 1 and isinstance(targets[0], (ast.Tuple, ast.List)) else []
        places = [i for i, n in enumerate(names) if isinstance(n, ast.Name) and n.id == name]
        if len(places) != 1 or any(isinstance(n, ast.Starred) for n in names[places[0] :]):
            return None
        return Size(tensor, places[0] - len(names), statement)


def _places(found: Sequence[Definition]) -> list[tuple[int, bool, int | None]]:
    return [(id(d.statement) if d.statement is not None else 0, d.parameter, d.item) for d in found]


def _one(ranks: Sequence[int | None]) -> int | None:
    """What all of several ranks are."""
    return ranks[0] if ranks and len(set(ranks)) == 1 else None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _number(node: ast.expr) -> int | None:
    """A literal integer."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    plain = isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool)
    return node.value if plain else None  # type: ignore[attr-defined]


def _argument(call: ast.Call, given: Sequence[ast.expr], place: int, name: str, default: int | None) -> int | None:
    """A literal integer given to a call by position or by name; None where it is no literal."""
    value = given[place] if place < len(given) else next((k.value for k in call.keywords if k.arg == name), None)
    return default if value is None else _number(value)


def _listed(sizes: Sequence[ast.expr]) -> int | None:
    """How many sizes a view is given, one by one or in one tuple."""
    if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = sizes[0].elts
    elif len(sizes) == 1 and _number(sizes[0]) is None:
        return None
    return None if not sizes or any(isinstance(s, ast.Starred) for s in sizes) else len(sizes)


def _axes_of(pattern: str, einsum: bool) -> int | None:
    """The axes on the right of an arrow: letters of torch.einsum, names and groups of einops."""
    left, arrow, right = pattern.partition("->")
    if not arrow or "..." in right:
        return None
    if einsum and all(len(token) == 1 or "," in token or " " not in pattern for token in left.split()):
        return len(right.replace(" ", ""))
    depth = count = 0
    for token in right.replace("(", " ( ").replace(")", " ) ").split():
        count += depth == 0 and token != ")"
        depth += (token == "(") - (token == ")")
    return count


def _after(name: str, whole: int, call: ast.Call, given: Sequence[ast.expr]) -> int | None:
    """The number of axes after an operation on a tensor of `whole` axes."""
    if name in KEEPING:
        return whole
    if name == "unsqueeze":
        return whole + 1
    if name == "unflatten" and len(given) == 3:
        parts = _listed(given[2:])
        return None if parts is None else whole - 1 + parts
    if name not in REDUCING:
        return None
    keeps = next((k.value for k in call.keywords if k.arg == "keepdim"), None)
    if isinstance(keeps, ast.Constant) and keeps.value is True:
        return whole
    one = _argument(call, given, 1, "dim", None) is not None and len(given) <= 2 and keeps is None
    return whole - 1 if one else None


def _gives_several(value: ast.expr) -> bool:
    kinds = isinstance(value, (ast.GeneratorExp, ast.ListComp))
    return kinds or (isinstance(value, ast.Call) and _called(value) in SEVERAL | {"map"})


def _shaped(node: ast.expr) -> ast.expr | None:
    """The tensor of `x.shape` or `x.size()`."""
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        return node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "size" else None
    return node.value if isinstance(node, ast.Attribute) and node.attr == "shape" else None


def _unpacked(statement: ast.stmt, name: str) -> int | None:
    """How many sizes a statement unpacks a name's shape into."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], (ast.Tuple, ast.List)):
        return None
    names = statement.targets[0].elts
    values = statement.value.elts if isinstance(statement.value, ast.Tuple) else [ast.Starred(statement.value)]
    spread = [v.value for v in values if isinstance(v, ast.Starred)]  # `b, n, _, h = *x.shape, self.heads`
    if len(spread) != 1 or any(isinstance(n, ast.Starred) for n in names):
        return None
    tensor = _shaped(spread[0])
    return len(names) - len(values) + 1 if isinstance(tensor, ast.Name) and tensor.id == name else None


def _asserted(statement: ast.stmt, name: str) -> int | None:
    """The number of axes that a statement refuses to do without: `assert x.dim() == 3`."""
    if isinstance(statement, ast.Assert):
        test, wanted = statement.test, ast.Eq
    elif isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise) and not statement.orelse:
        test, wanted = statement.test, ast.NotEq  # type: ignore[assignment]
    else:
        return None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], wanted):
        return None
    known = ast.unparse(test.left) in (f"{name}.dim()", f"{name}.ndim", f"len({name}.shape)", f"{name}.ndimension()")
    return _number(test.comparators[0]) if known else None
