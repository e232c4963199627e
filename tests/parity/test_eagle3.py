"""Drafts of EAGLE-3 files: those that the published network gives, in both spellings and with all
switches, and texts that stay what they are without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from deployments.checkpoints.resolve import with_drafter
from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.errors import ConfigError
from engine.resolve import resolve
from engine.runner.drafts.graphs import graph_bytes
from engine.runner.memory import outline, plan_memory
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.drafters import ListedLengths, count_equal, use_chains, watch_drafts
from tests.parity.engine_driver import engine, run

SIZE, OWN, HEADS, KV_HEADS, DIM, VOCAB, DRAFTED, EPS = 64, 48, 4, 2, 16, 128, 40, 1e-5
TAPS = (1, 2, 4)
SWITCHES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "nested": True},
    {"norm_before_fc": True, "norm_output": True, "norm_before_residual": True, "nested": True},
    {"fc_norm": True, "draft_vocab_size": VOCAB},
    {"own": OWN, "nested": True},
]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    frequencies = 1e4 ** (-torch.arange(0, DIM, 2).float() / DIM)
    angles = torch.cat([places[:, None] * frequencies] * 2, -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Made:
    """A model with an EAGLE-3 drafter beside it, and both in plain torch."""

    def __init__(self, folder: Path, *, own: int = 0, nested: bool = False, **switches: Any):
        import transformers as t

        torch.manual_seed(0)
        sizes = {
            "hidden_size": SIZE,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "rms_norm_eps": EPS,
        }
        config = t.LlamaConfig(**sizes, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
        self.model = t.LlamaForCausalLM(config).float().eval()
        for name, parameter in self.model.named_parameters():
            if "norm" not in name:
                parameter.data.normal_(0, 2 / parameter.shape[-1] ** 0.5)
        self.target, self.folder = folder / "model", folder / "drafter"
        self.model.save_pretrained(self.target)
        self.switches, size = switches, own or SIZE
        count = switches.get("draft_vocab_size", DRAFTED)
        self.tensors = weights(size, count, own_embedding=bool(own))
        self.embedding = self.model.model.embed_tokens.weight.data
        if own:
            self.embedding = self.tensors["embed_tokens.weight"]
        if switches.get("norm_before_fc"):
            self.tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * SIZE)
        if switches.get("fc_norm"):
            for number in range(3):
                self.tensors[f"fc_norm.{number}.weight"] = 1 + 0.2 * torch.randn(SIZE)
        layer = {
            **sizes,
            "hidden_size": size,
            "head_dim": DIM,
            "num_hidden_layers": 1,
            # of the length it was trained with, which limits nothing
            "max_position_embeddings": 32,
        }
        top = {"draft_vocab_size": count, "eagle_aux_hidden_state_layer_ids": list(TAPS)}
        top |= {"target_hidden_size": SIZE} | switches
        tensors = self.tensors
        if nested:
            self.config = {"architectures": ["Eagle3Speculator"], **top}
            self.config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
            tensors = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        else:
            self.config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **top}
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        w, p, n = self.tensors, "midlayer.", len(states)
        normed = rms(states, w[f"{p}hidden_norm.weight"])
        x = torch.cat((rms(embedded, w[f"{p}input_layernorm.weight"]), normed), -1)
        q, k, v = (x @ w[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        places = torch.arange(n)
        q = rotate(q.view(n, HEADS, DIM), places).transpose(0, 1)
        k = rotate(k.view(n, KV_HEADS, DIM), places).repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.view(n, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 1)
        y = F.scaled_dot_product_attention(q, k.transpose(0, 1), v.transpose(0, 1), is_causal=True)
        residual = normed if self.switches.get("norm_before_residual") else states
        states = residual + y.transpose(0, 1).flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T
        m = rms(states, w[f"{p}post_attention_layernorm.weight"])
        m = F.silu(m @ w[f"{p}mlp.gate_proj.weight"].T) * (m @ w[f"{p}mlp.up_proj.weight"].T)
        return states + m @ w[f"{p}mlp.down_proj.weight"].T

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[tuple[int, float]]:
        """Return greedy drafts after a text, and by how much each logit leads the next."""
        w, inputs = self.tensors, []
        model = self.model.model
        hooks = [
            layer.register_forward_hook(lambda _m, _i, out: inputs.append(_first(out)))
            for layer in (*model.layers,)
        ]
        model(torch.tensor([text[:-1]]))
        for hook in hooks:
            hook.remove()
        parts = [inputs[tap - 1][0] for tap in TAPS]
        if self.switches.get("fc_norm"):
            parts = [rms(part, w[f"fc_norm.{n}.weight"]) for n, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.switches.get("norm_before_fc"):
            joined = rms(joined, w["input_norm.weight"])
        states, tokens, drafts = joined @ w["fc.weight"].T, text[1:], []
        for _ in range(count):
            rows = self._layer(self.embedding[torch.tensor(tokens)], states)[-1:]
            normed = rms(rows, w["norm.weight"])
            best = (normed @ w["lm_head.weight"].T)[0].topk(2)
            number = int(best.indices[0])
            number += int(w["d2t"][number]) if "d2t" in w else 0
            drafts.append((number, float(best.values[0] - best.values[1])))
            tokens = [*tokens, number]
            states = torch.cat((states, normed if self.switches.get("norm_output") else rows))
        return drafts


def _first(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def weights(size: int, count: int, *, own_embedding: bool) -> dict[str, torch.Tensor]:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / columns**0.5

    tensors = {
        "fc.weight": matrix(size, 3 * SIZE),
        "norm.weight": 1 + 0.2 * torch.randn(size),
        "lm_head.weight": matrix(count, size),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    for name, rows, columns in (
        ("self_attn.q", HEADS * DIM, 2 * size),
        ("self_attn.k", KV_HEADS * DIM, 2 * size),
        ("self_attn.v", KV_HEADS * DIM, 2 * size),
        ("self_attn.o", size, HEADS * DIM),
        ("mlp.gate", 96, size),
        ("mlp.up", 96, size),
        ("mlp.down", size, 96),
    ):
        tensors[f"midlayer.{name}_proj.weight"] = matrix(rows, columns)
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, size)
    if count < VOCAB:
        numbers = torch.randperm(VOCAB)[:count].sort().values
        tensors["d2t"] = numbers - torch.arange(count)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, numbers, True)
    return tensors


def drafting(checkpoint: Made, *lengths: int, **fields: Any) -> tuple[EngineCore, ListedLengths]:
    speculation = {"method": "eagle3", "model": str(checkpoint.folder), "num_speculative_tokens": 7}
    core = engine(checkpoint.target, speculation=speculation, num_threads=1, **fields)
    assert core.scheduler.drafts is not None
    controller = ListedLengths(lengths)
    core.scheduler.drafts.speculation._lengths = controller
    return core, controller


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 7, 40, 33)]


PROMPTS = prompts()


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_drafts_are_those_of_the_network(
    switches: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a switch is read and not applied; outputs of layers are taken for inputs; a number of
    the reduced vocabulary is taken for the model's; rows are paired with the wrong token."""
    checkpoint = Made(tmp_path, **switches)
    core, controller = drafting(checkpoint, 3, max_num_batched_tokens=17, prefix_caching=False)
    seen = watch_drafts(monkeypatch)
    run(core, PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert count_equal(seen, checkpoint.drafts) > 60 and controller.drafted > 30


@pytest.mark.parametrize("ahead", [False, True])
def test_text_and_memory(tmp_path: Path, ahead: bool) -> None:
    """Bugs: the text with drafts of a reduced vocabulary is another; the plan counts other bytes
    than the drafter takes."""
    checkpoint = Made(tmp_path, own=OWN)
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, **fields)
        for fields in (
            {"temperature": 0.9, "top_p": 0.8, "top_k": 30},
            {"temperature": 0.0, "repetition_penalty": 1.3},
            {"temperature": 0.7, "logit_bias": {5: 3.0}, "min_p": 0.05},
            {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 0},
        )
    ]
    core, controller = drafting(checkpoint, 3, 7, 0, 1, num_blocks=60, async_scheduling=ahead)
    drafted = run(core, PROMPTS, params)
    assert controller.drafted > 20
    core.scheduler.speculate(None)
    core.reset_prefix_cache()
    plain = run(core, PROMPTS, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    speculation = {"method": "eagle3", "model": str(checkpoint.folder)}
    config = EngineConfig(
        model=str(checkpoint.target),
        device="cpu",
        dtype="float32",
        num_blocks=60,
        speculation=speculation,
    )
    model = outline(resolve(config))
    plan = plan_memory(resolve(config), model, "CPU", 8 << 30, ("", 0), host_bytes=0)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    assert dict(plan.rows)["drafter"] == runner.drafting.passes.drafter.num_bytes
    keys = runner.kv.storage.nbytes + runner.drafting.kv.storage.nbytes
    assert plan.block_bytes == keys // 60


class Logits(TorchDispatchMode):
    """Counts the bytes of all tensors of logits that are computed.

    columns: the sizes of vocabularies.
    """

    def __init__(self, *columns: int) -> None:
        super().__init__()
        self._columns = columns
        self._sizes: dict[int, int] = {}  # address -> bytes

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] in [(n,) for n in self._columns]:
            self._sizes[result.data_ptr()] = result.nbytes
        return result

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())


def test_logits_of_graphs_are_planned(tmp_path: Path) -> None:
    """Bug: the plan reserves less for logits than the largest graph of drafts keeps of them."""
    core, _ = drafting(Made(tmp_path), 3)
    runner, rows = core._runner, 4
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    drafter = runner.drafting.passes.drafter
    with torch.inference_mode(), Logits(DRAFTED, VOCAB) as logits:
        drafter.logits(torch.zeros(rows, SIZE))
    assert logits.num_bytes == rows * (DRAFTED + VOCAB) * 4
    assert logits.num_bytes <= graph_bytes(rows, VOCAB, 4) - graph_bytes(rows, 0, 4)


def test_chains_of_graphs_draft_as_passes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a graph drafts from the row of a draft that was rejected, or for another request."""
    checkpoint = Made(tmp_path)
    seen = [], []  # type: ignore[var-annotated]
    params = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True)
    for chains, watched in zip((False, True), seen, strict=True):
        core, controller = drafting(checkpoint, 3, 2, async_scheduling=True)
        counts = use_chains(core) if chains else []
        with monkeypatch.context() as patch:
            drafts = watch_drafts(patch)
            run(core, PROMPTS, params)
            watched += drafts
        assert controller.drafted > controller.accepted and bool(counts) == chains
    assert seen[0] == seen[1] and len(seen[0]) > 30


def test_refusals_name_file_and_key(tmp_path: Path) -> None:
    """Bugs: another model's drafter runs and is never right; a missing tensor is random."""
    checkpoint = Made(tmp_path)
    path = checkpoint.folder / "config.json"

    def refusal(**changes: Any) -> str:
        path.write_text(json.dumps(checkpoint.config | changes))
        with pytest.raises(ConfigError) as caught:
            drafting(checkpoint, 3)
        path.write_text(json.dumps(checkpoint.config))
        return caught.value.message

    assert "vocab_size: 99 is not the model's 128" in refusal(vocab_size=99)
    assert "target_hidden_size: 32 is not the model's 64" in refusal(target_hidden_size=32)
    assert "[1, 2, 9] must be different layers" in refusal(
        eagle_aux_hidden_state_layer_ids=[1, 2, 9]
    )
    assert "is no EAGLE-3 drafter" in refusal(architectures=["LlamaForCausalLM"])
    assert "parallel_drafting: True is not supported" in refusal(parallel_drafting=True)
    assert "the drafter has no embed_tokens" in refusal(hidden_size=48)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "fc.weight"}
    save_file(tensors, checkpoint.folder / "model.safetensors", metadata={"format": "pt"})
    assert "tensor fc.weight is missing" in refusal()
    checkpoint.folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="there is no such folder"):
        drafting(checkpoint, 3)


def test_a_server_plans_and_finds_the_drafter(tmp_path: Path, monkeypatch: Any) -> None:
    """Bugs: `manta plan` leaves the drafter out, or needs its weights; a relative folder is looked
    for in the replica's; a name that is none reaches the hub."""
    checkpoint = Made(tmp_path)
    (checkpoint.folder / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    value: dict[str, Any] = {"method": "eagle3", "model": "drafter"}
    options = with_drafter({"model": str(checkpoint.target), "speculation": value}, weights=False)
    assert options["speculation"]["model"] == str(checkpoint.folder)
    device = Hardware("CPU", "cpu", 8 * GIB)
    model = ModelConfig.from_folder(checkpoint.target)
    planned = plan(model, EngineConfig(**options, dtype="float32"), device)
    assert dict(planned.memory.rows)["drafter"] > 0
    with pytest.raises(ConfigError, match="or a hub name like org/name"):
        with_drafter({"speculation": {**value, "model": "not there"}})
    assert with_drafter({"speculation": "auto"}) == {"speculation": "auto"}


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{}, {"cuda_graphs": False}], ids=str)
def test_on_a_gpu(tmp_path: Path, cut: dict[str, Any], monkeypatch: Any) -> None:
    """Bug: a graph keeps other layers' inputs, or those of sampled tokens alone."""
    checkpoint = Made(tmp_path, norm_before_residual=True)
    core, controller = drafting(checkpoint, 3, device="cuda", prefix_caching=False, **cut)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    assert (runner.drafting.graphs is None) == (cut == {"cuda_graphs": False})
    assert runner.graphs is None or runner.graphs._reads
    seen = watch_drafts(monkeypatch)
    run(core, PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    firsts = [(drafts[0], *checkpoint.drafts(text, 1)[0]) for text, drafts in seen]
    sure = [draft == right for draft, right, lead in firsts if lead > 0.05]
    assert sum(sure) > 0.95 * len(sure) > 10 and controller.drafted > 30
