"""RLlib's PPO on CartPole: two remote EnvRunners with two environments each.

    python examples/rllib_ppo.py
    python examples/rllib_ppo.py --fault obs:f16

The fault is made at env 1 of EnvRunner 1, between the ledgers of the taps env and vector. `faults.py` names all faults.
"""

import argparse
import functools
import logging
import sys

import ray
from faults import ENV_FAULTS, Dose, FaultyEnv
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback

from stepledger_ray import LedgerCallback, finish


class FaultCallback(RLlibCallback):
    """Puts a fault between the two ledgers of env 1 of the first EnvRunner."""

    def __init__(self, fault: str, rate: float) -> None:
        self.fault, self.dose = fault, Dose(rate)

    def on_environment_created(self, *, env_runner, env, **kwargs) -> None:
        """Wrap an environment that LedgerCallback, which is called before, has wrapped."""
        if env_runner.worker_index == 1:
            envs = env.unwrapped.envs
            envs[1] = FaultyEnv(envs[1], self.fault, self.dose)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=sorted(ENV_FAULTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=0.1, help="share of the events that have the fault")
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args()

    callbacks = [functools.partial(LedgerCallback, options.directory, keep_values=True)]
    if options.fault:
        callbacks.append(functools.partial(FaultCallback, options.fault, options.rate))

    logging.getLogger("ray.rllib").setLevel(logging.ERROR)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
        .training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=2)
        .callbacks(callbacks)
        .debugging(seed=0)
    )
    algorithm = config.build_algo()
    for _ in range(options.iterations):
        algorithm.train()
    comparison = finish(algorithm)
    algorithm.stop()  # gathers the ledgers once more, and prints the report
    ray.shutdown()
    sys.exit(comparison.exit_status)
