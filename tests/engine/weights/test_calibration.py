"""Matrices in 4 bits that lose little: the search for scales, feedback of errors, and the layers
that a calibration text runs through."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config.engine_config import EngineConfig
from engine.config.model_config import ModelConfig
from engine.conversion import convert_rounded
from engine.errors import ConfigError
from engine.rounding.calibration import Inputs, calibrate
from engine.rounding.groups import MOST
from engine.rounding.integers import TOP, Codes, Feedback, fed_back, searched
from engine.weights.index import read_index
from tests.parity.cases import ALIBI, CASES, EXPERTS, WINDOWS, save

ALL = {**CASES, **WINDOWS, **ALIBI, **EXPERTS}


def nearest(weight: Tensor, group: int) -> Codes:
    """Return codes rounded to the ends of each group, as before there was a search for scales."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scale = ((high - low) / TOP).half()
    zeros = (-low / scale.float()).round()
    codes = (groups / scale.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return Codes(codes.clamp(0, TOP).flatten(1).to(torch.uint8), scale, zeros.to(torch.uint8))


def off(weight: Tensor, codes: Codes, x: Tensor) -> float:
    return float(((weight - codes.dense()) @ x.t()).norm() / (weight @ x.t()).norm())


def test_each_step_loses_less() -> None:
    """Bug: a scale that is not the one its codes were rounded with, errors that are fed to columns
    which are rounded already, codes left in the order of the feedback."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(96, 256, generator=generator) * 0.02
    weight[:, 7] *= 20
    mixed = torch.randn(256, 256, generator=generator) / 16
    loud = torch.rand(256, generator=generator) ** 4 * 10 + 0.1
    x = torch.randn(600, 256, generator=generator) @ mixed * loud
    other = torch.randn(200, 256, generator=generator) @ mixed * loud
    feedback = Feedback.of(x.t() @ x, len(x))
    assert feedback is not None
    plain = off(weight, nearest(weight, 32), other)
    best = off(weight, searched(weight, 32), other)
    weighed = off(weight, searched(weight, 32, feedback.importance), other)
    codes = fed_back(weight, 32, feedback)
    fed = off(weight, codes, other)
    # feedback alone, without the descent after it, gets 0.84
    assert best < plain and weighed < best and fed < 0.83 * weighed
    assert codes.codes.max() <= TOP and codes.dense().isfinite().all()


def test_a_short_text_does_not_decide_alone() -> None:
    """Bug: chance of a few tokens is taken for how inputs go together, and other texts lose."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(32, 128, generator=generator)
    mixed = torch.randn(128, 128, generator=generator)
    x, other = torch.randn(2, 160, 128, generator=generator) @ mixed
    short, long = Feedback.of(x.t() @ x, 160), Feedback.of(x.t() @ x, 10**9)
    assert short is not None and long is not None
    losses = [off(weight, fed_back(weight, 32, feedback), other) for feedback in (short, long)]
    assert losses[0] < 0.97 * losses[1]


def test_errors_before_a_matrix_are_made_up_for() -> None:
    """Bug: the sums are taken the wrong way round, or the residual's part has the wrong sign, and a
    matrix adds to errors of those before it."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(64, 128, generator=generator)
    mixed = torch.randn(128, 128, generator=generator) / 11
    exact = torch.randn(2, 2000, 128, generator=generator) @ mixed
    rounded = exact @ (torch.eye(128) + 0.02 * torch.randn(128, 128, generator=generator))
    lost = exact @ torch.randn(128, 64, generator=generator) * 0.2
    (x, other), (want, want_other) = rounded, exact
    sums = x.t() @ x, len(x), x.t() @ (want - x), x.t() @ lost[0]

    def loss(feedback: Feedback | None, owed: float) -> float:
        assert feedback is not None
        target = want_other @ weight.t() + owed * lost[1]
        got = other @ fed_back(weight, 32, feedback).dense().t()
        return float((target - got).norm() / target.norm())

    plain = Feedback.of(*sums[:2])
    assert loss(Feedback.of(*sums[:3]), 0) < 0.6 * loss(plain, 0)
    assert loss(Feedback.of(*sums), 1) < 0.6 * loss(Feedback.of(*sums[:3]), 1)


def test_some_groups_are_wide(tmp_path: Path) -> None:
    """Bug: more bits than MOST, parts of one matrix in unequal groups, a group size in config.json
    that is not the tensors'."""
    save(ALL["llama"], tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), quantization="int4")
    convert_rounded(config, tmp_path / "int4")
    stored = read_index(tmp_path / "int4")
    quantized = ModelConfig.from_folder(tmp_path / "int4").quantized
    assert quantized is not None
    groups, bits, weights = {}, 0, 0
    for name, codes in stored.items():
        if name.endswith(".weight_packed") and not name.startswith("lm_head"):
            stem = name.removesuffix(".weight_packed")
            scale = stored[f"{stem}.weight_scale"]
            groups[stem] = codes.shape[1] * 8 // scale.shape[1]
            scheme = quantized.scheme(stem)
            assert scheme is not None and scheme.group == groups[stem]
            weights += codes.shape[0] * codes.shape[1] * 8
            zeros = stored[f"{stem}.weight_zero_point"]
            bits += 8 * (codes.num_bytes + scale.num_bytes + zeros.num_bytes)
    assert set(groups.values()) == {32, 64} and 4.5 < bits / weights <= MOST
    for number in range(ModelConfig.from_folder(tmp_path / "model").num_layers):
        at = f"model.layers.{number}"
        assert groups[f"{at}.mlp.gate_proj"] == groups[f"{at}.mlp.up_proj"]
        kinds = {groups[f"{at}.self_attn.{part}_proj"] for part in "qkv"}
        assert len(kinds) == 1


def test_groups_without_numbers() -> None:
    """Bug: a group of zeros, or an input that no token has, is divided by zero."""
    weight = torch.zeros(8, 64)
    weight[0, 0] = 1.0
    assert torch.equal(searched(weight, 32).dense()[1:], weight[1:])
    assert Feedback.of(torch.zeros(64, 64), 0) is None
    hessian = torch.zeros(64, 64)
    hessian[3, 3] = 2.0
    feedback = Feedback.of(hessian, 1)
    assert feedback is not None and fed_back(weight, 32, feedback).dense().isfinite().all()


@pytest.mark.parametrize("architecture", ["llama", "gemma 2", "gpt-2", next(iter(EXPERTS))])
def test_layers_are_reached_in_order(architecture: str, tmp_path: Path) -> None:
    """Bug: a matrix whose inputs nobody saw, a layer that reads what the layer before it computed
    with weights that are not rounded, weights that are left in memory."""
    save(ALL[architecture], tmp_path / "model")
    config = ModelConfig.from_folder(tmp_path / "model")
    pieces = [torch.randint(5, 60, (24,), generator=torch.Generator().manual_seed(2))] * 3

    def inputs(replaced: float) -> dict[tuple[str, ...], Tensor]:
        seen: dict[tuple[str, ...], Tensor] = {}

        def take(of_layer: Inputs) -> dict[str, Tensor]:
            assert of_layer.matrices not in seen
            seen[of_layer.matrices] = of_layer.hessian
            shapes = {name: stored.shape for name, stored in read_index(tmp_path / "model").items()}
            return {
                name: torch.full(shapes[f"{name}.weight"], replaced)
                for name in of_layer.matrices
                if replaced and f"{name}.weight" in shapes and architecture != "gpt-2"
            }

        calibrate(config, tmp_path / "model", pieces, take)
        return seen

    seen = inputs(0.0)
    layers = {name.split(".layers.")[-1].split(".")[0] for names in seen for name in names}
    assert architecture == "gpt-2" or len(layers) == config.num_layers
    for hessian in seen.values():
        assert torch.equal(hessian, hessian.t()) and hessian.trace() > 0
    if architecture != "llama":
        return
    changed = inputs(0.01)
    first, *_, last = seen
    assert torch.equal(seen[first], changed[first])
    assert not torch.allclose(seen[last], changed[last])


def test_refusals(tmp_path: Path) -> None:
    """Bug: a text is read and has no effect, or a few words of it decide over all weights."""
    save(ALL["llama"], tmp_path / "llama")
    text = tmp_path / "text.txt"
    for name, match in (("fp8", "--calibrate: quantization 'fp8'"), ("int4", "cannot be read")):
        config = EngineConfig(model=str(tmp_path / "llama"), quantization=name)
        with pytest.raises(ConfigError, match=match):
            convert_rounded(config, tmp_path / "out", calibration=text)
    assert not (tmp_path / "out").exists()
