"""Rewritings for architectures that transformers lacks: they convert tensors and config.json of the
most similar class to the architecture's names and layout."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.parity.cases.case import Logits, Tensors, plainly

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    """Return the tensors with the first text of each pair replaced by its second in all names, one
    pair after the other."""
    new_tensors = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        new_tensors[name] = tensor
    return new_tensors


def fused(tensors: Tensors, pieces: tuple[str, ...], whole: str) -> Tensors:
    """Return the tensors with each layer's `pieces` concatenated along their rows into `whole`."""
    merged = dict(tensors)
    for name in tensors:
        if pieces[0] in name:
            rows = [merged.pop(name.replace(pieces[0], piece)) for piece in pieces]
            merged[name.replace(pieces[0], whole)] = torch.cat(rows)
    return merged


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


def chatglm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    tensors = renamed(
        fused(tensors, _QKV, "self_attention.query_key_value"),
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
    return renamed(
        fused(tensors, _QKV, "attn.c_attn"),
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
    return fused(tensors, _QKV, "self_attn.W_pack")


def internlm1(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["bias"] = config.pop("attention_bias")
    return tensors


def internlm2(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Put queries, key and value of each key head side by side, as InternLM 2 has them."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    config["bias"] = config.pop("attention_bias")
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    grouped = {}
    for name, tensor in fused(tensors, _QKV, "attention.wqkv").items():
        if "wqkv" in name:
            by_head = tensor.view(heads + 2 * kv_heads, -1, *tensor.shape[1:])
            q, k, v = by_head.split((heads, kv_heads, kv_heads))
            parts = (q.unflatten(0, (kv_heads, -1)), k[:, None], v[:, None])
            tensor = torch.cat(parts, 1).reshape(tensor.shape)
        grouped[name] = tensor
    return renamed(
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
    """Return a rewriting that puts a text model into a wrapper, beside another part.

    before: the prefix of the text model's names."""

    def rewrite(tensors: Tensors, config: dict[str, Any]) -> Tensors:
        text = {**config}
        text.pop("architectures")
        ends = {key: text.pop(key) for key in ("eos_token_id", "dtype", "bos_token_id")}
        config.clear()
        config.update(text_config=text, model_type="wrapper", vision_config={"hidden_size": 9})
        config.update(ends)
        wrapped_tensors = {}
        for name, tensor in tensors.items():
            if before == "model.language_model." and name.startswith("model."):
                name = name.removeprefix("model.")
            elif before == "model.language_model.":
                wrapped_tensors[name] = tensor
                continue
            wrapped_tensors[f"{before}{name}"] = tensor
        wrapped_tensors["vision_tower.patch.weight"] = torch.ones(3, 3)
        wrapped_tensors["multi_modal_projector.norm.weight"] = torch.ones(3)
        return wrapped_tensors

    return rewrite


def with_alibi(slopes: list[float]) -> Logits:
    """Return a function that computes Llama's logits without rotation, with ALiBi slopes on
    scores."""

    def ask(model: "PreTrainedModel", ids: Tensor) -> Tensor:
        at = torch.arange(len(ids))
        behind = at[None] - at[:, None]
        mask = torch.tensor(slopes)[:, None, None] * behind
        mask = mask.masked_fill(behind > 0, -1e30)[None]
        zeros = torch.zeros_like(ids)[None]
        logits: Tensor = model(ids[None], attention_mask=mask, position_ids=zeros).logits[0]
        return logits

    return ask


def stacked(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Stack all experts of a layer in one tensor and put the model in a wrapper, as Qwen 3.5 has
    it."""
    merged = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
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
        merged[f"{here}gate_up_proj"] = torch.stack(both)
        merged[f"{here}down_proj"] = torch.stack([matrix(e, "down") for e in experts])
    return wrapped("model.language_model.")(merged, config)


def qwen3_vl_moe(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Stack experts as `stacked` does, with the input axis first, as Qwen3-VL's mixtures have
    them."""
    config["model_type"] = "qwen3_vl_moe_text"
    config["num_experts"] = config.pop("num_local_experts", config.get("num_experts"))
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in stacked(tensors, config).items()
    }


def orion(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["rms_norm_eps"] = config.pop("layer_norm_eps")
    for key in ("partial_rotary_factor", "use_qkv_bias", "use_parallel_residual"):
        config.pop(key, None)
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    return tensors


def exaone3(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    config["num_layers"] = config.pop("num_hidden_layers")
    config["activation_function"] = config.pop("hidden_act")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    return renamed(
        tensors,
        ("model.embed_tokens", "transformer.wte"),
        ("model.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.o_proj", "attn.attention.out_proj"),
        ("self_attn", "attn.attention"),
        ("mlp.gate_proj", "mlp.c_fc_0"),
        ("mlp.up_proj", "mlp.c_fc_1"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("model.norm", "transformer.ln_f"),
    )


def decilm(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Rewrite a Llama as a DeciLM whose layers differ.

    Layer 0 has half of the key heads, layer 1 no attention and half of the inner width, layer 2 no
    MLP.
    """
    config.pop("num_key_value_heads"), config.pop("intermediate_size")
    config["block_configs"] = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 12.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 6.0}},
        {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
    ]
    renamed_tensors = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.0.self_attn.") and name[25] in "kv":
            tensor = tensor.unflatten(0, (2, 2, -1))[:, 0].flatten(0, 1)
        elif name.startswith("model.layers.1.mlp."):
            tensor = tensor[:, :256] if "down" in name else tensor[:256]
        gone = ("model.layers.1.self_attn", "model.layers.1.input", "model.layers.2.mlp")
        if not name.startswith((*gone, "model.layers.2.post")):
            renamed_tensors[name] = tensor
    return renamed_tensors


@torch.no_grad()
def as_decilm(model: "PreTrainedModel", ids: Tensor) -> Tensor:
    """Make a Llama equal to the case `decilm`, which lacks some parts, and return its logits.

    Key-value heads become equal in pairs, and the weights of missing parts 0."""
    first, second, third = model.model.layers
    for matrix in (first.self_attn.k_proj, first.self_attn.v_proj):
        pairs = matrix.weight.unflatten(0, (2, 2, -1))
        pairs[:, 1] = pairs[:, 0]
    second.self_attn.o_proj.weight.zero_()
    second.mlp.down_proj.weight[:, 256:] = 0
    third.mlp.down_proj.weight.zero_()
    return plainly(model, ids)
