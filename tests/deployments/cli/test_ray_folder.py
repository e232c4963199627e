"""Where a Ray of our own keeps its sockets and logs."""

import os
from pathlib import Path

import pytest

from deployments.cli.serving import ray_folder as module
from deployments.cli.serving.ray_folder import ray_folder
from engine.errors import ConfigError


def test_rays_default_is_kept_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools look for Ray's logs in /tmp/ray."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/var/tmp")
    assert ray_folder() == Path("/var/tmp/ray")


def test_a_long_tmpdir_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends with "AF_UNIX path length cannot exceed 107 bytes"."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", f"/var/tmp/{'x' * 40}")
    assert ray_folder([Path("/tmp")]) == Path(f"/tmp/ray-{os.getuid()}")


def test_a_folder_of_another_user_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp/ray of another user's Ray that others may not write stopped the start."""
    monkeypatch.setattr(module, "_LONGEST", 200)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    taken = tmp_path / "ray"
    monkeypatch.setattr(
        module, "why_unusable", lambda folder: "no permission to write" if folder == taken else ""
    )
    assert ray_folder([tmp_path]) == tmp_path / f"ray-{os.getuid()}"
    (tmp_path / f"ray-{os.getuid()}").symlink_to("/etc")  # as another user may have set a trap
    with pytest.raises(ConfigError, match="belongs to another user"):
        ray_folder([tmp_path])
