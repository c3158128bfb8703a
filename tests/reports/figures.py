"""Figures that no machine has, put where those of a report stand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

Value = TypeVar("Value")


def with_figures(value: Value, figure: float) -> Value:
    """The value with every fraction in it, however deep, replaced by one figure."""
    return _walk(value, figure)  # type: ignore[no-any-return]


def _walk(value: Any, figure: float) -> Any:
    if isinstance(value, float):
        return figure
    if isinstance(value, tuple):
        return tuple(_walk(item, figure) for item in value)
    if isinstance(value, dict):
        return {key: _walk(item, figure) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _walk(getattr(value, field.name), figure) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value
