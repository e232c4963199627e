"""The order of the search for products; the products themselves are tested on a GPU."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton

from kernels.gemm import cublaslt, cublaslt_cache, cublaslt_tune
from kernels.gemm.cublaslt import Algorithm, CublasLtError, key_of, tuned_matmuls


class FakeProduct:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def fitted(self, algorithm: str) -> str | None:
        return None if algorithm.startswith("rigid") else f"{algorithm}@{self.rows}"


class FakeSearch:
    """A fake search whose algorithms are words, and which records what it is asked."""

    asked: ClassVar[dict[int, Any]] = {}
    library_wins: ClassVar[set[int]] = set()

    def __init__(self, weights: list[torch.Tensor], rows: int, add: bool) -> None:
        self.rows, self.found = rows, []
        self.matmul = FakeProduct(rows)

    def try_everything(self) -> None:
        self.found = [f"tile{self.rows}", f"rigid{self.rows}", f"third{self.rows}"]

    def try_offered(self) -> None:
        self.found = ["offered"]

    def leaders(self, count: int) -> list[str]:
        return self.found[:count]

    def winner(self, among: list[str]) -> str | None:
        self.asked[self.rows] = among
        return None if self.rows in self.library_wins or not among else among[0]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeSearch]]:
    monkeypatch.setattr(cublaslt_tune, "_AlgorithmSearch", FakeSearch)
    monkeypatch.setattr(cublaslt_tune, "library", lambda device: SimpleNamespace(version=1))
    monkeypatch.setattr(cublaslt_cache, "read", lambda path: {})
    monkeypatch.setattr(cublaslt_cache, "add_entries", lambda path, found: None)
    monkeypatch.setattr(cublaslt_tune, "_text", str)
    monkeypatch.setattr(cublaslt_tune, "_searched", set())
    FakeSearch.asked, FakeSearch.library_wins = {}, set()
    before = dict(tuned_matmuls)
    yield FakeSearch
    tuned_matmuls.clear()
    tuned_matmuls.update(before)


def chosen(weight: torch.Tensor, rows: int) -> Any:
    tuned = tuned_matmuls.get(key_of(rows, weight, False))
    return None if tuned is None else (tuned.algorithm, tuned.matmul.rows)


def test_sizes_between_landmarks_try_what_led_there(fake: type[FakeSearch]) -> None:
    """A neighbour's algorithm kept with the neighbour's layout; a size below all landmarks, or
    above, left out or crashing; a size that the library serves best bound to something slower."""
    weight = torch.zeros(8, 4)
    fake.library_wins = {96}
    cublaslt_tune.tune([weight] * 3, [1000, 8, 24, 64, 72, 96, 2048], add=False)
    assert fake.asked == {
        64: ["tile64", "rigid64", "third64"],
        96: ["tile96", "rigid96", "third96"],
        24: ["tile64@24"],
        72: ["tile64@72", "tile96@72"],
        1000: ["tile96@1000"],
        2048: ["offered"],
    }
    assert chosen(weight, 72) == ("tile64@72", 72)
    assert chosen(weight, 96) is None and chosen(weight, 8) is None


def test_nothing_is_searched_twice(fake: type[FakeSearch]) -> None:
    """Graphs that are recorded again, after the cache has shrunk, wait for seconds each time."""
    weight = torch.zeros(8, 4)
    cublaslt_tune.tune([weight], [64, 72], add=False)
    fake.asked.clear()
    cublaslt_tune.tune([weight], [64, 72, 88], add=False)
    assert list(fake.asked) == [88]


def test_other_types_are_left_to_the_library(fake: type[FakeSearch]) -> None:
    """A KeyError at the start of a model in a type that cuBLASLt's table here does not know."""
    cublaslt_tune.tune([torch.zeros(8, 4, dtype=torch.int8)], [64], add=False)
    assert not fake.asked


class Machine:
    """A machine whose library may become newer, and on which processes follow one another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searched: list[int] = []
        self.refused: set[int] = set()
        self.version = 130200
        machine = self

        class Search(FakeSearch):
            def winner(self, among: list[str]) -> Any:
                machine.searched.append(self.rows)
                return None if self.rows == 64 else Algorithm(workspace=self.rows, state=0)

        class Matmul:
            def __init__(self, lib: Any, rows: int, weight: torch.Tensor, add: bool) -> None:
                self.rows = rows

            def fitted(self, algorithm: Algorithm) -> Algorithm | None:
                return None if self.rows in machine.refused else algorithm

        # An attribute that is set stays set when it is put back: TRITON_CACHE_DIR then has no say.
        monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(folder))
        monkeypatch.setattr(cublaslt_tune, "_AlgorithmSearch", Search)
        monkeypatch.setattr(cublaslt_tune, "Matmul", Matmul)
        monkeypatch.setattr(
            cublaslt_tune, "library", lambda device: SimpleNamespace(version=self.version)
        )

    def start(self, sizes: list[int], add: bool = False) -> dict[int, int]:
        """Start a process; return rows -> the chosen algorithm. Rows searched for are in
        `searched`."""
        self.searched.clear()
        tuned_matmuls.clear()
        cublaslt_tune._searched.clear()
        cublaslt_tune.tune([torch.zeros(8, 4)], sizes, add)
        return {key[0]: tuned.algorithm.workspace for key, tuned in tuned_matmuls.items()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    before, searched = dict(tuned_matmuls), set(cublaslt_tune._searched)
    yield Machine(tmp_path / "cache", monkeypatch)
    tuned_matmuls.clear()
    tuned_matmuls.update(before)
    cublaslt_tune._searched.clear()
    cublaslt_tune._searched.update(searched)


def test_the_next_start_takes_what_was_found(machine: Machine) -> None:
    """Each start searches for seconds; or takes another shape's, another library's, or what cannot
    run here; or the library's own choice is forgotten and searched for again."""
    actual = machine.start([64, 72, 96])
    assert actual == {72: 72, 96: 96} and sorted(machine.searched) == [64, 72, 96]
    assert machine.start([64, 72, 96]) == actual and not machine.searched
    assert machine.start([72]) == {72: 72} and not machine.searched
    machine.start([64, 72, 96], add=True)
    assert machine.searched
    assert machine.start([64, 72, 96]) == actual and not machine.searched  # nothing was lost
    machine.start([64, 72, 80])  # the landmarks are wanted for the new one
    assert sorted(machine.searched) == [64, 72, 80]
    machine.version += 1
    machine.start([64, 72, 96])
    assert machine.searched
    machine.version -= 1
    machine.refused = {72}
    machine.start([64, 72, 96])
    assert machine.searched


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"64x8x4 torch.float32": "zz", "72x8x4 torch.float32": 3}', "\0"]
)
def test_a_broken_file_is_searched_anew_and_mended(machine: Machine, text: str) -> None:
    """An engine that never starts again because a file was cut short."""
    machine.start([64, 72])
    (path,) = Path(triton.knobs.cache.dir).iterdir()
    path.write_text(text)
    machine.start([64, 72])
    assert machine.searched
    machine.start([64, 72])
    assert not machine.searched


def test_where_nothing_can_be_kept(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only or full disk stops the engine, or nobody learns why every start is slow."""
    Path(triton.knobs.cache.dir).write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        assert machine.start([64, 72]) == {72: 72}
    assert "searched for at each start" in caplog.text


class PickyProduct:
    """A fake product whose times are the algorithms' names; algorithms with "no" are refused."""

    def offered(self) -> list[str]:
        return ["3", "no2", "2"]

    def run(self, algorithm: str, *_: Any) -> None:
        if algorithm.startswith("no"):
            raise CublasLtError(algorithm)


def test_what_the_library_refuses_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not start because one of many algorithms cannot run after all."""
    search: Any = object.__new__(cublaslt_tune._AlgorithmSearch)
    search.matmul, search.timed, search.add = PickyProduct(), [], False
    search.weights = [torch.zeros(8, 4)]
    search.x, search.y = torch.zeros(64, 4), torch.zeros(64, 8)
    monkeypatch.setattr(search, "milliseconds", lambda algorithm: float(algorithm or 2.5))
    search.try_offered()
    assert search.leaders(4) == ["2", "3"]
    assert search.winner(["no1", "2", "3"]) == "2"
    assert search.winner(["no1"]) is None and search.winner(["3"]) is None


@pytest.mark.parametrize("broken", ["missing", "too old", "refuses"])
def test_without_the_library(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device or a driver without it: no engine, or a slow one and nobody is told; or a line in
    the log for each shape of a weight."""

    def load(name: str) -> Any:
        if broken == "missing":
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace() if broken == "too old" else SimpleNamespace(cublasLtCreate=len)

    def create(self: Any, name: str, *args: object) -> None:
        if broken == "refuses":
            raise CublasLtError(f"{name}: cuBLASLt status 1")
        getattr(self.lib, name)

    monkeypatch.setattr(cublaslt.ctypes, "CDLL", load)
    monkeypatch.setattr(cublaslt.CublasLt, "call", create)
    cublaslt.library.cache_clear()
    weight = torch.zeros(8, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cublaslt_tune.tune([weight], [64], add=False)
    cublaslt.library.cache_clear()
    assert len(caplog.records) == 1 and "not tuned" in caplog.text
    x = torch.ones(64, 4)
    assert torch.equal(cublaslt.linear(x, weight, None), x @ weight.t())
