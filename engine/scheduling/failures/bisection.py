"""FailureBisection: the search for the poison request of a step that has raised.

All requests go back to the queue. The requests of the failed step are divided into two groups, and
each group runs alone. A group that fails is split again, until one request fails alone:

 8 raised      1 2 3 4 | 5 6 7 8      ->  5 6 | 7 8   ->  7 | 8
               ok        raised           ok    raised    ok  poison

A group has passed when each of its requests has a new token, or has ended. If all groups pass, the
requests were not the cause and none of them fails. One poison request in n is found after log2(n)
failures.
"""

from collections import deque

from engine.scheduling.request import Request, RequestPhase


class FailureBisection:
    """The search for the requests that make steps fail.

    group: the requests that may run now.
    poison: the requests found so far; they fail at the end.
    error: the last failure.
    healthy: whether a step has succeeded since the bisection began.
    """

    def __init__(self, suspects: list[Request], error: Exception) -> None:
        self.error = error
        self.poison: list[Request] = []
        self.healthy = False
        self.group: dict[Request, int] = {}  # request -> its known tokens when the group began
        self._groups: deque[list[Request]] = deque(_halves(suspects))
        self.next_group()

    def failed(self, suspects: list[Request], error: Exception) -> None:
        """Split the requests of a step that has raised; a single request is a poison request.

        suspects: the requests of that step; the rest of the group runs later.
        error: the exception that the step raised.
        """
        self.error = error
        others = [request for request in self._untried() if request not in suspects]
        if others:
            self._groups.appendleft(others)
        if len(suspects) == 1:
            self.poison += suspects
        else:
            self._groups.extendleft(reversed(_halves(suspects)))
        self.next_group()

    def group_passed(self) -> bool:
        return not self._untried()

    def next_group(self) -> None:
        """Choose the group that runs next; an empty group means that the bisection is over."""
        self.group = {}
        while self._groups and not self.group:
            members = self._groups.popleft()
            self.group = {r: len(r.token_ids) for r in members if r.phase is not RequestPhase.ENDED}

    def _untried(self) -> list[Request]:
        return [
            request
            for request, known in self.group.items()
            if request.phase is not RequestPhase.ENDED and len(request.token_ids) == known
        ]


def _halves(requests: list[Request]) -> list[list[Request]]:
    middle = (len(requests) + 1) // 2
    return [half for half in (requests[:middle], requests[middle:]) if half]
