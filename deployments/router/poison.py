"""Suspicion: the judgement whether a choice is a poison request, which kills its engines.

A kill from outside says nothing about the requests in the engine. An engine that died by itself may
have died of any request in it. Requests that had hardly begun there are suspects: most poison
requests kill during prefill. Each suspect is put on probation: another replica generates a few of
its tokens while no other suspect runs there (replica/suspect_queue.py). A suspect that has
generated these tokens has passed. It continues once that replica has no suspects left, so that it
cannot kill the engine during the probation of another one. Requests that had generated PROOF tokens
also wait until then, but need no probation. If they did, a crash that no request caused would pause
all streams for as long as all probations take.

If an engine dies while a suspect is on probation, the suspect's request fails, as it was in two
engines that died. The second death makes suspects only of requests without a token in that engine.
The first death then counts against no other request. A request that was in two engines that died
for unexplained causes is put on probation however many tokens it had generated.

  what happened to the engine        what becomes of the requests in it
  died by itself, none on probation  requests that had hardly begun go on probation, the others wait
                                     for them; after a request's second such death it goes on
                                     probation however many tokens it had, after its third it fails
  died by itself, one on probation   the suspect fails; requests without a token go on probation
  died by itself, one on probation   none fails; the suspect and the other request go on probation
  beside a request that was in the   again
  same engines that died
  killed from outside                all move to other replicas; a request fails only if it loses
                                     several replicas (limits: `losses` and `doubts` of Suspicion)
"""

from deployments.transport.channel import Start
from engine.messages import Failed

# Tokens of a probation. An engine that dies may have computed two more tokens than it reported.
PROBATION = 3
# Maximum tokens of a later probation of a choice that has passed one: a poison request may take
# longer to kill.
LONG_PROBATION = 64
DEATHS = 3  # unexplained engine deaths after which a choice's request fails without a probation
PROOF = 8  # tokens from one replica after which a choice is not blamed for that replica's loss


def by_itself(failed: Failed) -> bool:
    """Whether an engine process crashed or hung, rather than being killed by a signal from
    outside.

    failed: the engine's last message.
    """
    return failed.code != "engine_killed"


class Suspicion:
    """The record of replicas that one choice has lost.

    deaths: names of the replicas whose engines crashed, for unknown causes, while they ran the
        choice.
    tokens: tokens to generate on the choice's next probation; 0: the choice is no suspect.
    passed: whether the choice has passed its probation, or needs none after the last death, and has
        generated no token since.
    losses: number of replicas killed from outside in a row without a new token of the choice;
        replicas lost by silence do not count.
    doubts: number of lost replicas that had generated fewer than PROOF tokens of the choice.
    """

    __slots__ = ("deaths", "doubts", "losses", "passed", "tokens")

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.tokens = self.losses = self.doubts = 0
        self.passed = False

    @property
    def start(self) -> Start:
        """Return when the next replica may start the choice: "": at once; "alone": as the only
        running suspect; "after": after all suspects.
        """
        return "alone" if self.tokens else "after" if self.passed else ""

    def passes(self) -> None:
        """Record that the choice has passed its probation."""
        self.tokens = 0
        self.passed = True

    def acquit(self, deaths: list[str]) -> None:
        """Forget the given replicas' deaths, because another request is known to be their cause.

        A choice that waits for its probation still needs it, as there may be a second poison
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
        """Record that a replica with the choice was lost, perhaps because of the choice.

        Returns the error message if the choice's request must fail; "" if it continues.

        id: number of the choice at the replica.
        given: number of the choice's tokens that the replica has generated.
        failed: the replica's last message, if its engine failed.
        allowed: maximum of `losses`; see DispatchLimits.losses.
        silent: whether the connection was closed because nothing arrived; the process may be alive.
        """
        if failed is not None:
            if self._waited(id, given, failed.suspects):
                return ""
            if by_itself(failed):
                return self._died(replica, id, given, failed)
        if given:
            self.losses = 0
        elif not silent:
            # A silent replica does not count: a machine or the network is at fault, not a request.
            self.losses += 1
        self.doubts += given < PROOF
        # Half of the doubts may be due to other choices that moved together with this choice.
        if self.losses > allowed or self.doubts > 2 * allowed + 1:
            return f"{self.doubts} replicas were lost soon after this request had come to them"
        return ""

    def _waited(self, id: int, given: int, suspects: list[int] | None) -> bool:
        """Whether the choice was waiting at the replica and had not entered its engine.

        id, given: as in `lost`. suspects: `Failed.suspects`, the replica's requests that may have
            caused the death; None: none was on probation.
        """
        if self.tokens:
            return id not in (suspects or ())
        return self.passed and not given and suspects is not None and id not in suspects

    def _died(self, replica: str, id: int, given: int, failed: Failed) -> str:
        """Record that an engine crashed while the choice was in it.

        Returns the error message if the choice's request must fail; "" if it continues.
        """
        self.losses = 0
        if failed.suspects is not None:
            if id not in failed.suspects:
                if given:
                    return ""
            elif not failed.doubt:
                return "the engine died again when it ran this request"
        self.deaths = [*(death for death in self.deaths if death not in failed.deaths), replica]
        # If several requests may have caused this death (`failed.doubt`), the choice may be
        # innocent, so one more death is allowed.
        if len(self.deaths) >= DEATHS + failed.doubt:
            return f"{len(self.deaths)} engines died while they ran this request"
        if len(self.deaths) > 1:
            self.tokens = min(given + PROBATION, LONG_PROBATION)
        elif given < PROOF:
            self.tokens = PROBATION
        else:
            self.passed = True
        return ""
