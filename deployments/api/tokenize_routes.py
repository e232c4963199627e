"""/tokenize and /detokenize: the conversion of a text or chat to token ids, and back."""

import msgspec

from deployments.api.body_fields import take_token_ids
from deployments.api.context import ApiContext
from deployments.api.fields.others import DETOKENIZE, TOKENIZE
from deployments.api.generation.call import chat_ids, encode_texts, template_options
from deployments.api.generation.images import check_no_images
from deployments.api.generation.messages import check_messages
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import in_thread
from deployments.api.output.request import take_tools
from deployments.api.route import NAMES, READS, RouteTable
from deployments.api.served_model import find_model
from engine.text.tokenizer import TooManyTokens

# The limit exceeds the context length, so that clients can learn by how much a text is too long.
MIN_LIMIT = 65_536  # tokens
ROUTES = RouteTable(reads=(*READS, *NAMES, 422))


@ROUTES.post(
    "/tokenize", "Token ids of a text or a chat", TOKENIZE, ("count", "max_model_len", "tokens")
)
async def tokenize(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the token ids of a text or a chat. Raises ApiError."""
    backend, options = context.backend, context.options
    body, sent = await context.read_as(exchange, TOKENIZE), await context.read(exchange)
    card = await find_model(body.model, backend, exchange.caller)
    tokenizer = backend.tokenizer(card.id)
    limit = max(MIN_LIMIT, card.max_model_len)
    prompt, chat = body.prompt, body.messages
    if (prompt is None) == (chat is None):
        raise invalid(
            "give either prompt or messages",
            "prompt",
            "missing_field" if prompt is None else "conflicting_fields",
        )

    def work() -> bytes:
        if prompt is None:
            template = template_options(
                options,
                body.chat_template_kwargs,
                opens=body.add_generation_prompt,
                continues=body.continue_final_message,
            )
            ignored = exchange.ignored
            messages = check_messages(chat or (), sent["messages"], ignored)
            check_no_images(messages, card)
            asked = (template, body.reasoning_effort, ignored, limit)
            ids = chat_ids(tokenizer, messages, take_tools(body.tools), *asked)
        else:
            special = body.add_special_tokens is not False
            ids = encode_texts(tokenizer, [prompt], special, limit)[0]
        texts = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": card.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }
        return msgspec.json.encode(answer)

    try:
        answer = await in_thread(work, exchange.body_size)
    except TooManyTokens as error:
        raise invalid(
            f"the text has at least {error.at_least} tokens; /tokenize takes {limit}",
            "prompt" if chat is None else "messages",
            "context_length_exceeded",
        ) from None
    await exchange.answer(200, answer)


@ROUTES.post("/detokenize", "The text of token ids", DETOKENIZE, ("prompt",))
async def detokenize(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer with the text of token ids. Raises ApiError."""
    backend = context.backend
    body = await context.read_as(exchange, DETOKENIZE)
    card = await find_model(body.model, backend, exchange.caller)
    tokenizer, tokens = backend.tokenizer(card.id), body.tokens
    limit = max(MIN_LIMIT, card.max_model_len)
    if len(tokens) > limit:
        raise invalid(f"tokens takes at most {limit} ids", "tokens")
    skip = bool(body.skip_special_tokens)

    def work() -> bytes:
        ids = take_token_ids(tokens, "tokens", card.vocab_size) if tokens else tokens
        return msgspec.json.encode({"prompt": tokenizer.decode(ids, skip_special_tokens=skip)})

    await exchange.answer(200, await in_thread(work, 4 * len(tokens)))
