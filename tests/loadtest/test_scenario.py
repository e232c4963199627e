"""Scenario files: what is wrong is told with its line before anything is sent."""

from pathlib import Path

import pytest

from loadtest.errors import ScenarioError
from loadtest.scenario import yaml_text
from loadtest.scenario.parse import parse
from loadtest.scenario.schedule import lay_out
from loadtest.scenario.schema import Closed

GOOD = """\
name: mixed
target: {url: "https://host:8000/v1", timeout: 90s}
work: {name: chat, output: [8, 16], cancel: {share: 0.1}}
phases:
  - name: warm
    warmup: true
    arrivals: {kind: closed, concurrency: 4}
    requests: 8
  - name: load
    arrivals: {kind: gamma, rate: 20, cv: 2}
    duration: 500ms
slo: {ttft: 500ms, e2e: 1m}
assert: ["failed==0, p99_ttft<1s"]
"""


def problems(text: str, **overrides: object) -> str:
    with pytest.raises(ScenarioError) as caught:
        lay_out(parse(text, "s.yaml", Path(), overrides), "m")
    return "\n".join(caught.value.problems)


def test_good() -> None:
    """Durations, unions and defaults."""
    scenario = parse(GOOD)
    assert scenario.target.timeout == 90 and scenario.phases[1].duration == 0.5
    assert isinstance(scenario.phases[0].arrivals, Closed)
    assert scenario.slo.limits() == {"ttft": 0.5, "e2e": 60}
    warm, load = lay_out(scenario, "m")
    assert (warm.drain, warm.total, load.drain, load.seconds) == (True, 8, False, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("rate: 20", "rate: 0", "10: phases.1.arrivals.rate: Input should be greater than 0"),
        ("rate: 20", "rate: -1", "10: phases.1.arrivals.rate"),
        ("rate: 20", "rate: 1000000000", "10: phases.1.arrivals.rate: Input should be less"),
        ("rate: 20", "rate: .nan", "10: phases.1.arrivals.rate"),
        ("rate: 20", "rat: 20", "10: phases.1.arrivals.rat: unknown key; did you mean 'rate'"),
        ("kind: gamma", "kind: gama", "10: phases.1.arrivals: no kind 'gama'; did you mean"),
        ("kind: gamma, ", "", "10: phases.1.arrivals: needs kind"),
        ("timeout: 90s", "timeot: 90s", "2: target.timeot: unknown key; did you mean 'timeout'"),
        ("timeout: 90s", "timeout: 0", "2: target.timeout"),
        ("https://host:8000/v1", "host:8000", "2: target: url: 'host:8000' is not http"),
        ("name: chat", "name: chta", "3: work: name: no workload 'chta'; did you mean 'chat'"),
        ("[8, 16]", "[16, 8]", "3: work.output: [16, 8]: the lower end comes first"),
        ("share: 0.1", "share: 1.5", "3: work.cancel.share"),
        ("share: 0.1", "shar: 0.1", "3: work.cancel.shar: unknown key; did you mean 'share'"),
        ("500ms, e2e", "soon, e2e", "12: slo.ttft: 'soon' is no duration"),
        ("slo: {ttft", "slo: {tftt", "12: slo.tftt: unknown key; did you mean 'ttft'"),
        ("p99_ttft<1s", "p99_tfft<1s", "13: assert.0: unknown metric 'p99_tfft'; did you mean"),
        ("    duration: 500ms\n", "", "s.yaml:9: phases.1: needs duration or requests"),
        ("name: load", "name: warm", "s.yaml: phases: two of one name"),
        ("    arrivals: {kind: g", "    warmup: true\n    arrivals: {kind: g", "all are warm-up"),
        ("slo:", "slow:", "12: slow: unknown key; did you mean 'slo'"),
        ("name: mixed", "name: mixed\nname: x", "2: 'name' a second time"),
        ("requests: 8", "requests: 0", "s.yaml:8: phases.0.requests"),
        ("rate: 20, cv: 2", "rate: 0.001, cv: 0.01", "phase 'load' sends nothing"),
        ("kind: gamma, rate: 20, cv: 2", "kind: trace, file: no.jsonl", "no.jsonl: no such"),
    ],
)  # fmt: skip
def test_bad(old: str, new: str, told: str) -> None:
    """A wrong value that is found after an hour of load, or told without its place."""
    assert old in GOOD
    texts = problems(GOOD.replace(old, new, 1))
    assert told in texts and texts.startswith(("s.yaml:", "phase "))
    assert len([line for line in texts.splitlines() if "required" not in line]) == 1


def test_every_problem_at_once() -> None:
    """One message a try makes ten tries."""
    text = GOOD.replace("rate: 20", "rate: 0").replace("timeout: 90s", "timeout: x")
    assert len(problems(text).splitlines()) == 2


def test_empty_trace(tmp_path: Path) -> None:
    """A load test of nothing that passes."""
    (tmp_path / "t.jsonl").write_text("\n")
    text = GOOD.replace("kind: gamma, rate: 20, cv: 2", f"kind: trace, file: {tmp_path}/t.jsonl")
    assert "empty trace" in problems(text)


def test_work_of_a_trace_without_one() -> None:
    """The client processes die of an assertion when the run has begun."""
    texts = problems(GOOD, work={"name": "trace"})
    assert "phases.0" in texts and "kind trace" in texts


@pytest.mark.parametrize(
    "text",
    ["", "- a", "a: [", "\tx: 1", "x: !!python/none {}", "a: &b 1\nc: *b", "x: 1\n---\ny: 2"],
)  # fmt: skip
def test_not_a_scenario(text: str) -> None:
    """A traceback, or a document that is silently not read."""
    assert problems(text).startswith("s.yaml")


def test_deep_nesting_is_an_error() -> None:
    """The parser's own recursion limit ends in a traceback."""
    with pytest.raises(ScenarioError):
        yaml_text.parse("[" * 5000, "s.yaml")


def test_overrides() -> None:
    """--url and --set must be checked as the file is."""
    changes = {"target.url": "http://h:1", "phases.1.arrivals.rate": 5, "work.prefix.groups": 2}
    scenario = parse(GOOD, "s", Path(), changes)
    assert scenario.target.urls == ["http://h:1"]
    assert scenario.work.prefix is not None and scenario.work.prefix.groups == 2
    assert "rate" in problems(GOOD, **{"phases.1.arrivals.rate": 0})
    assert "no 7" in problems(GOOD, **{"phases.7.name": "x"})
    assert "plain value" in problems(GOOD, **{"name.x": 1})


def test_paths_count_from_the_file(tmp_path: Path) -> None:
    """A scenario that works in its own folder only."""
    (tmp_path / "t.jsonl").write_text('{"timestamp":0,"input_length":3,"output_length":2}\n')
    text = "phases: [{name: a, arrivals: {kind: trace, file: t.jsonl}}]"
    (plan,) = lay_out(parse(text, "s", tmp_path), "m")
    assert plan.total == 1 and plan.spec(plan.visits[0]).expected == 2


def test_shares_of_processes() -> None:
    """Two processes that both send a request, or neither does."""
    plans = lay_out(parse(GOOD), "m")
    parts = [plans[1].share(i, 3).visits for i in range(3)]
    assert sorted(v.t for part in parts for v in part) == [v.t for v in plans[1].visits]
    closed = [plans[0].share(i, 3) for i in range(3)]
    assert [p.concurrency for p in closed] == [2, 1, 1]
    assert [(p.requests, p.first, p.step) for p in closed] == [(3, 0, 3), (3, 1, 3), (2, 2, 3)]
