"""Four CartPole environments, each in a process of its own (AsyncVectorEnv), and random actions.

    python examples/gymnasium_async.py
    python examples/gymnasium_async.py --fault obs:f16

The fault is made at env 1, between the two ledgers. `faults.py` names all faults.
"""

import argparse
import functools
import sys

import gymnasium as gym
from faults import ENV_FAULTS, Dose, FaultyEnv
from gymnasium.vector import AsyncVectorEnv

from stepledger import LedgerEnv, LedgerVectorEnv, compare


def make_env(index: int, directory: str, fault: str | None, rate: float) -> gym.Env:
    env = LedgerEnv(gym.make("CartPole-v1"), directory, index)  # env side: outermost, in the worker
    return FaultyEnv(env, fault, Dose(rate)) if fault and index == 1 else env  # what lies outside of it is the boundary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=sorted(ENV_FAULTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=0.1, help="share of the events that have the fault")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    envs = AsyncVectorEnv([functools.partial(make_env, index, options.directory, options.fault, options.rate) for index in range(4)])
    envs = LedgerVectorEnv(envs, f"{options.directory}/trainer.npz")  # trainer side: innermost
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(options.steps):
        envs.step(envs.action_space.sample())
    envs.close()  # both sides write their ledgers

    comparison = compare(options.directory, f"{options.directory}/trainer.npz")
    print(comparison)
    sys.exit(comparison.exit_status)
