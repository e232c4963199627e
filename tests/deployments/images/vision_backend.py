"""A FakeBackend whose model takes images."""

from dataclasses import replace

from tokenizers import AddedToken

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.deployments.fake_backend import MODEL, FakeBackend, tiny_tokenizer
from tests.deployments.images.fake_processor import FakeProcessor

# Like Qwen3-VL's template: messages of users and tools have a text or a list of parts.
TEMPLATE = """
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ shown(m.content) if m.content else '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
FIRST_TURN_ONLY = TEMPLATE.replace("{%- if part", "{%- if messages | length == 1 and part")


def vision_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Return the tiny tokenizer with image tokens added, and a chat template that writes them."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tiny_tokenizer().backend.to_str())
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    backend.add_special_tokens([AddedToken(text, special=True) for text in marks])
    names = {"eos_token": "<|im_end|>"}
    return Tokenizer(
        backend, special_tokens=names, chat_template=ChatTemplate({"default": template}, names)
    )


class VisionBackend(FakeBackend):
    """A FakeBackend of one model that takes images; an image's placeholder is one token."""

    def __init__(self, template: str = TEMPLATE) -> None:
        super().__init__()
        self._tokenizer = tokenizer = vision_tokenizer(template)
        ids = [tokenizer.token_id(f"<|{name}|>") for name in ("image_pad", "vision_start")]
        assert ids[0] is not None and ids[1] is not None
        self.pad = ids[0]
        self.processor = FakeProcessor("<|image_pad|>", self.pad, 0, 0)
        self.cards[MODEL] = replace(self.cards[MODEL], images=self.processor)
