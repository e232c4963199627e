"""Drafts of a checkpoint's MTP layer: those that the layer gives in transformers, and texts that
stay what they are without."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.resolve import resolve
from engine.runner.memory import outline, plan_memory
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.core import EngineCore
from tests.drafters import ListedLengths, count_equal, watch_drafts
from tests.parity.engine_driver import engine, run
from tests.parity.test_speculation import PARAMS

VOCAB = 128
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_interleave": False,
}


def glm(layers: int) -> Any:
    import transformers as t

    config = t.Glm4MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_hidden_layers=layers)
    return t.Glm4MoeForCausalLM(config)


def deepseek(layers: int) -> Any:
    import transformers as t

    config = t.DeepseekV3Config(**SIZES | EXPERTS | LATENT, num_hidden_layers=layers)
    return t.DeepseekV3ForCausalLM(config)


def mimo(layers: int) -> Any:
    import transformers as t

    return t.Qwen2ForCausalLM(t.Qwen2Config(**SIZES, num_hidden_layers=layers))


MIXED: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}


def qwen_next(layers: int) -> Any:
    import transformers as t

    kinds = ["linear_attention", *["full_attention"] * (layers - 1)]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 40}
    config = t.Qwen3NextConfig(
        **SIZES, **MIXED, **experts, num_hidden_layers=layers, layer_types=kinds
    )
    return t.Qwen3NextForCausalLM(config)


def qwen_35(layers: int) -> Any:
    import transformers as t

    kinds = ["linear_attention", *["full_attention"] * (layers - 1)]
    config = t.Qwen3_5TextConfig(**SIZES, **MIXED, num_hidden_layers=layers, layer_types=kinds)
    return t.Qwen3_5ForCausalLM(config)


HYBRID = (qwen_next, qwen_35)
# of the norms of embedding and state, the matrix and the last norm
NEXTN = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
MIMO = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")


class Made:
    """A checkpoint whose model has L layers and an MTP layer, and both as transformers has them."""

    def __init__(self, make: Callable[[int], Any], folder: Path, *, built: bool = False) -> None:
        torch.manual_seed(0)
        layers, size = (1 if built and make not in HYBRID else 2), SIZES["hidden_size"]
        self.big = make(layers + 1).float().eval()  # its last layer becomes the MTP layer's
        for name, parameter in self.big.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.2 * torch.randn_like(parameter)
            elif parameter.dim() > 1:
                parameter.data.normal_(0, 2 / parameter.shape[-1] ** 0.5)
        self.layer = self.big.model.layers[layers]
        self.norms = {name: 1 + 0.2 * torch.randn(size) for name in ("embedding", "hidden", "norm")}
        self.project = torch.randn(size, 2 * size) / size**0.5
        embedding = self.big.model.embed_tokens.weight
        if built:  # tokens follow tokens, and the MTP layer is the model's own
            embedding.data *= embedding.data.pow(2).mean(-1, keepdim=True).rsqrt()
            for name, parameter in self.big.model.layers.named_parameters():
                first = layers == 2 and name.startswith("0.")  # the layer that keeps a state
                if name.endswith(("o_proj.weight", "out_proj.weight")) or first:
                    parameter.data.zero_()
            self.layer.load_state_dict(self.big.model.layers[layers - 1].state_dict())
            self.norms = {"embedding": torch.ones(size), "hidden": torch.ones(size)}
            self.norms["norm"] = self.big.model.norm.weight.data + (make in HYBRID)
            self.project = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        self.hidden_first = make is mimo
        self.big.save_pretrained(folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        last = f"model.layers.{layers}."
        prefix = {mimo: "model.mtp_layers.0.", **dict.fromkeys(HYBRID, "mtp.")}.get(make, last)
        layer = f"{prefix}layers.0." if make in HYBRID else prefix
        for name in [name for name in tensors if name.startswith(last)]:
            tensors[layer + name.removeprefix(last)] = tensors.pop(name)
        if prefix == last:  # copies, which no reader needs
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
        own = self.norms["embedding"], self.norms["hidden"], self.norms["norm"], self.project
        if make in HYBRID:  # files have norms less one
            own = (*(norm - 1 for norm in own[:3]), self.project)
        names = QWEN if make in HYBRID else MIMO if make is mimo else NEXTN
        tensors |= {f"{prefix}{n}.weight": tensor for n, tensor in zip(names, own, strict=True)}
        save_file({n: t.clone() for n, t in tensors.items()}, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"], config["num_nextn_predict_layers"] = layers, 1
        if make in HYBRID:
            config["mtp_num_hidden_layers"] = config.pop("num_nextn_predict_layers")
        for key in ("layer_types", "mlp_layer_types"):
            if key in config:
                config[key] = config[key][:layers]
        if make is mimo:
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        (folder / "config.json").write_text(json.dumps(config))
        self.big.model.layers = self.big.model.layers[:layers]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norms[name]

    @torch.no_grad()
    def drafts(self, text: list[int], count: int) -> list[tuple[int, float]]:
        """Return greedy drafts after a text, and by how much each logit leads the next."""
        model, drafts = self.big.model, []
        states = model(torch.tensor([text[:-1]])).last_hidden_state
        tokens = text[1:]
        for _ in range(count):
            embedded = self._norm(model.embed_tokens(torch.tensor([tokens])), "embedding")
            both = [embedded, self._norm(states, "hidden")]
            x = torch.cat(both[::-1] if self.hidden_first else both, -1) @ self.project.T
            n = x.shape[1]
            places = torch.arange(n)[None]
            mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
            rows = self.layer(
                x,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=model.rotary_emb(x, position_ids=places),
            )
            rows = self._norm(rows[0] if isinstance(rows, tuple) else rows, "norm")[:, -1:]
            best = self.big.lm_head(rows)[0, -1].topk(2)
            drafts.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            states, tokens = torch.cat((states, rows), 1), [*tokens, drafts[-1][0]]
        return drafts


def drafting(folder: Path, *lengths: int, **fields: Any) -> tuple[EngineCore, ListedLengths]:
    core = engine(folder, speculation={"method": "mtp", "tokens": 7}, num_threads=1, **fields)
    assert core.scheduler.drafts is not None
    controller = ListedLengths(lengths)
    core.scheduler.drafts.speculation._lengths = controller
    return core, controller


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 7, 40, 33)]
    texts[3][:32] = texts[2][:32]  # something for the prefix cache
    return texts


PROMPTS = prompts()


@pytest.mark.parametrize("make", [glm, deepseek, mimo, *HYBRID])
def test_drafts_are_those_of_the_layer(
    make: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: a row is paired with the wrong token or state; a key of a rejected draft stays; a chunk
    of a prompt gives the drafter no keys; the layer is read under another's names."""
    checkpoint = Made(make, tmp_path)
    core, controller = drafting(tmp_path, 3, max_num_batched_tokens=17, prefix_caching=False)
    seen = watch_drafts(monkeypatch)
    run(core, PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert count_equal(seen, checkpoint.drafts) > 60 and controller.drafted > 30


@pytest.mark.parametrize(("make", "ahead"), [(glm, False), (glm, True), (qwen_next, True)])
def test_layer_like_the_model_is_always_right(
    make: Callable[[int], Any], tmp_path: Path, ahead: bool
) -> None:
    """Bugs: drafts are drawn with the noise of another position, seed or choice, or without the
    request's penalties, bias and filters; the text changes."""
    Made(make, tmp_path, built=True)
    core, controller = drafting(tmp_path, 3, 7, 1, async_scheduling=ahead)
    sampling = [
        SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "seed": 7} | fields))
        for fields in PARAMS
        if not {"logit_bias", "allowed_token_ids", "stop_token_ids"} & fields.keys()
    ]
    texts = [PROMPTS[at % len(PROMPTS)] for at in range(len(sampling))]
    drafted = run(core, texts, sampling)
    assert controller.accepted == controller.drafted > 100
    core.scheduler.speculate(None)
    core.reset_prefix_cache()
    for some, other in zip(run(core, texts, sampling), drafted, strict=True):
        assert (some.token_ids, some.finish) == (other.token_ids, other.finish)


@pytest.mark.parametrize("ahead", [False, True])
def test_text_with_wrong_drafts_is_the_text_without(tmp_path: Path, ahead: bool) -> None:
    """Bugs: the drafter writes a key of the model; a preempted request, one with a reused prefix or
    beside one that may not draft goes on with another's drafts; one batch ahead, a token is
    computed at the position before accepted drafts."""
    Made(glm, tmp_path)
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, logprobs=1)
    core, _ = drafting(tmp_path, 3)
    on = core.scheduler.drafts
    core.scheduler.speculate(None)
    plain = run(core, PROMPTS * 3, params)
    for fields in ({}, {"num_blocks": 14, "max_model_len": 128}, {"max_num_batched_tokens": 33}):
        core, controller = drafting(tmp_path, 3, 0, 7, 1, async_scheduling=ahead, **fields)
        for some, other in zip(run(core, PROMPTS * 3, params), plain, strict=True):
            assert some.token_ids == other.token_ids
            assert [i.token_id for i in some.logprobs] == [i.token_id for i in other.logprobs]
        assert controller.drafted > 30
        assert not fields.get("num_blocks") or core.stats().preemptions
    assert on is not None


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Bugs: a drafter on several ranks fails in its first step; the refusal names the other key."""
    Made(glm, tmp_path)
    words = f"method mtp: it runs on one rank alone, and {name} is 2; set speculation to auto"
    with pytest.raises(ConfigError, match=words) as caught:
        drafting(tmp_path, 3, **{name: 2})
    assert caught.value.param == "speculation"


def test_checkpoints_without_such_a_layer_are_refused(tmp_path: Path) -> None:
    """Bug: weights are read, or fetched, before a configuration that cannot work is refused."""
    Made(mimo, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())

    def refusal(**changes: Any) -> str:
        path.write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError) as caught:
            drafting(tmp_path, 3)
        assert caught.value.param == "speculation"
        return str(caught.value)

    assert "config.json has no MTP layer" in refusal(num_nextn_predict_layers=0)
    others = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    assert "no layout of MTP layers is known for Qwen2ForCausalLM" in refusal(**others)
    tensors = load_file(tmp_path / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if ".mtp_layers." not in name}
    save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "its files have no tensor of it" in refusal()


def test_memory_of_the_layer_is_planned(tmp_path: Path) -> None:
    """Bugs: weights or keys of the layer are in no plan, so that a start runs out of memory; the
    plan counts other bytes than the layer takes once it is loaded."""
    Made(glm, tmp_path)
    tables = {}
    for value in ("off", {"method": "mtp"}):
        config = EngineConfig(
            model=str(tmp_path), device="cpu", dtype="float32", speculation=value, num_blocks=40
        )
        tables[str(value)] = plan_memory(
            resolve(config), outline(resolve(config)), "CPU", 8 << 30, ("", 0), host_bytes=0
        )
    plain, drafted = tables.values()
    core, _ = drafting(tmp_path, 3, num_blocks=40)
    runner = core._runner
    assert isinstance(runner, ModelRunner) and runner.drafting is not None
    weights = runner.drafting.passes.drafter.num_bytes
    assert dict(drafted.rows)["drafter"] == weights > 0
    keys = runner.drafting.kv.storage.nbytes
    assert drafted.block_bytes - plain.block_bytes == keys // 40


@pytest.mark.parametrize("fields", [{"quantization": "int8"}, {"load_format": "dummy"}], ids=str)
def test_layer_in_other_weights(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Bugs: the layer's matrices are left as the files have them, or not filled at all."""
    Made(glm, tmp_path, built=True)
    core, controller = drafting(tmp_path, 3, **fields)
    run(core, PROMPTS, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert controller.drafted > 0
    if "quantization" in fields:
        assert controller.accepted > 0.8 * controller.drafted


@pytest.mark.parametrize("make", [glm, deepseek])
def test_layer_in_eight_bits_as_files_have_it(make: Callable[[int], Any], tmp_path: Path) -> None:
    """Bugs: scales of the layer's matrices are missing or unexpected; the matrix that joins both
    inputs, which files leave in 16 bits, is read as if it had scales."""
    Made(make, tmp_path, built=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [*tensors]:
        inside = ".self_attn." in name or ".mlp." in name
        if (inside and name.endswith("_proj.weight")) or name.endswith("_proj_with_mqa.weight"):
            weight = tensors[name]
            scale = weight.abs().max().clamp(min=1e-3) / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    core, controller = drafting(tmp_path, 3)
    run(core, PROMPTS, SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True))
    assert controller.accepted == controller.drafted > 30


@pytest.mark.gpu
@pytest.mark.parametrize("make", [glm, qwen_next])
@pytest.mark.parametrize("cut", [{}, {"cuda_graphs": False}, {"async_scheduling": False}], ids=str)
def test_on_a_gpu(make: Callable[[int], Any], tmp_path: Path, cut: dict[str, Any]) -> None:
    """Bugs: a graph keeps only the states of sampled tokens; padding of a graph is drafted from."""
    Made(make, tmp_path, built=True)
    core, controller = drafting(tmp_path, 3, 7, 1, device="cuda", dtype="float32", **cut)
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
        run(core, PROMPTS * 3, params)
    assert controller.accepted > 0.95 * controller.drafted > 100
