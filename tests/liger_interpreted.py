"""Proves the forms that call Liger-Kernel against the regions they replace, its Triton kernels interpreted on the CPU.

Run by tests/test_forms.py with TRITON_INTERPRET=1. The interpreter hands numbers over as Python floats and knows no
device library, so both are put in here; what a norm computes is the package's own.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import layer_norm, rms_norm, swiglu
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parent))
from test_forms import INSTALLED, LAYER, RMS, RULES, WITHOUT, norm_text, seen

from advisor import testing

_given = interpreter._implicit_cvt


def _number(value):  # type: ignore[no-untyped-def]
    if isinstance(value, float):
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _given(value)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(x)


interpreter._implicit_cvt = _number
rms_norm.rsqrt = layer_norm.rsqrt = _rsqrt


def counted(function):  # type: ignore[no-untyped-def]
    calls.append(0)
    place, forward = len(calls) - 1, function.forward

    def count(*args):  # type: ignore[no-untyped-def]
        calls[place] += 1
        return forward(*args)

    function.forward = staticmethod(count)


calls: list[int] = []
for one in (rms_norm.LigerRMSNormFunction, layer_norm.LigerLayerNormFunction):
    counted(one)

for rule, body in (("unfused-rmsnorm", RMS), ("unfused-rmsnorm", WITHOUT), ("unfused-layernorm", LAYER)):
    for dtype in ("float32", "float16"):  # numpy has no bfloat16, whose products the interpreter gets wrong
        before = list(calls)
        with tempfile.TemporaryDirectory() as folder:
            findings, ctx, source = seen(Path(folder), rule, norm_text(body, dtype=dtype), packages=INSTALLED)
            form = next(r for r in RULES[rule].forms(findings[0], source) if r.form == "liger")
        found = form.finding.replacement
        assert found is not None and "{x}.is_cuda" in found.template
        there = replace(found, template=found.template.replace(".is_cuda", ".is_cpu"))
        testing.check_regions(replace(form, finding=replace(form.finding, replacement=there)), ctx.graphs, rule)
        assert sum(calls) > sum(before) + 5, "the kernel did not run"
        print(rule, dtype, [now - then for now, then in zip(calls, before, strict=True)])

# why its gate is no form: the backward pass writes the gradients over what it was given
gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
kept = gate.detach().clone()
swiglu.LigerSiLUMulFunction.apply(gate, up).sum().backward()
assert not torch.equal(gate.detach(), kept)
print("the same")
