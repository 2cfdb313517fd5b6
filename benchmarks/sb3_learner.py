"""What `stepledger.sb3.LedgerCallback` costs: processor time of a training with it over without, both in one run, in turns.

    python benchmarks/sb3_learner.py
    python benchmarks/sb3_learner.py --turns 20 --steps 4096

PPO and DQN on CartPole, 8 environments in a DummyVecEnv, Stable-Baselines3's own settings. Two models of one seed learn in turns of some
thousand steps, so that the machine's changes of speed fall out. Comparing the whole run is timed apart: it is done once, at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env

from stepledger.sb3 import LedgerCallback

ALGORITHMS = {"PPO": PPO, "DQN": DQN}


class Turns(LedgerCallback):
    """Compares at the end of the last turn only."""

    last = False
    took = 0.0

    def _finish(self) -> None:
        if self.last:
            start = time.process_time()
            super()._finish()
            self.took = time.process_time() - start
        else:
            self._detach()


def learn(model: Any, steps: int, callback: LedgerCallback | None) -> float:
    """Seconds of processor time for so many steps: on the wall's clock, what others do here counts too."""
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        model.learn(steps, callback=callback, reset_num_timesteps=False)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4096, help="of a turn; PPO takes 16,384 at a time")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.algorithms:
            with_, without = (
                ALGORITHMS[name]("MlpPolicy", make_vec_env("CartPole-v1", options.envs, seed=0), seed=0, device="cpu") for _ in range(2)
            )
            callback = Turns(Path(temporary, name))
            pairs = []
            for turn in range(options.turns + 1):
                order = [(with_, callback), (without, None)]
                took = {one is None: learn(model, options.steps, one) for model, one in (order if turn % 2 else order[::-1])}
                if turn:  # the first one warms up
                    pairs.append((took[False], took[True]))
            callback.last = True
            learn(with_, 1, callback)
            assert callback.comparison is not None
            assert callback.comparison.exit_status == 0, str(callback.comparison)
            callback.close()
            ratios = sorted(one / other for one, other in pairs)
            total = sum(one for one, _ in pairs) / sum(other for _, other in pairs)
            print(
                f"{name}, {options.envs} envs, {with_.num_timesteps:,} steps in {len(pairs)} turns: {total:.2f}x in all, the turns "
                f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x, median {statistics.median(ratios):.2f}x; comparing it all {callback.took:.2f} s"
            )


if __name__ == "__main__":
    main()
