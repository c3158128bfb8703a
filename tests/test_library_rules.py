"""library-attention and library-fused-ops on real models of the libraries, captured as the product captures them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from advisor import match as matching
from advisor import registry, testing
from advisor.ingest.graph import read_graphs
from advisor.libraries import LIGER, NO_SDPA
from advisor.model import Decline, Environment, Finding, Graph, Hardware, NodeCost, Profile, Rewrite
from advisor.patch import build
from advisor.rule import Context
from advisor.source import Source
from advisor.usercode.model_types import type_of_call

pytest.importorskip("torch")
RULES = {name: item.rule for name, item in registry.load()[0].items()}

LLAMA = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4{choice}
)
{before}model = LlamaForCausalLM{made}


def step():
    ids = torch.arange(16).view(2, 8)
    return model(input_ids=ids, labels=ids{wanted}).loss
"""
GPT2 = """\
import torch
import transformers

model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, attn_implementation='eager'
    )
)


def step():
    ids = torch.arange(16).view(2, 8)
    return model(input_ids=ids, labels=ids).loss
"""
BERT = """\
import torch
from torch import nn
from transformers import BertConfig, BertModel


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
        )
        config._attn_implementation = "eager"
        self.bert = BertModel(config)

    def forward(self, ids, mask):
        return self.bert(ids, attention_mask=mask).last_hidden_state.mean()


model = Tagger()


def step():
    ids = torch.arange(16).view(2, 8)
    return model(ids, (ids < 14).long())
"""
T5 = """\
import torch
from transformers import T5Config, T5ForConditionalGeneration

config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config)
model.set_attn_implementation("eager")


def step():
    ids = torch.arange(16).view(2, 8)
    return model(input_ids=ids, labels=ids).loss
"""
DEBERTA = """\
import torch
from transformers import DebertaV2Config, DebertaV2Model

config = DebertaV2Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    relative_attention=False, attn_implementation="eager"
)
model = DebertaV2Model(config)


def step():
    return model(torch.arange(16).view(2, 8)).last_hidden_state.mean()
"""
TIMM = """\
import torch
import timm
from timm.layers import set_fused_attn

set_fused_attn({choice})
model = timm.create_model("{name}", img_size={size}, {more})


def step():
    return model(torch.ones(2, 3, {size}, {size})).mean()
"""
SWIN = """\
import torch
from torchvision.models.swin_transformer import SwinTransformer

model = SwinTransformer(patch_size=[2, 2], embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4])


def step():
    return model(torch.ones(2, 3, 16, 16)).mean()
"""
DIFFUSERS = """\
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor

model = Attention(query_dim=32, heads=4, dim_head=8)
model.set_processor(AttnProcessor())


def step():
    return model(torch.ones(2, 8, 32)).mean()
"""
X_TRANSFORMERS = """\
import torch
from x_transformers import Decoder, TransformerWrapper

model = TransformerWrapper(
    num_tokens=64,
    max_seq_len=16,
    attn_layers=Decoder(
        dim=32,
        depth=1,
        heads=4,{more}
    ),
)


def step():
    return model(torch.arange(16).view(2, 8)).mean()
"""


def captured(text: str, folder: Path) -> tuple[Source, tuple[Graph, ...]]:
    """The graphs of a script whose `step()` calls its `model`, and the script."""
    from advisor.capture.annotate import Annotation

    (folder / "train.py").write_text(text, encoding="utf-8")
    module = testing.load_module(folder / "train.py")
    annotation = Annotation([module.model], folder, str(folder))
    annotation.begin()
    module.step()
    annotation.write()
    return Source.read(folder, "train.py"), read_graphs(folder / "graph.json", folder)[0]


def context(source: Source, graphs: tuple[Graph, ...], kind: str = "cuda", only: str = "") -> Context:
    """A profile in which every operation takes a microsecond, or only those whose module class ends with `only`."""
    costs = tuple(
        NodeCost(graph=g.index, node=n.index, forward_us=0.4, backward_us=0.6, launches=1, provenance="test")
        for g in graphs
        for n in g.nodes
        if n.op.startswith("call_") and (n.module_class or "").endswith(only)
    )
    profile = Profile(
        environment=Environment(python="3", torch="2"),
        hardware=Hardware(name="test device", kind=kind),
        steps=(),
        step_us=(float(len(costs)),),
        graphs=graphs,
        costs=costs,
    )
    return matching.context(profile, lambda _: source)


def result(rule: str, text: str, folder: Path) -> tuple[Finding | Decline, Rewrite | Decline | None, str]:
    """The only result of a rule for a script, its rewrite, and the script after it."""
    source, graphs = captured(text, folder)
    (found,) = RULES[rule].match(context(source, graphs))
    if isinstance(found, Decline):
        return found, None, text
    rewrite = RULES[rule].rewrite(found, source)
    return (
        found,
        rewrite,
        build([rewrite], lambda _: source).sources["train.py"] if isinstance(rewrite, Rewrite) else text,
    )


def llama(choice: str = "", before: str = "", made: str = "(config)", wanted: str = "") -> str:
    text = LLAMA.replace("{choice}", choice).replace("{before}", before)
    return text.replace("{made}", made).replace("{wanted}", wanted)


EAGER = ',\n    attn_implementation="eager"'
SWITCHED = {
    "llama by its config": (llama(EAGER), '"eager"', '"sdpa"'),
    "llama by a keyword of the class": (
        llama(made='._from_config(config, attn_implementation="eager")'),
        "eager",
        "sdpa",
    ),
    "llama by an attribute": (llama(before="config._attn_implementation = 'eager'\n"), "eager", "sdpa"),
    "gpt2": (GPT2, "'eager'", "'sdpa'"),
    "bert inside the user's own module": (BERT, '"eager"', '"sdpa"'),
    "t5 with its position bias": (T5, '"eager"', '"sdpa"'),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_the_line_that_chose_eager_attention_is_changed_and_fused_attention_runs(name: str, tmp_path: Path) -> None:
    import torch

    pytest.importorskip("transformers")
    text, old, new = SWITCHED[name]
    found, rewrite, after = result("library-attention", text, tmp_path)
    assert isinstance(rewrite, Rewrite), (found, rewrite)
    assert after == text.replace(old, new)
    assert isinstance(found, Finding)
    assert "transformers" in found.message
    assert "eager" in Source("train.py", text).at(found.span)
    losses = []
    for number, version in enumerate((text, after)):
        (tmp_path / f"run{number}.py").write_text(version, encoding="utf-8")
        torch.manual_seed(0)
        module = testing.load_module(tmp_path / f"run{number}.py")
        module.model.eval()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            losses.append(module.step().item())
        ran = {event.name for event in profiler.events()}
        assert bool(ran & set(RULES["library-attention"].runs)) == (number == 1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


OWN_CLASS = llama(before="class Plain(LlamaForCausalLM):\n    _supports_sdpa = False\n\n\n").replace(
    "model = LlamaForCausalLM", "model = Plain"
)
LEFT_ALONE = {
    "nothing chose it": (OWN_CLASS, "no line of the script names"),
    "two lines": (
        llama(EAGER, before="config._attn_implementation = 'eager'\n"),
        "2 lines of the script choose it",
    ),
    "weights wanted": (llama(EAGER, wanted=", output_attentions=1 > 2"), "asks for the weights"),
    "computed": (llama(",\n    attn_implementation='ea' + 'ger'"), "is chosen by"),
    "deberta": (DEBERTA, "is its own and cannot be exchanged"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_no_single_line_switches_is_shown_with_the_reason(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text, reason = LEFT_ALONE[name]
    found, rewrite, _ = result("library-attention", text, tmp_path)
    assert isinstance(found, Finding)
    assert isinstance(rewrite, Decline)
    assert re.search(reason, rewrite.reason)
    assert found.span.line == text.splitlines().index(next(s for s in text.splitlines() if "model(" in s[8:])) + 1


def test_sdpa_already_is_silent(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source, graphs = captured(llama(), tmp_path)
    assert list(RULES["library-attention"].match(context(source, graphs))) == []


def test_types_without_sdpa_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != "5.24.0":
        pytest.skip("the table is of 5.24.0")
    import importlib
    import inspect

    for kind in ("gemma2", "git", "longt5"):
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        own = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
        models = [c for c in own if issubclass(c, transformers.PreTrainedModel)]
        assert models
        assert not any(c._supports_sdpa for c in models)
        assert kind in NO_SDPA
    assert not NO_SDPA & {"llama", "gpt2", "bert", "t5", "vit"}


# ------------------------------------------------------------------------------------------------------ other libraries


def test_timm_is_switched_on_again(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    text = TIMM.replace("{name}", "vit_tiny_patch16_224").replace("{size}", "32").replace("{more}", "depth=1")
    _, rewrite, after = result("library-attention", text.replace("{choice}", "False"), tmp_path)
    assert isinstance(rewrite, Rewrite)
    assert after == text.replace("{choice}", "True")


def test_torchvision_has_no_switch(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    found, rewrite, _ = result("library-attention", SWIN, tmp_path)
    assert isinstance(found, Finding)
    assert isinstance(rewrite, Decline)
    assert "torchvision has no switch" in rewrite.reason


def test_the_processor_of_diffusers_is_exchanged(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    _, rewrite, after = result("library-attention", DIFFUSERS, tmp_path)
    assert isinstance(rewrite, Rewrite)
    wanted = DIFFUSERS.replace("AttnProcessor()", "AttnProcessor2_0()").replace(
        "Attention, AttnProcessor\n",
        "Attention, AttnProcessor\nfrom diffusers.models.attention_processor import AttnProcessor2_0\n",
    )
    assert after == wanted


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", None),
        ("\n        rotary_pos_emb=True,", None),
        ("\n        attn_pre_talking_heads=False,", None),
        ("\n        attn_pre_talking_heads=True,", "has no fused attention with `attn_pre_talking_heads`"),
        ("\n        attn_softclamp_logits=True,", "has no fused attention with `attn_softclamp_logits`"),
        ("\n        rel_pos_bias=True,", "has no fused attention with `rel_pos_bias`"),
        ("\n        attn_qk_norm=True,", "`attn_qk_norm` given to Decoder may exclude"),
    ],
)
def test_x_transformers_gets_its_flag_where_nothing_excludes_it(more: str, reason: str | None, tmp_path: Path) -> None:
    pytest.importorskip("x_transformers")
    text = X_TRANSFORMERS.replace("{more}", more)
    found, rewrite, after = result("library-attention", text, tmp_path)
    assert isinstance(rewrite, Rewrite) == (reason is None), rewrite
    if reason is not None:
        told = found.reason if isinstance(found, Decline) else rewrite.reason if isinstance(rewrite, Decline) else ""
        assert reason in told
        return
    assert after.count("attn_flash=True") == 1
    assert re.sub(r"\s+attn_flash=True,", "", after) == text
    testing.load_module(tmp_path / "train.py")


# ---------------------------------------------------------------------------------------------------------------- Liger


def fused(text: str, folder: Path, only: str = "", kind: str = "cuda") -> list[Finding | Decline]:
    source, graphs = captured(text, folder)
    return list(RULES["library-fused-ops"].match(context(source, graphs, kind, only)))


def test_the_loss_comes_first_and_never_both_losses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (found,) = fused(llama(), tmp_path)
    assert isinstance(found, Finding)
    options = found.values["options"]
    assert options.count("=True") == 1
    assert "fused_linear_cross_entropy=True" in options
    assert ", cross_entropy=False" in options
    rewrite = RULES["library-fused-ops"].rewrite(found, Source.read(tmp_path, "train.py"))
    assert isinstance(rewrite, Rewrite)
    assert rewrite.safety.value == "suggest"
    after = build([rewrite], lambda _: Source.read(tmp_path, "train.py")).sources["train.py"]
    call = after.index("apply_liger_kernel_to_llama(")
    assert after.index("import apply_liger_kernel_to_llama") < call < after.index("model = LlamaForCausalLM")


def test_without_a_loss_the_largest_share_decides(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (found,) = fused(llama().replace(", labels=ids", "").replace(".loss", ".logits.mean()"), tmp_path, "LlamaRMSNorm")
    assert isinstance(found, Finding)
    assert "rms_norm=True" in found.values["options"]
    assert found.values["options"].count("=True") == 1


@pytest.mark.parametrize("text", [GPT2, BERT, T5])
def test_types_outside_the_map_are_silent(text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert fused(text, tmp_path) == []


def test_a_script_that_applies_liger_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = llama(before="apply_liger_kernel_to_llama = print\napply_liger_kernel_to_llama()\n")
    (found,) = fused(text, tmp_path)
    assert isinstance(found, Decline)
    assert found.reason == "the script applies Liger already"


def test_the_map_keeps_the_exceptions() -> None:
    assert not {"gpt2", "bert", "roberta", "t5", "bart", "vit", "opt", "bloom", "falcon", "gpt_neox", "mamba"} & set(
        LIGER
    )
    assert "fused_linear_cross_entropy" not in LIGER["granite"].useful
    assert "swiglu" not in LIGER["gpt_oss"].useful
    assert LIGER["nemotron"].useful == ("cross_entropy", "fused_linear_cross_entropy")
    assert {"rope", "swiglu"} & set(LIGER["deepseek_v4"].useful) == set()
    assert "geglu" in LIGER["gemma"].useful
    assert "swiglu" not in LIGER["gemma"].options


def test_the_options_are_those_of_liger() -> None:
    patching = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    import inspect

    for kind, liger in LIGER.items():
        function = patching.MODEL_TYPE_TO_APPLY_LIGER_FN[kind]
        assert function.__name__ == f"apply_liger_kernel_to_{liger.name}"
        given = {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "model"}
        assert set(given) == set(liger.options), kind
        assert all(given[name] for name in liger.useful if name != "cross_entropy"), kind


def test_naive_attention_and_library_attention_name_one_place_once(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source, graphs = captured(llama(EAGER), tmp_path)
    ctx = context(source, graphs)
    rules = [RULES["naive-attention"], RULES["library-attention"]]
    found = matching.match(ctx, rules).findings
    assert [f.rule for f in found] == ["library-attention"]


# ----------------------------------------------------------------------------------------- what another caller may want


NEEDED = {
    "a hook": ("def watch(layer):\n    layer.register_forward_hook(print)\n", "may read the weights"),
    "weights read": ("def look(out):\n    return out.attentions[0]\n", "asks for the weights"),
    "weights by a dictionary": ("ASK = {'output_attentions': True}\n", "asks for the weights"),
    "weights by setattr": ("def ask():\n    setattr(config, 'output_attentions', True)\n", "asks for the weights"),
    "head mask": ("def masked(ids, heads):\n    return model(ids, head_mask=heads)\n", "asks for the weights"),
    "second derivative": (
        "def penalty(loss, x):\n    return torch.autograd.grad(loss, x, create_graph=True)\n",
        "differentiates gradients again",
    ),
    "a computed name": ("def ask(name):\n    setattr(config, name, True)\n", "may ask for the weights"),
    "a class without": ("class Other:\n    _supports_sdpa = False\n", "no other attention"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_written_out_attention_stays_where_the_script_may_need_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    more, reason = NEEDED[name]
    _, rewrite, _ = result("library-attention", f"{llama(EAGER)}\n\n{more}", tmp_path)
    assert isinstance(rewrite, Decline)
    assert reason in rewrite.reason


def test_a_dictionary_of_options_is_changed_and_options_that_are_off_are_none(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = llama(",\n    **{'attn_implementation': 'eager'}", wanted=", output_attentions=False")
    _, rewrite, after = result("library-attention", text, tmp_path)
    assert isinstance(rewrite, Rewrite)
    assert after == text.replace("'eager'", "'sdpa'")


AUTO = """\
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

name = "llama"
small = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
)
{config}
model = {model}


def step():
    ids = torch.arange(16).view(2, 8)
    return model(input_ids=ids, labels=ids).loss
"""
MADE = "AutoModelForCausalLM.from_config(config, attn_implementation='eager')"
TABLE = "configs = {'llama': LlamaConfig(**small), 'gemma2': Gemma2Config(**small)}"
BY_NAME = "chosen while the script runs"
AUTOS = {
    "one config": ("config = LlamaConfig(**small)", MADE, None),
    "in the call": ("", MADE.replace("config,", "LlamaConfig(**small),"), None),
    "a table": (TABLE, MADE.replace("config,", "configs[name],"), BY_NAME),
    "a condition": ("config = LlamaConfig(**small) if name else Gemma2Config(**small)", MADE, BY_NAME),
    "two branches": (
        "if name:\n    config = LlamaConfig(**small)\nelse:\n    config = Gemma2Config(**small)",
        MADE,
        BY_NAME,
    ),
    "an argument": (f"def build(config):\n    return {MADE}\n", "build(LlamaConfig(**small))", BY_NAME),
    "an attribute": (
        f"{TABLE}\nconfig = configs['llama']\nconfig._attn_implementation = 'eager'",
        "AutoModelForCausalLM.from_config(config)",
        BY_NAME,
    ),
    "two classes": (
        "config = LlamaConfig(**small)\nother = Gemma2Config(**small)\nconfig._attn_implementation = 'eager'",
        "AutoModelForCausalLM.from_config(config)",
        "several types of model, and not every type has sdpa: Gemma2, Llama",
    ),
}


@pytest.mark.parametrize("name", AUTOS)
def test_a_line_that_may_make_another_type_of_model_is_left_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config, model, reason = AUTOS[name]
    text = AUTO.replace("{config}", config).replace("{model}", model)
    _, rewrite, after = result("library-attention", text, tmp_path)
    if reason is None:
        assert isinstance(rewrite, Rewrite), rewrite
        assert after == text.replace("'eager'", "'sdpa'")
    else:
        assert isinstance(rewrite, Decline)
        assert reason in rewrite.reason


def test_a_checkpoint_named_by_a_literal_is_one_type() -> None:
    def of(text: str) -> str | None:
        source = Source("a.py", f"from transformers import AutoModel, AutoConfig, BertModel\n{text}\n")
        (call, *_) = (n for n in ast.walk(source.tree) if isinstance(n, ast.Call))
        return type_of_call(source, call)

    assert of("AutoModel.from_pretrained('gpt2')") == "gpt2"
    assert of("AutoModel.from_config(AutoConfig.from_pretrained('gpt2'))") == "gpt2"
    assert of("BertModel.from_pretrained(args.path)") == "Bert"
    assert of("AutoModel.from_pretrained(args.path)") is None
    assert of("AutoModel.from_pretrained(NAME)\nNAME = 'gpt2'") == "gpt2"


ATTENTION = """\
import torch
from x_transformers.x_transformers import Attention


class Mine(Attention):
    def __init__(self, dim, heads, talk):
        super().__init__(dim, heads=heads, pre_talking_heads=talk)


model = {made}


def step():
    return model(torch.ones(2, 8, 32)).mean()
"""


@pytest.mark.parametrize(
    "made",
    [
        "Mine(32, heads=4, talk=True)",
        "Attention(32, heads=4, sparse_topk=4)",
        "Attention(32, heads=4, qk_norm=True, softclamp_logits=True)",
    ],
)
def test_attention_that_x_transformers_refuses_to_fuse_is_no_finding(made: str, tmp_path: Path) -> None:
    pytest.importorskip("x_transformers")
    source, graphs = captured(ATTENTION.replace("{made}", made), tmp_path)
    found = list(RULES["library-attention"].match(context(source, graphs)))
    assert found
    assert all(isinstance(f, Decline) for f in found), found


def test_attention_of_x_transformers_alone_gets_its_own_flag(tmp_path: Path) -> None:
    pytest.importorskip("x_transformers")
    text = ATTENTION.replace("{made}", "Attention(32, heads=4)").replace("pre_talking_heads=talk", "")
    _, rewrite, after = result(
        "library-attention", text.split("class Mine")[0] + text[text.index("model =") :], tmp_path
    )
    assert isinstance(rewrite, Rewrite)
    assert "model = Attention(32, heads=4, flash=True)\n" in after


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("for block in model.blocks:\n    block.attn.fused_attn = False\n", "sets fused_attn of the modules itself"),
        ("model.blocks[0].attn.attn_drop.register_forward_hook(lambda m, i, o: None)\n", "may read the weights"),
    ],
)
def test_timm_stays_where_the_script_wants_the_weights(line: str, reason: str, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    text = TIMM.replace("{name}", "vit_tiny_patch16_224").replace("{size}", "32").replace("{more}", "depth=1")
    _, rewrite, _ = result("library-attention", f"{text.replace('{choice}', 'False')}\n{line}", tmp_path)
    assert isinstance(rewrite, Decline)
    assert reason in rewrite.reason


def test_the_fused_loss_is_not_suggested_where_training_reads_the_logits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train = "\n\ndef train(ids):\n    out = model(ids, labels=ids)\n    out.loss.backward()\n"
    (found,) = fused(f"{llama()}{train}    return out.logits.argmax(-1)\n", tmp_path)
    assert isinstance(found, Finding)
    assert "fused_linear_cross_entropy=False" in found.values["options"]
    (found,) = fused(f"{llama()}{train}\n\ndef evaluate(ids):\n    return model(ids).logits\n", tmp_path)
    assert isinstance(found, Finding)
    assert "fused_linear_cross_entropy=True" in found.values["options"]
