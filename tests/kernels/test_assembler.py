"""Which of Triton's assemblers is chosen, without a device."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from kernels.launch import assembler  # noqa: E402


@pytest.mark.parametrize(
    ("own", "newer", "set_to", "want"),
    [
        ("12.8", "12.9", None, "/newer"),
        ("12.9", "12.9", None, None),
        ("12.8", "12.8", None, None),
        ("12.8", "13.0", "/mine", "/mine"),
    ],
)
def test_the_right_one_is_taken(
    own: str, newer: str, set_to: str | None, want: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: descriptors of registers that nothing has written, by ptxas 12.8; or somebody's choice
    that is not kept."""
    tools = SimpleNamespace(
        ptxas=SimpleNamespace(path="/own", version=own),
        ptxas_blackwell=SimpleNamespace(path="/newer", version=newer),
    )
    monkeypatch.setattr(knobs, "nvidia", tools)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # restored behind the test
    del os.environ["TRITON_PTXAS_PATH"]
    if set_to:
        monkeypatch.setenv("TRITON_PTXAS_PATH", set_to)
    assembler.choose_assembler()
    assert os.environ.get("TRITON_PTXAS_PATH") == want
