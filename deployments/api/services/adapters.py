"""/v1/adapters: list, add and remove adapters of running models."""

from deployments.adapters.record_store import AdapterRecord
from deployments.api.context import ApiContext
from deployments.api.fields.others import ADAPTER, LOAD_LORA, UNLOAD_LORA, LoadLora
from deployments.api.fields.schema import TEXT
from deployments.api.http.errors import ApiError, did_you_mean, invalid, shown
from deployments.api.http.exchange import HttpExchange
from deployments.api.http.json_body import JsonObject
from deployments.api.route import LIST, NAMES, PLAIN, READS, RouteTable
from engine.errors import AdapterError

PATH = "/v1/adapters"
ROUTES = RouteTable((503, *NAMES), (*READS, *NAMES, 409, 422, 503), admin=True)
_ONE = f"{PATH}/{{name}}"
_ANSWER = ("id", "object", "path", "source")
_TEXT = b"text/plain; charset=utf-8"


@ROUTES.get(PATH, "Adapters, all or of one model", LIST, query={"model": TEXT})
async def adapters(context: ApiContext, exchange: HttpExchange) -> object:
    directory = context.backend.adapters
    await directory.refresh()
    model = _model(exchange)
    bases = [name for name, card in context.backend.models().items() if card.parent is None]
    if model and model not in bases:
        message = f"no model is called {shown(model)}{did_you_mean(model, bases)}"
        raise ApiError(404, "model_not_found", message, param="model")
    pairs = [pair for pair in directory.by_model() if model in ("", pair[0])]
    return {"object": "list", "data": [_shown(record, base) for base, record in pairs]}


@ROUTES.post(PATH, "An adapter, added or read again", ADAPTER, _ANSWER)
async def add(context: ApiContext, exchange: HttpExchange) -> object:
    body = await context.read_as(exchange, ADAPTER)
    model = body.model or ""
    try:
        record = await context.backend.adapters.add(body.name, body.path or "", model)
    except AdapterError as error:
        if error.param is None:
            by_name = body.path is None or error.code == "invalid_model_name"
            error.param = "name" if by_name else "path"
        raise
    return _shown(record, _base(context, record, model))


# Paths of vLLM's own routes.
@ROUTES.post(
    "/v1/load_lora_adapter", "An adapter, added by vLLM's route", LOAD_LORA, kinds=(PLAIN,)
)
async def load_lora(context: ApiContext, exchange: HttpExchange) -> None:
    """Add an adapter by vLLM's route. Raises ApiError 400 if the name is taken, unless load_inplace
    is set."""
    body = await context.read_as(exchange, LOAD_LORA)
    await put_lora(context, exchange, body, again=bool(body.load_inplace))


async def put_lora(
    context: ApiContext, exchange: HttpExchange, body: LoadLora, *, again: bool
) -> None:
    """Add an adapter, and answer in vLLM's format. again: whether an adapter of the same name is
    replaced.

    Raises ApiError, AdapterError.
    """
    name = body.lora_name
    directory = context.backend.adapters
    await directory.refresh()
    if name in directory.records and not again:
        message = f"the adapter {shown(name)} is already loaded; load_inplace: true reads it again"
        raise invalid(message, "lora_name", "adapter_exists")
    try:
        await directory.add(name, body.lora_path, body.base_model_name or "")
    except AdapterError as error:
        if error.param is None:
            error.param = "lora_name" if error.code == "invalid_model_name" else "lora_path"
        raise
    text = f"Success: LoRA adapter '{name}' added successfully."
    await exchange.answer(200, text.encode(), _TEXT)


@ROUTES.post(
    "/v1/unload_lora_adapter", "An adapter, removed by vLLM's route", UNLOAD_LORA, kinds=(PLAIN,)
)
async def unload_lora(context: ApiContext, exchange: HttpExchange) -> None:
    body = await context.read_as(exchange, UNLOAD_LORA)
    await context.backend.adapters.remove(body.lora_name)
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    await exchange.answer(200, text.encode(), _TEXT)


@ROUTES.get(_ONE, "An adapter", _ANSWER)
async def one_adapter(context: ApiContext, exchange: HttpExchange) -> object:
    directory = context.backend.adapters
    name = exchange.path[len(PATH) + 1 :]
    await directory.refresh()
    record = directory.records.get(name)
    if record is None:
        message = f"no adapter is called {shown(name)}{did_you_mean(name, directory.records)}"
        raise ApiError(404, "adapter_not_found", message)
    return _shown(record, _base(context, record, ""))


@ROUTES.delete(_ONE, "Take it away", statuses=(503, *NAMES, 400, 409, 422), query={"model": TEXT})
async def remove(context: ApiContext, exchange: HttpExchange) -> object:
    name = exchange.path[len(PATH) + 1 :]
    await context.backend.adapters.remove(name, _model(exchange))
    return {"id": name, "object": "adapter", "deleted": True}


def _model(exchange: HttpExchange) -> str:
    """Return the base model's name in the query; "": none."""
    return exchange.parameters().get("model", "")


def _base(context: ApiContext, record: AdapterRecord, model: str) -> str:
    """Return the name of an adapter's base model: `model` or, if it is "", the one that has the
    adapter."""
    bases = (
        base for base, other in context.backend.adapters.by_model() if other.name == record.name
    )
    return model or next(bases, "")


def _shown(record: AdapterRecord, base: str) -> JsonObject:
    """Return an adapter as JSON. base: name of its base model.

    The adapter's revision is null until a first request has made a replica read the files.
    """
    return {
        "id": record.name,
        "object": "adapter",
        "model": base,
        "path": record.path,
        "source": record.source,
        "revision": record.revision or None,
        "kind": record.kind or None,
        "rank": record.rank or None,
        "bytes": record.num_bytes or None,
        "targets": record.targets,
        "virtual_tokens": record.virtual_tokens,
    }
