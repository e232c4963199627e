"""Ablations measured on this machine's CPU: a technique is switched on and off in alternation.

The best of several rounds counts. If a docstring names no other model, the default model is used,
with engine and client in one process. Measured is the CPU time of one core, which is stable also on
a busy machine.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.ablations.ablation_row import AblationRow
from bench.ablations.lengths import Sizes, batches, sharegpt
from engine.config.engine_config import EngineConfig
from engine.factory import build
from engine.library.llm import LLM
from engine.messages import Delta, EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.text.detokenizer import ChoiceDecoder
from engine.text.tokenizer import Tokenizer
from kernels.cpu.codegen.compiler import has_int8
from kernels.cpu.gemm.dense import PackedInt8, PackedLinear


def _core(folder: Path, **fields: Any) -> EngineCore:
    values = {
        "max_model_len": 2048,
        "num_blocks": 1024,
        "num_threads": 1,
        "prefix_caching": False,
        **fields,
    }
    return build(EngineConfig(model=str(folder), device="cpu", **values))[0]


def _serve(core: EngineCore, groups: Sequence[Sizes]) -> float:
    """Return the CPU seconds to serve the groups of requests one after another.

    The requests of a group are submitted at once.
    """
    begin = time.process_time()
    number = 0
    for group in groups:
        for prompt, output in group:
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            ids = [10 + (number * 31 + i) % 20_000 for i in range(prompt)]
            core.add_request(EngineRequest(number, ids, prompt, params, seed=0))
            number += 1
        while core.has_work():
            core.step()
    return time.process_time() - begin


def _in_turns(rounds: int, *sides: Callable[[], float]) -> list[float]:
    """Return the best seconds of each side over alternating rounds."""
    return [min(times) for times in zip(*[[side() for side in sides] for _ in range(rounds)],
                                        strict=True)]  # fmt: skip


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Disable the CPU back end's generated kernels within the context.

    Torch then runs each operation separately, and FBGEMM the matmuls with 16-bit weights. Decodes
    are padded to one length.
    """
    with (
        mock.patch.object(PackedLinear, "fits", staticmethod(lambda weight: False)),
        mock.patch("kernels.cpu.native.attention_for", lambda *shape: None),
    ):
        yield


def fusion(folder: Path, scale: float, rounds: int) -> list[AblationRow]:
    """Measure fused against unfused kernels.

    Prompts have 5, 13, 27 and 51 tokens, and outputs are equally long.
    """
    output = max(4, int(32 * scale))
    rows = []
    fused = _core(folder)
    with _unfused():
        plain = _core(folder)
    for batch in (1, 8, 32):
        sizes = [((5, 13, 27, 51)[i % 4], output) for i in range(batch)]

        def unfused(sizes: Sizes = sizes) -> float:
            with _unfused():
                return _serve(plain, [sizes])

        ours, theirs = _in_turns(rounds, lambda sizes=sizes: _serve(fused, [sizes]), unfused)
        tokens = batch * output
        rows.append(
            AblationRow.of(
                f"fusion SmolLM2-135M, batch {batch}: fused / unfused",
                tokens / ours,
                tokens / theirs,
                "tok/s",
                claimed=1.4 if batch == 32 else None,
                how="measured",
            )
        )
    return rows


def continuous_batching(folder: Path, scale: float, rounds: int) -> list[AblationRow]:
    """Measure continuous against static batching with ShareGPT's lengths, scaled by a tenth."""
    rows = []
    sizes = sharegpt(max(16, int(32 * scale)), scale=0.1)
    for limit, ideal in ((8, 2.20),):
        core = _core(folder, max_num_seqs=limit)
        filled = batches(sizes, limit, fill_prompts=False)
        ours, theirs = _in_turns(
            rounds, lambda core=core: _serve(core, [sizes]),
            lambda core=core, filled=filled: _serve(core, filled),
        )  # fmt: skip
        rows.append(
            AblationRow.of(
                f"continuous-batching SmolLM2-135M, at most {limit} at once: "
                "continuous / static batches",
                len(sizes) / ours,
                len(sizes) / theirs,
                "req/s",
                claimed=ideal,
                how="measured",
            )
        )
    return rows


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


VOCAB = (
    # vocabulary of the detokenization model; with the tokenizer's, the head would take most of a
    # step
    1024
)


def detokenization(folder: Path, scale: float, rounds: int) -> list[AblationRow]:
    """Measure detokenization in the engine's loop against detokenization in another process.

    There are 256 streams. The model has two tiny layers and the default model's tokenizer. Only the
    loop's process is timed, since it limits throughput if each process has its own core.
    """
    count, output = max(16, int(256 * scale)), 64
    tokenizer = Tokenizer.load(folder)
    prompts = [f"Request {i}: tell me about the number {i * 7919}." for i in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    with tempfile.TemporaryDirectory(prefix="manta-ablations-") as name:
        tiny = Path(name)
        (tiny / "config.json").write_text(json.dumps({**TINY, "vocab_size": VOCAB}))
        fields: dict[str, Any] = {
            "model": name, "device": "cpu", "load_format": "dummy", "num_threads": 1,
            "max_num_seqs": 256, "num_blocks": 4096, "max_model_len": 512, "prefix_caching": False,
        }  # fmt: skip
        core = build(EngineConfig(**fields))[0]
        ours, theirs = _in_turns(
            rounds,
            lambda: _beside(fields, tokenizer, prompts, params),
            lambda: _inline(core, tokenizer, prompts, params),
        )
    return [
        AblationRow.of(
            f"detokenization {count} streams: text beside the loop / in it",
            count * output / ours,
            count * output / theirs,
            "tok/s",
            claimed=1.3,
            how="measured",
        )
    ]


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return [token % VOCAB for token in tokenizer.encode(prompt)]


def _chunk(text: str) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text}]}).encode()


def _beside(
    fields: dict[str, Any], tokenizer: Tokenizer, prompts: list[str], params: SamplingParams
) -> float:
    """Return the engine process's CPU seconds if another process detokenises.

    All requests arrive at once.
    """
    with LLM(**fields, tokenizer=tokenizer) as llm:
        begin = _processor_seconds(llm.pid)
        llm.generate([_ids(tokenizer, prompt) for prompt in prompts], params)
        return _processor_seconds(llm.pid) - begin


def _processor_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a process, on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _inline(
    core: EngineCore, tokenizer: Tokenizer, prompts: list[str], params: SamplingParams
) -> float:
    begin = time.process_time()
    decoders = []
    for number, prompt in enumerate(prompts):
        ids = _ids(tokenizer, prompt)
        core.add_request(EngineRequest(number, ids, len(ids), params, seed=1))
        decoders.append(ChoiceDecoder(tokenizer, params, prompt=ids))
    while core.has_work():
        deltas: list[Delta] = core.step()
        for delta in deltas:
            _chunk(decoders[delta.id].feed(delta.token_ids, delta.finish).text)
    return time.process_time() - begin


def int8_weights(folder: Path, scale: float, rounds: int) -> list[AblationRow]:
    """Measure matmuls with 8-bit against 16-bit weights, by number of rows."""
    if not has_int8():
        return []
    torch.set_num_threads(1)
    rows = []
    weight = torch.randn(4096, 4096).mul_(0.02).bfloat16()
    eight, sixteen = PackedInt8(weight, None), PackedLinear(weight, None)
    for count in (1, 8, 32, 128):
        x = torch.randn(count, 4096)

        def seconds(product: PackedLinear, x: torch.Tensor = x) -> float:
            product(x)
            begin = time.process_time()
            for _ in range(4):
                product(x)
            return (time.process_time() - begin) / 4

        ours, theirs = _in_turns(
            4 * rounds, lambda f=seconds: f(eight), lambda f=seconds: f(sixteen)
        )
        work = 2 * count * weight.numel() / 1e9
        rows.append(
            AblationRow.of(
                f"int8-weights {count} rows x 4096 x 4096: 8-bit / 16-bit weights",
                work / ours,
                work / theirs,
                "GFLOP/s",
                claimed=None,
                how="measured",
            )
        )
    return rows


def ragged_prefill(folder: Path, scale: float, rounds: int) -> list[AblationRow]:
    """Measure ragged prefill batches against padded ones, with a third of ShareGPT's lengths."""
    sizes = [(prompt, 1) for prompt, _ in sharegpt(max(16, int(16 * scale)), scale=0.33)]
    core = _core(folder)
    rows = []
    for size, share in ((4, 0.63), (8, 0.76)):
        ragged = [sizes[at : at + size] for at in range(0, len(sizes), size)]
        filled = batches(sizes, size)
        ours, theirs = _in_turns(
            rounds, lambda groups=ragged: _serve(core, groups),
            lambda groups=filled: _serve(core, groups),
        )  # fmt: skip
        rows.append(
            AblationRow.of(
                f"ragged-prefill SmolLM2-135M, prompts in batches of {size}: ragged / filled up",
                len(sizes) / ours,
                len(sizes) / theirs,
                "req/s",
                claimed=round(1 / (1 - share), 2),
                how="measured",
            )
        )
    return rows


WORKLOADS = {
    "fusion": fusion,
    "continuous-batching": continuous_batching,
    "detokenization": detokenization,
    "int8-weights": int8_weights,
    "ragged-prefill": ragged_prefill,
}
