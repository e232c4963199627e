"""A vLLM worker that draws random weights like Manta's (`bench.versus.vllm_weights`).

vLLM imports the worker by name in its own processes.
"""

from typing import Any

from vllm.model_executor.model_loader.dummy_loader import (  # type: ignore[import-not-found]
    DummyModelLoader,
)
from vllm.v1.worker.gpu_worker import Worker as GpuWorker  # type: ignore[import-not-found]

from bench.versus.vllm_weights import draw


class Worker(GpuWorker):  # type: ignore[misc]
    """vLLM's worker with random weights. numbers_drawn: (drawn, total) of `draw`."""

    numbers_drawn = (0, 0)

    def load_model(self, *args: Any, **options: Any) -> None:
        fill = DummyModelLoader.load_weights

        def load_weights(loader: Any, model: Any, *given: Any, **named: Any) -> None:
            fill(loader, model, *given, **named)
            self.numbers_drawn = draw(model)

        DummyModelLoader.load_weights = load_weights
        try:
            super().load_model(*args, **options)
        finally:
            DummyModelLoader.load_weights = fill

    def count_drawn(self) -> list[int]:
        return [*self.numbers_drawn]
