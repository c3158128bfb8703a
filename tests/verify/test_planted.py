"""Rewrites that are wrong in ways a hurried eye accepts, on a real script: each must fail for the right reason."""

from __future__ import annotations

import pytest
from conftest import MakeBench
from verify_bench import FUSED, SCORES, Bench, edited

from advisor.model import Safety
from advisor.verify.lab import NOT_REPEATED

LOADER = "batch_size=16, shuffle=True"
LOSS = "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))"
MLP = "h = h + self.mlp(h)"
OPTIMIZER = "lr=1e-3, weight_decay=0.1)"

NUMBERS = [
    ("drops the scale", SCORES, SCORES.replace(" / math.sqrt(q.size(-1))", ""), "gradient of"),
    ("scales by the wrong size", SCORES, FUSED.replace("is_causal", "scale=c**-0.5, is_causal"), "gradient of"),
    ("forgets the mask", SCORES, FUSED.replace("is_causal=True", "is_causal=False"), "gradient of"),
    ("computes in bfloat16", SCORES, FUSED.replace("(q, k, v,", "(q.bfloat16(), k.bfloat16(), v.bfloat16(),")
     + "        y = y.float()\n", "gradient of"),
    ("halves a gradient", MLP, "branch = self.mlp(h); h = h + 0.5 * branch + 0.5 * branch.detach()", "gradient of"),
    ("uses half of the batch", LOSS, LOSS.replace("(logits", "(logits[:8]").replace("(-1))", "(-1))", 1)
     .replace("y.view", "y[:8].view"), "gradient of"),
    ("prints a loss it does not train on", LOSS, LOSS + "; print('loss', loss.item()); loss = loss * 0.9", "loss of"),
    ("doubles the learning rate", OPTIMIZER, OPTIMIZER.replace("1e-3", "2e-3"), "update of"),
    ("forgets weight decay", OPTIMIZER, OPTIMIZER.replace("0.1", "0.0"), "update of"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "reason"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS])
def test_wrong_numbers_are_found(bench: Bench, old: str, new: str, reason: str) -> None:
    found = bench.prove((old, new))
    assert not found.ok
    assert any(text.startswith(reason) and "more than the allowed" in text for text in found.reasons), found.reasons


def test_nan_is_named(bench: Bench) -> None:
    found = bench.prove((SCORES, SCORES + "        y = y / (y * 0)\n"))
    assert found.reasons == (f"loss 0 is nan where the original has {found.base_losses[0]:.6g}",)


def test_a_detached_parameter_is_named(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED.replace("(q, k, v,", "(q, k.detach(), v,")))
    assert found.reasons == ("parameters attention.key.weight, attention.key.bias have no gradient",)


def test_a_branch_without_backward_is_named(bench: Bench) -> None:
    found = bench.prove((MLP, "h = h + self.mlp(h).detach()"))
    assert found.reasons == ("parameters mlp.0.weight, mlp.0.bias, mlp.2.weight and 1 more have no gradient",)


def test_dropout_missing_in_training(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED.replace("self.dropout.p if self.training else 0.0", "0.0")))
    assert found.reasons == ("dropout p=0.1 over 16,384 elements in training is missing",)


def test_dropout_with_another_probability(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED.replace("self.dropout.p if", "0.2 if")))
    assert "dropout p=0.2 over 16,384 elements in training is new" in found.reasons


def test_dropout_in_evaluation(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED.replace(" if self.training else 0.0", "")))
    assert found.reasons == ("dropout p=0.1 over 16,384 elements in evaluation is new",)


def test_a_smaller_batch_is_other_data(bench: Bench) -> None:
    found = bench.prove((LOADER, LOADER.replace("16", "8")))
    assert found.reasons == ("the training data differ: batch 0",)


def test_cached_results_are_caught_after_the_first_step(bench: Bench) -> None:
    cached = SCORES + (
        "        if not hasattr(self, 'cache'):\n            self.cache = y.detach()\n"
        "        elif self.training:\n            y = self.cache + (y - y.detach())\n"
    )
    found = bench.prove((SCORES, cached))
    assert not found.ok
    assert not any("first step" in reason or "gradient" in reason for reason in found.reasons)


def test_batch_statistics_taken_twice(bench: Bench) -> None:
    old = "return self.head(self.batch_norm(h.transpose(1, 2)).transpose(1, 2))"
    found = bench.prove((old, "self.batch_norm(h.transpose(1, 2).detach()) if self.training else None; " + old))
    assert any(reason.startswith("buffer, first step: batch_norm.running_mean is off") for reason in found.reasons)


def test_changed_parameters_are_named(bench: Bench) -> None:
    found = bench.prove(("nn.Linear(width, vocab)", "nn.Linear(width, vocab, bias=False)"))
    assert found.reasons[0] == "parameter missing: head.bias"


def test_an_exception_is_the_rewritten_scripts(bench: Bench) -> None:
    found = bench.prove((SCORES, SCORES + "        raise ValueError('no kernel')\n"))
    assert found.reasons == ("the rewritten script fails: the script raised ValueError: no kernel",)


def test_an_early_end_is_fewer_losses(bench: Bench) -> None:
    found = bench.prove(('parser.add_argument("--steps", type=int, default=40)', "parser.set_defaults(steps=3)"))
    assert found.reasons == ("fewer losses than the original: 3 instead of 6",)


def test_right_rewrites_pass(bench: Bench) -> None:
    found = bench.prove((SCORES, FUSED))
    assert found.ok, found.reasons
    assert found.reference == "float64"
    assert found.compared > 40
    found = bench.prove((OPTIMIZER, "lr=1e-3, weight_decay=0.1, fused=True)"))
    assert found.ok, found.reasons


def test_exact_wants_the_same_bits(bench: Bench) -> None:
    same = bench.prove(("print(", "print (  "), safety=Safety.EXACT)
    assert same.ok, same.reasons
    other = bench.prove((SCORES, FUSED), safety=Safety.EXACT)
    assert len(other.reasons) == 1
    assert "bit-identical" in other.reasons[0]


def test_a_noise_beyond_rounding_excuses_nothing(make_bench: MakeBench) -> None:
    bench = make_bench(edited((LOSS, LOSS + "; import os; loss = loss * (1.0 + 0.3 * os.urandom(1)[0] / 255)")))
    found = bench.prove(("loss.backward()", "(loss * 0.95).backward()"), safety=Safety.EXACT)
    assert not found.ok and not any(note.startswith(NOT_REPEATED) for note in found.notes)


def test_bits_that_the_script_itself_does_not_repeat_are_not_demanded(make_bench: MakeBench) -> None:
    """Stands in for the atomic additions of a GPU, which torch's deterministic mode only warns of."""
    drifts = LOSS + "; import os; loss = loss * (1.0 + 2.0**-22 * (os.urandom(1)[0] % 8))"
    bench = make_bench(edited((LOSS, drifts)))
    same = bench.prove(("print(", "print (  "), safety=Safety.EXACT)
    assert same.ok, same.reasons
    assert any(note.startswith(NOT_REPEATED) for note in same.notes)
    other = bench.prove((SCORES, SCORES.replace(" / math.sqrt(q.size(-1))", "")), safety=Safety.EXACT)
    assert any("more than the allowed" in reason for reason in other.reasons)
