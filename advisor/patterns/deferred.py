"""Keep on the device what a training loop adds up for its log, and read it where the log is written.

A number that the host reads in every step only to add it to a total need not be read before the total is shown. Python
adds in double precision; so does the device with `.double()`, and the total is the same number.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from advisor import codemod
from advisor.patterns.hostreads import Read, decides, purpose, read_operand, seldom_reached
from advisor.patterns.tallies import (
    EXACT_OPERATIONS,
    Name,
    assignments,
    defines,
    dominates,
    given_value,
    is_count,
    is_empty_list,
    is_integer,
    is_name,
    is_number,
    last_name,
    parsed_expression,
    surroundings,
    target_of,
)
from advisor.source import Source
from advisor.usercode.reaching import reaching
from advisor.usercode.trainingloop import TrainingLoop

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
INTEGRAL = frozenset({"int64", "int32", "int16", "int8", "uint8"})
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LOOKS = frozenset({"locals", "globals", "vars", "exec", "eval", "dir"})  # sees names that nobody spells
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
NUMBERS = frozenset({"float", "int", "len", "sum", "max", "min", "abs", "round"})  # of Python, of what is no tensor
INFINITE = frozenset({"math.inf", "numpy.inf", "torch.inf", "math.nan", "numpy.nan"})
# who takes a list of numbers and keeps no hold of it
TAKERS = frozenset({"sum", "min", "max", "sorted", "print", "str", "repr", "tuple", "list", "float", "round", "len"})
LIBRARIES = frozenset({"torch", "numpy", "json", "math", "statistics", "matplotlib", "pandas", "pickle"})


class Needed(Exception):
    """The value cannot stay on the device; the message says where it is needed or what is not known."""


@dataclass(frozen=True)
class Deferred:
    """The edits that keep a value on the device; `exact` where what is shown is the same to the last bit."""

    edits: tuple[codemod.Edit, ...]
    exact: bool


def deferred(read: Read, reads: Iterable[Read], others: Iterable[Source]) -> Deferred:
    """How the value of a read can stay on the device until it is shown; raises `Needed` where it cannot.

    `reads` are all of the same loop, `others` the user's other files.
    """
    if read.loop is None or read.forward:
        raise Needed("it is read inside the model: what follows there needs it")
    if read.statement is not read.at:
        function = read.source.function_at(read.statement.lineno)
        raise Needed(f"`{function.name if function else 'a function'}` reads it: its callers may need a number")
    known = [item for item in reads if item.loop is not None and item.source.path == read.source.path]
    return _Deferral(read.source, read.loop, known, tuple(others)).of(read)


@dataclass
class _Deferral:
    source: Source
    loop: TrainingLoop
    reads: list[Read]
    others: tuple[Source, ...]
    edits: list[codemod.Edit] = field(default_factory=list)
    exact: bool = True
    done: dict[str, Name] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)  # names that may hold an integer and are kept in double precision
    reset: set[str] = field(default_factory=set)  # names that the loop also sets to a number or empties

    def of(self, read: Read) -> Deferred:
        update = self._update(read.statement)
        if update is None:
            raise Needed(_purpose_of(read))
        self._keep(update)
        if any(".double()" in text for _, text in self.edits) and any(map(_knows_mps, (self.source, *self.others))):
            raise Needed("the script may run on MPS, which has no double precision to add up in")
        return Deferred(tuple(dict.fromkeys(self.edits)), self.exact)

    # ------------------------------------------------------------------------------------------------------ names

    def _keep(self, name: Name) -> None:
        """Note the edits of every place that mentions a name."""
        if name.text in self.done:
            if self.done[name.text] != name:
                raise Needed(f"`{name.text}` is used in two ways")
            return
        self.done[name.text] = name
        mentions = self._mentions(name.text)
        statements = list(dict.fromkeys(self.source.statement_of(node) for node in mentions))
        starts = [s for s in statements if self._starts(s, name)]
        updates = [s for s in statements if s not in starts and self._update(s) == name]
        rest = [n for n in mentions if self.source.statement_of(n) not in (*updates, *starts)]
        if not starts and name.kind != "value":
            raise Needed(f"where `{name.text}` begins is not seen")
        whole = all(self._is_whole(s) for s in updates) and name.kind != "list"
        whole = whole and not any(self._starts(s, name) == "float" for s in starts)
        if not whole and any(self._may_be_whole(s, name) for s in updates):
            self._check_integers(name, starts)
        for statement in updates:
            self._check_update(statement, name)
            self._convert(statement, name, whole)
        self._check_starts(name, starts, rest, whole)
        if any(self.loop.node in surroundings(self.source, start) for start in starts):
            self.reset.add(name.text)
        for node in self._ordered(rest):
            if whole and isinstance(self.source.parents[node], ast.AugAssign) and not isinstance(node.ctx, ast.Load):
                raise Needed(f"line {node.lineno} may make another kind of number of `{name.text}`")
            self._reader(node, name, updates, whole)

    def _mentions(self, name: str) -> list[ast.Name]:
        """Every mention of a local name; raises where others than these may read or write it."""
        function = self.source.function_at(self.loop.node.lineno)
        scope: ast.AST = function if function is not None else self.source.tree
        if function is not None and any(a.arg == name for a in ast.walk(function.args) if isinstance(a, ast.arg)):
            raise Needed(f"`{name}` is an argument: what its caller does with it is not seen")
        found: list[ast.Name] = []
        pending: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while pending:
            node = pending.pop()
            if isinstance(node, SCOPES):
                self._check_inner(node, name)
                continue
            if isinstance(node, ast.Name) and node.id == name:
                found.append(node)
            if isinstance(node, ast.Name) and node.id in LOOKS:
                raise Needed(f"`{node.id}` may see `{name}` under its name")
            bound = [*getattr(node, "names", ())] if isinstance(node, (ast.Global, ast.Nonlocal)) else []
            if name in bound or (isinstance(node, ast.ExceptHandler) and node.name == name):
                raise Needed(f"`{name}` is no name of this function alone")
            pending += ast.iter_child_nodes(node)
        if function is None and any(_uses(other, name) for other in self.others if other.path != self.source.path):
            raise Needed(f"another file may read `{name}`")
        return sorted(found, key=lambda n: (n.lineno, n.col_offset))

    def _check_inner(self, scope: ast.AST, name: str) -> None:
        """A function or class in the same file may have a name of its own, and must not use this one."""
        names = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name]
        own = {n.arg for n in ast.walk(scope) if isinstance(n, ast.arg)}
        declared = [n for n in ast.walk(scope) if isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names]
        stored = any(isinstance(n.ctx, ast.Store) for n in names) and not isinstance(scope, ast.ClassDef)
        if declared or (names and not stored and name not in own):
            raise Needed(f"`{name}` is used in another function too")

    # ----------------------------------------------------------------------------------------- updates and beginnings

    def _update(self, statement: ast.stmt) -> Name | None:
        """The name that a statement puts numbers into which were read from the device, None for other statements."""
        found = target_of(statement)
        if found is None:
            return None
        leaves = [n for n in ast.walk(statement) if self._is_read(n) or self._is_value(n, found.text)]
        return found if leaves or found.text in self.done else None

    def _is_read(self, node: ast.AST) -> bool:
        return isinstance(node, ast.expr) and read_operand(node) is not None and self._dtype(node) is not None

    def _is_value(self, node: ast.AST, but: str) -> bool:
        held = self.done.get(node.id) if isinstance(node, ast.Name) and node.id != but else None
        return held is not None and held.kind == "value"

    def _dtype(self, expression: ast.AST) -> str | None:
        return next((d for r in self.reads for e, d in r.dtypes.items() if e is expression), None)

    def _starts(self, statement: ast.stmt, name: Name) -> str | None:
        """ "int", "float" or "list" where a statement gives the name a number or an empty list, else None."""
        if name.kind == "list" and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            cleared = isinstance(called, ast.Attribute) and called.attr == "clear" and is_name(called.value, name.text)
            return "list" if cleared else None
        pairs = list(assignments(statement))
        given = [value for target, value in pairs if is_name(target, name.text)]
        values = [n for _, value in pairs for n in ast.walk(value)]
        if len(given) != 1 or any(is_name(n, name.text) for n in values):
            return None
        if name.kind == "list":
            shared = isinstance(statement, ast.Assign) and len(statement.targets) > 1
            return "list" if is_empty_list(given[0]) and not shared else None
        return self._number(given[0])

    def _may_be_whole(self, statement: ast.stmt, name: Name) -> bool:
        """Whether an update reads an integer that is none in every run, so that its type is to be kept."""
        for node in ast.walk(statement):
            if self._is_read(node) and self._dtype(node) in INTEGRAL:
                return True
            if self._is_value(node, name.text) and isinstance(node, ast.Name) and node.id in self.whole:
                return True
        return False

    def _check_integers(self, name: Name, starts: list[ast.stmt]) -> None:
        """Python keeps an integer that it compares or assigns, and a sum of integers that begins as one."""
        self.whole.add(name.text)
        compared = name.kind == "sum" and any(self._extremes(s) for s in self._statements_of(name.text))
        if compared or (name.kind == "value" and starts):
            raise Needed(f"`{name.text}` may be an integer, and is shown as one")

    def _statements_of(self, name: str) -> list[ast.stmt]:
        return list(dict.fromkeys(self.source.statement_of(node) for node in self._mentions(name)))

    def _extremes(self, statement: ast.stmt) -> list[ast.Call]:
        return [n for n in ast.walk(statement) if isinstance(n, ast.Call) and last_name(n.func) in ("max", "min")]

    def _number(self, value: ast.expr) -> str | None:
        if isinstance(value, ast.UnaryOp) and isinstance(value.op, (ast.USub, ast.UAdd)):
            value = value.operand
        if isinstance(value, ast.Constant) and type(value.value) in (int, float):
            return type(value.value).__name__
        if isinstance(value, ast.Call) and is_name(value.func, "float") and len(value.args) == 1:
            return "float" if isinstance(value.args[0], ast.Constant) else None
        return "float" if self.source.qualified(value) in INFINITE else None

    def _check_update(self, statement: ast.stmt, name: Name) -> None:
        inside = self.loop.node in surroundings(self.source, statement)
        if not inside:
            raise Needed(f"line {statement.lineno} changes `{name.text}` outside of the loop")
        mine = [read for read in self.reads if read.statement is statement]
        if any(read.other for read in mine):
            raise Needed(f"line {statement.lineno} computes more than what it reads")
        if any(read.shaped for read in mine):
            raise Needed(f"line {statement.lineno} reads a tensor that has dimensions: make it a scalar first")
        if any(_infers(parent) for parent in surroundings(self.source, statement)):
            raise Needed("it is read in inference mode, whose tensors cannot be added to elsewhere")

    def _check_starts(self, name: Name, starts: list[ast.stmt], rest: list[ast.Name], whole: bool) -> None:
        """An `int` that no step has added to yet is shown as one, unless what shows it divides or formats."""
        if name.kind == "list" or whole or all(self._starts(s, name) == "float" for s in starts):
            return
        for node in rest:
            parent, statement = self.source.parents[node], self.source.statement_of(node)
            divided = isinstance(parent, (ast.BinOp, ast.AugAssign)) and isinstance(parent.op, ast.Div)
            converted = isinstance(parent, ast.Call) and is_name(parent.func, "float")
            formatted = isinstance(parent, ast.FormattedValue) and name.text not in self.whole
            if not (divided or converted or formatted or self._every_step(node)):
                raise Needed(f"`{name.text}` begins as an integer, and line {statement.lineno} may show it as one")

    # ---------------------------------------------------------------------------------------------------- expressions

    def _is_whole(self, statement: ast.stmt) -> bool:
        """Whether everything that an update adds is an integer in every run."""
        target, pending = target_of(statement), [given_value(statement)]
        while pending:
            node = pending.pop()
            if self._is_read(node):
                if self._dtype(node) not in INTEGRAL or not is_count(node):
                    return False
            elif isinstance(node, ast.Call) and last_name(node.func) in ("max", "min"):
                pending += node.args
            elif isinstance(node, ast.BinOp) and isinstance(node.op, EXACT_OPERATIONS):
                pending += [node.left, node.right]
            elif target is None or not (is_name(node, target.text) or is_integer(node)):
                return False
        return True

    def _convert(self, statement: ast.stmt, name: Name, whole: bool) -> None:
        """Note the edits of one update."""
        for extreme in self._extremes(statement):
            if isinstance(extreme.func, ast.Name) and isinstance(statement, ast.Assign) and statement.value is extreme:
                self._extreme(statement, extreme, name, whole)
                return
        value = given_value(statement)
        bare = self._is_read(value) or (name.kind == "list" and isinstance(value, ast.Name))
        if name.kind == "value" and not self._is_read(value):
            raise Needed(f"line {statement.lineno} does more than read it")
        if bare and name.kind != "sum":
            if self._is_read(value):
                self.edits.append((self.source.span(value), f"{self._operand(value)}.detach().clone()"))
            return
        self._arithmetic(value, name, whole)

    def _arithmetic(self, node: ast.expr, name: Name, whole: bool) -> None:
        if self._is_read(node) or self._is_value(node, name.text):
            self.edits.append((self.source.span(node), self._on_device(node, whole)))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (*EXACT_OPERATIONS, ast.Div)):
            self.exact &= not isinstance(node.op, ast.Div)
            self._arithmetic(node.left, name, whole)
            self._arithmetic(node.right, name, whole)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self._arithmetic(node.operand, name, whole)
        elif read_operand(node) is not None:
            raise Needed(f"what line {node.lineno} adds was not seen in the run")
        elif not is_number(node) or self._is_array(node):
            raise Needed(f"line {node.lineno} does more with it than add it up: `{ast.unparse(node)}`")

    def _is_array(self, node: ast.expr) -> bool:
        """Whether a name is given what NumPy makes, which does not add up with a tensor of the device."""
        if not isinstance(node, ast.Name):
            return False
        statements = [s for s in self._nodes() if isinstance(s, ast.stmt)]
        values = [value for s in statements for target, value in assignments(s) if is_name(target, node.id)]
        called = [self.source.qualified(v.func) or "" for v in values if isinstance(v, ast.Call)]
        return any(name.startswith("numpy.") for name in called)

    def _extreme(self, statement: ast.Assign, call: ast.Call, name: Name, whole: bool) -> None:
        """max(a, b) is `b if b > a else a`, which `torch.where` takes over to the letter, NaN included."""
        if len(call.args) != 2 or call.keywords or name.kind != "sum":
            raise Needed(f"line {call.lineno} does more with it than keep the largest")
        sides = []
        for side in call.args:
            if is_name(side, name.text):
                sides.append(name.text)
            elif self._is_read(side) or self._is_value(side, name.text):
                if isinstance(read_operand(side), ast.Call):
                    raise Needed(f"line {call.lineno} computes what it compares: compute that on a line of its own")
                sides.append(self._on_device(side, whole))
            else:
                raise Needed(f"line {call.lineno} compares it with `{ast.unparse(side)}`")
        first, second = sides
        sign = ">" if last_name(call.func) == "max" else "<"
        torch, imports = codemod.module_name(self.source, call.lineno, "torch")
        text = f"{torch}.where({second} {sign} {first}, {second}, {first})"
        self.edits += [*imports, (self.source.span(call), text)]

    def _on_device(self, node: ast.expr, whole: bool) -> str:
        """The text of a read as a tensor of its own that adds up as Python's numbers do."""
        if isinstance(node, ast.Name):
            return f"{node.id}.double()"
        operand = self._operand(node)
        if whole:
            return operand if operand.endswith(".sum()") else f"{operand}.long()"
        return f"{operand}.detach().double()"

    def _operand(self, node: ast.expr) -> str:
        """The text of the tensor of a read; raises where it may be none in another run."""
        operand, dtype = read_operand(node), self._dtype(node) or ""
        assert operand is not None and isinstance(node, ast.Call)
        if dtype not in FLOATING | INTEGRAL:
            raise Needed(f"line {node.lineno} reads a number of another type, {dtype or 'not known'}")
        converts = isinstance(node.func, ast.Name)
        if converts and not isinstance(operand, (ast.Name, ast.Call)):
            raise Needed(f"`{ast.unparse(operand)}` may be no tensor in another run")
        if converts and isinstance(node.func, ast.Name) and (node.func.id == "int") != (dtype in INTEGRAL):
            raise Needed(f"line {node.lineno} converts it to another type")
        if converts and isinstance(operand, ast.Name):
            self._check_tensor(operand)
        if isinstance(operand, (ast.Name, ast.Call, ast.Attribute, ast.Subscript)):
            return self.source.segment(operand)
        return f"({self.source.segment(operand)})"

    def _check_tensor(self, name: ast.Name) -> None:
        """`float(x)` takes numbers as well, `x.detach()` does not."""
        for definition in reaching(self.source, name.id, self.source.statement_of(name)):
            value = definition.value
            if not isinstance(value, ast.Call) or definition.item is not None or self._may_be_number(value):
                raise Needed(f"`{name.id}` may be no tensor in another run")

    def _may_be_number(self, call: ast.Call) -> bool:
        """Whether a call is one of Python's own, a read, or of a function of the user's that returns numbers too."""
        if read_operand(call) is not None or last_name(call.func) in NUMBERS:
            return isinstance(call.func, ast.Name) or read_operand(call) is not None
        name = last_name(call.func)
        functions = [n for source in (self.source, *self.others) for n in ast.walk(source.tree) if defines(n, name)]
        returned = [n.value for function in functions for n in ast.walk(function) if isinstance(n, ast.Return)]
        return any(not isinstance(value, (ast.Call, ast.Name, ast.BinOp, ast.Attribute)) for value in returned)

    # -------------------------------------------------------------------------------------------------------- readers

    def _ordered(self, nodes: list[ast.Name]) -> list[ast.Name]:
        """Places where a value decides something first: they are the better reason."""
        return sorted(nodes, key=lambda n: (not decides(self.source, n), n.lineno, n.col_offset))

    def _reader(self, node: ast.Name, name: Name, updates: list[ast.stmt], whole: bool) -> None:
        """Note the edit of one place that reads a name."""
        statement = self.source.statement_of(node)
        if not isinstance(node.ctx, ast.Load):
            self._changed(node, statement, name, "int" if whole else "float")
            return
        if name.kind == "list" and self._only_counts(node):
            return
        if self._every_step(node):
            update = target_of(statement)
            if name.kind != "value" or update is None or decides(self.source, node) or update.text == name.text:
                raise Needed(purpose(self.source, node))
            if name.text in self.reset or not any(dominates(self.source, first, statement) for first in updates):
                raise Needed(f"`{name.text}` may be a number at line {node.lineno}")
            self._keep(update)
            return
        if name.kind == "list":
            self._list_reader(node)
        elif name.kind == "value" and name.text in self.whole:
            self._number_reader(node, "item")
        else:
            self._number_reader(node, "int" if whole else "float")

    def _changed(self, node: ast.Name, statement: ast.stmt, name: Name, convert: str) -> None:
        """`total /= n` where it is shown is `total = float(total) / n`."""
        sign = SIGNS.get(type(statement.op)) if isinstance(statement, ast.AugAssign) else None
        if sign is None or name.kind != "sum" or self._every_step(node):
            raise Needed(f"line {node.lineno} gives `{name.text}` another value")
        assert isinstance(statement, ast.AugAssign)
        value = self.source.segment(statement.value)
        if not isinstance(statement.value, (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)):
            value = f"({value})"
        self._check_builtin(convert)
        text = f"{name.text} = {convert}({name.text}) {sign} {value}"
        self.edits.append((self.source.span(statement), text))

    def _every_step(self, node: ast.Name) -> bool:
        around = surroundings(self.source, node)
        if self.loop.node not in around:
            return False
        part = around[around.index(self.loop.node) - 1] if around.index(self.loop.node) else node
        if isinstance(self.loop.node, (ast.For, ast.AsyncFor)) and part is self.loop.node.iter:
            return False
        if part in self.loop.node.orelse:
            return False
        return not seldom_reached(self.source, node, self.loop.node, self.loop.inside.line)

    def _only_counts(self, node: ast.Name) -> bool:
        parent = self.source.parents[node]
        counted = isinstance(parent, ast.Call) and is_name(parent.func, "len")
        return counted or (isinstance(parent, (ast.If, ast.While)) and parent.test is node)

    def _number_reader(self, node: ast.Name, convert: str) -> None:
        parent = self.source.parents[node]
        if isinstance(parent, ast.FormattedValue):
            if parent.conversion != -1:
                raise Needed(f"line {node.lineno} shows how it is represented")
            return  # a tensor of one number is formatted as the number
        if isinstance(parent, ast.Call) and is_name(parent.func, "float") and convert == "float":
            return
        if isinstance(parent, (ast.Attribute, ast.Subscript, ast.Starred, ast.NamedExpr)):
            raise Needed(f"line {node.lineno} does more with `{node.id}` than show it")
        if convert == "item":
            self._put(node, f"{node.id}.item()")
            return
        self._check_builtin(convert)
        self._put(node, f"{convert}({node.id})")

    def _list_reader(self, node: ast.Name) -> None:
        parent, whole = self.source.parents[node], f"[value.item() for value in {node.id}]"
        if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load):
            text = self.source.segment(parent)
            each = isinstance(parent.slice, ast.Slice)
            if not (each or self._is_place(parent.slice)):
                raise Needed(f"line {node.lineno} may select several of `{node.id}`")
            self._put(parent, f"[value.item() for value in {text}]" if each else f"{text}.item()")
            return
        if self.loop.node in surroundings(self.source, node) and node.id not in self.reset:
            raise Needed(f"line {node.lineno} reads all of `{node.id}` while it grows")
        if not self._only_taken(node):
            raise Needed(f"line {node.lineno} hands the list `{node.id}` on, which may be changed later")
        self._put(node, whole)

    def _is_place(self, index: ast.expr) -> bool:
        """Whether a subscript is spelled as one integer: a constant, what is computed, the counter of a `for`."""
        if isinstance(index, ast.Name):
            loops = [n for n in surroundings(self.source, index) if isinstance(n, ast.For)]
            counted = (n for n in loops if isinstance(n.iter, ast.Call) and last_name(n.iter.func) == "range")
            return any(is_name(n.target, index.id) for n in counted)
        return isinstance(index, (ast.Constant, ast.UnaryOp, ast.BinOp))

    def _only_taken(self, node: ast.expr) -> bool:
        """Whether a list goes to something that keeps no hold of it."""
        child: ast.AST = node
        while True:
            parent = self.source.parents[child]
            if isinstance(parent, ast.comprehension):
                return parent.iter is child
            if isinstance(parent, ast.FormattedValue):
                return parent.conversion == -1
            if isinstance(parent, (ast.For, ast.AsyncFor)):
                return parent.iter is child
            if isinstance(parent, ast.Return):
                return True
            if isinstance(parent, ast.Call):
                called = self.source.qualified(parent.func) or ""
                return called.split(".")[0] in LIBRARIES or (
                    isinstance(parent.func, ast.Name) and not called and parent.func.id in TAKERS
                )
            if not isinstance(parent, (ast.Dict, ast.List, ast.Tuple, ast.keyword)):
                return False
            child = parent

    def _put(self, node: ast.expr, text: str) -> None:
        """Replace an expression, unless its recorded place is not its own, as in an f-string before Python 3.12."""
        span = self.source.span(node)
        text_of = next((n for n in reversed(surroundings(self.source, node)) if isinstance(n, ast.JoinedStr)), None)
        if text_of is not None and sys.version_info < (3, 12) and not self._told_apart(node, text_of):
            raise Needed(f"line {node.lineno} shows it in a text that cannot be edited")
        if ast.dump(parsed_expression(self.source.at(span))) != ast.dump(
            ast.parse(ast.unparse(node), mode="eval").body
        ):
            raise Needed(f"line {node.lineno} shows it in a text that cannot be edited")
        self.edits.append((span, text))

    def _told_apart(self, node: ast.expr, text: ast.JoinedStr) -> bool:
        """Whether the names in an f-string are all the words in it that look like them."""
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        own = {(n.id, n.lineno, n.col_offset) for n in ast.walk(text) if isinstance(n, ast.Name) and n.id in names}
        words = sum(len(re.findall(rf"\b{re.escape(name)}\b", self.source.segment(text))) for name in names)
        return words == len(own)

    def _check_builtin(self, name: str) -> None:
        if any(is_name(n, name) and isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) for n in self._nodes()):
            raise Needed(f"`{name}` is another thing in this file")

    def _nodes(self) -> Iterable[ast.AST]:
        return ast.walk(self.source.tree)


# --------------------------------------------------------------------------------------------------------- the files


def _infers(node: ast.AST) -> bool:
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any("inference_mode" in ast.unparse(item.context_expr) for item in node.items)
    decorators = getattr(node, "decorator_list", ())
    return any("inference_mode" in ast.unparse(decorator) for decorator in decorators)


def _purpose_of(read: Read) -> str:
    """Why a statement that keeps no number reads one."""
    found = [e for e in read.dtypes if isinstance(e, ast.expr)]
    if found:
        first = min(found, key=lambda e: (not decides(read.source, e), e.lineno, e.col_offset))
        return purpose(read.source, first)
    line = read.statement.lineno
    if isinstance(read.statement, (ast.If, ast.While, ast.Assert)):
        return f"line {line} decides by its value what is done next: the host has to wait for it"
    call = read.statement.value if isinstance(read.statement, ast.Expr) else None
    if isinstance(call, ast.Call) and is_name(call.func, "print"):
        return f"line {line} prints it in every step: do that every so many steps only, under `if step % N == 0`"
    return f"line {line} needs its values on the host in every step"


def _uses(source: Source, name: str) -> bool:
    """Whether a file imports a name, or reads it from something."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return True
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name):
            return node.value.id in source.imports
    return False


def _knows_mps(source: Source) -> bool:
    """Whether a file speaks of MPS, be it in a comment, or leaves the choice of the device to a library that may."""
    chosen = any(name.partition(".")[0] == "accelerate" for name in source.imports.values())
    return chosen or "torch.accelerator" in source.text or re.search(r"\bmps\b", source.text) is not None
