"""Fields of the Responses and Messages APIs: taken, ignored with a header, or refused."""

from deployments.api.generation.fields import SAMPLING

# Of ours, beside those of each API; they mean what they mean in a chat.
_OURS = (SAMPLING - {"n", "max_tokens", "logprobs", "prompt_logprobs"}) | {
    "cache_salt",
    "priority",
    "deadline_seconds",
    "chat_template_kwargs",
    "thinking_token_budget",
    "structured_outputs",
}
RESPONSES = _OURS | {
    "model",
    "input",
    "instructions",
    "stream",
    "stream_options",
    "max_output_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "include",
    "previous_response_id",
    "store",
    "truncation",
    "metadata",
    "top_logprobs",
    "background",
}
# Repeated in the answer, without effect otherwise.
RESPONSES_REPEATED = frozenset(
    {"user", "safety_identifier", "prompt_cache_key", "service_tier", "max_tool_calls"}
)
# Mean nothing here; a request that sends them is answered without them.
RESPONSES_IGNORED = frozenset(
    {"client_metadata", "prompt_cache_retention", "prompt_cache_options", "moderation"}
)
# name -> what to do instead.
RESPONSES_REFUSED = {
    "conversation": "send the items, or previous_response_id",
    "prompt": "send the prompt's text as instructions and input",
    "context_management": "leave items out of input",
}

MESSAGES = (_OURS - {"stop"}) | {
    "model",
    "messages",
    "system",
    "max_tokens",
    "stop_sequences",
    "stream",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "metadata",
}
MESSAGES_IGNORED = frozenset({"service_tier", "cache_control", "context_management", "betas"})
MESSAGES_REFUSED = {
    "container": "run tools beside the client",
    "mcp_servers": "give the servers' tools as tools",
}
