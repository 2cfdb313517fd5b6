"""A training loop of one's own: REINFORCE with a linear policy on CartPole, in numpy, with a SyncVectorEnv of eight.

    python examples/training_loop.py
    python examples/training_loop.py --fault obs:stale

The fault is made at env 1, between the two ledgers. `faults.py` names all faults.
"""

import argparse
import functools
import sys

import gymnasium as gym
import numpy as np
from faults import ENV_FAULTS, Dose, FaultyEnv
from gymnasium.vector import SyncVectorEnv, VectorEnv

from stepledger import LedgerEnv, LedgerVectorEnv, compare

ENVS, HORIZON, GAMMA, RATE = 8, 256, 0.99, 0.02


def make_env(index: int, directory: str, fault: str | None, rate: float) -> gym.Env:
    env = LedgerEnv(gym.make("CartPole-v1"), directory, index)  # env side: outermost
    return FaultyEnv(env, fault, Dose(rate)) if fault and index == 1 else env  # what lies outside of it is the boundary


def train(envs: VectorEnv, updates: int) -> None:
    """REINFORCE: after each `HORIZON` steps, one gradient step on log-probability times normalised return."""
    rng = np.random.default_rng(0)
    weights = np.zeros(4)  # log-odds of pushing right, per component of the observation
    obs, _ = envs.reset(seed=0)
    autoreset = np.zeros(ENVS, bool)  # next-step mode: the step after an episode's end is a reset, and no transition
    for update in range(updates):
        gradients, rewards, ends, real = [], [], [], []
        for _ in range(HORIZON):
            right = 1 / (1 + np.exp(-obs @ weights))
            actions = (rng.random(ENVS) < right).astype(np.int64)
            gradients.append((actions - right)[:, None] * obs)
            real.append(~autoreset)
            obs, reward, terminated, truncated, _ = envs.step(actions)
            autoreset = terminated | truncated
            rewards.append(reward)
            ends.append(autoreset)
        returns, following = np.zeros((HORIZON, ENVS)), np.zeros(ENVS)
        for step in reversed(range(HORIZON)):
            following = rewards[step] + GAMMA * following * ~ends[step]
            returns[step] = following
        mask = np.array(real)
        advantages = (returns - returns[mask].mean()) / returns[mask].std() * mask
        weights += RATE * (advantages[..., None] * np.array(gradients)).sum((0, 1)) / ENVS
        print(f"update {update:2d}: steps per episode {mask.sum() / max(1, np.sum(ends)):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=sorted(ENV_FAULTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=0.1, help="share of the events that have the fault")
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()

    envs = SyncVectorEnv([functools.partial(make_env, index, options.directory, options.fault, options.rate) for index in range(ENVS)])
    envs = LedgerVectorEnv(envs, f"{options.directory}/trainer.npz")  # trainer side: innermost
    train(envs, options.updates)
    envs.close()  # both sides write their ledgers

    comparison = compare(options.directory, f"{options.directory}/trainer.npz")
    print(comparison)
    sys.exit(comparison.exit_status)
