"""`manta plan --trace` as a user runs it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.cli import main

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
RATES = {"cpu": {"base": 0.1, "sequence": 0, "token": 1e-7, "start_seconds": 3}}


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `manta plan` of a tiny model. Returns its exit code, stdout and stderr."""
    spec = tmp_path / "config.json"
    spec.write_text(json.dumps(MODEL))

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["manta", "plan", str(spec), *args])
        return main._run(), *capsys.readouterr()

    return run


def write(path: Path, rows: int = 20) -> Path:
    """Write a trace with a request every half second."""
    row = {"input_length": 10, "output_length": 3}
    path.write_text("".join(json.dumps({"timestamp": 500 * n, **row}) + "\n" for n in range(rows)))
    return path


def test_a_trace_on_measured_replicas(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A table whose figures are not those of the rates, or whose source nobody knows."""
    trace, rates = write(tmp_path / "trace.jsonl"), tmp_path / "rates.json"
    rates.write_text(json.dumps(RATES))
    code, out, error = plan("--gpu", "cpu", "--trace", str(trace), "--rates", str(rates))
    assert code == 0, error
    assert "20 requests in 9.5 s, 200 prompt and 60 output tokens" in out
    assert re.search(r"answered +20\n +refused +0\n", out)
    # A step of 0.1 s, and two hops; what comes to an idle replica waits for nothing.
    assert re.search(r"first token +p50 101\.\d ms, p99 101\.\d ms", out)
    assert re.search(r"between tokens +p50 100\.\d ms", out)
    assert re.search(r"cpu: 0\.003 replica hours at 0\.1, at most 1 at once, of 1 to 1", out)
    assert f"(measured, {rates})" in out and "a start takes 3 s" in out


def test_a_trace_on_a_data_sheet(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """A guess that passes for a measurement; a CPU whose speed is made up."""
    trace = str(write(tmp_path / "trace.jsonl"))
    code, out, error = plan("--gpu", "h100", "--trace", trace)
    assert code == 0, error
    assert "H100's data sheet, so at best" in out
    code, out, error = plan("--gpu", "cpu", "--trace", trace)
    assert code == 2 and not out and "pools.cpu: nothing says how fast" in error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_length": 10}', "no output_length"),
        ('{"timestamp": 1, "input_length": 10, "output_length": 0}', "output_length is 0"),
        ('{"timestamp": 1, "input_length": "ten", "output_length": 1}', "input_length is 'ten'"),
        ("nonsense", "not a JSON object"),
    ],
)
def test_a_bad_line_is_named(
    plan: Callable[..., tuple[int, str, str]], tmp_path: Path, line: str, message: str
) -> None:
    """A trace that is predicted without the line that nobody can read."""
    trace = write(tmp_path / "trace.jsonl", rows=2)
    trace.write_text(trace.read_text() + line + "\n")
    code, out, error = plan("--gpu", "h100", "--trace", str(trace))
    assert code == 2 and not out
    assert error.startswith(f"error: {trace}:3: ") and message in error


def test_rates_without_a_trace(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """An option that does nothing."""
    code, _, error = plan("--gpu", "cpu", "--rates", str(tmp_path / "rates.json"))
    assert code == 2 and "give --trace" in error
    code, _, error = plan("--gpu", "h100", "--trace", str(tmp_path / "none.jsonl"))
    assert code == 2 and "none.jsonl: No such file" in error
