"""Vectors of texts: what a checkpoint's files say, the numbers, and what steps make of them."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError, InvalidRequest
from engine.messages import Delta, EngineRequest
from engine.pooled_checkpoint import read_pooling
from engine.pooling import Pooling, PoolingHead, as_array
from engine.sampling_params import SamplingParams
from tests.engine.models.checkpoints import load_model, save_checkpoint
from tests.engine.text import small_tokenizers
from tests.fakes import make_core, make_request, run
from tests.parity.engine_driver import engine

POOLED = SamplingParams(max_tokens=0, temperature=0.0, pooled=True)
KINDS = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}


def pool(folder: Path, mode: str = "mean", *kinds: str, **pooling: Any) -> None:
    """Write sentence-transformers' files. kinds: modules behind the Pooling."""
    modules = ["Transformer", "Pooling", *kinds]
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for module in listed:
        (folder / module["path"]).mkdir(exist_ok=True)
    flags = {flag: name == mode for name, flag in KINDS.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({**flags, **pooling}))


def dense(folder: Path, activation: str) -> torch.nn.Linear:
    layer = torch.nn.Linear(32, 12)
    save_file(
        {"linear.weight": layer.weight.data, "linear.bias": layer.bias.data},
        folder / "model.safetensors",
    )
    config = {"in_features": 32, "out_features": 12, "bias": True}
    config["activation_function"] = f"torch.nn.modules.activation.{activation}"
    (folder / "config.json").write_text(json.dumps(config))
    return layer


def vectors(core: Any, prompts: list[list[int]], beside: bool = False) -> list[np.ndarray]:
    for number, prompt in enumerate(prompts):
        core.add_request(EngineRequest(number, list(prompt), len(prompt), POOLED, 1))
    if beside:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        core.add_request(EngineRequest(1000, [5, 6, 7], 3, params, 1))
    ended: dict[int, Delta] = {}
    while core.has_work():
        ended |= {delta.id: delta for delta in core.step() if delta.finish}
    core.check_integrity()
    assert not beside or ended[1000].finish == "length"
    return [as_array(ended[number].vector or b"") for number in range(len(prompts))]


PROMPTS = [[3 + (n * j) % 90 for j in range(1, n + 1)] for n in (1, 5, 40, 7, 64, 20)]


@pytest.mark.parametrize("mode", KINDS)
def test_vectors_equal_transformers(mode: str, tmp_path: Path) -> None:
    """A chunk's states that are lost or added twice, a token of the neighbour's: vectors that are
    nearly right, so that only the search results are worse."""
    theirs = save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    pool(tmp_path, mode, "Normalize")
    core = engine(tmp_path, max_num_batched_tokens=16, max_model_len=64)
    for ours, prompt in zip(vectors(core, PROMPTS, beside=True), PROMPTS, strict=True):
        hidden = theirs.model(torch.tensor([prompt])).last_hidden_state[0]
        want = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[mode]
        want = torch.nn.functional.normalize(want, dim=0).detach().numpy()
        assert np.abs(ours - want).max() < 1e-5
    assert core.stats().prefix_queries == 3, "texts look nothing up; the request beside them does"


def test_a_checkpoint_without_head_and_network_name(tmp_path: Path) -> None:
    """Embedding models are saved as the bare network: Qwen3-Embedding has no lm_head, no "model."
    before its names, and a config.json that says that its head is not tied."""
    theirs = save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    pool(tmp_path, "last", "Dense")
    layer = dense(tmp_path / "2_Dense", "Tanh")
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3Model"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = engine(tmp_path, max_model_len=64)
    (ours,) = vectors(core, [PROMPTS[3]])
    hidden = theirs.model(torch.tensor([PROMPTS[3]])).last_hidden_state[0]
    assert np.abs(ours - torch.tanh(layer(hidden[-1])).detach().numpy()).max() < 1e-5
    core.add_request(EngineRequest(9, [5, 6], 2, SamplingParams(max_tokens=3), 1))
    (refused,) = core.step()
    assert refused.error.startswith("generation_not_supported: ")


def test_stored_names() -> None:
    """A prefix that is put before what the checkpoint calls otherwise: weights that are missing."""
    from engine.architectures import ARCHITECTURES

    record = ARCHITECTURES["Qwen3ForCausalLM"]
    names = {
        "layers.0.self_attn.q_proj": "model.layers.0.self_attn.q_proj",
        "norm.weight": "model.norm.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "mtp.0.weight": "mtp.0.weight",
    }
    assert {name: record.stored_name(name) for name in names} == names
    for architecture in ARCHITECTURES.values():
        for tensor in architecture.tensors.values():
            for name in tensor.names:
                assert architecture.stored_name(name) == name


def test_texts_survive_preemption_and_leave_nothing_cached() -> None:
    """Preempted texts begin again: what was pooled before must not count twice. A text's blocks in
    the prefix cache would push out those that somebody will ask for."""
    for seed in range(20):
        draw = random.Random(seed)
        head = PoolingHead(Pooling("mean"), 2)
        core, _ = make_core(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=12, pooling=head)
        requests = []
        for id in range(1, 25):
            length = draw.randrange(1, 60)
            if draw.random() < 0.6:
                params: Mapping[str, Any] = {"max_tokens": 0, "pooled": True}
            else:
                params = {"max_tokens": draw.randrange(1, 40), "ignore_eos": True}
            requests.append(make_request(id, length, **params))
        prompts = {request.id: list(request.token_ids) for request in requests}
        outputs = run(core, requests)
        for request in requests:
            last = outputs[request.id].deltas[-1]
            assert last.finish == "length", last
            if request.params.pooled:
                assert last.vector is not None and not outputs[request.id].tokens
                mean = sum(prompts[request.id]) / len(prompts[request.id])
                assert as_array(last.vector).tolist() == pytest.approx([mean, 1.0])
    core, _ = make_core(pooling=head)
    run(core, [make_request(1, 40, max_tokens=0, pooled=True)])
    again = run(core, [make_request(1, 40, max_tokens=2)])
    assert again[1].cached == 0


def test_what_is_refused() -> None:
    """A request that pools and generates, or a model that cannot: silence, or a dead engine."""
    for changes in ({"max_tokens": None}, {"n": 2}, {"prompt_logprobs": 1}):
        with pytest.raises(InvalidRequest) as refusal:
            SamplingParams(**{"pooled": True, "max_tokens": 0, **changes})
        assert refusal.value.param == "pooled"
    core, _ = make_core()
    (delta,) = run(core, [make_request(1, max_tokens=0, pooled=True)])[1].deltas
    assert delta.error.startswith("embeddings_not_supported: ")


def test_files(tmp_path: Path) -> None:
    """Pooling that is guessed where the files say something else."""
    assert read_pooling(tmp_path) is None
    pool(tmp_path, "cls", "Normalize")
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "query: ", "passage": "passage: "}, "default_prompt_name": null}'
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    (tmp_path / "config.json").write_text('{"matryoshka_dimensions": [4, 8]}')
    read = read_pooling(tmp_path)
    assert read is not None
    assert (read.mode, read.steps, read.max_tokens) == ("cls", (None,), 48)
    assert read.prompt("query") == "query: "
    with pytest.raises(InvalidRequest, match="it has: query, passage"):
        read.prompt("other")
    vector = np.array([3, 4, 0, 0, 12], np.float32)
    assert np.allclose(read.cut(vector, 2), [0.6, 0.8])
    read.check_dimensions(8, 16)
    with pytest.raises(InvalidRequest, match="one of 4, 8"):
        read.check_dimensions(5, 16)
    with pytest.raises(InvalidRequest, match="matryoshka_dimensions"):
        Pooling("mean").check_dimensions(2, 16)

    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert read_pooling(tmp_path).mode == "last"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("modules.json", '{"a": 1}', "list of modules"),
        ("modules.json", '[{"type": "a.LSTM", "path": "x"}]', "LSTM is not supported"),
        ("modules.json", "[]", "no Pooling"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "max_tokens is not"),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', "'max' is not supported"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "include_prompt"),
        ("2_Dense/config.json", '{"activation_function": "x.SiLU"}', "'SiLU' is not supported"),
        ("2_Dense/config.json", "{}", "in_features: is missing"),
    ],
)
def test_files_that_are_not_understood(file: str, text: str, match: str, tmp_path: Path) -> None:
    """The error names file and key."""
    pool(tmp_path, "mean", "Dense")
    (tmp_path / "2_Dense/config.json").write_text('{"in_features": 2, "out_features": 2}')
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=match) as error:
        read_pooling(tmp_path)
    assert str(tmp_path / file) in error.value.message


def test_a_bare_network_is_found(tmp_path: Path) -> None:
    """transformers names a network that was saved alone after its class."""
    save_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3Model"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_folder(tmp_path).generates  # nothing says that it is for vectors
    load_model(tmp_path)


def test_encode_cuts_between_special_tokens() -> None:
    """A cut text without its last special token, where BERT's and Qwen3's vectors live."""
    tokenizer = small_tokenizers.word_piece()
    whole = tokenizer.encode("the quick brown fox " * 9, add_special_tokens=True)
    plain = tokenizer.encode("the quick brown fox " * 9)
    special = len(whole) - len(plain)
    for limit in (special, special + 3, len(whole) - 1, len(whole), len(whole) + 5):
        cut = tokenizer.encode(
            "the quick brown fox " * 9, add_special_tokens=True, max_tokens=limit
        )
        assert len(cut) == min(limit, len(whole))
        if special:
            assert (cut[0], cut[-1]) == (whole[0], whole[-1])


@pytest.mark.slow  # starts an engine process
def test_llm_embed(tmp_path: Path) -> None:
    """What a program gets: arrays in the order of the texts, errors by name."""
    theirs = save_checkpoint(
        tmp_path, "qwen3", vocab_size=390, is_matryoshka=True, tie_word_embeddings=True
    )
    pool(tmp_path, "mean", "Normalize")
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    tokenizer = small_tokenizers.byte_level()
    with LLM(str(tmp_path), tokenizer=tokenizer, device="cpu", dtype="float32") as llm:
        texts = ["the sea", "a", "the land and the sea"]
        vectors = llm.embed(texts, prompt_name="query")
        for text, ours in zip(texts, vectors, strict=True):
            ids = torch.tensor([tokenizer.encode("q: " + text, add_special_tokens=True)])
            want = theirs.model(ids).last_hidden_state[0].mean(0)
            want = torch.nn.functional.normalize(want, dim=0).detach().numpy()
            assert np.abs(ours - want).max() < 1e-5
        (short,) = llm.embed("the sea", dimensions=8)
        assert short.shape == (8,) and np.linalg.norm(short) == pytest.approx(1)
        with pytest.raises(InvalidRequest, match="maximum context"):
            llm.embed("the sea " * 300)
        assert llm.embed("the sea " * 300, truncate=True)[0].shape == (32,)
        assert llm.generate("the sea", SamplingParams(max_tokens=2))[0].finished


def test_tokens_of_a_text(tmp_path: Path) -> None:
    """Bug: files of sentence-transformers 6 say it in tokenizer_config.json alone, and a text that
    the library cuts is refused, or cut elsewhere."""
    (tmp_path / "config.json").write_text("{}")
    pool(tmp_path, "mean")

    def most(file: str, **values: Any) -> int:
        (tmp_path / file).write_text(json.dumps(values))
        pooling = read_pooling(tmp_path)
        assert pooling is not None
        return pooling.max_tokens

    assert most("tokenizer_config.json", model_max_length=int(1e30)) == 0
    assert most("tokenizer_config.json", model_max_length=48) == 48
    assert most("sentence_bert_config.json", max_seq_length=32) == 32
