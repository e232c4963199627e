"""The bounds and the words of request fields, which the checks and the schemas share."""

import re
from typing import Literal

MAX_MESSAGES = 1024
MAX_CALLS = 4096  # tool calls in all messages together
MAX_PARTS = 16_384  # content parts in all messages together
MAX_MESSAGE_CALLS = 128  # tool calls in one message
MAX_MESSAGE_PARTS = 1024  # content parts in one message
# Newer clients say developer where templates know system.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "observation",  # a tool's result, in templates such as ChatGLM's
}

MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

ConstraintKind = Literal["json", "regex", "choice", "grammar", "tags"]
# Fields that other servers have taken instead of `structured_outputs`.
ALIASES: dict[str, ConstraintKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
MAX_TAGS = 128  # structural tags, and as many triggers
SCHEMA_NAME = "[A-Za-z0-9_-]{1,64}"

MAX_DEADLINE = 7 * 86400.0  # seconds
MAX_SALT_BYTES = 128

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
MAX_BATCH_METADATA = 16  # entries; OpenAI's limit
MAX_BATCH_WINDOW = 30 * 86400  # seconds
