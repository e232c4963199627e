"""The bench of schemas: documents are judged, and put in order, as it says."""

import json
from pathlib import Path

from bench.structured import OUTCOMES, in_order, maskbench_cases, measure, suite_cases
from engine.structured.compiler import Vocabulary


def test_outcomes(tmp_path: Path) -> None:
    """A schema that is refused counted as right, or a document that is cut as accepted."""
    closed = {"properties": {"a": {}, "b": {"type": "integer"}}, "additionalProperties": False}
    groups = [
        {
            "description": "closed",
            "schema": {**closed, "type": "object", "required": ["a"]},
            "tests": [
                {"data": {"b": 1, "a": None}, "valid": True},
                {"data": {"b": 1}, "valid": False},
                {"data": {"a": 1, "c": 1}, "valid": False},
                {"data": [], "valid": True},  # it is not, and we must be found wrong
            ],
        },
        {"description": "no", "schema": {"not": {}}, "tests": [{"data": 1, "valid": False}]},
        {"description": "false", "schema": False, "tests": [{"data": 1, "valid": False}]},
        {"description": "any", "schema": True, "tests": [{"data": 1, "valid": False}]},
    ]
    (tmp_path / "some.json").write_text(json.dumps(groups))
    cases = list(suite_cases([tmp_path / "some.json"]))
    rows, lines = measure("s", cases, Vocabulary.outline({0: "<end>"}, 257, (0,)), masks=True)
    rates = {row["case"].split("/")[1]: row["ours"] for row in rows}
    assert {name: rates[name] for name in OUTCOMES} == {
        "right": 4,
        "refused": 1,
        "invalid_accepted": 1,
        "valid_rejected": 1,
        "failed": 0,
    }
    assert [line["case"] for line in lines] == ["s/some: closed", "s/some: no", "s/some: any"]
    assert rates["mask_max"] > 0


def test_properties_are_put_in_order() -> None:
    """A valid document that is counted as refused, because its properties stand otherwise."""
    inner = {"properties": {"x": {}, "y": {}}}
    schema = {"properties": {"b": {"items": inner}, "a": {}}, "required": ["c"]}
    document = {"z": 1, "c": 2, "a": 3, "b": [{"y": 1, "x": 2}]}
    ordered = in_order(document, schema)
    assert ordered == document
    assert list(ordered) == ["b", "a", "c", "z"] and list(ordered["b"][0]) == ["x", "y"]


def test_a_sample_of_maskbench(tmp_path: Path) -> None:
    """A sample of the first files only."""
    for i in range(10):
        (tmp_path / f"f{i}.json").write_text(json.dumps({"schema": {}, "tests": []}))
    assert [name for name, *_ in maskbench_cases(tmp_path, 3)] == ["f0", "f3", "f6"]
    assert len(list(maskbench_cases(tmp_path, 0))) == 10
