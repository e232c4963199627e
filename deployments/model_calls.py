"""ModelCalls and AsyncModelCalls: the methods of `Client` and `AsyncClient` for embeddings,
rankings, tokens and adapters.

Each method calls a route of docs/http.md or docs/lora.md. Further keyword arguments are fields of
its body; unknown fields are refused. If the router is lost, the call is repeated at another one,
unless it changes adapters.
"""

import operator
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deployments.api.body_fields import check_names
from deployments.api.fields.body import StructBody
from deployments.api.fields.others import DETOKENIZE, TOKENIZE
from deployments.api.fields.pooled import EMBEDDINGS, RERANK
from deployments.api.http.errors import ApiError
from deployments.route_call import Answer, RouteCall
from engine.errors import InvalidRequest
from engine.library.prompts import as_list, is_token_id

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Ids = Sequence[int]  # token ids, also as an array of NumPy, torch or DLPack
Texts = str | Ids | Sequence[str] | Sequence[Ids] | Messages

_ADAPTERS = "/v1/adapters"
_ENCODING = ("encoding_format", "embed_dtype", "endianness")


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of texts.

    vectors: one float32 array per text, in order.
    prompt_tokens: number of tokens of all texts.
    raw: the HTTP API's response object, which has the vectors in base64.
    """

    model: str
    vectors: tuple[NDArray[np.float32], ...] = field(compare=False)
    prompt_tokens: int
    raw: Answer


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's place in a ranking.

    index: its index in the list that was sent.
    score: its relevance to the query.
    text: None with `return_documents=False`.
    """

    index: int
    score: float
    text: str | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents sorted by relevance to a query, the best first.

    prompt_tokens: number of computed tokens.
    raw: the HTTP API's response object.
    """

    model: str
    documents: tuple[RankedDocument, ...]
    prompt_tokens: int
    raw: Answer


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a text or of a chat.

    max_model_len: number of tokens of the model's context.
    texts: the text of each token, with `return_token_strs=True`; None if not requested.
    """

    ids: tuple[int, ...]
    max_model_len: int
    texts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model. Fields that come from its files are None until a request has used the
    adapter.

    model: name of its base model.
    source: where it was added: "config", "folder" (the watched folder) or "api".
    raw: the HTTP API's object.
    """

    name: str
    model: str
    path: str
    source: str
    revision: str | None
    kind: str | None
    rank: int | None
    num_bytes: int | None
    raw: Answer


def prompt_field(prompt: Any, name: str) -> dict[str, Any]:
    """Return the field of a request's body for a prompt: {"messages": ...} for a chat, else {name:
    ...}.

    prompt: a text, token ids, a list of either, or messages.
    Raises InvalidRequest.
    """
    prompt = as_list(prompt)
    if isinstance(prompt, str):
        return {name: prompt}
    if not isinstance(prompt, Sequence):
        raise InvalidRequest("a prompt is a text, token ids or messages", param=name)
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": list(prompt)}
    return {name: [item if isinstance(item, int) else _plain(item) for item in prompt]}


def checked(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Check that all fields of a body are known, and return the body.

    Raises InvalidRequest for unknown fields, as handle calls have no header x-ignored-fields.
    """
    try:
        check_names(body, known, strict=True)
    except ApiError as error:
        raise InvalidRequest(error.message, param=error.param, code=error.code) from None
    return body


def _plain(item: Any) -> Any:
    """Return a token id of NumPy or torch as an int, an array as a list, and other values
    unchanged."""
    return operator.index(item) if is_token_id(item) else as_list(item)


def _asked(
    path: str, read: Any, form: StructBody[Any], model: str, *parts: Mapping[str, Any]
) -> RouteCall[Any]:
    """Return a RouteCall that changes nothing, so that it may be repeated.

    parts: fields of the body, checked against the fields in `form`.
    """
    body = {"model": model} if model else {}
    for part in parts:
        body |= part
    return RouteCall(path, read, checked(body, form.known), names_model=False, repeats=True)


def _embed(
    model: str,
    texts: Texts,
    prompt_name: str,
    dimensions: int | None,
    truncate: bool,
    fields: Mapping[str, Any],
) -> RouteCall[Embeddings]:
    for name in _ENCODING:
        if name in fields:
            raise InvalidRequest(f"{name}: vectors are float32 arrays; leave it out", param=name)
    options: dict[str, Any] = {"encoding_format": "base64", "truncate": truncate}
    if prompt_name:
        options["prompt_name"] = prompt_name
    if dimensions is not None:
        options["dimensions"] = dimensions
    sent = prompt_field(texts, "input")
    return _asked("/v1/embeddings", _read_embeddings, EMBEDDINGS, model, sent, options, fields)


def _read_embeddings(answer: Answer) -> Embeddings:
    vectors = tuple(
        np.frombuffer(b64decode(item["embedding"]), "<f4").astype(np.float32)
        for item in answer["data"]
    )
    return Embeddings(answer["model"], vectors, answer["usage"]["prompt_tokens"], answer)


def _rerank(
    model: str,
    query: str,
    documents: Sequence[str | Mapping[str, Any]],
    top_n: int | None,
    fields: Mapping[str, Any],
) -> RouteCall[Ranking]:
    listed = documents if isinstance(documents, str) else list(documents)  # a text is refused
    sent: dict[str, Any] = {"query": query, "documents": listed}
    if top_n is not None:
        sent["top_n"] = top_n
    return _asked("/v1/rerank", _read_ranking, RERANK, model, sent, fields)


def _read_ranking(answer: Answer) -> Ranking:
    documents = tuple(
        RankedDocument(
            result["index"], result["relevance_score"], result.get("document", {}).get("text")
        )
        for result in answer["results"]
    )
    return Ranking(answer["model"], documents, answer["usage"]["prompt_tokens"], answer)


def _tokenize(model: str, prompt: str | Messages, fields: Mapping[str, Any]) -> RouteCall[Tokens]:
    sent = prompt_field(prompt, "prompt")
    return _asked("/tokenize", _read_tokens, TOKENIZE, model, sent, fields)


def _read_tokens(answer: Answer) -> Tokens:
    texts = answer["token_strs"]
    shown = None if texts is None else tuple(texts)
    return Tokens(tuple(answer["tokens"]), answer["max_model_len"], shown)


def _detokenize(model: str, ids: Ids, fields: Mapping[str, Any]) -> RouteCall[str]:
    sent = {"tokens": [_plain(token) for token in as_list(ids)]}
    return _asked("/detokenize", _read_text, DETOKENIZE, model, sent, fields)


def _read_text(answer: Answer) -> str:
    text: str = answer["prompt"]
    return text


def _load_adapter(model: str, name: str, path: str | os.PathLike[str]) -> RouteCall[Adapter]:
    where = os.fspath(path)
    body = {"name": name, **({"path": where} if where else {})}
    body |= {"model": model} if model else {}
    return RouteCall(_ADAPTERS, _read_adapter, body, names_model=False)


def _unload_adapter(model: str, name: str) -> RouteCall[None]:
    query = [("model", model)] if model else []
    path = f"{_ADAPTERS}/{name}"
    return RouteCall(path, lambda _: None, None, query, names_model=False, method="DELETE")


def _adapters(model: str) -> RouteCall[tuple[Adapter, ...]]:
    query = [("model", model)] if model else []
    return RouteCall(_ADAPTERS, _read_adapters, None, query, names_model=False, repeats=True)


def _read_adapter(answer: Answer) -> Adapter:
    return Adapter(
        answer["id"],
        answer["model"],
        answer["path"],
        answer["source"],
        answer["revision"],
        answer["kind"],
        answer["rank"],
        answer["bytes"],
        answer,
    )


def _read_adapters(answer: Answer) -> tuple[Adapter, ...]:
    return tuple(map(_read_adapter, answer["data"]))


class ModelCalls:
    """The methods for embeddings, rankings, tokens and adapters of a model. All methods raise
    MantaError.

    model: name of the only model; "": there are several, and each call must name one
        (`model="..."`).
    """

    model: str

    def _carry_out(self, call: RouteCall[T]) -> T:
        raise NotImplementedError

    def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str = "",
        dimensions: int | None = None,
        truncate: bool = False,
        **fields: Any,
    ) -> Embeddings:
        """Return the embeddings of texts by an embedding model.

        texts: a text, token ids, a list of either, or the messages of a chat, which is one text.
        prompt_name: name of the checkpoint's prompt, which is put before each text.
        dimensions: number of elements to which vectors are truncated; None: the model's.
        truncate: whether texts that are too long are truncated rather than refused.
        """
        return self._carry_out(_embed(self.model, texts, prompt_name, dimensions, truncate, fields))

    def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        *,
        top_n: int | None = None,
        **fields: Any,
    ) -> Ranking:
        """Return documents sorted by relevance to a query, computed by a reranker or an embedding
        model.

        top_n: number of documents to return; None: all.
        """
        return self._carry_out(_rerank(self.model, query, documents, top_n, fields))

    def tokenize(self, prompt: str | Messages, **fields: Any) -> Tokens:
        """Return the tokens of a text, or of the messages of a chat."""
        return self._carry_out(_tokenize(self.model, prompt, fields))

    def detokenize(self, ids: Ids, **fields: Any) -> str:
        """Return the text of token ids."""
        return self._carry_out(_detokenize(self.model, ids, fields))

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] = "", *, model: str = ""
    ) -> Adapter:
        """Add an adapter at all routers, or read its files again.

        path: a folder that all nodes can read inside `adapters.roots`, or a URL there; "": the
            path that the adapter has.
        """
        return self._carry_out(_load_adapter(model or self.model, name, path))

    def unload_adapter(self, name: str, *, model: str = "") -> None:
        """Stop serving an adapter. Requests that run with it finish."""
        self._carry_out(_unload_adapter(model or self.model, name))

    def adapters(self, *, model: str = "") -> tuple[Adapter, ...]:
        """Return the adapters of a model, or of all models if there are several."""
        return self._carry_out(_adapters(model or self.model))


class AsyncModelCalls:
    """The methods of `ModelCalls` as coroutines."""

    model: str

    async def _carry_out(self, call: RouteCall[T]) -> T:
        raise NotImplementedError

    async def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str = "",
        dimensions: int | None = None,
        truncate: bool = False,
        **fields: Any,
    ) -> Embeddings:
        return await self._carry_out(
            _embed(self.model, texts, prompt_name, dimensions, truncate, fields)
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        *,
        top_n: int | None = None,
        **fields: Any,
    ) -> Ranking:
        return await self._carry_out(_rerank(self.model, query, documents, top_n, fields))

    async def tokenize(self, prompt: str | Messages, **fields: Any) -> Tokens:
        return await self._carry_out(_tokenize(self.model, prompt, fields))

    async def detokenize(self, ids: Ids, **fields: Any) -> str:
        return await self._carry_out(_detokenize(self.model, ids, fields))

    async def load_adapter(
        self, name: str, path: str | os.PathLike[str] = "", *, model: str = ""
    ) -> Adapter:
        return await self._carry_out(_load_adapter(model or self.model, name, path))

    async def unload_adapter(self, name: str, *, model: str = "") -> None:
        await self._carry_out(_unload_adapter(model or self.model, name))

    async def adapters(self, *, model: str = "") -> tuple[Adapter, ...]:
        return await self._carry_out(_adapters(model or self.model))
