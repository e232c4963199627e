"""The NUMA nodes of a machine, and the binding of processes to them.

A core reads its own node's memory at full rate, and other nodes' memory through a shared link. So a
process with threads on one node and weights on another is slower than a bound one. `place` chooses
the node of each rank. Each rank calls `bind` before its threads start and its memory is touched.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError

SYSFS = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")

# From <linux/mempolicy.h>: prefer one node's memory, then use others. With MPOL_BIND the kernel
# would kill the process when the node is full.
MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MASK_WORDS = 16  # number of 64-bit words of a mask for all nodes that Linux supports

logger = logging.getLogger("manta.engine")


class Node(msgspec.Struct, frozen=True):
    """A NUMA node, or a rank's share of its cores.

    cores: the cores that may be used, ascending.
    memory: whether the process may allocate memory there.
    """

    number: int
    cores: tuple[int, ...]
    memory: bool = True

    def __str__(self) -> str:
        return f"node {self.number}, cores {said(self.cores)}"


def said(numbers: Sequence[int]) -> str:
    """Return ascending numbers in Linux's format, such as "0-3,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _numbers(text: str) -> list[int]:
    """Return the CPUs or NUMA nodes of a list in Linux's format, such as "0-3,8"."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def read_nodes(
    allowed: Collection[int] | None = None, sysfs: Path = SYSFS, status: Path = STATUS
) -> list[Node]:
    """Return the nodes with cores that this process may use, with only these cores.

    Cores that a container, a cpuset or taskset excludes are left out. If the system lists no nodes,
    all cores form one node.

    allowed: the cores that may be used; None = this process's affinity.
    """
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    memory: set[int] | None = None
    with contextlib.suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                memory = set(_numbers(line.partition(":")[2]))
    nodes = []
    for folder in sysfs.glob("node[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(folder.name.removeprefix("node"))
            its = set(_numbers((folder / "cpulist").read_text()))
            if own := tuple(core for core in cores if core in its):
                nodes.append(Node(number, own, memory is None or number in memory))
    return sorted(nodes, key=lambda node: node.number) or [Node(0, tuple(cores))]


def shares(nodes: Sequence[Node], ranks: int, num_threads: int = 0) -> list[Node]:
    """Divide the nodes' cores among ranks; there must not be more nodes than ranks.

    Consecutive ranks, which communicate the most, share a node. Raises ConfigError.
    """
    per_node, extra = divmod(ranks, len(nodes))
    if extra:
        raise ConfigError(
            f"numa: {ranks} ranks cannot be divided among {len(nodes)} nodes; take a multiple of "
            "them (tensor_parallel), or leave numa out",
            param="numa",
        )
    shares = []
    for node in nodes:
        count = len(node.cores) // per_node
        if not count:
            raise ConfigError(
                f"numa: node {node.number} has {len(node.cores)} cores that this process may use, "
                f"and {per_node} ranks need as many; lower tensor_parallel, or leave numa out",
                param="numa",
            )
        for at in range(per_node):
            # Remaining cores stay unused, as a rank with more cores would only wait for the others.
            shares.append(Node(node.number, node.cores[at * count : (at + 1) * count], node.memory))
    least = min(len(node.cores) for node in shares)
    if num_threads > least:
        raise ConfigError(
            f"num_threads: {num_threads} are more than the {least} cores of a node that numa: bind "
            f"gives a {'rank' if ranks > 1 else 'replica'}; lower it (of a pool: num_cpus), or use "
            "more nodes: a replica for each, or tensor_parallel",
            param="num_threads",
        )
    return shares


class Places:
    """The lock files by which this user's engines choose different NUMA nodes of a machine.

    The system releases an engine's locks when its process ends in any way.

    folder: the folder of the lock files; None = in the temporary folder. If no folder is writable,
        nodes are taken in order.
    """

    def __init__(self, folder: Path | None = None) -> None:
        user = os.getuid()
        self._folder = folder or Path(tempfile.gettempdir()) / f"manta-nodes-{user}"
        self._held: list[int] = []

    def take_nodes(self, nodes: Sequence[Node], count: int) -> list[Node]:
        """Lock and return the `count` nodes that the fewest engines use.

        The locks end with this process.
        """
        chosen: list[Node] = []
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for turn in range(1024):
                for node in nodes:
                    wanted = node not in chosen and len(chosen) < count
                    if wanted and self._lock(f"{node.number}.{turn}"):
                        chosen.append(node)
                if len(chosen) == count:
                    break
        except OSError as error:
            logger.warning("numa: which nodes other engines have is not known: %s", error)
        chosen += [node for node in nodes if node not in chosen][: count - len(chosen)]
        return sorted(chosen, key=lambda node: node.number)

    def _lock(self, name: str) -> bool:
        file = os.open(self._folder / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._held.append(file)
        return True


def place(config: EngineConfig, places: Places, nodes: Sequence[Node] | None = None) -> list[Node]:
    """Return the node of each rank on this machine; [] if numa is "none".

    nodes: the nodes to choose from; None = this machine's.
    Raises ConfigError.
    """
    if config.numa == "none":
        return []
    nodes = read_nodes() if nodes is None else nodes
    ranks = config.ranks_per_node
    if ranks < len(nodes):
        nodes = places.take_nodes(nodes, ranks)
    return shares(nodes, ranks, config.num_threads)


def set_mempolicy(mode: int, node: int) -> None:
    """Set the memory policy of this thread and of threads that it starts. Raises OSError."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"not known on {platform.machine()}")
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    bits = ctypes.c_ulong(64 * _MASK_WORDS)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), mask, bits):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def bind(
    node: Node,
    set_affinity: Callable[[int, Collection[int]], None] | None = None,
    set_memory: Callable[[int, int], None] = set_mempolicy,
) -> None:
    """Bind this thread, and all threads that it starts later, to the node's cores and memory.

    Memory comes from other nodes only when the node's is full. Raises ConfigError if the process
    may not use the cores.
    """
    try:
        (set_affinity or os.sched_setaffinity)(0, node.cores)
    except OSError as error:
        raise ConfigError(
            f"numa: this process cannot have {node}: {error}; leave numa out", param="numa"
        ) from None
    logger.info("bound to %s", node)
    if not node.memory:
        logger.warning("numa: this process may take no memory of node %d", node.number)
        return
    try:
        set_memory(MPOL_PREFERRED, node.number)
    except OSError as error:
        # Only logged: without a policy, pages are allocated on the node of the bound thread that
        # first touches them.
        logger.info("numa: memory has no policy (%s)", error)
