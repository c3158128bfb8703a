"""Scripts that cannot be judged, and right rewrites of scripts in other precisions."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import MakeBench
from verify_bench import FUSED, NOTHING, QUICK, SCORES, SCRIPT, edited, patch_of, rewrite

from advisor.errors import NoStepsError, ScriptError, ScriptTimeout
from advisor.model import Safety
from advisor.verify.lab import COMPARED_WITH_ITSELF
from advisor.verify.numerics import NOT_REPRODUCIBLE, inconclusive

SEED = "torch.manual_seed(3)\n"
STEP = "        optimizer.step()\n"


def test_another_seed_each_run_is_inconclusive(make_bench: MakeBench) -> None:
    bench = make_bench(edited((SEED, "import os\ntorch.manual_seed(os.getpid())\n")))
    found = bench.prove((SCORES, FUSED))
    assert inconclusive(found)
    assert found.reasons[0].startswith(f"{NOT_REPRODUCIBLE}: two runs of the original have different parameters")


def test_another_order_each_run_is_inconclusive(make_bench: MakeBench) -> None:
    text = edited(
        ("data = torch", "import os\ndata = torch"), ("step = 0\n", "step = 0\ntorch.manual_seed(os.getpid())\n")
    )
    found = make_bench(text).prove((SCORES, FUSED))
    assert inconclusive(found)
    assert found.reasons == (f"{NOT_REPRODUCIBLE}: two runs of the original have different batches (batch 0)",)


def test_a_script_that_ends_early_is_compared_as_far_as_it_goes(make_bench: MakeBench) -> None:
    found = make_bench(SCRIPT, "--steps", "3").prove((SCORES, FUSED))
    assert found.ok, found.reasons
    assert len(found.losses) == 3


def test_a_script_without_steps(make_bench: MakeBench) -> None:
    with pytest.raises(NoStepsError, match="without an optimizer step"):
        make_bench(SCRIPT, "--steps", "0").lab.prove(NOTHING)


def test_a_script_that_hangs_is_stopped(make_bench: MakeBench) -> None:
    text = edited((STEP, STEP + "        import time\n        time.sleep(600 if step == 2 else 0)\n"))
    settings = dataclasses.replace(QUICK, step_timeout_s=12.0)
    with pytest.raises(ScriptTimeout, match="did not reach its next step within 12 s"):
        make_bench(text, settings=settings).lab.prove(NOTHING)


def test_a_failing_script_shows_its_own_traceback(make_bench: MakeBench) -> None:
    bench = make_bench(edited((STEP, STEP + "        assert step < 2, 'bad batch'\n")))
    with pytest.raises(ScriptError, match="the script raised AssertionError: bad batch") as caught:
        bench.lab.prove(NOTHING)
    detail = caught.value.detail or ""
    assert "assert step < 2" in detail
    assert str(bench.script) in detail
    assert "advisor/capture" not in detail
    assert "advisor/verify" not in detail


def test_standard_input_is_empty(make_bench: MakeBench) -> None:
    bench = make_bench(edited((SEED, SEED + "input('continue? ')\n")))
    with pytest.raises(ScriptError, match="reads standard input, which it does not have here"):
        bench.lab.prove(NOTHING)


def test_a_batch_that_does_not_fit_is_cut_in_every_arm(make_bench: MakeBench) -> None:
    line = "        h = self.tokens(x) + self.places\n"
    full = "        if x.size(0) > 4:\n            raise torch.OutOfMemoryError('out of memory')\n"
    found = make_bench(edited((line, full + line))).prove((SCORES, FUSED))
    assert found.ok, found.reasons
    assert any("first 1/4 of every batch" in note for note in found.notes)


@pytest.mark.parametrize(
    "line",
    ["h = h + self.norm(h.float())", "h = h + torch.rand(h.shape, dtype=h.dtype)"],
    ids=["insists on float32", "draws in the model's dtype"],
)
def test_where_double_precision_does_not_work_the_reference_is_single(make_bench: MakeBench, line: str) -> None:
    bench = make_bench(edited(("        h = h + self.mlp(h)\n", f"        h = h + self.mlp(h)\n        {line}\n")))
    found = bench.prove((SCORES, FUSED))
    assert found.ok, found.reasons
    assert found.reference == "float32"
    assert any("no more precise" in note for note in found.notes)


def test_right_and_wrong_under_autocast(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, "--bf16")
    right = bench.prove((SCORES, FUSED))
    assert right.ok, right.reasons
    assert right.reference == "float32"
    wrong = bench.prove((SCORES, FUSED.replace("is_causal", "scale=c**-0.5, is_causal")))
    assert any(reason.startswith("gradient of") for reason in wrong.reasons), wrong.reasons


def test_the_same_bits_need_no_reference(make_bench: MakeBench) -> None:
    """A model that makes other gradients of roundings, as deep ones in bfloat16 do, has no reference."""
    line = "        h = h + self.mlp(h)\n"
    bench = make_bench(edited((line, line + "        h = torch.sin(3e3 * h)\n")), "--bf16")
    assert inconclusive(bench.prove((SCORES, FUSED)))
    same = bench.prove(("shuffle=True", "shuffle=True, num_workers=1"), safety=Safety.EXACT)
    assert same.ok, same.reasons


def test_without_dropout(make_bench: MakeBench) -> None:
    """A rewrite must declare lower precision; the key bias of attention, zero in exact maths, is noise in every arm."""
    bench = make_bench(SCRIPT, "--dropout", "0")
    found = bench.prove((SCORES, FUSED))
    assert found.ok, found.reasons
    autocast = ("enabled=args.bf16", "enabled=True")
    found = bench.prove(autocast)
    assert found.reasons == ("computes in bfloat16 where the original computes in float32",)
    declared = bench.prove(autocast, safety=Safety.PRECISION)
    assert declared.ok, declared.reasons


def test_sketches_find_what_whole_tensors_find(make_bench: MakeBench) -> None:
    bench = make_bench(SCRIPT, settings=dataclasses.replace(QUICK, full_limit=0))
    right = bench.prove((SCORES, FUSED))
    assert right.ok, right.reasons
    assert any("count sketch" in note for note in right.notes)
    wrong = bench.prove(("lr=1e-3", "lr=1.1e-3"))
    assert any(reason.startswith("update of") for reason in wrong.reasons), wrong.reasons
    wrong = bench.prove((SCORES, FUSED.replace("is_causal", "scale=c**-0.5, is_causal")))
    assert any(reason.startswith("gradient of") for reason in wrong.reasons), wrong.reasons


TINY = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(12):
    x, y = torch.randn(16, 32), torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        loss = F.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TANH = ("h = torch.tanh(self.first(x))", "h = self.first(x).tanh()")
SCALED = ("h = torch.tanh(self.first(x))", "h = torch.tanh(self.first(x)) * 1.05")
CAST = ("self.last(h)", "self.last(h.to(torch.bfloat16))")


def test_a_script_that_runs_only_as_found_is_compared_with_itself(make_bench: MakeBench) -> None:
    bench = make_bench(edited(("enabled=False", "enabled=True"), CAST, text=TINY))
    right = bench.prove(TANH)
    assert right.ok, right.reasons
    assert right.reference == "bfloat16"
    assert COMPARED_WITH_ITSELF in right.notes
    assert any("no more precise" in note for note in right.notes)
    facts = [json.loads(path.read_text()) for path in sorted(bench.script.parent.glob("work/*/numerics.json"))]
    assert [(f["arm"], f["reference"]) for f in facts] == [("base", None), ("ref", "bfloat16"), ("cand", None)]
    assert facts[0]["losses"] == facts[1]["losses"]
    wrong = bench.prove(SCALED)
    assert not inconclusive(wrong)
    assert wrong.reasons, wrong.worst


def test_attention_that_runs_only_as_found(make_bench: MakeBench) -> None:
    """With no second precision, rounding to bfloat16 alone is no difference and a wrong scale still is."""
    head = "self.batch_norm(h.transpose(1, 2)).transpose(1, 2)"
    bench = make_bench(edited((head, f"{head}.to(torch.bfloat16)")), "--bf16")
    right = bench.prove((SCORES, FUSED))
    assert right.ok, right.reasons
    assert COMPARED_WITH_ITSELF in right.notes
    wrong = bench.prove((SCORES, FUSED.replace("is_causal", "scale=c**-0.5, is_causal")))
    assert any(reason.startswith("gradient of") for reason in wrong.reasons), wrong.reasons


@pytest.mark.parametrize(
    ("draw", "reference"),
    [
        ("torch.randn(16, 32), torch.randn(16, 8)", "float64"),
        ("torch.empty(16, 32).normal_(), torch.randn(16, 8)", "float32"),
    ],
    ids=["the same numbers in double", "other numbers in double"],
)
def test_batches_drawn_in_the_loop(make_bench: MakeBench, draw: str, reference: str) -> None:
    bench = make_bench(edited(("torch.randn(16, 32), torch.randn(16, 8)", draw), text=TINY))
    for replacement in (("import torch\n", "import torch\n"), TANH):
        found = bench.prove(replacement)
        assert found.ok, found.reasons
        assert found.reference == reference
    assert not bench.prove(SCALED).ok


def test_a_fused_kernel_that_did_not_run_says_nothing_about_the_numbers(make_bench: MakeBench) -> None:
    bench = make_bench(TINY)
    patch = dataclasses.replace(patch_of(edited(TANH, text=TINY)), rewrites=(rewrite("fuse", runs=("aten::fused",)),))
    found = bench.lab.prove(patch)
    assert (found.ok, found.reasons) == (True, ())
    assert found.fallbacks == ("fuse has no effect: none of aten::fused ran",)


def test_in_compiled_code_operators_have_no_names(make_bench: MakeBench) -> None:
    bench = make_bench(TINY)
    text = edited(("model = Model()\n", "model = Model()\nmodel.compile()\n"), text=TINY)
    patch = dataclasses.replace(patch_of(text), rewrites=(rewrite("fuse", runs=("aten::tanh",)),))
    found = bench.lab.prove(patch)
    assert (found.ok, found.reasons, found.fallbacks) == (True, (), ())
