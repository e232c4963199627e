"""SuspectQueue: runs the suspected poison requests of one replica, from all its routers, one at a
time (router/poison.py). Other requests do not wait for them."""

from collections import deque
from collections.abc import Callable, Iterable

from deployments.replica.adapters import SubmittedRequest
from deployments.transport.channel import ReplicaEnd

_SUSPECTS_FIRST = 0.1  # seconds in which all routers hear of a death and send its suspects


class SuspectQueue:
    """The suspects of one replica, which wait for their probation.

    start(submitted): gives a request to the engine.
    later(seconds, call): calls after so long.
    suspect: request on probation. Its router has limited it to a few tokens, so its end is the end
        of the probation.
    given: whether the engine has the suspect; before that its adapter may be on its way, and an
        engine that is gone takes nothing.

    A request that was at a death and is no suspect of it has passed. It starts when no suspect is
    on probation, and not before all routers can have sent the suspects of that death. It may have
    been the cause all the same, slowly, so a suspect that dies beside it is not convicted.
    """

    def __init__(
        self,
        start: Callable[[SubmittedRequest], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self.suspect: SubmittedRequest | None = None
        self.given = False
        self._start = start
        self._later = later
        self._suspects: list[SubmittedRequest] = []
        # They go on when no suspect is left.
        self._passed: deque[SubmittedRequest] = deque()
        self._known: set[str] = set()  # deaths whose suspects have come, or had their time to
        self._expected = 0  # deaths whose suspects may be on their way
        self._company: list[SubmittedRequest] = []  # running, and were at deaths

    def submit(self, submitted: SubmittedRequest) -> None:
        """Start the request when it is its turn."""
        start = submitted.message.start
        if start == "alone":
            self._suspects.append(submitted)
            self.advance()
        elif start == "after":
            if new := set(submitted.message.deaths) - self._known:
                self._known |= new
                self._expected += 1
                self._later(_SUSPECTS_FIRST, self._all_here)
            self._passed.append(submitted)
            self.advance()
        elif submitted.message.deaths:
            self._run(submitted)
        else:
            self._start(submitted)

    def _all_here(self) -> None:
        self._expected -= 1
        self.advance()

    def take_back(self, connection: ReplicaEnd, ids: Iterable[int]) -> None:
        """Drop the waiting requests among these, which are no longer wanted."""
        waiting = {submitted.request.id for submitted in (*self._suspects, *self._passed)}
        unwanted = waiting.intersection(ids)
        if unwanted:
            connection.live -= unwanted
            self._suspects = [suspect for suspect in self._suspects if suspect.wanted]
            self._passed = deque(suspect for suspect in self._passed if suspect.wanted)

    def accused(self) -> list[SubmittedRequest]:
        """The requests that the engine, which has just died, may have died of: the suspect on
        probation, and requests that ran beside it and were at all the deaths that it is suspected
        of. [] if no suspect was on probation."""
        if self.suspect is None or not self.given:
            return []
        suspected = set(self.suspect.message.deaths)
        beside = [
            submitted
            for submitted in self._company
            if submitted.wanted and suspected <= {*submitted.message.deaths}
        ]
        return [self.suspect, *beside]

    def _run(self, submitted: SubmittedRequest) -> None:
        if submitted.message.deaths:
            self._company = [request for request in self._company if request.wanted]
            self._company.append(submitted)
        self._start(submitted)

    def advance(self) -> None:
        """Start the next request if a request has ended and it is the next one's turn."""
        if self.suspect is not None and self.suspect.wanted:
            return
        self.suspect, self.given = None, False
        while self._suspects:
            # In the engine's order: a suspect that other requests overtake there would hold up the
            # suspects behind it.
            submitted = min(self._suspects, key=lambda one: one.request.urgency)
            self._suspects.remove(submitted)
            if submitted.wanted:
                self.suspect = submitted
                self._start(submitted)
                return
        while self._passed and not self._expected:
            submitted = self._passed.popleft()
            if submitted.wanted:
                self._run(submitted)
