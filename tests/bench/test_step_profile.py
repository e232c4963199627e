"""The arithmetic of bench.step_profile: kernels onto a time line, and floors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import step_profile
from bench.step_profile import (
    BOUNDARY,
    Kernel,
    Mixture,
    Step,
    floors_us,
    kind_of,
    mixture_floors_us,
    products_floor_us,
    report,
    time_line,
)


def test_overlap_belongs_to_the_earlier_kernel() -> None:
    """A kernel that waits inside its successor's launch is counted twice, or gaps are lost."""
    kernels = [
        Kernel(BOUNDARY, 0, 2),
        Kernel("_gemv_kernel", 2, 10),
        Kernel("_decode_kernel", 8, 14),  # resident while gemv ends
        Kernel("_rms_norm_kernel", 17, 20),  # three microseconds of nothing before it
        Kernel(BOUNDARY, 20, 22),
        Kernel("_gemv_kernel", 22, 30),  # beyond the last boundary: not a whole step
    ]
    line = time_line(kernels)
    assert line.steps == 1 and line.step_us == 20
    assert (line.idle_us, line.between_us) == (3, 0)
    assert line.kinds == {
        "assembly": 2, "products": 8, "decode attention": 4, "norm": 3
    }  # fmt: skip
    assert sum(line.kinds.values()) + line.idle_us == line.step_us


def test_means_over_steps() -> None:
    """Sums that pass for the times of one step."""
    kernels = [Kernel(BOUNDARY, t, t + 1) for t in (0, 10, 30)] + [Kernel("nvjet_x", 1, 10)]
    line = time_line(kernels)
    assert (line.steps, line.step_us, line.idle_us) == (2, 15, 9.5)
    assert line.names["nvjet_x"] == (4.5, 0.5)
    assert line.between_us == 9.5  # all of it is before the last boundary


def test_gaps_between_steps_and_inside_them() -> None:
    """A device that waits for the host looks like one that waits for its next kernel."""
    kernels = [
        Kernel(BOUNDARY, 0, 1),
        Kernel("nvjet_x", 2, 8),  # a gap inside
        Kernel("Memcpy DtoH (Device -> Pinned)", 9, 10),  # from here on, between
        Kernel("Memcpy HtoD (Pinned -> Device)", 14, 15),
        Kernel(BOUNDARY, 17, 18),
    ]
    line = time_line(kernels)
    assert (line.idle_us, line.between_us) == (8, 7)


def test_no_whole_step_is_an_error() -> None:
    """A division by zero, or a table of nothing, where the profiler saw no kernels."""
    with pytest.raises(ValueError, match="1 starts of a step"):
        time_line([Kernel(BOUNDARY, 0, 1), Kernel("_gemv_kernel", 1, 2)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("_few_rows_kernel", "products"),
        ("_best_of_block_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
        ("_merge_kernel", "decode attention"),
        ("_prefill_kernel", "prefill attention"),
        ("_grouped_up_kernel", "experts up"),
        ("_few_packed_down_kernel", "experts down"),
        ("_packed_sum_kernel", "other"),
        ("_sum_kernel", "expert sum"),
        ("nvjet_sm90_tss_64x8_64x16_2x4_h_bz_TNT", "router product"),
        ("nvjet_sm90_tst_64x64_64x13_2x1_v_badd_TNT", "products"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    """The library's kernels, whose names change with its version, end up in "sampling"."""
    assert kind_of(name) == kind


def test_floor_of_products() -> None:
    """Few rows wait for the weights, many for arithmetic; the head sees only what samples."""
    matrices = [("layers.0.qkv", (1000, 1000), 2), ("head", (1000, 1000), 2)]
    few = products_floor_us(matrices, 1, 1, bandwidth=1e12, rate=1e15)
    assert few == pytest.approx(2 * 2.0)
    many = products_floor_us(matrices, 10_000, 1, bandwidth=1e12, rate=1e15)
    assert many == pytest.approx(20.0 + 2.0)


CONFIG: Any = SimpleNamespace(
    num_heads=4, num_kv_heads=2, head_dim=10, num_layers=3, hidden_size=40, intermediate_size=100,
    vocab_size=1000,
)  # fmt: skip


def test_floors_of_the_small_kernels() -> None:
    """A norm that is fused counted as bytes, a prompt's attention as if it read all keys, a floor
    of kernels that did not run."""
    names = ["_rms_norm_kernel", "_rope_kv_write_kernel", "_decode_kernel", "_prefill_kernel"]
    kernels = [Kernel(BOUNDARY, 0, 1), *(Kernel(name, 1, 2) for name in [*names, names[0]])]
    line = time_line([*kernels, Kernel(BOUNDARY, 9, 10)])
    step = Step(tokens=20, samples=12, prompt=9, keys=1600, block_size=16, element=2)
    floors = floors_us(CONFIG, step, line, bandwidth=1e6, rate=1e9)
    assert floors == pytest.approx({
        "norm": 2 * 20 * 40 * 2 * 2,
        "rope and KV write": 20 * 80 * 2 * 2,
        "decode attention": 1600 * 3 * 2 * 20 * 2,
        "prefill attention": 3 * 4 * 45 * 40 / 1e3,
        "assembly": 100 * 8 + 20 * 20,
    })  # fmt: skip


def test_floors_of_experts() -> None:
    """All experts counted where one token meets two of eight; up and down alike; a rank's few
    experts taken for all; many tokens bounded by bytes."""
    names = ["_grouped_up_kernel", "_grouped_down_kernel", "_topk_kernel", "_sum_kernel"]
    ends = [Kernel(BOUNDARY, 0, 1), Kernel(BOUNDARY, 9, 10)]
    line = time_line([*ends, *(Kernel(name, 1, 2) for name in names)])
    mixture = Mixture(here=4, choices=8, chosen=2, hidden=10, size=5, up_rows=10, num_bytes=1200)
    step = Step(tokens=1, samples=1, prompt=0, keys=1, block_size=16, element=2)
    floors = mixture_floors_us([mixture] * 3, step, line, bandwidth=1e6, rate=1e15)
    assert floors == pytest.approx({
        "experts up": 3 * 800 / 4,
        "experts down": 3 * 400 / 4,
        "expert choice": 3 * (4 * 8 + 8 * 2),
        "expert sum": 3 * (2 + 2) * 10 * 2,
    })  # fmt: skip
    many = Step(tokens=1000, samples=1, prompt=0, keys=1, block_size=16, element=2)
    floors = mixture_floors_us([mixture], many, line, bandwidth=1e15, rate=1e6)
    assert floors["experts up"] == pytest.approx(1000 * 2 * 10 * 10)
    assert floors["experts down"] == pytest.approx(1000 * 2 * 5 * 10)


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that only a GPU machine finds out cannot be made; a floor beside the wrong kind."""
    names = ["_gemv_kernel", "_decode_kernel", "_best_of_row_kernel", "Memcpy DtoH"]
    kernels = [Kernel(name, 10 * i, 10 * i + 10) for i, name in enumerate([BOUNDARY, *names])]
    kernels.append(Kernel(BOUNDARY, 50, 60))
    monkeypatch.setattr(step_profile, "measure", lambda core, running, chunk: (kernels, 1600.0))
    weight = torch.empty(1000, 40, dtype=torch.bfloat16)
    linear = SimpleNamespace(state=SimpleNamespace(weight=weight))
    model = SimpleNamespace(
        config=CONFIG, linears=lambda: [linear], head=None, embedding=weight, layers=[]
    )
    cache = torch.empty(1, 2, 16, 10, dtype=torch.bfloat16)
    kv = SimpleNamespace(layers=[(cache, cache)] * 3, block_size=16)
    core: Any = SimpleNamespace(_runner=SimpleNamespace(model=model, kv=kv))
    rows = {row["case"]: row for row in report(core, "m", bandwidth=1e12, rate=1e15)}
    assert rows["m/decode-256/sampling"]["floor_us"] == 0.5  # 256 rows of 1,000 logits
    assert rows["m/decode-1/decode-attention"]["of_floor"] == 0.038
    assert rows["m/mixed/products"]["floor_us"] == 0.2 and "floor_us" not in rows["m/mixed/other"]
    assert rows["m/mixed"]["us"] == 50 and "_gemv_kernel" in capsys.readouterr().out
