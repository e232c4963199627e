"""The lines of `manta plan` about attention's kernels."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.cli.plan import run as run_plan
from engine.architectures.latent import Latent
from engine.config.model_config import LayerAttention
from engine.layers.attention.kernels_used import attention_kernels
from engine.parallel.group import TensorParallelGroup
from kernels.kv.format import FORMATS, KVFormat
from tests.engine.weights.test_products import LLAMA

PLAIN = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, rope=None, scale=0.1)
SLOPED = replace(PLAIN, slopes=(0.5,) * 32)
LATENT = replace(PLAIN, num_heads=128, head_dim=576, latent=Latent(512, 64, 128, 128))
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("layer", "kv", "capability", "ranks", "kernels"),
    [
        (PLAIN, "", HOPPER, 1, ("attention_decode", "specialized_prefill")),
        (PLAIN, "", HOPPER, 16, ("attention_decode", "specialized_prefill")),
        (PLAIN, "", AMPERE, 1, ("attention_decode", "attention_prefill")),
        (SLOPED, "", HOPPER, 1, ("attention_decode", "attention_prefill")),
        (PLAIN, "fp8", HOPPER, 1, ("quantized_decode", "quantized_prefill")),
        (LATENT, "", HOPPER, 1, ("specialized_decode", "latent_expanded or latent_prefill")),
        (LATENT, "", HOPPER, 8, ("latent_decode", "latent_expanded or latent_prefill")),
    ],
)  # fmt: skip
def test_kernels_of_a_layer(
    layer: LayerAttention,
    kv: str,
    capability: tuple[int, int],
    ranks: int,
    kernels: tuple[str, str],
) -> None:
    """Bug: plan names a kernel that the device, cache, scores or a rank's heads do not get."""
    form = FORMATS[kv] if kv else KVFormat()
    group = TensorParallelGroup(ranks - 1, ranks)
    layers = [layer, replace(layer, window=128), replace(layer, attends=False)]
    lines = list(attention_kernels(layers, group, torch.bfloat16, form, 16, capability))
    assert len(lines) == 1
    assert lines[0].endswith(f": decodes by {kernels[0]}, prompts by {kernels[1]}")


def test_plan_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: the lines never reach the command, or those of deterministic mode are the ordinary."""

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run_plan(str(tmp_path), "h200", 1, None) == 0
    text = "attention, heads of 64 in groups of 1: decodes by attention_decode, prompts by"
    assert text in capsys.readouterr().out
    group = TensorParallelGroup(0, 1)
    lines = list(attention_kernels([PLAIN], group, torch.bfloat16, KVFormat(), 16, HOPPER, True))
    assert lines == ["attention, heads of 128 in groups of 4: attention_prefill_fixed"]
