"""DraftLengths: how many drafts of look-up a step verifies, by measured step times and acceptance.

model_lengths.py decides about drafts of a model.

    record = DraftRecord()                              one for each request that may draft
    most = lengths.begin_step(entries)                  before each step; 0 = ask no drafter
    if length := lengths.look_due():                    while it is 0: check one request, whether
        lengths.note_look(repeats)                      its last `length` tokens occur earlier
    drafts = source.propose(lengths.limit(record))
    [most] = lengths.worth([record], [len(drafts)])     drop tokens that cost more than they gain
    lengths.observe_drafts([record], [drafted], [accepted])      verified drafts (drafted >= 1)
    lengths.observe_step(entries, drafts, seconds)      each step of decodes alone

The controller decides twice, from figures that the engine measures:

1. For each draft: a token is verified if its acceptance probability exceeds the price of a row, the
   share of a step's time for one more token. Probabilities are those of drafts of equal length (a
   draft is long where its match is long), corrected by the request's earlier acceptance.
2. For steps: blocks of steps with drafts alternate with short blocks without. If the blocks with
   drafts give fewer tokens a second, drafts pause for 64 steps (a rest), later for up to 256. They
   pause too if none is accepted, as asking drafters takes time. A rest goes on while checks (looks)
   of one request every few steps find no text that repeats.
"""

import math
from collections.abc import Sequence

# ---- Blocks and rests, in steps
_SETTLING = 2  # unmeasured first steps of a block: a step of the block before may be in flight
_MEASURED = 4  # measured steps of a short block
_REST, _LONGEST_REST = 64, 256  # first and longest rest
_LAST = 8  # last steps of a rest, which are measured
_BLANK = 64  # consecutive steps without an accepted draft after which a rest begins
_LOOK, _LOOK_FEW = 32, 16  # steps between two looks; the second with at most _FEW decodes
_REPEATED, _REPEATED_FEW = 3, 2  # tokens that have to repeat in a look; the second as above
_REPEATS = 2  # consecutive looks with a repeat that end a rest begun for lack of accepted drafts
_FEW = 16  # up to so many decodes in a step, the time for asking drafters is negligible

# ---- Thresholds. Speed-up: tokens a second with drafts, divided by tokens a second without.
_KEEPS = 0.994  # least speed-up at which drafts go on
_LOSES = 0.97  # speed-up below which a block ends early and rests become longer
_NOISE = 0.1  # random error of the measured speed-up with one decode a step; less with more
_MARGIN = 1.15  # least gain of a draft token, as a multiple of its price
_LIKELY = 0.7  # first guess of the acceptance of a token of a long draft
_LEAST_GAIN = 0.004  # accepted drafts per decode below which drafts rest
_PROBES = 0.004  # maximum share of time for drafts not worth their price, to measure them

# ---- Running means, and the fitted line of a step's extra time over its draft tokens
_STEP_WEIGHT = 0.15  # weight of a new step with drafts in the means; less with few decodes
_PLAIN_WEIGHT = 0.15  # weight of a new step without drafts, of which there are few
_HIT_WEIGHT = 0.04  # weight of a new draft in the mean acceptance
_FADING = 0.97  # factor of the line's earlier steps at each step with drafts
_RETURNING = 0.994  # factor at a step without drafts, where the line moves to its first guess
_SURPRISE = 0.2  # maximum deviation of a step's time from the line, in steps; outliers are clipped
# Most fixed extra time of a step with drafts (the line's intercept), in steps; what is beyond it is
# taken for other programs' load.
_MOST_FIXED = 0.5


class DraftRecord:
    """The record of how many of one request's drafts were accepted; only DraftLengths changes it.

    expected, accepted: fading sums of expected and accepted draft tokens.
    proposed: the length of the last draft before it was cut.
    asked: the step in which the request last had a draft.
    """

    __slots__ = ("accepted", "asked", "expected", "proposed")

    def __init__(self) -> None:
        self.expected = self.accepted = 2.0  # a prior: the engine's mean acceptance
        self.proposed = 0
        self.asked = -1


class _StepCosts:
    """The measured step times for one range of batch sizes, with and without drafts."""

    __slots__ = (
        "_entries",
        "_guess",
        "_sums",
        "block",
        "extra",
        "fixed",
        "gain",
        "idle",
        "left",
        "measured",
        "noise",
        "num_plain",
        "on",
        "plain",
        "price",
        "rest",
        "resting",
        "settling",
    )

    def __init__(self, entries: int) -> None:
        self.noise = _NOISE / entries
        self.plain = 0.0  # seconds of a step without drafts; 0 = not measured
        self.num_plain = 0  # measured steps without drafts
        self.gain = 0.0  # mean accepted drafts per decode in blocks with drafts
        self.extra = 0.0  # mean time of steps in such blocks beyond `plain`, as a share of `plain`
        self.measured = 0  # measured steps in blocks with drafts
        self.on = False  # whether this block has drafts
        self.resting = False  # whether this block is a rest
        self.idle = False  # whether it is a rest because no drafts were accepted
        self.block = self.left = _SETTLING + _MEASURED  # the block's steps; its remaining steps
        self.settling = _SETTLING
        self.rest = _REST
        # A line fitted to (draft tokens, time beyond `plain`), by decayed sums. It begins with a
        # guess: rows cost little up to 32, and at most half of a decode's share beyond.
        self._entries = entries
        self._sums = self._guess = self._point(entries, min(0.5, entries / 128))
        self.fixed = self.price = 0.0
        self._draw()

    @property
    def value(self) -> float:
        """The speed-up: tokens a second with drafts, divided by tokens a second without."""
        return (1 + self.gain) / (1 + self.extra)

    def measure_plain(self, seconds: float) -> None:
        """Add the time of a step without drafts. The first weigh most, and outliers little."""
        self.num_plain += 1
        plain = self.plain or seconds
        weight = max(_PLAIN_WEIGHT, 1 / self.num_plain)
        self.plain = plain + weight * (min(seconds, 2 * plain) - plain)

    def measure(self, drafts: int, seconds: float, accepted: int) -> None:
        """Add a step of a block with drafts, even if the step itself had none."""
        # A row costs at most what a decode does; the rest of a longer step is another program's.
        most = _MOST_FIXED + drafts / self._entries
        extra = min(seconds / self.plain - 1, most)
        if drafts:
            # One step tells little, as it may have waited for another program.
            line = self.fixed + self.price * drafts
            surprise = _SURPRISE * (1 + line)
            point = self._point(drafts, min(max(extra, line - surprise), line + surprise))
            self._sums = tuple(
                _FADING * old + new for old, new in zip(self._sums, point, strict=True)
            )
            self._draw()
        self.measured += 1
        weight = max(min(_STEP_WEIGHT, 0.04 + self._entries / 500), 1 / self.measured)
        self.gain += weight * (accepted / self._entries - self.gain)
        self.extra += weight * (extra - self.extra)

    def return_to_guess(self) -> None:
        """Move the fitted line towards its first guess, after a step that had no drafts."""
        self._sums = tuple(
            _RETURNING * old + (1 - _RETURNING) * new
            for old, new in zip(self._sums, self._guess, strict=True)
        )
        self._draw()

    @staticmethod
    def _point(drafts: int, extra: float) -> tuple[float, ...]:
        return 1.0, float(drafts), extra, float(drafts * drafts), drafts * extra

    def _draw(self) -> None:
        """Fit the line to the measured steps: `fixed` is its intercept, `price` its slope."""
        weight, xs, ys, squares, products = self._sums
        weight += 0.2  # a point at the origin, so that steps with one number of drafts suffice
        spread = squares - xs**2 / weight
        slope = (products - xs * ys / weight) / spread if spread > 1e-6 else 0.0
        slope = min(max(0.0, slope), 1 / self._entries)
        fixed = (ys - slope * xs) / weight
        if fixed < 0:  # a line through the origin
            fixed, slope = 0.0, min(max(0.0, products / squares), 1 / self._entries)
        self.fixed, self.price = min(fixed, _MOST_FIXED), slope

    def begin_block(self) -> None:
        """Begin the next block of steps: decide its length, and whether its steps have drafts."""
        gains = self.measured == 0 or self.gain >= _LEAST_GAIN
        pays = self.measured == 0 or (gains and self.value >= _KEEPS - self.noise)
        self.resting = self.on and not pays
        self.idle = self.resting and not gains
        if self.on:
            self.on = False
            self.left = _SETTLING + _MEASURED
            if not pays:
                self.left += self.rest
                longer = 2 * self.rest if self.value < _LOSES - self.noise else _REST
                few = self._entries <= _FEW
                self.rest = min(longer, _REST if few else _LONGEST_REST)
        else:
            self.on = True
            # A block without drafts loses their speed-up, so the larger that is, the rarer such
            # blocks are.
            long = 128 if self.value < 1.1 else 512
            self.left = long if pays else _SETTLING + _MEASURED
            if not pays:  # another trial, on new figures
                self.measured = 0
        if pays:
            self.rest = _REST
        self.settling = _SETTLING
        self.block = self.left

    def end_early(self) -> bool:
        """Whether drafts lose speed, or almost none is accepted: the block of steps then ends."""
        steps = self.block - self.left
        if steps >= (_REST if self._entries <= _FEW else _SETTLING + _MEASURED) and (
            self.gain < _LEAST_GAIN
        ):
            return True
        return steps >= _SETTLING + _MEASURED and self.value < _LOSES - self.noise


class DraftLengths:
    """The controller of draft lengths; one for each engine.

    most: the maximum number of draft tokens of a request in a step.
    """

    def __init__(self, most: int = 7) -> None:
        self._most = most
        self._step = 0
        self._costs: dict[int, _StepCosts] = {}
        self._current = _StepCosts(1)
        self._entries = 1
        # [length of the draft][position]: share of drafts that were accepted up to this position
        self._hits = [
            [(_LIKELY if n >= 4 else 0.3 if n == 1 else 0.4) ** (j + 1) for j in range(n)]
            for n in range(most + 1)
        ]
        self._probed = 0  # the last step that verified a draft not worth its price, to measure it
        self._drafted = 0  # draft tokens of the last step
        self._blank = 0  # consecutive steps that asked for drafts and accepted none
        self._accepted = 0  # accepted draft tokens since the last call of observe_step
        self._interested = 0  # requests with a draft worth its price, since the last step
        self._mean_interested = 1.0
        self._next_look = 0  # the first step in which a look is due again
        # Since the rest began or was prolonged: looks, looks that found a repeat, and the newest
        # consecutive looks that did.
        self._looks = self._repeats = self._in_a_row = 0

    def forget_steps(self) -> None:
        """Forget the measured times of all steps: those of warm-up include compilation."""
        self._costs.clear()
        self._current = _StepCosts(1)

    def begin_step(self, entries: int) -> int:
        """Return the maximum number of drafts of a request in the next step; 0 = no drafts at all.

        entries: decoding requests of the step. May be called several times for a step.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._costs:
            self._entries, self._current = entries, self._costs_of(entries)
        return self._most if self._current.on else 0

    @property
    def dormant(self) -> bool:
        """Whether the drafter may skip the tokens of steps: False, as they cost look-up nothing."""
        return False

    def look_due(self) -> int:
        """Return the length of the suffix to check for repeats in a request; 0 = no check is due.

        Legal while `begin_step` returns 0.
        """
        if self._step < self._next_look or not self._current.resting:
            return 0
        return _REPEATED_FEW if self._entries <= _FEW else _REPEATED

    def note_look(self, repeats: bool) -> None:
        """Record a check of one decoding request for repeated text.

        repeats: whether its text ends with tokens that occurred earlier.
        """
        self._next_look = self._step + (_LOOK_FEW if self._entries <= _FEW else _LOOK)
        self._looks += 1
        self._repeats += repeats
        self._in_a_row = self._in_a_row + 1 if repeats else 0
        if self._in_a_row >= _REPEATS and self._current.idle:
            self.wake()

    def wake(self) -> None:
        """End the steps without drafts, because drafts are likely to be accepted again."""
        if self._current.resting:
            self._begin_block(self._current)

    def limit(self, record: DraftRecord) -> int:
        """Return the maximum of this request's drafts in the step that `begin_step` began."""
        return self._most if self._current.on else 0

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        """Return, for each request, how many leading tokens of its draft gain more time than they
        cost.

        lengths: tokens of the drafts, each at most `limit`.
        """
        return list(map(self._worth, records, lengths))

    def _worth(self, record: DraftRecord, length: int) -> int:
        if length == 0:
            return 0
        costs, entries = self._current, self._entries
        price = _MARGIN * costs.price * entries
        bias = record.accepted / record.expected
        value = best = 0.0
        count = 0
        for position, hit in enumerate(self._hits[length], start=1):
            value += min(1.0, hit * bias) - price
            if value > best:
                best, count = value, position
        if count and record.asked != self._step:
            self._interested += 1
            record.asked = self._step
        # A step with drafts has a fixed cost, which its requests with drafts share.
        share = _MARGIN * costs.fixed * entries / max(1.0, self._mean_interested, self._interested)
        record.proposed = length
        if best > share:
            return count
        if (self._step - self._probed) * _PROBES < length * costs.price + costs.fixed:
            return 0
        self._probed = self._step
        return length

    def observe_drafts(
        self, records: Sequence[DraftRecord], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Record how many of each request's drafted tokens were accepted."""
        for request in zip(records, drafted, accepted, strict=True):
            self._observe_draft(*request)

    def _observe_draft(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        hits = self._hits[max(drafted, record.proposed)]
        expected = 0.0
        for position in range(drafted):
            expected += hits[position]
            hits[position] += _HIT_WEIGHT * ((accepted > position) - hits[position])
        record.expected = 0.9 * record.expected + expected
        record.accepted = max(0.9 * record.accepted + accepted, 0.02 * record.expected)
        self._accepted += accepted

    def observe_forced(self, accepted: int) -> None:
        """Count accepted tokens that a grammar forced, without changing mean acceptance."""
        self._accepted += accepted

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Record the seconds of a step of `entries` decodes and `drafts` draft tokens in all."""
        self._step += 1
        costs = self._current
        if costs.resting and costs.left > _LAST:
            costs.left -= 1
            return
        accepted, self._accepted = self._accepted, 0
        self._blank = 0 if accepted or not costs.on else self._blank + 1
        self._mean_interested += 0.2 * (self._interested - self._mean_interested)
        self._interested = 0
        drafted, self._drafted = self._drafted, drafts
        if entries <= 0 or seconds <= 0:
            if costs.on and self._blank >= _BLANK:
                costs.gain, costs.measured = 0.0, max(1, costs.measured)
                self._begin_block(costs)
            return
        costs = self._costs_of(entries)
        costs.left -= 1
        if costs.settling:
            costs.settling -= 1
        elif not costs.on:
            if not drafts:
                costs.measure_plain(seconds)
        elif costs.plain:
            costs.measure(drafts, seconds, accepted)
            if not drafts:
                costs.return_to_guess()
                if entries <= _FEW and not drafted:
                    costs.measure_plain(seconds)
            if costs.end_early():
                costs.left = 0
        if costs.left <= 0:
            if costs.resting and self._looks and not self._repeats:
                costs.left = _REST
                self._looks = 0
            else:
                self._begin_block(costs)

    def _begin_block(self, costs: _StepCosts) -> None:
        costs.begin_block()
        self._blank = 0
        self._looks = self._repeats = self._in_a_row = 0

    def _costs_of(self, entries: int) -> _StepCosts:
        bucket = int(2 * math.log2(entries))
        costs = self._costs.get(bucket)
        if costs is None:
            costs = self._costs[bucket] = _StepCosts(entries)
        return costs
