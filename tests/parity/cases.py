"""Tiny random checkpoints of every architecture, under the names that the hub has, each with what
computes it in transformers.

Where transformers has the code, its own class writes the folder. Where an architecture's code is
only in its repository, the nearest relative of transformers is the oracle, and its weights are
written under the architecture's names and in its layout.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Names that transformers' older classes have for some of these.
_GPT = ("intermediate_size", "num_key_value_heads")
_BLOOM = (*_GPT, "num_hidden_layers", "num_attention_heads")
_SHORT = (*_BLOOM, "max_position_embeddings", "hidden_size")

Tensors = dict[str, Tensor]
Logits = Callable[[PreTrainedModel, Tensor], Tensor]


def plainly(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """ids [n] -> logits [n, vocab]."""
    found: Tensor = model(ids[None]).logits[0]
    return found


@dataclass(frozen=True)
class Case:
    """model_type: of transformers, less the sizes in `drop`, with `changes`.

    architecture: what config.json shall say, where not what transformers writes.
    rewrite: tensors and config.json of the relative -> those of the architecture.
    logits: how the oracle is asked.
    attention: transformers' way to compute it.
    calm: factor of the weights of queries' norms, where nothing else divides the scores; sharp ones
        make much of the last bit.
    network: transformers' class, where it knows no other way from a text model's configuration.
    """

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    architecture: str = ""
    rewrite: Callable[[Tensors, dict[str, Any]], Tensors] | None = None
    logits: Logits = plainly
    attention: str = "eager"
    calm: float = 1.0
    network: str = ""


def save(case: Case, folder: Path) -> PreTrainedModel:
    """Write the checkpoint; the model that it is of."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key not in case.drop}
    config = AutoConfig.for_model(case.model_type, **{**sizes, **case.changes})
    options = {"dtype": torch.float32, "attn_implementation": case.attention}
    if case.network:
        model = getattr(transformers, case.network)._from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    randomise(model, case.calm)
    model.eval().save_pretrained(folder)
    if case.rewrite is not None or case.architecture:
        rewrite_folder(folder, case)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, calm: float = 1.0) -> None:
    """All parameters: norms and biases made as ones and zeros hide mistakes."""
    for name, parameter in model.named_parameters():
        if "act_fn" in name:  # of an activation, where others make it steep
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.dim() > 1 and "norm" not in name:
            parameter.copy_(torch.randn_like(parameter) * 0.15)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if "q_norm" in name:
            parameter.mul_(calm)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "layer_scalar" in name:
            buffer.add_(torch.randn_like(buffer) * 0.3)


def rewrite_folder(folder: Path, case: Case) -> None:
    file, settings = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(file), json.loads(settings.read_text())
    if case.rewrite is not None:
        tensors = case.rewrite(tensors, config)
    if case.architecture:
        config["architectures"] = [case.architecture]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    settings.write_text(json.dumps(config))


# ---- names and layouts of architectures without code in transformers -----------------------------


def _renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        found[name] = tensor
    return found


def _fused(tensors: Tensors, pieces: tuple[str, ...], whole: str) -> Tensors:
    """The pieces of each layer below each other."""
    found = dict(tensors)
    for name in tensors:
        if pieces[0] in name:
            rows = [found.pop(name.replace(pieces[0], piece)) for piece in pieces]
            found[name.replace(pieces[0], whole)] = torch.cat(rows)
    return found


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


def chatglm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    tensors = _renamed(
        _fused(tensors, _QKV, "self_attention.query_key_value"),
        ("model.embed_tokens", "transformer.embedding.word_embeddings"),
        ("model.layers", "transformer.encoder.layers"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ("model.norm", "transformer.encoder.final_layernorm"),
        ("lm_head", "transformer.output_layer"),
    )
    tensors["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    theta = config["rope_parameters"]["rope_theta"]
    new = {
        "model_type": "chatglm",
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "padded_vocab_size": config["vocab_size"],
        "vocab_size": 1,
        "seq_length": config["max_position_embeddings"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": theta / 10000,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "rmsnorm": True,
        "post_layer_norm": True,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    config.clear()
    config.update(new)
    return tensors


def qwen1(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config.update(
        intermediate_size=2 * config["intermediate_size"],
        kv_channels=config["hidden_size"] // config["num_attention_heads"],
        seq_length=config["max_position_embeddings"],
        max_position_embeddings=4 * config["max_position_embeddings"],
        layer_norm_epsilon=config.pop("rms_norm_eps"),
        rotary_emb_base=config.pop("rope_parameters")["rope_theta"],
        rotary_pct=1.0,
        no_bias=True,
        use_logn_attn=True,
        use_dynamic_ntk=True,
    )
    return _renamed(
        _fused(tensors, _QKV, "attn.c_attn"),
        ("model.embed_tokens", "transformer.wte"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.gate_proj", "mlp.w2"),
        ("mlp.up_proj", "mlp.w1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("model.norm", "transformer.ln_f"),
    )


def baichuan(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["model_max_length"] = config["max_position_embeddings"]
    return _fused(tensors, _QKV, "self_attn.W_pack")


def internlm1(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["bias"] = config.pop("attention_bias")
    return tensors


def internlm2(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Queries, key and value of each key head side by side."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    config["bias"] = config.pop("attention_bias")
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    grouped = {}
    for name, tensor in _fused(tensors, _QKV, "attention.wqkv").items():
        if "wqkv" in name:
            by_head = tensor.view(heads + 2 * kv_heads, -1, *tensor.shape[1:])
            q, k, v = by_head.split((heads, kv_heads, kv_heads))
            parts = (q.unflatten(0, (kv_heads, -1)), k[:, None], v[:, None])
            tensor = torch.cat(parts, 1).reshape(tensor.shape)
        grouped[name] = tensor
    return _renamed(
        grouped,
        ("embed_tokens", "tok_embeddings"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("lm_head", "output"),
    )


def minicpm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["scale_emb"] = config.pop("embedding_multiplier")
    config["scale_depth"] = config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5
    config["dim_model_base"] = config["hidden_size"] / config.pop("logits_scaling")
    config.pop("attention_multiplier")
    return tensors


def wrapped(before: str) -> Callable[[Tensors, dict[str, Any]], Tensors]:
    """In a wrapper, beside another part. before: what the text model's names begin with."""

    def rewrite(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        text = {**config}
        text.pop("architectures")
        ends = {key: text.pop(key) for key in ("eos_token_id", "dtype", "bos_token_id")}
        config.clear()
        config.update(text_config=text, model_type="wrapper", vision_config={"hidden_size": 9})
        config.update(ends)
        found = {}
        for name, tensor in tensors.items():
            if before == "model.language_model." and name.startswith("model."):
                name = name.removeprefix("model.")
            elif before == "model.language_model.":
                found[name] = tensor
                continue
            found[f"{before}{name}"] = tensor
        found["vision_tower.patch.weight"] = torch.ones(3, 3)
        found["multi_modal_projector.norm.weight"] = torch.ones(3)
        return found

    return rewrite


def with_alibi(slopes: list[float]) -> Logits:
    """Llama without rotation, with slopes on the scores."""

    def ask(model: PreTrainedModel, ids: Tensor) -> Tensor:
        at = torch.arange(len(ids))
        behind = at[None] - at[:, None]
        mask = torch.tensor(slopes)[:, None, None] * behind
        mask = mask.masked_fill(behind > 0, -1e30)[None]
        zeros = torch.zeros_like(ids)[None]
        found: Tensor = model(ids[None], attention_mask=mask, position_ids=zeros).logits[0]
        return found

    return ask


_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [1.5 + i * 0.3 for i in range(6)],
    "short_factor": [1.0 + i * 0.1 for i in range(6)],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
}
_G = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
_TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
_SEVEN = {"sliding_window": 7}

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama, biases, tied": Case(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama 1": Case("llama", architecture="LLaMAForCausalLM"),
    "iquest-coder": Case("iquestcoder", {"head_dim": 16}),
    "internlm 3": Case("internlm3", {"head_dim": 16, "qkv_bias": True, "bias": True}),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral 3 small": Case(
        "mistral",
        {"sliding_window": None, "head_dim": 24},
        architecture="Mistral3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "qwen 2": Case("qwen2"),
    "qwen 2.5 vl": Case(
        "qwen2",
        architecture="Qwen2_5_VLForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "qwen 3": Case("qwen3", {"head_dim": 24}),
    "mimo": Case("qwen2", architecture="MiMoForCausalLM"),
    "seed-oss": Case(
        "seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": False}
    ),
    "ernie 4.5": Case("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "helium": Case("helium", {"head_dim": 16}),
    "hunyuan": Case("hunyuan_v1_dense", {"head_dim": 16}),
    "granite": Case("granite", _GRANITE),
    "arcee": Case("arcee"),
    "apertus": Case("apertus"),
    "nemotron": Case("nemotron"),
    "jais 2": Case("jais2"),
    "gemma 1": Case("gemma", {"head_dim": 24}),
    "phi 2": Case("phi", {"partial_rotary_factor": 0.5}),
    "phi 3": Case("phi3"),
    "phi 4 mini": Case(
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": _LONG,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "stablelm 2 12b": Case(
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ),
    "starcoder 2": Case("starcoder2", {"sliding_window": None}),
    "glm 4 hf": Case("glm", {"head_dim": 16, "rope_parameters": _HALF, "attention_bias": True}),
    "glm 4 0414": Case("glm4", {"head_dim": 16, "rope_parameters": _HALF, "attention_bias": True}),
    "chatglm": Case(
        "glm",
        {
            "head_dim": 16,
            "rope_parameters": {**_HALF, "rope_theta": 5e5},
            "attention_bias": True,
        },
        architecture="ChatGLMModel",
        rewrite=chatglm,
    ),
    "olmo 1": Case("olmo", {"clip_qkv": 1.0}),
    "olmo 2": Case("olmo2"),
    "cohere": Case("cohere", {"logit_scale": 0.25}),
    "cohere r+": Case("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "qwen 1": Case(
        "qwen2", {"num_key_value_heads": 4}, architecture="QWenLMHeadModel", rewrite=qwen1
    ),
    "baichuan 7b": Case(
        "llama", {"num_key_value_heads": 4}, architecture="BaiChuanForCausalLM", rewrite=baichuan
    ),
    "internlm 1": Case(
        "llama", {"attention_bias": True}, architecture="InternLMForCausalLM", rewrite=internlm1
    ),
    "internlm 2": Case("llama", architecture="InternLM2ForCausalLM", rewrite=internlm2),
    "minicpm": Case(
        "granite",
        {**_GRANITE, "attention_multiplier": 0.25},
        architecture="MiniCPMForCausalLM",
        rewrite=minicpm,
    ),
    "xverse": Case("llama", architecture="XverseForCausalLM"),
    "gpt-neox": Case("gpt_neox", {"rotary_pct": 0.25}, drop=("num_key_value_heads",)),
    "gpt-neox, in turns": Case(
        "gpt_neox",
        {"rotary_pct": 1.0, "use_parallel_residual": False},
        drop=("num_key_value_heads",),
    ),
    "gpt-j": Case("gptj", {**_G, "rotary_dim": 8}, drop=_SHORT),
    "codegen": Case("codegen", {**_G, "rotary_dim": 8}, drop=_SHORT),
    "falcon 7b": Case(
        "falcon",
        {"multi_query": True, "parallel_attn": True, "bias": False, "alibi": False},
        drop=_GPT,
    ),
    "falcon 40b": Case(
        "falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False}, drop=_GPT
    ),
    "falcon 11b": Case(
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        drop=_GPT,
    ),
    # Layers that do not turn, or whose positions are learned.
    "smollm 3": Case("smollm3", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "gpt-2": Case("gpt2", _G, drop=_SHORT),
    "starcoder": Case("gpt_bigcode", {**_G, "multi_query": True}, drop=_SHORT),
    "starcoder, all heads": Case("gpt_bigcode", {**_G, "multi_query": False}, drop=_SHORT),
    "opt": Case("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, drop=_GPT),
    "opt 350m": Case(
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        drop=_GPT,
    ),
    "ministral 3": Case("ministral3", {"head_dim": 16, "rope_parameters": _YARN}),
}
# Windows, chunks and soft caps.
WINDOWS: dict[str, Case] = {
    "mistral 7b 0.1": Case("mistral", _SEVEN),
    "ministral 8b": Case("ministral", {**_SEVEN, "head_dim": 16, "layer_types": _TURNS}),
    "qwen 2, windows": Case(
        "qwen2", {**_SEVEN, "use_sliding_window": True, "max_window_layers": 1}
    ),
    "gemma 2": Case("gemma2", {**_SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32}),
    "gemma 3": Case(
        "gemma3_text",
        {**_SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32, "layer_types": _TURNS},
    ),
    "gemma 3 4b": Case(
        "gemma3_text",
        {**_SEVEN, "head_dim": 24, "query_pre_attn_scalar": 32, "layer_types": _TURNS},
        architecture="Gemma3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "phi 3, windows": Case("phi3", _SEVEN),
    "starcoder 2, windows": Case("starcoder2", _SEVEN),
    "olmo 3": Case("olmo3", {**_SEVEN, "layer_types": _TURNS}),
    "exaone 4": Case("exaone4", {**_SEVEN, "layer_types": _TURNS}),
    "cohere 2": Case("cohere2", {**_SEVEN, "logit_scale": 0.25, "layer_types": _TURNS}),
    "granite swa": Case(
        "granite_swa",
        {**_GRANITE, **_SEVEN, "layer_types": _TURNS, "layer_rope_theta": [1e4, 0, 1e5]},
    ),
    "cwm": Case("cwm", {**_SEVEN, "head_dim": 16, "layer_types": _TURNS}),
    "gpt-neo": Case(
        "gpt_neo",
        {
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 7,
        },
        drop=(*_GPT, "num_hidden_layers", "num_attention_heads"),
    ),
}
_CHOSEN = {"num_experts": 6, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LLAMA4 = {
    **_LOCAL,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "floor_scale": 4,
}
_LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
# Mixtures of experts; three layers, of which some are dense where an architecture has such.
EXPERTS: dict[str, Case] = {
    "mixtral": Case("mixtral", _LOCAL),
    "qwen 2 moe": Case(
        "qwen2_moe",
        {
            **_CHOSEN,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen 3 moe": Case(
        "qwen3_moe",
        {**_CHOSEN, "moe_intermediate_size": 24, "head_dim": 24, "norm_topk_prob": True},
    ),
    "gpt-oss": Case("gpt_oss", {**_LOCAL, **_SEVEN, "head_dim": 16}),
    "glm 4.5": Case("glm4_moe", {**_ROUTED, "attention_bias": True, "routed_scaling_factor": 1.5}),
    "glm 4.6": Case(
        "glm4_moe", {**_ROUTED, "use_qk_norm": True, "n_group": 3, "topk_group": 2, "head_dim": 24}
    ),
    "solar open": Case("solar_open", {**_ROUTED, "head_dim": 16}),
    "dots": Case("dots1", {**_ROUTED, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "minimax m2": Case("minimax_m2", {**_LOCAL, "head_dim": 16, "rope_parameters": _HALF}),
    "hy3": Case("hy_v3", {**_CHOSEN, "moe_intermediate_size": 24, "head_dim": 16}),
    "hunyuan moe": Case("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "head_dim": 16}),
    "olmoe": Case("olmoe", _CHOSEN),
    "llama 4": Case("llama4_text", _LLAMA4),
    "llama 4 scout": Case(
        "llama4_text",
        {**_LLAMA4, "interleave_moe_layer_step": 1, "rope_parameters": _LLAMA4_ROPE},
        architecture="Llama4ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "gemma 4 e2b": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        calm=0.3,
    ),
    "gemma 4 31b": Case(
        "gemma4_text",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        calm=0.3,
        architecture="Gemma4ForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "gemma 4 26b": Case(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        calm=0.3,
    ),
    "dbrx": Case(
        "dbrx",
        {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 1e5},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
        drop=(*_SHORT, "intermediate_size", "num_key_value_heads"),
    ),
    "granite moe": Case("granitemoe", {**_GRANITE, **_LOCAL}),
    "granite moe, shared": Case(
        "granitemoeshared", {**_GRANITE, **_LOCAL, "shared_intermediate_size": 40}
    ),
    "phi 3.5 moe": Case("phimoe", {**_LOCAL, "lm_head_bias": True, "router_jitter_noise": 0.2}),
    "ernie 4.5 moe": Case(
        "ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24}
    ),
}
_MLA: dict[str, Any] = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
_MLA_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
_MLA_YARN.pop("llama_4_scaling_beta")
_DENSE_MLA = {
    key: value for key, value in _MLA.items() if key not in {*_ROUTED, "first_k_dense_replace"}
}
# Latent attention; three layers, of which the first is dense where others are mixtures.
LATENT: dict[str, Case] = {
    "deepseek v2 lite": Case(
        "deepseek_v2",
        {**_MLA, "q_lora_rank": None, "v_head_dim": 24, "rope_parameters": _MLA_YARN},
    ),
    "deepseek v2": Case(
        "deepseek_v2",
        {
            **_MLA,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "deepseek v3": Case(
        "deepseek_v3", {**_MLA, "n_group": 3, "topk_group": 2, "rope_parameters": _MLA_YARN}
    ),
    "kimi k2.5": Case(
        "deepseek_v3",
        {**_MLA, "n_group": 1, "topk_group": 1},
        architecture="KimiK25ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "glm 4.7 flash": Case("glm4_moe_lite", _MLA),
    "mistral 4": Case(
        "mistral4",
        {**_MLA, "rope_parameters": _YARN},
        network="Mistral4ForCausalLM",
        architecture="Mistral3ForConditionalGeneration",
        rewrite=wrapped("language_model."),
    ),
    "minicpm 3": Case("minicpm3", {**_DENSE_MLA, "scale_emb": 3.0, "dim_model_base": 16}),
    "youtu": Case("youtu", _DENSE_MLA),
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # A state whose query is far from all keys gives little, which its norm makes large again with
    # all that was rounded.
    "rms_norm_eps": 1e-2,
}
_DELTA_EXPERTS = {
    **_DELTA,
    **_CHOSEN,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def stacked(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """All experts of a layer in one tensor, as Qwen 3.5's files have them, in its wrapper."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        names = f"model.layers.{layer}.mlp.experts.{{}}.{{}}_proj.weight"
        experts = range(config["num_experts"])

        def matrix(expert: int, kind: str, names: str = names) -> Tensor:
            return next(
                tensor
                for name, tensor in tensors.items()
                if name.endswith(names.format(expert, kind).removeprefix("model."))
            )

        both = [torch.cat((matrix(e, "gate"), matrix(e, "up"))) for e in experts]
        here = f"model.layers.{layer}.mlp.experts."
        found[f"{here}gate_up_proj"] = torch.stack(both)
        found[f"{here}down_proj"] = torch.stack([matrix(e, "down") for e in experts])
    return wrapped("model.language_model.")(found, config)


# Three layers of Gated DeltaNet and one of gated attention.
DELTA: dict[str, Case] = {
    "qwen 3 next": Case("qwen3_next", {**_DELTA_EXPERTS, "norm_topk_prob": True}),
    "qwen 3.5": Case("qwen3_5_text", _DELTA),
    "qwen 3.5 vl": Case(
        "qwen3_5_text",
        {**_DELTA, "tie_word_embeddings": True},
        architecture="Qwen3_5ForConditionalGeneration",
        rewrite=wrapped("model.language_model."),
    ),
    "qwen 3.5 moe": Case(
        "qwen3_5_moe_text",
        _DELTA_EXPERTS,
        architecture="Qwen3_5MoeForConditionalGeneration",
        rewrite=stacked,
    ),
}
_SLOPES = [2 ** (-8 * (h + 1) / 32) for h in range(32)] + [
    2 ** (-8 * (h + 0.5) / 32) for h in range(8)
]
ALIBI: dict[str, Case] = {
    # Its eager path adds the slopes twice.
    "falcon rw": Case(
        "falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        drop=_GPT,
        attention="sdpa",
    ),
    "bloom": Case("bloom", {"n_layer": 3, "n_head": 6, "hidden_size": 60}, drop=_BLOOM),
    "mpt": Case(
        "mpt", {"d_model": 60, "n_layers": 3, "n_heads": 6, "max_seq_len": 64}, drop=_SHORT
    ),
    "baichuan 13b": Case(
        "llama",
        {
            "hidden_size": 160,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "num_hidden_layers": 2,
        },
        architecture="BaichuanForCausalLM",
        rewrite=baichuan,
        logits=with_alibi(_SLOPES),
    ),
}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest logit; infinite if one is not finite."""
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if math.isfinite(difference) else math.inf
