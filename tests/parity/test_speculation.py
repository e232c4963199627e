"""The text with speculation is the text without: requests of all kinds, whatever a drafter says.
The scheduler's part alone, with a fake device: tests/engine/scheduling/test_speculation.py."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from engine.scheduling.drafts.speculation import Speculation
from engine.speculation.lookup import Lookup, LookupOptions
from tests.drafters import KINDS, ListedLengths, ToldDrafter
from tests.engine.lora.adapters import save_adapter
from tests.parity.cases import DELTA_NET, MIXED, save
from tests.parity.engine_driver import Output, add_adapter, engine, run
from tests.parity.test_deterministic import SIZES

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 3},
    {
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 50,
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
    },
    {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "logprobs": 1,
        "logprobs_mode": "processed_logprobs",
    },
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "min_p": 0.02},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -100.0}, "logprobs": 0},
    {"temperature": 1.0, "stop_token_ids": list(range(1, 40)), "min_tokens": 5},
    {"temperature": 0.7, "max_tokens": 2},
    {"temperature": 0.7, "ignore_eos": False, "stop_token_ids": list(range(300, 330))},
    {"temperature": 0.0, "allowed_token_ids": list(range(100, 400))},
    {"temperature": 0.9, "prompt_logprobs": 1, "logprobs": 1},
    {"temperature": 0.0, "max_tokens": 1},
]


def model(kind: str, path: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    built: Any
    if kind == "llama":
        built = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
        )
    elif kind in HYBRIDS:
        case = HYBRIDS[kind]
        longer = {"vocab_size": 512, "max_position_embeddings": 512}
        built = save(replace(case, changes={**case.changes, **longer}), path)
        if kind == ADAPTED:
            save_adapter(built, path.with_name(f"{kind}-adapter"), target_modules=["o_proj"])
        return path
    else:
        built = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**SIZES, sliding_window=16, layer_types=WINDOWS)
        )
    built.save_pretrained(path)
    save_adapter(built, path.with_name(f"{kind}-adapter"), target_modules=["q_proj", "down_proj"])
    return path


WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


ADAPTED = "qwen 3 next"  # the hybrid model of which some requests have an adapter
HYBRIDS = {**DELTA_NET, **MIXED}
SLOW = [ADAPTED, "gemma3", "qwen 3.5", "kimi linear", "lfm 2", "granite 4 h", "falcon h1", "jamba"]


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(request.param, tmp_path_factory.mktemp("models") / request.param)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 90, 150, 33, 64, 65, 7, 40]
    prompts = [torch.randint(1, 512, (n,), generator=generator).tolist() for n in lengths]
    prompts[7][:32] = prompts[8][:32] = prompts[9][:32]  # something for the prefix cache
    return prompts


PROMPTS = prompts()
SAMPLING = [
    SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | fields)) for fields in PARAMS
]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Output]:
    """Return the texts without speculation, with the adapter where the model has one."""
    core, name = adapted(folder)
    return plain_texts(core, name)


def adapted(folder: Path, **changes: Any) -> tuple[EngineCore, str]:
    """Return an engine, and the name of the adapter that it has; "" for none."""
    adapter = folder.with_name(f"{folder.name}-adapter")
    name = "lora" if adapter.exists() else ""
    core = engine(folder, max_loras=len(name) and 1, num_threads=1, **changes)
    if name:
        add_adapter(core, name, adapter)
    return core, name


def plain_texts(core: EngineCore, adapter: str = "") -> list[Output]:
    core.scheduler.speculate(None)
    return texts(core, adapter)


def texts(core: EngineCore, adapter: str = "", **how: Any) -> list[Output]:
    names = [adapter if at % 3 == 1 else "" for at in range(len(PROMPTS))]
    return run(core, PROMPTS, SAMPLING, adapters=names, **how)


def speculate(core: EngineCore, kind: str, answers: list[Output], *lengths: int) -> ListedLengths:
    by_prompt = {tuple(p): o.token_ids for p, o in zip(PROMPTS, answers, strict=True)}
    controller = ListedLengths(lengths)
    core.scheduler.speculate(Speculation(ToldDrafter(kind, by_prompt), controller))
    return controller


def same(some: list[Output], others: list[Output]) -> None:
    for at, (a, b) in enumerate(zip(some, others, strict=True)):
        assert (a.token_ids, a.finish) == (b.token_ids, b.finish), SAMPLING[at]
        assert [item.token_id for item in a.logprobs] == [item.token_id for item in b.logprobs]
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert abs(x.logprob - y.logprob) < 1e-3 and x.top_ids == y.top_ids


# "mixed" has wrong drafts, too.
@pytest.mark.parametrize(
    "kind", ["right", pytest.param("wrong", marks=pytest.mark.nightly), "mixed"]
)
def test_text_with_drafts_is_the_text_without(folder: Path, plain: list[Output], kind: str) -> None:
    """Bugs: noise, penalties, bans or positions of a draft's row are those of another; a key of a
    rejected draft is read; a row of a batch reads keys that are not written yet."""
    cuts: list[dict[str, Any]] = [{}, {"async_scheduling": True, "max_num_batched_tokens": 37}]
    for changes in cuts:
        core, name = adapted(folder, **changes)
        for together in (True, False):
            controller = speculate(core, kind, plain, 7, 3, 1, 7, 0, 3)
            same(texts(core, name, together=together), plain)
            accepted = controller.accepted / controller.drafted
            assert accepted == 1 if kind == "right" else accepted < 0.9 and kind != "right"


def test_preempted_requests_too(folder: Path) -> None:
    """Bug: a request that is computed again after a preemption goes on with rejected drafts."""
    plain = plain_texts(engine(folder, num_threads=1))
    for blocks in range(24, 11, -1):
        core = engine(folder, num_threads=1, num_blocks=blocks, max_model_len=192)
        speculate(core, "mixed", plain, 7, 3)
        same(texts(core), plain)
        if core.stats().preemptions:
            return
    pytest.fail("nothing was preempted")


def test_deterministic_mode_bit_by_bit(folder: Path) -> None:
    """Bug: a decode with drafts beside it goes through another kernel than one alone."""
    core = engine(folder, num_threads=1, dtype="bfloat16", deterministic=True)
    plain = plain_texts(core)
    for kind in ("right", "mixed"):
        speculate(core, kind, plain, 7, 3, 0)
        for some, other in zip(texts(core), plain, strict=True):
            assert (some.token_ids, some.logprobs) == (other.token_ids, other.logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{}, {"cuda_graphs": False}, {"async_scheduling": False}], ids=str)
def test_on_a_gpu(folder: Path, cut: dict[str, Any]) -> None:
    """Bug: a graph or kernel of decodes takes it that each of them has a row of its own."""
    if folder.name == "kimi linear":
        pytest.skip("latents are refused in deterministic mode on CUDA")
    fields: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    core = engine(folder, **fields, **cut)
    plain = plain_texts(core)
    for kind in KINDS:
        controller = speculate(core, kind, plain, 7, 3, 0, 1)
        for some, other in zip(texts(core), plain, strict=True):
            assert (some.token_ids, some.logprobs) == (other.token_ids, other.logprobs)
        assert kind != "right" or controller.accepted == controller.drafted


def test_right_drafts_save_steps(folder: Path) -> None:
    """Bug: positions of drafts are off by one, which changes no text and accepts nothing."""
    core = engine(folder, num_threads=1)
    prompt, params = PROMPTS[5], SamplingParams(temperature=0.7, max_tokens=41, ignore_eos=True)
    core.scheduler.speculate(None)
    (plain,) = run(core, [prompt], params)
    before = core.stats().step
    drafter = ToldDrafter("right", {tuple(prompt): plain.token_ids})
    core.scheduler.speculate(Speculation(drafter, ListedLengths([3])))
    (drafted,) = run(core, [prompt], params)
    assert drafted.token_ids == plain.token_ids
    assert core.stats().step - before == 1 + 10, "41 tokens, four a step after the first"


def any_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """Return a prompt and sampling parameters of any kind; half of the prompts repeat."""
    some = [rng.randrange(1, 512) for _ in range(rng.choice([1, 3, 8, 20]))]
    prompt = (some * 40)[: rng.randrange(1, 90)]
    if rng.random() < 0.5:
        prompt += [rng.randrange(1, 512) for _ in range(rng.randrange(1, 40))]
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9, "top_k": 40},
        {"min_p": 0.05},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"frequency_penalty": 0.8},
        {"logit_bias": {rng.randrange(512): 3.0}},
        {"logprobs": rng.randrange(3)},
        {"prompt_logprobs": 0},
        {"stop_token_ids": [rng.randrange(512) for _ in range(40)], "min_tokens": rng.randrange(6)},
        {"allowed_token_ids": sorted(rng.sample(range(512), 60))},
        {"bad_words_ids": [[rng.randrange(512) for _ in range(length)] for length in (1, 2, 3)]},
        {"ignore_eos": True},
    ]
    fields: dict[str, Any] = {}
    for kind in rng.sample(kinds, rng.randrange(4)):
        fields |= kind
    fields["temperature"] = rng.choice([0.0, 0.3, 0.7, 1.3])
    fields["max_tokens"] = max(rng.choice([1, 2, 8, 24, 40]), fields.get("min_tokens", 0))
    return prompt, SamplingParams(**fields)


# The hybrid models of CI with the real drafter: a delta rule, a convolution and a selective scan.
LOOKED_UP = ("qwen 3.5", "lfm 2", "jamba")


def of_all_kinds() -> Iterator[Any]:
    """Yield each kind of model with each drafter, and the stage that has it.

    CI has both drafters with attention alone, and the real one with one model of each kind of
    recurrent state. `test_text_with_drafts_is_the_text_without` has a fake one's drafts with all.
    """
    for kind in ("llama", *SLOW):
        rare = pytest.mark.nightly if kind in HYBRIDS else pytest.mark.slow
        yield pytest.param(kind, "lookup", marks=pytest.mark.slow if kind in LOOKED_UP else rare)
        yield pytest.param(kind, "mixed", marks=rare if kind in SLOW else [])


@pytest.mark.parametrize("count", [64, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("folder", "drafter"), [*of_all_kinds()], indirect=["folder"])
def test_requests_of_all_kinds(folder: Path, drafter: str, count: int) -> None:
    """Bugs: drafts change the text of a request beside others of any kind, when some of them are
    preempted and computed again, one batch ahead or not."""
    rng = random.Random(count)
    prompts, params = zip(*(any_request(rng) for _ in range(count)), strict=True)
    # routers of experts make much of the last bits, which the number of rows may change
    fields: dict[str, Any] = {"num_threads": 1, "deterministic": folder.name in HYBRIDS}
    core = engine(folder, **fields)
    core.scheduler.speculate(None)
    plain = run(core, prompts, params)
    answers = {tuple(p): o.token_ids for p, o in zip(prompts, plain, strict=True)}
    accepted = 0
    for ahead in (False, True):
        core = engine(folder, num_blocks=24, max_model_len=256, async_scheduling=ahead, **fields)
        lookup = Lookup(LookupOptions())
        lengths = ListedLengths([7, 3, 0, 1, 7])
        source = lookup if drafter == "lookup" else ToldDrafter("mixed", answers)
        if isinstance(source, ToldDrafter):
            source.trusted = False  # equal prompts may have other answers
        core.scheduler.speculate(Speculation(source, lengths))
        drafted = run(core, prompts, params)
        for at, (some, other) in enumerate(zip(drafted, plain, strict=True)):
            assert (some.token_ids, some.finish) == (other.token_ids, other.finish), params[at]
            ids = [[item.token_id for item in output.logprobs] for output in (some, other)]
            assert ids[0] == ids[1], params[at]
        # on a slow machine so few prompts of a hybrid run at once that none is preempted
        assert core.stats().preemptions or folder.name in HYBRIDS
        assert lengths.accepted < lengths.drafted
        accepted += lengths.accepted
    assert accepted


def test_answers_that_go_on_elsewhere(folder: Path) -> None:
    """Bug: after a replica was lost in mid-stream, the next one drafts as if the answer began, or
    goes on with what the first one had drafted."""
    core = engine(folder, num_threads=1)
    plain = plain_texts(core)
    for kind in ("right", "mixed"):
        controller = speculate(core, kind, plain, 7, 3)
        for at, (prompt, params, whole) in enumerate(zip(PROMPTS, SAMPLING, plain, strict=True)):
            cut = len(whole.token_ids) * at // len(PROMPTS)
            if params.prompt_logprobs is not None or not 0 < cut < len(whole.token_ids):
                continue
            known = [*prompt, *whole.token_ids[:cut]]
            core.add_request(EngineRequest(at, known, len(prompt), params, 1))
            rest: list[int] = []
            while core.has_work():
                for delta in core.step():
                    rest += delta.token_ids
            assert rest == whole.token_ids[cut:], params
        assert controller.accepted > 20
