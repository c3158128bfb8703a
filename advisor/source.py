"""One parsed source file: text, syntax tree, positions in characters, imported names."""

from __future__ import annotations

import ast
import hashlib
import io
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from advisor.errors import SourceError
from advisor.model import Span


def split_lines(text: str) -> list[str]:
    r"""Lines with their ends, split where Python's tokenizer does: after \r\n, \r and \n.

    `str.splitlines` also splits after form feed, U+0085, U+2028 and others, which stand inside a line of source.
    """
    return list(io.StringIO(text, newline=""))


def parsed(text: str, path: str) -> ast.Module:
    """The syntax tree of a file's text, positions as in the text; raises what `ast.parse` raises.

    A byte order mark, which Python takes off a file and refuses in a string, is parsed as form feeds: they are no
    indentation, and as many bytes.
    """
    return ast.parse("\f\f\f" + text[1:] if text.startswith("\ufeff") else text, path)


def digest(text: str) -> str:
    """SHA-256 of a text in UTF-8, as hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Source:
    """A file of the user. `path` is relative to the project root."""

    path: str
    text: str
    _parents: dict[ast.AST, ast.AST] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def read(root: Path, path: str) -> Source:
        """Read and parse; raises `SourceError` for a file that is missing, not UTF-8 or not valid Python."""
        try:
            with open(root / path, encoding="utf-8", newline="") as stream:
                source = Source(path, stream.read())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SourceError(f"no such file: {path}") from error
        except IsADirectoryError as error:
            raise SourceError(f"{path} is a directory: name the training script itself") from error
        except PermissionError as error:
            raise SourceError(f"{path} cannot be read: permission denied") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
        source.tree  # noqa: B018 - parse now, so that a syntax error is reported here
        return source

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; raises `SourceError` with the offending line."""
        try:
            return parsed(self.text, self.path)
        except (RecursionError, MemoryError) as error:
            raise SourceError(f"{self.path} nests expressions too deeply for Python's parser") from error
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            shown = (getattr(error, "text", "") or "").rstrip()
            where = f"{self.path}:{line}" if line else self.path
            message = getattr(error, "msg", str(error))
            raise SourceError(f"{where}: {message}", detail=shown or None) from error

    @cached_property
    def lines(self) -> list[str]:
        """Lines with their ends."""
        return split_lines(self.text)

    @cached_property
    def sha256(self) -> str:
        """Digest of the text, as UTF-8."""
        return digest(self.text)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Parent of every node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    # ------------------------------------------------------------------------------------------------------ positions

    def character(self, line: int, byte: int) -> int:
        """Character column of a UTF-8 byte column."""
        return len(self.lines[line - 1].encode("utf-8")[:byte].decode("utf-8", errors="ignore"))

    def span(self, node: ast.expr | ast.stmt) -> Span:
        """Span of a node, columns in characters."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        function = self.function_at(node.lineno)
        return Span(
            path=self.path,
            line=node.lineno,
            column=self.character(node.lineno, node.col_offset),
            end_line=node.end_lineno,
            end_column=self.character(node.end_lineno, node.end_col_offset),
            function=function.name if function is not None else None,
        )

    def offset(self, line: int, column: int) -> int:
        """Position in `text` of a line (from 1) and character column."""
        return self._starts[line - 1] + column

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    def at(self, span: Span) -> str:
        """The text a span covers."""
        assert span.end_line is not None and span.end_column is not None
        return self.text[self.offset(span.line, span.column) : self.offset(span.end_line, span.end_column)]

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node, without enclosing parentheses."""
        return self.at(self.span(node))

    # ----------------------------------------------------------------------------------------------------- navigation

    def function_at(self, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The innermost function whose lines include `line`."""
        inside = [f for f in self._functions if f.lineno <= line <= (f.end_lineno or f.lineno)]
        return max(inside, key=lambda f: f.lineno, default=None)

    @cached_property
    def _functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [n for n in ast.walk(self.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """Every class of the file."""
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef)]

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that contains `node`."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements `statement` stands in."""
        parent = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    def expressions_at(self, line: int, column: int | None = None) -> Iterator[ast.expr]:
        """Expressions that start at a line (and character column, where it is known), outermost first."""
        for node, places in self._expressions.get(line, ()):
            if column is None or column in places:
                yield node

    @cached_property
    def _expressions(self) -> dict[int, list[tuple[ast.expr, set[int]]]]:
        """Expressions but constants by the lines they start at, each with its columns there, outermost first."""
        found: dict[int, list[tuple[ast.expr, set[int]]]] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.expr) or isinstance(node, ast.Constant):
                continue
            starts: dict[int, set[int]] = {}
            for line, column in self.starts(node):
                starts.setdefault(line, set()).add(column)
            for line, columns in starts.items():
                found.setdefault(line, []).append((node, columns))
        return found

    def statements_at(self, line: int) -> list[ast.stmt]:
        """Statements that start at a line."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and node.lineno == line]

    def starts(self, expression: ast.expr) -> set[tuple[int, int]]:
        """Where Python may record that an expression is evaluated: line and character column.

        Its own start, and the name of the attribute where an attribute or a call of one stands on a later line than
        the start of its object.
        """
        found = {(expression.lineno, self.character(expression.lineno, expression.col_offset))}
        named = expression.func if isinstance(expression, ast.Call) else expression
        if isinstance(named, ast.Attribute) and named.end_lineno is not None and named.end_lineno > named.lineno:
            assert named.end_col_offset is not None
            begin = named.end_col_offset - len(named.attr.encode("utf-8"))
            found.add((named.end_lineno, self.character(named.end_lineno, begin)))
        return found

    def reads_parameter(self, expression: ast.expr, statement: ast.stmt, depth: int = 8) -> bool:
        """Whether an expression's value, not only a shape, comes from a parameter of its function other than `self`.

        Local names are followed to every assignment in the function.
        """
        function = self.function_at(statement.lineno)
        if function is None or depth == 0:
            return depth == 0
        first = function.args.args[0].arg if function.args.args else None
        parameters = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)} - {first}
        for node in ast.walk(expression):
            if not isinstance(node, ast.Name) or self.reads_only_shape(node):
                continue
            if node.id in parameters:
                return True
            for other in _assignments(function, node.id):
                if other is not statement and self.reads_parameter(other.value, other, depth - 1):
                    return True
        return False

    def reads_only_shape(self, name: ast.Name) -> bool:
        """Whether a name is used for its shape or device alone: `x.shape[1]`, `x.size(-2)`, `len(x)`."""
        parent = self.parents.get(name)
        if isinstance(parent, ast.Attribute):
            return parent.attr in ("shape", "size", "device", "dtype", "ndim", "dim")
        return isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "len"

    # ---------------------------------------------------------------------------------------------------------- names

    @cached_property
    def imports(self) -> dict[str, str]:
        """Module-level aliases: {"F": "torch.nn.functional", "torch": "torch", "nn": "torch.nn"}."""
        return dict(pair for node in self.tree.body for pair in _aliases(node))

    def qualified(self, node: ast.expr) -> str | None:
        """Dotted name an expression refers to through the file's imports: `F.softmax` ->
        "torch.nn.functional.softmax"."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        head = self.imports.get(node.id) or self._later_imports.get(node.id)
        return ".".join([head or node.id, *reversed(parts)]) if head else None

    @cached_property
    def _later_imports(self) -> dict[str, str]:
        """Aliases of imports inside functions and other blocks, those that stand for one thing only."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(self.tree):
            for name, target in _aliases(node):
                found.setdefault(name, set()).add(target)
        return {name: next(iter(targets)) for name, targets in found.items() if len(targets) == 1}

    def name_for(self, module: str, function: ast.AST | None) -> str | None:
        """How this file can call `module` ("torch.nn.functional") inside `function`: "F", "nn.functional" ... or
        None."""
        local: set[str] = set()
        enclosing = function
        while enclosing is not None:
            local |= {n.id for n in ast.walk(enclosing) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            if isinstance(enclosing, (ast.FunctionDef, ast.AsyncFunctionDef)):
                local |= {a.arg for a in ast.walk(enclosing.args) if isinstance(a, ast.arg)}
            enclosing = self.parents.get(enclosing)
            if isinstance(enclosing, ast.Module):
                break
        best: str | None = None
        for alias, target in self.imports.items():
            if alias in local or not (module == target or module.startswith(target + ".")):
                continue
            spelled = alias + module[len(target) :]
            best = spelled if best is None or len(spelled) < len(best) else best
        return best


def last_name(node: ast.AST) -> str | None:
    """The last name of an expression that names something: `Linear` of `nn.Linear`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def with_imported(read: Callable[[str], Source], paths: Iterable[str]) -> tuple[Source, ...]:
    """The files at some paths below the project root and every file there that they import, each once.

    A module is looked for beside the file that imports it, in the folders above, and beside the files at `paths`.
    """
    first = sorted({PurePosixPath(path.replace("\\", "/")) for path in paths})
    folders = [path.parent for path in first]
    found: dict[str, Source] = {}
    tried: set[PurePosixPath] = set()
    pending = list(first)
    while pending:
        path = pending.pop()
        if path in tried:
            continue
        tried.add(path)
        try:
            source = read(str(path))
        except SourceError:  # no such file, or none that could have been imported
            continue
        if source.path in found:
            continue
        found[source.path] = source
        pending += [at for parts, level in _modules(source) for at in _files(path, parts, level, folders)]
    return tuple(found[path] for path in sorted(found))


def importing(read: Callable[[str], Source], beside: Iterable[str], paths: Collection[str]) -> tuple[Source, ...]:
    """Those of the files `beside` that import one of the files at `paths`; what cannot be parsed imports nothing."""
    wanted = {PurePosixPath(path.replace("\\", "/")) for path in paths}
    folders = [path.parent for path in wanted]
    found = []
    for path in sorted(set(beside) - set(paths)):
        try:
            source = read(path)
        except SourceError:
            continue
        place = PurePosixPath(path)
        if any(at in wanted for parts, level in _modules(source) for at in _files(place, parts, level, folders)):
            found.append(source)
    return tuple(found)


def _modules(source: Source) -> Iterator[tuple[tuple[str, ...], int]]:
    """The names of every module an import may load, with the number of leading dots."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((tuple(alias.name.split(".")), 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            yield base, node.level
            yield from (((*base, alias.name), node.level) for alias in node.names if alias.name != "*")


def _files(
    importer: PurePosixPath, parts: tuple[str, ...], level: int, folders: Iterable[PurePosixPath]
) -> Iterator[PurePosixPath]:
    """Where the file of a module, and those of the packages around it, may lie."""
    above = [importer.parent, *importer.parent.parents]
    for folder in above[level - 1 : level] if level else dict.fromkeys((*above, *folders)):
        for count in range(len(parts) + 1):
            place = folder.joinpath(*parts[:count])
            yield place / "__init__.py"
            if count:
                yield place.with_name(place.name + ".py")


def _aliases(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names an absolute import binds, each with what it stands for."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            yield name, alias.name if alias.asname else name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _assignments(function: ast.AST, name: str) -> list[ast.Assign]:
    """The assignments in a function that give a name a value."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == name for target in node.targets for t in ast.walk(target))
    ]
