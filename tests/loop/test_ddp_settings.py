"""Gradients that every micro-step of accumulation reduces: where the edit is right, and where it would not be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from advisor import match, registry, testing
from advisor import patch as patching
from advisor.capture.launch import Child
from advisor.ingest.probe import read_probe
from advisor.model import Decline, Environment, Finding, Hardware, Kernels, LoopCall, Profile, Rewrite
from advisor.session import Spec
from advisor.source import Source

pytest.importorskip("torch")
RULE = registry.load()[0]["ddp-settings"].rule
MEASURED = RULE.examples[0].profile
HEAD = "from torch.nn.parallel import DistributedDataParallel as DDP\n\nmodel = DDP(net)\n"
WITH = "with model.no_sync() if {test} else contextlib.nullcontext():"
RANGE = """
for step in range(100):
    for micro in range(ACC):
        loss = model(batch()) / ACC
        loss.backward()
    optimizer.step()
"""
BACKWARD = "loss.b"
FLAT = """
for i, batch in enumerate(loader):
    loss = model(batch) / ACC
    loss.backward()
    if (i + 1) % ACC == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def said(text: str, folder: Path, **facts: object) -> tuple[Finding | Decline, Rewrite | Decline | None, str]:
    """What the rule says of a source on a made-up GPU, its edit and the edited source."""
    called = {**MEASURED.called, "ddp.reduce": {**MEASURED.called["ddp.reduce"], **facts}}
    ctx, source = testing.context_of(RULE, text, replace(MEASURED, called=called), folder)
    (found,) = RULE.match(ctx)
    if isinstance(found, Decline):
        return found, None, text
    edit = RULE.rewrite(found, source)
    if isinstance(edit, Decline):
        return found, edit, text
    return found, edit, patching.build([edit], lambda _: source).sources[testing.FILE]


def header(text: str, folder: Path) -> str:
    found, edit, result = said(text, folder)
    assert isinstance(edit, Rewrite), (found, edit)
    compile(result, "result", "exec")
    return next(line.strip() for line in result.splitlines() if "no_sync" in line)


@pytest.mark.parametrize(
    ("loop", "test"),
    [
        (RANGE, "micro < ACC - 1"),
        (RANGE.replace("range(ACC)", "range(4)"), "micro < 3"),
        (RANGE.replace("range(ACC)", "range(0, args.batch // args.micro)"), "micro < args.batch // args.micro - 1"),
        (RANGE.replace("micro in range(ACC)", "_ in range(cfg.train.acc)"), "_ < cfg.train.acc - 1"),
        (
            RANGE.replace(
                "    for micro in range(ACC)", "    parts = data.chunk(ACC)\n    for k, x in enumerate(parts)"
            ),
            "k < len(parts) - 1",
        ),
        (FLAT, "(i + 1) % ACC != 0"),
        (
            FLAT.replace("== 0:", "== 0 or i + 1 == len(loader):"),
            "not ((i + 1) % ACC == 0 or i + 1 == len(loader))",
        ),
        (FLAT.replace("optimizer.step()", "scaler.step(optimizer)"), "(i + 1) % ACC != 0"),
    ],
)
def test_the_boundary(loop: str, test: str, tmp_path: Path) -> None:
    assert header(HEAD + loop, tmp_path) == WITH.replace("{test}", test)


def test_autocast_around_the_forward_and_the_lines_between(tmp_path: Path) -> None:
    loop = RANGE.replace(
        "        loss = model(batch()) / ACC\n",
        """        x = batch()
        with autocast():
            loss = model(x)
        loss = loss / ACC  # mean

""",
    )
    _, _, result = said(HEAD + loop, tmp_path)
    expected = """\
        x = batch()
        with model.no_sync() if micro < ACC - 1 else contextlib.nullcontext():
            with autocast():
                loss = model(x)
            loss = loss / ACC  # mean

            loss.backward()
    optimizer.step()
"""
    assert result.endswith(expected)


def test_a_model_that_may_come_unwrapped_is_asked(tmp_path: Path) -> None:
    text = HEAD.replace("model = DDP(net)", "model = net\nif world > 1:\n    model = DDP(net)") + RANGE
    assert header(text, tmp_path) == WITH.replace("{test}", "isinstance(model, DDP) and micro < ACC - 1")


def test_the_wrapper_is_named_where_the_file_does_not_import_it(tmp_path: Path) -> None:
    text = "import torch\n\n\ndef train(model):\n" + textwrap.indent(RANGE, "    ") + "\n\ntrain(wrap(net))\n"
    _, _, result = said(text, tmp_path)
    assert "if isinstance(model, torch.nn.parallel.DistributedDataParallel) and micro < ACC - 1\n" in result


def test_a_long_test_takes_lines_of_its_own(tmp_path: Path) -> None:
    count = "configuration.training.micro_steps_per_optimizer_step"
    function = "def train(model):\n" + textwrap.indent(RANGE.replace("ACC)", f"{count})").strip("\n"), "    ")
    _, _, result = said("from torch.nn.parallel import DistributedDataParallel\n\n\n" + function, tmp_path)
    expected = f"""\
            with (
                model.no_sync()
                if isinstance(model, DistributedDataParallel) and micro < {count} - 1
                else contextlib.nullcontext()
            ):
                loss = model(batch()) / ACC
"""
    assert expected in result


MICRO_STEP = """
def micro_step(model, x):
    loss = model(x) / ACC
    LINES


for step in range(9):
    for micro in range(ACC):
        micro_step(model, batch)
    optimizer.step()
"""


@pytest.mark.parametrize(
    "lines",
    ["if loss.isfinite():\n        loss.backward()", "if not loss.isfinite():\n        return\n    loss.backward()"],
)
def test_a_function_that_may_leave_its_backward_pass_out(lines: str, tmp_path: Path) -> None:
    _, edit, _ = said(HEAD + MICRO_STEP.replace("LINES", lines), tmp_path)
    assert isinstance(edit, Decline) and "may be left out" in edit.reason
    assert "micro < ACC - 1" in header(HEAD + MICRO_STEP.replace("LINES", "loss.backward()"), tmp_path)


def test_an_exception_that_ends_the_micro_steps(tmp_path: Path) -> None:
    lines = textwrap.indent(RANGE.split("\n", 2)[2].partition("    optimizer")[0], "    ")
    text = f"for step in range(9):\n    try:\n{lines}    except StopIteration:\n        pass\n    optimizer.step()\n"
    _, edit, _ = said(HEAD + text, tmp_path)
    assert isinstance(edit, Decline) and "an exception that is caught" in edit.reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RANGE.replace(BACKWARD, "if bad(loss):\n            break\n        loss.b"), "line 9 may leave"),
        (RANGE.replace(BACKWARD, "if bad(loss):\n            continue\n        loss.b"), "line 9 may leave"),
        (RANGE.replace("loss = ", "if ready:\n            loss = "), "does not run in every micro-step"),
        (RANGE.replace(BACKWARD, "micro = 0\n        loss.b"), "`micro` gets another value"),
        (RANGE.replace(BACKWARD, "log(p.grad)\n        loss.b"), "reads gradients"),
        (RANGE.replace("range(ACC)", "batches"), "does not count its micro-steps"),
        (RANGE.replace("micro in range(ACC)", "micro, x in enumerate(batches)"), "give the loop a list"),
        (RANGE.replace("range(ACC)", "range(draw())"), "not a plain value"),
        (RANGE.replace("loss = model(batch())", "fake = model(z)\n        loss = model(fake)"), None),
        (FLAT + "optimizer.step()\n", "line 11 may step without the condition"),
        (FLAT + "finish(optimizer)\n\ndef finish(opt):\n    opt.step()\n", "may step without the condition"),
        (FLAT.replace("(i + 1) % ACC == 0", "accelerator.sync_gradients"), "does not count"),
        (
            FLAT.replace("(i + 1)", "n").replace("    if n", "    log(loss)\n    if n")
            + "\ndef log(loss):\n    global n\n    n += 1\n",
            "may change what the condition asks for",
        ),
        (FLAT.replace("    if (i", "    i += 1\n    if (i"), "`i` gets another value"),
        (FLAT.replace("(i + 1) % ACC == 0", "ready(i)"), "more than compare plain values"),
        (FLAT.replace("(i + 1) % ACC == 0", "self.count % ACC == 0") + "self.count += 1\n", "`self.count` changes"),
        (RANGE + "model.register_comm_hook(state, powerSGD_hook)\n", "communication hook"),
        (RANGE + "for p in net.parameters():\n    p.register_post_accumulate_grad_hook(f)\n", "as soon as they are"),
        (RANGE + "with model.no_sync():\n    pass\n", "no_sync is used, but every pass reduces"),
        (RANGE + "model._set_static_graph()\n", "static_graph=True"),
    ],
)  # fmt: skip
def test_told_where_the_edit_would_not_be_the_same(text: str, why: str | None, tmp_path: Path) -> None:
    found, edit, _ = said(HEAD + text, tmp_path)
    assert isinstance(found, Finding)
    if why is None:
        assert isinstance(edit, Rewrite)
    else:
        assert isinstance(edit, Decline)
        assert why in edit.reason


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"changed_buffers": ["SyncBatchNorm"]}, False),
        ({"changed_buffers": ["Codebook"]}, True),
        ({"changed_buffers": ["Codebook"], "broadcast_buffers": False}, False),
        ({"modules": 2}, True),
        ({"hooks": ["powerSGD_hook"]}, True),
    ],
)
def test_what_the_run_shows_of_the_wrapper(facts: dict[str, object], told: bool, tmp_path: Path) -> None:
    found, edit, _ = said(HEAD + RANGE, tmp_path, **facts)
    assert isinstance(found, Finding)
    assert isinstance(edit, Decline) == told


def test_a_critic_that_steps_several_times_accumulates_nothing(tmp_path: Path) -> None:
    ctx, _ = testing.context_of(RULE, HEAD + RANGE.replace("    optimizer", "        optimizer"), MEASURED, tmp_path)
    assert not list(RULE.match(ctx))


# ----------------------------------------------------------------------------------------------------------- a real run

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

for key, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
    os.environ.setdefault(key, value)
ACC = 3
count = [0]


def counting(group, bucket):
    count[0] += 1
    return default_hooks.allreduce_hook(group, bucket)


def loss_on(net, x):
    return net(x).square().mean()


def main(steps):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    net.register_comm_hook(None, counting)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(steps):
        for micro in range(ACC):
            x = torch.randn(4, 8)
            loss = loss_on(net, x) / ACC
            loss.backward()
        opt.step()
        opt.zero_grad()
    digest = [float(p.detach().double().sum()) for p in net.parameters()]
    print(json.dumps({"rank": dist.get_rank(), "digest": digest, "reduces": count[0]}), flush=True)
    dist.destroy_process_group()


main(int(sys.argv[1]))
"""


def _seen(text: str, tmp_path: Path) -> tuple[LoopCall, ...]:
    """The calls that a recorded run of a script shows."""
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    options = {"warmup": 1, "steps": 2, "profile_steps": 1, "annotate": False, "device_rates": False}
    spec = Spec(
        script=str(script),
        argv=("50",),
        root=str(tmp_path),
        out=str(tmp_path / "out"),
        plan="advisor.capture.probe:CapturePlan",
        options=options,
    )
    with Child(spec) as child:
        while child.receive() is not None:
            continue
        child.wait(60.0)
    return read_probe(tmp_path / "out" / "probe.json", tmp_path).calls


@pytest.mark.parametrize(("used", "left_out"), [("True", False), ("self.passes % 4 != 3", True)])
def test_a_run_shows_whether_parameters_are_left_out(used: str, left_out: bool, tmp_path: Path) -> None:
    module = f"""
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.passes = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        self.passes += 1
        return self.second(self.first(x)) if {used} else self.first(x)


def main("""
    text = SCRIPT.replace("\ndef main(", module, 1)
    text = text.replace("DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))", "DDP(Sometimes(), FIND)")
    text = text.replace("FIND", "find_unused_parameters=True")
    (wrapped,) = (call for call in _seen(text, tmp_path) if call.name == "torch.nn.parallel.DistributedDataParallel")
    assert wrapped.facts["find_unused_parameters"]
    assert wrapped.facts["searched"] >= 8
    assert bool(wrapped.facts["left_out"]) == left_out


@pytest.mark.parametrize(
    ("call", "branches"),
    [
        ("self.layer(x)", False),
        ("self.experts[0](x)", False),
        ("self.experts[choose(x)](x)", True),
        ("self.layer(x) if self.on else x", True),
    ],
)
def test_the_search_is_needed_where_a_method_branches(call: str, branches: bool, tmp_path: Path) -> None:
    measured = next(e.profile for e in RULE.examples if "find_unused_parameters" in e.before)
    text = next(e.before for e in RULE.examples if "find_unused_parameters" in e.before).replace("self.layer(x)", call)
    ctx, _ = testing.context_of(RULE, text, measured, tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline) == branches


def test_two_processes_train_the_same_with_a_third_of_the_reductions(tmp_path: Path) -> None:
    calls = _seen(SCRIPT, tmp_path)
    (reduces,) = (call for call in calls if call.name == "ddp.reduce")
    assert (reduces.per_step, reduces.facts["hooks"]) == (3.0, ["counting"])
    source = Source.read(tmp_path, "train.py")
    (declined,) = RULE.match(match.context(_profile("cpu", calls, 0), lambda _: source))
    line = SCRIPT.splitlines().index("            loss = loss_on(net, x) / ACC") + 1
    assert isinstance(declined, Decline)
    assert (declined.span and declined.span.line, declined.needs) == (line, ("gpu",))

    several = tuple(replace(c, facts={**c.facts, "processes": 2}) if c is reduces else c for c in calls)
    (found,) = RULE.match(match.context(_profile("cuda", several, 1), lambda _: source))
    assert isinstance(found, Finding)
    assert found.span.line == line
    edit = RULE.rewrite(found, source)
    assert isinstance(edit, Rewrite), edit
    (tmp_path / "edited.py").write_text(patching.build([edit], lambda _: source).sources["train.py"], encoding="utf-8")
    before, after = (_two_processes(tmp_path, name) for name in ("train.py", "edited.py"))
    assert before[0]["reduces"] == 3 * after[0]["reduces"]
    assert after[0]["digest"] == after[1]["digest"]
    assert after[0]["digest"] == pytest.approx(before[0]["digest"], rel=1e-5)


def _profile(kind: str, calls: tuple[object, ...], reductions: int) -> Profile:
    return Profile(
        environment=Environment(python="3", torch="2"),
        hardware=Hardware(name="made up", kind=kind),
        steps=(),
        step_us=(1_000.0,),
        calls=calls,  # type: ignore[arg-type]
        kernels=Kernels(
            name=("ncclDevKernel_AllReduce_Sum_f32_RING_LL",) * reductions,
            category=("kernel",) * reductions,
            start_us=(0.0,) * reductions,
            duration_us=(500.0,) * reductions,
            stream=(7,) * reductions,
            correlation=(0,) * reductions,
            operator=(-1,) * reductions,
            step=(0,) * reductions,
        ),
    )


def _two_processes(folder: Path, name: str) -> list[dict[str, object]]:
    with socket.socket() as free:  # other tests run beside this one
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}
    command = [sys.executable, name, "3"]
    started = [
        subprocess.Popen(command, cwd=folder, env={**base, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in started]
    return sorted((json.loads(text.splitlines()[-1]) for text in said), key=lambda found: found["rank"])
