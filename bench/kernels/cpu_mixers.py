"""Recurrent layers and latent attention on the CPU against transformers, alternating.

Both sides run in one process. GEMMs are excluded: both sides get the GEMMs' results.

    python -m bench.kernels.cpu_mixers --out bench/results

A ratio is transformers' best time divided by ours, over as many rounds as fit into some seconds.
transformers computes in float32, as Manta does on a CPU, and also in bfloat16, the dtype in which
it loads checkpoints.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.report.result_file import RawLines, versions
from kernels.dispatch import kernels_for
from kernels.metadata import AttentionMeta
from kernels.recurrent.delta_rule import DeltaHeads, DeltaInputs
from kernels.recurrent.mamba1 import Mamba1Inputs
from kernels.recurrent.mamba2 import Mamba2Heads

Call = Callable[[], object]
ours = kernels_for("cpu")
TOKENS = {"decode": 1, "prefill 128": 128, "prefill 512": 512}
BEFORE = 100  # tokens before a decode
BLOCK = 16  # tokens per block


class Given(torch.nn.Module):
    """A module that returns a given tensor, to replace a GEMM."""

    def __init__(self, found: Tensor) -> None:
        super().__init__()
        self.found = found

    def forward(self, x: Tensor) -> Tensor:
        return self.found[:, : x.shape[1]].to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """A layer that both transformers and Manta's kernels compute.

    widths: widths of the GEMM results that both sides get.
    make: returns transformers' layer of a dtype with `Given` for its GEMMs, and its configuration.
    run: calls Manta's kernels.
    """

    hidden: int
    widths: tuple[int, ...]
    make: Callable[[list[Given], torch.dtype], tuple[torch.nn.Module, Any]]
    states: tuple[tuple[int, ...], ...]
    run: Callable[[list[Tensor], list[Tensor], AttentionMeta], object]
    cache: str = "cache_params"  # name of the cache argument in transformers
    latent: int = 0  # elements of a latent per token; 0 without latent attention
    angles: Tensor | None = None  # rotary angles of latent attention, as transformers takes them


def qwen3_next() -> Layer:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    keys, values, size, taps = 16, 32, 128, 4
    channels = (2 * keys + values) * size
    how = DeltaHeads(
        keys, values, size, size, torch.randn(channels, taps), torch.randn(values),
        torch.randn(values), torch.ones(size), 1e-6,
    )  # fmt: skip
    wide = channels + values * size

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
        layer = theirs.Qwen3NextGatedDeltaNet(config, 0).to(dtype)
        layer.in_proj_qkvz, layer.in_proj_ba = products
        return layer, config

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        projected, gates = given
        inputs = DeltaInputs(
            projected[:, :channels],
            projected[:, channels:],
            gates[:, :values],
            gates[:, values:],
            how,
            *kept,
        )
        return ours.gated_delta(inputs, meta)

    states = ((taps - 1, channels), (values, size, size))
    return Layer(2048, (wide, 2 * values), make, states, run)


def kimi_linear() -> Layer:
    from transformers.models.kimi_linear import modeling_kimi_linear as theirs

    heads, size, taps = 32, 128, 4
    inner = heads * size
    how = DeltaHeads(
        heads, heads, size, size, torch.randn(3 * inner, taps), torch.randn(heads),
        torch.randn(inner), torch.ones(size), 1e-5, by_key=True,
    )  # fmt: skip

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.KimiLinearConfig(
            num_hidden_layers=1, layer_types=["linear_attention"], linear_num_heads=heads,
            linear_head_dim=size,
        )  # fmt: skip
        layer = theirs.KimiLinearDeltaAttention(config, 0).to(dtype)
        layer.q_proj, layer.k_proj, layer.v_proj = products[:3]
        layer.forget_gate.f_a_proj, layer.forget_gate.f_b_proj = torch.nn.Identity(), products[3]
        layer.g_a_proj, layer.g_b_proj, layer.b_proj = torch.nn.Identity(), *products[4:]
        return layer, config

    mixed: list[Tensor] = []  # the first three, concatenated, as our GEMM computes them together

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        if not mixed:
            mixed.append(torch.cat(given[:3], 1))
        a, z, b = given[3:]
        return ours.kimi_delta(DeltaInputs(mixed[0], z, a, b, how, *kept), meta)

    states = ((taps - 1, 3 * inner), (heads, size, size))
    return Layer(2304, (inner,) * 5 + (heads,), make, states, run)


def nemotron_h() -> Layer:
    from transformers.models.nemotron_h import modeling_nemotron_h as theirs

    heads, size, groups, state, taps = 128, 64, 8, 128, 4
    inner = heads * size
    channels = inner + 2 * groups * state
    rates = torch.randn(3, heads)
    how = Mamba2Heads(
        heads, size, groups, state, torch.randn(channels, taps), torch.randn(channels), rates[0],
        rates[1], rates[2], (0.0, float("inf")),
    )  # fmt: skip
    norm = torch.ones(inner)

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.NemotronHConfig(
            hidden_size=4096, layers_block_type=["linear_attention"], mamba_num_heads=heads,
            mamba_head_dim=size, n_groups=groups, ssm_state_size=state,
        )  # fmt: skip
        layer = theirs.NemotronHMamba2Mixer(config, 0).to(dtype)
        (layer.in_proj,) = products
        return layer, config

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        (projected,) = given
        output = ours.mamba2(
            projected[:, inner : inner + channels],
            projected[:, inner + channels :],
            how,
            *kept,
            meta,
        )
        return ours.gated_norm(output.flatten(1), projected[:, :inner], norm, groups, 1e-5)

    states = ((taps - 1, channels), (heads, size, state))
    return Layer(4096, (inner + channels + heads,), make, states, run)


def lfm2() -> Layer:
    from transformers.models.lfm2 import modeling_lfm2 as theirs

    channels, taps = 2048, 3
    conv = torch.randn(channels, taps)

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.Lfm2Config(hidden_size=channels, num_hidden_layers=1, layer_types=["conv"])
        layer = theirs.Lfm2ShortConv(config, 0).to(dtype)
        (layer.in_proj,) = products
        return layer, config

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        b, c, x = given[0].split(channels, dim=1)
        return ours.short_conv(x, b, c, conv, None, *kept, meta)

    states = ((taps - 1, channels),)
    return Layer(channels, (3 * channels,), make, states, run, "past_key_values")


def jamba() -> Layer:
    """Make a Mamba layer of Jamba with a dt rank of 16.

    The small rank makes the dt GEMM, which both sides run in torch, negligible.
    """
    from transformers.models.jamba import modeling_jamba as theirs

    channels, size, taps, rank = 8192, 16, 4, 16
    conv, bias = torch.randn(channels, taps), torch.randn(channels)
    rates, skip = -torch.randn(channels, size).exp(), torch.randn(channels)
    step, shift, norms = torch.randn(channels, rank), torch.randn(channels), torch.ones(rank)

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.JambaConfig(
            hidden_size=4096, num_hidden_layers=1, attn_layer_offset=3, attn_layer_period=4,
            mamba_dt_rank=rank,
        )  # fmt: skip
        layer = theirs.JambaMambaMixer(config, 0).to(dtype)
        layer.in_proj, layer.x_proj = products
        return layer, config

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        projected, selected = given
        x = ours.causal_conv(projected[:, :channels], conv, bias, kept[0], meta, silu=True)
        parts = selected.split((rank, size, size), dim=1)
        dt, b, c = (ours.rms_norm(part, norms[: part.shape[1]], 1e-6) for part in parts)
        dt = linear(dt, step, shift)
        return ours.mamba1(
            Mamba1Inputs(x, dt, b, c, rates, skip, projected[:, channels:], kept[1]), meta
        )

    states = ((taps - 1, channels), (channels, size))
    return Layer(4096, (2 * channels, rank + 2 * size), make, states, run)


def deepseek_v2_lite() -> Layer:
    """Make a layer of latent attention with DeepSeek-V2-Lite's sizes.

    Our latents and up-projection are bfloat16, as in a checkpoint. transformers has the
    up-projection in the dtype of its side. Both sides compute the up-projection's GEMM.
    """
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as theirs

    heads, rank, nope, rope, value = 16, 512, 128, 64, 128
    hidden, latent = heads * (nope + rope), rank + rope  # hidden: see Given
    up = (torch.randn(heads, nope + value, rank) / rank**0.5).bfloat16()
    angles = torch.arange(1024)[:, None] / 10000 ** (torch.arange(rope // 2) * 2 / rope)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    norm = torch.ones(rank)

    def make(products: list[Given], dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
        config = theirs.DeepseekV2Config(
            hidden_size=hidden, num_hidden_layers=1, num_attention_heads=heads, q_lora_rank=None,
            kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
            num_key_value_heads=heads, attn_implementation="sdpa",
        )  # fmt: skip
        layer = theirs.DeepseekV2Attention(config, 0).to(dtype)
        layer.q_proj, layer.kv_a_proj_with_mqa = products
        return layer, config

    def run(given: list[Tensor], kept: list[Tensor], meta: AttentionMeta) -> object:
        q, latents = given
        q = q.unflatten(1, (heads, nope + rope))
        q = ours.latent_write(q, latents, norm, 1e-6, cos_sin, kept[0], meta)
        return ours.latent_attention(q, kept[0], up, (nope + rope) ** -0.5, meta)

    turns = torch.polar(torch.ones_like(angles), angles)
    return Layer(
        hidden, (hidden, latent), make, (), run, "past_key_values", latent=latent, angles=turns
    )


LAYERS: dict[str, Callable[[], Layer]] = {
    "qwen3-next": qwen3_next,
    "kimi-linear": kimi_linear,
    "nemotron-h": nemotron_h,
    "lfm2": lfm2,
    "jamba": jamba,
    "deepseek-v2-lite": deepseek_v2_lite,
}


def calls_of(layer: Layer, tokens: int) -> dict[str, Call]:
    """Return calls of the layer for one request: "ours" and, by dtype name, transformers'.

    tokens: tokens of the request in the step; 1: a decode.
    """
    from transformers import DynamicCache

    inputs = [torch.randn(tokens, width) for width in layer.widths]
    before = BEFORE if tokens == 1 else 0
    start = torch.tensor([0, tokens], dtype=torch.int32)
    positions = torch.arange(before, before + tokens, dtype=torch.int32)
    blocks = torch.arange(-(-(before + tokens) // BLOCK), dtype=torch.int32)
    meta = AttentionMeta(
        positions=positions, slots=positions.long(), query_start=start, kv_len=start[1:] + before,
        block_table=blocks[None], num_decodes=int(tokens == 1),
        max_kv_len=tokens + before, query_start_host=[0, tokens], kv_len_host=[tokens + before],
        rows=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    states = [torch.zeros(1, *shape) for shape in layer.states]
    if layer.latent:
        states.append(torch.zeros(len(blocks), 1, BLOCK, layer.latent, dtype=torch.bfloat16))
    calls: dict[str, Call] = {"ours": lambda: layer.run(inputs, states, replace(meta))}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        products = [Given(torch.randn(1, max(tokens, BEFORE), width)) for width in layer.widths]
        theirs, config = layer.make([*products], dtype)
        theirs.out_proj = torch.nn.Identity()
        x = torch.zeros(1, tokens, layer.hidden, dtype=dtype)

        def call(
            cache: DynamicCache | None = None, x: Tensor = x, theirs: Any = theirs,
            config: Any = config, first: int = before,
        ) -> object:  # fmt: skip
            arguments = {layer.cache: DynamicCache(config=config) if cache is None else cache}
            if layer.angles is not None:
                arguments["position_embeddings"] = layer.angles[None, first : first + x.shape[1]]
            return theirs(x, **arguments)

        if tokens > 1:
            calls[name] = call
            continue
        cache = DynamicCache(config=config)
        call(cache, x.expand(1, BEFORE, -1), first=0)
        calls[name] = partial(call, cache)
    return calls


def best_of(calls: dict[str, Call], seconds: float) -> dict[str, float]:
    """Time the calls alternately; return the best milliseconds of each, of at least three runs."""
    best = dict.fromkeys(calls, float("inf"))
    end, turns = time.perf_counter() + seconds, 0
    while turns < 4 or time.perf_counter() < end:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            if turns:  # the first call compiles
                best[name] = min(best[name], took * 1e3)
        turns += 1
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="of cases' names")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    parser.add_argument("--out", type=Path, help="folder for the result files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    raw = RawLines(args.out, "cpu-mixers") if args.out else None
    rows = []
    for name, make in LAYERS.items():
        for step, tokens in TOKENS.items():
            case = f"{name}/{step}"
            if not case.startswith(tuple(args.only)):
                continue
            with torch.inference_mode():
                best = best_of(calls_of(make(), tokens), args.seconds)
            row = {
                "case": case,
                "ratio": round(best["float32"] / best["ours"], 2),
                "ratio_bfloat16": round(best["bfloat16"] / best["ours"], 2),
            }
            print(f"{case:<24} {row['ratio']:7.2f} {row['ratio_bfloat16']:7.2f}", flush=True)
            rows.append(row)
            if raw:
                raw.keep(row, show=False)
    if not rows:
        parser.error(f"--only: no case begins with {' or '.join(args.only)}")
    if raw:
        config = {
            "ours": {"dtype": "float32"},
            "transformers": {"dtype": "float32; ratio_bfloat16: bfloat16"},
            "threads": args.threads,
            "versions": versions("transformers"),
        }
        raw.finish(config, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
