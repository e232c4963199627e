"""SuspectQueue: runs the suspected poison requests of one replica, one at a time.

The queue has the suspects from all routers (see router/poison.py). Other requests do not wait for
suspects.
"""

from collections import deque
from collections.abc import Callable, Iterable

from deployments.replica.adapters import SubmittedRequest
from deployments.transport.channel import ReplicaEnd

_SUSPECTS_FIRST = 0.1  # seconds within which all routers send the suspects of a death


class SuspectQueue:
    """The suspects that wait at one replica for their probation.

    start: passes a request to the engine.
    later: calls a function after some seconds.
    suspect: the request on probation. Its router has limited its output to a few tokens, so the
        probation ends with the request.
    given: whether the engine has received the suspect; if not, its adapter may still be loading, or
        the engine may have died.

    A request that was in an engine that died, but is no suspect of that death, is called passed. It
    starts when no suspect is on probation, and after all routers have had time to send the suspects
    of that death. A passed request may still have been the cause. So if the engine dies while it
    runs beside a suspect, the suspect is not failed.
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
        # Passed requests that wait; they start when no suspect waits or is on probation.
        self._passed: deque[SubmittedRequest] = deque()
        self._known: set[str] = set()  # deaths (replica names) that passed requests list
        self._expected = 0  # number of timers that wait for the suspects of these deaths
        # Running requests that were in engines that died, and so may be causes besides the suspect.
        self._company: list[SubmittedRequest] = []

    def submit(self, submitted: SubmittedRequest) -> None:
        """Start a request, or queue it if it is a suspect or has passed (`Submit.start`)."""
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
        """Drop aborted requests that wait in this queue. ids: ids of the aborted requests."""
        waiting = {submitted.request.id for submitted in (*self._suspects, *self._passed)}
        unwanted = waiting.intersection(ids)
        if unwanted:
            connection.live -= unwanted
            self._suspects = [suspect for suspect in self._suspects if suspect.wanted]
            self._passed = deque(suspect for suspect in self._passed if suspect.wanted)

    def accused(self) -> list[SubmittedRequest]:
        """Return the requests that may have caused the death of the engine that has just died.

        The first is the suspect on probation. The others are running requests that were also in all
        those engines whose deaths the suspect may have caused. Returns [] if no suspect was on
        probation.
        """
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
        """Start the next waiting requests, if no suspect is on probation any more."""
        if self.suspect is not None and self.suspect.wanted:
            return
        self.suspect, self.given = None, False
        while self._suspects:
            # Suspects start in the order of the engine's queue. A suspect that waited in that queue
            # would delay the suspects after it.
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
