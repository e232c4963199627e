"""SkyRL's own routes, for its RemoteInferenceClient beside vLLM's (docs/rl.md)."""

from deployments.api.context import ApiContext
from deployments.api.fields.others import LOAD_LORA
from deployments.api.fields.schema import TEXT
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import NAMES, PLAIN, QUEUES, READS, RouteTable
from deployments.api.services.adapters import put_lora
from deployments.api.trainers import fields, orders, vllm
from deployments.api.trainers.vllm import ROLL_OUT

ROLLOUTS, ROUTES = RouteTable(reads=QUEUES), orders.order_table()
_START, _FINISH = "skyrl_start_weight_update", "skyrl_finish_weight_update"
_TAKE = ("update_weights_nccl", "update_weights_ipc")


@ROLLOUTS.post("/skyrl/v1/generate", *ROLL_OUT)
async def generate(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer a rollout with the experts of its tokens."""
    return await vllm.generate(context, exchange, routed=True)


@ROUTES.post(
    "/collective_rpc",
    "An update of weights by SkyRL",
    fields.COLLECTIVE_RPC,
    statuses=orders.UPDATES,
)
async def collective_rpc(context: ApiContext, exchange: HttpExchange) -> object:
    """Carry out the updates that SkyRL's trainer orders from vLLM's workers, and nothing else."""
    body = await context.read_as(exchange, fields.COLLECTIVE_RPC)
    weights, model, arguments = (
        orders.trained(context),
        orders.model_of(exchange),
        body.kwargs or {},
    )
    with orders.refusing("kwargs" if body.method in _TAKE else None):
        if body.method == _START:
            await weights.start_update(model)
        elif body.method == _FINISH:
            await weights.finish_update(model, "")
        elif body.method in _TAKE:
            info = arguments.get("update_info")
            if not isinstance(info, dict):
                raise invalid("kwargs.update_info is an object", "kwargs.update_info")
            await weights.take_tensors(model, info, "")
        else:
            methods = ", ".join((_START, *_TAKE, _FINISH))
            raise invalid(f"method is one of {methods}", "method", "not_supported")
    return {"status": "ok"}


@ROUTES.post(
    "/skyrl/v1/load_lora_adapter",
    "An adapter added or read again",
    LOAD_LORA,
    None,
    (PLAIN,),
    statuses=(*READS, *NAMES),
    query={},
)
async def load_lora(context: ApiContext, exchange: HttpExchange) -> None:
    """Add an adapter, or read it again."""
    await put_lora(context, exchange, await context.read_as(exchange, LOAD_LORA), again=True)


@ROUTES.post(
    "/finish_session",
    "The end of a trajectory",
    statuses=(),
    admin=False,
    query={"session_id": TEXT},
)
async def finish_session(context: ApiContext, exchange: HttpExchange) -> object:
    """Answer that a trajectory has ended; replicas keep nothing for it."""
    return {"status": "ok"}
