"""The search for the fastest of cuBLASLt's algorithms, for the matmuls of kernels/gemm/cublaslt.py.

At some numbers of rows, the landmarks, the algorithms of cuBLASLt's heuristic and a list of other
tiles are timed. At other numbers of rows, only the fastest algorithms of the two nearest landmarks
are timed, because the search is a part of an engine's start and must take only seconds.
"""

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.gemm import cublaslt_cache
from kernels.gemm.cublaslt import (
    TYPES,
    Algorithm,
    CublasLt,
    CublasLtError,
    Key,
    Matmul,
    TunedMatmul,
    key_of,
    library,
    tuned_matmuls,
)

_FEWEST = 16  # minimum rows; with fewer, reading the weights takes most of any algorithm's time
_LANDMARKS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_COLD = 96 << 20  # bytes of weights per timing, so that none is in the L2 cache
# Device clock cycles per timed launch that the device sleeps first, while the host queues launches;
# and the maximum, for slow hosts.
_QUEUE_CYCLES = 20_000.0
_LONGEST_QUEUE = 100_000.0
_CLEARLY = 0.98  # an algorithm is used if it takes less than this share of cuBLASLt's choice
_BEST = 4  # candidates that are timed again after the first round
_LED = 2  # number of a landmark's fastest algorithms that are timed at other numbers of rows
# `_load` launches matmuls of increasing numbers of rows: (rows below this, increment)
_LOAD_STEPS = ((2048, 8), (1 << 62, 128))
_LARGE = 512 << 20  # bytes of a weight (an LM head) from which other tiles make no difference
_CLUSTER_1X1, _CLUSTER_2X1, _CLUSTER_4X1, _CLUSTER_1X2 = 2, 3, 4, 5  # cublasLt.h

Variant = tuple[int, int, int]  # tile, number of splits of k, cluster; see Matmul.variant

# A small set of variants that is nearly as fast as the best of all tiles, splits and clusters of
# cuBLASLt. Timed at the sizes of llama-8b and qwen3-0.6b with 64 to 1,024 rows on an H200. Comments
# give a tile's outputs x rows; a cluster has multiprocessors along these two dimensions.
_VARIANTS: tuple[Variant, ...] = (
    (59, 1, _CLUSTER_4X1),  # 24x64
    (134, 1, _CLUSTER_1X2),  # 80x64
    (134, 4, _CLUSTER_1X1),
    (18, 1, _CLUSTER_1X1),  # 128x64
    (18, 1, _CLUSTER_2X1),
    (183, 1, _CLUSTER_1X1),  # 144x64
    (220, 1, _CLUSTER_1X2),  # 224x64
    (226, 1, _CLUSTER_1X1),  # 240x64
    (28, 1, _CLUSTER_1X1),  # 96x128
    (165, 1, _CLUSTER_1X2),  # 112x128
    (171, 1, _CLUSTER_4X1),  # 120x128
    (189, 1, _CLUSTER_1X2),  # 152x128
    (30, 1, _CLUSTER_2X1),  # 160x128
    (201, 1, _CLUSTER_1X2),  # 176x128
    (166, 1, _CLUSTER_2X1),  # 112x192
)

# A part of the cache file's name, so that another list of candidates is searched anew.
_SEARCH = hashlib.sha256(repr((_VARIANTS, _LANDMARKS, _FEWEST)).encode()).hexdigest()[:8]

_Found = dict[int, TunedMatmul | None]  # rows -> None: the library's own choice

_searched: set[Key] = set()
_loaded: set[Key] = set()


class _AlgorithmSearch:
    """The search for the fastest algorithm for one number of rows.

    weights: different weights of one shape. add: whether the product is added to the output.
    """

    queue_cycles = _QUEUE_CYCLES

    def __init__(self, weights: Sequence[Tensor], rows: int, add: bool) -> None:
        weight = weights[0]
        n, k = weight.shape
        lib = library(weight.device)
        assert lib is not None
        self.weights = weights
        self.add = add
        # Use random numbers instead of zeros, as operands affect the device's power and clock.
        self.x = torch.randn((rows, k), dtype=weight.dtype, device=weight.device)
        self.y = torch.zeros((rows, n), dtype=weight.dtype, device=weight.device)
        self.matmul = Matmul(lib, rows, weight, add)
        self.timed: list[tuple[float, Algorithm]] = []  # best first

    def _run(self, algorithm: Algorithm | None, weight: Tensor) -> None:
        """Launch the matmul with this algorithm; None: through torch, with cuBLASLt's choice."""
        if algorithm is not None:
            self.matmul.run(algorithm, self.x, weight, self.y)
        else:
            _by_library(self.x, weight, self.y, self.add)

    def runs(self, algorithm: Algorithm | None) -> bool:
        """Whether cuBLASLt can run this algorithm; launches the matmul once.

        The launch also loads the machine code, which takes much longer than a timed launch.
        """
        try:
            self._run(algorithm, self.weights[0])
        except CublasLtError:
            return False
        return True

    def milliseconds(self, algorithm: Algorithm | None) -> float:
        """Return the total milliseconds of one matmul with each of the weights.

        The device sleeps until all launches are queued; otherwise the host's speed is measured.
        """
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.queue_cycles * len(self.weights)))
            begin.record()
            for weight in self.weights:
                self._run(algorithm, weight)
            end.record()
            too_early = begin.query() and self.queue_cycles < _LONGEST_QUEUE
            end.synchronize()
            if not too_early:
                return begin.elapsed_time(end)
            _AlgorithmSearch.queue_cycles *= 1.5  # the host is slow: keep this for later searches

    def try_offered(self) -> None:
        for algorithm in filter(self.runs, self.matmul.offered()):
            self.timed.append((self.milliseconds(algorithm), algorithm))
        self.timed.sort(key=lambda item: item[0])

    def try_variants(self) -> None:
        """Time the variants (`_VARIANTS`) of the fastest algorithm so far."""
        if not self.timed:
            return
        base = self.timed[0][1]
        for variant in _VARIANTS:
            algorithm = self.matmul.variant(base, *variant)
            if algorithm is not None and self.runs(algorithm):
                self.timed.append((self.milliseconds(algorithm), algorithm))
        self.timed.sort(key=lambda item: item[0])

    def try_everything(self) -> None:
        self.try_offered()
        if self.weights[0].nbytes <= _LARGE:
            self.try_variants()

    def leaders(self, count: int) -> list[Algorithm]:
        return [algorithm for _, algorithm in self.timed[:count]]

    def winner(self, among: Sequence[Algorithm]) -> Algorithm | None:
        """Return the fastest of the algorithms `among`, or None if cuBLASLt's choice is as fast.

        All are timed in turns.
        """
        among = [algorithm for algorithm in among if self.runs(algorithm)]
        if not among or not self.runs(None):
            return None
        rounds = [[self.milliseconds(a) for a in (None, *among)] for _ in range(2)]
        usual, *ours = (min(times) for times in zip(*rounds, strict=True))
        if min(ours) >= _CLEARLY * usual:
            return None
        return among[ours.index(min(ours))]


def tune(weights: Sequence[Tensor], sizes: Sequence[int], add: bool) -> None:
    """Find the fastest cuBLASLt algorithm of a linear layer for each batch size.

    The choices are used by `cublaslt.linear`, or with `add` by `cublaslt.linear_add_`.

    weights: several weights of one shape, so that none is in the L2 cache when it is timed.
    sizes: numbers of rows of x.

    A landmark takes about 15 ms on an H200, another size 5 ms. Nothing is timed if the cache file
    (kernels/gemm/cublaslt_cache.py) has the algorithms of all sizes.
    """
    weight = weights[0]
    lib = library(weight.device)
    if lib is None or weight.dtype not in TYPES:
        return
    _load(weight, max(sizes, default=0), add)
    keys = {rows: key_of(rows, weight, add) for rows in sizes if rows >= _FEWEST}
    missing = sorted(rows for rows, key in keys.items() if key not in _searched)
    if not missing:
        return
    path = cublaslt_cache.file_for(_device_name(weight.device), lib.version, _SEARCH)
    algorithms = _kept(path, lib, weight, missing, add)
    if algorithms is None:
        algorithms = _search(weights, missing, add)
        texts = {_name(rows, weight, add): _text(tuned) for rows, tuned in algorithms.items()}
        cublaslt_cache.add_entries(path, texts)
    for rows, tuned in algorithms.items():
        _searched.add(keys[rows])
        if tuned is not None:
            tuned_matmuls[keys[rows]] = tuned


def _load(weight: Tensor, most: int, add: bool) -> None:
    """Load the kernels that cuBLASLt itself chooses for up to `most` rows, once per process.

    For untuned sizes cuBLASLt chooses a kernel by the number of rows. A kernel's first launch loads
    its machine code, for which CUDA waits until the device is idle. The first step with such a
    number of rows would take 40 ms longer and delay all requests.
    """
    key = key_of(most, weight, add)
    if key in _loaded:
        return
    _loaded.add(key)
    n, k = weight.shape
    x, y = weight.new_zeros((most, k)), weight.new_zeros((most, n))
    rows = _FEWEST
    while rows <= most:
        _by_library(x[:rows], weight, y[:rows], add)
        rows += next(step for below, step in _LOAD_STEPS if rows < below)


def _by_library(x: Tensor, weight: Tensor, y: Tensor, add: bool) -> None:
    if add:
        y.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=y)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _name(rows: int, weight: Tensor, add: bool) -> str:
    n, k = weight.shape
    return f"{rows}x{n}x{k} {weight.dtype}{' add' if add else ''}"


def _text(tuned: TunedMatmul | None) -> str | None:
    return None if tuned is None else bytes(tuned.algorithm).hex()


def _kept(
    path: Path, lib: CublasLt, weight: Tensor, sizes: Sequence[int], add: bool
) -> _Found | None:
    """Return the cached algorithms of all `sizes`, or None if any is missing.

    After None the caller searches all sizes, because other sizes need the landmarks' results.
    """
    texts = cublaslt_cache.read(path)
    algorithms: _Found = {}
    for rows in sizes:
        name = _name(rows, weight, add)
        if name not in texts:
            return None
        text = texts[name]
        if text is None:
            algorithms[rows] = None
            continue
        data = bytes.fromhex(text)
        if len(data) != ctypes.sizeof(Algorithm):
            return None
        matmul = Matmul(lib, rows, weight, add)
        algorithm = matmul.fitted(Algorithm.from_buffer_copy(data))
        if algorithm is None:
            return None
        algorithms[rows] = TunedMatmul(matmul, algorithm)
    return algorithms


def _search(weights: Sequence[Tensor], missing: Sequence[int], add: bool) -> _Found:
    weight = weights[0]
    algorithms: _Found = {}
    weights = weights[: max(2, -(-_COLD // weight.nbytes))]
    leaders: dict[int, list[Algorithm]] = {}  # landmark -> its fastest algorithms
    for rows in sorted(missing, key=lambda rows: (rows not in _LANDMARKS, rows)):
        search = _AlgorithmSearch(weights, rows, add)
        if rows in _LANDMARKS:
            search.try_everything()
            leaders[rows] = search.leaders(_LED)
            among = search.leaders(_BEST)
        elif rows > _LANDMARKS[-1]:
            search.try_offered()
            among = search.leaders(_LED)
        else:
            below = [mark for mark in leaders if mark < rows][-1:]
            above = [mark for mark in leaders if mark > rows][:1]
            led = [algorithm for mark in below + above for algorithm in leaders[mark]]
            among = [fitted for a in led if (fitted := search.matmul.fitted(a)) is not None]
        algorithm = search.winner(among)
        algorithms[rows] = None if algorithm is None else TunedMatmul(search.matmul, algorithm)
    return algorithms
