"""Which types of model of transformers a script can make: the one that ran is not all that its lines are for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from advisor.patterns.callsites import around, keyword, names
from advisor.source import Source

MAKERS = frozenset("from_pretrained from_config _from_config for_model".split())
OPEN = re.compile(r"Auto(Model\w*|Config)|\w*(EncoderDecoder|DualEncoder)\w*|pipeline")  # take a model of any type
NAMED = re.compile(r"([A-Z]\w*?)(Encoder)?(LMHeadModel|DoubleHeadsModel|PreTrainedModel|Model|For[A-Z]\w*|Config)")
NO_TYPE = re.compile(r"(Auto|PreTrained|Pretrained|Generation|DataCollator|BitsAndBytes)\w*")
GIVEN = ("config", "model", "pretrained_model_name_or_path")
Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEPTH = 6  # assignments followed


def type_of_call(source: Source, call: ast.Call) -> str | None:
    """The one type of model that a call of transformers makes or describes: "Llama", or the name of a checkpoint."""
    made = _made(source, call.func)
    if made is None:
        return None
    return _of_argument(source, call, DEPTH) if OPEN.fullmatch(made) else _named(made)


def types_made(sources: Sequence[Source]) -> set[str | None]:
    """The types that any line of a script names; None among them where a type is chosen while it runs."""
    return {found for source in sources for found in _types(source)}


def _types(source: Source) -> Iterator[str | None]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (made := _made(source, node.func)) is not None and OPEN.fullmatch(made):
            yield type_of_call(source, node)
        elif isinstance(node, (ast.Name, ast.Attribute)) and (source.qualified(node) or "").startswith("transformers."):
            last = str(source.qualified(node)).rsplit(".", 1)[-1]
            if OPEN.fullmatch(last) and not isinstance(source.parents.get(node), (ast.Attribute, ast.Call)):
                yield None  # the class is a value here: what it is called with is not known
            elif not OPEN.fullmatch(last) and (found := _named(last)) is not None:
                yield found


def _named(name: str) -> str | None:
    """ "Llama" of LlamaConfig and LlamaForCausalLM; None for other classes."""
    found = None if NO_TYPE.fullmatch(name) else NAMED.fullmatch(name)
    return found[1] if found else None


def _made(source: Source, function: ast.expr) -> str | None:
    """The class, or pipeline, that a call is of or a maker of."""
    dotted = source.qualified(function) or ast.unparse(function)
    parts = dotted.split(".")
    made = parts[-2] if parts[-1] in MAKERS and len(parts) > 1 else parts[-1]
    return made if dotted.startswith("transformers.") or re.fullmatch(r"Auto(Model\w*|Config)", made) else None


def _of_argument(source: Source, call: ast.Call, depth: int) -> str | None:
    """The type that the argument of an open class says."""
    given = next((value for name in GIVEN if (value := keyword(call, name)) is not None), None)
    if given is None and call.args and isinstance(call.func, ast.Attribute) and call.func.attr in MAKERS:
        given = call.args[0]
    return None if given is None else _of(source, given, depth)


def _of(source: Source, value: ast.expr, depth: int) -> str | None:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.Call):
        made = _made(source, value.func)
        if made is None:
            return None
        return _of_argument(source, value, depth - 1) if OPEN.fullmatch(made) else _named(made)
    if not isinstance(value, ast.Name) or depth <= 0:
        return None
    found = {_of(source, v, depth - 1) if v is not None else None for v in _assigned(source, value)}
    return found.pop() if len(found) == 1 else None


def _assigned(source: Source, name: ast.Name) -> list[ast.expr | None]:
    """What a name is given in its function, else in the module; None for what is no plain assignment."""
    functions = [f for f in around(source, name) if isinstance(f, Function)]
    if any(name.id == a.arg for f in functions for a in ast.walk(f.args) if isinstance(a, ast.arg)):
        return [None]
    for place in (*functions, source.tree):
        stored = list(names(place, name.id, ast.Store))
        if stored:
            return [_value(source, each) for each in stored]
    return [None]


def _value(source: Source, stored: ast.Name) -> ast.expr | None:
    parent = source.parents.get(stored)
    plain = isinstance(parent, ast.Assign) and stored in parent.targets
    return parent.value if isinstance(parent, ast.Assign) and plain else None
