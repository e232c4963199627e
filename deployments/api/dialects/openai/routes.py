"""/v1/chat/completions and /v1/completions: the conversion of their bodies, and their routes."""

from collections.abc import Mapping
from typing import Any

from deployments.api.context import ApiContext
from deployments.api.dialects.openai.response import OpenAIResponse
from deployments.api.fields.generation import CHAT, COMPLETION, Generation
from deployments.api.generate import DialectRequest, answers
from deployments.api.generation.call import GenerationCall, template_options
from deployments.api.generation.messages import check_messages
from deployments.api.generation.request import ChatRequest, PromptCut, TextRequest
from deployments.api.generation.sampling import agreed, take_sampling
from deployments.api.generation.tenancy import take_queue
from deployments.api.http.errors import ApiError, invalid, wrong_type
from deployments.api.output.constraints import take_constraint
from deployments.api.output.request import take_tools
from deployments.api.route import QUEUES, STREAMS, RouteTable
from deployments.api.stream.replay import Resumption
from engine.sampling_params import MAX_LOGPROBS
from engine.text.infill import Gap

DEFAULT_TOKENS = 16  # max_tokens of a completion that sets none


def _common(
    fields: Generation, body: Mapping[str, Any], default: int | None, logprobs: int | None
) -> dict[str, Any]:
    """Return {field of GenerationFields: value} for the fields that chats and completions share.

    default: the default limit of output tokens; None: the context is the only limit
    logprobs: the number of alternatives per output token; None: no log-probabilities

    Raises ApiError 400.
    """
    limit, limit_name = fields.max_tokens, "max_tokens"
    if (same := fields.max_new_tokens) is not None:
        limit = agreed("max_tokens", limit, "max_new_tokens", same)
    if (same := fields.max_completion_tokens) is not None:
        limit_name = "max_completion_tokens"
        limit = agreed("max_tokens", limit, limit_name, same)
    elif limit is None:
        limit = default
    usage = continuous = None
    if (stream := fields.stream_options) is not None:
        asked = body["stream_options"].values()
        if not fields.stream and any(option not in (None, False) for option in asked):
            raise invalid("stream_options needs stream: true", "stream_options")
        usage, continuous = stream.include_usage, stream.continuous_usage_stats
    cut = fields.truncate_prompt_tokens
    return {
        "model": fields.model,
        "sampling": take_sampling(fields, max_tokens=limit, logprobs=logprobs),
        "queue": take_queue(fields, body.get("user"), fields.cache_salt),
        "stream": bool(fields.stream),
        "usage": bool(usage),
        "continuous_usage": bool(continuous),
        "constraint": take_constraint(fields),
        "cut": None if cut is None else PromptCut(cut, fields.truncation_side != "right"),
        "speculation": fields.speculation is not False,
        "return_token_ids": bool(fields.return_token_ids),
        "token_names": bool(fields.return_tokens_as_token_ids),
        "best_of": fields.best_of,
        "names": {"max_tokens": limit_name},
    }


def _gaps(prompt: Any, suffix: str, max_prompts: int) -> tuple[Gap, ...]:
    texts = prompt if isinstance(prompt, list) else [prompt or ""]
    if len(texts) > max_prompts:
        raise _too_many(len(texts), max_prompts)
    if not texts or any(not isinstance(text, str) for text in texts):
        raise invalid("suffix needs a prompt of text", "suffix", "conflicting_fields")
    return tuple(Gap(text, suffix) for text in texts)


def _prompts(prompt: Any, max_prompts: int) -> tuple[str, ...] | tuple[list[int], ...]:
    """Return the field `prompt` as a tuple of texts or of token id lists, whose ids are not checked
    yet. Raises ApiError 400."""
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


class OpenAIDialect(DialectRequest):
    """The base class of OpenAI's two dialects: writes the answer to a request."""

    names_model_first = True

    def answer(self, call: GenerationCall, resumed: Resumption) -> OpenAIResponse:
        return OpenAIResponse(call, resumed)


class OpenAIChat(OpenAIDialect):
    """The dialect of /v1/chat/completions: reads a body and writes its answer."""

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> ChatRequest:
        fields = CHAT.read(body, ignored, strict=context.options.strict)
        if fields.modalities is not None and fields.modalities != ["text"]:
            raise invalid("only text can be generated", "modalities", "modality_not_supported")
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        return ChatRequest(
            **_common(fields, body, None, logprobs),
            messages=check_messages(fields.messages, body["messages"], ignored),
            template=template_options(
                context.options,
                fields.chat_template_kwargs,
                opens=fields.add_generation_prompt,
                continues=fields.continue_final_message,
            ),
            tools=take_tools(
                fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls is not False
            ),
            effort=fields.reasoning_effort,
            thinking_budget=fields.thinking_token_budget,
            shows_reasoning=fields.include_reasoning is not False,
            separate_reasoning=fields.separate_reasoning is not False,
            prediction="" if fields.prediction is None else fields.prediction.text,
        )


class OpenAICompletion(OpenAIDialect):
    """The dialect of /v1/completions: reads a body and writes its answer."""

    def read(self, context: ApiContext, body: Mapping[str, Any], ignored: list[str]) -> TextRequest:
        fields = COMPLETION.read(body, ignored, strict=context.options.strict)
        logprobs = None if fields.logprobs is False else fields.logprobs
        if logprobs is not None:
            if type(logprobs) is not int:
                raise wrong_type("logprobs", "an integer")
            if not 0 <= logprobs <= MAX_LOGPROBS:
                raise invalid(f"logprobs must be between 0 and {MAX_LOGPROBS}", "logprobs")
        default = min(DEFAULT_TOKENS, context.options.max_tokens or DEFAULT_TOKENS)
        common = _common(fields, body, default, logprobs)
        prompt, suffix = fields.prompt, fields.suffix
        prompts: tuple[str, ...] | tuple[list[int], ...] = ()
        gaps: tuple[Gap, ...] = ()
        if suffix:
            gaps = _gaps(prompt, suffix, context.options.max_prompts)
            cut = common["cut"] is not None
            for name, asked in (("echo", fields.echo), ("truncate_prompt_tokens", cut)):
                if asked:
                    message = f"{name} and suffix exclude each other"
                    raise invalid(message, "suffix", "conflicting_fields")
        else:
            prompts = _prompts(prompt, context.options.max_prompts)
        return TextRequest(
            **common,
            prompts=prompts,
            many=isinstance(prompt, list) and prompts[:1] != (prompt,),
            gaps=gaps,
            echo=bool(fields.echo),
            special=fields.add_special_tokens is not False,
        )


_ANSWER = ("id", "object", "created", "model", "choices")
ROUTES = RouteTable(reads=QUEUES)
ROUTES.post("/v1/chat/completions", "A chat", CHAT, _ANSWER, STREAMS)(answers(OpenAIChat))
ROUTES.post("/v1/completions", "Texts, or token ids, continued", COMPLETION, _ANSWER, STREAMS)(
    answers(OpenAICompletion)
)
