"""Two tokenizers of a few hundred tokens, of the kinds that real models have."""

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def byte_level() -> Tokenizer:
    """Return a byte-level BPE in the style of GPT-2, with ChatML control tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    text = ["the cat sat on the mat and the dog sat on the log", "日本語のテキスト 😀😀 naïve café"]
    backend.train_from_iterator(text, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("a tool", special=False)])
    special = {"eos_token": "<|im_end|>"}
    return Tokenizer(
        backend, special_tokens=special, chat_template=ChatTemplate({"default": CHATML}, special)
    )


def byte_fallback() -> Tokenizer:
    """Return a tokenizer in the style of Llama 2: ▁ for a space, bytes for unknown characters."""
    pieces = ["▁", "a", "b", "c", "t", "h", "e", "▁t", "he", "▁the", "ca", "▁cat", "[", "]", "I"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("c", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(dict.fromkeys([*names, "cat"]))},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(
        backend, special_tokens=special, chat_template=ChatTemplate({"default": INST}, special)
    )


def word_piece() -> Tokenizer:
    """Return a tokenizer whose decoder our code has no table for: spaces depend on the
    neighbours."""
    words = ["[UNK]", "the", "cat", "##s", "sat", ",", "!"]
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)
