"""linear_method: chooses the LinearMethod for a configuration and a checkpoint."""

from collections.abc import Callable, Mapping
from functools import partial

from engine.config.quant_formats import QUANT_FORMATS, QuantFormat
from engine.config.quantized import GGUF_BLOCKS, Quantized
from engine.errors import ConfigError
from engine.quantization.by_layer import LayerMethods
from engine.quantization.cpu import DenseCpu, Int8Cpu
from engine.quantization.method import DenseCuda, LinearMethod
from engine.quantization.rounded.cpu import RoundedCpu
from engine.quantization.rounded.cuda import RoundedCuda
from engine.quantization.stored.cpu import StoredCpu
from engine.quantization.stored.cuda import StoredCuda
from kernels.dispatch import Kernels

AS_STORED = "gguf"  # the value of `quantization` that keeps the blocks of a .gguf file
_AS_THEY_ARE = ("auto", "none")  # values of `quantization` that do not quantise weights


def _methods(quant: QuantFormat) -> dict[str, Callable[[Kernels], LinearMethod]]:
    """Return {type of device: constructor of the linear method for a format}."""
    makers: dict[str, Callable[[Kernels], LinearMethod]] = {
        "cpu": partial(RoundedCpu, quant=quant) if quant.activations == 8 else Int8Cpu,
        "cuda": partial(RoundedCuda, quant=quant),
    }
    return {device: makers[device] for device in quant.devices}


# Value of `quantization` for a checkpoint with 16- or 32-bit weights -> methods by type of device.
METHODS: dict[str, dict[str, Callable[[Kernels], LinearMethod]]] = {
    "none": {"cpu": DenseCpu, "cuda": DenseCuda},
    **{name: _methods(quant) for name, quant in QUANT_FORMATS.items()},
}


def check_quantization(name: str, device: str, quantized: Quantized | None) -> None:
    """Raise ConfigError if a value of `quantization` is invalid for the device or the checkpoint.

    device: the type of the device.
    quantized: the checkpoint's quantisation.
    """
    if name not in _AS_THEY_ARE and name != AS_STORED and name not in METHODS:
        raise ConfigError(
            f"quantization {name!r} is not supported; supported: "
            f"{', '.join(('auto', *METHODS, AS_STORED))}",
            param="quantization",
        )
    if quantized is not None:
        if name not in _AS_THEY_ARE and not (name == quantized.method == AS_STORED):
            raise ConfigError(
                f"quantization {name!r}: the checkpoint's weights are {quantized.name} already; "
                "set quantization: none",
                param="quantization",
            )
    elif name == AS_STORED:
        raise ConfigError(
            "quantization 'gguf' keeps the blocks of a .gguf file, and this model has none of "
            f"{', '.join(GGUF_BLOCKS)}; set quantization: none",
            param="quantization",
        )
    elif name not in _AS_THEY_ARE and device not in METHODS[name]:
        runs = ", ".join(method for method, devices in METHODS.items() if device in devices)
        raise ConfigError(
            f"quantization {name!r} does not run on {device}; there: {runs}", param="quantization"
        )


def linear_method(
    name: str, kernels: Kernels, device: str, quantized: Quantized | None = None
) -> LinearMethod:
    """Create the linear method for a value of `quantization`. Raises as `check_quantization`.

    device: the type of the device.
    """
    check_quantization(name, device, quantized)
    if quantized is not None:
        return (StoredCpu if device == "cpu" else StoredCuda)(kernels, quantized)
    return METHODS["none" if name in _AS_THEY_ARE else name][device](kernels)


def methods_by_layer(
    default: LinearMethod,
    formats: Mapping[str, str],
    kernels: Kernels,
    device: str,
    quantized: Quantized | None = None,
) -> LayerMethods:
    """Create the methods of layers by the setting `quantization_layers`.

    default: the method of layers without a matching pattern.
    formats: pattern of names -> value of `quantization`.
    Raises ConfigError for a quantised checkpoint, and as `check_quantization`.
    """
    if quantized is not None:
        raise ConfigError(
            f"quantization_layers: the checkpoint's weights are {quantized.name} already; leave it "
            "out, or take a checkpoint in 16 bits",
            param="quantization_layers",
        )
    methods: dict[str, LinearMethod] = {}
    for name in dict.fromkeys(formats.values()):
        try:
            methods[name] = linear_method(name, kernels, device)
        except ConfigError as error:
            raise ConfigError(
                f"quantization_layers: {error.message}", param="quantization_layers"
            ) from None
    return LayerMethods(default, {pattern: methods[name] for pattern, name in formats.items()})
