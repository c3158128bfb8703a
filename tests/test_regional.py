"""Where a model is made and ready in a script, and what of it is compiled: read off text and hand-made graphs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

import pytest

from advisor import codemod, regional
from advisor.errors import SourceError
from advisor.model import Environment, Graph, Hardware, LoopCall, Node, Operators, Profile, Ref, Span
from advisor.rule import Context
from advisor.source import Source
from advisor.usercode.origin import Origin, Unclear, origin
from advisor.usercode.runlength import planned_steps

HEAD = """\
import copy
import os
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, cfg=None):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        if sys.argv:
            self.h = nn.ModuleList(Block() for _ in range(4))
        else:
            self.rnn = nn.LSTM(8, 8)


"""
LOOP = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches:
    model(batch).sum().backward()
    optimizer.step()
"""
LOOPS = "for block in model.h:\n    block.compile()\n"


def frames(source: Source, *texts: str) -> tuple[Span, ...]:
    """The positions of calls by their text, outermost first."""
    calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
    return tuple(source.span(next(c for c in calls if source.segment(c) == text)) for text in texts)


def made(text: str, *texts: str, **others: str) -> Origin:
    """The origin of the model in a script, by the calls that lead to that of the model."""
    source = Source("train.py", text)
    files = {"train.py": source, **{f"{stem}.py": Source(f"{stem}.py", other) for stem, other in others.items()}}
    call = LoopCall(name="module", frames=frames(source, *(texts or ("model(batch)",))), calls=4, per_step=1, host_us=0)
    return origin(tuple(files.values()), files.__getitem__, call)


def blocks(count: int = 4, path: str = "h", **differ: object) -> Graph:
    """The graph of a chain of blocks with two operations each."""
    nodes = [Node(index=0, name="x", op="placeholder", target="x", shape=(8, 8), dtype="float32")]
    for i in range(2 * count):
        shape = (8, 8) if i // 2 != differ.get("other", -1) else (8, 4)
        nodes.append(
            Node(
                index=i + 1,
                name=f"n{i}",
                op="call_function",
                target=("torch.sin", "torch.exp")[i % 2],
                args=(Ref(i),),
                shape=shape,
                dtype="float32",
                module=f"{path}.{i // 2}",
                module_class="__main__.Block",
            )
        )
    return Graph(index=0, nodes=tuple(nodes))


def context(text: str, graph: Graph, *texts: str, command: Sequence[str] = ()) -> Context:
    source = Source("train.py", text)
    calls = [
        LoopCall(name="module", frames=frames(source, *(texts or ("model(batch)",))), calls=4, per_step=1, host_us=0)
    ]
    if "optimizer.step()" in text:
        calls.append(
            LoopCall(name="optimizer.step", frames=frames(source, "optimizer.step()"), calls=4, per_step=1, host_us=0)
        )
    profile = Profile(
        environment=Environment(python="3", torch="2", command=tuple(command)),
        hardware=Hardware(name="CPU", kind="cpu"),
        steps=(),
        step_us=(1000.0,),
        graphs=(graph,),
        calls=tuple(calls),
    )
    return Context(profile, lambda path: source, script="train.py")


def edited(text: str, graph: Graph | None = None, *texts: str) -> str:
    """A script with its blocks compiled where that can be, else its model."""
    ctx = context(text, graph or blocks(), *texts)
    plan = regional.compilation(ctx, ctx.graphs[0])
    edits = regional.compiled_whole(plan) if plan.repeated is None else regional.compiled_blocks(plan)
    return codemod.apply(plan.origin.source, edits)


STRAIGHT = [
    ("model = Net()\n", ""),
    ("model = Net().to('cuda').train()\n", ""),
    ("model = Net()\nmodel.load_state_dict(torch.load('w.pt'))\nmodel = model.cuda()\n", ""),
    ("model = Net()\nmodel.to('cuda')\n", "model.train()\n"),
    ("with torch.device('cuda'):\n    model = Net()\n", ""),
    ("model, other = Net().cuda(), Other()\n", ""),
    ("model = Net()\n", "model = DDP(model)\n"),
    ("model = Net().to('cuda')\n", "if torch.distributed.is_initialized():\n    model = DDP(model, device_ids=[0])\n"),
    ("model = Net()\nmodel.gradient_checkpointing_enable()\n", "fully_shard(model)\n"),
    ("model = Net()\n", "for layer in model.h:\n    fully_shard(layer)\nfully_shard(model)\n"),
    ("if 'resume' in sys.argv:\n    model = Net(torch.load('c'))\nelse:\n    model = Net()\n", ""),
    ("def build(cfg):\n    net = Net(cfg)\n    return net.cuda()\n\n\nmodel = build(None)\n", ""),
    ("if sys.argv:\n    model = Net()\nelse:\n    sys.exit(1)\n", ""),
    ("if sys.argv:\n    model = Net()\nelif DDP:\n    model = Net(1)\n", "model.train()\n"),
    ("try:\n    model = Net(1)\nexcept OSError:\n    model = Net()\n", ""),
    ("model = Net()\nmodel.head = nn.Linear(8, 3)\n", ""),
]


@pytest.mark.parametrize(("before", "behind"), STRAIGHT)
def test_blocks_are_compiled_behind_the_last_statement_that_readies_the_model(before: str, behind: str) -> None:
    result = edited(HEAD + before + behind + LOOP)
    assert result == HEAD + before + LOOPS + behind + LOOP
    ast.parse(result)


@pytest.mark.parametrize("first", ["", "model = None\n"])
def test_a_model_of_one_case_is_compiled_in_that_case(first: str) -> None:
    """Where the other case goes on without a model the script would fail."""
    loop = "".join(f"    {line}\n" for line in LOOP.splitlines())
    made, rest = f"{first}if sys.argv:\n    model = Net()\n", f"if sys.argv:\n{loop}"
    result = edited(HEAD + made + rest)
    assert result == HEAD + made + "    for block in model.h:\n        block.compile()\n" + rest


AFTERWARDS = [
    "model = Net()\n{here}def train():\n    for x in batches:\n        model(batch)\n\n\ntrain()\nmodel.cpu()\n",
    "def main():\n    model = Net()\n{here}    def train():\n        model(batch)\n    train()\n    model.cpu()\n",
]


@pytest.mark.parametrize("text", AFTERWARDS)
def test_what_is_done_once_the_model_is_trained_does_not_ready_it(text: str) -> None:
    """The function that calls the model reads a name from outside."""
    unit = "    " if "main" in text else ""
    added = "".join(f"{unit}{line}\n" for line in LOOPS.splitlines())
    result = edited(HEAD + text.replace("{here}", ""), None, "train()", "model(batch)")
    assert result == HEAD + text.replace("{here}", added)


def test_a_parameter_that_is_wrapped_or_given_another_model() -> None:
    text = """\
def train(model):
    {line}
    for batch in batches:
        model(batch)


net = timm.create_model("vit")
train(net)
"""
    head, calls = HEAD.replace("import sys\n", "import sys\nimport timm\n"), ("train(net)", "model(batch)")
    result = edited(head + text.replace("{line}", "model = DDP(model)"), blocks(path="module.h"), *calls)
    assert 'net = timm.create_model("vit")\nfor block in net.h:\n    block.compile()\n' in result
    for line, reason in (("model = adapted(model)", "not followed"), ("model = Net()", "another model in `train`")):
        with pytest.raises(Unclear, match=reason):
            edited(head + text.replace("{line}", line), blocks(path="base.h"), *calls)


def test_a_model_handed_to_a_function_is_compiled_where_it_is_made() -> None:
    text = """\
def epoch(net, optimizer):
    for batch in batches:
        net(batch).sum().backward()
        optimizer.step()


def main():
    block = 3
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    epoch(network, optimizer)


main()
"""
    result = edited(HEAD + text, None, "main()", "epoch(network, optimizer)", "net(batch)")
    made = "    network = Net()\n"
    assert result == HEAD + text.replace(made, made + "    for layer in network.h:\n        layer.compile()\n")


def test_an_attribute_is_compiled_in_the_method_that_sets_it() -> None:
    text = """\
class Trainer:
    def __init__(self, model, device):
        self.model = model
        self.model.to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        self.model(batch).sum().backward()


trainer = Trainer(Net(), "cpu")
trainer.step(batch)
"""
    result = edited(HEAD + text, None, "trainer.step(batch)", "self.model(batch)")
    ready = "        self.model.to(device)\n"
    added = "        for block in self.model.h:\n            block.compile()\n"
    assert result == HEAD + text.replace(ready, ready + added)


WHOLE = [
    ("model = timm.create_model(sys.argv[1])\n", "another class"),
    ("model = Net() if len(sys.argv) else Other()\n", "another class"),
    ("model = Other()\n", "without the blocks"),
    ("if 'o' in sys.argv:\n    model = Other()\nelse:\n    model = Net()\n", "another class"),
    ("model = torch.hub.load('owner/name', sys.argv[1])\n", "another class"),
    ("model = torch.load('model.pt')\n", None),
]


@pytest.mark.parametrize(("before", "reason"), WHOLE)
def test_the_whole_model_is_compiled_where_its_blocks_are_not_sure(before: str, reason: str | None) -> None:
    text = HEAD.replace("import sys\n", "import sys\nimport timm\n") + before + LOOP
    ctx = context(text, blocks())
    plan = regional.compilation(ctx, ctx.graphs[0])
    if reason is None:
        assert not (plan.repeated is not None and plan.origin.kind is None)
        return
    assert plan.repeated is None and plan.reason is not None and reason.replace("another", "of another") in plan.reason
    assert edited(text).count("model.compile()") == 1


UNCLEAR = [
    ("model = DDP(net)\n", "wrapped where it is made"),
    ("if DDP:\n    model = DDP(Net())\nelse:\n    model = Net()\n", "in one case and not in another"),
    ("def build():\n    return DDP(Net())\n\n\nmodel = build()\n", "wraps the model"),
    ("model = Net()\nmodel = peft(model)\n", "not followed"),
    ("for model in (Net(), Net()):\n    pass\n", "not followed"),
    ("from models import model\n", "not made in this file"),
    ("model = Net() if sys.argv else None\nif model is None:\n    sys.exit()\n", "not made in every case"),
    ("if sys.argv:\n    model = Net()\nelif DDP:\n    model = Net()\nif DDP:\n    sys.exit()\n", "in every case"),
    ("def setup():\n    global model\n    model = Net()\n\n\nmodel = None\n", "global"),
]


@pytest.mark.parametrize(("before", "reason"), UNCLEAR)
def test_what_is_not_followed_is_said(before: str, reason: str) -> None:
    with pytest.raises(Unclear, match=reason):
        made(HEAD + before + LOOP)


WRAPPINGS = [
    ("", "if DDP:\n    net = DDP(net)\n"),
    ("", "net = DDP(net)\n"),
    ("        if DDP:\n            model = DDP(model)\n", ""),
    ("", ""),
]


@pytest.mark.parametrize(("inside", "outside"), WRAPPINGS)
def test_a_model_that_is_wrapped_before_it_is_an_attribute(inside: str, outside: str) -> None:
    """Where the wrapper holds the blocks as `module.h` in one run and they are `h` in another."""
    text = f"""\
class Trainer:
    def __init__(self, model):
{inside}        self.model = model

    def run(self):
        self.model(batch)


net = Net()
{outside}trainer = Trainer(net)
trainer.run()
"""
    result = edited(HEAD + text, None, "trainer.run()", "self.model(batch)")
    assert ("        self.model.compile()\n" in result) is bool(inside or outside)
    assert ("        for block in self.model.h:\n" in result) is (not inside + outside)


def test_a_model_made_anew_in_every_turn_is_compiled_in_that_turn() -> None:
    text = "for fold in range(3):\n    model = Net()\n    for batch in batches:\n        model(batch)\n"
    result = edited(HEAD + text)
    assert "    model = Net()\n    for block in model.h:\n        block.compile()\n    for batch" in result


INHERITED = """\
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = {made}


class Small(Base):
    pass


model = Small()
"""


@pytest.mark.parametrize(
    ("container", "regions"),
    [
        ("nn.ModuleList(Block() for _ in range(4))", True),
        ("nn.ModuleDict({str(i): Block() for i in range(4)})", False),
        ("nn.ModuleList(Block() for _ in range(4)) if sys.argv else nn.LSTM(8, 8)", False),
    ],
)
def test_a_container_that_a_base_makes(container: str, regions: bool) -> None:
    result = edited(HEAD + INHERITED.replace("{made}", container) + LOOP)
    assert ("for block in model.h:" in result) is regions
    assert ("model.compile()" in result) is not regions


def test_blocks_inside_a_wrapper_are_reached_through_it() -> None:
    inside = blocks(path="module.h")
    result = edited(HEAD + "model = DDP(Net().cuda())\n" + LOOP, inside)
    assert "model = DDP(Net().cuda())\nfor block in model.module.h:\n    block.compile()\n" in result
    result = edited(HEAD + "model = Net()\nmodel = DDP(model)\n" + LOOP, inside)
    assert "model = Net()\nfor block in model.h:\n    block.compile()\nmodel = DDP(model)\n" in result


def test_a_wrapped_model_is_not_compiled_as_a_whole() -> None:
    with pytest.raises(Unclear, match="reduced over processes"):
        edited(HEAD + "model = DDP(Other())\n" + LOOP, blocks(path="module.h"))


def test_statements_on_one_line_are_left_alone() -> None:
    with pytest.raises(codemod.CannotEdit):
        edited(HEAD + "model = Net(); model.cuda()\n" + LOOP)


def test_the_file_may_end_without_the_end_of_a_line() -> None:
    text = HEAD + "def run(model):\n    model(batch)\n\n\nmodel = Net()\nrun(model)"
    assert "model = Net()\nfor block in model.h:\n    block.compile()\nrun(model)" in edited(
        text, None, "run(model)", "model(batch)"
    )


# --------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_that_differ_are_none() -> None:
    assert regional.repeated(blocks(other=2)) is None
    assert regional.repeated(blocks(1)) is None
    found = regional.repeated(blocks(3, "transformer.h"))
    assert found is not None and found.containers == ("transformer.h",) and found.count == 3


def test_blocks_of_stages_are_compiled_stage_by_stage() -> None:
    nodes: list[Node] = []
    for stage in range(2):
        for node in blocks(2, f"stages.{stage}.blocks").nodes[1:]:
            shape = (8, 8 * (stage + 1))
            nodes.append(
                Node(**{**{f: getattr(node, f) for f in FIELDS}, "index": len(nodes), "shape": shape, "args": ()})
            )
    text = HEAD.replace("self.h =", "self.stages =") + "model = Net()\n" + LOOP
    result = edited(text, Graph(index=0, nodes=tuple(nodes)))
    assert "for layer in model.stages:\n    for block in layer.blocks:\n        block.compile()\n" in result


def test_blocks_that_not_every_stage_has() -> None:
    """A layer between the stages has none, and the first element of a list without a name no more than the others."""
    head = HEAD.replace("self.h =", "self.stages =") + "model = Net()\n" + LOOP
    for path, other in (("stages.{}.blocks", "stages.2.reduce"), ("{}.h", "2")):
        nodes: list[Node] = []
        for stage in (0, 1):
            nodes += blocks(2, path.format(stage)).nodes[1:]
        text = edited(head, Graph(index=0, nodes=(*nodes, Node(**_fields(nodes[0]), index=9, module=other))))
        assert "model.compile()" in text and "block" not in text.split("model = Net()")[1]


LISTS = """\
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([])
        for _ in range(4):
            self.h.append({pair})


model = Pairs()
"""


@pytest.mark.parametrize("pair", ["nn.ModuleList([Block(), Block()])", "nn.Sequential(Block(), Block())"])
def test_lists_that_the_model_takes_modules_from(pair: str) -> None:
    nodes = tuple(replace(node, module=f"{node.module}.{i % 2}") for i, node in enumerate(blocks().nodes[1:]))
    result = edited(HEAD + LISTS.replace("{pair}", pair) + LOOP, Graph(index=0, nodes=nodes))
    assert ("model.compile()" in result) is ("ModuleList([B" in pair)
    assert ("block.compile()" in result) is ("Sequential" in pair)


def _fields(node: Node) -> dict[str, object]:
    return {name: getattr(node, name) for name in ("name", "op", "target")}


FIELDS = ("name", "op", "target", "dtype", "module", "module_class")

# ------------------------------------------------------------------------------------------------------------ obstacles

OBSTACLES = [
    ("model = torch.compile(model)\n", "compiler of its own"),
    ("model.compile()\n", "compiler of its own"),
    ("step = torch.compile(step)\n", "compiler of its own"),
    ("scripted = torch.jit.script(model)\n", "torch.jit"),
    ("average = copy.deepcopy(model)\n", "copied or saved"),
    ("torch.save(model, 'model.pt')\n", "copied or saved"),
    ("model.h[0].register_forward_hook(print)\n", "a hook"),
    ("grads = torch.autograd.grad(loss, params, create_graph=True)\n", "differentiates gradients again"),
    ("graph = torch.cuda.CUDAGraph()\n", "CUDA graphs itself"),
    ("replicas = nn.DataParallel(model)\n", "replicas"),
    ("loss.backward(retain_graph=True)\n", "the graph of a backward pass is kept"),
    ("loss.backward(None, True)\n", "the graph of a backward pass is kept"),
    ("torch.autograd.grad(loss, params, retain_graph=len(params) > 1)\n", "the graph of a backward pass is kept"),
    ("writer.add_graph(model, batch)\n", "`add_graph` traces the model"),
    ("torch.onnx.export(model, batch, 'm.onnx')\n", "traces the model"),
    ("class Mine:\n    def compile(self):\n        pass\n\n\n", "a `compile` of its own"),
]


@pytest.mark.parametrize(("line", "reason"), OBSTACLES)
def test_what_forbids_to_compile(line: str, reason: str) -> None:
    ctx = context(HEAD + "model = Net()\n" + line + LOOP, blocks())
    found = regional.obstacle(ctx, ctx.graphs[0])
    assert found is not None and reason in found[1]


@pytest.mark.parametrize(
    "line",
    [
        "pattern = re.compile('a')\n",
        "torch.save(model.state_dict(), 'm')\n",
        "layers = [copy.deepcopy(layer)]\n",
        "loss.backward(retain_graph=False)\n",
        "exporting = torch.onnx.is_in_onnx_export()\n",
    ],
)
def test_what_does_not_forbid_it(line: str) -> None:
    ctx = context("import re\n" + HEAD + "model = Net()\n" + line + LOOP, blocks())
    assert regional.obstacle(ctx, ctx.graphs[0]) is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("def main():\n    torch.compile(Net())\n\nif __name__ == '__main__':\n    main()\n", None),
        ("if __name__ == '__main__':\n    torch.save(model, 'model.pt')\n", None),
        ("torch.compile(Net())\n", "compiler of its own"),
        ("def loss_of(model):\n    return torch.compile(model)\n\nlosses = [loss_of]\n", "compiler of its own"),
        ("def main():\n    torch.autograd.grad(loss, params, create_graph=True)\n", "differentiates gradients again"),
    ],
)
def test_another_script_that_imports_the_model(line: str, reason: str | None) -> None:
    ctx = context("from net import Net\n" + HEAD + "model = Net()\n" + LOOP, blocks())
    texts = {
        "train.py": ctx.read("train.py").text,
        "net.py": "class Net:\n    pass\n",
        "other.py": f"import torch\nfrom train import Net\n\n{line}",
    }
    files = {path: Source(path, text) for path, text in texts.items()}

    def read(path: str) -> Source:
        if path not in files:
            raise SourceError(f"there is no {path}")
        return files[path]

    found = regional.obstacle(replace(ctx, read=read, files_in=lambda _: tuple(files)), ctx.graphs[0])
    assert found is None if reason is None else found is not None and reason in found[1]


def test_random_draws_and_dropout_that_drops() -> None:
    def drawing(target: str, *args: object) -> str | None:
        node = Node(index=1, name="d", op="call_function", target=target, args=(Ref(0), *args), shape=(8, 8))
        ctx = context(HEAD + "model = Net()\n" + LOOP, Graph(index=0, nodes=(blocks().nodes[0], node)))
        found = regional.obstacle(ctx, ctx.graphs[0])
        return None if found is None else found[1]

    assert drawing("torch.rand_like") is not None
    assert drawing("torch.nn.functional.dropout", 0.1, True) is not None
    assert drawing("torch.nn.functional.dropout", 0.0, True) is None
    assert drawing("torch.nn.functional.dropout", 0.1, False) is None


def test_sizes_that_vary_between_steps_are_seen_in_the_trace() -> None:
    def operators(*rows: int) -> Operators:
        count = len(rows)
        return Operators(
            name=("aten::linear",) * count,
            start_us=tuple(float(i) for i in range(count)),
            duration_us=(1.0,) * count,
            thread=(1,) * count,
            sequence=(-1,) * count,
            forward_thread=(0,) * count,
            parent=(-1,) * count,
            step=tuple(range(count)),
            shapes=tuple(((n, 8), (8, 8)) for n in rows),
            dtypes=((),) * count,
        )

    ctx = context(HEAD + "model = Net()\n" + LOOP, blocks())
    for rows, varies in (((4, 4), False), ((4, 5), True), ((4,), False)):
        object.__setattr__(ctx.profile, "operators", operators(*rows))
        assert regional.varying(ctx, ctx.graphs[0]) is varies


# ----------------------------------------------------------------------------------------------------------- run length

PARSER = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("-n", "--steps", type=int, default=400)
args = parser.parse_args()
STEPS, MORE = 30, int(os.environ.get("MORE", 4))
EPOCHS = 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{loop}
    model(batch)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loop", "command", "steps"),
    [
        ("for step in range(100):", (), 100),
        ("for step in range(1, args.steps + 1):", (), 400),
        ("for step in range(args.steps):", ("train.py", "--steps", "7"), 7),
        ("for step in tqdm(range(args.steps)):", ("train.py", "--steps=9"), 9),
        ("for step in range(args.steps):", ("train.py", "-n", "8"), 8),
        ("parser.set_defaults(**config)\nfor step in range(args.steps):", (), None),
        ("exec(open('config.py').read())\nfor step in range(EPOCHS):", (), None),
        ("for step in range(EPOCHS):", (), 3),
        ("for step in range(MORE):", (), None),
        ("for batch in loader:", (), None),
        ("while True:", (), None),
    ],
)
def test_the_steps_that_a_run_is_to_make(loop: str, command: tuple[str, ...], steps: int | None) -> None:
    text = HEAD + "model = Net()\n" + PARSER.replace("{loop}", loop)
    assert planned_steps(context(text, blocks(), command=command)) == steps


def test_epochs_multiply() -> None:
    loop = "for epoch in range(3):\n    for i in range(5):\n        model(batch)\n        optimizer.step()\n"
    text = HEAD + "model = Net()\n" + loop
    assert planned_steps(context(text, blocks())) == 15


@pytest.mark.parametrize(
    ("outer", "steps"),
    [
        ("for e in range(30):\n    epoch(model, 1)\n", 150),
        ("for e in loader:\n    epoch(model, 1)\n", None),
        ("[epoch(model, 1) for e in range(4)]\n", None),
        ("epoch(model, 1)\nepoch(model, 2)\n", None),
        ("epoch(model, 1)\n", 5),
    ],
)
def test_epochs_around_the_function_that_trains_multiply(outer: str, steps: int | None) -> None:
    loop = "def epoch(model, e):\n    for i in range(5):\n        model(batch)\n        optimizer.step()\n\n\n"
    ctx = context(HEAD + "model = Net()\n" + loop + outer, blocks())
    through = frames(ctx.read("train.py"), "epoch(model, 1)", "optimizer.step()")
    calls = tuple(c if c.name == "module" else replace(c, frames=through) for c in ctx.profile.calls)
    assert planned_steps(replace(ctx, profile=replace(ctx.profile, calls=calls))) == steps


def test_a_short_run_does_not_make_up_for_compiling() -> None:
    assert regional.too_short(None, 1.0, 1e9) is None
    assert regional.too_short(1000, 20_000.0, 10e6) is None
    assert regional.too_short(1000, 2_000.0, 10e6) == "1000 steps save at most 2 s, and compiling takes about 10 s"
