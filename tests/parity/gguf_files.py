"""Writes the tiny checkpoints of `cases` as GGUF files, as llama.cpp's converter does.

Tensors have the names of the `gguf` package's table, and metadata the converter's keys. Matrices
are changed as the converter changes each family's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

# Families whose rotary pairs are adjacent elements in llama.cpp, but not in transformers.
_PERMUTED = (
    *("llama", "mistral3", "granite", "granitemoe", "smollm3", "arcee", "olmo", "internlm2"),
    *("minicpm", "xverse", "baichuan"),
)
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
_SIZES = {
    "context_length": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "attention.key_length": ("head_dim", "kv_channels"),
    "attention.sliding_window": ("sliding_window",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "expert_shared_count": ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
}
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layernorm_epsilon"),
    "attention.layer_norm_epsilon": (
        *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier", "scale_emb"),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_weights_scale": ("routed_scaling_factor",),
}
_FLAGS = {
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}


@dataclass
class Written:
    """The differences of an architecture's GGUF file from its checkpoint.

    arch: general.architecture.
    changes: changes of the case's configuration, for settings that GGUF cannot express.
    drop: keys that the family's converter does not write. more: keys that only it writes.
    experts_apart: whether each expert has its own tensors, as in older files.
    tokens: id -> text of image tokens.
    fused: whether keys and values of latents are one matrix, as in older files.
    """

    arch: str
    changes: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    experts_apart: bool = False
    tokens: dict[int, str] = field(default_factory=dict)
    fused: bool = False


def write(
    folder: Path,
    path: Path,
    written: Written,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Write the checkpoint in `folder` to `path` as one GGUF file.

    quant: type of matrices whose rows are a multiple of the type's block size.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, written.arch)
    values = {**_metadata(config, written), **written.more}
    for key, value in values.items():
        if key in written.drop:
            continue
        name = f"{written.arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_string(name, value)
    _vocabulary(writer, written.tokens)
    for name, tensor in _tensors(load_file(folder / "model.safetensors"), config, written):
        add(writer, name, tensor, quant)
    finish(writer)


def add(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, quant: gguf.GGMLQuantizationType
) -> None:
    """Add a tensor to a GGUF file. quant: its type if it is a matrix of whole blocks."""
    array = np.ascontiguousarray(tensor.float().numpy())
    block = gguf.GGML_QUANT_SIZES[quant][0]
    plain = array.ndim == 1 or "norm" in name or array.shape[-1] % block
    if plain or quant == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, quant), raw_dtype=quant)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: dict[str, Any], written: Written) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for kind, table in ((int, _SIZES), (float, _NUMBERS), (bool, _FLAGS)):
        for theirs, keys in table.items():
            values = [config[key] for key in keys if config.get(key) is not None]
            if values:
                first = values[0][0] if isinstance(values[0], list) else values[0]
                metadata[theirs] = kind(first)
    metadata.setdefault("feed_forward_length", 4 * metadata["embedding_length"])
    head_dim = metadata.get(
        "attention.key_length", metadata["embedding_length"] // metadata["attention.head_count"]
    )
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        metadata["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    part = rope.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    metadata["rope.dimension_count"] = int(head_dim * part)
    metadata["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if "rope_ratio" in config:
        metadata["rope.freq_base"] *= config["rope_ratio"]
        metadata["rope.dimension_count"] = head_dim // 2
    if written.arch == "deepseek2":
        metadata |= _latent_sizes(config)
    if "scale_depth" in config:
        metadata["residual_scale"] = config["scale_depth"] / metadata["block_count"] ** 0.5
        metadata["logit_scale"] = metadata["embedding_length"] / config["dim_model_base"]
    if rope.get("rope_type") in ("yarn", "linear"):
        metadata["rope.scaling.type"] = rope["rope_type"]
        for key, theirs in _YARN.items():
            if rope.get(key) is not None:
                value = rope[key]
                if written.arch == "deepseek2" and key == "mscale_all_dim":
                    value *= 0.1
                metadata[f"rope.scaling.{theirs}"] = value if "original" in key else float(value)
    if rope.get("llama_4_scaling_beta"):
        metadata["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "longrope":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.get("layer_types") and "attention.sliding_window" in metadata:
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        metadata["attention.sliding_window_pattern"] = kinds
    return metadata


def _latent_sizes(config: dict[str, Any]) -> dict[str, Any]:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    sizes = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
    }
    query_rank = config.get("q_lora_rank")
    return sizes | ({"attention.q_lora_rank": query_rank} if query_rank else {})


def _vocabulary(writer: gguf.GGUFWriter, tokens: dict[int, str]) -> None:
    """Write a vocabulary of three control tokens and 93 single bytes, some of which `tokens`
    replaces."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())[:93]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    words = dict(enumerate(["<|0|>", "<|1|>", "<|2|>", *letters])) | tokens
    count = 100 if tokens else len(words)
    writer.add_token_list([words.get(i, f"<|{i}|>") for i in range(count)])
    plain = range(3, 96)
    writer.add_token_types([1 if i in plain and i not in tokens else 3 for i in range(count)])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(
    tensors: dict[str, Tensor], config: dict[str, Any], written: Written
) -> Iterator[tuple[str, Tensor]]:
    layers = next(config[key] for key in _SIZES["block_count"] if key in config)
    (arch,) = (
        model_arch for model_arch, name in gguf.MODEL_ARCH_NAMES.items() if name == written.arch
    )
    table = gguf.get_tensor_name_map(arch, layers)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    for name, tensor in _stacked(dict(_transformed(tensors, config, written)), written).items():
        if name.endswith("rotary_pos_emb.inv_freq"):
            continue
        stem, _, number = name.partition(" ")  # of an expert that is not stacked
        if stem.endswith(("sinks", "e_score_correction_bias")):
            kind = "bias" if stem.endswith("bias") else "weight"
            stem = stem.replace("e_score_correction_bias", "e_score_correction") + f".{kind}"
        theirs = table.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if number:
            theirs = theirs.replace("_exps.", f".{number}.")
        yield theirs, tensor
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _transformed(
    tensors: dict[str, Tensor], config: dict[str, Any], written: Written
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with the converter's changes, under checkpoint names that the `gguf`
    package's table has."""
    sizes = {key: _first(config, *keys) for key, keys in _SIZES.items()}
    heads = sizes["attention.head_count"]
    kv_heads = written.more.get("attention.head_count_kv", sizes["attention.head_count_kv"])
    kv_heads = kv_heads or heads
    arch = written.arch
    for name, tensor in tensors.items():
        if arch in _PLUS_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch in _PERMUTED and "q_proj" in name:
            tensor = permuted(tensor, heads)
        if arch in _PERMUTED and "k_proj" in name:
            tensor = permuted(tensor, kv_heads)
        if arch == "glm4" and "mrope_section" in config["rope_parameters"]:
            head_dim, part = config["head_dim"], config["rope_parameters"]["partial_rotary_factor"]
            if "q_proj" in name or "k_proj" in name:
                tensor = _halved(tensor, head_dim, int(head_dim * part))
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        if arch == "bloom":
            name = name.removeprefix("transformer.")
        if arch == "chatglm":
            name = name.removeprefix("transformer.")
        if arch in ("falcon", "gptneox", "bloom") and "query_key_value" in name:
            tensor = torch.cat(_ungrouped(tensor, heads, kv_heads))
        if arch == "internlm2" and "wqkv" in name:
            q, k, v = _ungrouped(tensor, heads, kv_heads)
            layer = name.removesuffix("wqkv.weight")
            yield f"{layer}wq.weight", permuted(q, heads)
            yield f"{layer}wk.weight", permuted(k, kv_heads)
            yield f"{layer}wv.weight", v
        elif arch == "baichuan" and "W_pack" in name:
            q, k, v = tensor.chunk(3)
            layer = name.removesuffix("W_pack.weight")
            yield f"{layer}q_proj.weight", permuted(q, heads)
            yield f"{layer}k_proj.weight", permuted(k, heads)
            yield f"{layer}v_proj.weight", v
        elif arch == "granitemoe" and "input_linear" in name:
            gate, up = tensor.chunk(2, dim=-2)
            layer = name.split("block_sparse_moe")[0].split("shared_mlp")[0]
            if "shared_mlp" in name:
                yield f"{layer}mlp.shared_expert.gate_proj.weight", gate
                yield f"{layer}mlp.shared_expert.up_proj.weight", up
            else:
                yield f"{layer}mlp.experts.gate_proj.weight", gate
                yield f"{layer}mlp.experts.up_proj.weight", up
        elif arch == "deepseek2" and "kv_b_proj" in name and not written.fused:
            sizes_of_head = config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = tensor.unflatten(0, (heads, -1)).split(sizes_of_head, dim=1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), values
        elif arch == "qwen3vlmoe" and "experts" in name:
            # [experts, out, in], as transformers saves them
            layer = name.split("experts.")[0]
            parts = {"down": tensor}
            if "gate_up" in name:
                parts = dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
            for part, matrices in parts.items():
                yield f"{layer}experts.{part}_proj.weight", matrices
        elif arch == "gpt-oss" and "experts" in name:
            kind = "bias" if name.endswith("bias") else "weight"
            layer = name.split("experts.")[0]
            tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
            if "down" in name:
                yield f"{layer}experts.down_proj.{kind}", tensor
            else:
                yield f"{layer}experts.gate_proj.{kind}", tensor[:, ::2]
                yield f"{layer}experts.up_proj.{kind}", tensor[:, 1::2]
        else:
            yield name, tensor


def _first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def permuted(tensor: Tensor, heads: int) -> Tensor:
    halves = tensor.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(tensor.shape)


def _halved(tensor: Tensor, size: int, rotary: int) -> Tensor:
    """Reorder each head's rows from adjacent rotary pairs to the first elements of all pairs, then
    the second elements."""
    heads = tensor.unflatten(0, (-1, size))
    turned, others = heads[:, :rotary], heads[:, rotary:]
    return torch.cat((turned[:, ::2], turned[:, 1::2], others), 1).reshape(tensor.shape)


def _ungrouped(tensor: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """Split a fused tensor, in which each key head's queries, key and value are adjacent, into
    queries, keys and values."""
    grouped = tensor.unflatten(0, (kv_heads, heads // kv_heads + 2, -1))
    parts = grouped.split((heads // kv_heads, 1, 1), dim=1)
    return [part.flatten(0, 2) for part in parts]


def _stacked(tensors: dict[str, Tensor], written: Written) -> dict[str, Tensor]:
    """Join the tensors of experts, and of norms of heads, into one tensor each."""
    stacks: dict[str, Tensor] = {}
    several: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        for before in (".experts.", "layernorm.norms."):
            head, found_it, tail = name.partition(before)
            number, _, rest = tail.partition(".")
            if found_it and number.isdigit():
                whole = f"{head}{before}{rest}".replace(".norms.", ".")
                if written.experts_apart:
                    stacks[f"{whole} {number}"] = tensor
                else:
                    several.setdefault(whole, {})[int(number)] = tensor
                break
        else:
            stacks[name] = tensor
    for name, parts in several.items():
        stacks[name] = torch.stack([parts[number] for number in sorted(parts)])
    return stacks
