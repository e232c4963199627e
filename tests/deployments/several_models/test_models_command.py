"""`manta models` against a fake server whose answers the tests set."""

from pathlib import Path
from typing import Any

import pytest

from deployments.cli.chat import ServerError, read_key
from deployments.cli.models import endpoint_models
from deployments.config.keys import key_digest
from engine.errors import ConfigError


def test_add_waits_for_routers_that_have_not_heard_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`error: the model does not exist`, of a model that was added: another router was asked than
    the one that took it."""
    answers: list[Any] = [
        ServerError("does not exist", status=404),
        {"status": "starting"},
        {"status": "ready"},
    ]

    def ask(url: str, key: Path | None, method: str, *rest: Any) -> dict[str, Any]:
        if method == "POST":
            return {}
        answer = answers.pop(0)
        if isinstance(answer, ServerError):
            raise answer
        return dict(answer)

    monkeypatch.setattr(endpoint_models, "ask", ask)
    monkeypatch.setattr(endpoint_models, "_POLL", 0.0)
    endpoint_models.add("two", "org/two")
    assert capsys.readouterr().out == "two is ready\n" and not answers
    answers.append(ServerError("does not exist", status=404))
    monkeypatch.setattr(endpoint_models, "_KNOWN_SECONDS", 0.0)
    with pytest.raises(ServerError, match="does not exist"):
        endpoint_models.add("two", "org/two")
    answers.append(ServerError("no key", status=401))
    with pytest.raises(ServerError, match="no key"):
        endpoint_models.add("two", "org/two")


def test_the_servers_own_keys_file_is_no_key(tmp_path: Path) -> None:
    """`a valid API key is needed`, to an operator who gave the file that the server reads."""
    path = tmp_path / "admins"
    path.write_text(f"sha256:{key_digest('sk-1')} name=root\n")
    with pytest.raises(ConfigError, match=r"admins: has the digest .* `manta key` has shown once"):
        read_key(path)
    path.write_text("sk-1\n")
    assert read_key(path) == "sk-1"
