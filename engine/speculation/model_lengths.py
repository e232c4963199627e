"""ModelLengths: how many drafts a draft model computes, by measured step times and acceptance.

The class has the interface of `DraftLengths`, for drafters that run on the device. Such drafters
always have drafts, whose acceptance changes little, and each draft costs a pass of the drafter.
Padding of CUDA graphs makes steps with three drafts a request as long as those with two. So all
requests get drafts of equal length, and the step time is measured for each length. Lengths are
tried in short blocks of steps, and the length with the most tokens a second is used in long blocks.
If no length gains, drafts pause (rest) until the lost time is a small share of all steps. A lost
trial with high acceptance is repeated once soon, as the first steps of new shapes take longer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from engine.speculation.lengths import DraftRecord

# ---- Blocks, in steps
# number of unmeasured first steps of a block, and of further ones in a length's first block
_SETTLING, _COLD = 2, 6
_MEASURED = 5  # number of measured steps of a short block
# steps of a long block of the best length; the second value if the length gains a tenth
_LONG, _LONGER = 128, 512
_FIRST_REST, _SECOND_REST, _LONGEST_REST = 32, 512, 8192
_DORMANT = 128  # in longer pauses of drafts the drafter does not process the steps' tokens
_LAST = 8  # number of last steps of such a rest, in which the drafter processes tokens
_RETRIALS = 4  # number of long blocks until another length is measured again; fewer at first

# ---- Speed-ups: tokens a second with drafts, divided by tokens a second without
_LEAST = 1.02  # minimum speed-up at which drafts continue
# _LEAST_READING replaces _LEAST as long as steps without drafts were measured only while the
# drafter processed their tokens, which takes up to a tenth of a step. For a speed-up below _CLOSE,
# steps without this work are measured before drafts continue.
_LEAST_READING, _CLOSE = 1.05, 1.15
_PROMISING = 1.18  # estimated speed-up at which an untried length is tried at once
_PROBABLE = 1.7  # tokens a step of a request at which a lost trial is repeated soon

_LOSS = 0.003  # maximum share of steps that trials may lose
_CREDIT = 8.0  # maximum number of gained steps against which later losses are offset
_WORST = 4.0  # maximum time of a step in a trial, in steps without drafts
_CHEAPEST = 0.03  # minimum cost of a draft, in steps without drafts
_LIKELY = 0.7  # initial estimate of the acceptance of a draft after accepted ones
_FEW = 96  # number of decodes up to which the longest drafts are tried first
_CHEAP = 0.85  # estimated cost per draft of an untried length, relative to that of a tried one
_WEIGHT = 0.1  # weight of a new step in a length's mean time
# minimum weight of a new draft in the mean acceptance; the first drafts have more
_HIT_WEIGHT = 0.02
_POOR = 0.3  # share of the expected acceptance below which a request gets a single draft


class _Seconds:
    """The mean time of a step.

    It is the median of the first _MEASURED times, then a running mean that clips outliers.
    """

    __slots__ = ("_first", "value")

    def __init__(self) -> None:
        self._first: list[float] = []
        self.value = 0.0  # 0 = not measured

    @property
    def settled(self) -> bool:
        """Whether enough steps were measured since `forget`."""
        return len(self._first) == _MEASURED

    def measure(self, seconds: float) -> None:
        if not self.settled:
            self._first.append(seconds)
            self.value = median(self._first)
            return
        seconds = min(max(seconds, 0.8 * self.value), 1.25 * self.value)
        self.value += _WEIGHT * (seconds - self.value)

    def forget(self) -> None:
        self._first.clear()


class _Losses:
    """The net time that drafts have lost, over all numbers of decodes together.

    steps: the lost time, as a number of steps without drafts, reduced by _LOSS at each step. It is
        negative after gains, down to -_CREDIT.
    """

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0.0

    @property
    def allow(self) -> bool:
        """Whether a trial that probably loses time may begin."""
        return self.steps <= 1.0

    def add(self, steps: float) -> None:
        """Add lost time, in steps without drafts; negative for gains."""
        self.steps = max(-_CREDIT, self.steps + steps)

    def fade(self) -> None:
        """Reduce the losses after each step."""
        if self.steps > 0:
            self.steps = max(0.0, self.steps - _LOSS)


class _Block:
    """The step times for one range of decodes a step, by length of drafts, and the current block.

    A block is a number of consecutive steps whose drafts have one length.

    length: the length of drafts in the current block; 0 = no drafts.
    block, left: the number of steps of the current block, and of its remaining steps.
    resting: whether the current block has no drafts because they do not gain.
    dormant: whether the drafter skips the tokens of the current block, except its last steps.
    """

    __slots__ = (
        "_blocks",
        "_entries",
        "_losses",
        "_reading",
        "_rest",
        "_rests",
        "_share",
        "_tried",
        "block",
        "dormant",
        "left",
        "length",
        "resting",
        "seconds",
        "settling",
    )

    def __init__(self, entries: int, most: int, losses: _Losses) -> None:
        self._entries, self._losses = entries, losses
        # step times by length of drafts; [0] = without drafts and without work of the drafter
        self.seconds = [_Seconds() for _ in range(most + 1)]
        # step times without drafts, while the drafter processes the steps' tokens
        self._reading = _Seconds()
        self._share = 0.0  # ratio of the mean of seconds[0] to that of _reading; 0 = unknown
        self._tried: set[int] = set()
        self._rests = 0  # number of consecutive rests
        self._rest = _SECOND_REST
        self._blocks = 0  # number of long blocks so far
        self._begin(0)

    def _begin(self, length: int, steps: int = 0, *, dormant: bool = False) -> None:
        """Begin a block of `steps` steps with drafts of this length; 0 = a trial's number of
        steps."""
        self.length, self.settling = length, _SETTLING
        if length and length not in self._tried:
            self.settling += _COLD
            self._tried.add(length)
        self.block = self.left = steps or self.settling + _MEASURED
        self.resting, self.dormant = False, dormant
        if not steps:
            self.seconds[length].forget()
            self._reading.forget()

    @property
    def sleeps(self) -> bool:
        """Whether the drafter may skip the tokens of the next step."""
        return self.dormant and not (self.resting and self.left <= _LAST)

    def measure(self, seconds: float) -> None:
        """Add the time of a step of the current block."""
        plain = self.seconds[0]
        if self.length:
            self.seconds[self.length].measure(seconds)
        elif self.sleeps:
            plain.measure(seconds)
            if not self._share and plain.settled and self._reading.value:
                self._share = min(1.0, plain.value / self._reading.value)
        elif not self.dormant:
            self._reading.measure(seconds)
            plain.measure(seconds * (self._share or 1.0))

    def speed_up(self, length: int, gain: float) -> float:
        """Return the tokens a second with drafts of a length, divided by those without.

        An unmeasured time is estimated from those of other lengths.

        gain: the mean number of accepted drafts of a request in a step.
        """
        plain, own = self.seconds[0].value, self.seconds[length].value
        if not own:
            known = [at for at, other in enumerate(self.seconds) if at and other.value]
            nearest = min(known, key=lambda at: abs(at - length))
            of_draft = (self.seconds[nearest].value - plain) / nearest
            own = plain + _CHEAP * length * max(0.0, of_draft)
        return (1 + gain) * plain / own

    def hopeless(self, length: int, gain: float) -> bool:
        """Whether drafts of a length lose time even at the minimum cost of drafts.

        gain: the mean number of accepted drafts of a request in a step.
        """
        return (1 + gain) / (1 + _CHEAPEST * length) < _LEAST

    def go_on(self, gains: list[float]) -> None:
        """Begin the next block.

        gains: by length, the expected number of accepted drafts of a request in a step.
        """
        if not self.seconds[0].value:
            return self._begin(0)
        most = len(self.seconds) - 1
        lengths = range(1, most + 1)
        measured = [length for length in lengths if self.seconds[length].value]
        if not measured:
            self._tried.discard(self.length)  # a trial that ended early is repeated
            first = most if self._entries <= _FEW else 1
            probable = self._losses.allow or gains[first] >= _PROBABLE - 1
            if self.resting or (probable and not self.hopeless(first, gains[first])):
                return self._begin(first)
            return self._lose(first, gains[first])
        values = {length: self.speed_up(length, gains[length]) for length in lengths}
        best = max(measured, key=values.__getitem__)
        untried = [length for length in lengths if length not in measured]
        hope = max(untried, key=values.__getitem__, default=best)
        least = _LEAST if self._share else _LEAST_READING
        if values[hope] > max(least, 1.02 * values[best]) and (
            self._losses.allow or values[hope] > _PROMISING
        ):
            return self._begin(hope)
        if values[best] < least:
            return self._lose(best, gains[best])
        if not self._share and values[best] < _CLOSE:
            return self._begin(0, dormant=True)
        self._rests, self._rest = 0, _SECOND_REST
        if self.length == best and self.block > _LONG // 2:
            # measured again, as the time without drafts changes with the texts' lengths
            return self._begin(0)
        self._blocks += 1
        others = [length for length in measured if length != best]
        early = self._blocks <= len(others)
        if others and self.length == 0 and (early or not self._blocks % _RETRIALS):
            return self._begin(others[self._blocks % len(others)])
        long = _LONGER if values[best] > 1.1 and not early else _LONG
        return self._begin(best, long)

    def _lose(self, best: int, gain: float) -> None:
        """Begin a rest, or the trial after a rest.

        best: the most promising length of drafts.
        gain: the mean number of accepted drafts of a request in a step at that length.
        """
        if self.resting:  # after a rest, the most promising length is measured again
            return self._begin(best)
        self._rests += 1
        if self._rests == 1 and gain >= _PROBABLE - 1:
            steps = _FIRST_REST
        else:
            steps = min(max(self._rest, int(self._losses.steps / _LOSS)), _LONGEST_REST)
            self._rest = min(2 * self._rest, _LONGEST_REST)
        self._begin(0, steps, dormant=steps > _DORMANT)
        self.resting = True


class ModelLengths:
    """The controller of the lengths of a model's drafts; one for each engine.

    most: the maximum number of draft tokens of a request in a step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[int, _Block] = {}
        self._entries = 1
        self._losses = _Losses()
        self._current = _Block(1, most, self._losses)
        # By position: the share of accepted drafts among those whose predecessors were accepted
        # (`_hits`), and the number of these drafts (`_seen`), where the initial estimate counts as
        # 1.
        self._hits = [_LIKELY] * most
        self._seen = [1] * most

    def forget_steps(self) -> None:
        """Forget the measured times of all steps: those of warm-up include compilation."""
        self._blocks.clear()
        self._losses.steps = 0.0
        self._current = _Block(1, self._most, self._losses)

    def begin_step(self, entries: int) -> int:
        """Return the number of drafts that each request gets in the next step; 0 = none.

        This may be called several times for a step.

        entries: the number of decoding requests of the step.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._blocks:
            self._entries, self._current = entries, self._block_of(entries)
        return self._current.length

    @property
    def dormant(self) -> bool:
        """Whether drafts pause for so long that the drafter may skip the tokens of steps."""
        return self._current.sleeps

    def limit(self, record: DraftRecord) -> int:
        """Return the maximum number of drafts of a request in the step that `begin_step` began."""
        return self._current.length

    def look_due(self) -> int:
        """Return 0: a model's drafts do not depend on repeated text."""
        return 0

    def note_look(self, repeats: bool) -> None:
        """Do nothing; see `look_due`."""

    def wake(self) -> None:
        """Do nothing, as predictions do not improve a model's drafts."""

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        """Return how many drafts each request gets, at most the given lengths.

        Beside other requests, one whose acceptance is far below the expected one gets one draft.
        """
        most, poor = self._current.length, _POOR if self._entries > 1 else -1.0
        return [
            (length if length < most else most) if record.accepted >= poor * record.expected else 1
            for record, length in zip(records, lengths, strict=True)
        ]

    def observe_drafts(
        self, records: Sequence[DraftRecord], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Record how many of each request's drafted tokens were accepted."""
        gains, hits = self._gains(), self._hits
        for record, count, right in zip(records, drafted, accepted, strict=True):
            record.expected = expected = 0.9 * record.expected + gains[count]
            known = 0.9 * record.accepted + right
            least = 0.02 * expected
            record.accepted = known if known > least else least
        pairs = Counter(zip(drafted, accepted, strict=True))
        for position in range(self._most):
            # numbers of drafts at this position after accepted ones, and of accepted ones among
            # these
            tried = right = 0
            for (count, last), number in pairs.items():
                if count > position <= last:
                    tried += number
                    right += number * (last > position)
            if tried:
                self._seen[position] += tried
                weight = max(1 - (1 - _HIT_WEIGHT) ** tried, tried / self._seen[position])
                hits[position] += weight * (right / tried - hits[position])

    def observe_forced(self, accepted: int) -> None:
        """Do nothing, as forced tokens are no sample of a model's acceptance."""

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Record the seconds of a step of `entries` decodes and `drafts` draft tokens in all."""
        current = self._current if entries <= 0 else self._block_of(entries)
        length, losses = current.length, self._losses
        losses.fade()
        if entries > 0 and seconds > 0:
            if drafts and (plain := current.seconds[0].value):
                losses.add(min(seconds / plain, _WORST) - 1 - self._gains()[length])
            if current.settling:
                current.settling -= 1
            elif 4 * drafts >= 3 * length * entries and bool(drafts) == bool(length):
                current.measure(seconds)
        elif not current.resting:
            return
        current.left -= 1
        if current.left <= 0 or self._loses(current):
            current.go_on(self._gains())

    def _loses(self, current: _Block) -> bool:
        """Whether the block should end early, as its drafts cost more than they gain."""
        length = current.length
        if not length:
            return False
        if current.block < _LONG:
            return current.hopeless(length, self._gains()[length])
        if current.settling or current.left % 16:
            return False
        return current.speed_up(length, self._gains()[length]) < 1.0

    def _gains(self) -> list[float]:
        """Return, by length, the expected number of accepted drafts of a request in a step."""
        gains, share = [0.0], 1.0
        for hit in self._hits:
            share *= hit
            gains.append(gains[-1] + share)
        return gains

    def _block_of(self, entries: int) -> _Block:
        bucket = round(2 * math.log2(entries))
        block = self._blocks.get(bucket)
        if block is None:
            block = self._blocks[bucket] = _Block(entries, self._most, self._losses)
        return block
