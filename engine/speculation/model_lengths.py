"""ModelLengths: how many drafts of a model a step has, by measured step times and acceptance.

The class has the interface of `DraftLengths`, for drafters that run on the device. Such drafters
always have drafts, whose acceptance changes little, and each draft costs a pass of the drafter.
Padding of CUDA graphs makes steps of three drafts a request as long as those of two. So all
requests get drafts of one length, and each length's step time is measured. Lengths take turns in
short trials, and the one with the most tokens a second goes on in long blocks. If none gains,
drafts rest, until the time that drafts have lost is a small share of all steps. A lost trial whose
drafts were mostly right is repeated soon once, as the first steps of new shapes take longer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from engine.speculation.lengths import DraftRecord

# ---- Blocks, in steps
_SETTLING, _COLD = 2, 6  # unmeasured first steps of a block; further ones of a length's first block
_MEASURED = 5  # measured steps of a short block
_LONG, _LONGER = 128, 512  # blocks of the best length; the second where it gains a tenth
_FIRST_REST, _SECOND_REST, _LONGEST_REST = 32, 512, 8192
_DORMANT = 128  # in longer rests the drafter reads nothing
_LAST = 8  # last steps of such a rest, in which the drafter reads
_RETRIALS = 4  # long blocks until another length is measured again; the first ones come sooner

# ---- Speed-ups: tokens a second with drafts, divided by tokens a second without
_LEAST = 1.02  # least speed-up at which drafts go on
# _LEAST_READING replaces _LEAST while steps without drafts were measured only with a drafter that
# reads their tokens, which takes up to a tenth of a step. Up to a speed-up of _CLOSE, steps without
# such reads are measured before drafts go on.
_LEAST_READING, _CLOSE = 1.05, 1.15
_PROMISING = 1.18  # guessed speed-up at which an untried length is tried at once
_PROBABLE = 1.7  # tokens of a step at which a lost trial is repeated soon

_LOSS = 0.003  # maximum share of steps that trials may lose
_CREDIT = 8.0  # maximum of won steps that later losses are set off against
_WORST = 4.0  # maximum time of a trial's step, in steps without drafts
_CHEAPEST = 0.03  # least cost of a draft, in steps without drafts
_LIKELY = 0.7  # first guess of the acceptance of a draft after accepted ones
_FEW = 96  # decodes up to which the longest drafts are tried first
_CHEAP = 0.85  # guessed cost a draft of an untried length, as a share of a tried one's
_WEIGHT = 0.1  # weight of a new step in a length's mean time
_HIT_WEIGHT = 0.02  # least weight of a new draft in its mean acceptance; the first weigh more
_POOR = 0.3  # share of the expected acceptance below which a request gets a draft alone


class _Seconds:
    """The mean time of a step: the median of the first _MEASURED times, then a running mean that
    clips outliers."""

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
    """The time that drafts have lost and not won back, for all numbers of decodes together.

    steps: that time, in steps without drafts; it falls by _LOSS a step. Negative after won time,
        down to -_CREDIT.
    """

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0.0

    @property
    def allow(self) -> bool:
        """Whether a trial that probably loses may begin."""
        return self.steps <= 1.0

    def add(self, steps: float) -> None:
        """Add lost steps; negative for won ones."""
        self.steps = max(-_CREDIT, self.steps + steps)

    def fade(self) -> None:
        """Reduce the losses after each step."""
        if self.steps > 0:
            self.steps = max(0.0, self.steps - _LOSS)


class _Block:
    """The step times for one range of decodes a step, by length of drafts, and the current block.

    A block is a number of consecutive steps whose drafts have one length.

    length: the length of drafts in the current block; 0 = no drafts.
    block, left: how many steps the current block has, and how many of them are to come.
    resting: whether the current block is without drafts because drafts did not pay.
    dormant: whether the drafter reads nothing in the current block, but for a rest's last steps.
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
        # by length of drafts; [0]: steps without drafts, in which the drafter does not read
        self.seconds = [_Seconds() for _ in range(most + 1)]
        self._reading = _Seconds()  # steps without drafts in which the drafter reads
        self._share = 0.0  # time without reading / time with reading; 0 = not known
        self._tried: set[int] = set()
        self._rests = 0  # consecutive rests
        self._rest = _SECOND_REST
        self._blocks = 0  # long blocks so far
        self._begin(0)

    def _begin(self, length: int, steps: int = 0, *, dormant: bool = False) -> None:
        """Begin a block of `steps` steps with drafts of this length; 0 steps: a trial."""
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
        """Whether the drafter need not read the tokens of the next step."""
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

        gain: accepted drafts of a request in a step. An unmeasured time is estimated from others.
        """
        plain, own = self.seconds[0].value, self.seconds[length].value
        if not own:
            known = [at for at, other in enumerate(self.seconds) if at and other.value]
            nearest = min(known, key=lambda at: abs(at - length))
            of_draft = (self.seconds[nearest].value - plain) / nearest
            own = plain + _CHEAP * length * max(0.0, of_draft)
        return (1 + gain) * plain / own

    def hopeless(self, length: int, gain: float) -> bool:
        """Whether drafts of a length lose even if they cost the least that drafts can.

        gain: accepted drafts of a request in a step.
        """
        return (1 + gain) / (1 + _CHEAPEST * length) < _LEAST

    def go_on(self, gains: list[float]) -> None:
        """Begin the next block.

        gains: by length, the expected accepted drafts of a request in a step.
        """
        if not self.seconds[0].value:
            return self._begin(0)
        most = len(self.seconds) - 1
        lengths = range(1, most + 1)
        measured = [length for length in lengths if self.seconds[length].value]
        if not measured:
            self._tried.discard(self.length)  # a trial that has ended early
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
            return self._begin(0)  # the time without drafts changes with the texts' lengths
        self._blocks += 1
        others = [length for length in measured if length != best]
        early = self._blocks <= len(others)
        if others and self.length == 0 and (early or not self._blocks % _RETRIALS):
            return self._begin(others[self._blocks % len(others)])
        long = _LONGER if values[best] > 1.1 and not early else _LONG
        return self._begin(best, long)

    def _lose(self, best: int, gain: float) -> None:
        """Begin a rest, or the trial after one.

        best, gain: the most promising length, and its accepted drafts of a request in a step.
        """
        if self.resting:  # measure the most promising length again
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
        # by position: the share of accepted drafts among those whose predecessors were accepted
        # (`_hits`), and the number of these drafts (`_seen`), with 1 for the guess
        self._hits = [_LIKELY] * most
        self._seen = [1] * most

    def forget_steps(self) -> None:
        """Forget the measured times of all steps: those of warm-up include compilation."""
        self._blocks.clear()
        self._losses.steps = 0.0
        self._current = _Block(1, self._most, self._losses)

    def begin_step(self, entries: int) -> int:
        """Return the drafts that each request gets in the next step; 0 = none.

        entries: decoding requests of the step. May be called several times for a step.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._blocks:
            self._entries, self._current = entries, self._block_of(entries)
        return self._current.length

    @property
    def dormant(self) -> bool:
        """Whether drafts rest for so long that a drafter need not read the tokens of steps."""
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
        """Do nothing: no text makes a model's drafts better."""

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        """Return how many drafts each request gets, at most the given lengths."""
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
            tried = right = 0  # drafts at this position after accepted ones
            for (count, last), number in pairs.items():
                if count > position <= last:
                    tried += number
                    right += number * (last > position)
            if tried:
                self._seen[position] += tried
                weight = max(1 - (1 - _HIT_WEIGHT) ** tried, tried / self._seen[position])
                hits[position] += weight * (right / tried - hits[position])

    def observe_forced(self, accepted: int) -> None:
        """Do nothing: what a grammar forces says nothing of a model's drafts."""

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
        """Whether the block's drafts cost more than they give, so that it ends early."""
        length = current.length
        if not length:
            return False
        if current.block < _LONG:
            return current.hopeless(length, self._gains()[length])
        if current.settling or current.left % 16:
            return False
        return current.speed_up(length, self._gains()[length]) < 1.0

    def _gains(self) -> list[float]:
        """Return, by length, the expected accepted drafts of a request in a step."""
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
