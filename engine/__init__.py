"""Manta's engine: run a language model from Python, without Ray or HTTP.

    from engine import LLM, SamplingParams

    with LLM("folder/of/a/model") as llm:
        print(llm.generate("The sea is", SamplingParams(max_tokens=20))[0].outputs[0].text)

Names are imported on first use, so that `import engine.messages` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.engine_config import EngineConfig
    from engine.errors import (
        ConfigError,
        EngineDead,
        InvalidRequest,
        MantaError,
        Overloaded,
        RequestFailed,
        RequestReleased,
        UpdateFailed,
    )
    from engine.library.async_engine import AsyncEngine
    from engine.library.handle import RequestHandle
    from engine.library.llm import LLM
    from engine.library.outputs import CompletionOutput, RequestOutput, RequestStatus
    from engine.library.scorer import Scorer
    from engine.library.shared_weights import SharedWeights
    from engine.library.weight_sender import WeightSender
    from engine.sampling_params import SamplingParams
    from engine.structured.grammar import Grammar
    from engine.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDead",
    "Grammar",
    "InvalidRequest",
    "MantaError",
    "Overloaded",
    "RequestFailed",
    "RequestHandle",
    "RequestOutput",
    "RequestReleased",
    "RequestStatus",
    "SamplingParams",
    "Scorer",
    "SharedWeights",
    "Tokenizer",
    "UpdateFailed",
    "WeightSender",
]

_HOME = {
    "AsyncEngine": "library.async_engine",
    "CompletionOutput": "library.outputs",
    "EngineConfig": "config.engine_config",
    "Grammar": "structured.grammar",
    "LLM": "library.llm",
    "RequestHandle": "library.handle",
    "RequestOutput": "library.outputs",
    "RequestStatus": "library.outputs",
    "SamplingParams": "sampling_params",
    "Scorer": "library.scorer",
    "SharedWeights": "library.shared_weights",
    "Tokenizer": "text.tokenizer",
    "WeightSender": "library.weight_sender",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"engine.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
