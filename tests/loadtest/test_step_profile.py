"""The arithmetic of loadtest.step_profile: kernels onto a time line, and floors."""

import pytest

from loadtest.step_profile import BOUNDARY, Kernel, kind_of, products_floor_us, time_line


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
        "assembly and sampling": 2, "products": 8, "decode attention": 4, "norm": 3
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
        ("_best_of_block_kernel", "assembly and sampling"),
        ("_merge_kernel", "decode attention"),
        ("_prefill_kernel", "prefill attention"),
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
