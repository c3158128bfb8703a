"""Copies of batches to a GPU: which calls are such copies, what is pinned where; shown on made-up profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor import patch as patching
from advisor import registry, testing
from advisor.model import Decline, Finding, Rewrite, Span
from advisor.rule import ON_A_GPU, step
from advisor.source import Source

RULE = registry.load()[0]["pageable-h2d"].rule
HEAD = "import torch\nfrom torch.utils.data import DataLoader\n\nloader = DataLoader(data, 8)\n"
PINNED = HEAD.replace("8)", "8, pin_memory=True)")
COPY = (("Memcpy HtoD (Pageable -> Device)", 900.0),)


def said(text: str, folder: Path, **parts: Any) -> list[str]:
    """The texts after the rewrites and the reasons of declines."""
    profile = step(10_000, **{"kernels": COPY, **parts})
    ctx, source = testing.context_of(RULE, text, profile, folder)
    answers = [RULE.rewrite(item, source) if isinstance(item, Finding) else item for item in RULE.match(ctx)]
    found = []
    for answer in answers:
        if isinstance(answer, Rewrite):
            found.append(patching.build([answer], lambda _: source).sources[testing.FILE])
        else:
            found.append(answer.reason)
    return found


@pytest.mark.parametrize(
    ("loop", "after"),
    [
        ("for x, y in loader:\n    x = x.cuda()\n    y = y.cuda(0)\n",
         "for x, y in loader:\n    x = x.cuda(non_blocking=True)\n    y = y.cuda(0, non_blocking=True)\n"),
        ("for i, (x, y) in enumerate(tqdm(loader)):\n    out = model(x.to(device))\n",
         "for i, (x, y) in enumerate(tqdm(loader)):\n    out = model(x.to(device, non_blocking=True))\n"),
        ("for batch in loader:\n    batch = {k: v.to(cfg.device) for k, v in batch.items()}\n",
         "for batch in loader:\n    batch = {k: v.to(cfg.device, non_blocking=True) for k, v in batch.items()}\n"),
        ("for batch in loader:\n    x = batch['x'].to(device=dev, dtype=torch.bfloat16)\n",
         "for batch in loader:\n    x = batch['x'].to(device=dev, dtype=torch.bfloat16, non_blocking=True)\n"),
        ("for batch in loader:\n    x, y = batch\n    x = x.to('cuda:0')\n",
         "for batch in loader:\n    x, y = batch\n    x = x.to('cuda:0', non_blocking=True)\n"),
        ("for batch in loader:\n    x, y = [t.to(rank) for t in batch]\n",
         "for batch in loader:\n    x, y = [t.to(rank, non_blocking=True) for t in batch]\n"),
    ],
)  # fmt: skip
def test_copies_that_people_write(tmp_path: Path, loop: str, after: str) -> None:
    assert said(HEAD + loop, tmp_path) == [PINNED + after]


@pytest.mark.parametrize(
    "loop",
    [
        "for x, y in loader:\n    x = x.to(torch.float32)\n",
        "for x, y in loader:\n    x = x.to('cpu')\n",
        "for x, y in loader:\n    x = x.to(dtype)\n",
        "device = 'cpu'\nfor x, y in loader:\n    x = x.to(device)\n",
        "for x, y in loader:\n    z = model(x).to(device)\n    out = net(x).cpu()\n",
        "for x, y in loader:\n    other = other.to(device)\n",
        "model.to(device)\nfor x, y in loader:\n    model(x)\n",
        "for x, y in loader:\n    x = x.to(*where)\n",
    ],
)
def test_what_is_no_copy_of_a_batch_to_the_device(tmp_path: Path, loop: str) -> None:
    assert said(HEAD + loop, tmp_path) == []
    assert said(HEAD + loop, tmp_path, device="cpu") == []


@pytest.mark.parametrize(
    "line",
    [
        "out = model(x)\n    x = out\n    kept.append(x.to(store))",
        "z = x\n    kept.append(z.to(store))",
        "kept.append(x.to(store))",
    ],
)
def test_what_was_moved_already_may_come_back_to_the_host(line: str, tmp_path: Path) -> None:
    """A copy from the device that does not wait would be read before it has arrived."""
    text = PINNED + "for x, y in loader:\n    x = x.to(device)\n    " + line + "\n"
    kernels = (("Memcpy HtoD (Pinned -> Device)", 900.0),)
    assert said(text, tmp_path, kernels=kernels) == [text.replace("x.to(device)", "x.to(device, non_blocking=True)")]


def test_a_part_that_is_moved_later_in_a_batch(tmp_path: Path) -> None:
    text = PINNED + "for batch in loader:\n    x, y = batch\n    x = x.cuda()\n    batch['z'] = batch['z'].cuda()\n"
    text += "    loss = model(x, y.cuda())\n    log(batch['z'].to(store))\n"
    kernels = (("Memcpy HtoD (Pinned -> Device)", 900.0),)
    assert said(text, tmp_path, kernels=kernels) == [text.replace("cuda()", "cuda(non_blocking=True)")]


def test_a_batch_that_is_written_after_the_copy_stays(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    z = x.to(device)\n    x.mul_(2)\n"
    assert said(HEAD + loop, tmp_path) == ["the loop writes into the batch after the copy, which may still read it"]
    again = "for x, y in loader:\n    x = x.to(device)\n    x.mul_(2)\n"
    assert "non_blocking" in said(HEAD + again, tmp_path)[0]


def test_pinned_and_told_to_go_on_already(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    x, y = x.to(device, non_blocking=True), y.cuda(0, True)\n"
    assert said(PINNED + loop, tmp_path) == []
    assert said(PINNED + loop, tmp_path, device="cpu") == []


def test_where_pinning_is_written(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    x = x.to(device)\n"
    held = "more = {'batch_size': 8, 'pin_memory': False}\nloader = DataLoader(data, **more)\n"
    (after,) = said(HEAD.replace("loader = DataLoader(data, 8)\n", held) + loop, tmp_path)
    assert "'pin_memory': True}" in after and "x.to(device, non_blocking=True)" in after
    asked = HEAD.replace("8)", "8, pin_memory=flag())")
    assert said(asked + loop, tmp_path) == ["pin_memory is `flag()`: set it where that gets its value, to True"]


def test_on_a_cpu_each_line_is_declined_once(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    x, y = x.to(device), y.to(device)\n"
    ctx, _ = testing.context_of(RULE, HEAD + loop, step(10_000, device="cpu"), tmp_path)
    (found,) = RULE.match(ctx)
    assert isinstance(found, Decline) and found.span is not None
    assert (found.reason, found.span.line, found.needs) == (ON_A_GPU, 6, ("gpu",))


def test_without_a_trace_nothing_is_known(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    x = x.to(device)\n"
    assert said(HEAD + loop, tmp_path, kernels=()) == ["cannot tell: no copies were recorded"]
    assert said(HEAD + loop, tmp_path, kernels=(("gemm", 5_000.0),)) == [
        "copies of pageable memory to the device take 0.0% of the step"
    ]


def test_batches_that_are_on_the_device_already(tmp_path: Path) -> None:
    loop = "for x, y in loader:\n    x = x.to(device)\n"
    assert said(HEAD + loop, tmp_path, fetching={"batch_devices": ["cuda"]}) == []


def test_a_batch_asked_for_by_next(tmp_path: Path) -> None:
    text = HEAD + "it = iter(loader)\nfor _ in range(9):\n    x, y = next(it)\n    x = x.to(device)\n"
    ctx, source = testing.context_of(RULE, text, step(10_000, kernels=COPY), tmp_path)
    call = next(n for n in source.expressions_at(7, 11))
    loaders = tuple(replace(loader, fetched=source.span(call)) for loader in ctx.profile.loaders)
    (found,) = RULE.match(replace(ctx, profile=replace(ctx.profile, loaders=loaders)))
    assert isinstance(found, Finding)
    answer = RULE.rewrite(found, source)
    assert isinstance(answer, Rewrite)
    result = patching.build([answer], lambda _: Source(testing.FILE, text)).sources[testing.FILE]
    assert result.startswith(PINNED) and "x = x.to(device, non_blocking=True)" in result


@pytest.mark.parametrize(
    ("generator", "asked"),
    [
        ("def cycle(dl):\n    while True:\n        for data in dl:\n            yield data\n", 8),
        ("def bar(dl):\n    for i, data in enumerate(dl):\n        yield data\n        print(i)\n", 7),
        ("class Bar:\n    def __iter__(self):\n        yield from self.it\n", 8),
    ],
)
@pytest.mark.parametrize(
    "loop",
    [
        "for x, y in bar(loader):\n    x, y = x.to(device), y.to(device)\n",
        "while True:\n    batch = next(it)\n    x, y = (t.to(device) for t in batch)\n",
    ],
)
def test_batches_that_a_generator_hands_on(tmp_path: Path, generator: str, asked: int, loop: str) -> None:
    text = HEAD + "\n" + generator + "\n" + loop
    line = text[: text.index(loop)].count("\n") + 1 + loop.startswith("while")
    ctx, source = testing.context_of(RULE, text, step(10_000, kernels=COPY), tmp_path)
    through = (Span(path=testing.FILE, line=line), Span(path=testing.FILE, line=asked))
    loaders = tuple(replace(loader, fetched=through[-1], through=through) for loader in ctx.profile.loaders)
    (found,) = RULE.match(replace(ctx, profile=replace(ctx.profile, loaders=loaders)))
    assert isinstance(found, Finding) and found.span.line in (line, line + 1)
    assert isinstance(RULE.rewrite(found, source), Rewrite)


def test_a_generator_that_does_something_to_a_batch_is_not_looked_past(tmp_path: Path) -> None:
    text = HEAD + "def put(dl):\n    for data in dl:\n        yield move(data)\n\nfor x in put(loader):\n    x.cuda()\n"
    ctx, _ = testing.context_of(RULE, text, step(10_000, kernels=COPY), tmp_path)
    through = (Span(path=testing.FILE, line=9), Span(path=testing.FILE, line=6))
    loaders = tuple(replace(loader, fetched=through[-1], through=through) for loader in ctx.profile.loaders)
    assert list(RULE.match(replace(ctx, profile=replace(ctx.profile, loaders=loaders)))) == []
