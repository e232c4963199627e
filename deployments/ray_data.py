"""MantaEngineProcessorConfig: configures `build_processor` for a Ray Data pipeline with an engine
in each actor.

  config = MantaEngineProcessorConfig(model_source="default", concurrency=1)
  processor = build_processor(config, preprocess=..., postprocess=...)   # of ray.data.llm

Importing this module registers the configuration class; it needs `ray[data]`.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import ray
from pydantic import Field
from ray.data.llm import ProcessorConfig
from ray.llm._internal.batch.processor.base import Processor, ProcessorBuilder
from ray.llm._internal.batch.stages.base import StatefulStage, StatefulStageUDF

from deployments.checkpoints.resolve import resolve_model
from engine.config.engine_config import EngineConfig
from engine.errors import EngineDead, InvalidRequest, MantaError, RequestFailed
from engine.library.async_engine import AsyncEngine
from engine.library.outputs import RequestOutput
from engine.sampling_params import SamplingParams

logger = logging.getLogger("manta.ray_data")

Row = dict[str, Any]

_PROMPTS = ("messages", "prompt", "prompt_token_ids")
_ERROR = "__inference_error__"  # the column with a row's error, as in Ray Data's own stages


class MantaEngineProcessorConfig(ProcessorConfig):
    """The configuration of a processor whose actors each run an engine.

    A row has `prompt` (a text), `messages` (a chat) or `prompt_token_ids`, and may have
    `sampling_params`, the fields of `engine.SamplingParams`. The processor adds `generated_text`,
    `generated_tokens`, `num_generated_tokens`, `num_input_tokens`, `finish_reason`, and
    `token_logprobs` if log-probabilities were requested.
    """

    model_source: str = Field(
        description="A folder, a .gguf file, a hub name or `default`, as for `manta serve`."
    )
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="The fields of `engine.EngineConfig`."
    )
    max_concurrent_batches: int = Field(
        default=8,
        ge=1,
        description="Batches that an engine has at once. Times batch_size it should be more than "
        "the engine's max_num_seqs, or the engine waits for the last rows of a batch.",
    )
    should_continue_on_error: bool = Field(
        default=False,
        description="Whether a row that fails gets its error in the column __inference_error__, "
        "instead of ending the job.",
    )
    num_gpus: float | None = Field(
        default=None,
        description="GPUs of an actor. None: one for each rank, or none where the cluster has no "
        "GPU or engine_kwargs has device: cpu.",
    )
    num_cpus: float | None = Field(default=None, description="Cores of an actor. None: Ray's 1.")
    runtime_env: dict[str, Any] | None = Field(
        default=None, description="The runtime environment of the actors."
    )


class EngineStageUDF(StatefulStageUDF):
    """The function that an EngineStage runs in one actor, with an engine that is started by the
    first batch.

    The engine runs the rows of all batches of the actor concurrently.
    """

    def __init__(
        self,
        data_column: str,
        expected_input_keys: list[str],
        *,
        model_source: str,
        engine_kwargs: dict[str, Any],
        should_continue_on_error: bool,
    ) -> None:
        super().__init__(data_column, expected_input_keys)
        self._source, self._fields = model_source, engine_kwargs
        self._continue = should_continue_on_error
        self._engine: AsyncEngine | None = None
        self._starting = asyncio.Lock()
        self._alone = asyncio.Lock()  # held while a row is tried again after the engine has died

    # The base class's method has no yield, so it is typed as a coroutine.
    async def udf(  # type: ignore[override]
        self, batch: list[Row]
    ) -> AsyncIterator[Row]:
        """Yield the new columns of each row of a batch, in the order in which rows are finished.
        Raises MantaError."""
        name = uuid.uuid4().hex
        tasks = [asyncio.create_task(self._columns(row, name)) for row in batch]
        try:
            for columns in asyncio.as_completed(tasks):
                yield await columns
        finally:
            for task in tasks:
                task.cancel()

    async def _columns(self, row: Row, batch: str) -> Row:
        place = {self.IDX_IN_BATCH_COLUMN: row[self.IDX_IN_BATCH_COLUMN], "batch_uuid": batch}
        try:
            columns = await self._answer(row)
        except (InvalidRequest, RequestFailed, EngineDead) as error:
            if not self._continue:
                raise
            logger.warning("a row failed: %s", error)
            return {**place, _ERROR: f"{error.code}: {error}"}
        return {**place, **columns, _ERROR: ""}

    async def _answer(self, row: Row) -> Row:
        prompt, params = _prompt_of(row), _params_of(row)
        try:
            output = await self._ask(prompt, params)
        except EngineDead:
            # One of the rows may have killed the engine, so all of them are tried again one by one.
            async with self._alone:
                output = await self._ask(prompt, params)
        choice = output.outputs[0]
        if choice.finish_reason == "error":
            code, _, message = choice.error.partition(": ")
            raise RequestFailed(message or choice.error, code=code)
        columns = {
            "generated_text": choice.text,
            "generated_tokens": choice.token_ids,
            "num_generated_tokens": len(choice.token_ids),
            "num_input_tokens": len(output.prompt_token_ids),
            "finish_reason": choice.finish_reason,
        }
        if choice.logprobs is not None:
            columns["token_logprobs"] = [item.logprob for item in choice.logprobs]
        return columns

    async def _ask(self, prompt: Any, params: SamplingParams | None) -> RequestOutput:
        """Return the engine's answer to a prompt. Raises EngineDead, after which the next call
        starts a new engine."""
        engine = await self._running()
        try:
            return await engine.start_request(prompt, params)
        except EngineDead:
            if self._engine is engine:
                self._engine = None
                await engine.close()
            raise

    async def _running(self) -> AsyncEngine:
        """Return the engine, after starting it if there is none. Raises ConfigError, EngineDead."""
        async with self._starting:
            if self._engine is None:
                weights = self._fields.get("load_format") != "dummy"
                folder = await asyncio.to_thread(resolve_model, self._source, weights=weights)
                config = EngineConfig(model=str(folder), **self._fields)
                self._engine = await AsyncEngine.start(config)
            return self._engine


class EngineStage(StatefulStage):
    """A stage of a Ray Data processor whose actors run a Manta engine."""

    fn: type[StatefulStageUDF] = EngineStageUDF

    def get_optional_input_keys(self) -> dict[str, str]:
        """Return {column that a row may have: description}; one of the first three is required."""
        return {
            "messages": "The messages of a chat.",
            "prompt": "The prompt, a text.",
            "prompt_token_ids": "The prompt as token ids.",
            "sampling_params": "The fields of engine.SamplingParams.",
        }


def _prompt_of(row: Row) -> Any:
    columns = [name for name in _PROMPTS if row.get(name) is not None]
    if len(columns) != 1:
        raise InvalidRequest(f"a row has one of {', '.join(_PROMPTS)}", param=_PROMPTS[1])
    return row[columns[0]]


def _params_of(row: Row) -> SamplingParams | None:
    """Return a row's sampling parameters; None: the model's defaults. Raises InvalidRequest.

    In Arrow all rows have the same fields, with None for missing values.
    """
    fields = {
        name: value
        for name, value in (row.get("sampling_params") or {}).items()
        if value is not None
    }
    if fields.get("n", 1) != 1:
        raise InvalidRequest("n: a row has one answer; repeat the row instead", param="n")
    if unknown := fields.keys() - {field.name for field in msgspec.structs.fields(SamplingParams)}:
        raise InvalidRequest(
            f"sampling_params: unknown {', '.join(sorted(unknown))}; the names are those of "
            "engine.SamplingParams",
            param="sampling_params",
        )
    return SamplingParams(**fields) if fields else None


def _gpus(config: MantaEngineProcessorConfig) -> float:
    fields = config.engine_kwargs
    if config.num_gpus is not None:
        return config.num_gpus
    if fields.get("device") == "cpu" or not ray.cluster_resources().get("GPU"):
        return 0
    ranks: int = fields.get("tensor_parallel", 1) * fields.get("pipeline_parallel", 1)
    return ranks


def build_engine_processor(
    config: MantaEngineProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
    preprocess_map_kwargs: dict[str, Any] | None = None,
    postprocess_map_kwargs: dict[str, Any] | None = None,
) -> Processor:
    """Return the processor of a configuration; `ray.data.llm.build_processor` calls it.

    Raises MantaError for fields that `EngineConfig` does not know.
    """
    ray.init(runtime_env=config.runtime_env, ignore_reinit_error=True)
    known = {field.name for field in msgspec.structs.fields(EngineConfig)} - {"model"}
    if unknown := config.engine_kwargs.keys() - known:
        raise MantaError(
            f"engine_kwargs: unknown {', '.join(sorted(unknown))}; the names are those of "
            "engine.EngineConfig",
            param="engine_kwargs",
            code="invalid_config",
        )
    size: dict[str, Any] = config.get_concurrency(autoscaling_enabled=False)
    resources = {"num_gpus": _gpus(config), "num_cpus": config.num_cpus}
    stage = EngineStage(
        fn_constructor_kwargs={
            "model_source": config.model_source,
            "engine_kwargs": config.engine_kwargs,
            "should_continue_on_error": config.should_continue_on_error,
        },
        map_batches_kwargs={
            "compute": ray.data.ActorPoolStrategy(
                **size, max_tasks_in_flight_per_actor=2 * config.max_concurrent_batches
            ),
            "max_concurrency": config.max_concurrent_batches,
            "accelerator_type": config.accelerator_type,
            "runtime_env": config.runtime_env,
            **{name: count for name, count in resources.items() if count is not None},
        },
    )
    return Processor(
        config,
        [stage],
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs=preprocess_map_kwargs,
        postprocess_map_kwargs=postprocess_map_kwargs,
    )


ProcessorBuilder.register(MantaEngineProcessorConfig, build_engine_processor)
