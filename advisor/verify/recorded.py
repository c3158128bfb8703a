"""Read what the arms of the proof have written: facts, whole tensors, sketches and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from advisor.errors import ArtifactError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Recording:
    """What one arm wrote: facts and, per kind and name, a whole tensor or its sketch and sample."""

    def __init__(self, folder: Path) -> None:
        try:
            self.facts: dict[str, Any] = json.loads((folder / "numerics.json").read_text(encoding="utf-8"))
            self._arrays = np.load(folder / "tensors.npz")
        except (OSError, ValueError) as error:
            raise ArtifactError(f"no complete numerics recording in {folder.name}: run the proof again") from error
        self._rows = {(e["kind"], e["name"]): (number, e) for number, e in enumerate(self.facts["entries"])}
        self.parameters: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in self.facts["parameters"]}
        self.losses: list[float] = self.facts["losses"]

    @property
    def whole(self) -> bool:
        """Whether tensors were written whole."""
        return bool(self.facts["method"] == "whole tensors")

    def same_data(self, other: Recording) -> bool:
        """Whether both had the same batches and model inputs, as far as both have them."""
        pairs = [p for what in ("batches", "inputs") for p in zip(self.facts[what], other.facts[what], strict=False)]
        return all(mine == theirs for mine, theirs in pairs)

    def names(self, kind: str) -> list[str]:
        """Names recorded under a kind, in order."""
        return [name for found, name in self._rows if found == kind]

    def has(self, kind: str, name: str) -> bool:
        """Whether this was recorded."""
        return (kind, name) in self._rows

    def count(self, kind: str, name: str) -> int:
        """Number of elements."""
        return int(self._rows[kind, name][1]["count"])

    def norm(self, kind: str, name: str) -> float:
        """L2 norm of the whole tensor."""
        return float(self._rows[kind, name][1]["norm"])

    def vector(self, kind: str, name: str) -> Array:
        """The values, or the sketch in their place, in float64."""
        return self._array(kind, name, "sketch")

    def elements(self, kind: str, name: str) -> Array:
        """The values, or the sampled ones, in float64."""
        return self._array(kind, name, "sample")

    def _array(self, kind: str, name: str, reduced: str) -> Array:
        number = self._rows[kind, name][0]
        whole = f"{number}.values"
        found = self._arrays[whole if whole in self._arrays else f"{number}.{reduced}"]
        return np.asarray(found, dtype=np.float64)
