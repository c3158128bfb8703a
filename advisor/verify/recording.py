"""Inside the child: reduce tensors to what a comparison needs: checksums, whole values, or sketches and samples."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BUCKETS = 1 << 16  # of a sketch, and positions of a sample
CHUNK = 1 << 22  # elements handled at once, so that a sketch needs little device memory
FULL_LIMIT = 512 << 20  # bytes of an arm's tensors up to which they are written whole
WHOLE_OUTPUT = 1 << 23  # elements of an output or buffer up to which it is written whole
_MASK = 0xFFFFFFFF


def mixed(index: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash of non-negative int64 numbers, the same on every device (the finalizer of MurmurHash3)."""
    value = index & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 16)


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.contiguous().reshape(-1)


def _chunks(count: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        yield slice(start, stop), torch.arange(start, stop, device=device)


def checksum(tensor: torch.Tensor) -> str:
    """Dtype, shape and an order-sensitive hash of the bits of a tensor, computed where it lies."""
    flat = _flat(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(whole) if flat.dtype is not torch.bool else flat.to(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part, index in _chunks(bits.numel(), flat.device):
        total += ((bits[part].to(torch.int64) + 0x9E3779B9) * mixed(index)).sum()
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{dtype_name(tensor.dtype)}[{shape}]:{int(total) & 0xFFFFFFFFFFFFFFFF:016x}"


def value_checksum(tensor: torch.Tensor) -> str:
    """Checksum in float32, so that an arm in higher precision can be seen to have the same values."""
    return checksum(tensor.detach().float() if tensor.is_floating_point() else tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class Quantity:
    """A long vector reduced while it streams by: its values, or a count sketch, sampled elements and its norm.

    The sketch adds every element with a seeded sign to a seeded bucket. It is linear, so the squared norm of the
    difference of two sketches estimates the squared norm of the difference of the vectors without bias.
    """

    def __init__(self, name: str, count: int, device: torch.device, whole: bool) -> None:
        self._offset = _seed(name)
        self._values: list[torch.Tensor] | None = [] if whole else None
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        if not whole:
            self._sketch = torch.zeros(BUCKETS, dtype=torch.float64, device=device)
            drawn = torch.arange(min(count, BUCKETS), device=device)
            self._positions = drawn if count <= BUCKETS else (mixed(drawn + self._offset) * count) >> 32
            self._sample = torch.zeros(len(drawn), dtype=torch.float64, device=device)

    def add(self, values: torch.Tensor, index: torch.Tensor) -> None:
        """Take the elements at `index` (consecutive)."""
        self._sum += values.double().square().sum()
        if self._values is not None:
            self._values.append(values.cpu())
            return
        hashed = mixed(index + self._offset)
        signs = (((hashed >> 16) & 1) * 2 - 1).double()
        self._sketch.index_add_(0, hashed & (BUCKETS - 1), values.double() * signs)
        first, last = int(index[0]), int(index[-1])
        inside = (self._positions >= first) & (self._positions <= last)
        self._sample[inside] = values.double()[self._positions[inside] - first]

    def close(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays to store: "values", or "sketch" and "sample"."""
        if self._values is not None:
            whole = torch.cat(self._values) if self._values else torch.zeros(0)
            kept = whole if whole.dtype is torch.float64 else whole.float()
            return {"values": kept.numpy()}
        return {"sketch": self._sketch.cpu().numpy(), "sample": self._sample.cpu().numpy()}

    def norm(self) -> float:
        """L2 norm of the whole vector."""
        return float(self._sum.sqrt())


class Recorder:
    """Collects the quantities and facts of one arm and writes them as tensors.npz and numerics.json."""

    def __init__(self, out: Path, whole: bool) -> None:
        self._out = out
        self._whole = whole
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.entries: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {"method": "whole tensors" if whole else "count sketch and samples", "notes": []}

    def add(self, kind: str, name: str, value: torch.Tensor) -> None:
        """Record one floating-point tensor; `kind` is gradient, output or buffer."""
        flat = _flat(value)
        whole = self._whole and (kind == "gradient" or flat.numel() <= WHOLE_OUTPUT)
        quantity = Quantity(name, flat.numel(), flat.device, whole)
        with _FreeOrder():
            for part, index in _chunks(flat.numel(), flat.device):
                quantity.add(flat[part], index)
        self._store(kind, name, quantity, flat.numel())

    def add_update(self, name: str, before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor | None) -> float:
        """Record a parameter's step `after - before` and its product with the gradient; returns ||before * gradient||.

        The product is what can be compared: the sign-like first update of Adam flips where a gradient is rounding
        noise, and there the product is as small as the noise.
        """
        flat, start = _flat(after), _flat(before)
        slope = None if gradient is None else _flat(gradient)
        update = Quantity(name, flat.numel(), flat.device, self._whole)
        product = Quantity(name, flat.numel(), flat.device, False) if slope is not None and not self._whole else None
        weight = torch.zeros((), dtype=torch.float64, device=flat.device)
        with _FreeOrder():
            for part, index in _chunks(flat.numel(), flat.device):
                old = start[part].to(flat.device).double()
                moved = flat[part].double() - old
                update.add(moved, index)
                if slope is not None:
                    local = slope[part].to(flat.device).double()
                    weight += (old * local).square().sum()
                    if product is not None:
                        product.add(moved * local, index)
        self._store("update", name, update, flat.numel())
        if product is not None:
            self._store("product", name, product, flat.numel())
        return float(weight.sqrt())

    def _store(self, kind: str, name: str, quantity: Quantity, count: int) -> None:
        number = len(self.entries)
        self.entries.append({"kind": kind, "name": name, "count": count, "norm": quantity.norm()})
        for part, array in quantity.close().items():
            self._arrays[f"{number}.{part}"] = array

    def write(self) -> None:
        """Write both files; the facts last, so that their presence says the recording is complete."""
        np.savez(self._out / "tensors.npz", **self._arrays)  # type: ignore[arg-type]
        document = self.facts | {"entries": self.entries}
        (self._out / "numerics.json").write_text(json.dumps(document), encoding="utf-8")


class _FreeOrder:
    """Lets the recording's own float64 additions run in any order: the deterministic way is very slow."""

    def __enter__(self) -> None:
        self._mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("default")

    def __exit__(self, *_error: object) -> None:
        torch.set_deterministic_debug_mode(self._mode)
