"""FirstStart: compiles kernels in parallel when an engine starts for the first time on a machine.

A later start finds its kernels in Triton's cache, and would only lose time by searching for missing
ones. A finished first start leaves an empty file in that cache, whose name is a digest of
everything that kernels depend on. The digest does not include the kind of device: kernels for
another kind are compiled one by one.
"""

import logging
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

import msgspec

from engine.config.engine_config import EngineConfig
from kernels.launch.cache import cache_folder
from kernels.launch.compiling import Compilers

_ROOT = Path(__file__).resolve().parents[2]
# exists on machines with CUDA devices; allows a check without importing torch
_DRIVER = Path("/dev/nvidiactl")

logger = logging.getLogger("manta.engine")


class FirstStart:
    """A context manager that runs kernel compilers during an engine's first start.

    compilers: the compilers, closed when the context ends; None for later starts or without a CUDA
        device.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.compilers: Compilers | None = None
        # Not with several ranks: launches that only record kernels cannot leave out communication.
        if config.device == "cpu" or config.num_ranks > 1 or not _DRIVER.exists():
            return
        try:
            self._mark = cache_folder() / f"manta-started-{_digest(config)}"
            if not self._mark.exists():
                self.compilers = Compilers()
        except (OSError, ValueError) as error:
            logger.warning("kernels are compiled one by one: %s", error)

    def __enter__(self) -> "FirstStart":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        compilers = self.compilers
        if compilers is None:
            return
        compilers.close()
        if error is not None or not compilers.jobs:
            return
        logger.info(
            "%d kernels compiled ahead, %.1f s waited for them", compilers.jobs, compilers.waited
        )
        if not compilers.failed:
            try:
                self._mark.touch()
            except OSError as problem:
                logger.warning("each start will look for its kernels: %s", problem)


def _digest(config: EngineConfig) -> str:
    """Return a digest of configuration, model and code.

    Raises OSError if the model has no config.json.
    """
    state = blake2b(msgspec.json.encode(config), digest_size=16)
    state.update((Path(config.model) / "config.json").read_bytes())
    for package in ("torch", "triton"):
        state.update(f"\0{package} {version(package)}".encode())
    for folder in ("kernels", "engine"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            state.update(path.read_bytes())
    return state.hexdigest()
