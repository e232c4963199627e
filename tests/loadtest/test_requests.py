"""The requests of a scenario: named workloads, mixes, and the same bytes for the same seed."""

import hashlib
import json
import statistics
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from loadtest.errors import ScenarioError
from loadtest.scenario import workloads
from loadtest.scenario.arrivals import TraceRow, rng_of
from loadtest.scenario.conversations import read_conversations
from loadtest.scenario.lengths import LengthError, parse_length
from loadtest.scenario.requests import NAMES, RequestGenerator
from loadtest.scenario.schema import Workload


def generator(seed=0, phase="p", trace=(), first=False, **work):
    return RequestGenerator(
        Workload.model_validate(work), seed, phase, "m", trace=trace, first=first
    )


def ids(spec):
    return spec.fields["prompt"]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"tokens", "trace", "dataset"}))
def test_every_workload_repeats(name: str) -> None:
    """A prompt that depends on the order in which requests are built differs between processes."""
    bodies = [generator(3, name=name).spec(i).body() for i in range(4)]
    other = generator(3, name=name)
    assert [other.spec(i).body() for i in (3, 1, 0, 2)] == [bodies[i] for i in (3, 1, 0, 2)]
    assert generator(4, name=name).spec(0).body() != bodies[0]
    assert generator(3, phase="q", name=name).spec(0).body() != bodies[0]


def test_bytes_are_written_down() -> None:
    """A change of generator or of field order makes every stored reference file useless."""
    work = {"name": "shared_prefix", "stream": 0.5}
    data = b"".join(generator(1, **work).spec(i).body() for i in range(5))
    chat = b"".join(generator(1, name="chat").spec(i).body() for i in range(5))
    digests = [hashlib.sha256(b).hexdigest()[:16] for b in (data, chat)]
    assert digests == DIGESTS


DIGESTS = ["8cb78a5a180ccde7", "ea87ec2139270ad5"]


def test_first_measured_phase_has_the_named_list() -> None:
    """Figures here and in bench/versus/engine.py would be of different prompts."""
    wanted = workloads.build("uniform", 5)
    specs = generator(5, name="uniform", first=True)
    assert [(ids(specs.spec(i)), specs.spec(i).expected) for i in range(3)] == wanted[:3]
    again = ids(specs.spec(256))
    assert again != wanted[0][0]  # the second round has prompts of its own: no prefix-cache gift


def test_copies_have_the_same_lengths_and_prompts_of_their_own() -> None:
    """Twice the servers with twice the requests, of other lengths: what differs is in part luck.
    Dealt out to twice the processes, each has the lengths of one that there was."""
    wanted = workloads.build("dialogue", 5)
    specs = generator(5, name="dialogue", copies=3, first=True)
    items = [(ids(specs.spec(i)), specs.spec(i).expected) for i in range(24)]
    assert items[::3] == wanted[:8]
    for number, (prompt, expected) in enumerate(items):
        assert (len(prompt), expected) == (len(wanted[number // 3][0]), wanted[number // 3][1])
    assert len({tuple(prompt) for prompt, _ in items}) == 24
    for process in range(6):  # of 6, where there were 2
        lengths = [(len(prompt), expected) for prompt, expected in items[process::6]]
        assert lengths == [(len(p), out) for p, out in wanted[process // 3 : 8 : 2]]
    for work in ({"name": "chat"}, {"name": "dialogue", "output": 5}):
        with pytest.raises(ValueError, match="copies: only of the requests of a list"):
            generator(copies=2, **work)


def test_sharegpt_lengths() -> None:
    """The inverse CDF scaled twice, or not at all."""
    specs = generator(name="sharegpt")
    items = [specs.spec(i) for i in range(1500)]
    assert statistics.fmean(len(ids(spec)) for spec in items) == pytest.approx(114, rel=0.15)
    assert statistics.fmean(spec.expected for spec in items) == pytest.approx(322, rel=0.06)
    assert all(spec.fields["ignore_eos"] for spec in items)


def test_lengths() -> None:
    """Wrong ends of a range, shares that do not add up."""
    rng = rng_of(0, "lengths")
    assert {parse_length([3, 5]).draw(rng) for _ in range(200)} == {3, 4, 5}
    mix = parse_length({"mix": [[7, 1], [3, 2]]})
    assert statistics.fmean(mix.draw(rng) for _ in range(5000)) == pytest.approx(1.3, abs=0.03)
    log = parse_length({"lognormal": [4.3, 0.93], "min": 4, "max": 1024})
    assert all(4 <= log.draw(rng) <= 1024 for _ in range(1000))
    for bad in (0, -1, True, 1.5, "5", [5, 3], [1], {"cdf": [3, 2]}, {"mix": []}, {}, None):
        with pytest.raises(LengthError):
            parse_length(bad)


def test_shared_prefixes() -> None:
    """Prefixes that differ between requests of a group never hit the cache."""
    work = {"name": "tokens", "input": 8, "output": 1, "prefix": {"groups": 3, "tokens": 50}}
    prompts = [ids(generator(**work).spec(i)) for i in range(60)]
    assert len({tuple(p[:50]) for p in prompts}) == 3
    assert len({tuple(p[50:]) for p in prompts}) == 60
    assert all(len(p) == 58 for p in prompts)


def test_adapters() -> None:
    """Zipf over the wrong end; a base share that is not taken."""
    work = {"name": "tokens", "input": 1, "output": 1}
    zipf = {"count": 4, "choice": "zipf", "s": 1.0}
    specs = generator(**work, adapters=zipf)
    counts = Counter(specs.spec(i).fields["model"] for i in range(4000))
    shares = [counts[f"lora-{i}"] / 4000 for i in range(4)]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert shares == [pytest.approx(1 / k / total, abs=0.03) for k in (1, 2, 3, 4)]
    specs = generator(**work, adapters={"names": ["a", "b"], "base": 0.5})
    counts = Counter(specs.spec(i).fields["model"] for i in range(2000))
    assert counts["m"] == pytest.approx(1000, abs=100)
    assert counts["a"] == pytest.approx(500, abs=80)
    turn = generator(**work, adapters={"names": ["a", "b", "c"], "choice": "round_robin"})
    assert [turn.spec(i).adapter for i in range(6)] == list("abcabc")


def test_mixes_do_not_change_the_prompts() -> None:
    """Switching cancels on would give other prompts, so runs could not be compared."""
    plain = generator(name="tokens", input=[1, 9], output=[1, 9])
    mixed = generator(
        name="tokens",
        input=[1, 9],
        output=[1, 9],
        stream=0.5,
        cancel={"share": 0.3},
        slow={"share": 0.2, "pause": "10ms"},
        tenants=[{"name": "x", "share": 3}, {"name": "y", "share": 1, "priority": 2}],
        json_schema={"share": 0.25},
    )
    specs = [mixed.spec(i) for i in range(1000)]
    assert [ids(spec) for spec in specs] == [ids(plain.spec(i)) for i in range(1000)]
    assert sum(spec.stream for spec in specs) == pytest.approx(500, abs=60)
    assert sum("response_format" in spec.fields for spec in specs) == pytest.approx(250, abs=50)
    assert all((spec.expected is None) == ("response_format" in spec.fields) for spec in specs)
    assert sum(spec.slow_pause == 0.01 for spec in specs) == pytest.approx(200, abs=45)
    cancelled = [j for j in specs if j.cancel_chunks or j.cancel_after]
    assert len(cancelled) == pytest.approx(300, abs=50)
    assert all((spec.cancel_chunks is not None) == spec.stream for spec in cancelled)
    assert sum(spec.tenant == "x" for spec in specs) == pytest.approx(750, abs=50)
    assert all(("priority" in spec.fields) == (spec.tenant == "y") for spec in specs)


def test_conversations_grow() -> None:
    """A second turn that does not begin with the first is no conversation and hits no cache."""
    specs = generator(name="chat")
    first, second = (specs.spec(i, 40).fields["messages"] for i in (40, 41))
    assert second[: len(first)] == first
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    tokens = generator(name="tokens", input=10, output=1)
    outcome, two = ids(tokens.spec(40, 40)), ids(tokens.spec(41, 40))
    assert two[:10] == outcome and len(two) == 20


def test_trace_blocks_are_shared() -> None:
    """Mooncake's block ids are what its prefix-cache hits come from."""
    trace = [TraceRow(0, 1100, 5, (1, 2, 3)), TraceRow(1, 600, 6, (1, 9))]
    specs = generator(trace=trace)
    a, b = specs.spec(0), specs.spec(1)
    assert (len(ids(a)), len(ids(b)), a.expected, b.expected) == (1100, 600, 5, 6)
    assert ids(a)[:512] == ids(b)[:512]
    assert ids(a)[512:600] != ids(b)[512:600]


def test_bodies() -> None:
    """Fields of streaming in a unary body are refused by servers; usage must be asked for."""
    spec = generator(
        name="tokens", input=1, output=2, sampling={"temperature": 1, "seed": "each"}
    ).spec(7)
    body = msgspec.json.decode(spec.body(token_ids=True, chunk_usage=True))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["return_token_ids"], body["seed"], body["max_tokens"]) == (True, 7, 2)
    unary = generator(name="tokens", input=1, output=2, stream=0).spec(0)
    assert not {"stream", "stream_options"} & set(msgspec.json.decode(unary.body()))
    assert unary.repeatable and spec.repeatable
    assert (
        not generator(name="tokens", input=1, output=2, sampling={"top_p": 0.5}).spec(0).repeatable
    )


TURNS = [
    [("human", "What is a tide?"), ("gpt", "The sea " * 20), ("human", "Why?"), ("gpt", "Moon.")],
    [("system", "Be brief."), ("user", "Name a \u00fc."), ("assistant", "\u00fc")],
    [("gpt", "An answer without a question")],
    [("human", "A question without an answer")],
]


def sharegpt(path, lines: bool = False):
    entries = [
        {"id": str(i), "conversations": [{"from": who, "value": text} for who, text in turns]}
        for i, turns in enumerate(TURNS)
    ]
    text = "\n".join(map(json.dumps, entries)) if lines else json.dumps(entries)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_chats_of_a_dataset(tmp_path: Path, lines: bool) -> None:
    """Bugs: questions without their history, the answer sent as a question, an output that has
    nothing to do with the file's answer, two processes with two orders."""
    work = {"name": "dataset", "dataset": str(sharegpt(tmp_path / "data.json", lines))}
    ours, other = generator(3, **work), generator(3, **work)
    specs = [ours.spec(i) for i in range(2)]
    assert [other.spec(i).body() for i in (1, 0)] == [specs[i].body() for i in (1, 0)]
    chats = {spec.fields["messages"][0]["content"]: spec.fields["max_tokens"] for spec in specs}
    assert chats == {"What is a tide?": 40, "Name a \u00fc.": 1}
    tide = next(i for i, spec in enumerate(specs) if spec.fields["max_tokens"] == 40)
    follow_up = ours.spec(tide + 1, first=tide)
    assert [m["role"] for m in follow_up.fields["messages"]] == ["user", "assistant", "user"]
    assert follow_up.fields["messages"][1]["content"] == "The sea " * 20
    assert follow_up.fields["messages"][2]["content"] == "Why?"
    assert follow_up.fields["max_tokens"] == 1 and follow_up.path == "/v1/chat/completions"
    assert generator(3, **work, output=7).spec(0).fields["max_tokens"] == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "no conversation; an entry has conversations"),
        ("[{]", "not JSON"),
        ('{"conversations": []}\nnonsense', ":2: not JSON"),
        ('[{"conversations": [{"from": "gpt", "value": 3}]}]', "no conversation"),
    ],
)
def test_bad_datasets_are_named(tmp_path: Path, text: str, said: str) -> None:
    """Bug: a load of nothing, or a traceback."""
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ScenarioError, match=said):
        read_conversations(tmp_path / "bad.json")
    with pytest.raises(ScenarioError, match="No such file"):
        read_conversations(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="dataset: workload 'dataset' needs a file"):
        Workload(name="dataset")
    with pytest.raises(ValueError, match="no other has one"):
        Workload(name="chat", dataset=tmp_path / "bad.json")
