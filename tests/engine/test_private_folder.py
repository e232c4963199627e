"""Folders for sockets, whatever TMPDIR says."""

import tempfile
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError
from engine.private_folder import private_folder
from engine.process.fake import PREFIX as FAKE
from engine.process.supervisor import EngineProcess


def test_a_long_temporary_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`manta serve` ended with exit 2 wherever TMPDIR had more than five characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = private_folder(26)
    try:
        assert len(str(folder)) <= 26 and folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()


def test_the_choice_of_the_user_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """/var/tmp has nine characters, and a name that is shorter makes room for them."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    folder = private_folder(26)
    folder.rmdir()
    assert folder.parent == Path("/var/tmp")


def test_each_folder_is_told_with_its_fault(tmp_path: Path) -> None:
    """An error that only says "set TMPDIR" sends one in circles."""
    with pytest.raises(ConfigError) as raised:
        private_folder(26, parents=[tmp_path / "missing", tmp_path])
    assert f"{tmp_path}/missing is no folder; {tmp_path} is too long by" in raised.value.message
    assert "Set TMPDIR" in raised.value.message


def test_an_engine_starts_below_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own sockets have the same bound as haproxy's."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    process = EngineProcess(EngineConfig(model=FAKE), lambda code: None)
    process.kill()
    process.hide()
