"""read_chat, read_text: bodies of OpenAI's routes as a ChatRequest and a TextRequest."""

from collections.abc import Mapping
from typing import Any

from deployments.api.body_fields import (
    check_names,
    name_fields,
    take_bool,
    take_int,
    take_word,
)
from deployments.api.fields.generation import CHAT, COMPLETION, SIDES
from deployments.api.generation.call import template_options
from deployments.api.generation.messages import check_messages
from deployments.api.generation.request import ChatRequest, PromptCut, TextRequest
from deployments.api.generation.sampling import one_name_each, take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.options import ApiOptions
from deployments.api.output.constraints import take_constraint
from deployments.api.output.prompt import check_effort
from deployments.api.output.request import refuse_tools, take_tools
from engine.sampling_params import MAX_LOGPROBS, MAX_N
from engine.text.infill import Gap

DEFAULT_TOKENS = 16  # of a completion
_USAGE = ("include_usage", "continuous_usage_stats")  # of stream_options
_CHAT_NAMES, _TEXT_NAMES = CHAT.known, COMPLETION.known


def read_chat(body: Mapping[str, Any], options: ApiOptions) -> ChatRequest:
    """Read the body of a chat. Raises ApiError 400 naming the field."""
    ignored = check_names(body, _CHAT_NAMES, strict=options.strict, generates=True)
    messages = check_messages(body.get("messages"), ignored)
    fields = one_name_each(body)
    limit, limit_name = _limit(fields, None)
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise invalid("only text can be generated", "modalities", "modality_not_supported")
    stream = take_bool(body, "stream")
    usage, continuous = _stream_options(body.get("stream_options"), stream, ignored)
    return ChatRequest(
        model=body.get("model"),
        sampling=take_sampling(fields, max_tokens=limit, logprobs=_chat_logprobs(body)),
        queue=take_queue(body),
        stream=stream,
        usage=usage,
        continuous_usage=continuous,
        constraint=take_constraint(body),
        cut=_take_cut(body),
        return_token_ids=take_bool(body, "return_token_ids"),
        token_names=take_bool(body, "return_tokens_as_token_ids"),
        best_of=take_int(body, "best_of", 1, MAX_N),
        limit_name=limit_name,
        names={"max_tokens": limit_name},
        messages=messages,
        template=template_options(body, options),
        tools=take_tools(body),
        effort=check_effort(body.get("reasoning_effort")),
        thinking_budget=take_budget(body.get("thinking_token_budget"), "thinking_token_budget"),
        shows_reasoning=take_bool(body, "include_reasoning", True),
        separate_reasoning=take_bool(body, "separate_reasoning", True),
        ignored=tuple(ignored),
    )


def read_text(body: Mapping[str, Any], options: ApiOptions) -> TextRequest:
    """Read the body of a completion. Raises ApiError 400 naming the field."""
    ignored = check_names(body, _TEXT_NAMES, strict=options.strict, generates=True)
    refuse_tools(body)
    fields = one_name_each(body)
    limit, limit_name = _limit(fields, DEFAULT_TOKENS)
    logprobs = None
    if body.get("logprobs") is not False:
        logprobs = take_int(body, "logprobs", 0, MAX_LOGPROBS)
    stream = take_bool(body, "stream")
    usage, continuous = _stream_options(body.get("stream_options"), stream, ignored)
    echo, cut, suffix = take_bool(body, "echo"), _take_cut(body), body.get("suffix")
    if suffix is not None and not isinstance(suffix, str):
        raise wrong_type("suffix", "a string")
    prompt = body.get("prompt")
    prompts: tuple[str, ...] | tuple[list[int], ...] = ()
    gaps: tuple[Gap, ...] = ()
    if suffix:
        gaps = _gaps(prompt, suffix, options.max_prompts)
        for name, asked in (("echo", echo), ("truncate_prompt_tokens", cut is not None)):
            if asked:
                message = f"{name} and suffix exclude each other"
                raise invalid(message, "suffix", "conflicting_fields")
    else:
        prompts = _prompts(prompt, options.max_prompts)
    return TextRequest(
        model=body.get("model"),
        sampling=take_sampling(fields, max_tokens=limit, logprobs=logprobs),
        queue=take_queue(body),
        stream=stream,
        usage=usage,
        continuous_usage=continuous,
        constraint=take_constraint(body),
        cut=cut,
        return_token_ids=take_bool(body, "return_token_ids"),
        token_names=take_bool(body, "return_tokens_as_token_ids"),
        best_of=take_int(body, "best_of", 1, MAX_N),
        limit_name=limit_name,
        names={"max_tokens": limit_name},
        prompts=prompts,
        many=isinstance(prompt, list) and prompts[:1] != (prompt,),
        gaps=gaps,
        echo=echo,
        special=take_bool(body, "add_special_tokens", True),
        ignored=tuple(ignored),
    )


def take_budget(value: Any, name: str) -> int | None:
    """Return the most tokens of thinking; None: any number. Raises ApiError 400."""
    budget = take_int({name: value}, name, -1, 2**31 - 1)  # -1: none
    return None if budget == -1 else budget


def _limit(fields: Mapping[str, Any], default: int | None) -> tuple[Any, str]:
    """Return the limit of output tokens, and the client's name of it. Raises ApiError 400."""
    limit, newer = fields.get("max_tokens"), fields.get("max_completion_tokens")
    if newer is None:
        return (default if limit is None else limit), "max_tokens"
    # Type first: true == 1 must not pass as agreement.
    if limit is not None and (type(limit), limit) != (type(newer), newer):
        raise invalid(
            "max_tokens and max_completion_tokens differ; give one of them",
            "max_completion_tokens",
            "conflicting_fields",
        )
    return newer, "max_completion_tokens"


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted = body.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise wrong_type("logprobs", "true or false")
    top = take_int(body, "top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _stream_options(value: Any, stream: bool, ignored: list[str]) -> tuple[bool, bool]:
    """Return whether a stream reports usage at its end, and in each event."""
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise wrong_type("stream_options", "an object")
    if not stream and any(option not in (None, False) for option in value.values()):
        raise invalid("stream_options needs stream: true", "stream_options")
    for name in _USAGE:
        if value.get(name) is not None and not isinstance(value[name], bool):
            raise wrong_type(f"stream_options.{name}", "true or false")
    ignored += name_fields((name for name in value if name not in _USAGE), "stream_options.")
    at_end, in_each = (bool(value.get(name)) for name in _USAGE)
    return at_end, in_each


def _take_cut(body: Mapping[str, Any]) -> PromptCut | None:
    side = take_word(body, "truncation_side", SIDES)
    tokens = take_int(body, "truncate_prompt_tokens", -1, 2**31 - 1)
    return None if tokens is None else PromptCut(tokens, side != "right")


def _gaps(prompt: Any, suffix: str, max_prompts: int) -> tuple[Gap, ...]:
    texts = prompt if isinstance(prompt, list) else [prompt or ""]
    if len(texts) > max_prompts:
        raise _too_many(len(texts), max_prompts)
    if not texts or any(not isinstance(text, str) for text in texts):
        raise invalid("suffix needs a prompt of text", "suffix", "conflicting_fields")
    return tuple(Gap(text, suffix) for text in texts)


def _prompts(prompt: Any, max_prompts: int) -> tuple[str, ...] | tuple[list[int], ...]:
    """Return the prompts, whose token ids are not yet checked. Raises ApiError 400."""
    if prompt is None:
        raise invalid("prompt is required", "prompt", "missing_field")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise wrong_type("prompt", "a string, a list of token ids, or a list of these")
    if not prompt:
        raise invalid("prompt must not be empty", "prompt")
    if not isinstance(prompt[0], (str, list)):
        return (prompt,)
    if len(prompt) > max_prompts:
        raise _too_many(len(prompt), max_prompts)
    for i, item in enumerate(prompt):
        if not isinstance(item, type(prompt[0])):
            raise wrong_type(f"prompt[{i}]", "of the same kind as prompt[0]")
    return tuple(prompt)


def _too_many(count: int, most: int) -> ApiError:
    message = f"prompt takes at most {most} prompts, got {count}"
    return invalid(message, "prompt", "too_many_prompts")
