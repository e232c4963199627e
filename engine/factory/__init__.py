"""build(config) -> (EngineCore, Ready): connects model, memory, runner and scheduler.

This package runs in the engine process.
"""

from engine.factory.core import build, build_alone, build_rank

__all__ = ["build", "build_alone", "build_rank"]
