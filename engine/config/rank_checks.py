"""Checks whether a model can be divided among the configured ranks and pipeline stages."""

from collections.abc import Sequence

from engine.config.model_config import LayerAttention, ModelConfig
from engine.errors import ConfigError

# With at least _MANY_RANKS ranks, or fewer than _THIN columns on each, experts are not split.
_MANY_RANKS, _THIN = 8, 64


def spreads_experts(model: ModelConfig, ranks: int, asked: bool | None) -> bool:
    """Whether each rank has some whole experts instead of a part of each.

    Splitting each expert gives all ranks equal work, but narrow matmuls. The limits, about 8 ranks
    or 64 columns, are those of vLLM and SGLang.

    asked: expert_parallel of the configuration.
    """
    if ranks == 1 or model.experts is None:
        return False
    count, size = model.experts.count, model.experts.size
    if asked is not None:
        return asked
    cut = model.quantized is not None and size // ranks % model.quantized.unit
    thin = ranks >= _MANY_RANKS or size // ranks < _THIN
    return count % ranks == 0 and bool(thin or size % ranks or cut)


def check_data_parallel_attention(model: ModelConfig) -> None:
    """Raise ConfigError for models that attention_data_parallel does not support."""
    why = ""
    if model.recurrent:
        why = f"{model.architecture} has recurrent layers, whose states are divided by heads alone"
    elif model.whole_texts:
        why = f"{model.architecture} keeps no keys of a text, so there is nothing to gain"
    if why:
        raise ConfigError(
            f"attention_data_parallel: {why}; leave it out", param="attention_data_parallel"
        )


def check_ranks(
    model: ModelConfig,
    ranks: int,
    expert_parallel: bool | None = None,
    data_parallel_attention: bool = False,
) -> None:
    """Raise ConfigError if the model cannot be divided among this many ranks.

    data_parallel_attention: whether each rank has all heads, so that heads are not divided.
    """
    if expert_parallel and model.experts is None:
        raise ConfigError(
            f"expert_parallel: {model.architecture} has no experts; leave it out",
            param="expert_parallel",
        )
    if expert_parallel and model.experts is not None and model.experts.count % ranks:
        raise ConfigError(
            f"expert_parallel: {model.experts.count} experts of {model.architecture} cannot be "
            f"divided among tensor_parallel {ranks}; leave it out, or take ranks that divide them",
            param="expert_parallel",
        )
    if ranks == 1:
        return

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"tensor_parallel: {ranks}: {why}", param="tensor_parallel")

    fitting = [
        n for n in range(2, 65) if _divides(model, n, expert_parallel, data_parallel_attention)
    ]
    way_out = f"it can be {', '.join(map(str, fitting))}" if fitting else "leave it out"
    if model.layer_input_size:
        raise refuse(
            f"{model.architecture} has inputs for each layer, which cannot be divided; leave it out"
        )
    for layer in model.attention:
        if layer.mixer is not None and (what := layer.mixer.undivided(ranks)):
            raise refuse(f"{model.architecture} has {what}, which cannot be divided so; {way_out}")
        if not data_parallel_attention and not _divides_heads(model, layer, ranks):
            raise refuse(
                f"{model.architecture} has {layer.num_heads} attention heads and "
                f"{layer.num_kv_heads} key heads, which cannot be divided so; {way_out}"
            )
    if not _divides(model, ranks, expert_parallel, data_parallel_attention):
        raise refuse(f"the width of {model.architecture}'s MLPs is no multiple of it; {way_out}")


def check_stages(model: ModelConfig, stages: int) -> None:
    """Raise ConfigError if the layers cannot be divided among this many pipeline stages."""
    why = ""
    if stages > model.num_layers:
        why = f"{model.architecture} has {model.num_layers} layers, and a stage needs one; lower it"
    elif stages > 1 and model.layer_input_size:
        why = f"{model.architecture} has inputs for each layer; leave it out"
    elif stages > 1 and any(layer.keys_of is not None for layer in model.attention):
        why = f"{model.architecture} has layers that read the keys of others; leave it out"
    elif stages > 1 and model.experts is not None and model.experts.ahead:
        why = f"{model.architecture} has experts that give to the next layer; leave it out"
    if why:
        raise ConfigError(f"pipeline_parallel: {stages}: {why}", param="pipeline_parallel")


def _divides_heads(model: ModelConfig, layer: LayerAttention, ranks: int) -> bool:
    """Whether the heads of a layer can be divided among the ranks (see `divide_heads`).

    Unequal shares are allowed only if all layers have equal heads: otherwise layers would form
    different KV groups on each rank.
    """
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if not layer.attends:
        return True
    if ranks > kv_heads:
        return heads % ranks == 0 and ranks % kv_heads == 0
    head_shapes = {
        layer_attention.kept for layer_attention in model.attention if layer_attention.attends
    }
    return kv_heads % ranks == 0 or len(head_shapes) == 1


def _divides(
    model: ModelConfig, ranks: int, expert_parallel: bool | None, data_parallel_attention: bool
) -> bool:
    mixed: Sequence[int] = ()
    widths = []
    if model.experts is not None:
        mixed = () if model.experts.beside_mlp else model.experts.layers
        widths.append(model.experts.shared_size)
        spread = spreads_experts(model, ranks, expert_parallel)
        widths.append(model.experts.count if spread else model.experts.size)
    widths += [model.mlp_size(number) for number in range(model.num_layers) if number not in mixed]
    mixers = (layer.mixer for layer in model.attention if layer.mixer is not None)
    return (
        not any(width % ranks for width in widths)
        and (
            data_parallel_attention
            or all(_divides_heads(model, layer, ranks) for layer in model.attention)
        )
        and not any(mixer.undivided(ranks) for mixer in mixers)
    )
