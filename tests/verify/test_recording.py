"""The in-child half without a child: checksums, sketches, names, what dropout would have dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.errors import ArtifactError
from advisor.verify.arm import parameter_names
from advisor.verify.interventions import DropoutLog, HigherPrecision, first_rows
from advisor.verify.recorded import Recording
from advisor.verify.recording import BUCKETS, CHUNK, Recorder, checksum, value_checksum

RELATIVE = np.sqrt(2 / BUCKETS)  # standard deviation of a sketch's estimate of a squared norm, as a share


def written(recorder: Recorder, out: Path) -> Recording:
    recorder.facts |= {"parameters": [], "losses": []}
    recorder.write()
    return Recording(out)


def test_a_checksum_sees_bits_order_shape_and_dtype() -> None:
    value = torch.arange(12.0).view(3, 4)
    same = checksum(value)
    assert checksum(value.clone()) == same
    assert checksum(value.t().contiguous().t()) == same  # another layout of the same values
    changed = value.clone()
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(99.0))
    others = [value.flip(0), value.view(4, 3), value.double(), changed, -value, value.to(torch.bfloat16)]
    assert len({same, *(checksum(other) for other in others)}) == len(others) + 1
    assert value_checksum(value.double()) == value_checksum(value)


def test_a_sketch_estimates_the_norm_of_a_difference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    count = CHUNK + 1000
    one = torch.randn(count)
    two = one.clone()
    two[::1000] += 0.5
    vectors = []
    for number, value in enumerate((one, two)):
        out = tmp_path / str(number)
        out.mkdir()
        recorder = Recorder(out, whole=False)
        recorder.add("gradient", "w", value)
        vectors.append(written(recorder, out))
    true = float((two - one).norm())
    estimate = float(np.linalg.norm(vectors[0].vector("gradient", "w") - vectors[1].vector("gradient", "w")))
    assert estimate == pytest.approx(true, rel=5 * RELATIVE)
    assert vectors[0].norm("gradient", "w") == pytest.approx(float(one.double().norm()), rel=1e-6)
    sample = vectors[0].elements("gradient", "w")
    assert len(sample) == BUCKETS
    assert np.isin(sample.astype(np.float32), one.numpy()).all()
    assert float(np.mean(sample**2)) == pytest.approx(1.0, abs=0.05)


def test_an_update_is_recorded_with_its_product(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before, gradient = torch.randn(50, 7), torch.randn(50, 7)
    after = before - 0.1 * gradient.sign()
    recorder = Recorder(tmp_path, whole=True)
    weight = recorder.add_update("w", before, after, gradient)
    found = written(recorder, tmp_path)
    assert weight == pytest.approx(float((before * gradient).norm()), rel=1e-6)
    assert np.allclose(found.vector("update", "w"), (after - before).flatten().numpy(), atol=1e-7)
    assert not found.has("product", "w")
    recorder = Recorder(tmp_path, whole=False)
    recorder.add_update("w", before, after, gradient)
    found = written(recorder, tmp_path)
    assert found.norm("product", "w") == pytest.approx(float(((after - before) * gradient).norm()), rel=1e-6)


def test_a_missing_or_truncated_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no complete numerics recording"):
        Recording(tmp_path)
    written(Recorder(tmp_path, whole=True), tmp_path)
    (tmp_path / "numerics.json").write_text(json.dumps({})[:-1])
    with pytest.raises(ArtifactError, match="no complete numerics recording"):
        Recording(tmp_path)


def test_names_come_from_modules_then_from_groups() -> None:
    model, extra = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(1))
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", model)
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    names = parameter_names([wrapped], [optimizer])
    assert sorted(names.values()) == ["0.bias", "0.weight", "1.bias", "1.weight", "group0.4"]
    other = nn.Linear(2, 2)
    names = parameter_names([model[0], other], [])
    assert sorted(names.values()) == ["bias", "module1.bias", "module1.weight", "weight"]


@pytest.fixture
def dropout(monkeypatch: pytest.MonkeyPatch) -> Iterator[DropoutLog]:
    for name in (*DropoutLog.NAMES, "scaled_dot_product_attention"):
        monkeypatch.setattr(F, name, getattr(F, name))
    log = DropoutLog()
    log.install()
    log.active = True
    return log


def test_dropout_is_off_and_counted(dropout: DropoutLog) -> None:
    x = torch.ones(4, 8)
    layer = nn.Dropout(0.5)
    assert torch.equal(layer(x), x)
    assert torch.equal(layer.eval()(x), x)
    assert torch.equal(F.alpha_dropout(x, 0.3), x)  # its default is evaluation
    assert torch.equal(nn.AlphaDropout(0.3)(x), x)
    q = torch.randn(2, 3, 5, 4)
    fused = F.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4], dropout_p=0.25)
    assert torch.equal(fused, F.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4]))
    assert dropout.take() == [[0.25, 2 * 3 * 5 * 4, False, 1], [0.3, 32, False, 1], [0.5, 32, False, 1]]
    assert dropout.take() == []


def test_recomputed_dropout_counts_once(dropout: DropoutLog) -> None:
    layer = nn.Dropout(0.5)
    x = torch.ones(4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert dropout.take() == [[0.5, 4, False, 1]]


def test_attention_modules_are_counted_in_either_form(dropout: DropoutLog) -> None:
    x = torch.randn(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    attention(x, x, x, need_weights=False)
    attention(x, x, x, need_weights=True)
    assert dropout.take() == [[0.1, 2 * 2 * 5 * 5, False, 2]]


def test_higher_precision_keeps_identity_values_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HigherPrecision.DRAWS:
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", torch.set_float32_matmul_precision)
    model = nn.Linear(3, 3)
    weight, values = model.weight, model.weight.detach().clone()
    higher = HigherPrecision("float64")
    higher.install()
    try:
        (args, kwargs) = higher.prepare(model, (torch.ones(2, 3), torch.tensor([1])), {"flag": True})
        assert args[0].dtype is torch.float64
        assert args[1].dtype is torch.int64
        assert kwargs == {"flag": True}
        assert model.weight is weight
        assert weight.dtype is torch.float64
        assert torch.equal(weight.detach().float(), values)
        torch.manual_seed(0)
        drawn = torch.randn(5), torch.rand_like(torch.ones(3))
    finally:
        torch.set_default_dtype(torch.float32)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert torch.equal(drawn[0].float(), torch.randn(5))
    assert torch.equal(drawn[1].float(), torch.rand(3))
    assert drawn[0].dtype is torch.float64


def test_first_rows_cuts_what_shares_the_batch() -> None:
    batch = {"x": torch.ones(8, 3), "y": torch.ones(8), "mask": torch.ones(3, 3), "name": "train"}
    cut = first_rows(batch, 4)
    assert {key: value.shape[0] for key, value in cut.items() if key != "name"} == {"x": 2, "y": 2, "mask": 3}
    assert first_rows([torch.ones(2)], 8)[0].shape == (1,)
    assert first_rows(batch, 1) is batch
