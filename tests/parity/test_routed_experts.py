"""The experts that a request's tokens went to, against the routers of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from engine.messages import EngineRequest
from engine.sampling_params import SamplingParams
from tests.parity.cases import CASES, EXPERTS, save
from tests.parity.engine_driver import Output, engine, run

pytestmark = pytest.mark.slow
ROUTED = SamplingParams(
    temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, return_routed_experts=True
)
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES = {"max_model_len": 64, "block_size": 4}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (5, 20, 33, 18)]


def routers(model: Any) -> dict[int, Any]:
    """Return the routers of transformers' model, by layer."""
    return {
        int(name.split("layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("TopKRouter")
    }


def chosen(model: Any, ids: list[int]) -> np.ndarray:
    """Return each token's experts by transformers, [tokens, layers, chosen] in ascending order."""
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        router.register_forward_hook(
            lambda _, __, out, layer=layer: seen.__setitem__(layer, out[2].sort(-1).values)
        )
        for layer, router in routers(model).items()
    ]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    layers = model.config.num_hidden_layers
    none = torch.zeros_like(next(iter(seen.values())))
    return torch.stack([seen.get(layer, none) for layer in range(layers)], 1).numpy()


def replayed(model: Any, ids: list[int], routes: np.ndarray) -> torch.Tensor:
    """Return transformers' logits when each router takes the given experts, as trainers replay
    them."""
    hooks = []
    for layer, router in routers(model).items():
        given = torch.from_numpy(routes[:, layer].astype(np.int64))

        def take(_: Any, __: Any, out: Any, given: torch.Tensor = given) -> Any:
            scores = out[0].softmax(-1).gather(1, given)
            return out[0], scores / scores.sum(-1, keepdim=True), given

        hooks.append(router.register_forward_hook(take))
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def check(model: Any, prompt: list[int], output: Output) -> None:
    assert output.routed is not None, output.error
    routes, ids = output.routed.array(), [*prompt, *output.token_ids][:-1]
    assert routes.dtype == np.uint8 and routes.shape[0] == len(ids)
    np.testing.assert_array_equal(np.sort(routes, -1), chosen(model, ids))


@pytest.mark.parametrize("name", ["qwen 3 moe", "qwen 2 moe"])
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A token that is told another's experts, in a batch with requests that do not ask.

    "qwen 2 moe" has a layer without experts.
    """
    theirs = save(EXPERTS[name], tmp_path)
    core = engine(tmp_path, num_blocks=400, max_num_batched_tokens=24, **SIZES)
    for _ in range(2):  # the second time prefixes are cached
        outputs = run(core, prompts(), [ROUTED, PLAIN, ROUTED, PLAIN])
    assert not outputs[0].cached and outputs[1].routed is None and outputs[3].cached
    for prompt, output in list(zip(prompts(), outputs, strict=True))[::2]:
        check(theirs, prompt, output)
    plain = run(core, prompts(), PLAIN)
    assert [output.token_ids for output in plain] == [output.token_ids for output in outputs]


def test_a_trainer_that_replays_them_has_the_same_logits(tmp_path: Path) -> None:
    """Experts in another order of layers or tokens, which a replay would follow."""
    theirs = save(EXPERTS["qwen 3 moe"], tmp_path)
    prompt = prompts()[1]
    (output,) = run(engine(tmp_path, num_blocks=400, **SIZES), [prompt], ROUTED)
    assert output.routed is not None
    ids = [*prompt, *output.token_ids]
    logits = replayed(theirs, ids[:-1], output.routed.array())
    with torch.inference_mode():
        torch.testing.assert_close(logits, theirs(torch.tensor([ids[:-1]])).logits[0])
    scores = logits.log_softmax(-1)[len(prompt) - 1 :]
    of_output = scores.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    ours = torch.tensor([item.logprob for item in output.logprobs])
    torch.testing.assert_close(of_output, ours, atol=1e-4, rtol=1e-4)


def test_after_preemptions(tmp_path: Path) -> None:
    """Tokens that are computed twice, whose experts are counted twice or lost."""
    theirs = save(EXPERTS["mixtral"], tmp_path)
    for blocks in range(24, 16, -1):
        core = engine(tmp_path, num_blocks=blocks, **SIZES)
        outputs = run(core, prompts(), ROUTED)
        if core.stats().preemptions:
            break
    else:
        pytest.fail("nothing was preempted")
    for prompt, output in zip(prompts(), outputs, strict=True):
        check(theirs, prompt, output)


@pytest.mark.parametrize("known", [4, 12])
def test_a_request_that_another_replica_goes_on_with(known: int, tmp_path: Path) -> None:
    """The experts of tokens before a failover are missing, or the last token was there already."""
    theirs = save(EXPERTS["mixtral"], tmp_path)
    core, prompt = engine(tmp_path, num_blocks=400, **SIZES), prompts()[1]
    (whole,) = run(core, [prompt], ROUTED)
    again = Output(whole.token_ids[:known])
    core.add_request(EngineRequest(9, [*prompt, *again.token_ids], len(prompt), ROUTED, 1))
    while core.has_work():
        for delta in core.step():
            again.token_ids += delta.token_ids
            again.routed = delta.routed or again.routed
    assert again.token_ids == whole.token_ids
    check(theirs, prompt, again)


def test_an_aborted_request_has_those_of_its_tokens(tmp_path: Path) -> None:
    """A partial rollout, which a pause has ended, without experts."""
    theirs = save(EXPERTS["mixtral"], tmp_path)
    core, prompt = engine(tmp_path, num_blocks=400, **SIZES), prompts()[1]
    core.add_request(EngineRequest(9, [*prompt], len(prompt), ROUTED, 1))
    output = Output()
    while core.has_work():
        for delta in core.step():
            output.token_ids += delta.token_ids
            output.finish = delta.finish
            output.routed = delta.routed or output.routed
        if len(output.token_ids) == 5:
            core.abort([9])
    assert output.finish == "abort" and 5 <= len(output.token_ids) < 12
    check(theirs, prompt, output)


def test_refusals(tmp_path: Path) -> None:
    """A dense model that answers without experts, and a stop string that would lose them."""
    save(CASES["llama"], tmp_path)
    (output,) = run(engine(tmp_path, **SIZES), prompts()[:1], ROUTED)
    assert output.finish == "error"
    assert output.error == (
        "routed_experts_not_supported: return_routed_experts: this model has no experts"
    )
    with pytest.raises(InvalidRequest, match="use stop_token_ids"):
        SamplingParams(stop="x", return_routed_experts=True)
