"""ModelLengths on a simulated H200: the best length is found, and losing drafts rest.

The step times are those of llama-8b with an EAGLE-3 drafter, from
bench/notes/speculation.md (an H200, before drafts were columns). The cost of a step
in which the drafter reads and does not draft is a guess, as are times between the measured ones.
"""

import random
from itertools import pairwise

import pytest

from engine.speculation.lengths import DraftRecord
from engine.speculation.model_lengths import ModelLengths

PLAIN = [(1, 4.0e-3), (64, 6.12e-3), (256, 12.8e-3)]  # streams, seconds
# seconds of steps with 1, 2 and 3 drafts a request, by streams
DRAFTS = {1: (4.95e-3, 5.28e-3, 5.6e-3), 64: (9.0e-3, 11.6e-3, 11.3e-3), 256: (22e-3, 31e-3, 38e-3)}
READS = 0.35e-3  # of a drafter that reads a step's tokens
EAGLE = (0.75, 0.55, 0.4)


def _between(points: list[tuple[int, float]], streams: int) -> float:
    for (first, low), (last, high) in pairwise(points):
        if streams <= last:
            return low + (high - low) * (streams - first) / (last - first)
    raise AssertionError


def seconds(streams: int, drafts: float) -> float:
    """Return the seconds of a step, of so many drafts a request."""
    times = [_between(PLAIN, streams)]
    times += [_between([(n, DRAFTS[n][k]) for n in DRAFTS], streams) for k in range(3)]
    low = int(drafts)
    return times[low] + (times[min(3, low + 1)] - times[low]) * (drafts - low)


def speed_up(
    lengths: ModelLengths | None,
    streams: int,
    rates: tuple[float, ...],
    steps: int,
    *,
    forced: int = 0,
    cold: int = 6,
    seed: int = 0,
) -> float:
    """Return the tokens a second with drafts, divided by those without.

    lengths: the controller; None = each step has `forced` drafts of each request.
    cold: first steps of each range of batch sizes that take 5 to 9 ms longer.
    """
    rng = random.Random(seed)
    records, coming = [DraftRecord() for _ in range(streams)], [0] * streams
    tokens, total, seen = 0, 0.0, dict[int, int]()
    for _ in range(steps):
        drafts, right = sum(coming), []
        for drafted in coming:
            accepted = 0
            while accepted < drafted and rng.random() < rates[accepted]:
                accepted += 1
            right.append(accepted)
        tokens += streams + sum(right)
        if drafts and lengths is not None:
            lengths.observe_drafts(records, coming, right)
        most = forced if lengths is None else lengths.begin_step(streams)
        if lengths is not None and most:
            coming = lengths.worth(records, [most] * streams)
        else:
            coming = [most] * streams
        step = seconds(streams, drafts / streams)
        step += READS * (not drafts and lengths is not None and not lengths.dormant)
        shape = (streams + drafts) // 32
        seen[shape] = seen.get(shape, 0) + bool(drafts)
        if drafts and seen[shape] <= cold:
            step += rng.uniform(5e-3, 9e-3)
        step *= rng.lognormvariate(0, 0.02)
        if lengths is not None:
            lengths.observe_step(streams, drafts, step)
        total += step
        if rng.random() < streams / 256:  # a request ends, and another begins
            records[rng.randrange(streams)] = DraftRecord()
    return tokens / total * seconds(streams, 0) / streams


@pytest.mark.parametrize("rates", [EAGLE, (0.85,) * 3, (0.6,) * 3], ids=str)
@pytest.mark.parametrize("streams", [1, 8, 64, 128])
def test_the_best_length_is_found(streams: int, rates: tuple[float, ...]) -> None:
    """Bugs: the first trial falls into the first steps of new shapes, and drafts rest; a length
    that padding makes dear is kept; lengths are never measured again."""
    best = max(speed_up(None, streams, rates, 200, forced=k, cold=0) for k in (1, 2, 3))
    reached = speed_up(ModelLengths(3), streams, rates, 1500)
    assert reached > 0.96 * max(best, 1.0)


def test_auto_reaches_what_forced_drafts_reach() -> None:
    """Bug: 64 streams had 0.94 of none where drafts that are forced had 1.26."""
    assert speed_up(ModelLengths(3), 64, EAGLE, 1500) > 1.22


@pytest.mark.parametrize("streams", [32, 64, 128, 256])
def test_losing_drafts_rest(streams: int) -> None:
    """Bugs: a drafter reads each token of an engine whose drafts rest; every rest ends in a trial
    of each length."""
    lengths = ModelLengths(3)
    first = speed_up(lengths, streams, (0.3,) * 3, 700)
    assert first > 0.94 and lengths.dormant
    assert speed_up(lengths, streams, (0.3,) * 3, 2500, seed=1) > 0.99


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7])
@pytest.mark.parametrize("streams", [1, 4, 16, 64, 256])
def test_nothing_is_lost_at_any_acceptance(streams: int, acceptance: float) -> None:
    """Bugs: with 16 to 64 streams the first steps lost 2 to 3 % where a fifth of drafts is right,
    as a second length was tried at once; one stream of wrong drafts tried five times in a row;
    drafts went on that gained only against steps in which a drafter reads."""
    rates = (acceptance,) * 3
    lengths = ModelLengths(3)
    assert speed_up(lengths, streams, rates, 1500, cold=1) > 0.99
    assert speed_up(lengths, streams, rates, 1500, cold=0, seed=1) > 0.99
    assert speed_up(ModelLengths(3), streams, rates, 1500) > 0.982  # slow first steps


def test_losses_of_all_batch_sizes_add_up() -> None:
    """Bug: an engine whose batches grow tries drafts that lose anew at each size."""
    lengths = ModelLengths(3)
    tried = 0
    for streams in (2, 4, 8, 16, 32, 64):
        for step in range(100):
            drafts = lengths.begin_step(streams)
            if drafts:
                right = [drafts if (at + step) % 8 == 0 else 0 for at in range(streams)]
                records = [DraftRecord() for _ in range(streams)]
                lengths.observe_drafts(records, [drafts] * streams, right)
            lengths.observe_step(streams, drafts * streams, 8e-3 if drafts else 4e-3)
            tried += bool(drafts)
    assert 10 < tried < 40


def test_steps_without_drafts_are_measured_without_the_drafter() -> None:
    """Bug: drafts of 1.03 of steps in which the drafter reads are 0.97 of those of an engine
    without, and go on."""
    lengths = ModelLengths(1)
    drafted = 0
    for number in range(2000):
        drafts = lengths.begin_step(8)
        seconds = 1.6e-3 if drafts else 1.0e-3 if lengths.dormant else 1.09e-3
        if drafts:
            lengths.observe_drafts([DraftRecord()] * 8, [1] * 8, [1, 1, 1, 0, 1, 1, 1, 0])
        lengths.observe_step(8, 8 * drafts, seconds)
        drafted += drafts * (number > 500)
    assert drafted > 1000  # 1.75 tokens in 1.6 times the time: a gain
    lengths = ModelLengths(1)
    drafted = 0
    for number in range(2000):
        drafts = lengths.begin_step(8)
        seconds = 1.54e-3 if drafts else 1.0e-3 if lengths.dormant else 1.09e-3
        if drafts:
            lengths.observe_drafts([DraftRecord()] * 8, [1] * 8, [1, 1, 1, 0, 0, 1, 0, 0])
        lengths.observe_step(8, 8 * drafts, seconds)
        drafted += drafts * (number > 500)
    assert drafted < 50  # 1.5 tokens in 1.54 times the time, 1.06 of steps that read


def test_a_change_of_texts_is_noticed() -> None:
    """Bugs: drafts that began to lose go on; drafts that began to gain rest for good."""
    lengths = ModelLengths(3)
    assert speed_up(lengths, 64, (0.85,) * 3, 400) > 1.3
    speed_up(lengths, 64, (0.05,) * 3, 600)
    assert lengths.dormant
    speed_up(lengths, 64, (0.85,) * 3, 3000)
    assert speed_up(lengths, 64, (0.85,) * 3, 400) > 1.3


def test_poor_requests_get_a_draft_alone() -> None:
    """Bug: a request whose drafts are never right has as many as the others."""
    lengths = ModelLengths(3)
    poor, good = DraftRecord(), DraftRecord()
    for _ in range(40):
        lengths.begin_step(2)
        lengths.observe_drafts([poor, good], [3, 3], [0, 3])
        lengths.observe_step(2, 6, 5e-3)
    while not lengths.begin_step(2):
        lengths.observe_step(2, 0, 5e-3)
    assert lengths.worth([poor, good], [3, 3]) == [1, 3]
