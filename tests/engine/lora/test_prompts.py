"""Prompt tuning, p-tuning and prefix tuning against peft on tiny random models, through a whole
engine on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import NewRow
from engine.config.model_config import ModelConfig
from engine.errors import AdapterError
from engine.lora.peft_config import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.virtual_tokens import VirtualTokensReader
from engine.messages import EngineRequest
from engine.sampling import cpu_sampler
from engine.sampling.parameter_rows import ParameterRows
from engine.sampling_params import SamplingParams
from tests.engine.lora.adapters import save_adapter, save_prompt, with_adapter
from tests.engine.lora.test_logits import (
    MODELS,
    PARAMS,
    add_adapter,
    check,
    engine,
    run,
    run_odd_ones_scored,
    scores,
    slots_in_graphs,
    submit,
)
from tests.engine.models.checkpoints import save_checkpoint

# Blocks have 4 tokens: whole ones, parts, less than one; and more than a step takes.
PROMPTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "words": ("prompt_tuning", 5, {}),
    "long": ("prompt_tuning", 21, {}),
    "encoder": ("p_tuning", 3, {"encoder_hidden_size": 16}),
    "keys": ("prefix_tuning", 7, {}),
    "blocks": ("prefix_tuning", 8, {}),
    "projected": ("prefix_tuning", 2, {"prefix_projection": True, "encoder_hidden_size": 16}),
}


def save_all(theirs: Any, folder: Path) -> dict[str, Path]:
    folders = {
        name: save_prompt(theirs, folder / name, kind, count, seed, **fields)
        for seed, (name, (kind, count, fields)) in enumerate(PROMPTS.items())
    }
    return folders | {"lora": save_adapter(theirs, folder / "lora")}


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_peft(name: str, tmp_path: Path) -> None:
    """Each kind alone, then all with base rows and a LoRA in one batch, in chunks that end within
    the virtual tokens, with the log-probabilities of prompts, and with more adapters than slots."""
    model_type, changes = MODELS[name]
    theirs = save_checkpoint(tmp_path / "base", model_type, **changes)
    folders = save_all(theirs, tmp_path)
    core = engine(tmp_path / "base", max_virtual_tokens=21, max_num_batched_tokens=16)
    for adapter, folder in folders.items():
        info = add_adapter(core, adapter, folder)
        kind, count, _ = PROMPTS.get(adapter, ("lora", 0, {}))
        assert (info.kind, info.virtual_tokens) == (kind, count)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (9, 30, 1)]
    wanted: dict[int, tuple[str, list[int]]] = {}
    outputs: dict[int, Any] = {}
    for adapter in ("", *folders):
        wanted[len(wanted)] = (adapter, prompts[len(wanted) % 3])
        submit(core, len(wanted) - 1, wanted[len(wanted) - 1][1], adapter)
        outputs |= run(core)  # alone
    for prompt in prompts:
        for adapter in ("", *folders, ""):
            # prompt_logprobs keeps a request from looking into the prefix cache
            fields = {} if len(wanted) % 2 else {"prompt_logprobs": None}
            submit(core, len(wanted), prompt, adapter, **fields)
            wanted[len(wanted)] = (adapter, prompt)
    outputs |= run(core)
    with torch.no_grad():
        for adapter in ("", *folders):
            model = with_adapter(theirs, folders[adapter]).eval() if adapter else theirs
            for request_id, (other, prompt) in wanted.items():
                if other == adapter:
                    check(outputs[request_id], prompt, model)
                    first = outputs[request_id].deltas[0].prompt_logprobs
                    assert first is None or len(first) == len(prompt)
            if adapter == "lora":
                model.unload()


def test_preemption_prefix_cache_and_takeover(tmp_path: Path) -> None:
    """Blocks run out, adapters take turns in one slot, and prompts share prefixes. What is cached
    is told without virtual tokens and is found by one revision alone; a request that began
    elsewhere goes on as it would have."""
    theirs = save_checkpoint(tmp_path / "base", "qwen3")
    folders = save_all(theirs, tmp_path)
    core = engine(
        tmp_path / "base", num_blocks=26, max_loras=1, max_virtual_tokens=21, max_num_seqs=8
    )
    used = ["", "words", "keys", "lora"]
    for name in used[1:]:
        add_adapter(core, name, folders[name])
    prompt = torch.randint(3, 101, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = {}
    for number in range(16):
        wanted[number] = (used[number % 4], prompt[: 16 + number % 5])
        fields = {"prompt_logprobs": None, "max_tokens": 14 + number}
        submit(core, number, wanted[number][1], wanted[number][0], **fields)
    outputs = run(core)
    assert core.scheduler.counters.preemptions, "blocks did not run out"
    for name, virtual in (("words", 5), ("keys", 7)):
        for number in (19, 20):
            submit(core, number, prompt, name, prompt_logprobs=None, max_tokens=14)
            again = run(core)[number]
        assert again.cached == (virtual + 20) // 4 * 4 - virtual
        params = SamplingParams(max_tokens=14, **(PARAMS | {"prompt_logprobs": None}))
        known = prompt + again.tokens[:6]
        core.add_request(EngineRequest(21, known, len(prompt), params, 20, adapter=name))
        assert run(core)[21].tokens == again.tokens[6:]
        outputs[len(wanted)], wanted[len(wanted)] = again, (name, prompt)
    save_prompt(theirs, tmp_path / "other", "prefix_tuning", 7, seed=9)
    add_adapter(core, "keys", tmp_path / "other")
    submit(core, 22, prompt, "keys", prompt_logprobs=None)
    replaced = run(core)[22]
    assert replaced.cached == 0
    folders["other"] = tmp_path / "other"
    outputs[len(wanted)], wanted[len(wanted)] = replaced, ("other", prompt)
    with torch.no_grad():
        for name in (*used, "other"):
            model = with_adapter(theirs, folders[name]).eval() if name else theirs
            for number, (other, text) in wanted.items():
                if other == name:
                    check(outputs[number], text, model)
            if name == "lora":
                model.unload()


def test_a_prefix_is_kept_once(tmp_path: Path) -> None:
    """Bug: every request has its own copy of the keys; or those who run share the part of a block
    that their prompts go on in. And the context counts virtual tokens, the caller's usage does not.
    """
    theirs = save_checkpoint(tmp_path / "base", "llama")
    save_prompt(theirs, tmp_path / "keys", "prefix_tuning", 18)
    core = engine(tmp_path / "base", max_virtual_tokens=18, max_model_len=40)
    add_adapter(core, "keys", tmp_path / "keys")
    for number in range(3):
        submit(core, number, [5 + number], "keys", prompt_logprobs=None, max_tokens=3)
    while not core.scheduler.running:
        core.step()
    tables = [request.blocks for request in core.scheduler.running.values()]
    assert len(tables) == 3
    assert len({tuple(blocks[:4]) for blocks in tables}) == 1
    assert len({blocks[4] for blocks in tables}) == 3
    assert all(output.cached <= 1 for output in run(core).values())
    for length, max_tokens, finish in ((21, None, "length"), (22, 1, "error"), (21, 9, "length")):
        submit(core, length, [7] * length, "keys", max_tokens=max_tokens, prompt_logprobs=None)
        output = run(core)[length]
        assert output.finish == finish
        if finish == "error":
            assert output.deltas[0].error.startswith("context_length_exceeded: ")
            assert "18 virtual tokens" in output.deltas[0].error
        else:
            assert len(output.tokens) == 1


def test_penalties_see_words_alone() -> None:
    """Bug: the repetition penalty reads a logit for a token that no vocabulary has."""
    rows = ParameterRows(1, 10, torch.device("cpu"))
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5)
    rows.set(NewRow(0, [], 4, params, 0, 0, []))
    logits = np.ones(10, np.float32)
    cpu_sampler.edit(logits, rows, 0, 5, np.array([12, 11, 3, 4, 4], np.int32))
    assert logits.tolist() == [1, 1, 1, 0.5, 0.0, 1, 1, 1, 1, 1]


def test_files(tmp_path: Path) -> None:
    """What does not fit the model, or is broken, is refused by name."""
    theirs = save_checkpoint(tmp_path / "base", "llama")
    model = ModelConfig.from_folder(tmp_path / "base")
    reader = VirtualTokensReader(model, torch.float32, torch.float16, 8)
    vectors = save_prompt(theirs, tmp_path / "v", "prompt_tuning", 4)
    keys = save_prompt(theirs, tmp_path / "k", "prefix_tuning", 4)
    assert reader.read(vectors, "").weights.values.shape == (4, 32)
    loaded = reader.read(keys, "")
    assert loaded.weights.values.shape == (4, 4, 2, 12)
    assert loaded.host_bytes == loaded.described.num_bytes == 4 * 4 * 2 * 12 * 2
    good = load_file(keys / WEIGHTS_FILE)["prompt_embeddings"]
    cases: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
        ({"num_virtual_tokens": 9}, {}, "adapter_incompatible", "max_virtual_tokens 8"),
        ({"num_virtual_tokens": 0}, {}, "adapter_invalid", "num_virtual_tokens"),
        ({"num_virtual_tokens": 3}, {}, "adapter_incompatible", "[4, 96]"),
        ({"num_attention_heads": 4}, {}, "adapter_incompatible", "4 key heads"),
        ({"num_layers": 3}, {}, "adapter_incompatible", "3 layers"),
        ({"num_transformer_submodules": 2}, {}, "adapter_invalid", "submodules"),
        ({"task_type": "SEQ_CLS"}, {}, "adapter_invalid", "task_type"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, {}, "adapter_invalid", "peft_type"),
        ({}, {"prompt_embeddings": good[:, :-1]}, "adapter_incompatible", "[4, 95]"),
        ({}, {"prompt_embeddings": good * torch.nan}, "adapter_invalid", "NaN"),
        ({}, {"prompt_embeddings": good * 1e30}, "adapter_invalid", "infinity"),
        ({}, {"prompt_embeddings": good, "head": good + 0}, "adapter_invalid", "something else"),
        ({}, {"embeddings": good}, "adapter_invalid", "something else"),
    ]
    text = (keys / CONFIG_FILE).read_text()
    for fields, tensors, code, words in cases:
        (keys / CONFIG_FILE).write_text(json.dumps(json.loads(text) | fields))
        changed = tensors or {"prompt_embeddings": good}
        save_file(
            {name: value.contiguous() for name, value in changed.items()}, keys / WEIGHTS_FILE
        )
        with pytest.raises(AdapterError) as caught:
            reader.read(keys, "")
        assert caught.value.code == code and words in caught.value.message, caught.value.message


def test_refused_where_there_is_no_room(tmp_path: Path) -> None:
    """Bug: virtual tokens are looked up behind the end of the table."""
    theirs = save_checkpoint(tmp_path / "base", "llama")
    save_prompt(theirs, tmp_path / "v", "prompt_tuning", 4)
    core = engine(tmp_path / "base")
    with pytest.raises(AssertionError, match="max_virtual_tokens 0"):
        add_adapter(core, "v", tmp_path / "v")


@pytest.mark.gpu
def test_on_the_gpu(tmp_path: Path) -> None:
    """Slots, graphs and prefix copies: all kinds, two LoRAs and base rows decode together in
    graphs, also in two slots, as peft says. Bug: no LoRA is in a graph beside virtual tokens."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    theirs = save_checkpoint(tmp_path / "base", "qwen3", **sizes)
    folders = save_all(theirs, tmp_path)
    # With it the number of names is odd: each is among the scored and among the others.
    folders["lora2"] = save_adapter(theirs, tmp_path / "lora2", seed=1, r=24, lora_alpha=24)
    for slots in (8, 2):
        core = engine(
            tmp_path / "base",
            device="cuda",
            block_size=16,
            max_num_batched_tokens=128,
            max_loras=slots,
            max_virtual_tokens=21,
        )
        for name, folder in folders.items():
            add_adapter(core, name, folder)
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (9, 40, 1)]
        plan = [(name, prompt) for prompt in prompts for name in ("", *folders)]
        seen = slots_in_graphs(core)
        outputs = run_odd_ones_scored(core, plan)
        assert seen, "graphs with adapters were not replayed"
        assert slots < len(folders) or len(seen) > 1  # the two may take turns in one of few slots
        with torch.no_grad():
            for name in ("", *folders):
                model = with_adapter(theirs, folders[name]) if name else theirs
                for number, (other, prompt) in enumerate(plan):
                    if other != name:
                        continue
                    if number % 2:
                        check(outputs[number], prompt, model, atol=2e-2)
                        continue
                    ids = prompt + outputs[number].tokens
                    best = model(torch.tensor([ids])).logits[0, -len(ids) :].log_softmax(-1)
                    chosen = scores(model, ids)[len(prompt) - 1 :]
                    lost = best[len(prompt) - 1 : -1].max(-1).values - chosen
                    assert lost.max() < 5e-2, "a token that is not the likeliest"
                if name.startswith("lora"):
                    model.unload()
