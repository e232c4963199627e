"""Reference: a checkpoint's model in transformers, with which Manta's model is compared.

The library must have the class that config.json names; otherwise there is no reference, as code in
a checkpoint's folder is never run.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.evaluation.trace import Trace
from engine.runner.memory import GIB, available_host_memory
from engine.text.token_ids import missing_ids
from engine.weights.index import read_index

# Names of a layer's submodules in transformers' models.
_ATTENTION = re.compile(r"(self_)?attn|(self_)?attention|temporal_block")
_MLP = re.compile(r"mlp|feed_forward|ffn|ff|block_sparse_moe|feedforward")
_OTHER_TOWERS = re.compile(r"vision|visual|audio|image", re.IGNORECASE)


class NoReference(Exception):
    """The error for a model that transformers cannot run; the message says why."""


class Reference:
    """The model of a folder as transformers computes it.

    attention: transformers' attention implementation; "eager" supports sinks and soft caps.
    Raises NoReference.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        attention: str = "eager",
    ) -> None:
        self.model = _load(folder, config, dtype, attention)
        self.name = type(self.model).__name__
        self._layers = _layers(self.model, config.num_layers)
        self._never = missing_ids(folder, config.vocab_size)

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """Generate `count` tokens greedily, also beyond end tokens.

        Ids that the tokenizer lacks are never chosen.
        """
        output: list[int] = []
        step, cache = torch.tensor([ids]), None
        for _ in range(count):
            outputs = self.model(step, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            logits = outputs.logits[0, -1].float()
            logits[self._never] = -torch.inf
            output.append(int(logits.argmax()))
            step = torch.tensor([output[-1:]])
        return output

    @torch.inference_mode()
    def trace(self, ids: Sequence[int]) -> Trace:
        with self._traced() as trace:
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        trace["ids"] = torch.tensor(ids)
        trace["logits"] = logits.float()
        return trace

    @contextmanager
    def _traced(self) -> Iterator[Trace]:
        trace: Trace = {}

        def keep(name: str, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            trace[name] = values.detach().reshape(-1, values.shape[-1]).float().clone()

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep("embedding", args[0] if args else kwargs["hidden_states"])

        with ExitStack() as hooks:

            def tap(name: str, module: nn.Module) -> None:
                handle = module.register_forward_hook(lambda _, __, output: keep(name, output))
                hooks.callback(handle.remove)

            first = self._layers[0].register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(first.remove)
            for number, layer in enumerate(self._layers):
                tap(f"layers.{number}", layer)
                for ours, names in (("attention", _ATTENTION), ("mlp", _MLP)):
                    modules = [m for name, m in layer.named_children() if names.fullmatch(name)]
                    if len(modules) == 1:
                        tap(f"layers.{number}.{ours}", modules[0])
            yield trace


def _load(folder: Path, config: ModelConfig, dtype: torch.dtype, attention: str) -> Any:
    import transformers
    from transformers.utils import logging

    (name,) = Reader.from_file(folder / "config.json").get("architectures")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise NoReference(f"transformers {transformers.__version__} has no code for {name}")
    if config.quantized is not None:  # transformers rounds dequantised weights, or needs a GPU
        raise NoReference(f"the folder's weights are {config.quantized.name}")
    needed = _bytes(folder, dtype)
    if needed > (free := available_host_memory()):
        raise NoReference(
            f"transformers would need {needed / GIB:.1f} GiB for it in {str(dtype)[6:]}, and "
            f"{free / GIB:.1f} GiB are free"
        )
    was = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # the loader may raise any exception
        reason = (str(error).splitlines() or [""])[0]
        raise NoReference(f"transformers: {type(error).__name__}: {reason[:300]}") from None
    finally:
        logging.set_verbosity(was)
        logging.enable_progress_bar()
    missing = [key for key in info["missing_keys"] if not config.ignores(key)]
    if missing:
        raise NoReference(
            f"transformers finds no weights for {', '.join(sorted(missing)[:3])} and "
            f"{max(0, len(missing) - 3)} others, and would take random ones"
        )
    return model.eval()


def _bytes(folder: Path, dtype: torch.dtype) -> int:
    return sum(math.prod(tensor.shape) for tensor in read_index(folder).values()) * dtype.itemsize


def _layers(model: nn.Module, count: int) -> nn.ModuleList:
    """Return the decoder's layers in a model that may also have encoders."""
    for name, module in model.named_modules():
        there = isinstance(module, nn.ModuleList) and len(module) == count
        if there and not _OTHER_TOWERS.search(name):
            return module
    raise NoReference(f"{type(model).__name__} has no list of {count} layers")
