"""On a GPU: tiny random models in float32 say what transformers says, through graphs and chunks.

python -m pytest -m gpu tests
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.sampling_params import SamplingParams
from tests.parity.engine_driver import Output, add_adapter, engine, run

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 24
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # far from ties
    "eos_token_id": 0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
PLAIN = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "llama":
        config: Any = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True)
        model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 15, 16, 17, 100, 300, 33, 64, 65]
    return [torch.randint(1, 1000, (n,), generator=generator).tolist() for n in lengths]


ON_CUDA: dict[str, Any] = {
    "device": "cuda", "graph_sizes": (1, 2, 4, 8, 16), "prefix_caching": False,
}  # fmt: skip


def cuda_engine(folder: Path, **fields: Any) -> Any:
    return engine(folder, **{**ON_CUDA, **fields})


@pytest.fixture(scope="module")
def whole(folder: Path, prompts: list[list[int]]) -> list[Output]:
    return run(cuda_engine(folder), prompts, GREEDY)


def test_tokens_and_logprobs_equal_transformers(
    folder: Path, prompts: list[list[int]], whole: list[Output]
) -> None:
    """A kernel that is right in the interpreter and wrong on the device."""
    answers = [(choice.token_ids, [item.logprob for item in choice.logprobs]) for choice in whole]
    assert_equal_to_transformers(folder, prompts, answers)


def assert_equal_to_transformers(
    folder: Path, prompts: list[list[int]], answers: Sequence[tuple[list[int], list[float]]]
) -> None:
    """Assert that each token is transformers' choice, with its log-probability.

    answers: the tokens and log-probabilities of each prompt.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    for prompt, (tokens, logprobs) in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        theirs = torch.log_softmax(logits.double(), dim=-1)
        assert theirs.argmax(-1).tolist() == tokens
        ours = torch.tensor(logprobs, dtype=torch.float64)
        chosen = theirs.cpu().gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (ours - chosen).abs().max() < 1e-3


# Kernels are of one compute capability in a process, so an engine that acts as another GPU has its
# own. It answers in float32, then runs in bfloat16, whose kernels differ more between GPUs.
ACTING = """
import json, re, sys
from pathlib import Path
import msgspec
from triton import knobs
from engine.sampling_params import SamplingParams
from tests.parity.engine_driver import engine, run

HOPPERS = re.compile(r"wgmma|cp\\.async\\.bulk|tensormap|griddepcontrol|tcgen05")
hoppers, launched = set(), set()

def note(*, src, metadata_group, **_):
    (ptx,) = (path for name, path in metadata_group.items() if name.endswith(".ptx"))
    launched.add(src.name)
    hoppers.update(f"{src.name}: {word}" for word in HOPPERS.findall(Path(ptx).read_text()))

knobs.compilation.listener = note
folder, fields, prompts, params = json.load(sys.stdin)
params = msgspec.convert(params, SamplingParams)
outputs = run(engine(Path(folder), **fields), prompts, params)
half = run(engine(Path(folder), **fields, dtype="bfloat16"), prompts, params)
assert not [output.error for output in outputs + half if output.error]
answers = [(choice.token_ids, [item.logprob for item in choice.logprobs]) for choice in outputs]
print(json.dumps([answers, sorted(launched), sorted(hoppers)]))
"""


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with heads of 128, for which Hopper has kernels of its own."""
    import transformers

    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(**SIZES, head_dim=128, tie_word_embeddings=False)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("capability", [None, 8.0, 8.9])
def test_a_gpu_acts_as_an_older_one(
    wide_heads: Path, prompts: list[list[int]], capability: float | None
) -> None:
    """Bugs: kernels for an older GPU that are wrong, or that do not load, on the device; a switch
    that leaves some kernels at Hopper's instructions. None: without the switch some have them."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU that is newer than those it acts as")
    fields = {**ON_CUDA, "gpu_capability": capability}
    asked = [str(wide_heads), fields, prompts, msgspec.to_builtins(GREEDY)]
    done = subprocess.run(
        [sys.executable, "-c", ACTING], input=json.dumps(asked), cwd=ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers, launched, hoppers = json.loads(done.stdout.splitlines()[-1])
    assert len(launched) > 5
    assert bool(hoppers) == (capability is None), hoppers
    assert_equal_to_transformers(wide_heads, prompts, answers)


@pytest.mark.parametrize(
    "cut",
    [
        {"cuda_graphs": False},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 39},
        {"block_size": 1, "num_blocks": 8192},
        {"block_size": 1, "num_blocks": 8192, "allocation": "cumsum"},
        {"block_size": 64},
        {"prefix_caching": True},
        {"num_blocks": 48},
    ],
    ids=str,
)
def test_text_does_not_depend_on_how_steps_are_cut(
    folder: Path, prompts: list[list[int]], whole: list[Output], cut: dict[str, Any]
) -> None:
    """Graphs whose padding leaks, chunks, block sizes, preemption (48 blocks) on the device. No
    log-probabilities, so that decode steps take the graphs."""
    core = cuda_engine(folder, **cut)
    outputs = run(core, prompts, PLAIN)
    if "num_blocks" in cut and "block_size" not in cut:
        assert core.stats().preemptions > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in whole]


def test_seeded_text_alone_and_together(folder: Path, prompts: list[list[int]]) -> None:
    """The noise depends on the row or the graph's padding."""
    params = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS, ignore_eos=True)
    core = cuda_engine(folder)
    together = run(core, prompts, params)
    alone = run(core, prompts[:3], params, together=False)
    assert [o.token_ids for o in alone] == [o.token_ids for o in together[:3]]
    filtered = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=50, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    first, second = run(core, prompts, filtered), run(core, prompts, filtered)
    assert [o.token_ids for o in first] == [o.token_ids for o in second]


def latents(transformers: Any) -> Any:
    return transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 8}, kv_lora_rank=128, q_lora_rank=96,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, first_k_dense_replace=1,
        moe_intermediate_size=128, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1,
    )  # fmt: skip


def states(transformers: Any) -> Any:
    return transformers.Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 4}, head_dim=64, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=48,
        tie_word_embeddings=False, rms_norm_eps=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("make", [latents, states])
def test_other_mixers(make: Any, tmp_path: Path, prompts: list[list[int]]) -> None:
    """Latents of another layer or entry, a split that is merged wrongly, a chunk that sees too
    much; a state that is another row's, or that padding writes over: the text of transformers, in
    graphs and however steps are cut."""
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        make(transformers), dtype=torch.float32
    )
    model.save_pretrained(tmp_path)
    model = model.cuda().eval()
    whole = run(cuda_engine(tmp_path), prompts, GREEDY)
    for prompt, output in zip(prompts, whole, strict=True):
        ids = torch.tensor([prompt + output.token_ids], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output.token_ids
    cuts: tuple[dict[str, Any], ...] = (
        {"cuda_graphs": False},
        {"max_num_batched_tokens": 39},
        {"prefix_caching": True},
        {"num_blocks": 48},
    )
    for cut in cuts:
        outputs = run(cuda_engine(tmp_path, **cut), prompts, PLAIN)
        assert [result.token_ids for result in outputs] == [result.token_ids for result in whole], (
            cut
        )


# ---- deterministic mode: test_deterministic.py, with what only a device has ----------------------

RUNNING = (1, 2, 3, 4, 5, 8, 17, 33, 64, 100, 129, 200, 256)
EXACT = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"max_num_batched_tokens": 300},
    {"async_scheduling": False},
    {"prefix_caching": True},
    {"block_size": 1, "num_blocks": 131_072},
    {"num_blocks": 640, "max_model_len": 400},
]


def differing(
    folder: Path,
    dtype: str,
    *,
    deterministic: bool,
    adapters: Sequence[Path] = (),
    running: Sequence[int] = RUNNING,
    cuts: Sequence[dict[str, Any]] = CUTS,
) -> list[str]:
    """Return the requests whose text or log-probabilities differ from those of all 256 together.

    adapters: taken in turns with none.
    running: how many of them run together in the same engine, one after the other.
    cuts: what other engines do otherwise.
    """
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 300, (256,), generator=generator).tolist()
    prompts = [torch.randint(1, 1000, (n,), generator=generator).tolist() for n in lengths]
    fields: dict[str, Any] = {
        "dtype": dtype,
        "deterministic": deterministic,
        "max_num_seqs": 256,
        "num_blocks": 16_384,
        "graph_sizes": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256),
    }
    names = ["", *(path.name for path in adapters)]
    everyone = list(range(256))

    def start(**changes: Any) -> Any:
        core = cuda_engine(folder, **fields | {"max_loras": len(adapters)} | changes)
        for path in adapters:
            add_adapter(core, path.name, path)
        return core

    def outputs(core: Any, params: SamplingParams, chosen: list[int]) -> list[Output]:
        those = [names[i % len(names)] for i in chosen]
        return run(core, [prompts[i] for i in chosen], params, adapters=those)

    core = start()
    texts = [o.token_ids for o in outputs(core, EXACT, everyone)]
    scores = [o.logprobs for o in outputs(core, GREEDY, everyone)]  # kernel by kernel
    differences = []
    for count in running:
        chosen = torch.randperm(256, generator=generator)[:count].tolist()
        if [o.token_ids for o in outputs(core, EXACT, chosen)] != [texts[i] for i in chosen]:
            differences.append(f"text of {count}")
        if [o.logprobs for o in outputs(core, GREEDY, chosen)] != [scores[i] for i in chosen]:
            differences.append(f"log-probabilities of {count}")
    del core
    for cut in cuts:
        core = start(**cut)
        if [o.token_ids for o in outputs(core, EXACT, everyone)] != texts:
            differences.append(f"text with {cut}")
        if [o.logprobs for o in outputs(core, GREEDY, everyone)] != scores:
            differences.append(f"log-probabilities with {cut}")
        if cut.get("num_blocks") == 640:
            assert core.stats().preemptions > 0
        del core
    return differences


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_at_1_to_256_running(folder: Path, dtype: str) -> None:
    """A product, a tile or a split that depends on the rest of the step, anywhere in a model."""
    assert differing(folder, dtype, deterministic=True) == []


@pytest.mark.parametrize(
    ("running", "cuts"),
    [(RUNNING, CUTS[:2]), ((), [*CUTS[2:], {"max_loras": 1}])],
    ids=["running", "cuts"],  # two, since both together take 160 s
)
def test_deterministic_with_adapters(
    folder: Path, tmp_path: Path, running: Sequence[int], cuts: list[dict[str, Any]]
) -> None:
    """A sum that is split by the number of rows of its adapter, or a row without one that is
    computed in another way because its neighbours have some."""
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from tests.engine.lora.adapters import save_adapter

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ranks = {"a": 8, "b": 40, "c": 16}
    adapters = [
        save_adapter(model, tmp_path / name, seed, r=rank)
        for seed, (name, rank) in enumerate(ranks.items())
    ]
    chosen: dict[str, Any] = {"adapters": adapters, "running": running, "cuts": cuts}
    assert differing(folder, "bfloat16", deterministic=True, **chosen) == []


def test_without_the_flag_numbers_differ(folder: Path) -> None:
    """Then the test above tests nothing."""
    assert differing(folder, "bfloat16", deterministic=False)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 3072)], ids=str)
def test_all_tiles_of_the_deterministic_product_agree(shape: tuple[int, int]) -> None:
    """If one does not, it is left out and large steps take longer than need be."""
    from kernels.gemm.deterministic import TILES, agreeing

    weight = torch.randn(shape, device="cuda").bfloat16()
    assert agreeing(weight) == TILES[2] == agreeing(weight, add=True)
