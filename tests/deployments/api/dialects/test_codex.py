"""Codex, from its npm package, in a loop of two steps: skipped where it is not installed.

npm install @openai/codex && MANTA_TEST_CODEX=node_modules/.bin/codex pytest FILE
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.api.app import build_asgi
from engine.messages import Delta
from tests.deployments.api.output.test_tools import allowed, backend_with, written
from tests.deployments.api.output.tool_templates import TEMPLATES
from tests.deployments.api.server import serve
from tests.deployments.fake_backend import MODEL

CODEX = os.environ.get("MANTA_TEST_CODEX") or shutil.which("codex")
ASKED, RESULT, ANSWER = "echo six-$((6 * 7))", "six-42", "It printed what it should."

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CODEX is None, reason="npm install @openai/codex"),
]


def command_tool(prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the tool by which Codex runs a command, and its arguments; names depend on the
    version."""
    for line in prompt.splitlines():
        if line.startswith('{"'):
            function = json.loads(line)["function"]
            known = function["parameters"].get("properties", {})
            if "cmd" in known:
                return function["name"], {"cmd": ASKED}
            if "command" in known:
                lists = known["command"].get("type") == "array"
                return function["name"], {"command": ["sh", "-c", ASKED] if lists else ASKED}
    raise AssertionError(f"no tool runs a command: {prompt[:2000]}")


def test_a_loop_of_two_steps(tmp_path: Path) -> None:
    """A request that is refused, an item or event that Codex does not take, a call that it does not
    run, or a result that the model is not told; a call that the grammar of its tools forbids."""
    backend = backend_with(TEMPLATES["hermes"])
    backend.cards = {MODEL: replace(backend.cards[MODEL], max_model_len=131_072)}
    make, seen, free = backend.deltas, [], []

    def deltas(request: Any, choice: int) -> list[Delta]:
        prompt = backend._tokenizer.decode(request.token_ids, skip_special_tokens=False)
        seen.append(prompt)
        backend.script = ANSWER
        if RESULT not in prompt:
            backend.script = "<think>hm</think>" + written(command_tool(prompt))
        free.append(allowed(backend, backend.script))
        return make(request, choice)

    backend.deltas = deltas  # type: ignore[method-assign]
    with serve(build_asgi(backend)) as port:
        (tmp_path / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "manta"\n[model_providers.manta]\n'
            f'name = "manta"\nbase_url = "http://127.0.0.1:{port}/v1"\nwire_api = "responses"\n'
        )
        command = [str(CODEX), "exec", "--skip-git-repo-check", "Run a command."]
        # The one command that can be asked for is ours.
        command.insert(2, "--dangerously-bypass-approvals-and-sandbox")
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0 and ANSWER in done.stdout, done.stdout + done.stderr
    assert len(seen) == 2 and "<|im_start|>tool" in seen[1]
    assert free == [True, True] and backend.requests[0].params.structured is not None
