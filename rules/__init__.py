"""The rules: one file each, named after its id; installed as `advisor.rules` and loaded by `advisor.registry` alone."""

from __future__ import annotations

if __name__ != "advisor.rules":
    raise ImportError(
        f"this folder is the package advisor.rules, not {__name__}: install the project (pip install -e .)"
    )
