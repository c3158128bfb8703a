"""TF32 for float32 products: where the setting goes, and when it is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded_loops import LARGE, Recorded, on_a_gpu, reading, record

from advisor.model import Hardware
from advisor.rule import ON_A_GPU

pytest.importorskip("torch")
RULE = "tf32-off"
CALL = 'torch.set_float32_matmul_precision("high")'
SCRIPT = '''\
"""A script."""
import torch
from torch import nn


def main():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    opt = torch.optim.AdamW(model.parameters())
    for step in range(30):
        loss = model(torch.randn(8, 16)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(SCRIPT, tmp_path_factory.mktemp("tf32"))


def test_behind_the_last_import(recorded: Recorded) -> None:
    head = f'"""A script."""\nimport torch\nfrom torch import nn\n\n{CALL}\n\n\ndef main():\n'
    assert on_a_gpu(recorded).patched(RULE).startswith(head)


def test_behind_a_seed_at_top_level(recorded: Recorded) -> None:
    text = SCRIPT.replace("\n\n\ndef main", "\n\ntorch.manual_seed(1)  # fixed\n\ndef main")
    assert f"torch.manual_seed(1)  # fixed\n{CALL}\n\ndef main" in reading(on_a_gpu(recorded), text).patched(RULE)


def test_as_the_file_spells_torch(recorded: Recorded) -> None:
    text = SCRIPT.replace("import torch\n", "import torch as th\n").replace("torch.optim", "th.optim")
    assert 'from torch import nn\n\nth.set_float32_matmul_precision("high")\n' in reading(
        on_a_gpu(recorded), text
    ).patched(RULE)


def test_a_script_that_others_import(recorded: Recorded) -> None:
    other = "from train import main\n"
    there = reading(on_a_gpu(recorded), SCRIPT, evaluate=other)
    assert there.patched(RULE).endswith(f'if __name__ == "__main__":\n    {CALL}\n    main()\n')
    unguarded = SCRIPT.replace('if __name__ == "__main__":\n    main()\n', "main()\n")
    assert "evaluate.py imports this file" in reading(on_a_gpu(recorded), unguarded, evaluate=other).reason(RULE)


def test_on_a_cpu_it_cannot_tell(recorded: Recorded) -> None:
    assert recorded.reason(RULE) == ON_A_GPU


@pytest.mark.parametrize(
    "line",
    [
        'torch.set_float32_matmul_precision("highest")',
        "torch.backends.cuda.matmul.allow_tf32 = False",
        'torch.backends.cuda.matmul.fp32_precision = "ieee"',
        'os.environ["NVIDIA_TF32_OVERRIDE"] = "0"',
        "from torch import set_float32_matmul_precision as p; p(flag)",
    ],
)
def test_where_the_files_set_it(recorded: Recorded, line: str) -> None:
    reason = reading(on_a_gpu(recorded), SCRIPT + line + "\n").reason(RULE)
    assert reason == "the files set the precision of products themselves (train.py:19)"


def test_what_another_script_sets_is_not_set_here(recorded: Recorded) -> None:
    other = "import torch\nfrom train import main\n\n" + CALL + "\n"
    assert CALL in reading(on_a_gpu(recorded), SCRIPT, evaluate=other).patched(RULE)
    text = SCRIPT.replace("import torch\n", "import torch\nimport numerics\n", 1)
    assert "numerics.py:2" in reading(on_a_gpu(recorded), text, numerics=f"import torch\n{CALL}\n").reason(RULE)


def test_measurements_decide(recorded: Recorded) -> None:
    there = on_a_gpu(recorded)
    assert on_a_gpu(recorded, LARGE[:1]).reason(RULE) == "float32 products take 4.0% of the step"
    assert on_a_gpu(recorded, [("aten::mm", "float32", 5.0)] * 900).reason(RULE).endswith("at most 5 us each")
    assert on_a_gpu(recorded, [("aten::convolution", "float32", 500.0)] * 9).reason(RULE).startswith("no product")
    assert on_a_gpu(recorded, name="Tesla T4").reason(RULE) == "NVIDIA T4 has no TF32"
    for facts, words in (({"matmul_precision": "high"}, "in TF32 already"), ({}, "was not recorded")):
        other = replace(there.ctx, profile=replace(there.ctx.profile, facts=facts))
        assert words in Recorded(other).reason(RULE)
    unknown = replace(there.ctx.profile, hardware=Hardware(name="a device", kind="cuda"))
    assert "cannot tell" in Recorded(replace(there.ctx, profile=unknown)).reason(RULE)


def test_both_rules_of_precision_may_apply(recorded: Recorded) -> None:
    there = on_a_gpu(recorded)
    assert "torch.autocast(" in there.patched("no-mixed-precision")
    assert CALL in there.patched(RULE)


def test_a_recorded_step_that_waits_for_the_host(recorded: Recorded) -> None:
    from profiles import h200

    ctx, (_, profile) = recorded.ctx, h200("gpt_launch_bound_fp32")
    mixed = replace(profile, calls=ctx.profile.calls, graphs=ctx.profile.graphs)
    there = Recorded(replace(ctx, profile=replace(mixed, facts={**profile.facts, "matmul_precision": "highest"})))
    assert there.reason(RULE) == "the device is idle in 85% of the step: it does not wait for its products"
    assert there.reason("no-mixed-precision").startswith("the large float32 products of the loop take")
