"""OpenAIRequest: a checked generation request, and the two ways to get one from a JSON body."""

import dataclasses
import functools
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.api.body_fields import (
    check_names,
    name_fields,
    take_bool,
    take_cut,
    take_int,
    take_token_ids,
    take_word,
)
from deployments.api.caller import ANYONE, Caller
from deployments.api.fields.generation import CHAT, COMPLETION, SIDES
from deployments.api.generation.messages import check_messages
from deployments.api.generation.sampling import add_bad_words, bad_words_size, sampling_params
from deployments.api.http.errors import invalid, shown, wrong_type
from deployments.api.http.off_loop import in_thread
from deployments.api.options import ApiOptions
from deployments.api.output.constraints import RequestedGrammar, take_constraint
from deployments.api.output.plan import OutputPlan, plan_output
from deployments.api.output.prompt import render_options
from deployments.api.output.request import RequestedTools, refuse_tools, take_tools
from deployments.api.served_model import find_model
from deployments.backend import Backend, GenerationRequest, ModelCard
from engine.errors import InvalidRequest, context_too_long
from engine.sampling_params import MAX_N, SamplingParams
from engine.text.infill import FillMarks, Gap
from engine.text.tokenizer import Tokenizer, TooManyTokens

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_USAGE = ("include_usage", "continuous_usage_stats")  # of stream_options
MAX_KWARGS_BYTES = 64 * 1024
MAX_SCORED = 131_072  # log-probabilities of prompt tokens in an answer: some 8 MB of JSON


@dataclass(slots=True)
class OpenAIRequest:
    """A checked generation request.

    prompts: the token ids of each prompt
    texts: the texts that `echo` repeats, one for each prompt
    common: the common part of the backend's requests for these prompts. Its token_ids are empty,
        and its seed is the drawn one, for a request that names none
    continuous_usage: whether each event of a stream reports the usage up to it
    token_names: whether log-probabilities name tokens by their ids
    prompt_logprobs: whether the request has this field, and not echo alone
    score_only: whether only the prompt's logprobs are computed (max_tokens 0 with echo)
    timing: whether usage reports how the request fared (the header x-return-timing)
    streams, emitted: one for each prompt, or none; see GenerationRequest
    constraint: the limit of the output; params have its grammar once it is compiled
    output: the plan for reading the answer's text; None: the text is the answer
    ignored: the request fields without effect
    """

    card: ModelCard
    tokenizer: Tokenizer
    common: GenerationRequest
    prompts: list[list[int]]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    token_names: bool = False
    prompt_logprobs: bool = False
    echo: bool = False
    texts: list[str] = field(default_factory=list)
    score_only: bool = False
    timing: bool = False
    streams: list[str] = field(default_factory=list)
    emitted: list[list[list[int] | None]] = field(default_factory=list)
    constraint: RequestedGrammar | None = None
    output: OutputPlan | None = None
    ignored: list[str] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.common.params

    def change_params(self, **fields: Any) -> None:
        self.common.params = msgspec.structs.replace(self.common.params, **fields)

    def _seed_for(self, prompt: list[int]) -> int:
        seed = self.params.seed_for(prompt, self.card.seed)
        return self.common.seed if seed is None else seed

    def requests(self) -> list[GenerationRequest]:
        """Return the requests for the backend, one for each prompt."""
        params = self.params
        if self.score_only:  # an engine always makes a token; it is dropped here
            params = msgspec.structs.replace(params, max_tokens=1)
        return [
            dataclasses.replace(
                self.common,
                token_ids=ids,
                params=params,
                seed=self._seed_for(ids),
                stream=self.streams[i] if self.streams else "",
                emitted=self.emitted[i] if self.emitted else [],
            )
            for i, ids in enumerate(self.prompts)
        ]


def encode_texts(
    tokenizer: Tokenizer, texts: list[str], special: bool, limit: int
) -> list[list[int]]:
    """Return the token ids of each text.

    Encoding ends at the first text that has more than `limit` tokens: the others are not worth the
    work then. Raises TooManyTokens.
    """
    found = []
    for text in texts:
        tokenizer.check_length(text, limit)
        found.append(tokenizer.encode(text, add_special_tokens=special))
        if len(found[-1]) > limit:
            raise TooManyTokens(len(found[-1]), limit)
    return found


async def chat_call(
    body: dict[str, Any],
    size: int,
    backend: Backend,
    options: ApiOptions,
    caller: Caller = ANYONE,
) -> OpenAIRequest:
    """Read a chat's body into a checked request. size: the body's bytes. Raises ApiError."""
    ignored = check_names(body, CHAT.known, strict=options.strict, generates=True)
    card = await find_model(body.get("model"), backend, caller)

    def work() -> OpenAIRequest:
        messages = check_messages(body.get("messages"), ignored)
        call = _common(body, card, backend, chat=True, max_tokens=None)
        modalities = body.get("modalities")
        if modalities is not None and modalities != ["text"]:
            raise invalid("only text can be generated", "modalities", "modality_not_supported")
        tools = take_tools(body)
        cut = _PromptCut.of(body, call)
        most = card.max_model_len if cut is None else sys.maxsize
        ids, opened = chat_ids(call.tokenizer, body, messages, tools, options, ignored, most)
        ids = ids if cut is None else cut.apply(ids)
        if not ids:
            raise invalid("the messages render to an empty prompt", "messages")
        call.prompts = [ids]
        check_choices(call, options)
        call.output = plan_output(call.tokenizer, tools, ids, generation=opened)
        if call.output is not None:
            call.output.limited = call.constraint is not None
        budget = take_int(body, "thinking_token_budget", -1, 2**31 - 1)  # -1: none
        if budget is not None and budget >= 0:
            if call.output is None or call.output.thinking == "no":
                ignored.append("thinking_token_budget")
            else:
                call.output.budget = budget
        shows = take_bool(body, "include_reasoning", True)
        separate = take_bool(body, "separate_reasoning", True)
        if call.output is not None:
            call.output.shows_reasoning = shows
            if not separate and call.output.reasoning is not None:
                raise invalid(
                    "separate_reasoning: false is not supported; reasoning is told beside content",
                    "separate_reasoning",
                    "not_supported",
                )
        call.ignored = ignored + call.ignored
        return call

    try:
        return await in_thread(work, size + bad_words_size(body))
    except TooManyTokens as error:
        raise too_many_tokens(error, "messages") from None
    except InvalidRequest as error:
        raise invalid(error.message, error.param, error.code) from None


def chat_ids(
    tokenizer: Tokenizer,
    body: dict[str, Any],
    messages: list[dict[str, Any]],
    tools: RequestedTools | None,
    options: ApiOptions,
    ignored: list[str],
    max_tokens: int,
) -> tuple[list[int], bool]:
    """Return the token ids of a chat's prompt, and whether it opens the model's turn.

    Messages are changed to the form that the template wants. Fields that the template does not read
    go to ignored. Raises ApiError 400 and TooManyTokens.
    """
    shape = template_options(body, options)
    shape |= render_options(tokenizer, body, messages, tools, shape, ignored)
    ids = tokenizer.encode_chat(messages, max_tokens=max_tokens, **shape)
    return ids, bool(shape["add_generation_prompt"])


def template_options(body: dict[str, Any], options: ApiOptions) -> dict[str, Any]:
    """Return add_generation_prompt, continue_final_message and allowed chat_template_kwargs.

    Raises ApiError 400.
    """
    continued = take_bool(body, "continue_final_message")
    generation = take_bool(body, "add_generation_prompt", not continued)
    if continued and generation:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
            "conflicting_fields",
        )
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, dict):
        raise wrong_type("chat_template_kwargs", "an object")
    for name in kwargs:
        if name not in options.template_kwargs:
            raise invalid(
                f"chat_template_kwargs cannot set {shown(name)}; allowed are "
                f"{', '.join(sorted(options.template_kwargs))}",
                "chat_template_kwargs",
                "field_not_allowed",
            )
    if len(msgspec.json.encode(kwargs)) > MAX_KWARGS_BYTES:
        raise invalid(
            f"chat_template_kwargs is larger than {MAX_KWARGS_BYTES} bytes", "chat_template_kwargs"
        )
    return {
        **kwargs,
        "add_generation_prompt": generation,
        "continue_final_message": continued,
    }


async def completion_call(
    body: dict[str, Any],
    size: int,
    backend: Backend,
    options: ApiOptions,
    caller: Caller = ANYONE,
    *,
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS,
    gap: Gap | None = None,
) -> OpenAIRequest:
    """Read the body of a completion into a checked request. Raises ApiError.

    size: the bytes of the body
    max_tokens: the value of a body that names none
    gap: the gap to be filled, in the place of `prompt` and `suffix`
    """
    ignored = check_names(body, COMPLETION.known, strict=options.strict, generates=True)
    card = await find_model(body.get("model"), backend, caller)
    refuse_tools(body)
    echo = take_bool(body, "echo")
    common = functools.partial(_common, body, card, backend, chat=False, max_tokens=max_tokens)
    call = await in_thread(common, bad_words_size(body))
    call.ignored = ignored + call.ignored
    call.echo = echo
    if call.params.max_tokens == 0:
        if not echo:
            raise invalid("max_tokens must be at least 1 unless echo is set", "max_tokens")
        call.score_only = True
    if echo and call.params.logprobs is not None and call.params.prompt_logprobs is None:
        call.change_params(prompt_logprobs=call.params.logprobs)
    special = take_bool(body, "add_special_tokens", True)
    suffix = body.get("suffix")
    if suffix is not None and not isinstance(suffix, str):
        raise wrong_type("suffix", "a string")
    cut = _PromptCut.of(body, call)
    if gap is not None or suffix:
        for name, asked in (("echo", echo), ("truncate_prompt_tokens", cut is not None)):
            if asked:
                message = f"{name} and suffix exclude each other"
                raise invalid(message, "suffix", "conflicting_fields")
        gaps = (body.get("prompt"), suffix or "", gap, special, options.max_prompts)
        fill = functools.partial(_fill_gaps, call, *gaps)
    else:
        prompts = (body.get("prompt"), special, options.max_prompts, cut)
        fill = functools.partial(_fill_prompts, call, *prompts)
    try:
        await in_thread(fill, size)
    except TooManyTokens as error:
        raise too_many_tokens(error, "prompt") from None
    check_choices(call, options)
    return call


def _fill_gaps(
    call: OpenAIRequest,
    prompt: Any,
    suffix: str,
    gap: Gap | None,
    special: bool,
    max_prompts: int,
) -> None:
    """Set prompts in which the model sees the text behind its answer (fill in the middle).

    Raises as `_fill_prompts`.
    """
    marks = FillMarks.of(call.tokenizer)
    if marks is None:
        raise invalid(
            "suffix: this model's tokenizer has no tokens for filling a gap (fill in the middle)",
            "suffix",
            "suffix_not_supported",
        )
    texts = prompt if isinstance(prompt, list) else [prompt or ""]
    if len(texts) > max_prompts:
        message = f"prompt takes at most {max_prompts} prompts, got {len(texts)}"
        raise invalid(message, "prompt", "too_many_prompts")
    if not texts or any(not isinstance(text, str) for text in texts):
        raise invalid("suffix needs a prompt of text", "suffix", "conflicting_fields")
    gaps = [Gap(text, suffix) for text in texts] if gap is None else [gap]
    tokenizer, limit = call.tokenizer, call.card.max_model_len
    call.prompts = [marks.ids(tokenizer, one, limit, special=special) for one in gaps]
    if not call.params.ignore_eos:
        ends = dict.fromkeys((*call.params.stop_token_ids, *marks.ends))
        call.change_params(stop_token_ids=list(ends))


@dataclass(frozen=True, slots=True)
class _PromptCut:
    """The part of a prompt that `truncate_prompt_tokens` and `truncation_side` keep.

    tokens: the number of tokens that are kept
    side: the side at which a longer prompt is cut
    """

    tokens: int
    side: str

    @classmethod
    def of(cls, body: dict[str, Any], call: OpenAIRequest) -> "_PromptCut | None":
        """Read the fields of a body; None: no prompt is cut. Raises ApiError 400."""
        side = take_word(body, "truncation_side", SIDES) or "left"
        context = call.card.max_model_len
        tokens = take_cut(body, context)
        if tokens is None:
            return None
        return cls(min(tokens, max(1, context - (call.params.max_tokens or 1))), side)

    def apply(self, ids: list[int]) -> list[int]:
        """Return the part of a prompt that is kept."""
        return ids[-self.tokens :] if self.side == "left" else ids[: self.tokens]


def _fill_prompts(
    call: OpenAIRequest, prompt: Any, special: bool, max_prompts: int, cut: _PromptCut | None
) -> None:
    if prompt is None:
        raise invalid("prompt is required", "prompt", "missing_field")
    items: list[Any]
    if isinstance(prompt, str):
        items = [prompt]
    elif not isinstance(prompt, list):
        raise wrong_type("prompt", "a string, a list of token ids, or a list of these")
    elif not prompt:
        raise invalid("prompt must not be empty", "prompt")
    elif isinstance(prompt[0], (str, list)):
        items = prompt
        if len(items) > max_prompts:
            raise invalid(
                f"prompt takes at most {max_prompts} prompts, got {len(items)}",
                "prompt",
                "too_many_prompts",
            )
        for i, item in enumerate(items):
            if not isinstance(item, type(prompt[0])):
                raise wrong_type(f"prompt[{i}]", "of the same kind as prompt[0]")
    else:
        items = [prompt]
    many = items is prompt
    tokenizer = call.tokenizer
    limit = call.card.max_model_len if cut is None else sys.maxsize
    for i, item in enumerate(items):
        path = f"prompt[{i}]" if many else "prompt"
        if isinstance(item, list):
            if not item:
                raise invalid(f"{path} must not be empty", "prompt")
            if len(item) > limit:
                raise context_too_long(limit, len(item), param=path)
            take_token_ids(item, path, call.card.vocab_size)

    if isinstance(items[0], str):
        call.texts = items
        call.prompts = encode_texts(tokenizer, items, special, limit)
    else:
        call.prompts = items
    if cut is not None:
        call.prompts = [cut.apply(ids) for ids in call.prompts]
    if call.echo and (cut is not None or not call.texts):
        call.texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in call.prompts]
    for i, ids in enumerate(call.prompts):
        if not ids and tokenizer.bos_token_id is not None:
            call.prompts[i] = [tokenizer.bos_token_id]
        elif not ids:
            raise invalid("prompt must not be empty: this model has no BOS token", "prompt")


def _common(
    body: dict[str, Any], card: ModelCard, backend: Backend, *, chat: bool, max_tokens: int | None
) -> OpenAIRequest:
    tokenizer = backend.tokenizer(card.id)
    params = sampling_params(
        body, max_tokens=max_tokens, chat=chat, defaults=tokenizer.sampling_defaults
    )
    params = add_bad_words(params, body, tokenizer)
    try:
        params.check_vocabulary(card.vocab_size)
    except InvalidRequest as error:
        raise invalid(error.message, error.param, error.code) from None
    if chat and params.max_tokens == 0:
        name = "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"
        raise invalid(f"{name} must be at least 1", name)
    stream = take_bool(body, "stream")
    include_usage, continuous, ignored = _stream_options(body.get("stream_options"), stream)
    if stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs", "conflicting_fields")
    best_of = take_int(body, "best_of", 1, MAX_N)
    if best_of is not None and best_of != params.n:
        raise invalid("best_of must equal n; choices are not ranked", "best_of")
    return OpenAIRequest(
        card=card,
        tokenizer=tokenizer,
        common=GenerationRequest("", card.id, [], params, seed=secrets.randbits(63)),
        prompts=[],
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous,
        return_token_ids=take_bool(body, "return_token_ids"),
        token_names=take_bool(body, "return_tokens_as_token_ids"),
        prompt_logprobs=params.prompt_logprobs is not None,
        constraint=take_constraint(body),
        ignored=ignored,
    )


def _stream_options(value: Any, stream: bool) -> tuple[bool, bool, list[str]]:
    """Return whether a stream reports usage at its end, and in each event; and ignored fields."""
    if value is None:
        return False, False, []
    if not isinstance(value, dict):
        raise wrong_type("stream_options", "an object")
    if not stream and any(one not in (None, False) for one in value.values()):
        raise invalid("stream_options needs stream: true", "stream_options")
    for name in _USAGE:
        if value.get(name) is not None and not isinstance(value[name], bool):
            raise wrong_type(f"stream_options.{name}", "true or false")
    others = name_fields((name for name in value if name not in _USAGE), "stream_options.")
    at_end, in_each = (bool(value.get(name)) for name in _USAGE)
    return at_end, in_each, others


def check_choices(call: OpenAIRequest, options: ApiOptions) -> None:
    """Check how many choices a request has. Raises ApiError 400 too_many_choices."""
    count, most = len(call.prompts) * call.params.n, options.max_choices
    if count > most:
        raise invalid(
            f"{len(call.prompts)} prompts with n {call.params.n} are {count} choices; one request "
            f"takes {most} (limits.choices)",
            "n",
            "too_many_choices",
        )


def check_context(call: OpenAIRequest, body: dict[str, Any], *, chat: bool) -> None:
    """Check the prompts against the model's context, and the number of prompt log-probabilities.

    Called when the card is known to be the adapter's, whose virtual tokens leave less room. Raises
    InvalidRequest context_length_exceeded, about the prompt if that alone is too long; ApiError 400
    where the log-probabilities of the prompt are too many.
    """
    limit, wanted = call.card.max_model_len, call.params.max_tokens
    newer = body.get("max_completion_tokens") is not None
    for ids in call.prompts:
        if len(ids) + (wanted or 1) > limit:
            param = "messages" if chat else "prompt"
            if len(ids) < limit and wanted is not None:
                param = "max_completion_tokens" if newer else "max_tokens"
            where = "messages" if chat else "prompt"
            raise context_too_long(limit, len(ids), wanted, param=param, where=where)
    if call.params.prompt_logprobs is not None and scored_entries(call) > MAX_SCORED:
        top = call.params.prompt_logprobs
        raise invalid(
            f"log-probabilities of {sum(map(len, call.prompts))} prompt tokens, each with {top} "
            f"alternatives, for {call.params.n} choices: at most {MAX_SCORED} in one request",
            "prompt_logprobs" if call.prompt_logprobs else "logprobs",
        )


def scored_entries(call: OpenAIRequest) -> int:
    """Return how many log-probabilities of prompt tokens the answer will have.

    Alternatives are included.
    """
    alternatives = call.params.prompt_logprobs or 0
    return sum(map(len, call.prompts)) * (1 + alternatives) * call.params.n


def too_many_tokens(error: TooManyTokens, param: str) -> InvalidRequest:
    """Return the error for a text that was too long to be encoded as a whole."""
    return context_too_long(error.limit, error.at_least, param=param, where=param, at_least=True)
