"""Where the value of a keyword argument is written: at the call, in a constant, a dict, the default of an option."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.model import Span
from advisor.source import Source, last_name


@dataclass(frozen=True)
class Place:
    """Where a keyword's value is to be written: `{value}` of `text` at `span`. Without a span, `reason` says why the
    place is not known; with neither, the call is to be given the keyword."""

    span: Span | None = None
    text: str = "{value}"
    reason: str | None = None


AT_THE_CALL = Place()


def construction(source: Source, span: Span, qualified: str) -> ast.Call | None:
    """The call by which an object of a class is configured that the call at `span` makes: that call itself, or the
    `functools.partial` of the class that it calls, where that is called once; None where it is neither."""
    here = source.expressions_at(span.line, span.column)
    calls = [n for n in here if isinstance(n, ast.Call) and source.span(n).end_column in (span.end_column, None)]
    for call in calls:
        if source.qualified(call.func) == qualified or last_name(call.func) == qualified.rpartition(".")[2]:
            return call
    for call in calls:
        name = call.func.id if isinstance(call.func, ast.Name) and not call.keywords else None
        values = None if name is None else _assigned(source, name)
        value = values[0] if values is not None and len(values) == 1 else None
        if not isinstance(value, ast.Call) or source.qualified(value.func) != "functools.partial" or not value.args:
            continue
        if name is not None and source.qualified(value.args[0]) == qualified and _reads(source, name) == 1:
            return value
    return None


def written(
    source: Source, others: Sequence[Source], call: ast.Call, name: str, value: Any, said: Sequence[str]
) -> Place:
    """Where the argument `name` of a call gets its value `value`, in its file or in `others`; `said` are the words of
    the command line."""
    given = next((k.value for k in call.keywords if k.arg == name), None)
    if given is not None:
        return _origin(source, others, given, name, value, said)
    unpacked = [k.value for k in call.keywords if k.arg is None]
    if not unpacked:
        return AT_THE_CALL
    if len(unpacked) == 1 and isinstance(unpacked[0], ast.Dict):
        return _in_dict(source, unpacked[0], name, value)
    if len(unpacked) == 1 and isinstance(unpacked[0], ast.Name):
        return _in_named_dict(source, unpacked[0].id, name, value)
    return Place(reason=f"the call passes `**{source.segment(unpacked[0])}`: set {name} there")


def _origin(
    source: Source, others: Sequence[Source], given: ast.expr, name: str, value: Any, said: Sequence[str]
) -> Place:
    text = source.segment(given)
    told = Place(reason=f"{name} is `{text}`: set it where that gets its value")
    files = (source, *(other for other in others if other.path != source.path))
    if isinstance(given, ast.Constant):
        return Place(source.span(given))
    if isinstance(given, ast.Name):
        function = source.function_at(given.lineno)
        if function is not None and given.id in {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}:
            return _default(files, source, function, given.id, value) or told
        values = _assigned(source, given.id)
        alone = values is not None and len(values) == 1 and _is(values[0], value) and _reads(source, given.id) == 1
        return Place(source.span(values[0])) if values is not None and alone else told
    if isinstance(given, ast.Attribute):
        return _setting(files, given.attr, value, said) or told
    return told


def _default(
    sources: Sequence[Source], source: Source, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, value: Any
) -> Place | None:
    """The default of a parameter that is read once, of a function that is called once and without it."""
    named = [n for s in sources for n in ast.walk(s.tree) if last_name(n) == function.name]
    calls = [n for s in sources for n in ast.walk(s.tree) if isinstance(n, ast.Call) and n.func in named]
    if len(named) != 1 or len(calls) != 1:
        return None
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[::-1], arguments.defaults[::-1], strict=False))
    keyword = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    default = next((held for argument, held in (*pairs, *keyword) if argument.arg == name), None)
    place = next((i for i, argument in enumerate(positional) if argument.arg == name), len(positional))
    given = any(isinstance(a, ast.Starred) for a in calls[0].args) or len(calls[0].args) > place
    given = given or any(k.arg in (name, None) for k in calls[0].keywords)
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name]
    if default is None or not _is(default, value) or given or len(uses) != 1:
        return None
    return Place(source.span(default))


def _setting(sources: Sequence[Source], attribute: str, value: Any, said: Sequence[str]) -> Place | None:
    """The default of an option or of a class's field that only one place of the files reads and none other sets."""
    nodes = [(source, node) for source in sources for node in ast.walk(source.tree)]
    uses = [node for _, node in nodes if isinstance(node, ast.Attribute) and node.attr == attribute]
    if len(uses) != 1 or any(isinstance(node, ast.keyword) and _sets(node, attribute) for _, node in nodes):
        return None
    found: list[tuple[Source, ast.expr | None]] = []
    for source, node in nodes:
        if isinstance(node, ast.Call) and _is_option(node, attribute):
            if any(word.split("=")[0] in _words(node) for word in said):
                return None
            found.append((source, next((k.value for k in node.keywords if k.arg == "default"), None)))
        elif _is_field(source, node, attribute):
            found.append((source, getattr(node, "value", None)))
    if len(found) != 1 or found[0][1] is None or not _is(found[0][1], value):
        return None
    return Place(found[0][0].span(found[0][1]))


def _sets(keyword: ast.keyword, attribute: str) -> bool:
    """Whether a call is given a value for a setting, other than the setting itself: `num_workers=args.num_workers`."""
    read = isinstance(keyword.value, ast.Attribute) and keyword.value.attr == attribute
    return keyword.arg == attribute and not read


def _is_option(call: ast.Call, attribute: str) -> bool:
    """Whether a call of `add_argument` makes the option that a parser's result gives as an attribute."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return False
    dest = next((k.value for k in call.keywords if k.arg == "dest"), None)
    if dest is not None:
        return isinstance(dest, ast.Constant) and dest.value == attribute
    words = _words(call)
    long = [word for word in words if word.startswith("--")] or words
    return bool(long) and long[0].lstrip("-").replace("-", "_") == attribute


def _is_field(source: Source, node: ast.AST, attribute: str) -> bool:
    """Whether a statement of a class's body gives a field with a type: `num_workers: int = 0`."""
    field = isinstance(node, ast.AnnAssign) and isinstance(source.parents[node], ast.ClassDef)
    return field and isinstance(node.target, ast.Name) and node.target.id == attribute  # type: ignore[attr-defined]


def _words(call: ast.Call) -> list[str]:
    return [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def _in_named_dict(source: Source, held: str, name: str, value: Any) -> Place:
    told = Place(reason=f"the call passes `**{held}`: set {name} there")
    values = _assigned(source, held)
    if values is None or len(values) != 1 or _reads(source, held) != 1:
        return told
    made = values[0]
    if isinstance(made, ast.Dict):
        return _in_dict(source, made, name, value)
    if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name) or made.func.id != "dict" or made.args:
        return told
    given = next((k.value for k in made.keywords if k.arg == name), None)
    if given is not None:
        return Place(source.span(given)) if _is(given, value) else told
    if (
        not made.keywords
        or any(k.arg is None for k in made.keywords)
        or not _ends(source, made.keywords[-1].value, made)
    ):
        return told
    return Place(_behind(source, made.keywords[-1].value), f", {name}={{value}}")


def _in_dict(source: Source, made: ast.Dict, name: str, value: Any) -> Place:
    told = Place(reason=f"{name} is in the dict at line {made.lineno}: set it there")
    for key, held in zip(made.keys, made.values, strict=True):
        if not isinstance(key, ast.Constant):
            return told
        if key.value == name:
            return Place(source.span(held)) if _is(held, value) else told
    if not made.values or not _ends(source, made.values[-1], made):
        return told
    return Place(_behind(source, made.values[-1]), f', "{name}": {{value}}')


def _ends(source: Source, last: ast.expr, whole: ast.expr) -> bool:
    """Whether nothing but a comma and a bracket follow an item, no parenthesis of its own or comment."""
    text = source.segment(whole)
    begin = source.offset(source.span(whole).line, source.span(whole).column)
    rest = text[source.offset(*_end(source, last)) - begin :]
    return "".join(rest.split()) in ("}", ",}", ")", ",)")


def _end(source: Source, node: ast.expr) -> tuple[int, int]:
    span = source.span(node)
    assert span.end_line is not None and span.end_column is not None
    return span.end_line, span.end_column


def _behind(source: Source, node: ast.expr) -> Span:
    """The empty span behind an expression."""
    line, column = _end(source, node)
    return Span(path=source.path, line=line, column=column, end_line=line, end_column=column)


def _is(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def _stores(source: Source, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            yield node


def _assigned(source: Source, name: str) -> list[ast.expr] | None:
    """The values that a name of the file is assigned, each by a statement of its own; None where it is bound in other
    ways too."""
    found: list[ast.expr] = []
    for store in _stores(source, name):
        statement = source.parents[store]
        alone = isinstance(statement, ast.AnnAssign) or (
            isinstance(statement, ast.Assign) and statement.targets == [store]
        )
        value = getattr(statement, "value", None)
        if not alone or value is None:
            return None
        found.append(value)
    bound = any(isinstance(n, ast.arg) and n.arg == name for n in ast.walk(source.tree))
    return None if bound or name in source.imports else found


def _reads(source: Source, name: str) -> int:
    return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(source.tree))
