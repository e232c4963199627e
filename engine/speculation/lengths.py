"""DraftLengths: how many look-up drafts a step verifies, by measured step times and acceptance.

For drafts of a model see model_lengths.py.

    record = DraftRecord()                              one for each request that may draft
    most = lengths.begin_step(entries)                  before each step; 0 = no drafts
    if length := lengths.look_due():                    while that is 0: check one request for
    whether
        lengths.note_look(repeats)                      its last `length` tokens occur earlier
    drafts = source.propose(lengths.limit(record))
    [most] = lengths.worth([record], [len(drafts)])     drop tokens that cost more than they gain
    lengths.observe_drafts([record], [drafted], [accepted])      verified drafts (drafted >= 1)
    lengths.observe_step(entries, drafts, seconds)      each step of decodes alone

The controller makes two decisions, from measured times and acceptance:

1. For each draft: a token is verified if its acceptance probability exceeds its price, the share of
   a step's time that one more token takes. Probabilities are measured by length of draft, as longer
   drafts come from longer matches, and corrected by the request's earlier acceptance.
2. For steps: blocks of steps with drafts alternate with short blocks without. If the blocks with
   drafts give fewer tokens a second, drafts pause for 64 steps (a rest), later for up to 256. They
   also pause if none is accepted, as drafting takes time. A rest continues while checks (looks) of
   one request every few steps find no repeated text.
"""

import math
from collections.abc import Sequence

# ---- Blocks and rests, in steps
_SETTLING = 2  # unmeasured first steps of a block, as a step of the previous block may be in flight
_MEASURED = 4  # measured steps of a short block
_REST, _LONGEST_REST = 64, 256  # length of the first rest, and maximum
_LAST = 8  # number of last steps of a rest, which are measured
_BLANK = 64  # consecutive steps without an accepted draft after which a rest begins
_LOOK, _LOOK_FEW = 32, 16  # steps between two looks; the second value with at most _FEW decodes
# number of last tokens that earlier text must repeat for a look to find a repeat; the second value
# with at most _FEW decodes
_REPEATED, _REPEATED_FEW = 3, 2
# number of consecutive looks with a repeat that end a rest that began for lack of accepted drafts
_REPEATS = 2
_FEW = 16  # number of decodes in a step up to which the time for drafting is negligible

# ---- Thresholds. Speed-up: tokens a second with drafts, divided by tokens a second without.
_KEEPS = 0.994  # minimum speed-up at which drafts continue
_LOSES = 0.97  # speed-up below which a block ends early and rests become longer
# random error of the measured speed-up with one decode a step; it is less with more decodes
_NOISE = 0.1
_MARGIN = 1.15  # minimum gain of a draft token, as a multiple of its price
_LIKELY = 0.7  # initial estimate of the acceptance of a token of a long draft
_LEAST_GAIN = 0.004  # accepted drafts per decode below which drafts pause
_PROBES = 0.004  # maximum share of time for measuring drafts that are not worth their price

# ---- Running means, and the fitted line of a step's extra time over its draft tokens
_STEP_WEIGHT = 0.15  # weight of a new step with drafts in the means; less with few decodes
_PLAIN_WEIGHT = 0.15  # weight of a new step without drafts, of which there are few
_HIT_WEIGHT = 0.04  # weight of a new draft in the mean acceptance
_FADING = 0.97  # factor on the weight of earlier steps in the line, at each step with drafts
# factor at a step without drafts, by which the line moves towards its initial estimate
_RETURNING = 0.994
_SURPRISE = 0.2  # maximum deviation of a step's time from the line, in steps; outliers are clipped
# Maximum fixed extra time of a step with drafts (the line's intercept), in steps; more is
# attributed to other programs.
_MOST_FIXED = 0.5


class DraftRecord:
    """The record of how many of one request's drafts were accepted; only DraftLengths changes it.

    expected, accepted: decaying sums of expected and accepted draft tokens.
    proposed: the length of the last draft before it was shortened.
    asked: the number of the step in which the request last had a draft.
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
        self.num_plain = 0  # number of measured steps without drafts
        self.gain = 0.0  # mean accepted drafts per decode in blocks with drafts
        self.extra = 0.0  # mean time of steps in such blocks beyond `plain`, as a share of `plain`
        self.measured = 0  # number of measured steps in blocks with drafts
        self.on = False  # whether this block has drafts
        self.resting = False  # whether this block is a rest
        self.idle = False  # whether this rest began because no drafts were accepted
        # number of the block's steps, and of its remaining steps
        self.block = self.left = _SETTLING + _MEASURED
        self.settling = _SETTLING
        self.rest = _REST
        # A line fitted to (draft tokens, time beyond `plain`), by decayed sums. It begins with an
        # estimate: rows cost little up to 32, and at most half of a decode's share beyond.
        self._entries = entries
        self._sums = self._guess = self._point(entries, min(0.5, entries / 128))
        self.fixed = self.price = 0.0
        self._draw()

    @property
    def value(self) -> float:
        """The speed-up: tokens a second with drafts, divided by tokens a second without."""
        return (1 + self.gain) / (1 + self.extra)

    def measure_plain(self, seconds: float) -> None:
        """Add the time of a step without drafts; the first times have more weight, and outliers
        less."""
        self.num_plain += 1
        plain = self.plain or seconds
        weight = max(_PLAIN_WEIGHT, 1 / self.num_plain)
        self.plain = plain + weight * (min(seconds, 2 * plain) - plain)

    def measure(self, drafts: int, seconds: float, accepted: int) -> None:
        """Add a step of a block with drafts, even if the step itself had none."""
        # A row costs at most as much as a decode; more time is attributed to other programs.
        most = _MOST_FIXED + drafts / self._entries
        extra = min(seconds / self.plain - 1, most)
        if drafts:
            # The deviation of one step is clipped, as it may have waited for another program.
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
        # an artificial point at the origin, so that steps with a single number of drafts suffice
        weight += 0.2
        spread = squares - xs**2 / weight
        slope = (products - xs * ys / weight) / spread if spread > 1e-6 else 0.0
        slope = min(max(0.0, slope), 1 / self._entries)
        fixed = (ys - slope * xs) / weight
        if fixed < 0:  # then the line is forced through the origin
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
            # Each block of steps without drafts loses the speed-up of drafts. So the blocks with
            # drafts between them are longer if the speed-up is larger.
            long = 128 if self.value < 1.1 else 512
            self.left = long if pays else _SETTLING + _MEASURED
            if not pays:  # another trial, with new measurements
                self.measured = 0
        if pays:
            self.rest = _REST
        self.settling = _SETTLING
        self.block = self.left

    def end_early(self) -> bool:
        """Whether the block should end, as drafts lose speed or almost none is accepted."""
        steps = self.block - self.left
        if steps >= (_REST if self._entries <= _FEW else _SETTLING + _MEASURED) and (
            self.gain < _LEAST_GAIN
        ):
            return True
        return steps >= _SETTLING + _MEASURED and self.value < _LOSES - self.noise


class DraftLengths:
    """The controller of the lengths of look-up drafts; one for each engine.

    most: the maximum number of draft tokens of a request in a step.
    """

    def __init__(self, most: int = 7) -> None:
        self._most = most
        self._step = 0
        self._costs: dict[int, _StepCosts] = {}
        self._current = _StepCosts(1)
        self._entries = 1
        # [length of the draft][position]: share of drafts of this length accepted up to this
        # position
        self._hits = [
            [(_LIKELY if n >= 4 else 0.3 if n == 1 else 0.4) ** (j + 1) for j in range(n)]
            for n in range(most + 1)
        ]
        self._probed = 0  # the last step that verified a draft only to measure it
        self._drafted = 0  # number of draft tokens of the last step
        self._blank = 0  # number of consecutive steps that computed drafts and accepted none
        self._accepted = 0  # accepted draft tokens since the last call of observe_step
        self._interested = 0  # number of requests with a draft worth its price, since the last step
        self._mean_interested = 1.0
        self._next_look = 0  # the first step in which a look is due again
        # Since the rest began or was prolonged: numbers of looks, of looks that found a repeat, and
        # of the latest consecutive looks that did.
        self._looks = self._repeats = self._in_a_row = 0

    def forget_steps(self) -> None:
        """Forget the measured times of all steps, as those of the warm-up include compilation."""
        self._costs.clear()
        self._current = _StepCosts(1)

    def begin_step(self, entries: int) -> int:
        """Return the maximum number of drafts of a request in the next step; 0 = no drafts at all.

        This may be called several times for a step.

        entries: the number of decoding requests of the step.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._costs:
            self._entries, self._current = entries, self._costs_of(entries)
        return self._most if self._current.on else 0

    @property
    def dormant(self) -> bool:
        """Whether the drafter may skip the tokens of steps; False, as look-up processes none."""
        return False

    def look_due(self) -> int:
        """Return the length of the suffix to check for repeats in a request; 0 = no check is due.

        Call this only while `begin_step` returns 0.
        """
        if self._step < self._next_look or not self._current.resting:
            return 0
        return _REPEATED_FEW if self._entries <= _FEW else _REPEATED

    def note_look(self, repeats: bool) -> None:
        """Record a check of one decoding request for repeated text.

        repeats: whether the text ends with tokens that occurred earlier.
        """
        self._next_look = self._step + (_LOOK_FEW if self._entries <= _FEW else _LOOK)
        self._looks += 1
        self._repeats += repeats
        self._in_a_row = self._in_a_row + 1 if repeats else 0
        if self._in_a_row >= _REPEATS and self._current.idle:
            self.wake()

    def wake(self) -> None:
        """End the rest, because drafts are likely to be accepted again."""
        if self._current.resting:
            self._begin_block(self._current)

    def limit(self, record: DraftRecord) -> int:
        """Return the maximum number of a request's drafts in the step that `begin_step` began."""
        return self._most if self._current.on else 0

    def worth(self, records: Sequence[DraftRecord], lengths: Sequence[int]) -> list[int]:
        """Return, for each request, how many leading tokens of its draft gain more time than they
        cost.

        lengths: the numbers of tokens of the drafts, each at most `limit`.
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
        # The fixed cost of a step with drafts is divided among its requests with drafts.
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
        """Count accepted tokens that a grammar forced, which do not change the acceptance rates."""
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
