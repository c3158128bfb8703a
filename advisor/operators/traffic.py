"""The least memory traffic a recorded operator call implies: what it must read once and write once.

Every figure is a lower bound for the call's own kernels, as if everything between reading and writing stayed on the
chip. Look-ups count their indices and their result but not the table, masks hide what they hide, and what a child
operator moves is the child's. Two things the record does not show are taken as usual, and where they are not the
figure is too high: without recorded strides an input is stored in full, and two inputs are two tensors (x + x reads
one), but for the factors of `addcmul`, which Adam calls with one gradient twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.model import Operators
from advisor.operators import pointwise, reductions
from advisor.operators.calls import BYTES, UNREADABLE, Call, Entries, Entry, NotRecorded, Texts
from advisor.operators.families import POINTWISE, VIEWS, family, plain_name
from advisor.operators.named import CONSTANTS, FORMULAS

__all__ = ["BYTES", "VIEWS", "families", "family", "least_bytes", "reads_constants", "traffic"]

_MOVE_NOTHING = frozenset({"view", "autograd", "communication"})


def least_bytes(
    name: str,
    kind: str,
    shapes: Entries,
    dtypes: Texts,
    concrete: Texts = (),
    strides: Entries | None = None,
) -> float | None:
    """Bytes a call of family `kind` moves at least; None where its inputs do not tell.

    `shapes` has one entry per input, a list of tensors one shape per tensor; `dtypes` are names such as "bfloat16", for
    a list the one of its tensors, "" for what is no tensor; `concrete` holds the constants as Kineto writes them and
    `strides`, in elements, has the form of `shapes`.
    """
    if not any(dtype in BYTES for dtype in dtypes):
        return None
    if kind in _MOVE_NOTHING or name == "aten::dropout":  # which moves data through others
        return 0.0
    try:
        if name.startswith("triton_"):
            return float(pointwise.compiled_traffic(name, shapes, dtypes, concrete, strides))
        if not name.startswith("aten::"):
            return _named(name, shapes, dtypes, concrete, strides)
        plain = plain_name(name)
        if plain in reductions.NAMES and not (plain in ("max", "min") and len(dtypes) > 1 and dtypes[1]):
            return float(reductions.traffic(plain, shapes, dtypes, concrete, strides))
        if plain in POINTWISE or plain in ("max", "min"):
            return float(pointwise.traffic(name, shapes, dtypes, strides))
        return _named(name, shapes, dtypes, concrete, strides)
    except UNREADABLE:
        return None


def _named(name: str, shapes: Entries, dtypes: Texts, concrete: Texts, strides: Entries | None) -> float:
    """Operators whose formula asks for arguments by name."""
    known = _listed(name)
    if known is None:
        raise NotRecorded(name)
    return float(FORMULAS[known](Call(known, shapes, dtypes, concrete, strides)))


def _listed(name: str) -> str | None:
    """The name under which a formula is listed: an operator and its in-place variant differ in a copy by a child."""
    return next((known for known in (name, name.removesuffix("_"), f"{name}_") if known in FORMULAS), None)


def reads_constants(name: str) -> bool:
    """Whether the arithmetic or the traffic of an operator depends on its constant arguments.

    Calls of other operators that differ in nothing else are the same call to every function here.
    """
    return name.startswith("triton_") or plain_name(name) in reductions.NAMES or _listed(name) in CONSTANTS


def families(operators: Operators) -> tuple[str, ...]:
    """The family of every row."""
    known = {name: family(name) for name in set(operators.name)}
    return tuple(known[name] for name in operators.name)


def traffic(
    operators: Operators, kinds: tuple[str, ...], concrete: Mapping[int, Texts] | None = None
) -> tuple[float | None, ...]:
    """`least_bytes` of every row; `concrete` holds the constant arguments of rows that have any."""
    known: dict[tuple[str, Sequence[Entry], Texts, Texts], float | None] = {}
    found = []
    for row, name in enumerate(operators.name):
        texts = tuple(concrete.get(row, ())) if concrete is not None else ()
        key = (name, operators.shapes[row], operators.dtypes[row], texts)
        if key not in known:
            known[key] = least_bytes(name, kinds[row], *key[1:])
        found.append(known[key])
    return tuple(found)
