"""Manta's packages beside files of the user's, and of other distributions, with their names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments import packages
from deployments.cli.serving.joining import job_config
from deployments.packages import PACKAGES, SOURCE, why_mixed


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "deployments"])
@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_folder_in_pythonpath_with_our_names(tmp_path: Path, name: str, kind: str) -> None:
    """`engine.py` of the user's, in a folder of PYTHONPATH, was imported in place of the engine."""
    file = tmp_path / (f"{name}.py" if kind == "file" else f"{name}/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise RuntimeError('the wrong one')")
    code = "import deployments.cli.main, engine.errors, kernels; print(engine.errors.__file__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(SOURCE / "engine/errors.py"), done.stderr


def test_workers_do_not_import_from_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts the driver's folder first on its workers' path, and `engine.py` there stopped the
    start. This is the condition by which Ray leaves it out."""
    import inspect

    import ray._private.worker as worker

    job = job_config([str(SOURCE)])
    assert job._py_driver_sys_path == [str(SOURCE)]
    assert job._client_job
    assert "if not job_config._client_job and not" in inspect.getsource(worker.connect)


def _distribution(folder: Path, name: str, *files: str) -> None:
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_a_distribution_with_our_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face's `kernels` and ours overwrite each other's files without a word."""
    ours = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of an empty file
    monkeypatch.setattr(packages, "SOURCE", tmp_path)
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    _distribution(tmp_path, "manta-serve")
    record = tmp_path / "manta_serve-1.0.dist-info/RECORD"
    record.write_text("".join(f"{name}/__init__.py,{ours},0\n" for name in PACKAGES))
    path = [str(tmp_path)]
    assert why_mixed(path) == ""
    _distribution(tmp_path, "kernels", "kernels/__init__.py", "kernels/layer.py")
    assert "'kernels' and that of kernels 1.0 lie in the same folder" in why_mixed(path)
    assert "uninstall kernels and install manta-serve again" in why_mixed(path)
    (tmp_path / "kernels-1.0.dist-info/RECORD").unlink()
    _distribution(tmp_path, "game-engine", "engine/__init__.py")
    assert why_mixed(path) == ""  # ours is the later one, and whole
    (tmp_path / "engine/__init__.py").write_text("theirs")
    assert "'engine' and that of game-engine 1.0" in why_mixed(path)


def test_a_package_elsewhere_is_no_fault(tmp_path: Path) -> None:
    """Manta out of a source folder lives beside Hugging Face's package."""
    _distribution(tmp_path, "kernels", "kernels/__init__.py")
    assert why_mixed([str(tmp_path)]) == ""
