"""Tiny random checkpoints of every architecture, with the tensor names of published files, each
with a model of transformers as its oracle; a module for each kind of architecture.

If transformers has the architecture, its own class writes the folder. Otherwise the most similar
class of transformers is the oracle, and its weights are written under the architecture's names and
in its layout (rewriting.py)."""

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
