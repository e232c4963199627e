"""ModelLengths: how many drafts of a model a step has, by measured step times and acceptance.

It has the interface of `DraftLengths`, for drafters that run on the device. They always have
drafts, whose acceptance changes little, and each draft costs a pass. Padding of CUDA graphs makes
steps of three drafts a request as long as those of two. So all requests get drafts of one length,
and each length's step time is measured. Lengths take turns in short trials, and the one with the
most tokens a second goes on in long blocks. If none gains, drafts rest. A lost trial is repeated
soon once, as the first steps of new shapes take longer, and then rarely.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from engine.speculation.lengths import DraftRecord

# ---- Blocks, in steps
_SETTLING, _COLD = 2, 6  # unmeasured first steps of a block; further ones of a length's first
_MEASURED = 5  # measured steps of a short block
_LONG, _LONGER = 128, 512  # blocks of the best length; the second where it gains a tenth
_FIRST_REST, _SECOND_REST, _LONGEST_REST = 64, 512, 8192
_DORMANT = 128  # in longer rests the drafter reads nothing
_LAST = 8  # last steps of such a rest, in which it reads
_RETRIALS = 4  # long blocks until another length is measured again; the first ones come sooner

# Least speed-up of drafts: the steps without them, in which the drafter reads, are longer than
# those of a rest.
_LEAST = 1.05
_LOSS = 0.003  # most share of steps that trials may lose
_LIKELY = 0.7  # first guess of the acceptance of a draft after accepted ones
_FEW = 96  # decodes up to which the longest drafts are tried first
_CHEAP = 0.85  # guess of the cost of a length that was not tried, as a share of a line's
_WEIGHT = 0.1  # weight of a new step in a length's mean time
_HIT_WEIGHT = 0.02  # weight of a new draft in its mean acceptance
_POOR = 0.3  # share of the expected acceptance below which a request gets a draft alone


class _Seconds:
    """The mean time of steps: the median of the first, then a running mean without outliers."""

    __slots__ = ("_first", "value")

    def __init__(self) -> None:
        self._first: list[float] = []
        self.value = 0.0  # 0 = not measured

    def measure(self, seconds: float) -> None:
        if len(self._first) < _MEASURED:
            self._first.append(seconds)
            self.value = median(self._first)
            return
        seconds = min(max(seconds, 0.8 * self.value), 1.25 * self.value)
        self.value += _WEIGHT * (seconds - self.value)

    def forget(self) -> None:
        self._first.clear()


class _Block:
    """The measured drafts for steps of about as many decodes, by length, and the length now tried.

    A block is a number of consecutive steps whose drafts have one length.

    length: the length of drafts in the current block; 0 = no drafts.
    block, left: the number of the current block's steps, and how many of them are left.
    resting: whether the current block is without drafts because drafts did not pay.
    """

    __slots__ = (
        "_blocks",
        "_entries",
        "_losses",
        "_rest",
        "_tried",
        "block",
        "left",
        "length",
        "resting",
        "seconds",
        "settling",
    )

    def __init__(self, entries: int, most: int) -> None:
        self._entries = entries
        self.seconds = [_Seconds() for _ in range(most + 1)]  # by length
        self._tried: set[int] = set()
        self._losses = 0  # consecutive rests
        self._rest = _SECOND_REST
        self._blocks = 0  # long blocks so far
        self.resting = False
        self._begin(0)

    def _begin(self, length: int, steps: int = 0) -> None:
        """Begin a block: a trial, or a long one of so many steps."""
        self.length, self.settling = length, _SETTLING
        if length and length not in self._tried:
            self.settling += _COLD
            self._tried.add(length)
        self.block = self.left = steps or self.settling + _MEASURED
        self.resting = False
        if not steps:
            self.seconds[length].forget()

    def speed_up(self, length: int, gain: float) -> float:
        """Return the tokens a second with drafts of a length, divided by those without.

        gain: accepted drafts of a request in a step. A time that was not measured lies on a line.
        """
        plain, own = self.seconds[0].value, self.seconds[length].value
        if not own:
            known = [at for at, other in enumerate(self.seconds) if at and other.value]
            nearest = min(known, key=lambda at: abs(at - length))
            of_draft = (self.seconds[nearest].value - plain) / nearest
            own = plain + _CHEAP * length * max(0.0, of_draft)
        return (1 + gain) * plain / own

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
            return self._begin(most if self._entries <= _FEW else 1)
        values = {length: self.speed_up(length, gains[length]) for length in lengths}
        best = max(measured, key=values.__getitem__)
        untried = [length for length in lengths if length not in measured]
        hope = max(untried, key=values.__getitem__, default=best)
        if values[hope] > max(_LEAST, 1.02 * values[best]):
            return self._begin(hope)
        if values[best] < _LEAST:
            return self._lose(best, values[best])
        self._losses, self._rest = 0, _SECOND_REST
        if self.length == best and self.block > _LONG // 2:
            return self._begin(0)  # the time without drafts changes with the texts' lengths
        self._blocks += 1
        others = [length for length in measured if length != best]
        early = self._blocks <= len(others)
        if others and self.length == 0 and (early or not self._blocks % _RETRIALS):
            return self._begin(others[self._blocks % len(others)])
        long = _LONGER if values[best] > 1.1 and not early else _LONG
        return self._begin(best, long)

    def _lose(self, best: int, value: float) -> None:
        """Begin a rest, or the trial after one."""
        if self.resting:  # measure the most promising length again
            return self._begin(best)
        self._losses += 1
        if self._losses == 1:
            steps = _FIRST_REST
        else:
            lost = (_SETTLING + _MEASURED) * max(0.0, 1 / value - 1)
            steps = max(self._rest, min(int(lost / _LOSS), _LONGEST_REST))
            self._rest = min(2 * self._rest, _LONGEST_REST)
        self._begin(0, steps)
        self.resting = True


class ModelLengths:
    """The controller of the lengths of a model's drafts; one for each engine.

    most: the most draft tokens of a request in a step.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[int, _Block] = {}
        self._entries = 1
        self._current = _Block(1, most)
        # by position: share of drafts that were accepted, of those after accepted ones
        self._hits = [_LIKELY] * most

    def forget_steps(self) -> None:
        """Forget the measured times of all steps: those of warm-up include compilation."""
        self._blocks.clear()
        self._current = _Block(1, self._most)

    def begin_step(self, entries: int) -> int:
        """Return the drafts that each request gets in the next step; 0 = none.

        entries: decoding requests of the step. A step may begin several times.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._blocks:
            self._entries, self._current = entries, self._block_of(entries)
        return self._current.length

    @property
    def dormant(self) -> bool:
        """Whether drafts rest for so long that a drafter need not read the tokens of steps."""
        current = self._current
        return current.resting and current.block > _DORMANT and current.left > _LAST

    def limit(self, record: DraftRecord) -> int:
        """Return the most drafts of a request in the step that `begin_step` began."""
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
                weight = 1 - (1 - _HIT_WEIGHT) ** tried
                hits[position] += weight * (right / tried - hits[position])

    def observe_forced(self, accepted: int) -> None:
        """Do nothing: what a grammar forces says nothing of a model's drafts."""

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Record the seconds of a step of `entries` decodes and `drafts` draft tokens in all."""
        current = self._current if entries <= 0 else self._block_of(entries)
        if entries > 0 and seconds > 0:
            if current.settling:
                current.settling -= 1
            elif 4 * drafts >= 3 * current.length * entries and bool(drafts) == bool(
                current.length
            ):
                current.seconds[current.length].measure(seconds)
        elif not current.resting:
            return
        current.left -= 1
        if current.left <= 0 or (not current.left % 16 and self._loses(current)):
            current.go_on(self._gains())

    def _loses(self, current: _Block) -> bool:
        """Whether a long block's drafts cost more than they give."""
        length = current.length
        if not length or current.block < _LONG or current.settling:
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
            block = self._blocks[bucket] = _Block(entries, self._most)
        return block
