"""An illegal access in a real engine process ends the process; its requests can go on elsewhere."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDead, MantaError
from engine.messages import EngineRequest, StepFrame
from engine.process.client import EngineClient
from engine.sampling_params import SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
COUNT, LENGTH = 4, 40
PROMPTS = {number: [5 + number, 6, 7] for number in range(COUNT)}


class Engine:
    """An engine process, and the tokens that come out of it."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {number: [] for number in PROMPTS}
        self.open = set(PROMPTS)
        self.failures: list[str] = []
        self.deaths: list[MantaError] = []
        self.last = 0.0  # when tokens came
        self.client = EngineClient(self._take_frame, self.deaths.append)

    def _take_frame(self, frame: StepFrame) -> None:
        for delta in frame.deltas:
            self.last = time.monotonic()
            self.tokens[delta.id] += delta.token_ids
            if delta.finish:
                self.open.discard(delta.id)
            if delta.error:
                self.failures.append(delta.error)

    async def say(self, config: EngineConfig, had: dict[int, list[int]]) -> None:
        """Run all prompts, until they or the process end. had: tokens that another engine has
        given."""
        await self.client.start(config, timeout=240)
        for number, prompt in PROMPTS.items():
            params = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
            tokens = [*prompt, *had.get(number, [])]
            self.client.submit(EngineRequest(number, tokens, len(prompt), params, seed=number))
        async with asyncio.timeout(120):
            while self.open and not self.deaths:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_a_poisoned_device_ends_the_process(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the process goes on with a context that is gone, or hangs in it, or blames a request; or
    what it said last was already wrong."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options: dict[str, Any] = {"device": device, "load_format": "dummy", "deterministic": True}
    options |= {"num_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "num_threads": 1}
    config = EngineConfig(model=str(tmp_path), dtype="float32", **options)
    spawn = subprocess.Popen

    def spawn_poisoned(command: list[str], **more: Any) -> Any:
        assert command[1:] == ["-m", "engine.process.main"]
        return spawn([sys.executable, "-m", "tests.engine.process.poisoned_process"], **more)

    async def case() -> None:
        lost, well, after = Engine(), Engine(), Engine()
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", spawn_poisoned)
            await lost.say(config, {})
        noticed = time.monotonic() - lost.last
        try:
            (death,) = lost.deaths
            assert isinstance(death, EngineDead) and death.code == "engine_error", death
            assert not lost.failures and lost.open == set(PROMPTS), "nobody was to blame"
            assert 1 <= len(lost.tokens[0]) < LENGTH
            print(f"{device}: {death.message.splitlines()[0]}; noticed after {noticed:.2f} s")
            assert noticed < (1.0 if device == "cpu" else 3.0)  # the driver clears up first
            # As the router does: what has come is part of the prompt for the next engine.
            await asyncio.gather(well.say(config, {}), after.say(config, lost.tokens))
            for number in PROMPTS:
                assert len(well.tokens[number]) == LENGTH
                assert lost.tokens[number] + after.tokens[number] == well.tokens[number]
        finally:
            for engine in (lost, well, after):
                await engine.client.close()

    asyncio.run(case())
