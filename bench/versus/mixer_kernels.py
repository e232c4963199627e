"""Kernels of latent attention and delta rules against vLLM's on one GPU, alternating.

Peers are FlashMLA and FlashAttention 3 for decodes, and flash-linear-attention in Triton for
prompts.

    python -m bench.versus.mixer_kernels --out bench/results

Decodes attend to the same latents on both sides, with absorbed queries and without the surrounding
GEMMs. Both sides' plans are made before the timing. Blocks have 64 tokens, which FlashMLA needs;
blocks of 16, the engine's default, have their own case. For prompts ours is everything between a
layer's GEMMs: convolution, gates, norms, and the rule. `vllm` is the same part of vLLM's layer.
`fla` is only the rule, given normed queries and keys, decays and betas; the ratio is not relative
to `fla` if `vllm` ran.

A row's ratio is the fastest comparable peer's time divided by ours. `differs` is the distance
between the results. A peer that is missing or fails is named in the raw lines, and the others
continue.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import sigmoid, softplus

from bench.kernels import mixers
from bench.kernels.measure import Calls, copies_for, time_us
from bench.kernels.mixers import DECODES, RANK, ROPE
from bench.kernels.sizes import LLAMA, Sizes, meta_of
from bench.report.result_file import RawLines, versions
from kernels.attention.candidates import LATENT_DECODE
from kernels.attention.inputs import AbsorbedInputs
from kernels.candidates import first_fit
from kernels.dispatch import kernels_for

FLASH_MLA_BLOCK = 64
SCALE = 0.1
TURNS = 3
PROCESSES = 12
Peers = dict[str, Callable[[], Calls]]


class Case:
    """A case: our calls, and functions that make the peers' calls.

    read: converts a side's result to a common form.
    parts: peers that compute only a part, for which no ratio is reported.
    """

    def __init__(
        self,
        ours: Calls,
        peers: Peers,
        read: Callable[[str, Any], Tensor],
        parts: frozenset[str] = frozenset(),
    ) -> None:
        self.ours, self.peers, self.read, self.parts = ours, peers, read, parts


def decode(s: Sizes, kv_len: list[int], heads: int, block_size: int) -> Case:
    count = len(kv_len)
    meta, num_blocks = meta_of(s, kv_len, [1] * count, count, block_size)
    copies = copies_for(float(sum(kv_len)) * (RANK + ROPE) * s.dtype.itemsize)
    caches = [s.random(num_blocks, 1, block_size, RANK + ROPE) for _ in range(copies)]
    kernels_for("cuda").prepare(meta, heads, caches[0], RANK)
    absorbed, q = s.random(heads, count, RANK), s.random(count, heads, 2 * ROPE)
    rotated, latent_q = q[..., ROPE:], absorbed.transpose(0, 1).contiguous()

    def ours(cache: Tensor) -> Tensor:
        out = q.new_empty(count, heads, RANK)
        inputs = AbsorbedInputs(absorbed, q, cache, SCALE)
        first_fit(LATENT_DECODE, inputs, meta).run(inputs, meta, out)
        return out

    def flash_mla() -> Calls:
        from vllm.v1.attention.ops.flashmla import (  # type: ignore[import-not-found]
            flash_mla_with_kvcache,
            get_mla_metadata,
        )

        both = torch.cat((latent_q, rotated), dim=-1)[:, None]
        plan, _ = get_mla_metadata()  # the first call of the kernel fills the plan
        lengths = (meta.block_table, meta.kv_len, RANK, plan)
        return [
            partial(
                flash_mla_with_kvcache, both, cache.transpose(1, 2), *lengths, softmax_scale=SCALE
            )
            for cache in caches
        ]

    def fa3() -> Calls:
        from vllm.vllm_flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
            flash_attn_varlen_func,
        )

        parts = [cache.transpose(1, 2).split((RANK, ROPE), dim=-1) for cache in caches]
        return [
            partial(
                flash_attn_varlen_func,
                rotated,
                rotary,
                latent,
                q_v=latent_q,
                max_seqlen_q=1,
                cu_seqlens_q=meta.query_start,
                max_seqlen_k=meta.max_kv_len,
                seqused_k=meta.kv_len,
                block_table=meta.block_table,
                softmax_scale=SCALE,
                causal=True,
                fa_version=3,
            )
            for latent, rotary in parts
        ]

    def read(side: str, output: Any) -> Tensor:
        output = output[0] if isinstance(output, tuple) else output
        return torch.as_tensor(output).float().reshape(count, heads, RANK)

    peers: Peers = {"fa3": fa3}
    if block_size == FLASH_MLA_BLOCK:
        peers["flashmla"] = flash_mla
    return Case([partial(ours, cache) for cache in caches], peers, read)


def _prompt(work: Any, rule: Callable[..., Calls], layer: Callable[..., Calls] | None) -> Case:
    """Make the case of a prompt from the work of `mixers.delta` or `mixers.kimi`.

    rule: makes calls of the peer's rule from the values that precede the rule in a layer.
    layer: makes calls of the peer's whole layer from our inputs; None if it has none.
    """
    call = work.calls[0]
    x, z, a, b, heads, tail, state, meta, *_ = call.args
    sizes = (heads.key_size, heads.key_size, heads.value_size)
    counts = (heads.key_heads, heads.key_heads, heads.value_heads)
    widths = [size * count for size, count in zip(sizes, counts, strict=True)]
    mixed = kernels_for("cuda").causal_conv(x, heads.conv, None, tail.clone(), meta, silu=True)
    q, k, v = (
        part.unflatten(1, (count, -1))
        for part, count in zip(mixed.split(widths, dim=1), counts, strict=True)
    )
    q, k = (tensor * (tensor.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for tensor in (q, k))
    inputs = [tensor.to(x.dtype)[None].contiguous() for tensor in (q, k, v)]
    beta = sigmoid(b.float())[None]
    initial = state.new_zeros(1, heads.value_heads, heads.value_size, heads.key_size)
    starts = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device)

    def read(side: str, output: Any) -> Tensor:
        if side != "fla":
            return torch.as_tensor(output).float()
        rule_output = output[0][0].float()  # before the norm and the gate
        mean = rule_output.square().mean(-1, keepdim=True)
        normed = rule_output * (mean + heads.eps).rsqrt() * heads.norm
        gate = z.float()
        gate = gate.sigmoid() if heads.by_key else gate * gate.sigmoid()
        return normed.flatten(1) * gate

    def fla() -> Calls:
        return rule(inputs, a, beta, heads, initial, starts)

    peers: Peers = {"fla": fla}
    if layer is not None:
        peers["vllm"] = partial(layer, x, z, a, b, heads, initial, starts)
    return Case(work.calls, peers, read, frozenset({"fla"} if layer is not None else ()))


def _delta_rule(
    given: list[Tensor], a: Tensor, beta: Tensor, heads: Any, initial: Tensor, starts: Tensor
) -> Calls:
    from vllm.model_executor.layers.fla.ops import (  # type: ignore[import-not-found]
        chunk_gated_delta_rule,
    )

    decays = (-heads.decay.exp() * softplus(a.float() + heads.bias))[None]
    how = {"initial_state": initial, "output_final_state": True, "cu_seqlens": starts}
    return [partial(chunk_gated_delta_rule, *given, decays, beta, **how)] * 4


def _delta_layer(
    x: Tensor, z: Tensor, a: Tensor, b: Tensor, heads: Any, initial: Tensor, starts: Tensor
) -> Calls:
    """Return calls of vLLM's QwenGatedDeltaNetAttention without its GEMMs, for a new prompt."""
    from vllm.model_executor.layers.fla.ops import (
        chunk_gated_delta_rule,
        fused_post_conv_prep,
    )
    from vllm.model_executor.layers.fla.ops.layernorm_guard import (  # type: ignore[import-not-found]
        rmsnorm_fn,
    )
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import (  # type: ignore[import-not-found]
        causal_conv1d_fn,
    )
    from vllm.v1.attention.backends.utils import (  # type: ignore[import-not-found]
        compute_causal_conv1d_metadata,
    )

    metadata = compute_causal_conv1d_metadata(starts.cpu(), device=x.device)
    meta = SimpleNamespace(
        nums_dict=metadata[0], batch_ptr=metadata[1], token_chunk_offset_ptr=metadata[2]
    )
    taps = heads.conv.shape[1]
    conv = heads.conv.to(x.dtype)
    # vLLM's blocks of states have channels last; block 0 is reserved.
    tails = x.new_zeros(2, taps - 1, x.shape[1]).transpose(1, 2)
    where = torch.ones(1, dtype=torch.int32, device=x.device)
    begins = torch.zeros(1, dtype=torch.bool, device=x.device)
    norm = heads.norm.to(x.dtype)

    def call() -> Any:
        mixed = causal_conv1d_fn(
            x.transpose(0, 1), conv, None, tails, starts, where, begins, "silu", metadata=meta
        ).transpose(0, 1)
        q, k, v, decays, beta = (
            tensor[None]
            for tensor in fused_post_conv_prep(
                mixed, a, b, heads.decay, heads.bias, heads.key_heads, heads.key_size,
                heads.value_size,
            )
        )  # fmt: skip
        output, _ = chunk_gated_delta_rule(
            q, k, v, decays, beta, initial_state=initial, output_final_state=True,
            cu_seqlens=starts,
        )  # fmt: skip
        rows, gates = output.reshape(-1, heads.value_size), z.reshape(-1, heads.value_size)
        return rmsnorm_fn(rows, norm, None, gates, heads.eps).view(len(x), -1)

    return [call] * 4


def _kimi_rule(
    given: list[Tensor], a: Tensor, beta: Tensor, heads: Any, initial: Tensor, starts: Tensor
) -> Calls:
    from vllm.model_executor.layers.fla.ops.kda import (  # type: ignore[import-not-found]
        chunk_kda_with_fused_gate,
    )

    q, k, v = given
    gates = a.unflatten(1, (heads.key_heads, -1))[None].contiguous()
    how = {"initial_state": initial, "output_final_state": True, "cu_seqlens": starts}

    def call() -> Any:  # the results replace the values
        return chunk_kda_with_fused_gate(
            q, k, v.clone(), gates, beta, heads.decay, heads.bias, **how
        )

    return [call] * 4


def cases(s: Sizes) -> dict[str, Callable[[], Case]]:
    cases: dict[str, Callable[[], Case]] = {}
    for heads in (16, 128):  # heads of DeepSeek V2 Lite and of V3
        for name, kv_len in DECODES.items():
            case = f"latent decode/{heads} heads, {name}"
            cases[case] = partial(decode, s, kv_len, heads, FLASH_MLA_BLOCK)
            if heads == 16:
                cases[f"{case}, blocks of 16"] = partial(decode, s, kv_len, heads, 16)
    length = [8192]
    cases["delta prefill/1 x 8192"] = lambda: _prompt(
        mixers.delta(s, length, length), _delta_rule, _delta_layer
    )
    cases["kimi prefill/1 x 8192"] = lambda: _prompt(
        mixers.kimi(s, length, length), _kimi_rule, None
    )
    return cases


def measured(name: str, case: Case) -> Iterator[dict[str, Any]]:
    """Yield the lines of a case: each side's best of TURNS, failures, and at last the row."""
    with torch.inference_mode():
        wanted = case.read("ours", case.ours[0]())
        sides: dict[str, Calls] = {"ours": case.ours}
        differs = {}
        for peer, make in case.peers.items():
            try:
                calls = make()
                output = case.read(peer, calls[0]())
                torch.cuda.synchronize()
                sides[peer] = calls
                differs[peer] = round(float((output - wanted).norm() / wanted.norm()), 4)
            except Exception as error:  # another package may raise any exception
                yield {
                    "case": name,
                    "side": peer,
                    "error": f"{type(error).__name__}: {error}"[:400],
                }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(TURNS):
            for side, calls in sides.items():
                times[side].append(time_us(calls, 10))
    for side, some in times.items():
        yield {"case": name, "side": side, "us": [round(us, 2) for us in some]}
    best = {side: min(some) for side, some in times.items()}
    ours = best.pop("ours")
    whole = best.keys() - case.parts or best.keys()
    if whole:
        peer = min(whole, key=lambda side: best[side])
        yield {
            "case": name,
            "ours": round(ours, 2),
            "peer": round(best[peer], 2),
            "unit": "us",
            "against": peer,
            "differs": differs[peer],
            "ratio": round(best[peer] / ours, 3),
        }


def compile_all(only: list[str]) -> None:
    """Fill Triton's cache in several processes, each with a share of the launches.

    flash-linear-attention autotunes tens of launches per kernel, which take minutes in one process.
    """
    base = [sys.executable, "-m", "bench.versus.mixer_kernels", "--only", *only, "--share"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    count = min(PROCESSES, max(1, (os.cpu_count() or 2) - 2))
    running = [subprocess.Popen([*base, str(i), str(count)], **quiet) for i in range(count)]
    for process in running:
        process.wait()


def compile_share(chosen: dict[str, Callable[[], Case]], index: int, count: int) -> None:
    """Compile this process's share of the configurations that other libraries' kernels try.

    Each case runs once. The share is every count-th configuration of a kernel's autotuner from
    number `index` on, or the first one. Process 0 also compiles Manta's kernels.

    chosen: name -> function that makes the case.
    """
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_share(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(tuner, "whole"):
            tuner.whole = tuner.configs
            tuner.configs = tuner.whole[index::count] or tuner.whole[:1]
        return run(tuner, *args, **kwargs)

    Autotuner.run = run_share  # type: ignore[method-assign]
    for make in chosen.values():
        case = make()
        with torch.inference_mode():
            if index == 0:
                case.ours[0]()
            for peer in case.peers.values():
                try:
                    peer()[0]()
                except Exception as error:  # the timing reports the failure
                    print(error, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="of cases' names")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = {
        name: make for name, make in cases(LLAMA).items() if name.startswith(tuple(args.only))
    }
    if not chosen:
        parser.error(f"--only: no case begins with {' or '.join(args.only)}")
    if args.share:
        compile_share(chosen, *args.share)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device here")
    began = time.perf_counter()
    prompts = [name for name in chosen if "prefill" in name]
    if prompts:
        compile_all(prompts)
    print(f"compiled after {time.perf_counter() - began:.1f} s", flush=True)
    raw, rows = RawLines(args.out, "versus-mixer-kernels"), []
    for name, make in chosen.items():
        for line in measured(name, make()):
            raw.keep(line)
            if "ratio" in line:
                rows.append(line)
    config = {"ours": {"dtype": "bfloat16"}, "versions": versions("vllm")}
    raw.finish(config, rows)
    print(f"{len(rows)} of {len(chosen)} cases in {time.perf_counter() - began:.1f} s")
    return int(len(rows) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
