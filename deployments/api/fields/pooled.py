"""EMBEDDINGS, RERANK, SCORE, CLASSIFY and others: the bodies of the routes of pooling models."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from msgspec import Meta

from deployments.api.fields.body import Fault, Shape, struct_body, words
from deployments.api.fields.chat import Messages
from deployments.api.fields.generation import UINT31, Queued, Side, TokenCut
from deployments.api.fields.schema import (
    FILLED,
    TEXT,
    TOKEN,
    Schema,
    either,
    list_of,
    one_of,
    record,
)

MAX_TEXTS = 2048  # OpenAI's limit
BYTES, BYTES_ONLY = "bytes", "bytes_only"
MAX_PARTS = 1024  # content parts of one text
# The names of one field: whether a final sigmoid, softmax or normalization is applied to the
# output.
ACTIVATION = ("use_activation", "activation", "softmax", "normalize")

Format = Literal["float", "base64", "bytes", "bytes_only"]
Dtype = Literal["float32", "float16", "bfloat16"]
Endianness = Literal["native", "little", "big"]
Direction = Literal["Left", "Right"]  # the type Side in TEI's spelling
Task = Literal["embed", "classify"]
PromptName = Annotated[str, Meta(max_length=256)]
Positive = Annotated[int, Meta(ge=1, le=UINT31)]

TEXTS: tuple[Schema, ...] = (
    FILLED,
    list_of(TOKEN, 1),
    list_of(FILLED, 1, MAX_TEXTS),
    list_of(list_of(TOKEN, 1), 1, MAX_TEXTS),
)
_PARTS = list_of(record({"type": one_of("text"), "text": TEXT}), 1, MAX_PARTS)
_DOCUMENT = either(TEXT, record({"text": TEXT}), record({"content": either(TEXT, _PARTS)}))
_PAIR = list_of(TEXT, 1, 2)


def _check_count(values: list[Any]) -> None:
    if len(values) > MAX_TEXTS:
        raise Fault(f"takes at most {MAX_TEXTS} texts, got {len(values)}", code="invalid_value")


class TextInput(Shape):
    """The field `input`: a text, a list of token ids, or a list of either.

    items: the texts or lists of token ids; the ids are not checked yet
    many: whether the field is a list of texts or of token id lists
    """

    SCHEMA = either(*TEXTS)
    EMPTY: ClassVar[bool] = False  # whether the list of texts may be empty

    def __init__(self, items: list[Any], many: bool) -> None:
        self.items = items
        self.many = many

    @classmethod
    def parse(cls, value: Any) -> Self:
        if not isinstance(value, (str, list)):
            raise Fault("must be a string, a list of token ids, or a list of these")
        if not value and cls.EMPTY:
            return cls([], True)
        if not value:
            raise Fault("must not be empty", code="invalid_value")
        if isinstance(value, str) or not isinstance(value[0], (str, list)):
            return cls([value], False)
        _check_count(value)
        kinds = [type(item) for item in value]
        if len(set(kinds)) > 1:
            place = next(i for i, kind in enumerate(kinds) if kind is not kinds[0])
            raise Fault("must be of the same kind as the first", f"[{place}]")
        return cls(value, True)


def _document_text(value: Any) -> str | None:
    """Return a document's text: the string itself, or an object's `text` or `content`; None if
    there is no string."""
    text = value
    if isinstance(value, dict):
        text, content = value.get("text"), value.get("content")
        if content is not None:
            text = content if isinstance(content, str) else _joined(content)
    return text if isinstance(text, str) else None


class Documents(Shape):
    """One document, or a list of documents. Empty texts are accepted, as they occur in long
    lists."""

    SCHEMA = either(_DOCUMENT, list_of(_DOCUMENT, 1, MAX_TEXTS))

    def __init__(self, texts: list[str], many: bool) -> None:
        self.texts = texts
        self.many = many

    @classmethod
    def parse(cls, value: Any) -> Self:
        many = isinstance(value, list)
        items = value if many else [value]
        if not 1 <= len(items) <= MAX_TEXTS:
            message = f"takes 1 to {MAX_TEXTS} texts, got {len(items)}"
            raise Fault(message, code="invalid_value")
        texts = []
        for i, item in enumerate(items):
            if (text := _document_text(item)) is None:
                message = "must be a string, or an object with a string in text or content"
                raise Fault(message, f"[{i}]" if many else "")
            texts.append(text)
        return cls(texts, many)


class Query(Shape):
    """The query of a ranking: a text that is not empty, or an object with such a text."""

    SCHEMA = either(FILLED, record({"text": FILLED}))

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def parse(cls, value: Any) -> Self:
        documents = Documents.parse(value)
        if documents.many:
            raise Fault("must be a string")
        if not documents.texts[0]:
            raise Fault("must not be empty", code="invalid_value")
        return cls(documents.texts[0])


class DocumentList(Documents):
    """A list of documents."""

    SCHEMA = list_of(_DOCUMENT, 1, MAX_TEXTS)

    @classmethod
    def parse(cls, value: Any) -> Self:
        documents = super().parse(value)
        if not documents.many:
            raise Fault("must be a list of texts")
        return documents


class Pairs(Shape):
    """The inputs of /predict: a text, a list of one or two texts, or a list of such lists."""

    SCHEMA = either(FILLED, _PAIR, list_of(_PAIR, 1, MAX_TEXTS))

    def __init__(self, items: list[list[str]], many: bool) -> None:
        self.items = items
        self.many = many

    @classmethod
    def parse(cls, value: Any) -> Self:
        many = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        items = value if many else [value]
        _check_count(items)
        pairs = [item if isinstance(item, list) else [item] for item in items]
        for i, texts in enumerate(pairs):
            if not 1 <= len(texts) <= 2 or any(not isinstance(text, str) for text in texts):
                place = f"[{i}]" if many else ""
                raise Fault("must be a text, or a list of one or two texts", place)
        return cls(pairs, many)


class CohereInput(Shape):
    """An input of Cohere's API: an object whose `content` has the text."""

    SCHEMA = record({"content": either(TEXT, _PARTS)})

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def parse(cls, value: Any) -> Self:
        content = value.get("content") if isinstance(value, dict) else None
        text = content if isinstance(content, str) else _joined(content)
        if text is None:
            raise Fault("must be text")
        return cls(text)


def _joined(parts: Any) -> str | None:
    """Return the joined texts of content parts; None if some parts are no texts."""
    if not isinstance(parts, list) or not 1 <= len(parts) <= MAX_PARTS:
        return None
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if len(texts) == len(parts) else None


class PoolingOptions(NamedTuple):
    """The options of a pooling request, for its texts and for the results.

    truncate: whether texts that are too long for the model are truncated, at their end
    keep_end: whether texts are truncated at their beginning instead of the end
    special: whether the special tokens that tokenizer.json defines are added to a text
    cut: the field truncate_prompt_tokens, a text's maximum of tokens; -1: the model's maximum;
        None: not set
    activations: {name in ACTIVATION: value} of the fields that the body has
    """

    truncate: bool = False
    keep_end: bool = False
    special: bool = True
    cut: int | None = None
    activations: Mapping[str, bool] = {}


class PoolingBody(Queued, kw_only=True):
    """A base class of the bodies of pooling models."""

    def pooling_options(self) -> PoolingOptions:
        """Return the body's options for its texts and for their vectors or scores."""
        return PoolingOptions()


class Texts(PoolingBody, kw_only=True):
    """The fields that most bodies with texts share."""

    truncate: bool | None = None
    truncate_prompt_tokens: TokenCut | None = None
    truncation_side: Annotated[Side, words(Side)] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    def pooling_options(self) -> PoolingOptions:
        names = {name: getattr(self, name, None) for name in ACTIVATION}
        return PoolingOptions(
            bool(self.truncate),
            self.truncation_side == "left",
            self.add_special_tokens is not False,
            self.truncate_prompt_tokens,
            {name: value for name, value in names.items() if value is not None},
        )


class _Activated(Texts, kw_only=True):
    activation: bool | None = None
    softmax: bool | None = None


class Inputs(Texts, kw_only=True):
    """The base of bodies with texts or a chat, which is rendered to one text."""

    input: TextInput | None = None
    prompt_name: PromptName | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Embeddings(Inputs, kw_only=True):
    """The body of /v1/embeddings."""

    encoding_format: Annotated[Format, words(Format)] | None = None
    embed_dtype: Annotated[Dtype, words(Dtype)] | None = None
    endianness: Annotated[Endianness, words(Endianness)] | None = None
    dimensions: Positive | None = None
    normalize: bool | None = None


class Pooled(Embeddings, kw_only=True):
    """The body of /pooling."""

    activation: bool | None = None
    softmax: bool | None = None
    task: Annotated[Task, words(Task)] | None = None


class Classify(Inputs, kw_only=True):
    """The body of /v1/classify."""

    activation: bool | None = None
    softmax: bool | None = None


class Reranked(_Activated, kw_only=True):
    """The fields that the bodies of reranking routes share."""

    query: Query
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Positive | None = None


class Rerank(Reranked, kw_only=True):
    """The body of /v1/rerank and /v2/rerank."""

    documents: DocumentList


class RerankTexts(Reranked, kw_only=True):
    """The body of /rerank, which has TEI's `texts` or `documents`."""

    raw_scores: bool | None = None
    truncation_direction: Annotated[Direction, words(Direction)] | None = None
    documents: DocumentList | None = None
    texts: DocumentList | None = None
    return_text: bool | None = None

    def pooling_options(self) -> PoolingOptions:
        return _tei_options(super().pooling_options(), self)


class Score(_Activated, kw_only=True):
    """The body of /v1/score. FIRST and SECOND: alternative field names of the pairs' first and
    second texts."""

    text_1: Documents | None = None
    queries: Documents | None = None
    data_1: Documents | None = None
    text_2: Documents | None = None
    documents: Documents | None = None
    items: Documents | None = None
    data_2: Documents | None = None


FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "items", "data_2")

CohereType = Literal["float", "base64", "binary", "ubinary"]
CohereCut = Literal["NONE", "START", "END"]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
_OneType = Annotated[CohereType, words(CohereType, "one of ", ", ", code="invalid_value")]


class CohereEmbed(PoolingBody, kw_only=True):
    """The body of /v2/embed and /v1/embed."""

    texts: (
        Annotated[
            list[
                Annotated[str, Meta(extra_json_schema={"minLength": 1}, extra={"expected": "text"})]
            ],
            Meta(min_length=1, max_length=MAX_TEXTS, extra={"items": "texts"}),
        ]
        | None
    ) = None
    inputs: (
        Annotated[
            list[CohereInput], Meta(min_length=1, max_length=MAX_TEXTS, extra={"items": "texts"})
        ]
        | None
    ) = None
    input_type: Annotated[InputType, words(InputType)] | None = None
    embedding_types: (
        Annotated[
            list[_OneType],
            Meta(
                min_length=1, extra={"expected": "a list that is not empty", "code": "invalid_type"}
            ),
        ]
        | None
    ) = None
    output_dimension: Positive | None = None
    max_tokens: Positive | None = None
    truncate: Annotated[CohereCut, words(CohereCut)] | None = None

    def pooling_options(self) -> PoolingOptions:
        """Return the options, which determine whether long texts are truncated, and at which
        end."""
        return PoolingOptions(self.truncate != "NONE", self.truncate == "START")


class Tei(Texts, kw_only=True):
    """The fields that the bodies of TEI's own routes share."""

    raw_scores: bool | None = None
    truncation_direction: Annotated[Direction, words(Direction)] | None = None

    def pooling_options(self) -> PoolingOptions:
        return _tei_options(super().pooling_options(), self)


def _tei_options(options: PoolingOptions, body: RerankTexts | Tei) -> PoolingOptions:
    if body.truncation_direction is not None:
        options = options._replace(keep_end=body.truncation_direction == "Left")
    if body.raw_scores:
        activations = {**options.activations, "use_activation": False}
        options = options._replace(activations=activations)
    return options


class TeiEmbed(Tei, kw_only=True):
    """The body of /embed."""

    inputs: TextInput
    normalize: bool | None = None
    prompt_name: PromptName | None = None
    dimensions: Positive | None = None

    def pooling_options(self) -> PoolingOptions:
        """Return the options: vectors are normalized unless the request's `normalize` is false."""
        options = super().pooling_options()
        if Texts.pooling_options(self).activations:
            return options
        return options._replace(activations={**options.activations, "normalize": True})


class TeiPredict(Tei, kw_only=True):
    """The body of /predict."""

    inputs: Pairs


EMBEDDINGS = struct_body(Embeddings)
POOLING = struct_body(Pooled)
CLASSIFY = struct_body(Classify)
RERANK = struct_body(Rerank)
RERANK_TEXTS = struct_body(RerankTexts)
SCORE = struct_body(
    Score,
    rejected={
        "label_token_ids": (
            "label_token_ids: scores here are those of rerankers and embedders, not of tokens",
            "not_supported",
        )
    },
)
COHERE_EMBED = struct_body(
    CohereEmbed,
    rejected={
        "images": ("images: the models served here take text only", "modality_not_supported")
    },
)
TEI_EMBED = struct_body(TeiEmbed)
TEI_PREDICT = struct_body(TeiPredict)
