"""What is asked: named workloads, mixes, and the same bytes for the same seed."""

import hashlib
import statistics
from collections import Counter

import msgspec
import pytest

from loadtest.scenario import workloads
from loadtest.scenario.arrivals import TraceRow, rng_of
from loadtest.scenario.lengths import LengthError, parse_length
from loadtest.scenario.requests import NAMES, Source
from loadtest.scenario.schema import Work


def source(seed=0, phase="p", trace=(), first=False, **work):
    return Source(Work.model_validate(work), seed, phase, "m", trace=trace, first=first)


def ids(job):
    return job.fields["prompt"]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"tokens", "trace"}))
def test_every_workload_repeats(name: str) -> None:
    """A prompt that depends on the order in which jobs are built differs between processes."""
    bodies = [source(3, name=name).job(i).body() for i in range(4)]
    other = source(3, name=name)
    assert [other.job(i).body() for i in (3, 1, 0, 2)] == [bodies[i] for i in (3, 1, 0, 2)]
    assert source(4, name=name).job(0).body() != bodies[0]
    assert source(3, phase="q", name=name).job(0).body() != bodies[0]


def test_bytes_are_written_down() -> None:
    """A change of generator or of field order makes every stored reference file useless."""
    work = {"name": "shared_prefix", "stream": 0.5}
    data = b"".join(source(1, **work).job(i).body() for i in range(5))
    chat = b"".join(source(1, name="chat").job(i).body() for i in range(5))
    digests = [hashlib.sha256(b).hexdigest()[:16] for b in (data, chat)]
    assert digests == DIGESTS


DIGESTS = ["8cb78a5a180ccde7", "ea87ec2139270ad5"]


def test_first_measured_phase_has_the_named_list() -> None:
    """Figures here and in versus_engine.py would be of different prompts."""
    wanted = workloads.build("uniform", 5)
    jobs = source(5, name="uniform", first=True)
    assert [(ids(jobs.job(i)), jobs.job(i).expected) for i in range(3)] == wanted[:3]
    again = ids(jobs.job(256))
    assert again != wanted[0][0]  # the second round has prompts of its own: no prefix-cache gift


def test_copies_have_the_same_lengths_and_prompts_of_their_own() -> None:
    """Twice the servers with twice the requests, of other lengths: what differs is in part luck.
    Dealt out to twice the processes, each has the lengths of one that there was."""
    wanted = workloads.build("dialogue", 5)
    jobs = source(5, name="dialogue", copies=3, first=True)
    found = [(ids(jobs.job(i)), jobs.job(i).expected) for i in range(24)]
    assert found[::3] == wanted[:8]
    for number, (prompt, expected) in enumerate(found):
        assert (len(prompt), expected) == (len(wanted[number // 3][0]), wanted[number // 3][1])
    assert len({tuple(prompt) for prompt, _ in found}) == 24
    for process in range(6):  # of 6, where there were 2
        lengths = [(len(prompt), expected) for prompt, expected in found[process::6]]
        assert lengths == [(len(p), out) for p, out in wanted[process // 3 : 8 : 2]]
    for work in ({"name": "chat"}, {"name": "dialogue", "output": 5}):
        with pytest.raises(ValueError, match="copies: only of the requests of a list"):
            source(copies=2, **work)


def test_sharegpt_lengths() -> None:
    """The inverse CDF scaled twice, or not at all."""
    jobs = source(name="sharegpt")
    found = [jobs.job(i) for i in range(1500)]
    assert statistics.fmean(len(ids(job)) for job in found) == pytest.approx(114, rel=0.15)
    assert statistics.fmean(job.expected for job in found) == pytest.approx(322, rel=0.06)
    assert all(job.fields["ignore_eos"] for job in found)


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
    prompts = [ids(source(**work).job(i)) for i in range(60)]
    assert len({tuple(p[:50]) for p in prompts}) == 3
    assert len({tuple(p[50:]) for p in prompts}) == 60
    assert all(len(p) == 58 for p in prompts)


def test_adapters() -> None:
    """Zipf over the wrong end; a base share that is not taken."""
    work = {"name": "tokens", "input": 1, "output": 1}
    zipf = {"count": 4, "choice": "zipf", "s": 1.0}
    jobs = source(**work, adapters=zipf)
    counts = Counter(jobs.job(i).fields["model"] for i in range(4000))
    shares = [counts[f"lora-{i}"] / 4000 for i in range(4)]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert shares == [pytest.approx(1 / k / total, abs=0.03) for k in (1, 2, 3, 4)]
    jobs = source(**work, adapters={"names": ["a", "b"], "base": 0.5})
    counts = Counter(jobs.job(i).fields["model"] for i in range(2000))
    assert counts["m"] == pytest.approx(1000, abs=100)
    assert counts["a"] == pytest.approx(500, abs=80)
    turn = source(**work, adapters={"names": ["a", "b", "c"], "choice": "round_robin"})
    assert [turn.job(i).adapter for i in range(6)] == list("abcabc")


def test_mixes_do_not_change_the_prompts() -> None:
    """Switching cancels on would give other prompts, so runs could not be compared."""
    plain = source(name="tokens", input=[1, 9], output=[1, 9])
    mixed = source(
        name="tokens",
        input=[1, 9],
        output=[1, 9],
        stream=0.5,
        cancel={"share": 0.3},
        slow={"share": 0.2, "pause": "10ms"},
        tenants=[{"name": "x", "share": 3}, {"name": "y", "share": 1, "priority": 2}],
        json_schema={"share": 0.25},
    )
    jobs = [mixed.job(i) for i in range(1000)]
    assert [ids(job) for job in jobs] == [ids(plain.job(i)) for i in range(1000)]
    assert sum(job.stream for job in jobs) == pytest.approx(500, abs=60)
    assert sum("response_format" in job.fields for job in jobs) == pytest.approx(250, abs=50)
    assert all((job.expected is None) == ("response_format" in job.fields) for job in jobs)
    assert sum(job.slow_pause == 0.01 for job in jobs) == pytest.approx(200, abs=45)
    cancelled = [j for j in jobs if j.cancel_chunks or j.cancel_after]
    assert len(cancelled) == pytest.approx(300, abs=50)
    assert all((job.cancel_chunks is not None) == job.stream for job in cancelled)
    assert sum(job.tenant == "x" for job in jobs) == pytest.approx(750, abs=50)
    assert all(("priority" in job.fields) == (job.tenant == "y") for job in jobs)


def test_conversations_grow() -> None:
    """A second turn that does not begin with the first is no conversation and hits no cache."""
    jobs = source(name="chat")
    first, second = (jobs.job(i, 40).fields["messages"] for i in (40, 41))
    assert second[: len(first)] == first
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    tokens = source(name="tokens", input=10, output=1)
    one, two = ids(tokens.job(40, 40)), ids(tokens.job(41, 40))
    assert two[:10] == one and len(two) == 20


def test_trace_blocks_are_shared() -> None:
    """Mooncake's block ids are what its prefix-cache hits come from."""
    trace = [TraceRow(0, 1100, 5, (1, 2, 3)), TraceRow(1, 600, 6, (1, 9))]
    jobs = source(trace=trace)
    a, b = jobs.job(0), jobs.job(1)
    assert (len(ids(a)), len(ids(b)), a.expected, b.expected) == (1100, 600, 5, 6)
    assert ids(a)[:512] == ids(b)[:512]
    assert ids(a)[512:600] != ids(b)[512:600]


def test_bodies() -> None:
    """Fields of streaming in a unary body are refused by servers; usage must be asked for."""
    job = source(name="tokens", input=1, output=2, sampling={"temperature": 1, "seed": "each"}).job(
        7
    )
    body = msgspec.json.decode(job.body(token_ids=True, chunk_usage=True))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["return_token_ids"], body["seed"], body["max_tokens"]) == (True, 7, 2)
    unary = source(name="tokens", input=1, output=2, stream=0).job(0)
    assert not {"stream", "stream_options"} & set(msgspec.json.decode(unary.body()))
    assert unary.repeatable and job.repeatable
    assert not source(name="tokens", input=1, output=2, sampling={"top_p": 0.5}).job(0).repeatable
