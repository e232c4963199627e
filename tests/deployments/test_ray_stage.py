"""The stage of a Manta engine in Ray Data's actors, without Ray: rows, errors and dead engines.
Runs where `ray[data]` is installed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

from deployments import ray_data
from engine.errors import EngineDead

POISON, LETHAL = 17, 18


def rows_of(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """Return the rows behind the stage, whose engine is a fake one that dies of a certain token."""
    spec = f"fake:vocab_size=390,poison={POISON},lethal={LETHAL}"
    monkeypatch.setattr(ray_data, "resolve_model", lambda _, weights: Path(spec))

    async def run() -> list[dict[str, Any]]:
        stage = ray_data.EngineStageUDF(
            "__data",
            [],
            model_source="tiny",
            engine_kwargs={},
            **{"should_continue_on_error": True, **fields},
        )
        (block,) = [block async for block in stage({"__data": rows})]
        if stage._engine is not None:
            await stage._engine.close()
        return block["__data"]

    return asyncio.run(run())


def row(ids: list[int], **params: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "sampling_params": {"max_tokens": 4, **params}}


def test_a_row_that_kills_engines_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ran beside it are blamed, or wait for an engine that is dead."""
    rows = [row([40 + n]) for n in range(12)]
    rows[2], rows[5] = row([POISON]), row([LETHAL])
    answers = rows_of(rows, monkeypatch)
    failed = [n for n, answer in enumerate(answers) if answer["__inference_error__"]]
    assert failed == [2, 5] and "poison" in answers[2]["__inference_error__"]
    assert answers[5]["__inference_error__"].startswith("engine_dead: ")
    assert all(answers[n]["num_generated_tokens"] == 4 for n in range(12) if n not in failed)
    with pytest.raises(EngineDead):
        rows_of([row([LETHAL])], monkeypatch, should_continue_on_error=False)


def test_rows_name_their_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish that is lost without a word."""
    rows = [
        row([40], n=2),
        row([40], colour="red"),
        row([40], temperature=9.0),
        {"sampling_params": None},
        {"prompt": "x", "prompt_token_ids": [1], "sampling_params": None},
        row([40], logprobs=0, temperature=None),
    ]
    *wrong, right = rows_of(rows, monkeypatch)
    messages = [answer["__inference_error__"] for answer in wrong]
    for message, words in zip(
        messages, ("n: a row", "colour", "temperature", "one of", "one of"), strict=True
    ):
        assert words in message
    assert right["__inference_error__"] == "" and len(right["token_logprobs"]) == 4
