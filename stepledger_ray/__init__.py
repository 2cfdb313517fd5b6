"""stepledger for Ray RLlib: one callback records every tap of a training job and compares them when it ends.

    config.callbacks(functools.partial(LedgerCallback, "ledger"))

or, if the config has callbacks already, ``attach(config, "ledger")``.
"""

from .callback import LedgerCallback, attach
from .gather import finish
from .tune import TuneCallback

__all__ = ["LedgerCallback", "TuneCallback", "attach", "finish"]
