"""Suspicion: the judgement whether a choice is a poison request, one that kills its engines.

A kill from outside says nothing about the requests in the engine. An engine that died by itself may
have died of any request in it. Requests that had hardly begun there are suspects: most poison
requests kill during prefill. Each suspect is put on probation: it is placed at another replica to
generate a few tokens there, as the only suspect that runs (replica/suspect_queue.py). A suspect
that does so has passed. It goes on once all suspects at that replica have had their turn, so that
it cannot kill the engine under the next one. Requests that had generated PROOF tokens also go on
then, without a probation. If each of them had one, a crash that no request caused would pause all
streams for as long as all probations take.

When an engine dies while a suspect is on probation, that suspect is given up, as it was at two
deaths. This death makes suspects only of requests without a token in that engine, and the first
death blames no other request any more. A request that was at two unexplained deaths is put on
probation however many tokens it had generated.

  what happened to the engine        what becomes of the requests in it
  died by itself, none on probation  those that had hardly begun go on probation, the others wait
                                     for them; at two such deaths: on probation however many
                                     tokens it had generated; at three: given up
  died by itself, one on probation   that one is given up; those without a token go on probation
  the same, while a request runs     none is given up; the two go on probation again
  that was at the same deaths
  killed from outside                they move; given up only if it repeats: losses, doubts
"""

from deployments.transport.channel import Start
from engine.messages import Failed

# Tokens; at its death an engine may have computed two more than it has reported.
PROBATION = 3
# Most tokens of the probation of a choice that has passed once, as a poison may be slow.
LONG_PROBATION = 64
DEATHS = 3  # unexplained deaths after which a choice is given up, also without a probation
PROOF = 8  # tokens from one replica after which the choice hardly caused that replica's loss


def by_itself(failed: Failed) -> bool:
    """Whether the engine process crashed or hung, rather than being killed by a signal from
    outside."""
    return failed.code != "engine_killed"


class Suspicion:
    """The record of replicas that one choice has lost.

    deaths: replicas whose engines died by themselves, for unexplained causes, while they had the
        choice.
    tokens: tokens to generate on the choice's next probation; 0: it is no suspect.
    passed: whether it has passed its probation, or needs none after this death, and has generated
        nothing since.
    losses: replicas killed from outside in a row without a new token; silent replicas do not count.
    doubts: replicas lost before they had generated PROOF tokens.
    """

    __slots__ = ("deaths", "doubts", "losses", "passed", "tokens")

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.tokens = self.losses = self.doubts = 0
        self.passed = False

    @property
    def start(self) -> Start:
        """Return when the next replica may start the choice: "" at once, "alone" among suspects,
        "after" them.
        """
        return "alone" if self.tokens else "after" if self.passed else ""

    def passes(self) -> None:
        """End the choice's probation, as it has generated the tokens of it."""
        self.tokens = 0
        self.passed = True

    def acquit(self, deaths: list[str]) -> None:
        """Forget the given replicas' deaths, because another request is known to be their cause.

        A choice that waits for probation still goes on probation, as there may be a second poison
        request.
        """
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
        """Record a lost replica against the choice, which may be the cause.

        Returns why the choice is given up; "" if it goes on.

        id: number of the choice at the replica.
        given: tokens of the choice that the replica has generated.
        failed: the replica's last message, if its engine failed.
        allowed: most losses; see DispatchLimits.losses.
        silent: whether the replica fell silent, so that its process may be alive.
        """
        if failed is not None:
            if self._waited(id, given, failed.suspects):
                return ""
            if by_itself(failed):
                return self._died(replica, id, given, failed)
        if given:
            self.losses = 0
        elif not silent:
            # Silence is the fault of a machine or the network, not of a request.
            self.losses += 1
        self.doubts += given < PROOF
        # Half of the doubts may be due to other choices that moved together with this one.
        if self.losses > allowed or self.doubts > 2 * allowed + 1:
            return f"{self.doubts} replicas were lost soon after this request had come to them"
        return ""

    def _waited(self, id: int, given: int, suspects: list[int] | None) -> bool:
        """Whether the choice was at the replica, but not in its engine."""
        if self.tokens:
            return id not in (suspects or ())
        return self.passed and not given and suspects is not None and id not in suspects

    def _died(self, replica: str, id: int, given: int, failed: Failed) -> str:
        """Record that an engine crashed while the choice was in it.

        Returns why the choice is given up; "" if it goes on.
        """
        self.losses = 0
        if failed.suspects is not None:
            if id not in failed.suspects:
                if given:
                    return ""
            elif not failed.doubt:
                return "the engine died again when it ran this request"
        self.deaths = [*(death for death in self.deaths if death not in failed.deaths), replica]
        # An innocent choice may have run beside a poison request once more, so allow one more
        # death.
        if len(self.deaths) >= DEATHS + failed.doubt:
            return f"{len(self.deaths)} engines died while they ran this request"
        if len(self.deaths) > 1:
            self.tokens = min(given + PROBATION, LONG_PROBATION)
        elif given < PROOF:
            self.tokens = PROBATION
        else:
            self.passed = True
        return ""
