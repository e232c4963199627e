"""ImageEncoder: a model's vision encoder (tower) alone, which encodes images for other engines.

Each image is encoded in a separate batch. So its embeddings depend on the image alone, and equal
those of an engine on the same device that encodes the image in a separate batch.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError, InvalidRequest
from engine.images.image import Image
from engine.models.registry import build_tower_alone
from engine.models.vision.tower import Tower
from engine.resolve import Resolved, resolve
from engine.runner.memory import (
    WEIGHTS_TOO_LARGE,
    available_host_memory,
    check_weights,
    fits_on,
)
from engine.weights import load_weights
from engine.weights.parameter import Parameter, Unit
from kernels.dispatch import kernels_for


class TowerAlone:
    """A vision encoder without its language model, for `load_weights` and the memory plan.

    Replicas of an encoder pool load this model.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        """Allocate the tower on a device, or on torch's "meta" device to get only sizes.

        Raises ConfigError for a model without a tower.
        """
        self._config: ModelConfig = resolved.model
        # On "meta" kernels are never called.
        kernels = kernels_for(
            "cpu" if device.type == "meta" else device.type, resolved.config.deterministic
        )
        tower = build_tower_alone(
            resolved.model, resolved.dtype, device, kernels, runs_on=resolved.device.type
        )
        if tower is None:
            raise ConfigError(
                f"{resolved.folder}: the model takes no images, so it has nothing to encode; leave "
                "out the pool with role: encoder",
                param="model",
            )
        self.tower: Tower = tower
        self.device, self.dtype = tower.device, tower.dtype
        linears = tower.linears
        filled = sum(parameter.tensor.nbytes for parameter in tower.parameters())
        self.num_bytes = filled + sum(linear.num_bytes - linear.loading_bytes for linear in linears)
        self.open_bytes = sum(linear.loading_bytes for linear in linears if linear.transient)
        self.loading_bytes = self.num_bytes + self.open_bytes
        # The maximum number of embeddings of an image, and the bytes of activations that they take.
        self.largest = tower.config.largest or resolved.image_cache_tokens
        self.step_bytes = tower.step_bytes(self.largest)

    def parameters(self) -> Iterator[Parameter]:
        return self.tower.parameters()

    def units(self) -> Iterator[Unit]:
        return (linear.unit for linear in self.tower.linears)

    def tensor_name(self, stored: str) -> str:
        return self._config.tensor_name(stored)

    def ignores(self, stored: str) -> bool:
        return False

    def finish(self) -> None:
        for linear in self.tower.linears:
            if linear.parameters:
                linear.finish()


class ImageEncoder:
    """The vision encoder of a model on one device; only the thread that created it may call it.

    dtype: the name of the embeddings' dtype, as in `Image.rows_dtype`.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load the tower. Raises ConfigError for anything that a user can correct."""
        resolved = resolve(config)
        device = resolved.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(resolved.num_threads)
        self.dtype = str(resolved.dtype).removeprefix("torch.")
        with fits_on(device, "the tower's weights", WEIGHTS_TOO_LARGE, param="model"):
            self._model = model = TowerAlone(resolved, device)
            if device.type == "cpu":
                check_weights([model], available_host_memory())
            vision = model.tower.config
            folder = None if config.load_format == "dummy" else resolved.folder
            load_weights(model, folder, seed=config.seed or 0, owns=vision.owns)
            # a warm-up that compiles kernels and allocates the memory of a large image
            if device.type == "cuda":
                shape = model.tower.shape_of(model.largest)
                self._encode(np.zeros((*shape, 3), np.uint8))

    def encode(self, image: Image) -> NDArray[np.uint8]:
        """Return the embeddings of an image in the format of `Image.rows`.

        Raises InvalidRequest for an image whose pixels contradict its declared size, or that has
        more embeddings than `engine.image_cache_tokens`.
        """
        if image.size > self._model.largest:
            raise InvalidRequest(f"an image of {image.size} embeddings is too large here")
        pixels = np.frombuffer(image.pixels, np.uint8)
        try:
            pixels = pixels.reshape(*image.shape, 3)
        except ValueError:
            message = f"{len(pixels)} bytes do not fit the shape {image.shape}"
            raise InvalidRequest(message) from None
        rows = self._encode(pixels)
        if len(rows) != image.size:
            raise InvalidRequest(f"an image of {image.size} embeddings gave {len(rows)}")
        return rows.reshape(-1)

    @torch.inference_mode()
    def _encode(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the embeddings of an image's pixels as bytes [embeddings, row bytes]."""
        model = self._model
        rows = model.tower.encode([torch.tensor(pixels, device=model.device)])
        return rows.to(model.dtype).contiguous().view(torch.uint8).cpu().numpy()
