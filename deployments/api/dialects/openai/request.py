"""read_chat, read_text: bodies of OpenAI's routes as a ChatRequest and a TextRequest."""

from collections.abc import Mapping
from typing import Any

from deployments.api.body_fields import take_int
from deployments.api.fields.generation import CHAT, COMPLETION, Generation
from deployments.api.generation.call import template_options
from deployments.api.generation.messages import check_messages
from deployments.api.generation.request import ChatRequest, PromptCut, TextRequest
from deployments.api.generation.sampling import agreed, take_sampling
from deployments.api.generation.tenancy import take_queue, take_user
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.options import ApiOptions
from deployments.api.output.constraints import take_constraint
from deployments.api.output.request import take_tools
from engine.sampling_params import MAX_LOGPROBS
from engine.text.infill import Gap

DEFAULT_TOKENS = 16  # of a completion


def read_chat(body: Mapping[str, Any], options: ApiOptions) -> ChatRequest:
    """Read the body of a chat. Raises ApiError 400 naming the field."""
    ignored: list[str] = []
    fields = CHAT.read(body, ignored, strict=options.strict)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise invalid("only text can be generated", "modalities", "modality_not_supported")
    limit, limit_name = _limit(fields, None)
    usage, continuous = _stream_options(fields, ignored)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return ChatRequest(
        model=fields.model,
        sampling=take_sampling(fields, max_tokens=limit, logprobs=logprobs),
        queue=take_queue(fields, take_user(body), fields.cache_salt),
        stream=bool(fields.stream),
        usage=usage,
        continuous_usage=continuous,
        constraint=take_constraint(fields),
        cut=_take_cut(fields),
        return_token_ids=bool(fields.return_token_ids),
        token_names=bool(fields.return_tokens_as_token_ids),
        best_of=fields.best_of,
        limit_name=limit_name,
        names={"max_tokens": limit_name},
        messages=check_messages(fields.messages, ignored),
        template=template_options(
            options,
            fields.chat_template_kwargs,
            opens=fields.add_generation_prompt,
            continues=fields.continue_final_message,
        ),
        tools=take_tools(
            fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls is not False
        ),
        effort=fields.reasoning_effort,
        thinking_budget=thinking_budget(fields.thinking_token_budget),
        shows_reasoning=fields.include_reasoning is not False,
        separate_reasoning=fields.separate_reasoning is not False,
        ignored=tuple(ignored),
    )


def read_text(body: Mapping[str, Any], options: ApiOptions) -> TextRequest:
    """Read the body of a completion. Raises ApiError 400 naming the field."""
    ignored: list[str] = []
    fields = COMPLETION.read(body, ignored, strict=options.strict)
    limit, limit_name = _limit(fields, DEFAULT_TOKENS)
    logprobs = None
    if fields.logprobs is not False:
        logprobs = take_int({"logprobs": fields.logprobs}, "logprobs", 0, MAX_LOGPROBS)
    usage, continuous = _stream_options(fields, ignored)
    prompt, suffix, cut = fields.prompt, fields.suffix, _take_cut(fields)
    prompts: tuple[str, ...] | tuple[list[int], ...] = ()
    gaps: tuple[Gap, ...] = ()
    if suffix:
        gaps = _gaps(prompt, suffix, options.max_prompts)
        for name, asked in (("echo", fields.echo), ("truncate_prompt_tokens", cut is not None)):
            if asked:
                message = f"{name} and suffix exclude each other"
                raise invalid(message, "suffix", "conflicting_fields")
    else:
        prompts = _prompts(prompt, options.max_prompts)
    return TextRequest(
        model=fields.model,
        sampling=take_sampling(fields, max_tokens=limit, logprobs=logprobs),
        queue=take_queue(fields, take_user(body), fields.cache_salt),
        stream=bool(fields.stream),
        usage=usage,
        continuous_usage=continuous,
        constraint=take_constraint(fields),
        cut=cut,
        return_token_ids=bool(fields.return_token_ids),
        token_names=bool(fields.return_tokens_as_token_ids),
        best_of=fields.best_of,
        limit_name=limit_name,
        names={"max_tokens": limit_name},
        prompts=prompts,
        many=isinstance(prompt, list) and prompts[:1] != (prompt,),
        gaps=gaps,
        echo=bool(fields.echo),
        special=fields.add_special_tokens is not False,
        ignored=tuple(ignored),
    )


def thinking_budget(tokens: int | None) -> int | None:
    """Return the most tokens of thinking; None: any number."""
    return None if tokens == -1 else tokens


def _limit(fields: Generation, default: int | None) -> tuple[int | None, str]:
    """Return the limit of output tokens, and the client's name of it. Raises ApiError 400."""
    limit = fields.max_tokens
    if (same := fields.max_new_tokens) is not None:
        limit = agreed("max_tokens", limit, "max_new_tokens", same)
    if (same := fields.max_completion_tokens) is not None:
        newer = "max_completion_tokens"
        return agreed("max_tokens", limit, newer, same), newer
    return default if limit is None else limit, "max_tokens"


def _stream_options(fields: Generation, ignored: list[str]) -> tuple[bool, bool]:
    """Return whether a stream reports usage at its end, and in each event."""
    stream_options = fields.stream_options
    if stream_options is None:
        return False, False
    if stream_options.asks and not fields.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    ignored += stream_options.others
    return stream_options.include_usage, stream_options.continuous_usage_stats


def _take_cut(fields: Generation) -> PromptCut | None:
    tokens = fields.truncate_prompt_tokens
    return None if tokens is None else PromptCut(tokens, fields.truncation_side != "right")


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
