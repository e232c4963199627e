"""LayerMethods: chooses the linear method of each layer, by the setting `quantization_layers`."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from engine.errors import ConfigError
from engine.quantization.method import LinearMethod

KEY = "quantization_layers"


class LayerMethods:
    """The linear methods of a model's layers, as `quantization_layers` sets them.

    default: the method of layers that no pattern matches.
    methods: pattern of the names of matrices, without ".weight" -> method. The first match applies.
    """

    def __init__(self, default: LinearMethod, methods: Mapping[str, LinearMethod]) -> None:
        self._default, self._methods = default, methods
        self._unused = dict.fromkeys(methods)

    def of(self, layer: str, names: Sequence[str]) -> LinearMethod:
        """Return the method of a layer whose matrix is made of the checkpoint's matrices `names`.

        layer: the layer's name, for errors.
        Raises ConfigError if a pattern matches only some of the merged matrices.
        """
        patterns = {pattern_of(self._methods, name): name for name in names}
        for pattern in patterns:
            self._unused.pop(pattern or "", None)
        if len(patterns) > 1:
            both = " and ".join(sorted(patterns.values())[:2])
            raise ConfigError(
                f"{KEY}: {both} are multiplied as one matrix ({layer}), and the patterns give them "
                "different formats; name all matrices of that layer",
                param=KEY,
            )
        (pattern,) = patterns
        return self._default if pattern is None else self._methods[pattern]

    def check(self) -> None:
        """Raise ConfigError naming a pattern that matched no matrix of the whole model."""
        if self._unused:
            raise no_match(next(iter(self._unused)))


def no_match(pattern: str) -> ConfigError:
    """Return the error for a pattern that matches no matrix."""
    return ConfigError(
        f"{KEY}: {pattern!r} matches no matrix of this model; names are as in its files, such as "
        "model.layers.0.mlp.down_proj",
        param=KEY,
    )


def pattern_of(patterns: Mapping[str, object], name: str) -> str | None:
    """Return the first pattern that matches a matrix's name; None if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
