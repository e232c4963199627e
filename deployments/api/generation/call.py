"""GenerationCall: a request for a model, with the token ids of its prompts and its params."""

import dataclasses
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from deployments.api.body_fields import kept_tokens, take_token_ids
from deployments.api.generation.images import ChatImages, ImageMarks
from deployments.api.generation.request import (
    ChatMessage,
    ChatRequest,
    PromptCut,
    TemplateOptions,
    TextRequest,
)
from deployments.api.generation.sampling import check_length, limited
from deployments.api.http.errors import invalid, shown
from deployments.api.http.json_body import in_thread
from deployments.api.options import ApiOptions
from deployments.api.output.plan import OutputPlan, plan_output
from deployments.api.output.prompt import render_options
from deployments.api.output.request import RequestedTools
from deployments.backend import Backend, GenerationRequest, ModelCard
from engine.errors import InvalidRequest, context_too_long
from engine.text.infill import FillMarks
from engine.text.tokenizer import Tokenizer, TooManyTokens

MAX_KWARGS_BYTES = 64 * 1024
# Characters that each bad word adds to the measure of work: a word is encoded three times, in
# separate calls.
_WORD_CHARS = 64
_MOST_TOKEN_CHARS = 16  # characters per token beyond which a prediction is truncated
MAX_SCORED = 131_072  # log-probabilities of prompt tokens in an answer: some 8 MB of JSON


@dataclass(slots=True)
class GenerationCall:
    """A checked generation request.

    request: the client's request
    prompts: the token ids of each prompt
    texts: the texts that `echo` repeats, one for each prompt
    common: the backend's request without token ids, from which the requests of all prompts are
        copied; its seed is random if the client sets none
    prompt_logprobs: whether the request has this field; `echo` with `logprobs` also needs prompt
        logprobs
    score_only: whether only the prompt's log-probabilities are computed (max_tokens 0 with echo)
    timing: whether usage reports queue time and migrations (header x-return-timing)
    streams, emitted: one item per prompt, or empty; see GenerationRequest
    output: the plan for parsing the answer's text; None: the text is not parsed
    images: the images of the prompt; `common` gets their pixels after decoding
    ignored: the fields that have no effect with this model
    """

    request: ChatRequest | TextRequest
    card: ModelCard
    tokenizer: Tokenizer
    common: GenerationRequest
    prompts: list[list[int]]
    prompt_logprobs: bool = False
    texts: list[str] = field(default_factory=list)
    score_only: bool = False
    timing: bool = False
    streams: list[str] = field(default_factory=list)
    emitted: list[list[list[int] | None]] = field(default_factory=list)
    output: OutputPlan | None = None
    images: ChatImages | None = None
    ignored: list[str] = field(default_factory=list)

    def change_params(self, **fields: Any) -> None:
        self.common.params = msgspec.structs.replace(self.common.params, **fields)

    def requests(self) -> list[GenerationRequest]:
        """Return the requests for the backend, one for each prompt."""
        params = self.common.params
        if self.score_only:
            # An engine generates at least one token, which the answer leaves out.
            params = msgspec.structs.replace(params, max_tokens=1)
        requests = []
        for i, ids in enumerate(self.prompts):
            seed = params.seed_for(ids, self.card.seed)
            requests.append(
                dataclasses.replace(
                    self.common,
                    token_ids=ids,
                    params=params,
                    seed=self.common.seed if seed is None else seed,
                    stream=self.streams[i] if self.streams else "",
                    emitted=self.emitted[i] if self.emitted else [],
                )
            )
        return requests


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], special: bool, limit: int
) -> list[list[int]]:
    """Return the token ids of each text.

    special: whether special tokens are put before each text

    Raises TooManyTokens at the first text with more than `limit` tokens.
    """
    prompts = []
    for text in texts:
        tokenizer.check_length(text, limit)
        ids = tokenizer.encode(text, add_special_tokens=special)
        if len(ids) > limit:
            raise TooManyTokens(len(ids), limit)
        prompts.append(ids)
    return prompts


async def prepare(
    request: ChatRequest | TextRequest,
    size: int,
    card: ModelCard,
    backend: Backend,
    images: ChatImages | None = None,
) -> GenerationCall:
    """Check a request against the model that it names, encode its prompts, and return the
    GenerationCall.

    size: the bytes of the request's body
    images: the chat's images with headers already read; None: there are none

    Raises ApiError 400 and InvalidRequest, with our names of fields rather than the dialect's.
    """
    work = partial(_prepared, request, card, backend.tokenizer(card.id), images)
    size += _WORD_CHARS * len(request.sampling.bad_words or ())
    try:
        return await in_thread(work, size)
    except TooManyTokens as error:
        raise too_many_tokens(error, request.prompt_name) from None
    except InvalidRequest as error:
        raise invalid(error.message, error.param, error.code) from None


def _prepared(
    request: ChatRequest | TextRequest,
    card: ModelCard,
    tokenizer: Tokenizer,
    images: ChatImages | None,
) -> GenerationCall:
    """Return the GenerationCall of a request with encoded prompts. Raises ApiError 400,
    InvalidRequest."""
    params = request.sampling.params(tokenizer, card.vocab_size)
    if params.max_tokens == 0 and isinstance(request, ChatRequest):
        raise invalid("max_tokens must be at least 1", "max_tokens")
    if request.stream and params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs", "conflicting_fields")
    if request.stream and params.return_routed_experts:
        raise invalid(
            "return_routed_experts cannot be streamed",
            "return_routed_experts",
            "conflicting_fields",
        )
    if request.best_of is not None and request.best_of != params.n:
        raise invalid("best_of must equal n; choices are not ranked", "best_of")
    call = GenerationCall(
        request=request,
        card=card,
        tokenizer=tokenizer,
        common=GenerationRequest(
            "", card.id, [], params, seed=secrets.randbits(63), speculate=request.speculation
        ),
        prompts=[],
        prompt_logprobs=params.prompt_logprobs is not None,
        images=images,
    )
    (_fill_chat if isinstance(request, ChatRequest) else _fill_texts)(call)
    return call


def _fill_chat(call: GenerationCall) -> None:
    """Set the prompt of a chat and the OutputPlan of its answer. Raises as `prepare`."""
    request = call.request
    assert isinstance(request, ChatRequest)
    tools, tokenizer, limit = request.tools, call.tokenizer, call.card.max_model_len
    cut = None if request.cut is None else _kept(request.cut, call)
    unread: list[str] = []
    most = limit if cut is None else sys.maxsize
    template = (request.template, request.effort, unread, most)
    ids = chat_ids(tokenizer, request.messages, tools, *template, images=call.images)
    if request.cut is not None and cut is not None:
        if call.images is not None and len(ids) > cut:
            raise invalid(
                f"truncate_prompt_tokens: the prompt has {len(ids)} tokens, and one with images is "
                "not cut",
                "truncate_prompt_tokens",
                "conflicting_fields",
            )
        ids = _cut(ids, cut, request.cut)
    if not ids:
        raise invalid("the messages render to an empty prompt", "messages")
    call.prompts = [ids]
    if request.prediction:
        text = request.prediction[: limit * _MOST_TOKEN_CHARS]
        call.common.prediction = tokenizer.encode(text, add_special_tokens=False)[:limit]
    plan = plan_output(tokenizer, tools, ids, generation=request.template.opens)
    budget = None if request.thinking_budget == -1 else request.thinking_budget
    if budget is not None and (plan is None or plan.thinking == "no"):
        unread.append("thinking_token_budget")
    elif plan is not None:
        plan.budget = budget
    if plan is not None:
        plan.limited = request.constraint is not None
        plan.shows_reasoning = request.shows_reasoning
        if not request.separate_reasoning and plan.reasoning is not None:
            raise invalid(
                "separate_reasoning: false is not supported; reasoning is told beside content",
                "separate_reasoning",
                "not_supported",
            )
    call.output = plan
    call.ignored += map(request.own_name, unread)


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: RequestedTools | None,
    template: TemplateOptions,
    effort: str | None,
    ignored: list[str],
    max_tokens: int,
    *,
    images: ChatImages | None = None,
) -> list[int]:
    """Return the token ids of a chat's prompt.

    effort: the reasoning effort; None: the template's default.
    ignored: the list that names of fields without effect are added to.
    max_tokens: maximum number of tokens, beyond which TooManyTokens is raised.
    images: the images of the messages, whose placeholders are expanded; None: there are none.

    Raises ApiError 400, InvalidRequest.
    """
    marks = None if images is None else ImageMarks(messages)
    written = list(map(ChatMessage.for_template, messages if marks is None else marks.messages))
    variables = template.variables
    added = render_options(tokenizer, written, tools, effort, variables.keys(), ignored)
    order = [] if marks is None else marks.put_back(written)
    ids = tokenizer.encode_chat(
        written,
        max_tokens=max_tokens,
        add_generation_prompt=template.opens,
        continue_final_message=template.continues,
        edit=None if images is None else lambda text: images.surrounded(text, order),
        **{**variables, **added},
    )
    return ids if images is None else images.place(ids, order, tokenizer)


def template_options(
    options: ApiOptions,
    variables: Mapping[str, Any] | None,
    *,
    opens: bool | None = None,
    continues: bool | None = None,
) -> TemplateOptions:
    """Return the options for rendering a chat. Raises ApiError 400.

    variables: the field chat_template_kwargs
    opens: the field add_generation_prompt; None: the opposite of `continues`
    continues: the field continue_final_message
    """
    continues = bool(continues)
    opens = not continues if opens is None else opens
    if continues and opens:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
            "conflicting_fields",
        )
    if variables is None:
        return TemplateOptions(opens, continues)
    for name in variables:
        if name not in options.template_kwargs:
            raise invalid(
                f"chat_template_kwargs cannot set {shown(name)}; allowed are "
                f"{', '.join(sorted(options.template_kwargs))}",
                "chat_template_kwargs",
                "field_not_allowed",
            )
    if len(msgspec.json.encode(variables)) > MAX_KWARGS_BYTES:
        raise invalid(
            f"chat_template_kwargs is larger than {MAX_KWARGS_BYTES} bytes", "chat_template_kwargs"
        )
    return TemplateOptions(opens, continues, variables)


def _kept(cut: PromptCut, call: GenerationCall) -> int | None:
    """Return the number of tokens to which prompts are truncated; None: not truncated. Raises
    ApiError 400."""
    context = call.card.max_model_len
    tokens = kept_tokens(cut.tokens, context)
    if tokens is None:
        return None
    return min(tokens, max(1, context - (call.common.params.max_tokens or 1)))


def _cut(ids: list[int], tokens: int, cut: PromptCut) -> list[int]:
    return ids[-tokens:] if cut.keeps_end else ids[:tokens]


def _fill_texts(call: GenerationCall) -> None:
    """Set the prompts of a completion. Raises as `prepare`."""
    request = call.request
    assert isinstance(request, TextRequest)
    params = call.common.params
    if params.max_tokens == 0:
        if not request.echo:
            raise invalid("max_tokens must be at least 1 unless echo is set", "max_tokens")
        call.score_only = True
    if request.echo and params.logprobs is not None and params.prompt_logprobs is None:
        call.change_params(prompt_logprobs=params.logprobs)
    if request.gaps:
        _fill_gaps(call, request)
    else:
        _fill_prompts(call, request)


def _fill_gaps(call: GenerationCall, request: TextRequest) -> None:
    """Set the prompts for gaps (fill in the middle), each from the text before and the text after
    the gap."""
    marks = FillMarks.of(call.tokenizer)
    if marks is None:
        raise invalid(
            "suffix: this model's tokenizer has no tokens for filling a gap (fill in the middle)",
            "suffix",
            "suffix_not_supported",
        )
    tokenizer, limit = call.tokenizer, call.card.max_model_len
    special = request.special
    call.prompts = [marks.ids(tokenizer, gap, limit, special=special) for gap in request.gaps]
    params = call.common.params
    if not params.ignore_eos:
        ends = dict.fromkeys((*params.stop_token_ids, *marks.ends))
        call.change_params(stop_token_ids=list(ends))


def _fill_prompts(call: GenerationCall, request: TextRequest) -> None:
    tokenizer = call.tokenizer
    prompts: tuple[str | list[int], ...] = request.prompts
    cut = None if request.cut is None else _kept(request.cut, call)
    limit = call.card.max_model_len if cut is None else sys.maxsize
    texts: list[str] = []
    for i, prompt in enumerate(prompts):
        path = f"prompt[{i}]" if request.many else "prompt"
        if isinstance(prompt, str):
            texts.append(prompt)
        elif not prompt:
            raise invalid(f"{path} must not be empty", "prompt")
        elif len(prompt) > limit:
            raise context_too_long(limit, len(prompt), param=path)
        else:
            call.prompts.append(take_token_ids(prompt, path, call.card.vocab_size))
    call.common.verbatim = not texts
    if texts:
        call.texts = texts
        call.prompts = encode_texts(tokenizer, texts, request.special, limit)
    if request.cut is not None and cut is not None:
        call.prompts = [_cut(ids, cut, request.cut) for ids in call.prompts]
    if request.echo and (cut is not None or not call.texts):
        call.texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in call.prompts]
    for i, ids in enumerate(call.prompts):
        if not ids and tokenizer.bos_token_id is not None:
            call.prompts[i] = [tokenizer.bos_token_id]
        elif not ids:
            raise invalid("prompt must not be empty: this model has no BOS token", "prompt")


def check_limits(call: GenerationCall, most_choices: int, most_tokens: int | None) -> None:
    """Check the numbers of choices, of tokens in the context and in the answer, and of prompt
    log-probabilities.

    most_tokens: the operator's maximum tokens of an answer, which becomes the call's max_tokens if
        it has none; None: only the context limits the answer

    Called after `call.card` was set to the adapter's, whose virtual tokens shorten the context.
    Raises InvalidRequest context_length_exceeded; ApiError 400 too_many_choices, or for too many
    tokens or prompt log-probabilities.
    """
    params = call.common.params
    count = len(call.prompts) * params.n
    if count > most_choices:
        raise invalid(
            f"{len(call.prompts)} prompts with n {params.n} are {count} choices; one request "
            f"takes {most_choices} (limits.choices)",
            "n",
            "too_many_choices",
        )
    limit, wanted = call.card.max_model_len, params.max_tokens
    if most_tokens is not None:
        check_length(wanted, most_tokens)
    for ids in call.prompts:
        if len(ids) + (wanted or 1) > limit:
            fits = len(ids) < limit and wanted is not None
            where = call.request.prompt_name
            param = call.request.own_name("max_tokens") if fits else where
            images = 0 if call.images is None else call.images.tokens
            raise context_too_long(limit, len(ids), wanted, param=param, where=where, images=images)
    if most_tokens is not None:
        call.common.params = limited(params, most_tokens, limit - max(map(len, call.prompts)))
    if params.prompt_logprobs is not None and scored_entries(call) > MAX_SCORED:
        top = params.prompt_logprobs
        raise invalid(
            f"log-probabilities of {sum(map(len, call.prompts))} prompt tokens, each with {top} "
            f"alternatives, for {params.n} choices: at most {MAX_SCORED} in one request",
            "prompt_logprobs" if call.prompt_logprobs else "logprobs",
        )


def scored_entries(call: GenerationCall) -> int:
    """Return the number of prompt log-probabilities in the answer, including alternatives."""
    params = call.common.params
    return sum(map(len, call.prompts)) * (1 + (params.prompt_logprobs or 0)) * params.n


def too_many_tokens(error: TooManyTokens, param: str) -> InvalidRequest:
    """Return the error for a text whose encoding was stopped because it is too long. param: its
    field."""
    return context_too_long(error.limit, error.at_least, param=param, where=param, at_least=True)
