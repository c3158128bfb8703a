"""Reads of the device: which are left for later, that what is shown stays the same, and which are only told."""

from __future__ import annotations

import contextlib
import io
import textwrap
from dataclasses import replace

import pytest

from advisor import patch as patching
from advisor.devicereads import read_times
from advisor.match import match
from advisor.model import (
    Decline,
    Environment,
    Finding,
    Graph,
    Hardware,
    Kernels,
    LoopCall,
    Node,
    NodeCost,
    Operators,
    Profile,
    Ref,
    Rewrite,
    Safety,
    Span,
    Utilisation,
)
from advisor.registry import load
from advisor.rule import ON_A_GPU, Context
from advisor.source import Source

RULE = load()[0]["host-sync"].rule
TARGETS = {
    "{loss}": "method.__format__",
    "print(loss)": "method.__repr__",
    ".item()": "method.item",
    "float(": "method.__float__",
    "int(": "method.__int__",
    "if ": "method.__bool__",
}
HEAD = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(7)]
"""
STEP = """\
logits = model(x)
loss = torch.nn.functional.cross_entropy(logits, y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


def script(before: str, body: str, after: str = "", head: str = "for step, (x, y) in enumerate(batches):") -> str:
    """A training script around what a case does before, in and after its loop."""
    inside = textwrap.indent(STEP + textwrap.dedent(body).strip("\n"), "    ")
    return f"{HEAD}{before.strip()}\n{head}\n{inside}\n{after.strip()}\n"


def context(text: str, reads: dict[str, str], device: str = "cuda", felt_us: float = 900.0, **facts: str) -> Context:
    """The context of a run in which the marked parts of lines read tensors of these dtypes."""
    source = Source("train.py", text)
    nodes: list[Node] = []
    times = {}
    for number, line in enumerate(source.lines, start=1):
        for part, dtype in reads.items():
            if part not in line:
                continue
            target = next(name for sign, name in TARGETS.items() if sign in part)
            at, span = len(nodes), Span(path="train.py", line=number)
            nodes += [
                Node(index=at, name=f"p{at}", op="placeholder", target="p", dtype=dtype, device=device),
                Node(index=at + 1, name=f"r{at}", op="call_method", target=target, args=(Ref(at),), frames=(span,),
                     span=span, facts=facts),
            ]  # fmt: skip
            times[(0, at + 1)] = (4_000.0, felt_us)
    stepped = next(n for n, line in enumerate(source.lines, start=1) if "optimizer.step()" in line)
    call = LoopCall(
        name="optimizer.step", frames=(Span(path="train.py", line=stepped),), calls=7, per_step=1.0, host_us=10.0
    )
    profile = Profile(
        environment=Environment(python="3", torch="2"),
        hardware=Hardware(name="a device", kind=device),
        steps=(),
        step_us=(10_000.0,),
        graphs=(Graph(index=0, nodes=tuple(nodes), kind="eager"),),
        calls=(call,),
        utilisation=Utilisation(busy=0.8 if device == "cuda" else None),
        facts={"reads_us": times},
    )
    return Context(profile, lambda path: source, script="train.py")


def answers(text: str, reads: dict[str, str], **given: object) -> list[Finding | Decline]:
    found = match(context(text, reads, **given), [RULE])  # type: ignore[arg-type]
    assert not found.errors, found.errors[0].detail
    return [*found.findings, *found.declines]


def rewritten(text: str, reads: dict[str, str]) -> tuple[str, Rewrite]:
    """The text with the one rewrite that the rule makes of it."""
    source = Source("train.py", text)
    findings = [item for item in answers(text, reads) if isinstance(item, Finding)]
    results = [RULE.rewrite(finding, source) for finding in findings]
    made = [item for item in results if isinstance(item, Rewrite)]
    assert len(made) == 1, results
    return patching.build(made, lambda _: source).sources["train.py"], made[0]


def refused(text: str, reads: dict[str, str]) -> str:
    """Why the one finding is only told."""
    (finding,) = answers(text, reads)
    assert isinstance(finding, Finding), finding
    result = RULE.rewrite(finding, Source("train.py", text))
    assert isinstance(result, Decline), result
    return result.reason


def printed(text: str) -> str:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    return stream.getvalue()


LOSS = {"loss.item()": "float32"}
DEFERRED = {
    "sum": (script("run = 0.0", "run += loss.item()", "print(run, run / 7)"), LOSS, ["run += loss.detach().double()"]),
    "sum of samples": (
        script("run = 0", "run += loss.item() * x.size(0)", "run /= len(batches)\nprint(f'{run:.17f}')"),
        LOSS,
        ["run += loss.detach().double() * x.size(0)", "run = float(run) / len(batches)"],
    ),
    "written out": (
        script("run = 0.0", "run = 0.9 * run + 0.1 * loss.item()", "print(run)"),
        LOSS,
        ["run = 0.9 * run + 0.1 * loss.detach().double()", "print(float(run))"],
    ),
    "counted": (
        script("hits = 0", "hits += (logits.argmax(1) == y).sum().item()", "print(hits, f'{hits}', hits / 35)"),
        {".sum().item()": "int64"},
        ["hits += (logits.argmax(1) == y).sum()\n", "print(int(hits), f'{hits}', int(hits) / 35)"],
    ),
    "counted above a threshold": (
        script("hits = 0", "hits += (logits > 0.5).sum().item()", "print(hits)"),
        {".sum().item()": "int64"},
        ["hits += (logits > 0.5).sum()\n", "print(int(hits))"],
    ),
    "mean of hits": (
        script("acc = 0.0", "acc += (logits.argmax(-1) == y).float().mean().item()", "print([acc])"),
        {".item()": "float32"},
        ["(logits.argmax(-1) == y).float().mean().detach().double()", "print([float(acc)])"],
    ),
    "largest": (
        script(
            "peak = 0.0",
            "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\npeak = max(peak, float(norm))",
            "print(peak)",
        ),
        {"float(norm)": "float32"},
        ["torch.where(norm.detach().double() > peak, norm.detach().double(), peak)"],
    ),
    "smallest, read first": (
        script("low = float('inf')", "low = min(loss.item(), low)", "print(low)"),
        LOSS,
        ["torch.where(low < loss.detach().double(), low, loss.detach().double())"],
    ),
    "list": (
        script("losses = []", "losses.append(loss.item())", "print(losses, sum(losses) / len(losses), losses[-1])"),
        LOSS,
        ["losses.append(loss.detach().clone())", "sum([value.item() for value in losses]) / len(losses)"],
    ),
    "list that is emptied": (
        script(
            "seen = []",
            """
            seen.append(loss.item())
            if step % 3 == 2:
                print(sum(seen) / len(seen), seen[-2:])
                seen.clear()
            """,
        ),
        LOSS,
        ["print(sum([value.item() for value in seen]) / len(seen), [value.item() for value in seen[-2:]])"],
    ),
    "a value with a name": (
        script(
            "run, losses = 0.0, []",
            """
            value = loss.item()
            run += value
            losses.append(value)
            if step % 3 == 0:
                print(f"step {step} loss {value:.17f}", run / 3, value)
                run = 0.0
            """,
            "print(losses[2:])",
        ),
        LOSS,
        ["value = loss.detach().clone()", "run += value.double()", "float(run) / 3, float(value)"],
    ),
    "an epoch around it": (
        script(
            "history = []",
            "    run += loss.item()",
            "    history.append(run / len(batches))\nprint(history)",
            "for epoch in range(2):\n    run = 0.0\n    for step, (x, y) in enumerate(batches):",
        ).replace("\n    logits", "\n        logits"),
        LOSS,
        ["history.append(float(run) / len(batches))"],
    ),
    "a value that begins as a number": (
        script("run, value = 0.0, -1.0", "value = loss.item()\nrun += value", "print(run, value)"),
        LOSS,
        ["value = loss.detach().clone()", "run += value.double()", "print(float(run), float(value))"],
    ),
    "under the condition of the step": (
        script("run = 0.0", "run += loss.item()", "print(run)").replace(
            "    optimizer.step()\n    run += loss.item()",
            "    if (step + 1) % 2 == 0:\n        optimizer.step()\n        run += loss.item()",
        ),
        LOSS,
        ["        run += loss.detach().double()"],
    ),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_what_is_shown_stays_the_same(name: str) -> None:
    text, reads, wanted = DEFERRED[name]
    if "epoch" in name:
        lines = text.split("\n")
        begin = next(n for n, line in enumerate(lines) if "in enumerate" in line) + 1
        end = next(n for n, line in enumerate(lines) if "history.append" in line)
        lines[begin:end] = ["        " + line.strip() for line in lines[begin:end]]
        text = "\n".join(lines)
    after, rewrite = rewritten(text, reads)
    for part in wanted:
        assert part in after
    assert printed(after) == printed(text) != ""
    assert rewrite.safety is Safety.EXACT
    assert not [item for item in answers(after, reads) if isinstance(item, Finding)]


# ------------------------------------------------------------------------------------------------------------ only told

TOLD = {
    "skips": (
        script("seen = []", "value = loss.item()\nif value > 9:\n    continue\nseen.append(value)", "print(seen)"),
        "line 15 decides by its value what is done next: the host has to wait for it",
    ),
    "stops": (script("", "if loss.item() < 0.1:\n    break"), "line 14 decides by its value what is done next"),
    "best so far": (
        script("best = 9.0", "value = loss.item()\nwait = 0 if value < best else 1\nbest = min(best, value)"),
        "line 15 decides by its value",
    ),
    "shown on a bar": (
        script("", "bar.set_postfix(loss=loss.item())"),
        "line 14 hands it to `bar.set_postfix` in every step: do that every so many steps only",
    ),
    "sum shown on a bar": (
        script("run = 0.0", "run += loss.item()\nbar.set_description(f'{run / (step + 1):.3f}')"),
        "line 15 hands it to `bar.set_description` in every step",
    ),
    "printed": (script("", "print(step, loss.item())"), "line 14 prints it in every step"),
    "meter": (
        script("", "meter.update(loss.item(), x.size(0))"),
        "line 14 hands it to `meter.update`, which may need a number",
    ),
    "an attribute": (script("", "state.total += loss.item()"), "line 14 needs its value in every step"),
    "an argument": (
        "def train(model, batches, optimizer, run):\n    for x in batches:\n        loss = model(x)\n"
        "        optimizer.step()\n        run += loss.item()\n    return run\n",
        "`run` is an argument",
    ),
    "used in a function": (
        script("run = 0.0\ndef show():\n    print(run)", "run += loss.item()"),
        "`run` is used in another function too",
    ),
    "a list with another name": (
        script("losses = []\nhistory = {'loss': losses}", "losses.append(loss.item())", "print(history)"),
        "line 8 hands the list `losses` on, which may be changed later",
    ),
    "a list that also gets numbers": (
        script("losses = []", "losses.append(loss.item())", "losses.append(0.0)\nprint(losses)"),
        "line 15 changes `losses` outside of the loop",
    ),
    "a list that is read again and again": (
        script("seen = []", "seen.append(loss.item())\nif step % 3 == 0:\n    print(sum(seen) / len(seen))"),
        "line 16 reads all of `seen` while it grows",
    ),
    "a bounded list": (
        script("losses = deque(maxlen=5)", "losses.append(loss.item())", "print(losses)"),
        "where `losses` begins is not seen",
    ),
    "inference mode": (
        script("run = 0.0", "with torch.inference_mode():\n    run += loss.item()", "print(run)"),
        "it is read in inference mode",
    ),
    "MPS": (
        script("run = 0.0\ndevice = 'mps' if torch.backends.mps.is_available() else 'cuda'", "run += loss.item()"),
        "the script may run on MPS",
    ),
    "shown with its name": (
        script("run = 0.0", "run += loss.item()", "print(f'{run=}')"),
        "line 15 shows how it is represented",
    ),
    "an integer to begin with": (
        script("run = 0", "run += loss.item()", "print(run)"),
        "`run` begins as an integer, and line 15 may show it as one",
    ),
    "a power": (script("run = 0.0", "run += loss.item() ** 2", "print(run)"), "line 14 does more with it than add"),
    "a choice": (script("run = 0.0", "run += loss.item() if y.any() else 1", "print(run)"), "line 14 does more"),
    "given another value": (
        script("run = 0.0", "run += loss.item()\nif step % 2 == 0:\n    run = step_log(run)", "print(run)"),
        "line 16 does more with it than add it up: `step_log(run)`",
    ),
    "another branch": (
        script("run = 0.0", "run += loss.item()\nif step > 99:\n    run += logits.item()", "print(run)"),
        "what line 16 adds was not seen in the run",
    ),
    "a value that the loop replaces": (
        script("run = 0.0", "value = loss.item()\nif step == 3:\n    value = 0.0\nrun += value", "print(run)"),
        "`value` may be a number at line 17",
    ),
    "a value of some steps": (
        script("run = value = 0.0", "if y.sum() > 3:\n    value = loss.item()\nrun += value", "print(run)"),
        "`value` may be a number at line 16",
    ),
    "locals": (script("run = 0.0", "run += loss.item()", "print(locals())"), "`locals` may see `run`"),
    "two names of one list": (
        script("losses = history = []", "losses.append(loss.item())", "print(history)"),
        "where `losses` begins is not seen",
    ),
    "a place that may be a slice": (
        script("losses, w = [], slice(0, 3)", "losses.append(loss.item())", "print(losses[w])"),
        "line 15 may select several of `losses`",
    ),
    "weights of NumPy": (
        script("import numpy as np\nrun, w = 0.0, np.ones(3)", "run += w * loss.item()", "print(run)"),
        "line 15 does more with it than add it up: `w`",
    ),
    "a comment names MPS": (
        script("run = 0.0\ndevice = 'cuda'  # or 'cpu', or mps on a Mac", "run += loss.item()", "print(run)"),
        "the script may run on MPS",
    ),
    "the device is chosen by a library": (
        script("import accelerate\nrun = 0.0", "run += loss.item()", "print(run)"),
        "the script may run on MPS",
    ),
    "another place of the same sum": (
        script("run = 0.0", "run += loss.item()", "for x, y in batches:\n    run += model(x).sum().item()"),
        "line 16 changes `run` outside of the loop",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_needs_the_value_now_is_told(name: str) -> None:
    text, reason = TOLD[name]
    assert reason in refused(text, LOSS)


def test_a_number_that_may_be_no_tensor() -> None:
    body = "norm = clip(model) if {} else 0.0\npeak = max(peak, float(norm))".format("args.clip")
    text = script("peak = 0.0", body, "print(peak)")
    assert refused(text, {"float(norm)": "float32"}) == "`norm` may be no tensor in another run"
    body = "norm = clip(model)\npeak = max(peak, float(norm))"
    text = script("peak = 0.0\ndef clip(m):\n    return 0.0 if m is None else m.weight.norm()", body, "print(peak)")
    assert refused(text, {"float(norm)": "float32"}) == "`norm` may be no tensor in another run"


def test_a_tensor_that_is_printed_is_read() -> None:
    reads = {"{loss}": "float32", "print(loss)": "float32"}
    assert "line 14 prints it in every step" in refused(script("", "print(loss)"), reads)
    assert "line 14 prints it in every step" in refused(script("", "print(f'{loss}')"), reads)
    assert answers(script("", "if step % 9 == 0:\n    print(f'{loss}')"), reads) == []


def test_a_conversion_that_cuts_off() -> None:
    text = script("run = 0", "run += int(loss)", "print(run)")
    assert refused(text, {"int(loss)": "float32"}) == "line 14 converts it to another type"


def test_a_count_that_may_be_weighted() -> None:
    text = script("hits = 0", "hits += (logits.argmax(1) == y).sum().item() * weight", "print({})")
    reads = {".sum().item()": "int64"}
    assert "begins as an integer" in refused(text.replace("{}", "hits"), reads)
    after, _ = rewritten(text.replace("{}", "hits / 3"), reads)
    assert "(logits.argmax(1) == y).sum().detach().double() * weight" in after
    assert "print(float(hits) / 3)" in after
    text = script("hits = 0", "hits += mask.sum().item()", "print(hits / 3)")
    assert "mask.sum().detach().double()" in rewritten(text, reads)[0]


INTEGERS = {
    "formatted": (
        script("hits = 0", "seen = logits > 0\nhits += seen.sum().item()", "print(f'{hits}')"),
        "`hits` begins as an integer, and line 16 may show it as one",
    ),
    "through a value": (
        script("hits = 0", "n = y.sum().item()\nhits += n", "print(f'{hits}')"),
        "`hits` begins as an integer, and line 16 may show it as one",
    ),
    "compared": (
        script("best = 0.0", "n = y.sum()\nbest = max(best, n.item())", "print(best)"),
        "`best` may be an integer, and is shown as one",
    ),
    "a value that begins as a number": (
        script("last = 0.5", "last = y.sum().item()", "print(last)"),
        "`last` may be an integer, and is shown as one",
    ),
    "divided in place": (
        script("hits = 0", "hits += (logits.argmax(1) == y).sum().item()", "hits /= 35\nprint(hits)"),
        "line 15 may make another kind of number of `hits`",
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_not_shown_as_another_number(name: str) -> None:
    text, reason = INTEGERS[name]
    assert refused(text, {".item()": "int64"}) == reason


def test_a_value_that_is_an_integer_stays_one() -> None:
    text = script("", "n = y[0].item()\nif step % 3 == 0:\n    print(n, f'{n}')", "print(n / 2)")
    after, _ = rewritten(text, {".item()": "int64"})
    assert printed(after) == printed(text)
    assert "print(n.item(), f'{n}')" in after


def test_one_number_with_dimensions_is_told() -> None:
    text = script("run = 0.0", "run += loss.item()", "print(f'{run:.3f}')")
    ctx = context(text, LOSS)
    for shape, expected in (((1,), Decline), ((), Rewrite)):
        nodes = tuple(replace(n, shape=shape) if n.dtype else n for n in ctx.profile.graphs[0].nodes)
        profile = replace(ctx.profile, graphs=(Graph(index=0, nodes=nodes, kind="eager"),))
        (finding,) = match(Context(profile, ctx.read), [RULE]).findings
        result = RULE.rewrite(finding, Source("train.py", text))
        assert isinstance(result, expected)
        if isinstance(result, Decline):
            assert result.reason == "line 14 reads a tensor that has dimensions: make it a scalar first"


def test_a_quotient_may_be_rounded_another_way_on_a_gpu() -> None:
    _, rewrite = rewritten(script("run = 0.0", "run += loss.item() / 3", "print(run)"), LOSS)
    assert rewrite.safety is Safety.NUMERICS


def test_a_read_in_a_function_is_told_where_it_stands() -> None:
    text = HEAD + (
        "def work(x, y):\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"
        "    return loss.item()\n"
        "for x, y in batches:\n    losses.append(work(x, y))\n"
    )
    source = Source("train.py", text)
    ctx = context(text, LOSS)
    outer, inner = Span(path="train.py", line=13), Span(path="train.py", line=11)
    nodes = tuple(
        Node(index=n.index, name=n.name, op=n.op, target=n.target, args=n.args, dtype=n.dtype, device=n.device,
             frames=(outer, inner) if n.frames else (), span=n.span)
        for n in ctx.profile.graphs[0].nodes
    )  # fmt: skip
    call = LoopCall(
        name="optimizer.step", frames=(outer, Span(path="train.py", line=10)), calls=7, per_step=1.0, host_us=1.0
    )
    profile = replace(ctx.profile, graphs=(Graph(index=0, nodes=nodes, kind="eager"),), calls=(call,))
    (finding,) = match(Context(profile, lambda path: source), [RULE]).findings
    assert finding.span.line == 11
    result = RULE.rewrite(finding, source)
    assert isinstance(result, Decline)
    assert result.reason == "`work` reads it: its callers may need a number"


# --------------------------------------------------------------------------------------------------------------- silent

SILENT = {
    "once in a while": script("", "if step % 50 == 0:\n    print(loss.item())"),
    "with other conditions": script("", "if rank == 0 and (step + 1) % args.every == 0:\n    print(loss.item())"),
    "named condition": script("", "show = step % 50 == 0\nif show:\n    print(loss.item())"),
    "the others are passed over": script("", "if step % 50 != 0:\n    continue\nprint(loss.item())"),
    "the last step": script("", "if step == len(batches) - 1:\n    print(loss.item())"),
    "behind the loop": script("", "pass", "print(loss.item())"),
    "before the loop": script("print(torch.ones(()).sum().item(), 'loss.item()')", "pass"),
}


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_silent_where_no_step_waits(name: str, device: str) -> None:
    assert answers(SILENT[name], LOSS, device=device) == []


def test_the_other_branch_runs_in_most_steps() -> None:
    assert "prints it" in refused(script("", "if step % 5 == 0:\n    pass\nelse:\n    print(loss.item())"), LOSS)
    assert "prints it" in refused(script("", "if rank == 0:\n    print(loss.item())"), LOSS)


def test_silent_in_an_evaluation() -> None:
    text = script("hits = 0", "for a, b in batches:\n    hits += loss.item()\nprint(hits)")
    assert answers(text, LOSS, grad_mode="off") == []


def test_silent_where_the_tensor_lives_on_the_host() -> None:
    ctx = context(script("run = 0.0", "run += loss.item()", "print(run)"), LOSS)
    nodes = tuple(replace(n, device="cpu" if n.device else None) for n in ctx.profile.graphs[0].nodes)
    profile = replace(ctx.profile, graphs=(Graph(index=0, nodes=nodes, kind="eager"),))
    assert match(replace(ctx, profile=profile), [RULE]) == match(replace(ctx, profile=replace(profile, graphs=(
        Graph(index=0, nodes=nodes[:1], kind="eager"),))), [RULE])  # fmt: skip


def test_a_busy_device_gains_nothing() -> None:
    (decline,) = answers(script("run = 0.0", "run += loss.item()", "print(run)"), LOSS, felt_us=50.0)
    assert isinstance(decline, Decline)
    assert decline.reason.endswith("of that the device has nothing to do for 50 us: 0.5% of the step")


def test_without_a_gpu_every_place_says_so() -> None:
    text = script("run = peak = 0.0", "run += loss.item()\npeak = max(peak, loss.item())", "print(run, peak)")
    found = answers(text, LOSS, device="cpu")
    assert [(item.span.line, item.reason) for item in found if isinstance(item, Decline) and item.span] == [
        (14, ON_A_GPU),
        (15, ON_A_GPU),
    ]


def test_reads_that_follow_each_other_are_one_finding() -> None:
    body = "run += loss.item()\nacc += (logits.argmax(1) == y).float().mean().item()\nprint(step)\nlast = loss.item()"
    text = script("run, acc = 0.0, 0.0", body, "print(run, acc, last)")
    found = [item for item in answers(text, {".item()": "float32"}) if isinstance(item, Finding)]
    assert [(item.span.line, item.span.end_line) for item in found] == [(14, 15), (17, 17)]
    second = RULE.rewrite(found[1], Source("train.py", text))
    assert isinstance(second, Decline)
    assert second.reason == "it is read later together with what line 14 reads"
    assert "last = loss.detach().clone()" in rewritten(text, {".item()": "float32"})[0]


# ------------------------------------------------------------------------------------------------------- what they cost


def test_the_device_feels_what_it_is_idle_until_the_next_read() -> None:
    """Two steps of: work 0-100, read at 100 (host waits 90), idle 10, work, idle 20, work."""
    kernels = Kernels(
        name=("gemm", "Memcpy DtoH (Device -> Pinned)", "a", "b") * 2,
        category=("kernel", "memcpy", "kernel", "kernel") * 2,
        start_us=(0.0, 100.0, 112.0, 142.0, 152.0, 252.0, 264.0, 294.0),
        duration_us=(100.0, 2.0, 10.0, 10.0) * 2,
        stream=(7,) * 8,
        correlation=tuple(range(8)),
        operator=(0, 1, 0, 0, 0, 2, 0, 0),
        step=(0,) * 4 + (1,) * 4,
    )
    operators = Operators(name=("aten::mm", "aten::_local_scalar_dense", "aten::copy_"), duration_us=(5.0, 90.0, 25.0))
    costs = (NodeCost(graph=1, node=4, forward_us=2.0, backward_us=0.0, launches=1, provenance="nesting"),)
    found = read_times(kernels, operators, costs, (-1, 0, -1), 2)
    assert found == {(-1, -1): (12.5, 12.5), (1, 4): (45.0, 15.0)}
    assert read_times(kernels, operators, costs, (), 2) == {(-1, -1): (57.5, 27.5)}
    assert read_times(Kernels(), Operators(), (), (), 2) == {}


def test_a_read_that_could_not_be_linked_counts_with_all_of_those() -> None:
    ctx = context(script("run = 0.0", "run += loss.item()", "print(run)"), LOSS)
    for times, expected in (({(-1, -1): (800.0, 700.0)}, 700.0), ({(-1, -1): (8_000.0, 7_000.0)}, 2_000.0)):
        profile = replace(ctx.profile, facts={"reads_us": times})
        (finding,) = match(Context(profile, ctx.read), [RULE]).findings
        assert finding.estimate.high_us == pytest.approx(expected)  # at most what the device is idle at all
    (decline,) = match(Context(replace(ctx.profile, facts={"reads_us": {}}), ctx.read), [RULE]).declines
    assert decline.reason == "the trace shows no wait of the host for the device in it"
    (decline,) = match(Context(replace(ctx.profile, facts={}), ctx.read), [RULE]).declines
    assert decline.needs == ("kineto",)
