"""The bodies of the routes for trainers."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deployments.api.body_fields import MAX_SALT_BYTES
from deployments.api.fields.body import struct_body
from deployments.api.fields.generation import Logprobs, Stop, StopTokenIds, TokenIds, sampled

_TokenIds = Annotated[TokenIds, Meta(min_length=1)]
_Version = Annotated[str, Meta(max_length=256)] | None
_Group = Annotated[str, Meta(min_length=1, max_length=256)]
_LoadFormat = Literal["flattened_bucket"] | None
_Salt = Annotated[str, Meta(max_length=MAX_SALT_BYTES)] | None


class _RolloutSampling(Struct, kw_only=True, gc=False):
    """The fields of `sampling_params` that have the same names in vLLM and SGLang."""

    n: Annotated[int, sampled("n")] | None = None
    temperature: Annotated[float, sampled("temperature")] | None = None
    top_p: Annotated[float, sampled("top_p")] | None = None
    top_k: Annotated[int, sampled("top_k", ge=-1)] | None = None
    min_p: Annotated[float, sampled("min_p")] | None = None
    repetition_penalty: Annotated[float, sampled("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, sampled("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, sampled("frequency_penalty")] | None = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    ignore_eos: bool | None = None
    logprobs_mode: Logprobs | None = None


class TokenSampling(_RolloutSampling, kw_only=True, gc=False):
    """The field `sampling_params` of a rollout, with vLLM's names."""

    max_tokens: Annotated[int, sampled("max_tokens")] | None = None
    min_tokens: Annotated[int, sampled("min_tokens")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    logprobs: Annotated[int, sampled("logprobs")] | None = None
    prompt_logprobs: Annotated[int, sampled("prompt_logprobs")] | None = None


class Rollout(Struct, kw_only=True, gc=False):
    """The body of /inference/v1/generate: token ids in, token ids out."""

    token_ids: _TokenIds
    sampling_params: TokenSampling
    return_routed_experts: bool | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    cache_salt: _Salt = None
    priority: int | None = None


_THEIR_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}


class TheirSampling(_RolloutSampling, kw_only=True, gc=False, rename=_THEIR_NAMES):
    """The field `sampling_params` of /generate, with SGLang's names."""

    max_tokens: Annotated[int, sampled("max_tokens")] | None = None
    min_tokens: Annotated[int, sampled("min_tokens")] | None = None
    seed: Annotated[int, sampled("seed")] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class TheirRollout(
    Struct, kw_only=True, gc=False, rename={"token_ids": "input_ids", "request_id": "rid"}
):
    """The body of SGLang's route /generate."""

    token_ids: _TokenIds
    sampling_params: TheirSampling | None = None
    return_logprob: bool | None = None
    return_routed_experts: bool | None = None
    request_id: str | None = None
    stream: bool | None = None
    model: str | None = None


class FromDisk(Struct, kw_only=True, gc=False):
    """The body of SGLang's route /update_weights_from_disk."""

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    weight_version: _Version = None
    flush_cache: bool | None = None


class InitGroup(Struct, kw_only=True, gc=False):
    """The body of SGLang's route /init_weights_update_group, which sets up a torch process group.

    rank_offset: the first replica's rank; the other replicas have the next ranks.
    world_size: the number of ranks of trainer and replicas together.
    backend: nccl for engines on CUDA, gloo for those on CPUs.
    """

    master_address: Annotated[str, Meta(min_length=1, max_length=256)]
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, Meta(ge=1)]
    world_size: Annotated[int, Meta(ge=2)]
    group_name: _Group = "weight_update_group"
    backend: Annotated[str, Meta(max_length=32)] = "nccl"


class DestroyGroup(Struct, kw_only=True, gc=False):
    """The body of SGLang's route /destroy_weights_update_group."""

    group_name: _Group = "weight_update_group"


class _SentTensors(Struct, kw_only=True, gc=False):
    """The fields that the bodies of SGLang's two routes for tensors share.

    flush_cache: accepted without effect, as new weights always invalidate cached prefixes.
    """

    load_format: _LoadFormat = None
    weight_version: _Version = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class FromDistributed(_SentTensors, kw_only=True, gc=False):
    """The body of SGLang's route /update_weights_from_distributed, which announces broadcast
    tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: _Group = "weight_update_group"


class FromTensor(_SentTensors, kw_only=True, gc=False):
    """The body of SGLang's route /update_weights_from_tensor: a base64 pickle for each rank."""

    serialized_named_tensors: Annotated[list[str], Meta(min_length=1)]


class InitTransfer(Struct, kw_only=True, gc=False):
    """The body of vLLM's route /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class StartUpdate(Struct, kw_only=True, gc=False):
    """The body of vLLM's route /start_weight_update. Tensors must have checkpoint names."""

    is_checkpoint_format: bool | None = None


class UpdateTensors(Struct, kw_only=True, gc=False):
    """The body of vLLM's route /update_weights."""

    update_info: dict[str, Any]
    weight_version: _Version = None


class FinishUpdate(Struct, kw_only=True, gc=False):
    """The body of vLLM's route /finish_weight_update."""

    weight_version: _Version = None


class AbortRequests(Struct, kw_only=True, gc=False):
    """The body of vLLM's route /abort_requests; without ids, all requests are aborted."""

    request_ids: list[str] | None = None


class AbortRequest(Struct, kw_only=True, gc=False, rename={"request_id": "rid"}):
    """The body of SGLang's route /abort_request."""

    request_id: str | None = None
    abort_all: bool | None = None


class CollectiveRpc(Struct, kw_only=True, gc=False):
    """The body of SkyRL's route /collective_rpc."""

    method: str
    kwargs: dict[str, Any] | None = None


class PauseOrder(Struct, kw_only=True, gc=False):
    """The fields of /pause, in the body or, as vLLM's clients send them, in the query.

    wait_for_inflight_requests: mode=wait in older clients of vLLM.
    """

    model: str | None = None
    mode: str | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None


class PauseGeneration(Struct, kw_only=True, gc=False):
    """The body of SGLang's route /pause_generation."""

    mode: str | None = None


class MemoryParts(Struct, kw_only=True, gc=False):
    """The body of SGLang's routes that free memory and allocate it again."""

    tags: list[str] | None = None


ROLLOUT = struct_body(Rollout)
THEIR_ROLLOUT = struct_body(TheirRollout)
INIT_GROUP = struct_body(InitGroup)
DESTROY_GROUP = struct_body(DestroyGroup)
FROM_DISTRIBUTED = struct_body(FromDistributed)
FROM_TENSOR = struct_body(FromTensor)
FROM_DISK = struct_body(FromDisk)
PAUSE = struct_body(PauseOrder)
PAUSE_GENERATION = struct_body(PauseGeneration)
MEMORY_PARTS = struct_body(MemoryParts)
INIT_TRANSFER = struct_body(InitTransfer)
START_UPDATE = struct_body(StartUpdate)
UPDATE_TENSORS = struct_body(UpdateTensors)
FINISH_UPDATE = struct_body(FinishUpdate)
ABORT_REQUESTS = struct_body(AbortRequests)
ABORT_REQUEST = struct_body(AbortRequest)
COLLECTIVE_RPC = struct_body(CollectiveRpc)
