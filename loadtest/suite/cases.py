"""The failure and overload suite, against any OpenAI-compatible server by its URL.

Every case sends the same few greedy questions to /v1/chat/completions, so each answer can be
compared with the one that the server gave when it was asked alone.
"""

import asyncio
import contextlib
import gc
import ipaddress
import os
import platform
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from loadtest.ask import first_model
from loadtest.client.load import LoadClient
from loadtest.errors import RunError, ScenarioError
from loadtest.http import clock
from loadtest.measure.records import RequestRecord
from loadtest.measure.verify import ReceivedAnswer, Reference, reference_of
from loadtest.scenario.parse import parse
from loadtest.scenario.requests import RequestGenerator, RequestSpec
from loadtest.scenario.schedule import PhasePlan, lay_out
from loadtest.suite.figures import CaseFigures, SuiteResult, figures_of
from loadtest.suite.poison import PoisonOutcome, send_all

CASES = ("overload", "slow", "poison", "long", "kill")
OVERLOADS = (1.5, 3.0, 10.0)  # times the measured capacity
_MAX_CPU_SHARE = 0.8  # share of a core above which the client may be the bottleneck
_SLOW_PAUSE_S = 0.2  # seconds for which a slow client pauses after each kilobyte
_START_S = 0.05  # seconds from planning to the first request


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """The options of the suite.

    cases: names of CASES.
    users: concurrent clients that measure the capacity; ideally the number of requests that the
        server runs at once.
    seconds: duration of each case.
    questions: number of different questions.
    prompt_tokens, output_tokens: rough numbers of a question. long_tokens: of a long prompt.
    first_limit_s: maximum seconds to a good answer's first token.
    patience_s: seconds without a byte after which a stream counts as lost.
    kill_pids: processes that get SIGKILL. kill_commands: shell commands that harm the server. Each
        one is executed once, evenly spread over the case "kill".
    allow_remote: whether the server may be on another machine.
    """

    url: str
    model: str | None = None
    key_file: Path | None = None
    cases: tuple[str, ...] = CASES
    users: int = 8
    seconds: float = 20.0
    questions: int = 16
    prompt_tokens: int = 24
    output_tokens: int = 64
    long_tokens: int = 2000
    first_limit_s: float = 4.0
    patience_s: float = 30.0
    kill_pids: tuple[int, ...] = ()
    kill_commands: tuple[str, ...] = ()
    allow_remote: bool = False
    seed: int = 0


class _RepeatedQuestions(RequestGenerator):
    """A generator that repeats the same few questions; some answers are read slowly.

    count: number of different questions.
    slow_every: every slow_every-th answer is read slowly; 0: none.
    """

    count = 1
    slow_every = 0

    def spec(self, index: int, first: int | None = None) -> RequestSpec:
        spec = super().spec(index % self.count)
        if self.slow_every and index % self.slow_every == 0:
            spec = spec._replace(slow_pause=_SLOW_PAUSE_S)
        return spec


@dataclass
class _Suite:
    """The state during a run of the suite.

    references: the undisturbed answers, by question. capacity: answers/s of the undisturbed server.
    """

    options: SuiteOptions
    model: str
    references: dict[str, Reference] = field(default_factory=dict)
    capacity: float = 0.0
    cases: list[CaseFigures] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


Harm = Callable[[list[str]], Awaitable[None]]


def check(options: SuiteOptions) -> None:
    """Check the options before anything is sent. Raises ScenarioError."""
    problems = [
        f"--case {name}: there is none; it may be {', '.join(CASES)}"
        for name in options.cases
        if name not in CASES
    ]
    harms = options.kill_pids or options.kill_commands
    if harms and "kill" not in options.cases:
        problems.append("--kill, --kill-pid: the case kill is not among --case")
    problems += [
        f"--kill-pid {pid}: there is no such process of this user"
        for pid in options.kill_pids
        if not _is_ours(pid)
    ]
    host = urlsplit(options.url).hostname or ""
    if not options.allow_remote and not _is_loopback(host):
        problems.append(
            f"--url {options.url}: {host or 'it'} is not this machine, and the suite does harm: "
            "overload, poison. --allow-remote runs it against a server of yours elsewhere"
        )
    if problems:
        raise ScenarioError(*problems)


def _is_ours(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 1


def _is_loopback(host: str) -> bool:
    try:
        entries = socket.getaddrinfo(host, None)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in entries]
    return bool(addresses) and all(address.is_loopback for address in addresses)


async def run(options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """Run the suite. Raises RunError if the server cannot be reached or answers nothing at first.

    say: called with a line when a case begins.
    """
    target = parse(_text(options, "{kind: at_once}", "requests: 1"), "suite", Path()).target
    model = options.model or await first_model(target)
    suite = _Suite(options, model)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    say("alone: each question once")
    await _ask_alone(suite)
    say(f"capacity: {options.users} users for {options.seconds:g} s")
    await _case(suite, "capacity", _closed(options, options.users))
    first = suite.cases[0]
    suite.capacity = first.answered / first.seconds if first.seconds else 0.0
    if not suite.capacity:
        raise RunError(f"{options.url}: no answer in {options.seconds:g} s: {first.errors}")
    first.goodput = round(first.good / first.answered, 4)
    poison: list[PoisonOutcome] = []
    half = max(1, options.users // 2)
    if "overload" in options.cases:
        for times in OVERLOADS:
            rate = times * suite.capacity
            say(f"overload: {times:g} times the capacity, {rate:.3g} requests/s")
            arrivals = f"{{kind: poisson, rate: {rate:.6g}}}", f"duration: {options.seconds:g}"
            await _case(suite, f"overload {times:g}x", arrivals)
    if "slow" in options.cases:
        say("slow: every second client reads a kilobyte and pauses")
        await _case(suite, "slow clients", _closed(options, options.users), slow_every=2)
    if "poison" in options.cases:
        say("poison: bad JSON, huge bodies and lying lengths beside half the users")

        async def harm(marks: list[str]) -> None:
            poison.extend(await send_all(options.url, model, options.seconds / 40))

        await _case(suite, "beside poison", _closed(options, half), harm=harm)
    if "long" in options.cases:
        say(f"long: prompts of {options.long_tokens} tokens beside half the users")
        await _long_beside_short(suite, half)
    if "kill" in options.cases and (options.kill_pids or options.kill_commands):
        say("kill: " + ", ".join([*map(str, options.kill_pids), *options.kill_commands]))
        await _case(suite, "kills", _closed(options, half), harm=lambda m: _kill(options, m))
    elif "kill" in options.cases:
        suite.warnings.append("nothing was killed: name victims with --kill-pid or --kill")
    say("after: as at first")
    await _case(suite, "after", _closed(options, options.users))
    return SuiteResult(
        url=options.url,
        model=model,
        started_at=started,
        client=f"{os.cpu_count()} CPUs, {platform.platform()}",
        capacity_per_s=round(suite.capacity, 4),
        config=msgspec.to_builtins(asdict(options), enc_hook=str),
        cases=suite.cases,
        poison=poison,
        warnings=suite.warnings,
    )


def _closed(options: SuiteOptions, users: int) -> tuple[str, str]:
    return f"{{kind: closed, concurrency: {users}}}", f"duration: {options.seconds:g}"


def _text(options: SuiteOptions, arrivals: str, length: str, prompt_tokens: int = 0) -> str:
    """Return the YAML text of a scenario with one phase."""
    model = f", model: {_quoted(options.model)}" if options.model else ""
    key = f", key_file: {_quoted(str(options.key_file))}" if options.key_file else ""
    tokens = prompt_tokens or options.prompt_tokens
    name = "chat_long" if prompt_tokens else "chat"
    return (
        f"seed: {options.seed}\n"
        f"target: {{url: {_quoted(options.url)}{model}{key}, timeout: 600, "
        f"chunk_timeout: {options.patience_s:g}, token_ids: false}}\n"
        f"work: {{name: {name}, input: {tokens}, output: {options.output_tokens}}}\n"
        f"phases: [{{name: suite, arrivals: {arrivals}, {length}, drain: true}}]\n"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _plan(
    suite: _Suite, arrivals: str, length: str, *, slow_every: int = 0, prompt_tokens: int = 0
) -> PhasePlan:
    options = suite.options
    scenario = parse(_text(options, arrivals, length, prompt_tokens), "suite", Path())
    (plan,) = lay_out(scenario, suite.model)
    work = scenario.work_of(plan.phase)
    questions = _RepeatedQuestions(work, scenario.seed, "suite", suite.model, first=True)
    questions.count, questions.slow_every = options.questions, slow_every
    return replace(plan, generator=questions)


def _client(
    suite: _Suite,
    sink: Callable[[RequestRecord], None],
    keep: Callable[[RequestSpec, RequestRecord, ReceivedAnswer], None] | None = None,
) -> LoadClient:
    text = _text(suite.options, "{kind: at_once}", "requests: 1")
    target = parse(text, "suite", Path()).target
    return LoadClient(target, sink, references=suite.references, keep=keep)


async def _ask_alone(suite: _Suite) -> None:
    """Ask each question alone, to get the undisturbed texts. Raises RunError without an answer."""
    errors: list[str] = []

    def keep(spec: RequestSpec, record: RequestRecord, answer: ReceivedAnswer) -> None:
        if record.ok:
            suite.references[spec.key()] = reference_of(spec.key(), record, answer)

    def sink(record: RequestRecord) -> None:
        if record.failed:
            errors.append(f"{record.error_class}: {record.error_message}")

    plan = _plan(suite, "{kind: at_once}", f"requests: {suite.options.questions}")
    client = _client(suite, sink, keep)
    for number in range(suite.options.questions):
        await client.ask(plan, number, plan.generator.spec(number))
    client.close()
    if not suite.references:
        raise RunError(f"{suite.options.url}: no question was answered: {errors[0]}")
    if errors:
        suite.warnings.append(f"{len(errors)} questions failed when asked alone: {errors[0]}")


async def _case(
    suite: _Suite,
    name: str,
    arrivals: tuple[str, str],
    *,
    slow_every: int = 0,
    harm: Harm | None = None,
) -> None:
    """Run a case and add its figures. harm: harms the server meanwhile, and records its actions."""
    marks: list[str] = []
    plan = _plan(suite, *arrivals, slow_every=slow_every)
    beside = None if harm is None else asyncio.create_task(_delayed(harm, marks))
    records = await _send(suite, name, plan)
    if beside is not None:
        # Poison requests without an answer take longer than the case.
        await beside
    _add(suite, name, records, marks)


async def _delayed(harm: Harm, marks: list[str]) -> None:
    await asyncio.sleep(_START_S)
    await harm(marks)


async def _send(suite: _Suite, name: str, plan: PhasePlan) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    client = _client(suite, records.append)
    # The client collects garbage and freezes objects, which would delay the first requests.
    gc.collect()
    gc.freeze()
    await client.run([plan], clock() + _START_S)
    if client.cpu_share > _MAX_CPU_SHARE:
        suite.warnings.append(
            f"{name}: this client used {client.cpu_share:.0%} of its core, so its figures may be "
            "the client's"
        )
    return records


def _add(
    suite: _Suite, name: str, records: Sequence[RequestRecord], marks: Sequence[str] = ()
) -> None:
    figures = figures_of(
        name,
        records,
        suite.options.seconds,
        capacity=suite.capacity,
        first_limit_s=suite.options.first_limit_s,
        marks=marks,
    )
    suite.cases.append(figures)


async def _long_beside_short(suite: _Suite, users: int) -> None:
    """Send short questions while two more clients send long prompts; short and long requests are a
    case each."""
    options = suite.options
    short = _plan(suite, *_closed(options, users))
    long = _plan(suite, *_closed(options, 2), prompt_tokens=options.long_tokens)
    beside, sent = await asyncio.gather(
        _send(suite, "beside long prompts", short), _send(suite, "long prompts", long)
    )
    _add(suite, "beside long prompts", beside)
    _add(suite, "long prompts", sent)


async def _kill(options: SuiteOptions, marks: list[str]) -> None:
    """Kill each process and run each command once, evenly spread over the case."""
    harms = len(options.kill_pids) + len(options.kill_commands)
    pause = options.seconds / (harms + 1)
    began = clock()
    for pid in options.kill_pids:
        await asyncio.sleep(pause)
        done = "killed"
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            done = "had ended"
        marks.append(f"{clock() - began:.2f} s: pid {pid} {done}")
    for command in options.kill_commands:
        await asyncio.sleep(pause)
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        status: int | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                status = await process.wait()
        ended = "runs on" if status is None else f"exit status {status}"
        marks.append(f"{clock() - began:.2f} s: {command} ({ended})")
