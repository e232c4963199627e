"""The files of a run in one folder: requests.jsonl, requests.csv and summary.json."""

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadtest.errors import ScenarioError
from loadtest.measure.records import RequestRecord, Summary, write_summary

RECORDS, TABLE, SUMMARY = "requests.jsonl", "requests.csv", "summary.json"


def prepare(folder: Path) -> None:
    """Make the folder and test that files can be written, before any request. Raises ScenarioError.

    A folder that already has results is refused, so that nothing is overwritten.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RECORDS, TABLE, SUMMARY):
            if (folder / name).exists():
                raise ScenarioError(f"{folder}: there are results in it already; choose another")
        for name in (RECORDS, TABLE, SUMMARY):
            (folder / name).touch()
            (folder / name).unlink()
    except OSError as error:
        raise ScenarioError(
            f"{error.filename or folder}: results cannot be written: {error.strerror or error}"
        ) from None


def write(folder: Path, summary: Summary, records: Sequence[RequestRecord]) -> None:
    """Write the summary and all records to the folder. Raises OSError."""
    encode = msgspec.json.Encoder().encode
    with (folder / RECORDS).open("wb") as file:
        file.writelines(encode(record) + b"\n" for record in records)
    with (folder / TABLE).open("w", encoding="utf-8", newline="") as text:
        table = csv.writer(text)
        plain = [name for name in RequestRecord.__struct_fields__ if name != "chunks"]
        derived = ("chunks", "ttft_s", "tpot_s", "e2e_s", "lateness_s")
        table.writerow([*plain, *derived])
        for record in records:
            row = [getattr(record, name) for name in plain]
            times = [record.ttft_s, record.tpot_s, record.e2e_s, record.lateness_s]
            figures = ["" if value is None else f"{value:.6f}" for value in times]
            table.writerow([_cell(v) for v in row] + [len(record.chunks), *figures])
    write_summary(summary, folder / SUMMARY)


def _cell(value: object) -> object:
    """Return a value for a CSV cell. Text from servers that a spreadsheet would run as a formula
    is quoted.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")):
        return "'" + value
    return "" if value is None else value
