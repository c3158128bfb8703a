"""Find where a PyTorch training script loses time, rewrite it there, and prove the rewrite."""

from __future__ import annotations

__version__ = "0.1.0"
