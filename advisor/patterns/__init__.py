"""Find regions of a captured graph by what they compute: elementwise functions, norms, gates, rotations, attention."""

from __future__ import annotations

from advisor.patterns.attention import attention_regions, default_scale
from advisor.patterns.gates import gate_regions
from advisor.patterns.language import Alternative, Constant, Input, LookAlike, Pattern, find
from advisor.patterns.masks import may_be_empty
from advisor.patterns.norms import layer_norm_regions, rms_norm_regions, shape_text
from advisor.patterns.reading import Attention, Mask
from advisor.patterns.regions import NearMiss, Region, same_code
from advisor.patterns.rope import rope_regions, table_source
from advisor.patterns.unary import gelu_regions, silu_regions

__all__ = [
    "Alternative",
    "Attention",
    "Constant",
    "Input",
    "LookAlike",
    "Mask",
    "NearMiss",
    "Pattern",
    "Region",
    "attention_regions",
    "default_scale",
    "find",
    "gate_regions",
    "gelu_regions",
    "layer_norm_regions",
    "may_be_empty",
    "rms_norm_regions",
    "rope_regions",
    "same_code",
    "shape_text",
    "silu_regions",
    "table_source",
]
