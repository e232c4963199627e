"""The order of the search for products; the products themselves are tested on a GPU."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from kernels import cublaslt_tune
from kernels.cublaslt import choices, key_of


class FakeProduct:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def fitted(self, algorithm: str) -> str | None:
        return None if algorithm.startswith("rigid") else f"{algorithm}@{self.rows}"


class FakeSearch:
    """Algorithms are words; what was asked of each is written down."""

    asked: ClassVar[dict[int, Any]] = {}
    library_wins: ClassVar[set[int]] = set()

    def __init__(self, weights: list[torch.Tensor], rows: int, add: bool) -> None:
        self.rows, self.found = rows, []
        self.product = FakeProduct(rows)

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
    monkeypatch.setattr(cublaslt_tune, "_Search", FakeSearch)
    monkeypatch.setattr(cublaslt_tune, "library", lambda device: object())
    monkeypatch.setattr(cublaslt_tune, "_searched", set())
    FakeSearch.asked, FakeSearch.library_wins = {}, set()
    before = dict(choices)
    yield FakeSearch
    choices.clear()
    choices.update(before)


def chosen(weight: torch.Tensor, rows: int) -> Any:
    choice = choices.get(key_of(rows, weight, False))
    return None if choice is None else (choice.algorithm, choice.product.rows)


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
