"""Edit primitives: each returns (span, text) pairs over the source as found and leaves every other character alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from advisor.model import Span
from advisor.source import Source

Edit = tuple[Span, str]


class CannotEdit(Exception):
    """The place does not have the form an edit needs; the message says what was expected."""


def replace(span: Span, text: str) -> Edit:
    """Put `text` where `span` is."""
    return span, text


def replace_expression(source: Source, span: Span, text: str) -> Edit:
    """Put a call where an expression is, together with parentheses that only grouped the expression."""
    assert span.end_line is not None and span.end_column is not None
    begin, end = source.offset(span.line, span.column), source.offset(span.end_line, span.end_column)
    before, after = source.text[:begin], source.text[end:]
    if before.endswith("(") and after.startswith(")"):
        head = before[:-1].rstrip(" ")
        if not head or not (head[-1].isalnum() or head[-1] in "_)]"):
            grown = Span(
                path=span.path,
                line=span.line,
                column=span.column - 1,
                end_line=span.end_line,
                end_column=span.end_column + 1,
            )
            return grown, text
    return span, text


def insert(path: str, line: int, column: int, text: str) -> Edit:
    """Insert `text` before a position."""
    return Span(path=path, line=line, column=column, end_line=line, end_column=column), text


# --------------------------------------------------------------------------------------------------------------- calls


def set_keywords(source: Source, at: Span, keywords: Mapping[str, str], drop: Sequence[str] = ()) -> Edit:
    """Give the call that starts at `at` these keyword arguments: replaced where present, else appended.

    An argument named in `drop` makes room for the first new one. Arguments keep their formatting and comments. Raises
    `CannotEdit` where no call starts there or where it passes `**kwargs`, which could hold the same names.
    """
    wrapper = MetadataWrapper(cst.parse_module(source.text))
    finder = _CallFinder(at)
    wrapper.visit(finder)
    if finder.call is None or finder.span is None:
        raise CannotEdit(f"no call starts at line {at.line}")
    if any(arg.star == "**" for arg in finder.call.args):
        raise CannotEdit("the call passes ** arguments, which may already hold the option")
    args = list(finder.call.args)
    for name, text in keywords.items():
        value = cst.parse_expression(text)
        place = next(
            (i for i, a in enumerate(args) if a.keyword is not None and a.keyword.value in (name, *drop)), None
        )
        if place is not None:
            args[place] = args[place].with_changes(keyword=cst.Name(name), value=value)
            others = [a for a in args[place + 1 :] if a.keyword is None or a.keyword.value not in (name, *drop)]
            if len(others) != len(args) - place - 1:  # what stood last hands its ending on
                kept = [*args[: place + 1], *others]
                args = [*kept[:-1], kept[-1].with_changes(comma=args[-1].comma)]
        else:
            args = _append(finder.call, args, name, value)
    new = finder.call.with_changes(args=args)
    module = wrapper.module.deep_replace(finder.call, new)  # a node alone forgets the indentation around it
    assert isinstance(module, cst.Module)
    begin, end = source.offset(finder.span.line, finder.span.column), _end(source, finder.span)
    return finder.span, module.code[begin : len(module.code) - (len(source.text) - end)]


def _append(call: cst.Call, args: list[cst.Arg], name: str, value: cst.BaseExpression) -> list[cst.Arg]:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(keyword=cst.Name(name), value=value, equal=equal)
    if not args:
        return [new]
    last = args[-1]
    if not isinstance(last.comma, cst.Comma):  # f(a, b) or a last argument on its own line without a comma
        before = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        kept = last.with_changes(comma=before, whitespace_after_arg=cst.SimpleWhitespace(""))
        return [*args[:-1], kept, new.with_changes(whitespace_after_arg=last.whitespace_after_arg)]
    closing = last.comma.whitespace_after
    if not isinstance(closing, cst.ParenthesizedWhitespace):  # f(a, b,)
        return [
            *args[:-1],
            last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))),
            new.with_changes(comma=last.comma),
        ]
    opening = call.whitespace_before_args
    indent = opening.last_line if isinstance(opening, cst.ParenthesizedWhitespace) else cst.SimpleWhitespace("    ")
    separator = cst.Comma(whitespace_after=closing.with_changes(last_line=indent))
    ending = cst.Comma(whitespace_after=closing.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=()))
    return [*args[:-1], last.with_changes(comma=separator), new.with_changes(comma=ending)]


class _CallFinder(cst.CSTVisitor):
    """Finds the call that starts at a position; the widest one when several do."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, at: Span) -> None:
        super().__init__()
        self._at = at
        self.call: cst.Call | None = None
        self.span: Span | None = None

    def visit_Call(self, node: cst.Call) -> None:
        place = self.get_metadata(PositionProvider, node)
        start, end = place.start, place.end
        if (start.line, start.column) != (self._at.line, self._at.column):
            return
        if self._at.end_line is not None and (end.line, end.column) != (self._at.end_line, self._at.end_column):
            return
        if self.call is None:
            self.call = node
            self.span = Span(
                path=self._at.path, line=start.line, column=start.column, end_line=end.line, end_column=end.column
            )


def call_text(source: Source, at: Span, function: str, arguments: Sequence[str], tail: str = "") -> str:
    """A call to stand at `at`, with `tail` behind it: on one line where the file's own width allows it, else with its
    arguments on their own."""
    width, ending, line = _width(source), line_ending(source), source.lines[at.line - 1]
    flat = f"{function}({', '.join(arguments)}){tail}"
    rest = len(source.lines[(at.end_line or at.line) - 1].rstrip()) - (at.end_column or 0)
    if at.column + len(flat) + max(rest, 0) <= width or "\n" in flat:
        return flat
    return _on_lines(function, arguments, tail, line[: len(line) - len(line.lstrip())], width, ending)


def _width(source: Source) -> int:
    return min(max(100, *(len(line.rstrip()) for line in source.lines)), 120)


def line_ending(source: Source) -> str:
    """How the lines of a file end."""
    return "\r\n" if source.text.count("\r\n") > source.text.count("\n") / 2 else "\n"


def _on_lines(function: str, arguments: Sequence[str], tail: str, indent: str, width: int, ending: str) -> str:
    inner = indent + ("\t" if "\t" in indent else "    ")
    joined = ", ".join(arguments)
    if len(inner) + len(joined) <= width:
        return f"{function}({ending}{inner}{joined}{ending}{indent}){tail}"
    lines = "".join(f"{inner}{argument},{ending}" for argument in arguments)
    return f"{function}({ending}{lines}{indent}){tail}"


PLACEHOLDER = re.compile(r"\{(\w+)\}")


def spelled(template: str, texts: Mapping[str, str]) -> str:
    """A template with its placeholders replaced: as they are where they are whole arguments, else grouped."""

    def text(found: re.Match[str]) -> str:
        before, after = template[: found.start()].rstrip(), template[found.end() :].lstrip()
        begins = before[-1:] in ("(", ",", "=") and not before.endswith("==")
        given = texts[found[2]] if not found[1] else negated(texts[found[2]])
        if (begins and after[:1] in (",", ")")) or _is_operand(given, begins, before, after):
            return given if not _is_bare_tuple(given) else grouped(given)
        return grouped(given)

    return re.sub(rf"(~?){PLACEHOLDER.pattern}", text, template)


def negated(text: str) -> str:
    """The elementwise opposite of a mask of bool: `~m` becomes `m`, `m == 0` becomes `m != 0`."""
    body = ast.parse(text.strip(), mode="eval").body if "\n" not in text and text.isascii() else None
    if isinstance(body, ast.UnaryOp) and isinstance(body.op, ast.Invert):
        return text.strip()[body.operand.col_offset : body.operand.end_col_offset]
    if isinstance(body, ast.Compare) and len(body.ops) == 1 and isinstance(body.ops[0], (ast.Eq, ast.NotEq)):
        left = text.strip()[: body.left.end_col_offset]
        between = text.strip()[body.left.end_col_offset : body.comparators[0].col_offset]
        swapped = between.replace("==", "!=") if "==" in between else between.replace("!=", "==")
        return left + swapped + text.strip()[body.comparators[0].col_offset :]
    return f"~{grouped(text)}"


def _is_operand(text: str, begins: bool, before: str, after: str) -> bool:
    """Whether a text may stand as it is in `x if y else z`."""
    if not ((begins and after.startswith("if ")) or (before.endswith(" if") and after.startswith("else "))):
        return False
    body = ast.parse(text.strip(), mode="eval").body if "\n" not in text else None
    return body is not None and not isinstance(body, (ast.IfExp, ast.Lambda, ast.Tuple, ast.NamedExpr))


def _is_bare_tuple(text: str) -> bool:
    return not text.startswith("(") and "\n" not in text and isinstance(ast.parse(text, mode="eval").body, ast.Tuple)


def expression_instead(
    source: Source, at: Span, template: str, texts: Mapping[str, str], consumed: Sequence[Span]
) -> list[Edit]:
    """The spelled template in place of the expression at `at` and of the statements only that needed.

    `F.` in the template is spelled as the file spells torch.nn.functional, `torch.` as it spells torch.
    """
    edits, template = named_modules(source, at.line, template)
    text = laid_out(source, at, spelled(template, texts))
    return [*edits, replace_expression(source, at, text), *remove_statements(source, consumed)]


def named_modules(source: Source, line: int, template: str) -> tuple[list[Edit], str]:
    """A template with `F.` and `torch.` as the file spells them at a line, and the imports that needs."""
    edits: list[Edit] = []
    for prefix, module in (("F", "torch.nn.functional"), ("torch", "torch")):
        if re.search(rf"(?<![\w.]){prefix}\.", template):
            name, imported = module_name(source, line, module)
            template = re.sub(rf"(?<![\w.]){prefix}\.", f"{name}.", template)
            edits += imported
    return edits, template


def laid_out(source: Source, at: Span, text: str) -> str:
    """The expression with the arguments of its call with most of them on their own lines where it is too long."""
    body = ast.parse(text.strip(), mode="eval").body if "\n" not in text else None
    if isinstance(body, ast.IfExp) and body.col_offset == 1 and text.isascii():  # in parentheses
        return _choice_text(source, at, text[1:-1])
    parts = _call_parts(text) if body is not None else None
    return text if parts is None else call_text(source, at, *parts)


def _call_parts(text: str) -> tuple[str, list[str], str] | None:
    """Function, arguments and what follows them, of the call with most arguments that a text begins with."""
    calls = [n for n in ast.walk(ast.parse(text.strip(), mode="eval").body) if isinstance(n, ast.Call)]
    outer = [c for c in calls if c.end_col_offset == len(text) or text[c.end_col_offset or 0 :][:1] in (".", "[")]
    call = max(outer, key=lambda c: len(c.args) + len(c.keywords), default=None)
    if call is None or not text.isascii() or call.col_offset:
        return None
    parts = sorted((*call.args, *(k.value for k in call.keywords)), key=lambda n: n.col_offset)
    names = {id(k.value): f"{k.arg}=" if k.arg else "**" for k in call.keywords}
    arguments = [names.get(id(p), "") + text[_opening(text, p) : _closing(text, p)] for p in parts]
    assert call.func.end_col_offset is not None and call.end_col_offset is not None
    return text[: call.func.end_col_offset], arguments, text[call.end_col_offset :]


def _choice_text(source: Source, at: Span, text: str) -> str:
    """`one if test else other` in parentheses, with each part on a line of its own, or on several."""
    width, ending, line = _width(source), line_ending(source), source.lines[at.line - 1]
    indent = line[: len(line) - len(line.lstrip())]
    inner = indent + ("\t" if "\t" in indent else "    ")
    choice = ast.parse(text, mode="eval").body
    assert isinstance(choice, ast.IfExp)
    found: list[str] = []
    for word, part in (("", choice.body), ("if ", choice.test), ("else ", choice.orelse)):
        said = text[_opening(text, part) : _closing(text, part)]
        parts = _call_parts(said)
        if len(inner) + len(word) + len(said) <= width:
            found.append(word + said)
        elif parts is not None:
            found.append(word + _on_lines(*parts, inner, width, ending))
        elif isinstance(part, ast.BoolOp) and isinstance(part.op, ast.And):
            tests = [text[_opening(text, test) : _closing(text, test)] for test in part.values]
            found.append(word + f"{ending}{inner}and ".join(tests))
        else:
            found.append(word + said)
    return f"({ending}" + "".join(f"{inner}{one}{ending}" for one in found) + f"{indent})"


def _opening(text: str, node: ast.expr) -> int:
    """Where an argument starts, parentheses around it included."""
    start = node.col_offset
    while text[:start].rstrip().endswith("(") and not _is_call_bracket(text, len(text[:start].rstrip()) - 1):
        start = len(text[:start].rstrip()) - 1
    return start


def _closing(text: str, node: ast.expr) -> int:
    assert node.end_col_offset is not None
    end = node.end_col_offset
    for _ in range(text[_opening(text, node) : node.col_offset].count("(")):
        end = text.index(")", end) + 1
    return end


def _is_call_bracket(text: str, at: int) -> bool:
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] in "_])")


def grouped(text: str) -> str:
    """An operand as it must stand before `.attribute` or inside a conditional: in parentheses unless it binds
    tightly."""
    body = ast.parse(text.strip(), mode="eval").body if "\n" not in text else None
    tight = isinstance(body, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return text if tight else f"({text})"


# ---------------------------------------------------------------------------------------------------------- statements


def remove_statements(source: Source, spans: Sequence[Span]) -> list[Edit]:
    """Remove whole assignments; a block is never left empty because the result's statement stays.

    Raises `CannotEdit` where a span is not a statement.
    """
    places = {(s.line, s.column) for s in spans}
    wanted = [
        n
        for n in ast.walk(source.tree)
        if isinstance(n, ast.stmt) and (n.lineno, source.character(n.lineno, n.col_offset)) in places
    ]
    if len(wanted) != len(places):
        raise CannotEdit("a statement to remove was not found")
    edits: list[Edit] = []
    done: set[ast.stmt] = set()
    for statement in sorted(wanted, key=lambda s: (s.lineno, s.col_offset)):
        if statement in done:
            continue
        group = sharing_lines(source, statement)
        gone = [s for s in group if s in wanted]
        done.update(gone)
        edits.extend(_remove_from_line(source, group, gone))
    return edits


def sharing_lines(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements joined to this one by semicolons, in order."""
    block = source.block_of(statement)
    place = block.index(statement)
    first = last = place
    while first > 0 and block[first - 1].end_lineno == block[first].lineno:
        first -= 1
    while last + 1 < len(block) and block[last + 1].lineno == block[last].end_lineno:
        last += 1
    return block[first : last + 1]


def _remove_from_line(source: Source, group: list[ast.stmt], gone: list[ast.stmt]) -> list[Edit]:
    kept = [s for s in group if s not in gone]
    spans = [source.span(s) for s in group]
    if not kept:
        before = source.lines[spans[0].line - 1][: spans[0].column]
        if before.strip():
            raise CannotEdit("the statement shares its line with the head of its block")
        end_line = (spans[-1].end_line or spans[-1].line) + 1
        return [(Span(path=source.path, line=spans[0].line, column=0, end_line=end_line, end_column=0), "")]
    edits: list[Edit] = []
    last_kept = max(i for i, s in enumerate(group) if s in kept)
    for index, statement in enumerate(group[:last_kept]):
        if statement in gone:
            here, following = spans[index], spans[index + 1]
            edits.append((_between(source.path, here.line, here.column, following.line, following.column), ""))
    if last_kept < len(group) - 1:
        begin, end = spans[last_kept], spans[-1]
        assert None not in (begin.end_line, begin.end_column, end.end_line, end.end_column)
        edits.append((_between(source.path, begin.end_line, begin.end_column, end.end_line, end.end_column), ""))  # type: ignore[arg-type]
    return edits


def _between(path: str, line: int, column: int, end_line: int, end_column: int) -> Span:
    return Span(path=path, line=line, column=column, end_line=end_line, end_column=end_column)


# ------------------------------------------------------------------------------------------------------------- imports


ALIASES: Mapping[str, str] = {"torch.nn.functional": "F", "numpy": "np"}  # the name the field gives a module


def module_name(source: Source, line: int, module: str) -> tuple[str, list[Edit]]:
    """How to spell a module at a line, and the import to add where the file has no name for it."""
    name = source.name_for(module, source.function_at(line))
    if name is not None:
        return name, []
    taken = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)} | set(source.imports)
    alias = ALIASES.get(module)
    if alias is not None and alias not in taken:
        return alias, [add_import(source, f"import {module} as {alias}")]
    return module, [add_import(source, f"import {module}")]


def decorated(source: Source, line: int, decorator: str) -> list[Edit]:
    """Put a decorator (`torch.compile`) above the function that holds a line.

    Raises `CannotEdit` where it has others, which may not bear one more, or stands inside another function, which would
    make a new one at every call.
    """
    function = source.function_at(line)
    if function is None or isinstance(function, ast.AsyncFunctionDef):
        raise CannotEdit("no function holds the line")
    if function.decorator_list:
        raise CannotEdit(f"`{function.name}` has a decorator already")
    if not isinstance(source.parents[function], (ast.Module, ast.ClassDef)):
        raise CannotEdit(f"`{function.name}` is made inside another function")
    if len(sharing_lines(source, function)) > 1:
        raise CannotEdit(f"`{function.name}` shares its line with another statement")
    edits, text = named_modules(source, function.lineno, f"@{decorator}")
    head = source.lines[function.lineno - 1]
    indent, ending = head[: source.character(function.lineno, function.col_offset)], head[len(head.rstrip("\r\n")) :]
    return [*edits, insert(source.path, function.lineno, 0, f"{indent}{text}{ending}")]


def add_import(source: Source, statement: str) -> Edit:
    """Insert an import after the last top-level import, or after the docstring."""
    line = 1
    for node in source.tree.body:
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (docstring and line == 1):
            line = (node.end_lineno or node.lineno) + 1
        elif not docstring:
            break
    ending = "\r\n" if source.lines and source.lines[0].endswith("\r\n") else "\n"
    if line > len(source.lines) and source.text and not source.text.endswith(("\n", "\r")):
        statement = ending + statement
    return insert(source.path, line, 0, statement + ending)


# ------------------------------------------------------------------------------------------------------------ applying


def replacements(source: Source, edits: Sequence[Edit]) -> list[tuple[int, int, str]]:
    """The edits as (begin, end, text) by character, in order, without the ends that old and new text share."""
    found = set()
    for span, text in edits:
        begin, end = source.offset(span.line, span.column), _end(source, span)
        while begin < end and text and source.text[begin] == text[0]:
            begin, text = begin + 1, text[1:]
        while begin < end and text and source.text[end - 1] == text[-1]:
            end, text = end - 1, text[:-1]
        found.add((begin, end, text))
    return sorted(found)


class Conflict(Exception):
    """Two edits overlap."""


def apply(source: Source, edits: Sequence[Edit]) -> str:
    """The text with every edit applied; identical insertions count once. Raises `Conflict` where edits overlap."""
    unique = sorted({(source.offset(s.line, s.column), _end(source, s), text) for s, text in edits})
    result: list[str] = []
    position = 0
    for begin, end, text in unique:
        if begin < position:
            raise Conflict("the edits overlap")
        result += [source.text[position:begin], text]
        position = end
    return "".join([*result, source.text[position:]])


def _end(source: Source, span: Span) -> int:
    assert span.end_line is not None and span.end_column is not None
    if span.end_line > len(source.lines):
        return len(source.text)
    return source.offset(span.end_line, span.end_column)
