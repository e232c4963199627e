"""What routers do for keys beside requests: read files again, share counts, write what was used."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments.api.caller import Caller, KeyRule
from deployments.api.http.errors import ApiError
from deployments.api.key_limits import KeyCount
from deployments.cli.main import cli
from deployments.config.keys import ApiKey, key_digest, read_api_keys
from deployments.observe.metrics import RouterMetrics, render
from deployments.router.keys import key_service
from deployments.router.keys.key_files import KeyFiles, KeySettings
from deployments.router.keys.key_service import KeyService
from deployments.router.keys.usage_log import UsageLine, UsageLog

ONE = ApiKey(key_digest("one"))


def keys_file(tmp_path: Path, text: str = "one\n") -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def line(at: float, **changes: Any) -> UsageLine:
    fields: dict[str, Any] = {
        "id": "r",
        "key": "team",
        "key_id": "k",
        "model": "m",
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "output_tokens": 4,
        "seconds": 0.5,
        "finish": ["stop"],
    }
    return UsageLine(at, **{**fields, **changes})


def ended(owner: str, emitted: list[Any] | None = None, output: int = 4) -> Any:
    trace = SimpleNamespace(
        id="r",
        owner=owner,
        model="m",
        prompt_tokens=3,
        cached=1,
        output_tokens=output,
        arrived=1.0,
        ended=1.5,
        finish=["stop"],
        error="",
    )
    return SimpleNamespace(trace=trace, request=SimpleNamespace(emitted=emitted or []))


def test_keys_change_with_their_file_and_survive_its_faults(tmp_path: Path, caplog: Any) -> None:
    """A new key that waits for a restart; a slip of the pen, or a file that is gone for a moment,
    that locks everybody out."""
    path = keys_file(tmp_path)
    files = KeyFiles(KeySettings((ONE,), (), {"api_keys_file": str(path)}))
    assert not files.poll()
    keys_file(tmp_path, "one\ntwo name=team requests=5\n")
    assert files.poll() and not files.poll()
    options = files.options()
    two = bytes.fromhex(key_digest("two"))
    assert options["api_keys"] == {bytes.fromhex(ONE.digest), two}
    assert options["rules"] == {two: KeyRule("team", requests=5)}
    assert files.names()[key_digest("two")[:32]] == "team"
    for fault in ("one rquests=5\n", ""):
        keys_file(tmp_path, fault)
        assert not files.poll() and files.options() == options
    path.unlink()
    assert not files.poll() and files.options() == options
    assert len([record for record in caplog.records if "stay as they were" in record.message]) == 3
    keys_file(tmp_path)
    assert files.poll() and len(files.options()["api_keys"]) == 1


def test_the_usage_file_turns_over_and_loses_no_line(tmp_path: Path) -> None:
    """Two routers that rename each other's file away under a write; a file that grows for ever."""
    path = tmp_path / "logs" / "usage.jsonl"
    routers = [UsageLog(path, 4096, 2) for _ in range(2)]
    for number in range(60):
        routers[number % 2].add_line(line(1000.0 + number, id=f"r{number}"))
        routers[number % 2].flush()
    files = [path.with_name(f"usage.jsonl{end}") for end in (".2", ".1", "")]
    assert all(file.stat().st_size <= 4096 for file in files)
    ids = [json.loads(raw)["id"] for file in files for raw in file.read_text().splitlines()]
    assert ids == [f"r{number}" for number in range(60)][-len(ids) :] and len(ids) > 40
    assert not path.with_name("usage.jsonl.3").exists()
    assert path.stat().st_mode & 0o077 == 0


def test_a_disk_that_takes_nothing_delays_lines(tmp_path: Path, caplog: Any) -> None:
    """A full disk that ends the router's loop, or loses what was used while it was full."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    log = UsageLog(blocked / "usage.jsonl", 4096, 1)
    log.add_line(line(1.0))
    log.flush()
    log.flush()
    assert len(caplog.records) == 1 and "1 lines wait" in caplog.records[0].message
    blocked.unlink()
    log.flush()
    assert json.loads((blocked / "usage.jsonl").read_text())["output_tokens"] == 4


class FakeStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def __call__(self, what: str, key: str, *arguments: Any, **options: Any) -> Any:
        if what == "put":
            if options.get("overwrite", True) or key not in self.values:
                self.values[key] = arguments[0]
        elif what == "get":
            return self.values.get(key)
        elif what == "list":
            return [name.encode() for name in self.values if name.startswith(key)]
        elif what == "del":
            self.values.pop(key, None)
        return None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    fake = FakeStore()
    monkeypatch.setattr(key_service, "store", fake)
    return fake


def keeper(tmp_path: Path, name: str, path: Path, log: bool = True) -> KeyService:
    settings = KeySettings((ONE,), (), {"api_keys_file": str(path)})
    usage = UsageLog(tmp_path / "usage.jsonl", 2**20, 2) if log else None
    return KeyService(settings, usage, key_service.SharedCounts("app", name), RouterMetrics())


def test_what_ended_is_in_metrics_and_file_and_counts_for_all_routers(
    tmp_path: Path, store: FakeStore
) -> None:
    """Tokens that are counted for nobody, or twice: of a resumed stream, of a router that starts
    with the file that it writes itself; a budget that a restart gives back."""
    path = keys_file(tmp_path, "one name=team budget=20/day\n")
    owner = key_digest("one")[:32]
    before = UsageLog(tmp_path / "usage.jsonl", 2**20, 2)
    before.add_line(line(time.time(), key_id=owner))  # 7 tokens of a cluster that has ended
    before.add_line(line(time.time() - 40 * 86400, key_id=owner, output_tokens=1000))
    before.flush()

    async def case() -> None:
        first, second = keeper(tmp_path, "r1", path), keeper(tmp_path, "r2", path)
        rules = (await first.start())["rules"]
        key = Caller(id=owner, rule=next(iter(rules.values())))
        first.limits.count_request(key, time.monotonic(), time.time())
        first.ended(ended(owner))
        first.ended(ended(owner, emitted=[[1, 2, 3]]))  # one new token
        first.ended(ended(""))
        await first.poll()
        await second.start()
        second.limits.count_request(key, time.monotonic(), time.time())  # 15 of 20
        second.ended(ended(owner, output=2))  # 20
        with pytest.raises(ApiError, match="20 of 20"):
            second.limits.count_request(key, time.monotonic(), time.time())
        await second.poll()
        await first.poll()
        with pytest.raises(ApiError, match="20 of 20"):
            first.limits.count_request(key, time.monotonic(), time.time())
        text = render((family for family in _families(first) if "key_" in family.name), "served")
        assert 'manta_key_requests_total{model_name="served",key="team",model="m"} 2' in text
        assert 'manta_key_generation_tokens_total{model_name="served",key="team",model="m"} 5' in (
            text
        )
        second.close()
        first.close()

    asyncio.run(case())
    lines = [json.loads(raw) for raw in (tmp_path / "usage.jsonl").read_text().splitlines()]
    items = [(item["key"], item["prompt_tokens"], item["output_tokens"]) for item in lines[2:]]
    assert items == [("team", 3, 4), ("team", 0, 1), ("", 3, 4), ("team", 3, 2)]


def _families(keeper: KeyService) -> Any:
    from deployments.backend import BackendState
    from deployments.observe.metrics import families

    return families(keeper._metrics, BackendState({}, 0, 0, 0, False))


def test_counts_of_ended_periods_are_forgotten(store: FakeStore) -> None:
    """A store that grows with each router that has ever been."""
    shared = key_service.SharedCounts("app", "r1")
    for router, period in (("old", "2026-10"), ("new", "2026-11")):
        key_service.SharedCounts("app", router).exchange(
            {"k": KeyCount(1, 2, period, 3)}, (period,)
        )
    assert len(shared.exchange({}, ("2026-11-23", "2026-11"))) == 1
    assert not [name for name in store.values if name.endswith("old")]


def test_manta_key_makes_a_key_that_opens(tmp_path: Path) -> None:
    """A key that is kept in the clear; a file that others may read; a limit with a slip in it."""
    path = tmp_path / "keys"
    invoked = CliRunner().invoke(cli, ["key", str(path), "team", "requests=5"])
    assert invoked.exit_code == 0, invoked.output
    key = invoked.stdout.strip().splitlines()[-1]
    (api_key,) = read_api_keys(path)
    assert api_key == ApiKey(key_digest(key), KeyRule("team", requests=5))
    assert key not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    for wrong in (["team"], ["other", "rquests=5"]):
        assert CliRunner().invoke(cli, ["key", str(path), *wrong]).exit_code != 0
    assert len(read_api_keys(path)) == 1
