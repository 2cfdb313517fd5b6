"""Find silent faults between a reinforcement-learning environment and its trainer.

Put `LedgerEnv` around each environment and `LedgerVectorEnv` (for Stable-Baselines3: `stepledger.sb3.LedgerVecEnv`) around the vector
env, train, and `compare` what the environments gave with what the trainer received. For RLlib there is `stepledger_ray`.
"""

from .compare import compare
from .env import LedgerEnv
from .errors import LedgerError
from .format import StreamKey
from .learner import LearnerLedger
from .ledger import Ledger, Stream, read
from .result import Comparison, Difference, FieldResult, Finding, Hop
from .vector import LedgerVectorEnv

__all__ = [
    "Comparison",
    "Difference",
    "FieldResult",
    "Finding",
    "Hop",
    "LearnerLedger",
    "Ledger",
    "LedgerEnv",
    "LedgerError",
    "LedgerVectorEnv",
    "Stream",
    "StreamKey",
    "compare",
    "read",
]
