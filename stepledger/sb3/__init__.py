"""The taps for Stable-Baselines3 (extra: ``sb3``): `LedgerVecEnv` around a VecEnv, `LedgerCallback` for what goes into the buffer."""

from .callback import LedgerCallback
from .vecenv import LedgerVecEnv

__all__ = ["LedgerCallback", "LedgerVecEnv"]
