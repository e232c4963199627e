"""DraftLengths: how many drafts a step verifies, by measured step times and acceptance.

    record = DraftRecord()                              one for each request that may draft
    most = lengths.begin_step(entries)                  before each step; 0 = ask no drafter
    if length := lengths.look_due():                    while it is 0: look at a request, whether
        lengths.note_look(repeats)                      its last `length` tokens stood before
    drafts = source.propose(lengths.limit(record))
    del drafts[lengths.worth(record, len(drafts)) :]    drop what costs more than it gives
    lengths.observe_drafts(record, drafted, accepted)   each verified draft (drafted >= 1)
    lengths.observe_step(entries, drafts, seconds)      each step of decodes alone

Two decisions, both of figures that the engine measures:

1. Of a draft: a token is worth its row if its probability is above the row's price. Probabilities
   are those of drafts of equal length (a draft is long where its match is long), corrected by what
   the request's earlier drafts gained. The price is the share of a step's time for one more row.
2. Of steps: blocks of steps with drafts alternate with short ones without. Where the blocks with
   drafts give fewer tokens a second, drafts rest for 64 steps, later for up to 256. Where they
   give nothing, they rest too, as asking for them takes time. A rest goes on as long as looks, at
   one request every few steps, see no text that repeats.
"""

import math

_SETTLING = 2  # steps after a change of state that are not measured: one may be in flight
_MEASURED = 4  # steps of a short block that are measured
_REST, _LONGEST_REST = 64, 256  # steps without drafts after drafts did not pay
_KEEPS = 0.994  # tokens a second with drafts / without, above which drafts go on
_LOSES = 0.97  # the same, below which a block ends early and rests become longer
_MARGIN = 1.15  # how much more than its price a draft token has to be worth
_NOISE = 0.1  # by how much chance may move that ratio, at one decode a step
_STEP_WEIGHT = 0.15  # of a step with drafts in the running means; less with few decodes
_PLAIN_WEIGHT = 0.15  # of a step without drafts, of which blocks have few
_HIT_WEIGHT = 0.04  # of a draft in the running mean of acceptance
_FADING = 0.97  # of earlier steps in the line of prices
_RETURNING = 0.994  # the same in a step without drafts, when the line returns to the guess
_LEAST_GAIN = 0.004  # accepted drafts for each decode, below which drafts rest
_BLANK = 64  # steps in a row without an accepted draft, after which drafts rest
_LAST = 8  # steps of a rest, its last ones, that are measured
_LOOK, _LOOK_FEW = 32, 16  # steps between two looks; with few decodes
_REPEATED, _REPEATED_FEW = 3, 2  # tokens that have to repeat in a look
_REPEATS = 2  # looks in a row that see a repeat, after which a rest without gain is over
_SURPRISE = 0.2  # by how much of a step one measured step may differ from the line
_MOST_FIXED = 0.5  # of a step: what drafts cost beside their rows; more is another program's work
_FEW = 16  # decodes with which asking for drafts takes no time that counts
_PROBES = 0.004  # share of the time for drafts that are not worth their rows, to learn of them


class DraftRecord:
    """The record of what one request's drafts gained; changed by DraftLengths alone.

    expected, accepted: fading sums of expected and accepted draft tokens.
    proposed: the length of the last draft before it was cut.
    asked: the step in which the request last had a draft.
    """

    __slots__ = ("accepted", "asked", "expected", "proposed")

    def __init__(self) -> None:
        self.expected = self.accepted = 2.0  # the engine's acceptance counts like a few drafts
        self.proposed = 0
        self.asked = -1


class _StepCosts:
    """The measured steps of about equally many decodes."""

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
        self.num_plain = 0  # such steps
        self.gain = 0.0  # accepted drafts for each decode, of steps in blocks with drafts
        self.extra = 0.0  # their time beyond `plain`, as a share of it
        self.measured = 0  # steps with drafts
        self.on = False
        self.resting = False  # whether this block is a rest
        self.idle = False  # whether it is, because drafts gave nothing
        self.block = self.left = _SETTLING + _MEASURED  # its steps, and those to come
        self.settling = _SETTLING
        self.rest = _REST
        # A line through (draft tokens, time beyond plain), by fading sums. It begins with a guess:
        # rows cost little up to 32, and up to half of a decode's share beyond.
        self._entries = entries
        self._sums = self._guess = self._point(entries, min(0.5, entries / 128))
        self.fixed = self.price = 0.0
        self._draw()

    @property
    def value(self) -> float:
        """Tokens a second with drafts, divided by those without."""
        return (1 + self.gain) / (1 + self.extra)

    def measure_plain(self, seconds: float) -> None:
        """Add a step without drafts. The first ones count most, and outliers little."""
        self.num_plain += 1
        plain = self.plain or seconds
        weight = max(_PLAIN_WEIGHT, 1 / self.num_plain)
        self.plain = plain + weight * (min(seconds, 2 * plain) - plain)

    def measure(self, drafts: int, seconds: float, accepted: int) -> None:
        """Add a step of a block with drafts, whether it had any or not."""
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
        """Let the line fade, in a step that tells nothing of it."""
        self._sums = tuple(
            _RETURNING * old + (1 - _RETURNING) * new
            for old, new in zip(self._sums, self._guess, strict=True)
        )
        self._draw()

    @staticmethod
    def _point(drafts: int, extra: float) -> tuple[float, ...]:
        return 1.0, float(drafts), extra, float(drafts * drafts), drafts * extra

    def _draw(self) -> None:
        """Set `fixed` and `price` to the line through what was measured."""
        weight, xs, ys, squares, products = self._sums
        weight += 0.2  # a point at the origin, so that one length of drafts is enough
        spread = squares - xs**2 / weight
        slope = (products - xs * ys / weight) / spread if spread > 1e-6 else 0.0
        slope = min(max(0.0, slope), 1 / self._entries)
        fixed = (ys - slope * xs) / weight
        if fixed < 0:  # a line through the origin
            fixed, slope = 0.0, min(max(0.0, products / squares), 1 / self._entries)
        self.fixed, self.price = min(fixed, _MOST_FIXED), slope

    def begin_block(self) -> None:
        """Begin the next block, when the last one is over."""
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
            # A block without drafts loses what drafts would gain, so such blocks are rare where
            # that is much.
            long = 128 if self.value < 1.1 else 512
            self.left = long if pays else _SETTLING + _MEASURED
            if not pays:  # another trial, on new figures
                self.measured = 0
        if pays:
            self.rest = _REST
        self.block, self.settling = self.left, _SETTLING

    def end_early(self) -> bool:
        """Whether to end a block of steps with drafts early, as they lose time or have long gained
        nothing."""
        steps = self.block - self.left
        if steps >= (_REST if self._entries <= _FEW else _SETTLING + _MEASURED) and (
            self.gain < _LEAST_GAIN
        ):
            return True
        return steps >= _SETTLING + _MEASURED and self.value < _LOSES - self.noise


class DraftLengths:
    """The controller of draft lengths; one for each engine.

    most: the most draft tokens of a request in a step.
    """

    def __init__(self, most: int = 7) -> None:
        self._most = most
        self._step = 0
        self._costs: dict[int, _StepCosts] = {}
        self._current = _StepCosts(1)
        self._entries = 1
        # [length of the draft][position]: share of drafts that were accepted up to this position
        self._hits = [
            [(0.3 if n == 1 else 0.4 if n < 4 else 0.7) ** (j + 1) for j in range(n)]
            for n in range(most + 1)
        ]
        self._probed = 0  # the last step with a draft that was not worth its rows
        self._drafted = 0  # draft tokens of the last step
        self._blank = 0  # steps in a row that asked for drafts and accepted none
        self._accepted = 0  # in steps that observe_step has not heard of
        self._interested = 0  # requests with a draft worth its rows, since the last step
        self._mean_interested = 1.0
        self._next_look = 0  # the step from which a look is due
        # Since the rest began or was prolonged: looks, those that saw a repeat, and of these the
        # newest ones in a row.
        self._looks = self._repeats = self._in_a_row = 0

    def forget_steps(self) -> None:
        """Forget the times of all steps, as those of an engine's start are of compilers."""
        self._costs.clear()
        self._current = _StepCosts(1)

    def begin_step(self, entries: int) -> int:
        """Return the most drafts that a request may have in the next step; 0 = no drafts at all.

        entries: decoding requests of the step. A step may begin several times.
        """
        if entries <= 0:
            return 0
        if entries != self._entries or not self._costs:
            self._entries, self._current = entries, self._costs_of(entries)
        return self._most if self._current.on else 0

    def look_due(self) -> int:
        """Return how many tokens have to repeat in a look at a request; 0 = no look is due.

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
        """End the rest, as drafts are likely to be right now."""
        if self._current.resting:
            self._begin_block(self._current)

    def limit(self, record: DraftRecord) -> int:
        """Return the most drafts of this request in the step that `begin_step` began."""
        return self._most if self._current.on else 0

    def worth(self, record: DraftRecord, length: int) -> int:
        """Return how many tokens of a request's draft are worth their rows in this step.

        length: tokens of the draft. It is at most `limit`.
        """
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
        # Requests with drafts share the fixed cost of a step that has any.
        share = _MARGIN * costs.fixed * entries / max(1.0, self._mean_interested, self._interested)
        record.proposed = length
        if best > share:
            return count
        if (self._step - self._probed) * _PROBES < length * costs.price + costs.fixed:
            return 0
        self._probed = self._step
        return length

    def observe_drafts(self, record: DraftRecord, drafted: int, accepted: int) -> None:
        """Note that `accepted` of a request's `drafted` tokens were accepted."""
        hits = self._hits[max(drafted, record.proposed)]
        expected = 0.0
        for position in range(drafted):
            expected += hits[position]
            hits[position] += _HIT_WEIGHT * ((accepted > position) - hits[position])
        record.expected = 0.9 * record.expected + expected
        record.accepted = max(0.9 * record.accepted + accepted, 0.02 * record.expected)
        self._accepted += accepted

    def observe_forced(self, accepted: int) -> None:
        """Note accepted tokens that a grammar forced, which say nothing of the drafter."""
        self._accepted += accepted

    def observe_step(self, entries: int, drafts: int, seconds: float) -> None:
        """Note the seconds of a step of `entries` decodes with `drafts` draft tokens in all."""
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
