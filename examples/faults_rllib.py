"""What the RLlib examples share: their command line, the training, and a fault in one environment."""

import argparse
import functools
import logging

import ray
from faults import ENV_FAULTS, Dose, FaultyEnv
from ray.rllib.callbacks.callbacks import RLlibCallback

from stepledger_ray import attach, finish


class FaultCallback(RLlibCallback):
    """Puts a fault between the two ledgers of env 1 of the first EnvRunner; listed behind LedgerCallback."""

    def __init__(self, fault: str, rate: float) -> None:
        self.fault, self.dose = fault, Dose(rate)

    def on_environment_created(self, *, env_runner, env, **kwargs) -> None:
        """Wrap an environment that LedgerCallback, which is called before, has wrapped."""
        if env_runner.worker_index == 1:
            envs = env.unwrapped.envs
            envs[1] = FaultyEnv(envs[1], self.fault, self.dose)


def options(description: str, iterations: int) -> argparse.Namespace:
    """The command line: a run directory, a fault and how often, how many iterations; starts Ray."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--directory", default="ledger", help="the run directory; it must not hold a run yet")
    parser.add_argument("--fault", choices=sorted(ENV_FAULTS), metavar="NAME", help=", ".join(sorted(ENV_FAULTS)))
    parser.add_argument("--rate", type=float, default=0.1, help="share of the events that have the fault")
    parser.add_argument("--iterations", type=int, default=iterations)
    found = parser.parse_args()
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    return found


def train(config, found: argparse.Namespace) -> int:
    """Record a run of this config, with the fault that was asked for; the exit status of its comparison."""
    attach(config, found.directory, keep_values=True)
    algorithm = with_fault(config, found).build_algo()
    for _ in range(found.iterations):
        algorithm.train()
    comparison = finish(algorithm)
    algorithm.stop()  # gathers the ledgers once more, and prints the report
    ray.shutdown()
    return comparison.exit_status


def with_fault(config, found: argparse.Namespace):
    """The config, with the fault that was asked for."""
    if found.fault:
        config.callbacks([*config.callbacks_class, functools.partial(FaultCallback, found.fault, found.rate)])
    return config
