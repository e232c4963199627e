"""SkyRL's own routes, for its RemoteInferenceClient beside vLLM's (docs/rl.md)."""

from deployments.api.context import ApiContext
from deployments.api.fields.others import LOAD_LORA
from deployments.api.fields.schema import TEXT
from deployments.api.http.errors import invalid
from deployments.api.http.exchange import HttpExchange
from deployments.api.route import NAMES, PLAIN, READS, Operation, Route
from deployments.api.services.adapters import put_lora
from deployments.api.trainers import vllm
from deployments.api.trainers.fields import COLLECTIVE_RPC
from deployments.api.trainers.orders import CHANGES, OK, model_of, order_of, refusing, trained
from deployments.api.trainers.vllm import ROLL_OUT

_START, _FINISH = "skyrl_start_weight_update", "skyrl_finish_weight_update"
_TAKE = ("update_weights_nccl", "update_weights_ipc")


async def collective_rpc(context: ApiContext, exchange: HttpExchange) -> None:
    """Carry out the updates that SkyRL's trainer orders from vLLM's workers, and nothing else."""
    body = await context.read_as(exchange, COLLECTIVE_RPC)
    weights, model, arguments = trained(context), model_of(exchange), body.kwargs or {}
    with refusing("kwargs" if body.method in _TAKE else None):
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
    await exchange.answer_json({"status": "ok"})


async def generate(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer a rollout with the experts of its tokens."""
    await vllm.generate(context, exchange, routed=True)


async def load_lora(context: ApiContext, exchange: HttpExchange) -> None:
    """Add an adapter, or read it again."""
    await put_lora(context, exchange, await context.read_as(exchange, LOAD_LORA), again=True)


async def finish_session(context: ApiContext, exchange: HttpExchange) -> None:
    """Answer that a trajectory has ended; replicas keep nothing for it."""
    await exchange.answer_json({"status": "ok"})


GENERATE = "/skyrl/v1/generate"
LOAD = "/skyrl/v1/load_lora_adapter"
RPC = "/collective_rpc"
ROUTES = (
    Route(GENERATE, generate, post=ROLL_OUT),
    Route(
        RPC,
        collective_rpc,
        post=order_of("An update of weights by SkyRL", OK, COLLECTIVE_RPC, (*CHANGES, 409)),
    ),
    Route(
        LOAD,
        load_lora,
        post=Operation(
            "An adapter added or read again", (*READS, *NAMES), LOAD_LORA, None, (PLAIN,)
        ),
    ),
    Route(
        "/finish_session",
        finish_session,
        post=Operation("The end of a trajectory", answer=OK, query={"session_id": TEXT}),
    ),
)
ADMIN_PATHS = frozenset({RPC, LOAD})
