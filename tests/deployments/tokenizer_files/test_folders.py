"""Folders as published, without tokenizer.json: resolved, refused, with a chat template on record,
and served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.checkpoints.resolve import ModelIdentity, check_model, resolve_model
from deployments.config.load import parse_config
from deployments.router.models import model_loader
from deployments.serve.model_deployments import served_model
from engine.errors import ConfigError, InvalidRequest
from engine.library.llm import LLM
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from engine.text.tokenizer import Tokenizer
from tests.deployments.tokenizer_files.published import (
    Library,
    baichuan2,
    chatglm2,
    chatglm3,
    chatglm3_later,
    converted,
    internlm,
    llama,
    opt,
    qwen,
    tekken,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32000,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Llama's folder with tokenizer.model, and with Python code that must not run."""
    place = tmp_path / "model"
    place.mkdir()
    llama(place)
    (place / "config.json").write_text(json.dumps(LLAMA))
    (place / "model.safetensors").write_bytes(b"x" * 100)
    (place / "tokenization_own.py").write_text("raise SystemExit('the code of a folder has run')")
    return place


def resolved(folder: Path, cache: Path) -> Path:
    return resolve_model(str(folder), cache=cache)


def test_a_folder_is_converted_once(folder: Path, tmp_path: Path) -> None:
    """Converted at each start, or not again when its tokenizer has changed; or the weights are
    copied, or its code is taken along."""
    target = resolved(folder, tmp_path / "cache")
    assert target != folder and (target / "tokenizer.json").is_file()
    assert (target / "model.safetensors").resolve() == folder / "model.safetensors"
    assert not (target / "tokenization_own.py").exists()
    stamp = (target / "tokenizer.json").stat().st_mtime_ns
    assert resolved(folder, tmp_path / "cache") == target
    assert (target / "tokenizer.json").stat().st_mtime_ns == stamp
    assert ModelIdentity.of(target).tokenizer
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    other = resolved(folder, tmp_path / "cache")
    assert other != target
    assert Tokenizer.load(target).encode("a", add_special_tokens=True)[0] == 1
    assert Tokenizer.load(other).encode("a", add_special_tokens=True)[0] != 1
    (folder / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    assert resolved(folder, tmp_path / "cache") == folder


def test_a_class_that_is_not_known_is_refused(folder: Path) -> None:
    """XGLM's class shifts SentencePiece's ids by one: read as Llama's, every token is another."""
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "XGLMTokenizer"}')
    with pytest.raises(ConfigError, match=r"class XGLMTokenizer is not converted \(known: Bai"):
        check_model(str(folder))
    shutil.copy(folder / "tokenizer.model", folder / "other.model")
    (folder / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check_model(str(folder))


def _truncate(folder: Path) -> None:
    file = folder / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:-100_000])


def _ranks(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "qwen.tiktoken").write_bytes(content) and None


def _merges(folder: Path) -> None:
    (folder / "tokenizer.model").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"tokenizer.model cannot be converted .*ends too early"),
        (_ranks(b"!! 0\n"), r"qwen.tiktoken cannot be converted .*line 1"),
        (_ranks(b"YQ== 0\nYg== 7\n"), "its ranks are not 0, 1, 2"),
        (_ranks(b"YQ== 0\n"), "no token for the byte 0"),
        (_merges, "merges.txt cannot be converted .*line 2 joins no two tokens"),
    ],
)
def test_damaged_files(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    """A download that was cut gives a tokenizer with half its merges, which reads every text."""
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        resolved(folder, tmp_path / "cache")


def test_unigram_models_are_refused(folder: Path, tmp_path: Path) -> None:
    """Unigram models are refused: their best paths tie in runs of a character, where the two
    libraries differ."""
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    proto = model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    proto.trainer_spec.model_type = 1
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(ConfigError, match="only SentencePiece's BPE is converted"):
        resolved(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM"),
        ({"tokenizer_class": "XGLMTokenizer"}, "class XGLMTokenizer is not converted"),
        ({}, ""),
    ],
    ids=["architecture", "tokenizer", "served"],
)
def test_a_hub_model_is_refused_before_its_weights_are_fetched(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    message: str,
) -> None:
    """A user waited for 140 GB to be told that the architecture is not known."""
    import huggingface_hub

    if "architectures" in changed:
        (folder / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    elif changed:
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
    asked: list[str] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if message:
        with pytest.raises(ConfigError, match=message):
            resolve_model("org/name", cache=tmp_path / "cache")
    else:
        target = resolve_model("org/name", cache=tmp_path / "cache")
        assert (target / "tokenizer.json").is_file()
    assert "tokenizer.model" in asked and "qwen.tiktoken" in asked
    assert not any(pattern.endswith(".py") or pattern == "*" for pattern in asked)
    assert ("*.safetensors" in asked) == (not message)


# -- chat templates on record


CHAT = [
    {"role": "user", "content": "Hi people, soporific"},
    {"role": "assistant", "content": "Ho\nho"},
    {"role": "user", "content": " 你好"},
]


def _qwen_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `make_context` of Qwen 1."""
    start, end, line = 151644, 151645, library.encode("\n")

    def turn(role: str, text: str) -> list[int]:
        return [start, *library.encode(role), *line, *library.encode(text), end, *line]

    ids = turn("system", "You are a helpful assistant.")
    for message in CHAT:
        ids += turn(message["role"], message["content"])
    return [*ids, start, *library.encode("assistant"), *line]


def _baichuan_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `build_chat_input` of Baichuan 2."""
    ids: list[int] = []
    for message in CHAT:
        ids += [195 if message["role"] == "user" else 196, *library.encode(message["content"])]
    return [*ids, 196]


def _chatglm3_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `build_chat_input` of ChatGLM 3, which encodes role and message
    apart."""
    ids = [64790, 64792]
    for message in CHAT:
        ids.append(64795 if message["role"] == "user" else 64796)
        ids += library.encode("\n") + library.encode(message["content"])
    return [*ids, 64796]


def _chatglm2_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `build_prompt` of ChatGLM 2."""
    question, answer, last = (message["content"] for message in CHAT)
    text = f"[Round 1]\n\n问：{question}\n\n答：{answer}\n\n[Round 2]\n\n问：{last}\n\n答："
    return [64790, 64792, *library.encode(text)]


def _internlm_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `build_inputs` of InternLM 1."""
    question, answer, last = (message["content"] for message in CHAT)
    return library.encode(
        f"<s><|User|>:{question}<eoh>\n<|Bot|>:{answer}<eoa>\n<|User|>:{last}<eoh>\n<|Bot|>:"
    )


def _tekken_chat(library: Library) -> list[int]:
    """Return the ids of CHAT by `encode_chat_completion` of mistral-common, version 3."""
    ids = [1]
    for message in CHAT:
        words = library.encode(message["content"])
        ids += [3, *words, 4] if message["role"] == "user" else [*words, 2]
    return ids


@pytest.mark.parametrize(
    ("published", "chat", "ends"),
    [
        (chatglm3, _chatglm3_chat, {2, 64795, 64797}),
        (chatglm3_later, _chatglm3_chat, {2, 64795, 64797}),
        pytest.param(qwen, _qwen_chat, {151643, 151644, 151645}, marks=pytest.mark.slow),
        pytest.param(chatglm2, _chatglm2_chat, {2}, marks=pytest.mark.slow),
        pytest.param(baichuan2, _baichuan_chat, {2}, marks=pytest.mark.slow),
        pytest.param(internlm, _internlm_chat, {2, 92541}, marks=pytest.mark.slow),
        pytest.param(tekken, _tekken_chat, {2}, marks=pytest.mark.slow),
    ],
)
def test_templates_on_record(
    tmp_path: Path,
    published: Callable[[Path], Library],
    chat: Callable[[Library], list[int]],
    ends: set[int],
) -> None:
    """A model that was trained on other turns answers worse, and does not stop at its answer's
    end."""
    source, target = tmp_path / "model", tmp_path / "converted"
    source.mkdir()
    target.mkdir()
    library = published(source)
    if not (source / "config.json").is_file():
        (source / "config.json").write_text('{"eos_token_id": 2}')
    if published is qwen:
        (source / "config.json").unlink()
    tokenizer = converted(source, target)
    assert tokenizer.encode_chat(CHAT) == chat(library)
    assert set(tokenizer.eos_token_ids) == ends


def test_opt_has_completions_only(tmp_path: Path) -> None:
    """A made-up template for a base model gives chats that look like an answer."""
    source, target = tmp_path / "model", tmp_path / "converted"
    source.mkdir()
    target.mkdir()
    opt(source)
    tokenizer = converted(source, target)
    with pytest.raises(InvalidRequest) as caught:
        tokenizer.encode_chat(CHAT)
    assert caught.value.code == "no_chat_template"


def test_a_template_of_the_configuration_goes_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model published without a template, or with a broken one, has no chats. The routers of
    other nodes do not have the file."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_loader, "first_served", lambda app, name, now: now)  # it asks Ray
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")

    def chat(data: dict[str, Any]) -> list[int]:
        config = parse_config({"model": str(folder), **data}, {}, check_files=False)
        _, tokenizer, _ = model_loader._load(served_model(config, 0), "app")
        return tokenizer.encode_chat([{"role": "user", "content": "a"}])

    with pytest.raises(InvalidRequest, match="no chat template"):
        chat({})
    by_file = chat({"chat_template": str(file)})
    file.write_text("{% if %}")
    assert by_file == chat({"chat_template": "{{ bos_token }}{{ messages[0].content }}"})
    with pytest.raises(ConfigError, match=r"chat_template: .*not valid"):
        chat({"chat_template": str(file)})
    with pytest.raises(ConfigError, match=r"nowhere\.jinja cannot be read"):
        chat({"chat_template": "nowhere.jinja"})


# -- served


_SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
_CONFIGS: dict[str, tuple[Callable[[Path], Library], dict[str, Any]]] = {
    "qwen 1": (
        qwen,
        {
            "architectures": ["QWenLMHeadModel"],
            "model_type": "qwen",
            **_SIZES,
            "intermediate_size": 64,
            "kv_channels": 16,
            "vocab_size": 151936,
            "seq_length": 256,
            "layer_norm_epsilon": 1e-6,
            "rotary_emb_base": 10000,
            "rotary_pct": 1.0,
            "no_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "chatglm 3": (
        chatglm3,
        {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "kv_channels": 16,
            "multi_query_attention": True,
            "multi_query_group_num": 1,
            "padded_vocab_size": 65024,
            "seq_length": 256,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "rmsnorm": True,
            "eos_token_id": 2,
        },
    ),
    "baichuan 2": (
        baichuan2,
        {
            "architectures": ["BaichuanForCausalLM"],
            "model_type": "baichuan",
            **_SIZES,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "vocab_size": 125696,
            "rms_norm_eps": 1e-6,
        },
    ),
    "internlm 1": (
        internlm,
        {
            "architectures": ["InternLMForCausalLM"],
            "model_type": "internlm",
            **_SIZES,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "vocab_size": 103168,
            "rms_norm_eps": 1e-6,
            "bias": True,
        },
    ),
    "opt": (
        opt,
        {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            **_SIZES,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 256,
            "vocab_size": 50272,
            "eos_token_id": 2,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _CONFIGS)
def test_a_published_folder_is_served(tmp_path: Path, name: str) -> None:
    """Every part finds the tokenizer: the engine's grammars too, and ids that it lacks are never
    sampled."""
    published, config = _CONFIGS[name]
    source = tmp_path / "model"
    source.mkdir()
    published(source)
    (source / "config.json").write_text(json.dumps(config))
    folder = resolve_model(str(source), weights=False, cache=tmp_path / "cache")
    with LLM(str(folder), load_format="dummy", device="cpu", num_blocks=32, num_threads=1) as llm:
        short = SamplingParams(max_tokens=4, temperature=0.0)
        assert len(llm.generate("Hello", short)[0].outputs[0].token_ids) <= 4
        grammar = SamplingParams(max_tokens=4, structured=Grammar("regex", "[ab]{3}"))
        assert set(llm.generate("Hello", grammar)[0].outputs[0].text) <= {"a", "b"}
        if name == "opt":
            with pytest.raises(InvalidRequest, match="no chat template"):
                llm.chat(CHAT, short)
        else:
            assert llm.chat(CHAT, short)[0].outputs[0].token_ids
