"""An engine that sleeps: what it gives back, and that it says the same when it is awake again."""

import gc
import json
import mmap
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from engine import factory
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDead, InvalidRequest
from engine.factory import rank_part
from engine.library.llm import LLM
from engine.messages import CANNOT_SLEEP, PARTS, Answer, UpdateWeights
from engine.runner.caches.sleep_memory import CudaSleepMemory, tensors_of
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from kernels.cpu.gemm.panels import BIAS, Panels, W
from tests.drafters import ListedLengths
from tests.engine.models.checkpoints import save_checkpoint
from tests.fakes import FakeRunner, make_config, make_request, run

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
CPU = torch.device("cpu")


def config(tmp_path: Path, **fields: Any) -> EngineConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    options: dict[str, Any] = {
        "model": str(tmp_path), "device": "cpu", "dtype": "float32", "load_format": "dummy",
        "num_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "sleep_in_host_memory": True,
    }  # fmt: skip
    return EngineConfig(**options | fields)


def say(core: EngineCore) -> dict[int, list[int]]:
    fields = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    requests = [make_request(i, 20 + i, seed=i, **fields) for i in range(4)]
    return {id: output.tokens for id, output in run(core, requests).items()}


def fall_asleep(core: EngineCore) -> None:
    core.sleep()
    while core.has_work():
        core.step()
    assert core.stats().asleep


class LostPages:
    """A region on the CPU whose pages hold garbage when they come again."""

    all: ClassVar[list["LostPages"]] = []

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.bytes = torch.full((size,), 0x7F, dtype=torch.uint8)
        self.held = True
        self.all.append(self)

    def take_pages(self) -> None:
        assert not self.held
        self.held = True

    def give_pages(self) -> None:
        assert self.held
        self.bytes.fill_(0x7F)
        self.held = False

    def close(self) -> None:
        self.give_pages()


class MemoryOfCuda(CudaSleepMemory):
    """CudaSleepMemory on the CPU.

    CPU kernels keep the addresses of their weights, so they are updated when weights move.
    """

    def __init__(self) -> None:
        super().__init__(CPU, LostPages)

    def keep(self, model: object, host_bytes: int, *, written: bool) -> None:
        super().keep(model, host_bytes, written=written)
        for owner in gc.get_objects():
            if isinstance(owner, Panels):
                owner._args[W], owner._args[BIAS] = owner._weight.data_ptr(), owner._bias.data_ptr()


@pytest.mark.parametrize("quantization", ["none", "uint8-64"])
def test_weights_and_caches_come_back(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a weight that is not found and not copied; a view that looks where the weight was; a
    cache whose blocks hold what was there before."""
    monkeypatch.setattr(LostPages, "all", [])
    monkeypatch.setattr(rank_part, "sleep_memory", lambda device: MemoryOfCuda())
    # Programs note addresses, as graphs do.
    core, _ = factory.build(config(tmp_path, quantization=quantization))
    runner: Any = core._runner
    spans = [(pages.bytes.data_ptr(), pages.size) for pages in LostPages.all]
    for tensor in [*tensors_of(runner.model, CPU), runner.kv.storage]:
        at = tensor.data_ptr()
        assert not tensor.numel() or any(0 <= at - begin < size for begin, size in spans)
    wanted = say(core)
    for _ in range(2):
        fall_asleep(core)
        assert not any(pages.held for pages in LostPages.all)
        assert say(core) == wanted, "a request wakes it"
        assert all(pages.held for pages in LostPages.all)
    assert core.stats().wakes == 2


def test_a_cache_that_has_shrunk_sleeps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: after a shortage of memory the cache is somewhere that sleep does not know."""
    monkeypatch.setattr(LostPages, "all", [])
    monkeypatch.setattr(rank_part, "sleep_memory", lambda device: MemoryOfCuda())
    core, _ = factory.build(config(tmp_path))
    wanted = say(core)
    runner: Any = core._runner
    runner.shrink(60)
    core.scheduler.shrink(60)
    assert not LostPages.all[-2].held, "the old one is given back"
    fall_asleep(core)
    assert not any(pages.held for pages in LostPages.all)
    assert say(core) == wanted


def test_caches_of_a_cpu_have_no_pages_while_it_sleeps(tmp_path: Path) -> None:
    """Bug: the memory of a sleeping model's cache cannot be had by the others."""
    core, _ = factory.build(config(tmp_path, num_blocks=4096))
    wanted = say(core)
    runner: Any = core._runner
    before = runner.kv.storage.data_ptr()
    runner.kv.storage.fill_(1.0)
    size = runner.kv.storage.nbytes

    def resident() -> int:
        return _resident(before, size)

    assert resident() > 0.9 * size
    fall_asleep(core)
    assert resident() == 0
    assert say(core) == wanted
    assert runner.kv.storage.data_ptr() == before and 0 < resident() < size / 8


def _resident(address: int, size: int) -> int:
    """Return how many of these bytes have pages."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read(size // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


class Memory:
    """A fake sleep memory, which asserts that it is not put to sleep or woken twice."""

    def __init__(self) -> None:
        self.there = True
        self.fails = False

    def sleep(self, parts: Collection[str] = PARTS, *, drop: bool = False) -> None:
        assert self.there
        self.there = False

    def wake(self, parts: Collection[str] = PARTS) -> None:
        assert not self.there
        if self.fails:
            raise EngineDead("no room", code="device_taken")
        self.there = True


def make_core() -> tuple[EngineCore, Memory]:
    memory = Memory()
    configured = make_config()
    return EngineCore(configured, FakeRunner(configured), memory=memory), memory


def test_it_sleeps_when_the_last_request_has_ended() -> None:
    """Bug: a request that runs loses its blocks, or the order is forgotten."""
    core, memory = make_core()
    core.add_request(make_request(1, 9, max_tokens=6, ignore_eos=True))
    core.step()
    core.sleep()
    tokens = 0
    while not core.stats().asleep:
        assert memory.there and core.has_work()
        tokens += sum(len(delta.token_ids) for delta in core.step())
    assert tokens == 6 and not memory.there and not core.has_work()
    assert core.stats().free_blocks == core.stats().total_blocks
    core.check_integrity()


def test_a_wake_that_comes_before_the_sleep_takes_it_back() -> None:
    """Bug: a request that came just then finds an engine that falls asleep after it."""
    core, memory = make_core()
    core.sleep()
    core.wake()
    assert not core.has_work() and memory.there
    core.wake()
    assert core.stats().wakes == 0, "it did not sleep"


def test_nothing_is_found_in_the_prefix_cache_after_a_sleep() -> None:
    """Bug: a prefix whose blocks have lost their content is found."""
    core, _ = make_core()
    run(core, [make_request(1, 40)])
    fall_asleep(core)
    hits = core.stats().prefix_hits
    run(core, [make_request(2, 40)])
    assert core.stats().prefix_hits == hits and core.stats().prefix_queries > 0


def test_an_engine_that_finds_no_room_says_so() -> None:
    """Bug: a step on memory that is not there."""
    core, memory = make_core()
    fall_asleep(core)
    memory.fails = True
    core.add_request(make_request(1))
    with pytest.raises(EngineDead, match="no room") as error:
        core.step()
    assert error.value.code == "device_taken"


def test_an_engine_that_was_not_made_to_sleep_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Bug: memory that does not know how is given back."""
    configured = make_config()
    core = EngineCore(configured, FakeRunner(configured))
    core.sleep()
    assert not core.has_work() and "sleep_in_host_memory" in caplog.text


def test_it_is_refused_where_it_cannot_be() -> None:
    """Bug: the host runs out of memory when the model first sleeps, hours after its start."""
    memory = MemoryOfCuda()
    with pytest.raises(ConfigError, match=r"1\.00 GiB of host memory.* 0\.50 GiB are free"):
        memory.keep([torch.empty(1 << 30, dtype=torch.uint8)], 1 << 29, written=False)


def test_the_library_sleeps_and_wakes(tmp_path: Path) -> None:
    """Bug: the order does not come through, or the answer is about the state before it."""
    with LLM(**asdict(config(tmp_path))) as llm:
        [wanted] = llm.generate([[5, 6, 7]], GREEDY)
        llm.sleep()
        assert llm.stats().asleep
        llm.wake()
        stats = llm.stats()
        assert not stats.asleep and stats.wakes == 1
        llm.sleep()
        [said] = llm.generate([[5, 6, 7]], GREEDY)
        assert said.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert llm.stats().wakes == 2
    options = asdict(config(tmp_path, sleep_in_host_memory=False))
    with LLM(**options) as llm, pytest.raises(ConfigError, match="sleep_in_host_memory"):
        llm.sleep()


def answered(core: EngineCore, ticket: int, tokens: list[int] | None = None) -> Answer:
    """Return the answer to an order, once it is there. tokens: gets tokens that come before it."""
    for _ in range(2000):
        for delta in core.step() if core.has_work() else ():
            (tokens if tokens is not None else []).extend(delta.token_ids)
        for answer in core.answers():
            if isinstance(answer, Answer) and answer.ticket == ticket:
                return answer
        time.sleep(0.005)
    raise AssertionError("no answer")


def update(core: EngineCore, folder: Path, ticket: int) -> None:
    core.update_weights(UpdateWeights(ticket, str(folder)))
    assert answered(core, ticket).code == ""


def test_dropped_weights_come_from_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a table that no update writes is lost with the weights; a step runs on lost weights."""
    monkeypatch.setattr(LostPages, "all", [])
    monkeypatch.setattr(rank_part, "sleep_memory", lambda device: MemoryOfCuda())
    save_checkpoint(tmp_path, "qwen3", max_position_embeddings=256, eos_token_id=None)
    fields = {"num_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
    core, _ = factory.build(
        EngineConfig(model=str(tmp_path), device="cpu", sleep_in_host_memory=True, **fields)
    )
    memory: Any = core._sleep._memory
    wanted = say(core)
    for count in range(3):
        core.sleep(2, (), 10 + count)
        assert answered(core, 10 + count).code == ""
        assert not any(pages.held for pages in LostPages.all) and core.stats().weights_dropped
        assert bool(memory._copies) == (count == 0), "what an update writes is known after one"
        core.wake(["weights"])
        assert [pages.held for pages in LostPages.all].count(True) == len(memory._weights)
        core.add_request(make_request(9, 20, max_tokens=1))
        assert not core.has_work(), "no step on lost weights"
        core.abort([9])
        core.step()
        update(core, tmp_path, 20 + count)
        assert core.stats().asleep and not core.stats().weights_dropped
        core.wake(["kv_cache"])
        assert not core.stats().asleep and say(core) == wanted


def test_what_no_update_writes_outlives_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: rotary tables, a drafter or rows of adapters are lost with the weights."""
    monkeypatch.setattr(LostPages, "all", [])
    memory = MemoryOfCuda()
    weight, table, halves = torch.ones(1000), torch.arange(300), torch.ones(64)
    memory.keep([weight, table, halves], 1 << 30, written=False)
    ranges = [(weight.data_ptr(), 2000), (weight.data_ptr() + 2000, 2000)]
    memory.changed([*ranges, (halves.data_ptr(), 128)])
    memory.sleep(["weights"], drop=True)
    memory.wake(["weights"])
    assert table.equal(torch.arange(300)), "not written"
    assert halves.equal(torch.ones(64)), "written in part"
    assert not weight.equal(torch.ones(1000)), "it need not be copied"


def test_kept_requests_are_computed_again_after_a_sleep() -> None:
    """Bug: a paused request goes on with keys that the sleep has lost, or holds the sleep up."""
    core, memory = make_core()
    request = make_request(1, 9, max_tokens=6, ignore_eos=True)
    core.add_request(request)
    tokens = [token for _ in range(3) for delta in core.step() for token in delta.token_ids]
    core.pause("keep", 1)
    core.sleep(1, (), 2)
    assert answered(core, 2, tokens).code == "" and not memory.there
    assert core.stats().free_blocks == core.stats().total_blocks
    core.wake((), 3)
    assert memory.there and not core.has_work(), "the pause goes on"
    core.resume()
    while core.has_work():
        tokens += [token for delta in core.step() for token in delta.token_ids]
    other, _ = make_core()
    assert tokens == run(other, [make_request(1, 9, max_tokens=6, ignore_eos=True)])[1].tokens
    core.check_integrity()


def test_orders_that_make_no_sense_are_refused() -> None:
    """Bug: a misspelt part frees everything, or an order without an answer blocks a trainer."""
    core, memory = make_core()
    core.sleep(1, ["cache"], 1)
    core.sleep(3, (), 2)
    core.wake(["weight"], 3)
    core.wake((), 4)
    core.sleep(0, ["cache"], 6)
    core.sleep(0, ["weights"], 7)
    answers = {a.ticket: (a.code, a.param) for a in core.answers() if isinstance(a, Answer)}
    wrong = InvalidRequest.code
    assert answers == {
        1: (wrong, "tags"),
        2: (wrong, "level"),
        3: (wrong, "tags"),
        4: ("", ""),
        6: (wrong, "tags"),
        7: ("", ""),
    }
    assert memory.there and not core.has_work()
    configured = make_config()
    core = EngineCore(configured, FakeRunner(configured))
    core.sleep(1, (), 5)
    (answer,) = core.answers()
    assert isinstance(answer, Answer) and answer.code == CANNOT_SLEEP


@pytest.mark.usefixtures("real_cores")
@pytest.mark.slow
def test_a_model_in_two_ranks_sleeps_in_parts_and_takes_new_weights(tmp_path: Path) -> None:
    """Bug: only the first rank gives its memory back, or a rank wakes with old keys or weights."""
    model = save_checkpoint(tmp_path, "qwen3", max_position_embeddings=256, eos_token_id=None)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    options |= {"sleep_in_host_memory": True, "tensor_parallel": 2, "num_threads": 1}
    with LLM(tmp_path, max_model_len=256, **options) as llm:
        [wanted] = llm.generate([[5, 6, 7]], GREEDY)
        llm.sleep()
        [said] = llm.generate([[5, 6, 7]], GREEDY)
        assert said.outputs[0].token_ids == wanted.outputs[0].token_ids
        llm.sleep(level=0)
        assert llm.stats().paused and not llm.stats().asleep
        llm.wake()
        llm.sleep(level=2)
        llm.wake(["weights"])
        with pytest.raises(InvalidRequest, match="update_weights first"):
            llm.generate([[5, 6, 7]], GREEDY)
        llm.update_weights(model.state_dict().items())
        llm.wake(["kv_cache"])
        assert not llm.stats().asleep
        [said] = llm.generate([[5, 6, 7]], GREEDY)
        assert said.outputs[0].token_ids == wanted.outputs[0].token_ids
        with pytest.raises(InvalidRequest, match="known are weights, kv_cache"):
            llm.wake(["cache"])


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_an_engine_on_a_gpu_sleeps(tmp_path: Path) -> None:
    """Bug: an address in a recorded step that is not there any more; memory that stays taken."""
    options = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 0, "max_num_seqs": 8}
    core, _ = factory.build(config(tmp_path, **options, kv_cache_bytes=1 << 30, num_threads=0))
    wanted = say(core)
    for _ in range(2):
        free = torch.cuda.mem_get_info()[0]
        fall_asleep(core)
        assert torch.cuda.mem_get_info()[0] - free >= 1 << 30
        assert say(core) == wanted
    assert core.stats().wakes == 2


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_gpu_drops_its_weights(tmp_path: Path) -> None:
    """Bug: a table that recorded steps read is lost with the weights; pages that stay taken."""
    model = save_checkpoint(tmp_path, "qwen3", max_position_embeddings=256, eos_token_id=None)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 256}
    options |= {"sleep_in_host_memory": True, "kv_cache_bytes": 1 << 30}
    with LLM(tmp_path, device="cuda", **options) as llm:
        [wanted] = llm.generate([[5, 6, 7]], GREEDY)
        for _ in range(3):
            free = torch.cuda.mem_get_info()[0]
            llm.sleep(level=2)
            assert torch.cuda.mem_get_info()[0] - free >= 1 << 30
            llm.wake(["weights"])
            llm.update_weights([(k, v.bfloat16()) for k, v in model.state_dict().items()])
            assert torch.cuda.mem_get_info()[0] - free >= 1 << 29, "the caches still sleep"
            llm.wake(["kv_cache"])
            [said] = llm.generate([[5, 6, 7]], GREEDY)
            assert said.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_drafts_outlive_a_sleep(tmp_path: Path) -> None:
    """Bug: what is known of earlier answers is lost in a sleep, or drafts of that time change a
    text."""
    core, _ = factory.build(config(tmp_path, speculation={"method": "lookup"}, max_num_seqs=32))
    awake, lengths = say(core), ListedLengths([7])
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.speculation._lengths = lengths
    fall_asleep(core)
    assert say(core) == awake
    assert lengths.accepted > 0
