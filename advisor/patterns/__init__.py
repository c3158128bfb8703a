"""Find regions of a captured graph by what they compute: single-input functions, normalisations, attention."""

from __future__ import annotations

from advisor.patterns.attention import attention_regions, default_scale
from advisor.patterns.norms import layer_norm_regions
from advisor.patterns.regions import NearMiss, Region
from advisor.patterns.unary import unary_regions
from advisor.semantics import gelu_tanh

__all__ = [
    "NearMiss",
    "Region",
    "attention_regions",
    "default_scale",
    "gelu_tanh",
    "layer_norm_regions",
    "unary_regions",
]
