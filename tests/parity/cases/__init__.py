"""Tiny random checkpoints of every architecture, under the names that the hub has, each with what
computes it in transformers; a table for each sort.

Where transformers has the code, its own class writes the folder. Where an architecture's code is
only in its repository, the nearest relative of transformers is the oracle, and its weights are
written under the architecture's names and in its layout (rewriting.py).
"""

from tests.parity.cases.alibi import ALIBI
from tests.parity.cases.case import Case, randomise, relative, save
from tests.parity.cases.dense import CASES
from tests.parity.cases.latent import LATENT
from tests.parity.cases.mixtures import EXPERTS
from tests.parity.cases.recurrent import DELTA_NET, MIXED
from tests.parity.cases.windows import WINDOWS

__all__ = [
    "ALIBI",
    "CASES",
    "DELTA_NET",
    "EXPERTS",
    "LATENT",
    "MIXED",
    "WINDOWS",
    "Case",
    "randomise",
    "relative",
    "save",
]
