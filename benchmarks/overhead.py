"""What recording costs: ratios of two things measured in one run.

    python benchmarks/overhead.py              # Gymnasium: the table of the README
    python benchmarks/overhead.py --rllib      # time of RLlib's train() with ledgers over without

The first part is the published reference's own benchmark: a SyncVectorEnv of 16 Pendulum-v1, random actions, 5,000 vector steps, the
median of 5 interleaved runs; then the same in short turns. RecordEpisodeStatistics is there for scale, and where they are installed
Minari's DataCollector, which keeps what it sees (``pip install "minari[create,hdf5]" pillow``), and, on a DummyVecEnv of the same
environments, the VecMonitor of Stable-Baselines3 (the extra ``sb3``).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from stepledger import LedgerEnv, LedgerVectorEnv, recorder
from stepledger.digest import SpaceDigest

ENVS = 16


def make(directory: Path | None, index: int) -> gym.Env:
    env = gym.make("Pendulum-v1")
    return env if directory is None else LedgerEnv(env, directory, index)


def vector(directory: Path | None) -> VectorEnv:
    return SyncVectorEnv([functools.partial(make, directory, index) for index in range(ENVS)])


def collected() -> VectorEnv:
    from minari import DataCollector

    return SyncVectorEnv([lambda: DataCollector(gym.make("Pendulum-v1"), data_format="hdf5")] * ENVS)


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def variants(directory: Path) -> dict[str, Callable[[], VectorEnv]]:
    beside = {"Minari's DataCollector": collected} if all(map(has, ("minari", "h5py", "jax", "PIL"))) else {}
    return {
        "none": lambda: vector(None),
        "LedgerEnv on each env": lambda: vector(directory / "env"),
        "LedgerVectorEnv": lambda: LedgerVectorEnv(vector(None), directory / "vector.npz"),
        "both": lambda: LedgerVectorEnv(vector(directory / "both"), directory / "both" / "trainer.npz"),
        "RecordEpisodeStatistics": lambda: RecordEpisodeStatistics(vector(None)),
        **beside,
    }


def vec_env_variants(directory: Path) -> dict[str, Callable[[], Any]]:
    """The same with a VecEnv of Stable-Baselines3."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    from stepledger.sb3 import LedgerVecEnv

    def dummy(directory: Path | None) -> DummyVecEnv:
        return DummyVecEnv([functools.partial(make, directory, index) for index in range(ENVS)])

    return {
        "none": lambda: dummy(None),
        "LedgerEnv on each env": lambda: dummy(directory / "env"),
        "LedgerVecEnv": lambda: LedgerVecEnv(dummy(None), directory / "vector.npz"),
        "both": lambda: LedgerVecEnv(dummy(directory / "both"), directory / "both" / "trainer.npz"),
        "VecMonitor": lambda: VecMonitor(dummy(None)),
    }


def seconds(envs: Any, steps: int) -> float:
    """Seconds for this many vector steps with the same random actions in every run; closing is not counted."""
    envs.reset()
    actions = np.random.default_rng(0).uniform(-2, 2, (64, ENVS, 1)).astype(np.float32)
    start = time.perf_counter()
    for step in range(steps):
        envs.step(actions[step % 64])
    return time.perf_counter() - start


def interleaved(what: str, variants: Callable[[Path], Mapping[str, Callable[[], Any]]], steps: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        times: dict[str, list[float]] = {}
        for run in range(runs):
            for name, build in variants(Path(temporary) / str(run)).items():
                envs = build()
                times.setdefault(name, []).append(seconds(envs, steps))
                envs.close()
    none = statistics.median(times["none"])
    print(f"{what}, {ENVS} Pendulum-v1, {steps:,} vector steps, median of {runs} interleaved runs")
    for name, measured in times.items():
        ratio = statistics.median(one / base for one, base in zip(measured, times["none"]))
        print(f"  {name:26s} {statistics.median(measured) / steps * 1e6:7.1f} us per vector step   {ratio:.2f}x")
    print(f"  (one env step without ledger: {none / steps / ENVS * 1e6:.1f} us)")


def turns(variants: Callable[[Path], Mapping[str, Callable[[], Any]]], turn: int, rounds: int) -> None:
    """The same in short turns: the machine's own changes of speed fall out, but the variants drive each other out of its caches."""
    with tempfile.TemporaryDirectory() as temporary:
        builds = {name: build for name, build in variants(Path(temporary)).items() if not name.startswith("Minari")}  # it fills the caches
        # Blocks are written by the clock, which goes on while the other variants have their turns.
        seconds_before, recorder.FLUSH_SECONDS = recorder.FLUSH_SECONDS, recorder.FLUSH_SECONDS * len(builds)
        all_envs = {name: build() for name, build in builds.items()}
        for envs in all_envs.values():
            seconds(envs, turn)
        actions = np.random.default_rng(0).uniform(-2, 2, (64, ENVS, 1)).astype(np.float32)
        times: dict[str, list[float]] = {name: [] for name in all_envs}
        for _ in range(rounds):
            for name, envs in all_envs.items():
                start = time.perf_counter()
                for step in range(turn):
                    envs.step(actions[step % 64])
                times[name].append(time.perf_counter() - start)
        for envs in all_envs.values():
            envs.close()
        recorder.FLUSH_SECONDS = seconds_before
    print(f"the same in turns of {turn} vector steps, median of {rounds} ratios")
    for name, measured in times.items():
        print(f"  {name:26s} {statistics.median(one / base for one, base in zip(measured, times['none'])):.2f}x")


def digest_part(runs: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (64, 84, 84, 3), np.uint8)
    one = SpaceDigest(gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)).one

    def gigabytes_per_second(digest: Callable[[np.ndarray], object]) -> float:
        best = float("inf")
        for _ in range(runs):
            start = time.perf_counter()
            for frame in frames:
                digest(frame)
            best = min(best, time.perf_counter() - start)
        return frames.nbytes / best / 1e9

    ours = gigabytes_per_second(one)
    blake2b = gigabytes_per_second(lambda frame: hashlib.blake2b(frame, digest_size=8).digest())
    print(f"digest of 84x84x3 uint8 frames: {ours:.1f} GB/s, hashlib.blake2b {blake2b:.2f} GB/s: {ours / blake2b:.1f}x")


class Slow(gym.Env):
    """Takes 100 microseconds a step."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (8,)), gym.spaces.Discrete(4)

    def __init__(self, config: object = None) -> None:
        self._observation, self._steps = np.zeros(8, np.float32), 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode of 200 steps."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observation.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait without sleeping."""
        until = time.perf_counter() + 100e-6
        self._steps += 1
        self._observation[action] += 0.01
        while time.perf_counter() < until:
            pass
        return self._observation.copy(), 1.0, False, self._steps == 200, {}


#: Name -> the environment, and what is said of it.
RLLIB_ENVS: dict[str, tuple[object, str]] = {"cartpole": ("CartPole-v1", "CartPole-v1"), "slow": (Slow, "an environment of 100 us a step")}


def rllib_part(iterations: int, envs: list[str]) -> None:
    """Two PPO algorithms, one with ledgers, take turns at train(); the ratio is of what their turns took."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig

    from stepledger_ray import attach

    def config(env: object, runners: int) -> PPOConfig:
        return (
            PPOConfig()
            .environment(env)
            .env_runners(num_env_runners=runners, num_envs_per_env_runner=4)
            .training(train_batch_size=2000)
            .debugging(seed=0)
        )

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    for env, name in map(RLLIB_ENVS.__getitem__, envs):
        for runners in (0, 2):
            with tempfile.TemporaryDirectory() as temporary:
                algorithms = [config(env, runners).build_algo(), attach(config(env, runners), temporary).build_algo()]
                times: list[list[float]] = [[], []]
                for iteration in range(iterations + 1):
                    for which in (0, 1) if iteration % 2 else (1, 0):
                        start = time.perf_counter()
                        algorithms[which].train()
                        if iteration:  # the first one warms up
                            times[which].append(time.perf_counter() - start)
                for algorithm in algorithms:
                    algorithm.stop()
            without, with_ledgers = map(statistics.median, times)
            ratio = statistics.median(one / other for one, other in zip(times[1], times[0]))
            print(
                f"RLlib PPO, {name}, {runners} remote EnvRunners, 4 envs each, median of {iterations} train() in turns: "
                f"{without:.2f} s without, {with_ledgers:.2f} s with ledgers, ratio of turns {ratio:.2f}x",
                flush=True,
            )
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rllib", action="store_true", help="measure RLlib's train() instead")
    parser.add_argument("--iterations", type=int, default=10, help="calls of train() with --rllib")
    parser.add_argument("--env", nargs="+", choices=RLLIB_ENVS, default=list(RLLIB_ENVS), help="the environments with --rllib")
    arguments = parser.parse_args()
    if arguments.rllib:
        rllib_part(arguments.iterations, arguments.env)
        return
    versions = ", ".join(f"{one.__name__} {one.__version__}" for one in (gym, np))
    print(f"Python {platform.python_version()}, {versions}, {platform.machine()}, {os.cpu_count()} cores")
    interleaved("SyncVectorEnv", variants, arguments.steps, arguments.runs)
    turns(variants, 100, 100)
    if has("stable_baselines3"):
        interleaved("DummyVecEnv", vec_env_variants, arguments.steps, arguments.runs)
        turns(vec_env_variants, 100, 100)
    digest_part(arguments.runs)


if __name__ == "__main__":
    main()
