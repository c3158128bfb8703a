"""The renderers: a Report in, HTML, terminal text or JSON out; installed as `advisor.reports`."""

from __future__ import annotations

if __name__ != "advisor.reports":
    raise ImportError(
        f"this folder is the package advisor.reports, not {__name__}: install the project (pip install -e .)"
    )
