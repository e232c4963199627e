"""LLM and request handles, on a fake engine whose tokens are a function of their position."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import ConfigError, EngineDead, InvalidRequest, RequestReleased
from engine.library.handle import RequestHandle
from engine.library.llm import _as_list, make_config
from engine.library.outputs import RequestOutput, RequestStatus
from engine.library.progress import RequestProgress
from engine.library.prompts import Prompts
from engine.messages import Delta, Ready
from tests.engine.text import small_tokenizers
from tests.parity.cases import CASES, save

FIRST, VOCAB = 32, 390  # of the fake engine; ids of the small byte-level tokenizer


def want(prompt: int, count: int) -> list[int]:
    """Return the output of the fake engine after a prompt of that many tokens."""
    return [FIRST + (prompt + i) % (VOCAB - FIRST) for i in range(count)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = small_tokenizers.byte_level()
    with LLM(f"fake:vocab_size={VOCAB},poison=17", tokenizer=tokenizer) as llm:
        yield llm


@pytest.fixture(scope="module")
def slow() -> Iterator[LLM]:
    tokenizer = small_tokenizers.byte_level()
    options = f"fake:vocab_size={VOCAB},step_seconds=0.005,max_model_len=100000"
    with LLM(options, tokenizer=tokenizer) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Answers that end early take the place of longer ones."""
    prompts = [[5] * (i + 1) for i in range(40)]
    params = [SamplingParams(max_tokens=40 - i) for i in range(40)]
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        assert output.finished and output.prompt_token_ids == prompts[i]
        assert output.outputs[0].token_ids == want(i + 1, 40 - i)
        assert output.outputs[0].finish_reason == "length"
        assert llm.tokenizer is not None
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_kinds_of_prompts(llm: LLM) -> None:
    """One prompt of token ids is taken for many prompts of one id."""
    short = SamplingParams(max_tokens=2)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("the cat")
    for prompts, count in (("the cat", 1), (["the cat"] * 2, 2), (ids, 1), ([ids, ids, ids], 3)):
        outputs = llm.generate(prompts, short)
        assert [o.prompt_token_ids for o in outputs] == [ids] * count
        assert outputs[0].prompt == ("the cat" if "the cat" in prompts else None)
    chat = [{"role": "user", "content": "the cat"}]
    assert llm.chat(chat, short)[0].prompt_token_ids == llm.tokenizer.encode_chat(chat)
    assert len(llm.chat([chat, chat], short)) == 2
    assert llm.generate([], short) == []


def test_choices_stop_strings_and_logprobs(llm: LLM) -> None:
    """Each of n choices has its own text; logprobs beyond the stop string are cut with the text."""
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(want(3, 40))
    params = SamplingParams(max_tokens=40, n=3, stop=(text[5:8],), logprobs=0)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert (choice.text, choice.finish_reason) == (text[:5], "stop")
        assert choice.stop_reason == text[5:8]
        assert choice.logprobs is not None
        assert [item.token_id for item in choice.logprobs] == choice.token_ids
        assert text[5:8] in llm.tokenizer.decode(choice.token_ids)
        assert text[5:8] not in llm.tokenizer.decode(choice.token_ids[:-1])


def test_token_ids_of_numpy_and_torch(llm: LLM) -> None:
    """Bug: "token id 5 is outside the vocabulary" of one that is in it, because it was numpy's."""
    short = SamplingParams(max_tokens=2)
    prompts = [numpy.array([5, 6]), torch.tensor([5, 6]), [numpy.int64(5), 6]]
    assert [o.prompt_token_ids for o in llm.generate(prompts, short)] == [[5, 6]] * 3
    with pytest.raises(InvalidRequest, match="float is no token id"):
        llm.generate([[5.0, 6]], short)  # type: ignore[list-item]


class OnlyDLPack:
    """An array of another library, of which only the DLPack protocol is known."""

    def __init__(self, ids: list[int]) -> None:
        self._array = numpy.array(ids)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_arrays_are_prompts() -> None:
    """Bug: one array was taken for as many prompts as it has tokens, and that was no error of ours
    but "object of type 'numpy.int64' has no len()"."""
    ids = [5, 6]
    arrays: list[Any] = [numpy.array(ids), torch.tensor(ids), OnlyDLPack(ids), [numpy.int64(5), 6]]
    ready = Ready(64, 100, 16, 8, [], {}, "", 64)
    prompts_of_ids = Prompts(None, ready, "")
    for prompt in arrays:
        (taken,) = _as_list(prompt)
        assert prompts_of_ids.encode(taken).ids == ids
    for prompts in (numpy.array([ids, ids]), torch.tensor([ids, ids]), arrays[:3]):
        encoded = prompts_of_ids.encode_all(_as_list(prompts))[:2]
        assert [prompt.ids for prompt in encoded] == [ids, ids]
    for wrong in (numpy.array([0.5]), torch.tensor([[5]]), numpy.array(5), OnlyDLPack([]), 5):
        with pytest.raises(InvalidRequest):
            prompts_of_ids.encode(wrong)  # type: ignore[arg-type]


def test_nothing_runs_when_one_prompt_is_wrong(llm: LLM) -> None:
    """The last of a thousand prompts is too long, and the others' work is lost."""
    before = llm.stats().step
    for prompts, params, code in (
        ([[5], []], None, "invalid_value"),
        ([[5], [5] * 5000], None, "context_length_exceeded"),
        ([[5], [VOCAB]], None, "token_out_of_range"),
        ([[5], [-1]], None, "token_out_of_range"),
        ([[5], [6]], SamplingParams(stop_token_ids=(VOCAB,)), "token_out_of_range"),
        ([[5], [6]], [SamplingParams()], "invalid_value"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompts, params)
        assert caught.value.code == code
    with pytest.raises(InvalidRequest, match="stop strings"):
        llm.generate([[5]], SamplingParams(stop=("x",)), detokenize=False)
    assert llm.stats().step == before


@pytest.mark.parametrize("given", [{"max_tokens": 3}, {}, [{"max_tokens": 3}], "3", 3, [None]])
def test_params_of_another_kind_are_refused(llm: LLM, given: Any) -> None:
    """A dict of parameters: AttributeError, from deep inside."""
    with pytest.raises(InvalidRequest, match="must be SamplingParams or a list of them") as caught:
        llm.generate(["ok"], given)
    assert caught.value.param == "params"
    with pytest.raises(InvalidRequest, match="must be SamplingParams"):
        llm.start_request("ok", given)


def test_a_stop_string_alone(llm: LLM) -> None:
    """`stop="."`, as everywhere else, was accepted and gave an empty answer with an error of the
    engine's in it."""
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(want(3, 40))
    for stop in (text[5:8], [text[5:8]], (text[5:8],)):
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=40, stop=stop))
        choice = output.outputs[0]
        assert (choice.text, choice.finish_reason, choice.error) == (text[:5], "stop", "")


def test_one_failing_request_leaves_the_others(llm: LLM) -> None:
    """A whole batch raises because of one prompt."""
    good, bad = llm.generate([[5], [17]], SamplingParams(max_tokens=3))
    assert good.outputs[0].token_ids == want(1, 3)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error[:9]) == ("error", "poisoned:")
    handle = llm.start_request([17])
    handle.sync(5)
    assert handle.status() is RequestStatus.INTERRUPTED


def test_the_wrong_one_of_many_prompts_is_named(llm: LLM) -> None:
    """A thousand prompts fail with "the prompt has 601 tokens", and nobody knows which."""
    assert llm.tokenizer is not None
    long = "the cat " * 5000
    for prompts, where in (
        ([[5], [5] * 5000], "prompts[1]"),
        (["a", "b", "c", long], "prompts[3]"),
        (["a", [5], []], "prompts[2]"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate(prompts)  # type: ignore[arg-type]
        assert caught.value.param == where and str(caught.value).startswith(f"{where}: ")
    chats = [[{"role": "user", "content": text}] for text in ("a", long)]
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: .* \d+ tokens"):
        llm.chat(chats)
    with pytest.raises(InvalidRequest, match=r"^This model.* \d+ tokens"):
        llm.generate([long])


def test_unknown_settings_are_named() -> None:
    """A misspelled keyword is ignored, or raises a TypeError from inside; a wrong value is called
    an "Invalid enum value" and nobody says which there are."""
    with pytest.raises(ConfigError, match="max_len"):
        LLM("fake:", max_len=5)
    with pytest.raises(ConfigError, match="block_size must be"):
        LLM("fake:", block_size=0)
    with pytest.raises(ConfigError, match="block_size"):
        LLM("fake:", block_size="many")
    with pytest.raises(ConfigError, match=r"'bfloat16' or 'float16', got 'fp8'$"):
        LLM("fake:", dtype="fp8")
    with pytest.raises(ConfigError, match=r"^graph_sizes must be a list of integers, got 8$"):
        LLM("fake:", graph_sizes=8)
    assert make_config("m", {"graph_sizes": [8]}).graph_sizes == (8,)
    with pytest.raises(ConfigError, match=r"max_model_length; did you mean max_model_len\?"):
        LLM("fake:", max_model_length=5)
    with pytest.raises(ConfigError, match="/nonexistent: there is no such folder"):
        LLM("/nonexistent")


def test_names_that_the_engine_does_not_resolve() -> None:
    """ "default: there is no such folder", where the command line takes that very name."""
    for tokenizer in (None, small_tokenizers.byte_level()):  # found by the router; by the engine
        with pytest.raises(ConfigError, match=r"default: .* no such folder.*resolve_model"):
            LLM("default", tokenizer=tokenizer)


def drain(handle: object, pause: float = 0.0) -> list[RequestOutput]:
    out = []
    for item in handle:  # type: ignore[attr-defined]
        out.append(item)
        time.sleep(pause)
    return out


def test_get_returns_only_what_is_new(slow: LLM) -> None:
    """A token is delivered twice, or lost when the reader is slower than the engine."""
    handle = slow.start_request([5, 6], SamplingParams(max_tokens=60))
    assert handle.get_nowait() is None
    assert handle.status() is RequestStatus.INIT
    first = handle.get(timeout=5)
    assert first is not None and first.outputs[0].token_ids[:1] == want(2, 1)
    rest = drain(handle, pause=0.02)
    assert len(rest) < 50  # a slow reader gets several tokens at once
    tokens = [t for out in (first, *rest) for t in out.outputs[0].token_ids]
    text = "".join(out.outputs[0].text for out in (first, *rest))
    assert slow.tokenizer is not None
    assert (tokens, text) == (want(2, 60), slow.tokenizer.decode(tokens))
    assert [out.finished for out in rest[-2:]] == [False, True]
    assert handle.get(timeout=5) is None and handle.get_nowait() is None
    assert handle.status() is RequestStatus.FINISHED
    whole = handle.sync()
    assert (whole.outputs[0].token_ids, whole.outputs[0].text) == (tokens, text)


def test_states_in_order() -> None:
    """context_finished is never seen, or a request goes back to an earlier state."""

    handle = RequestHandle(RequestProgress(None, [5], [None], eager=False), [1], lambda ids: None)
    seen = [handle.status()]
    for delta in (Delta(1, [], cached=0), Delta(1, [6]), Delta(1, [7]), Delta(1, [8], "length")):
        handle._push(0, delta)
        seen.append(handle.status())
        assert handle.status() is handle.status()
    assert seen == ["init", "init", "context_finished", "generating", "finished"]


def test_stop_keeps_what_was_generated(slow: LLM) -> None:
    """A stopped request loses its text, keeps its blocks, or leaves the reader waiting."""
    handle = slow.start_request([5, 6], SamplingParams(max_tokens=100000, ignore_eos=True))
    while handle.status() is not RequestStatus.GENERATING:
        time.sleep(0.005)
    handle.stop()
    handle.stop()
    whole = handle.sync(timeout=5)
    tokens = whole.outputs[0].token_ids
    assert tokens == want(2, len(tokens)) and tokens
    assert whole.outputs[0].finish_reason == "abort"
    assert handle.status() is RequestStatus.INTERRUPTED
    read = handle.get(timeout=5)
    assert read is not None and read.outputs[0].token_ids == tokens
    assert handle.get() is None
    assert slow.stats().running == 0


def test_use_after_release_raises(slow: LLM) -> None:
    """A released handle gives empty answers, or a thread that waits on it hangs."""
    handle = slow.start_request([5], SamplingParams(max_tokens=100000))
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(handle.sync), pool.submit(drain, handle)]
        time.sleep(0.05)
        handle.release()
        handle.release()
        for wait in waits:
            with pytest.raises(RequestReleased):
                wait.result(timeout=2)
    for use in (handle.get, handle.get_nowait, handle.sync, handle.stop, handle.status):
        with pytest.raises(RequestReleased):
            use()
    assert slow.stats().running == 0


def test_waiting_has_a_limit(slow: LLM) -> None:
    """get(timeout) waits for the end of the request instead."""
    handle = slow.start_request([5], SamplingParams(max_tokens=100000))
    with pytest.raises(TimeoutError):
        handle.sync(timeout=0.05)
    handle.stop()
    handle.sync()
    handle.get()
    assert handle.get(timeout=0.01) is None
    handle.release()
    with slow.start_request([5], SamplingParams(max_tokens=100000)) as handle:
        for _ in range(20):
            with contextlib.suppress(TimeoutError):
                handle.get(timeout=0.0001)
        assert not handle._waits, "a wait that has ended is still known"
    with pytest.raises(RequestReleased):
        handle.get()


def test_many_threads_share_one_engine(llm: LLM) -> None:
    """Threads' requests mix on the socket, or two readers of one handle get a token twice."""

    def read_by_two(i: int) -> bool:
        prompt = [5] * (i % 50 + 1)
        handle = llm.start_request(prompt, SamplingParams(max_tokens=30))
        parts: list[int] = []
        lock = threading.Lock()

        def read() -> None:
            while (out := handle.get(5)) is not None:
                with lock:
                    parts.extend(out.outputs[0].token_ids)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        handle.release()
        return sorted(parts) == sorted(want(len(prompt), 30))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read_by_two, range(100)))


def test_death_ends_every_wait() -> None:
    """`generate` hangs for ever when the engine is killed for memory."""
    llm = LLM("fake:step_seconds=0.01,max_model_len=1000000")
    try:
        handle = llm.start_request([5], SamplingParams(max_tokens=100000))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(llm.generate, [[5], [6]], SamplingParams(max_tokens=100000))
            first = handle.get(5)
            assert first is not None
            os.kill(llm.pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(EngineDead, match="signal 9"):
                running.result(timeout=2)
            assert time.monotonic() - began < 0.2
        with pytest.raises(EngineDead):
            drain(handle)  # what had come is read first
        assert handle.status() is RequestStatus.INTERRUPTED
        handle.stop()
        handle.release()
        with pytest.raises(EngineDead):
            llm.generate([[5]])
    finally:
        llm.close()


def test_close_ends_open_requests() -> None:
    """A thread that reads a stream hangs after close()."""
    llm = LLM("fake:step_seconds=0.01,max_model_len=1000000")
    handle = llm.start_request([5], SamplingParams(max_tokens=100000))
    llm.close()
    with pytest.raises(EngineDead):
        handle.sync(timeout=2)


def test_seeds_of_requests_that_give_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests without a seed get the same text, or n choices get different seeds; or the
    engine's own seed does nothing, so that no run can be repeated."""

    def submitted(**fields: Any) -> list[tuple[int, int]]:
        seeds: list[tuple[int, int]] = []
        with LLM("fake:", **fields) as llm:
            submit = llm._client.submit
            monkeypatch.setattr(
                llm._client, "submit", lambda r: (seeds.append((r.seed, r.choice)), submit(r))
            )
            llm.generate([[5], [5]], SamplingParams(max_tokens=1, n=2))
            llm.generate([[6]], SamplingParams(max_tokens=1))
            llm.generate([[5]], SamplingParams(max_tokens=1, seed=7))
        return seeds

    drawn = submitted()
    assert [choice for _, choice in drawn] == [0, 1, 0, 1, 0, 0]
    assert drawn[0][0] == drawn[1][0] != drawn[2][0] == drawn[3][0]
    assert drawn[5][0] == 7
    decided = submitted(seed=3)
    assert decided == submitted(seed=3) and decided[0] == decided[2], "the prompt alone decides"
    assert len({seed for seed, _ in decided}) == 3 and decided[5][0] == 7
    assert decided[:5] != submitted(seed=4)[:5]
    assert all(0 <= seed < 2**63 for seed, _ in decided)


def traces() -> tuple[int, set[str]]:
    """Return what an LLM could leave behind: the number of descriptors, and the threads."""
    fds = len(os.listdir("/proc/self/fd"))
    return fds, {thread.name for thread in threading.enumerate()}


def test_nothing_is_left() -> None:
    """A failed start, or a closed engine, leaves a thread that waits for ever, or a process."""
    before = traces()
    with pytest.raises(EngineDead, match="not ready"):
        LLM("fake:start_seconds=60", timeout=0.2)
    with pytest.raises(ConfigError):
        LLM("fake:fail_start=1")
    llm = LLM("fake:")
    pid = llm.pid
    llm.close()
    llm.close()
    assert traces() == before
    assert not Path(f"/proc/{pid}").exists()
    for use in (llm.stats, lambda: llm.start_request([5]), lambda: llm.add_adapter("a", "b")):
        with pytest.raises(EngineDead):
            use()


def test_a_failing_reader_ends_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a frame held is lost in a bug, and `generate` waits for ever."""

    def fail(handle: RequestHandle, choice: int, delta: Delta, version: str) -> bool:
        raise ValueError("a bug elsewhere")

    with LLM("fake:") as llm:
        monkeypatch.setattr(RequestHandle, "_push", fail)
        with pytest.raises(EngineDead, match="a bug elsewhere"):
            llm.generate([[5], [6]])


def test_importing_a_message_is_cheap() -> None:
    """The router and the command line wait seconds for torch that they do not use."""
    code = (
        "import sys, engine.messages, engine.library.async_engine, engine.library.llm; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = os.popen(f'cd {Path(__file__).parents[3]} && {sys.executable} -c "{code}"').read()
    assert done.strip() == "[]"


@pytest.mark.slow
def test_real_model_answers(default_model: Path) -> None:
    """All parts fit: process, core, runner, tokenizer and template on the CPU."""
    phases: list[str] = []
    with LLM(
        default_model,
        device="cpu",
        num_threads=1,
        num_blocks=64,
        max_model_len=512,
        max_num_seqs=4,
        progress=lambda phase, _: phases.append(phase),
    ) as llm:
        assert isinstance(llm.ready, Ready) and "weights" in phases
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(chat, SamplingParams(max_tokens=16, temperature=0))
        assert output.outputs[0].text == "The capital of France is Paris."
        assert output.outputs[0].finish_reason == "stop"
        assert output.num_cached_tokens == 0
        (again,) = llm.chat(chat, SamplingParams(max_tokens=1, temperature=0))
        assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // 16 * 16


def test_a_checkpoint_without_a_tokenizer_answers_token_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug: a model that is asked by token ids alone, as trainers do, is refused for the want of a
    tokenizer.json that nobody reads."""
    save(CASES["qwen 3"], tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(tmp_path, device="cpu", num_blocks=32, num_threads=1) as llm:
        assert "has no tokenizer.json: prompts have to be token ids" in caplog.text
        known = llm.ready.stats
        assert known is not None and known.rows and known.total_blocks == 32
        for detokenize in (False, True):
            (answer,) = llm.generate([[5, 6, 7]], params, detokenize=detokenize)
            assert len(answer.outputs[0].token_ids) == 4 and answer.outputs[0].text == ""
        with pytest.raises(InvalidRequest, match="no tokenizer; give prompts as token ids"):
            llm.generate(["text"], params)
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(tmp_path / "nowhere", device="cpu")
