"""RouteTap: records the experts that a model's routers choose in a step, if requested."""

import torch
from torch import Tensor


class RouteTap:
    """The recorded expert ids of all layers in one step.

    on: whether layers record the experts that they choose.
    """

    def __init__(self) -> None:
        self.on = False
        self._chosen: dict[int, Tensor] = {}

    def begin(self, on: bool) -> None:
        """Begin a step: drop the last step's choices, and set whether layers record new ones."""
        self.on = on
        self._chosen = {}

    def note(self, layer: int, ids: Tensor, choices: int) -> None:
        """Store a copy of the experts that a layer chose, in 8 bits or 16 bits each.

        ids: [n, chosen] expert ids.
        choices: the number of experts that the router can choose.
        """
        self._chosen[layer] = ids.to(torch.uint8 if choices <= 256 else torch.int16, copy=True)

    def collect(self, num_layers: int) -> Tensor:
        """Return the ids of all layers [n, num_layers, chosen]; layers without experts have 0."""
        self.on = False
        chosen, self._chosen = self._chosen, {}
        first = next(iter(chosen.values()))
        routes = first.new_zeros(len(first), num_layers, first.shape[1])
        for layer, ids in chosen.items():
            routes[:, layer] = ids
        return routes
