"""Stable-Baselines3's PPO on Pendulum, four environments in processes of their own, observations and rewards normalised.

    python examples/sb3_pendulum.py
    python examples/sb3_pendulum.py --fault reward:stale

The fault is made at env 1, between the two ledgers. `faults.py` names all faults.
"""

import argparse
import functools
import sys

import gymnasium as gym
import torch
from faults import ENV_FAULTS, Dose, FaultyEnv
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from stepledger import LedgerEnv, compare
from stepledger.sb3 import LedgerVecEnv


def make_env(index: int, directory: str, fault: str | None, rate: float) -> gym.Env:
    env = LedgerEnv(gym.make("Pendulum-v1"), directory, index, keep_values=True)  # env side: outermost, in the worker
    return FaultyEnv(env, fault, Dose(rate)) if fault and index == 1 else env  # what lies outside of it is the boundary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=sorted(ENV_FAULTS), metavar="NAME")
    parser.add_argument("--rate", type=float, default=0.1, help="share of the events that have the fault")
    parser.add_argument("--steps", type=int, default=2048)
    options = parser.parse_args()

    venv = SubprocVecEnv([functools.partial(make_env, index, options.directory, options.fault, options.rate) for index in range(4)])
    venv = LedgerVecEnv(venv, f"{options.directory}/trainer.npz", keep_values=True)  # trainer side: innermost
    venv = VecNormalize(venv)  # changes values on purpose, so it goes outside
    torch.set_num_threads(1)  # threads slow a model of this size down
    PPO("MlpPolicy", venv, n_steps=256, seed=0, device="cpu").learn(options.steps)
    venv.close()  # both sides write their ledgers

    comparison = compare(options.directory, f"{options.directory}/trainer.npz")
    print(comparison)
    sys.exit(comparison.exit_status)
