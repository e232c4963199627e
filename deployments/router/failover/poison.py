"""Suspicion: is this choice what its engines die of?

Who kills an engine from outside has no quarrel with the requests there. An engine that died by
itself may have died of one of them, so all of them are suspects, and each is tried: it is placed
again to give a few tokens, as its replica's only suspect (suspect_queue.py). Who has given them
goes on as soon as the trials there are over, so that no death in between is of its making. The one
that is on trial when an engine dies is given up, at its second death; nobody else is blamed for
that but who had given nothing yet, nor for the first any more. Who was at two deaths that nobody
explains is tried however much it had given.

    engine's own death, nobody on trial   who was in it is tried; at the third of these, given up
    engine's own death, one on trial      it is given up; who was in it and had given nothing: tried
    the same, beside one that was at the  nobody is given up; these are tried
      deaths that it is suspected of
    a death from outside                  nobody, unless it goes on like that: losses, doubts
"""

from deployments.transport.channel import Turn
from engine.messages import Failed

PROBATION = 3  # tokens: an engine may have computed two more than it has told when it died
LONG_PROBATION = 64  # the most for who has passed once: it may be slow
DEATHS = 3  # that nobody explains: given up, also if no trial shows it
PROOF = 8  # tokens from one replica that clear a choice of its death, if that came from outside


def by_itself(failed: Failed) -> bool:
    """Nobody has killed that engine."""
    return failed.code != "engine_killed"


class Suspicion:
    """What one choice has been at.

    deaths: replicas whose engines died by themselves, nobody knows of what. tokens: that it has to
    give in its next trial, 0 is no suspect. passed: it was in such an engine and has given what a
    trial asks for, and nothing since.
    losses: replicas lost from outside in a row before a token came from them, silent ones not
    counted. doubts: those lost before PROOF tokens.
    """

    __slots__ = ("deaths", "doubts", "losses", "passed", "tokens")

    def __init__(self) -> None:
        self.deaths: list[str] = []
        self.tokens = self.losses = self.doubts = 0
        self.passed = False

    @property
    def turn(self) -> Turn:
        """When its next replica may start it: now, alone among suspects, or after the trials."""
        return "alone" if self.tokens else "after" if self.passed else ""

    def passes(self) -> None:
        """It has given its tokens."""
        self.tokens = 0
        self.passed = True

    def acquit(self, deaths: list[str]) -> None:
        """It is known what these replicas' engines died of. Who waits for its trial is tried all
        the same: there may have been two of the kind."""
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
        """Its replica is lost, which had given so many tokens of it. Why it has to be given up,
        "" if it goes on.

        id: its number there. failed: what the replica said. allowed: `losses`. silent: nothing was
        heard of it any more; its process may well live.
        """
        if failed is not None:
            if self._waited(id, given, failed.suspects):
                return ""
            if by_itself(failed):
                return self._died(replica, id, given, failed)
        if given:
            self.losses = 0
        elif not silent:  # which is a machine's or the network's doing
            self.losses += 1
        self.doubts += given < PROOF
        # Half of the doubts may be about others that moved together with it.
        if self.losses > allowed or self.doubts > 2 * allowed + 1:
            return f"{self.doubts} replicas were lost soon after this request had come to them"
        return ""

    def _waited(self, id: int, given: int, suspects: list[int] | None) -> bool:
        """It was there, but not in the engine."""
        if self.tokens:
            return id not in (suspects or ())
        return self.passed and not given and suspects is not None and id not in suspects

    def _died(self, replica: str, id: int, given: int, failed: Failed) -> str:
        """The engine has, by itself, and it was in it."""
        self.losses = 0
        if failed.suspects is not None:
            if id not in failed.suspects:
                if given:
                    return ""
            elif not failed.doubt:
                return "the engine died again when it ran this request"
        self.deaths = [*(death for death in self.deaths if death not in failed.deaths), replica]
        # Who is innocent and has bad company once more: not yet.
        if len(self.deaths) >= DEATHS + failed.doubt:
            return f"{len(self.deaths)} engines died while they ran this request"
        self.tokens = PROBATION if len(self.deaths) == 1 else min(given + PROBATION, LONG_PROBATION)
        return ""
