"""Checks of single features of a configuration against the model and its device."""

from engine.architectures import ARCHITECTURES
from engine.config.draft_config import draft_config
from engine.config.eagle3_config import Eagle3Config
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import Full, kv_groups
from engine.config.model_config import ModelConfig
from engine.config.quant_formats import QUANT_FORMATS
from engine.errors import ConfigError
from engine.speculation.settings import read_speculation


def check_capability(quantization: str, name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if a GPU is too old for a format of `quantization`.

    name, capability: the GPU's name and compute capability.
    """
    quant = QUANT_FORMATS.get(quantization)
    least = None if quant is None else quant.min_capability
    if quant is None or least is None or capability >= least:
        return
    raise ConfigError(
        f"quantization: {name} has compute capability {capability[0]}.{capability[1]}, and "
        f"{quant.name!r} {quant.needs}, from {least[0]}.{least[1]} on; set quantization: "
        f"{quant.instead}",
        param="quantization",
    )


def check_regions(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for `allocation: contiguous` unless all layers keep all tokens' KV."""
    if config.allocation == "contiguous" and kv_groups(model).kinds != (Full(),):
        raise ConfigError(
            "allocation: contiguous needs layers that keep the keys of the whole text, and "
            f"{model.architecture} has others; leave allocation out",
            param="allocation",
        )


def check_tiers(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for settings of KV tiers or moves that this engine does not support.

    These settings keep blocks in host memory or on disk, or send blocks to other replicas.
    """
    host, disk, moves = config.host_kv_bytes > 0, config.disk_kv_bytes > 0, config.kv_moves
    several = config.ranks_key if config.num_ranks > 1 else ""
    for fields, refused, why in (
        (
            {"host_kv_bytes": host, "kv_moves": moves},
            not config.prefix_caching,
            "prefix_caching is off, whose blocks it needs; turn that on",
        ),
        (
            {"host_kv_bytes": host, "kv_moves": moves},
            model.whole_texts,
            f"{model.architecture} is an encoder and keeps no keys",
        ),
        (
            {"host_kv_bytes": host},
            bool(config.attention_data_parallel),
            "not with attention_data_parallel, where ranks have blocks of their own",
        ),
        (
            {"disk_kv_bytes": disk, "kv_moves": moves},
            bool(several),
            f"not with {several}, where each rank has a part of a block",
        ),
        (
            {"kv_moves": moves},
            model.recurrent,
            f"{model.architecture} has recurrent states, which do not move",
        ),
    ):
        for field, is_set in fields.items():
            if is_set and refused:
                raise ConfigError(f"{field}: {why}; or leave it out", param=field)


def check_growth(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for `kv_memory: growing` if this engine does not support it."""
    if config.kv_memory != "growing":
        return
    why = ""
    if config.num_ranks > 1:
        why = (
            f"not with {config.ranks_key}, whose ranks would have to map pages in the same step; "
            "give each model its share of the device with kv_cache_bytes"
        )
    elif config.allocation != "list":
        why = f"not with allocation: {config.allocation}; leave that out"
    elif config.admission != "optimistic":
        why = f"admission: {config.admission} counts on memory that may go; leave that out"
    elif model.whole_texts:
        why = f"{model.architecture} is an encoder and keeps no keys"
    elif not kv_groups(model).groups:
        why = f"{model.architecture} keeps no keys"
    if why:
        raise ConfigError(f"kv_memory: growing: {why}; or leave it out", param="kv_memory")


def check_images(config: EngineConfig, model: ModelConfig, cuda: bool) -> None:
    """Raise ConfigError if the engine cannot compute the model's images with this configuration."""
    vision = model.vision
    if vision is None:
        return
    section = vision.mrope_section
    ropes = {layer.rope for layer in model.attention if layer.attends}
    if section is not None and (ropes != {model.rope} or 2 * sum(section) != model.rotary_dim):
        raise ConfigError(
            f"the frequencies of mrope_section {list(section)} are not those of all layers of "
            f"{model.architecture}; set images: off to serve its text model",
            param="images",
        )
    windows = [layer.window for layer in model.attention if layer.window]
    everywhere = vision.bidirectional and not vision.windows_alone
    if everywhere and windows and min(windows) < vision.largest:
        raise ConfigError(
            f"tokens of an image of {model.architecture} see each other, {vision.largest} of them, "
            f"and layers with windows see {min(windows)} tokens; set images: off to serve its text "
            "model",
            param="images",
        )
    if vision.bidirectional and windows and config.deterministic and not cuda:
        raise ConfigError(
            f"deterministic: tokens of an image of {model.architecture} see each other, which its "
            "layers with windows cannot compute token by token on the CPU; leave it out, use "
            "device: cuda, or set images: off",
            param="deterministic",
        )


def check_drafter(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if `speculation` names a drafter that cannot draft for the model.

    model: the target model's configuration, limited to max_model_len (`ModelConfig.within`).
    """
    settings = read_speculation(config.speculation)
    if settings is None or not settings.by_model:
        return
    key = f"method {settings.method}"
    why = ""
    if settings.method == "eagle3":
        Eagle3Config.from_folder(settings.model, model)
    elif settings.method == "draft_model":
        draft_config(settings.model, model)
    elif model.record.mtp is None:
        layouts = ", ".join(name for name, a in ARCHITECTURES.items() if a.mtp is not None)
        why = f"no layout of MTP layers is known for {model.architecture}, only for {layouts}"
    elif not model.mtp_layers:
        why = f"config.json has no MTP layer ({model.record.mtp.count} is 0)"
    if why:
        pass
    elif kv_groups(model).whole_group is None:
        why = f"no layer of {model.architecture} keeps the keys of the whole text"
    elif config.num_ranks > 1:
        name = "tensor_parallel" if config.tensor_parallel > 1 else "pipeline_parallel"
        why = f"it runs on one rank alone, and {name} is {getattr(config, name)}"
    elif config.max_num_seqs == 1:
        why = "a step has room for one token; raise engine.max_num_seqs"
    elif config.admission == "peak":
        why = "engine.admission peak counts on one token a step"
    if why:
        raise ConfigError(
            f"speculation: {key}: {why}; set speculation to auto, which needs no weights, or to "
            "off",
            param="speculation",
        )
