"""Which of Triton's assemblers is chosen, without a device."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from triton import knobs

from kernels.launch import assembler


@pytest.mark.parametrize(
    ("own", "newer", "folder", "changes"),
    [
        ("12.8", "12.9", "/wheel", True),
        ("12.9", "12.9", "/wheel", False),
        ("12.8", "12.8", "/wheel", False),
        ("12.8", "13.0", "/mine", False),
    ],
)
def test_the_right_one_is_taken(
    own: str, newer: str, folder: str, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: descriptors of registers that nothing has written, by ptxas 12.8; or somebody's choice
    that is not kept."""
    first = SimpleNamespace(path=f"{folder}/ptxas", version=own)
    second = SimpleNamespace(path="/wheel/ptxas-blackwell", version=newer)
    tools = SimpleNamespace(ptxas=first, ptxas_blackwell=second)
    monkeypatch.setattr(knobs, "nvidia", tools)
    assembler.choose_assembler()
    assert tools.ptxas == (second.path if changes else first)
