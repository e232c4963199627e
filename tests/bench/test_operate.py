"""What `python -m bench.operate` says before it measures."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from bench.operate import __main__ as operate


@pytest.mark.parametrize("cases", [["add-model"], []])
def test_what_is_missing_is_said_first(
    cases: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with torch alone: the server's process dies, and its traceback is all that is
    told."""
    assert operate.missing() == []
    there = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name in ("ruamel.yaml", "ray"):
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    chosen = ["--cases", *cases] if cases else []
    monkeypatch.setattr(sys, "argv", ["bench.operate", *chosen, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"add-model.* lacks ray, ruamel\.yaml: install"):
        operate.main()
    assert not list(tmp_path.iterdir())
