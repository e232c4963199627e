"""Each architecture against transformers, or its nearest relative there: logits within 1e-5; and
with an adapter on every linear layer as with the adapter's change in the checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.plan.gpus import GIB
from deployments.plan.memory import Hardware, plan
from engine.config.engine_config import EngineConfig
from engine.config.kv_groups import kv_groups
from engine.config.model_config import ModelConfig
from engine.runner.caches.kv_cache import KVCache
from tests.engine.models.checkpoints import Paged, adapter_on, load_model
from tests.parity.cases import (
    ALIBI,
    CASES,
    DELTA_NET,
    EXPERTS,
    LATENT,
    MIXED,
    WINDOWS,
    Case,
    relative,
    save,
)

BOUND = 1e-5
ALL = {**CASES, **WINDOWS, **ALIBI, **EXPERTS, **LATENT, **DELTA_NET, **MIXED}
IDS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(7))
WHOLE = [3, 1, 9, 4, 8, 2, 0, 5, 7, 6]  # blocks of IDS
OTHER = torch.cat((IDS[:8], torch.randint(3, 96, (9,), generator=torch.Generator().manual_seed(8))))


@torch.inference_mode()
def differences(case: Case, folder: Path, device: str = "cpu") -> dict[str, float]:
    """Return the largest relative difference of the logits, for each way to compute them."""
    theirs = save(case, folder)
    model = load_model(folder, device=device)
    want, want_other = (case.logits(theirs, ids).to(device) for ids in (IDS, OTHER))
    assert want.std() > 0.05, "logits too flat to tell right from wrong"
    paged = Paged(model)
    errors = {"whole": relative(paged.run((IDS, WHOLE, 0))[0], want)}
    chunked = [12, 18, 11, 13, 19, 14, 10, 16, 15, 17]
    chunks = [
        paged.run((IDS[:end], chunked, start))[0]
        for start, end in ((0, 7), (7, 14), (14, 27), (27, 36), (36, 37), (37, 38), (38, 39))
    ]
    errors["chunks"] = relative(torch.cat(chunks), want[:39])
    # The last token as a decode, beside a request that reads the first's two blocks.
    # Of states nothing is found again: it begins on its own.
    shared, start = ([12, 18], 8) if not model.config.recurrent else ([23, 24], 0)
    decode, rest = paged.run((IDS, chunked, 39), (OTHER, [*shared, 20, 21, 22], start))
    errors["batch"] = relative(decode, want[39:])
    errors["prefix"] = relative(rest, want_other[start:])
    # It has lost its blocks in the middle of its text, which is computed again in those of the
    # other request and of others before; then it goes on.
    again = [shared[-1], 20, 21, 22, 3, 1, 9, 4, 8, 2]
    parts = [
        paged.run((IDS[:end], again, start))[0]
        for start, end in ((0, 33), (33, 36), *((at, at + 1) for at in range(36, 40)))
    ]
    errors["preempted"] = relative(torch.cat(parts), want)
    return errors


@torch.inference_mode()
def divergences(case: Case, folder: Path, device: str) -> dict[str, float]:
    """Return the loss of bfloat16, ours and transformers': the mean KL divergence in nats.

    It is that of each token's distribution from the one that transformers computes in float32.
    """
    theirs = save(case, folder)
    want = case.logits(theirs, IDS).double().log_softmax(-1)
    ours = Paged(load_model(folder, torch.bfloat16, device)).run((IDS, WHOLE, 0))[0]
    logits_by_side = {"ours": ours.cpu(), "transformers": case.logits(theirs.bfloat16(), IDS)}
    return {
        f"KL in bfloat16, {name}": float(
            torch.nn.functional.kl_div(
                logits.double().log_softmax(-1), want, reduction="batchmean", log_target=True
            )
        )
        for name, logits in logits_by_side.items()
    }


@torch.inference_mode()
def with_adapter(folder: Path) -> float:
    """Return the largest relative difference between an adapter beside the weights and in them."""
    model = load_model(folder)
    lora, deltas = adapter_on(model, len(IDS))
    beside = Paged(model).run((IDS, list(range(10)), 0), lora=lora)[0]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if (delta := deltas.pop(model.tensor_name(name), None)) is not None:
            tensors[name] = (tensor + delta).contiguous()
    assert not deltas, "not in the checkpoint"
    save_file(tensors, folder / "model.safetensors")
    return relative(beside, Paged(load_model(folder)).run((IDS, list(range(10)), 0))[0])


# Of the mixtures, those that the quick stage has; the others differ in names and routers.
_QUICK = ("qwen 3 moe", "gpt-oss", "glm 4.6")
_MARKED = [
    pytest.param(name, marks=pytest.mark.slow if name in EXPERTS and name not in _QUICK else ())
    for name in ALL
]


@pytest.mark.parametrize("name", _MARKED)
def test_logits(name: str, tmp_path: Path) -> None:
    """A switch that is read and not applied, a layout taken for ours, a norm in the wrong place:
    each is a model that answers fluently and wrongly. An adapter whose rows stay where the
    checkpoint's were, or that is added behind a factor, does so for its users alone."""
    errors = differences(ALL[name], tmp_path)
    errors["adapter"] = with_adapter(tmp_path)
    assert max(errors.values()) < BOUND, errors
    planned_as_loaded(tmp_path)


def planned_as_loaded(folder: Path) -> None:
    """Assert that `manta plan` counts exactly the parameters and bytes of the loaded model."""
    model = load_model(folder)
    config = EngineConfig(model="", dtype="float32")
    planned = plan(ModelConfig.from_folder(folder), config, Hardware("CPU", "cpu", 8 * GIB))
    assert planned.parameters == model.num_parameters
    assert planned.active_parameters == model.num_active_parameters
    assert planned.weights == model.num_bytes
    bytes_per_token = sum(size for _, _, size in planned.kv_per_token)
    assert bytes_per_token == model.config.kv_bytes_per_token(4)
    kv = KVCache.allocate(
        kv_groups(model.config), 3, config.block_size, torch.float32, model.device
    )
    assert planned.block_bytes == kv.storage.nbytes // 3
