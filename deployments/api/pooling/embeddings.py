"""The routes for embeddings in the APIs of OpenAI, vLLM and Cohere. VectorFormat: the format of
embeddings in an answer."""

import base64
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from deployments.api.context import ApiContext
from deployments.api.fields import pooled as fields
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject, in_thread
from deployments.api.pooling.pooled import PooledCall, T, pooled_call, take_input, take_prompts
from deployments.api.pooling.rerank import cohere_meta
from deployments.api.route import BYTES as BYTES_KIND
from deployments.api.route import JSON, LIST, QUEUES, RouteTable
from engine.pooling import Pooling, Vector, as_array

_MAX_METADATA = 8192  # maximum bytes of the header `metadata`
_BINARY = b"application/octet-stream"
_VECTORS = (*LIST, "id", "created", "model", "usage")

EMBEDDINGS_ROUTES, POOLING_ROUTES = RouteTable(reads=QUEUES), RouteTable(reads=QUEUES)


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The format of embeddings in an answer.

    form: "float" or "base64" within JSON, or bytes instead of JSON
    dtype: the type of the elements
    big: whether elements are big-endian
    """

    form: fields.Format
    dtype: fields.Dtype
    big: bool

    @classmethod
    def of(cls, body: fields.Embeddings) -> "VectorFormat":
        """Return the format that a request's body sets."""
        form, dtype = body.encoding_format or "float", body.embed_dtype or "float32"
        return cls(form, dtype, body.endianness == "big")

    @property
    def binary(self) -> bool:
        return self.form in (fields.BYTES, fields.BYTES_ONLY)

    def written(self, values: Vector) -> list[float] | str:
        """Return an embedding as JSON: a list of numbers, or base64."""
        if self.form == "base64":
            return base64.b64encode(self.packed(values)).decode()
        numbers: list[float] = self._rounded(values).tolist()
        return numbers

    def packed(self, values: Vector) -> bytes:
        if self.dtype == "bfloat16":
            high = (_bfloat16(values).view(np.uint32) >> 16).astype(">u2" if self.big else "<u2")
            return high.tobytes()
        code = "f2" if self.dtype == "float16" else "f4"
        return values.astype((">" if self.big else "<") + code).tobytes()

    def _rounded(self, values: Vector) -> Vector:
        if self.dtype == "bfloat16":
            return _bfloat16(values)
        return values.astype(np.float16).astype(np.float32) if self.dtype == "float16" else values

    async def answer(
        self, exchange: HttpExchange, call: PooledCall[T], vectors: list[Vector]
    ) -> None:
        """Answer with the concatenated bytes of all embeddings.

        With the form "bytes", the header `metadata` has the position of each embedding. Raises
        ApiError 400 if that header is too large.
        """
        packed = [self.packed(vector) for vector in vectors]
        headers: tuple[tuple[str, str], ...] = ()
        if self.form == fields.BYTES:
            items, start = [], 0
            for index, vector_bytes in enumerate(packed):
                item: JsonObject = {"index": index, "embed_dtype": self.dtype, "start": start}
                item |= {"endianness": "big" if self.big else "little"}
                start += len(vector_bytes)
                items.append({**item, "end": start, "shape": [len(vectors[index])]})
            metadata = msgspec.json.encode({"model": call.card.id, "data": items}).decode()
            if len(metadata) > _MAX_METADATA:
                raise invalid(
                    f"encoding_format bytes of {len(packed)} vectors has more metadata than a "
                    "header holds; use bytes_only, or fewer texts",
                    "encoding_format",
                )
            headers = (("metadata", metadata),)
        await exchange.answer(200, b"".join(packed), _BINARY, headers)


def _bfloat16(values: Vector) -> Vector:
    """Return values rounded to the nearest bfloat16 numbers, ties to even, as float32."""
    bits = values.astype(np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32)


E = TypeVar("E", bound=fields.Embeddings)


@EMBEDDINGS_ROUTES.post(
    "/v1/embeddings", "Vectors of texts", fields.EMBEDDINGS, _VECTORS, (JSON, BYTES_KIND)
)
async def embeddings(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for embeddings in OpenAI's form. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, fields.EMBEDDINGS) as call:
        call.check_vectors(None)
        await _answer(exchange, call, "embedding", "embedding")


@POOLING_ROUTES.post(
    "/pooling", "What a model makes of texts", fields.POOLING, _VECTORS, (JSON, BYTES_KIND)
)
async def pooling(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for pooled outputs in vLLM's form. Raises ApiError, MantaError."""
    async with pooled_call(context, exchange, fields.POOLING) as call:
        own = "classify" if call.pooling.labels else "embed"
        if call.body.task not in (None, own):
            raise invalid(f"task: this model can {own}", "task", "task_not_supported")
        await _answer(exchange, call, "pooling", "data")


async def _answer(exchange: HttpExchange, call: PooledCall[E], kind: str, name: str) -> None:
    """Answer with a list of embeddings. kind: `object` of each item; name: the item's field with
    the embedding."""
    body, classes = call.body, call.pooling.labels
    form, size = VectorFormat.of(body), body.dimensions
    if size is not None:
        call.pooling.check_dimensions(size, call.card.vector_size)
    prompts = await take_input(call)
    vectors = await call.vectors(prompts)
    tokens = sum(map(len, prompts))

    def values(one: bytes) -> Vector:
        if classes:
            return call.pooling.probabilities(as_array(one), raw=call.raw)
        return call.vector(one, size)

    if form.binary:
        await form.answer(exchange, call, [values(vector) for vector in vectors])
        return

    def answer() -> bytes:
        data = [
            {"object": kind, "index": i, name: form.written(values(vector))}
            for i, vector in enumerate(vectors)
        ]
        return call.listed(data, tokens)

    await exchange.answer(200, await in_thread(answer, sum(map(len, vectors))))


COHERE_ROUTES = RouteTable(reads=QUEUES)
EMBED_1 = "/v1/embed"
_OPERATION = (
    "Vectors of texts, as Cohere has it",
    fields.COHERE_EMBED,
    ("id", "embeddings", "texts", "meta", "response_type"),
)
# Cohere's `input_type` -> alternative names of a checkpoint's prompt for such inputs.
_PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage")}


@COHERE_ROUTES.post(EMBED_1, *_OPERATION)
@COHERE_ROUTES.post("/v2/embed", *_OPERATION)
async def cohere_embed(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a request for embeddings in Cohere's form. Raises ApiError, MantaError."""
    older = exchange.path == EMBED_1
    async with pooled_call(context, exchange, fields.COHERE_EMBED) as call:
        body = call.body
        kinds: list[fields.CohereType] = list(dict.fromkeys(body.embedding_types or ["float"]))
        size = body.output_dimension
        call.check_vectors(size, "output_dimension")
        call.limit = min(call.limit, body.max_tokens or call.limit)
        name, texts = _texts(body)
        prompt_name = _prompt(body.input_type, call.pooling)
        prompts = await take_prompts(call, fields.TextInput(texts, True), name, prompt_name)
        vectors = [call.vector(vector, size) for vector in await call.vectors(prompts)]
        tokens = sum(map(len, prompts))

        def answer() -> bytes:
            response: JsonObject = {"id": exchange.request_id, "texts": texts}
            if older and body.embedding_types is None:
                response["embeddings"] = [vector.tolist() for vector in vectors]
                response["response_type"] = "embeddings_floats"
            else:
                written = {kind: [_written(vector, kind) for vector in vectors] for kind in kinds}
                response |= {"embeddings": written, "response_type": "embeddings_by_type"}
            version = "1" if older else "2"
            response["meta"] = cohere_meta(version, {"input_tokens": tokens}, tokens)
            return msgspec.json.encode(response)

        await exchange.answer(200, await in_thread(answer, 4 * sum(map(len, vectors))))


def _texts(body: fields.CohereEmbed) -> tuple[str, list[str]]:
    """Return the name of the body's field that has texts, and the texts. Raises ApiError 400."""
    if body.texts is not None and body.inputs is None:
        return "texts", body.texts
    if body.inputs is not None and body.texts is None:
        return "inputs", [item.text for item in body.inputs]
    name, code = (
        ("texts", "missing_field") if body.texts is None else ("inputs", "conflicting_fields")
    )
    raise invalid("give either texts or inputs", name, code)


def _prompt(kind: str | None, pooling: Pooling) -> str | None:
    """Return the name of the model's prompt for an `input_type`; None if the model has none."""
    names = () if kind is None else (kind, *_PROMPTS.get(kind, ()))
    own = {name.lower(): name for name in pooling.prompts}
    return next((own[name] for name in names if name in own), None)


def _written(vector: Vector, kind: fields.CohereType) -> Any:
    """Return an embedding as JSON in one of Cohere's types. kind: the type.

    binary and ubinary have one bit per element, set if the element is above 0, packed into bytes;
    the bytes of binary are signed.
    """
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    bits = np.packbits(vector > 0)
    return (bits.astype(np.int16) - 128 if kind == "binary" else bits).tolist()
