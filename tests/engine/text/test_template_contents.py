"""Contents of messages reach the prompt, whichever form a template takes them in, and a prefill is
the prompt's end."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.template_contents import Form
from engine.text.tokenizer import Tokenizer
from tests.engine.text import small_tokenizers
from tests.published_templates import of_trl

PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] | capitalize }}"
    "{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Parts of users alone, as in some templates of images.
MIXED = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}[{{ p.text }}]"
    "{% endfor %}{% else %}<{{ m.content | trim }}>{% endif %}{% endfor %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = (
    small_tokenizers.CHATML,
    small_tokenizers.CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),
    small_tokenizers.INST,
    PARTS,
    MIXED,
)


@cache
def published() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(sources, SPECIAL) for name, sources in of_trl().items()}


@cache
def known_forms(source: str) -> dict[str, Form]:
    return ChatTemplate({"default": source}, SPECIAL).forms("default")


def with_template(source: str) -> Tokenizer:
    plain = small_tokenizers.byte_level()
    special = plain.special_tokens
    return Tokenizer(
        plain.backend,
        special_tokens=special,
        chat_template=ChatTemplate({"default": source}, special),
    )


def test_a_template_of_parts_gets_parts() -> None:
    """A message's text is iterated letter by letter, and none of it is printed."""
    template = ChatTemplate({"default": PARTS}, {})
    text = template.render(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi"},
            {"role": "tool", "content": "sunny"},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
        ]
    )
    for said in ("System: Be kind.", "User: Hello", "Assistant: Hi", "Tool: sunny", "and now?"):
        assert said in text


def test_each_role_has_a_form_of_its_own() -> None:
    """A template whose system message is a text and whose user message is parts."""
    template = ChatTemplate({"default": MIXED}, {})
    chat = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"text": "kind."}]},
        {"role": "user", "content": "Hello"},
    ]
    assert template.render(chat) == "<Be kind.>[Hello]"


@pytest.mark.parametrize("source", ["{{ messages | length }}", "{{ messages[0].text }}!"])
def test_a_chat_without_its_text_is_refused(source: str) -> None:
    """The model answers an empty prompt with status 200."""
    with pytest.raises(InvalidRequest, match=r"leaves out the text of messages\[0\]"):
        with_template(source).encode_chat([{"role": "user", "content": "Hello"}])


def test_a_text_that_is_dropped_in_one_chat_is_refused() -> None:
    """A prompt without the question, answered with 200."""
    source = "{% for m in messages %}{% if loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    chat = [{"role": "user", "content": word} for word in ("Hello", "World")]
    with pytest.raises(InvalidRequest, match=r"leaves out the text of messages\[1\]"):
        with_template(source).encode_chat(chat)


def test_every_published_template_shows_every_role() -> None:
    """The text of a system message, an answer or a tool's result is lost for want of its form."""
    for name, template in published().items():
        forms = template.forms("default")
        assert forms["user"].text or forms["user"].parts, name
        assert not any(form.silent for role, form in forms.items() if role != "tool"), name


prefills = st.one_of(
    st.sampled_from(["e", "end", "<", "|", "<|im", "assistant", "\n", "Hi ", " Hi", "a  b\n", "x"]),
    st.text(st.sampled_from("eEnd<|>_ \n\"'&{}%#aé😀"), max_size=12),
)


@pytest.mark.parametrize("source", CHATS)
@settings(deadline=None, max_examples=25)
@given(prefill=prefills)
def test_a_prompt_ends_with_its_prefill(source: str, prefill: str) -> None:
    """A prefill of "e" or "<" is taken for a letter of what the template writes behind it."""
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": prefill}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = template.render(chat, **options)
    assert prompt.rstrip().endswith(prefill.strip())
    whole = template.render(chat, add_generation_prompt=False)
    assert whole.startswith(prompt.rstrip())
    if prefill.strip():
        assert prompt == reference(source, chat)


def reference(source: str, chat: list[dict[str, Any]]) -> str:
    form = known_forms(source)

    def content(message: dict[str, Any]) -> Any:
        kind = form[message["role"]]
        parts = [{"type": "text", "text": message["content"]}]
        return message["content"] if kind.text else parts

    texts, _ = render_jinja_template(
        [[{**message, "content": content(message)} for message in chat]],
        chat_template=source,
        continue_final_message=True,
        add_generation_prompt=False,
        **SPECIAL,
    )
    return str(texts[0])


@pytest.mark.parametrize("prefill", ["e", "end", "<", "|", "Hi ", "so <|im", "x\n\ny"])
def test_prefills_in_published_templates_are_as_transformers_has_them(prefill: str) -> None:
    """Prefills that our cut and that of transformers end at other places."""
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": prefill}]
    for name, template in published().items():
        options = {"add_generation_prompt": False, "continue_final_message": True}
        try:
            theirs = reference(template.sources["default"], chat)
        except Exception:  # jinja's, and ValueError where the text is changed
            continue
        assert theirs.rstrip().endswith(prefill.strip()), name
        assert template.render(chat, **options) == theirs, name


def test_a_prefill_that_the_template_drops_is_refused() -> None:
    """A prompt that ends with another text than the prefill."""
    source = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}"
    template = ChatTemplate({"default": source}, {})
    chat = [{"role": "assistant", "content": "<think>why</think>so"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match="changes the final message"):
        template.render(chat, **options)


def test_the_second_system_message_is_named() -> None:
    """A template that looks for a question first fails otherwise with the messages before it."""
    source = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('No user query found') }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    roles = ["system", "system", "user", "assistant", "user"]
    chat = [{"role": role, "content": "x"} for role in roles]
    for order, index in ((chat, 1), (chat[1:4] + chat[:1], 3), (chat[1:] + chat[:2], 4)):
        with pytest.raises(InvalidRequest, match="must be at the beginning") as caught:
            template.render(order)
        assert caught.value.param == f"messages[{index}]"
    with pytest.raises(InvalidRequest, match="the messages: No user") as caught:
        template.render(chat[:1])
    assert caught.value.param == "messages"
