"""known_template: chat templates for models that were published with Python code instead of a
template.

Each template renders the prompt that the model's own function `chat` would build. A template in the
model folder has precedence over these, and the configuration's `chat_template` over both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.checkpoints.tokenizer_files.folder import TokenizerFolder


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A chat template, and the tokens that end an answer, besides the model's EOS.

    source: the template in jinja. ends: texts of the tokens.
    """

    source: str
    ends: tuple[str, ...] = ()


_ALTERNATE = (
    "{%- if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('this model takes no message of the role ' ~ message['role']) }}"
    "{%- endif %}"
)

_CHATML = KnownTemplate(
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ("<|im_end|>", "<|im_start|>"),
)

# ChatGLM 2 numbers the rounds of question and answer.
_ROUNDS = KnownTemplate(
    "{{- '[gMASK]sop' }}"
    "{%- set round = namespace(number=0) %}"
    "{%- for message in messages %}" + _ALTERNATE + "{%- if message['role'] == 'user' %}"
    "{%- set round.number = round.number + 1 %}"
    "{{- '[Round ' ~ round.number ~ ']\\n\\n问：' + message['content'] + '\\n\\n答：' }}"
    "{%- else %}"
    "{{- message['content'] + '\\n\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
)

_ROLES = KnownTemplate(
    "{{- '[gMASK]sop' }}"
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n ' + message['content'] }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}",
    ("<|user|>", "<|observation|>"),
)

_INTERNLM = KnownTemplate(
    "{{- bos_token }}"
    "{%- for message in messages %}" + _ALTERNATE + "{%- if message['role'] == 'user' %}"
    "{{- '<|User|>:' + message['content'] + '<eoh>\\n' }}"
    "{%- else %}"
    "{{- '<|Bot|>:' + message['content'] + '<eoa>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Bot|>:' }}{%- endif %}",
    ("<eoa>",),
)


def _baichuan(user: str, assistant: str, end: str) -> KnownTemplate:
    """Return Baichuan's template, with a token before each message and a token after earlier
    answers.

    user, assistant: tokens before messages of these roles. end: token after an earlier answer.
    """
    return KnownTemplate(
        "{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}{{- message['content'] }}"
        f"{{%- elif message['role'] == 'user' %}}{{{{- '{user}' + message['content'] }}}}"
        f"{{%- else %}}{{{{- '{assistant}' + message['content'] + '{end}' }}}}"
        "{%- endif %}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- '{assistant}' }}}}{{%- endif %}}"
    )


def _mistral(system_tokens: bool) -> KnownTemplate:
    """Return the template of Mistral's models with tekken.json, without tools.

    system_tokens: whether a system message has tokens of its own; if false, it is put before the
        last question.
    """
    before = (
        "{%- if message['role'] == 'system' %}"
        "{{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}"
        if system_tokens
        else "{%- if message['role'] == 'system' %}{%- set first.system = message['content'] %}"
    )
    question = (
        "message['content']"
        if system_tokens
        else "(first.system + '\\n\\n' if first.system and loop.last else '') + message['content']"
    )
    return KnownTemplate(
        "{%- if tools %}"
        "{{- raise_exception('tools need a chat template of the model') }}"
        "{%- endif %}"
        "{{- bos_token }}"
        "{%- set first = namespace(system='') %}"
        "{%- for message in messages %}"
        + before
        + "{%- elif message['role'] == 'user' %}"
        + "{{- '[INST]' + "
        + question
        + " + '[/INST]' }}"
        + "{%- elif message['role'] == 'assistant' %}"
        "{{- message['content'] + eos_token }}"
        "{%- else %}"
        "{{- raise_exception('this template takes no message of the role ' ~ message['role']) }}"
        "{%- endif %}"
        "{%- endfor %}"
    )


def _names(folder: TokenizerFolder) -> str:
    """Return the names under which the model was published, joined in one lower-case text."""
    names = (folder.settings.get("name_or_path"), folder.config.get("_name_or_path"))
    return " ".join(str(name).lower() for name in names if name)


def _of_qwen(folder: TokenizerFolder, texts: Mapping[int, str]) -> KnownTemplate | None:
    return _CHATML if folder.generation.get("chat_format") == "chatml" else None


def _of_baichuan(folder: TokenizerFolder, texts: Mapping[int, str]) -> KnownTemplate | None:
    generation = folder.generation
    user = texts.get(generation.get("user_token_id", -1))
    assistant = texts.get(generation.get("assistant_token_id", -1))
    if user is None or assistant is None:
        return None
    return _baichuan(user, assistant, "</s>" if user == "<reserved_102>" else "")


def _of_chatglm(folder: TokenizerFolder, texts: Mapping[int, str]) -> KnownTemplate | None:
    names = _names(folder)
    if "base" in names:
        return None
    if "chatglm2" in names:
        return _ROUNDS
    declared = any(text == "<|user|>" for text, _ in folder.added.values())
    return _ROLES if "chatglm3" in names or declared else None


def _of_internlm(folder: TokenizerFolder, texts: Mapping[int, str]) -> KnownTemplate | None:
    return _INTERNLM if {"<eoh>", "<eoa>"} <= set(texts.values()) else None


def _of_tekken(folder: TokenizerFolder, texts: Mapping[int, str]) -> KnownTemplate | None:
    version = str(folder.json("tekken.json").get("config", {}).get("version", ""))
    if not version[1:].isdigit():
        return None
    return _mistral(system_tokens=int(version[1:]) >= 7)


_RECORDS: Mapping[str, Callable[[TokenizerFolder, Mapping[int, str]], KnownTemplate | None]] = {
    "BaichuanTokenizer": _of_baichuan,
    "ChatGLMTokenizer": _of_chatglm,
    "InternLMTokenizer": _of_internlm,
    "QWenTokenizer": _of_qwen,
    "tekken": _of_tekken,
}


def known_template(
    folder: TokenizerFolder, family: str, tokenizer: Mapping[str, Any]
) -> KnownTemplate | None:
    """Return the known template for a model whose folder has no template; None: there is none, and
    the model cannot chat.

    family: the tokenizer's class name, or "tekken".
    tokenizer: contents of the converted tokenizer.json.
    """
    record = _RECORDS.get(family)
    if record is None:
        return None
    vocab = tokenizer["model"]["vocab"]
    texts = (
        {index: text for text, index in vocab.items()}
        if isinstance(vocab, dict)
        else {index: text for index, (text, _) in enumerate(vocab)}
    )
    return record(folder, texts)
