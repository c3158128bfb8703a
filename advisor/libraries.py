"""What installed model libraries can switch to: which model types have no SDPA form, which kernels Liger replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Model types of transformers 5.24 that call the exchangeable attention function although no class of theirs sets
# `_supports_sdpa`: asking them for "sdpa" raises. Types with classes of both kinds are not listed.
NO_SDPA = frozenset(
    {
        "align", "bigbird_pegasus", "bridgetower", "clap", "deepseek_v4", "flint", "gemma2", "git", "gpt_oss",
        "granite_swa", "granitemoe_swa", "hy_v4", "informer", "inkling2_loop", "longt5", "markuplm", "mimo_v2_flash",
        "nllb_moe", "openai_privacy_filter", "patchtsmixer", "pegasus_x", "speech_to_text", "splinter",
        "switch_transformers", "t5gemma", "time_series_transformer", "vaultgemma", "videoprism",
    }
)  # fmt: skip

# timm 1.0.31: files that ask for use_fused_attn(experimental=True), which set_fused_attn(True) alone leaves off.
TIMM_EXPERIMENTAL = frozenset({"swin_transformer.py", "visformer.py", "xcit.py"})

# x-transformers 2.31.10: arguments of its layer stacks that leave the attention as attend.py's flash path computes it;
# of the others some are refused there (talking heads, top-k, relative biases) and the rest were not read.
X_TRANSFORMERS_PLAIN = frozenset(
    {
        "dim", "depth", "heads", "causal", "cross_attend", "only_cross", "attn_flash", "attn_dim_head", "attn_dropout",
        "attn_kv_heads", "attn_one_kv_head", "ff_mult", "ff_dropout", "ff_glu", "ff_swish", "ff_no_bias",
        "layer_dropout", "pre_norm", "rotary_pos_emb", "use_rmsnorm", "use_scalenorm",
    }
)  # fmt: skip

# The same for its class Attention, which is told `flash`.
X_TRANSFORMERS_ATTENTION = frozenset(
    {"dim", "dim_head", "dim_context", "heads", "causal", "dropout", "kv_heads", "one_kv_head", "flash"}
)

# x-transformers 2.31.10: arguments of Attention (of a layer stack with "attn_" before them) and of layer stacks with
# which it raises for flash attention, or with which its flash path leaves the softmax function out.
X_TRANSFORMERS_REFUSED = frozenset(
    {
        "sigmoid", "hard", "sparse_topk", "inverted_attention", "talking_heads", "pre_talking_heads",
        "post_talking_heads", "pre_scale_post_talking_heads", "selective", "cog_signed", "head_learned_sink",
        "softclamp_logits", "use_cope", "gumbel_softmax", "custom_attn_fn", "rel_pos_bias", "dynamic_pos_bias",
        "residual_attn", "cross_residual_attn",
    }
)  # fmt: skip

LOSS = ("cross_entropy", "fused_linear_cross_entropy")
USUAL = ("rope", "rms_norm", "swiglu", *LOSS)
UNROTATED = ("rms_norm", "swiglu", *LOSS)  # rope raises or does nothing
GEGLU = ("rope", "rms_norm", "geglu", *LOSS)


@dataclass(frozen=True)
class Liger:
    """One function of Liger: `apply_liger_kernel_to_<name>`, the options that change something, and all it has."""

    name: str
    useful: tuple[str, ...]
    options: tuple[str, ...]


def _liger(useful: tuple[str, ...], options: tuple[str, ...], *names: str) -> dict[str, Liger]:
    return {name: Liger(name, useful, options) for name in names}


# Liger-Kernel 0.8.5, liger_kernel/transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN, by the folder that
# transformers keeps a model type in. An option that raises, only warns, or is off because the model has its own form is
# not in `useful`. Folders whose classes need different functions (gemma3, gemma4) and functions that patch whatever
# language model is inside (internvl, llava, smolvlm) are given for the loss alone or left out.
LIGER: Mapping[str, Liger] = {
    **_liger(
        USUAL, USUAL, "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen3", "qwen3_moe",
        "qwen2_5_vl", "qwen3_vl_moe", "smollm3", "phi3", "falcon_h1", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4",
    ),
    **_liger(USUAL, (*USUAL, "layer_norm"), "llama4", "mllama", "muse_glimmer", "qwen2_vl"),
    **_liger(UNROTATED, USUAL, "deepseek_v2", "deepseek_v3", "glm4", "glm4v", "glm4v_moe", "qwen3_next", "qwen3_5",
             "qwen3_5_moe"),
    **_liger(("rms_norm", *LOSS), USUAL, "deepseek_v4"),
    **_liger(("rope", "rms_norm", *LOSS), USUAL, "gpt_oss", "qwen3_vl"),
    **_liger(GEGLU, GEGLU, "gemma", "gemma2"),
    **_liger(GEGLU, (*GEGLU, "layer_norm"), "paligemma"),
    **_liger(("rope", "rms_norm", "swiglu", "cross_entropy"), USUAL, "granite"),
    **_liger(LOSS, ("relu_squared", *LOSS), "nemotron"),
    **_liger(LOSS, LOSS, "llava"),
    **_liger(LOSS, ("rms_norm", "layer_norm", *LOSS), "internvl", "smolvlm"),
    **_liger(("rope", "rms_norm", "swiglu"), ("rope", "rms_norm", "swiglu"), "pixtral"),
}  # fmt: skip
