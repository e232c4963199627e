"""Suspicion: is a choice a poison request, one that its engines die of?

A kill from outside says nothing about the requests in the engine. An engine that died by itself may
have died of any request in it. Requests that had hardly begun there are suspects: most poison
requests kill at their prompt. Each suspect is put on probation: it is placed at another replica to
give a few tokens there, as the only suspect that runs (replica/suspect_queue.py). A suspect that
gives them has passed. It goes on once all suspects at that replica have had their turn, so that it
cannot kill the engine under the next one. Requests that had given PROOF tokens go on like that
without a probation. If each of them had one, a crash of no request's making would pause all streams
for as long as all probations take.

When an engine dies while a suspect is on probation, that suspect is given up: it was at two deaths.
This death blames only requests that had given no token in that engine yet, and the first death
blames no other request any more. A request that was at two unexplained deaths is put on probation
however many tokens it had given.

    what happened to the engine        what becomes of the requests in it
    died by itself, none on probation  those that had hardly begun go on probation, the others wait
                                       for them; at two such deaths: on probation however many
                                       tokens it had given; at three: given up
    died by itself, one on probation   that one is given up; those without a token go on probation
    the same, beside a request that    none is given up; the two go on probation again
      was at the same deaths
    killed from outside                they move; given up only if it repeats: losses, doubts
"""

from deployments.transport.channel import Start
from engine.messages import Failed

PROBATION = 3  # tokens: an engine may have computed two more than it has told when it died
LONG_PROBATION = 64  # tokens, at most, for a choice that has passed once: a poison may be slow
DEATHS = 3  # unexplained ones: the choice is given up, also if no probation shows it
PROOF = 8  # tokens from one replica: the choice is hardly what that replica was lost for


def by_itself(failed: Failed) -> bool:
    """Whether the engine died by itself; else it was killed from outside."""
    return failed.code != "engine_killed"


class Suspicion:
    """The losses that one choice was at.

    deaths: replicas whose engines died by themselves while the choice was there, unexplained so
    far. tokens: what the choice has to give on its next probation; 0: it is no suspect. passed: it
    has passed its probation, or needs none after this death, and has given nothing since.
    losses: replicas lost from outside in a row before a token came from them; silent replicas do
    not count. doubts: replicas lost before PROOF tokens.
    """

    __slots__ = ("deaths", "doubts", "losses", "passed", "tokens")

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.tokens = self.losses = self.doubts = 0
        self.passed = False

    @property
    def start(self) -> Start:
        """The time when the choice's next replica may start it: now, alone among the suspects, or
        after them."""
        return "alone" if self.tokens else "after" if self.passed else ""

    def passes(self) -> None:
        """Note that the choice has given the tokens of its probation."""
        self.tokens = 0
        self.passed = True

    def acquit(self, deaths: list[str]) -> None:
        """Drop the deaths of these replicas, because it is known what their engines died of. A
        choice that waits for its probation is put on probation all the same: there may have been
        two poison requests."""
        self.deaths = [death for death in self.deaths if death not in deaths]

    def lost(
        self,
        replica: str,
        id: int,
        given: int,
        failed: Failed | None,
        allowed: int,
        silent: bool = False,
    ) -> str:
        """Note that the choice's replica is lost. Returns why the choice has to be given up, "" if
        it goes on.

        id: number of the choice there.
        given: number of its tokens that the replica had given.
        failed: what the replica said.
        allowed: `losses` that may be.
        silent: whether the replica fell silent; its process may well live.
        """
        if failed is not None:
            if self._waited(id, given, failed.suspects):
                return ""
            if by_itself(failed):
                return self._died(replica, id, given, failed)
        if given:
            self.losses = 0
        elif not silent:  # silence is a machine's or the network's doing
            self.losses += 1
        self.doubts += given < PROOF
        # Half of the doubts may be about other choices that moved together with this one.
        if self.losses > allowed or self.doubts > 2 * allowed + 1:
            return f"{self.doubts} replicas were lost soon after this request had come to them"
        return ""

    def _waited(self, id: int, given: int, suspects: list[int] | None) -> bool:
        """Whether the choice was at the replica, but not in its engine."""
        if self.tokens:
            return id not in (suspects or ())
        return self.passed and not given and suspects is not None and id not in suspects

    def _died(self, replica: str, id: int, given: int, failed: Failed) -> str:
        """Note that the engine died by itself with the choice in it. Returns why the choice has to
        be given up, "" if it goes on."""
        self.losses = 0
        if failed.suspects is not None:
            if id not in failed.suspects:
                if given:
                    return ""
            elif not failed.doubt:
                return "the engine died again when it ran this request"
        self.deaths = [*(death for death in self.deaths if death not in failed.deaths), replica]
        # An innocent choice may have been beside a poison request once more: allow it one death.
        if len(self.deaths) >= DEATHS + failed.doubt:
            return f"{len(self.deaths)} engines died while they ran this request"
        if len(self.deaths) > 1:
            self.tokens = min(given + PROBATION, LONG_PROBATION)
        elif given < PROOF:
            self.tokens = PROBATION
        else:
            self.passed = True
        return ""
