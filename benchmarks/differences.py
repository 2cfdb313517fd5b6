"""How fast two sides are compared that are equal, that differ in a step of each env, and in everything.

    python benchmarks/differences.py
    python benchmarks/differences.py --envs 4 --events 100_000

Writes the ledgers of both sides of a vector env, and compares them as ``stepledger compare`` does, from the files to the report, on one
core. The table has events of the first side per second, the time over that of equal sides, and how long the report is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from stepledger import compare
from stepledger.digest import SpaceDigest
from stepledger.format import RESET, STEP, StreamKey
from stepledger.recorder import BatchRecorder, describe

FAULTS = ("none", "one step lost in each env", "every observation differs", "everything differs")
EPISODE = 200  # events, the reset among them


def recorder(path: Path, tap: str, keys: list[StreamKey]) -> BatchRecorder:
    box, discrete = SpaceDigest(gym.spaces.Box(-1, 1, (4,))), SpaceDigest(gym.spaces.Discrete(2))
    return BatchRecorder(path, describe(tap, box, discrete, keys, reward_dtype="<f4", digest="xxh3_64"))


def events_of(env: int, events: int, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    rng, rows = np.random.default_rng(env), np.zeros(events, dtype)
    step = np.arange(events) % EPISODE > 0
    rows["kind"] = np.where(step, STEP, RESET)
    rows["h_obs"] = rng.integers(1, 1 << 63, events)
    rows["h_act"], rows["h_rew"] = np.where(step, rng.integers(1, 1 << 63, events), 0), step
    rows["truncated"] = np.arange(events) % EPISODE == EPISODE - 1
    return rows


def write(directory: Path, envs: int, events: int, fault: str) -> None:
    """Write both sides; in the second, each env's stream has the fault."""
    trainer = recorder(directory / "trainer.npz", "vector", [StreamKey(env=env) for env in range(envs)])
    for env in range(envs):
        one = recorder(directory / f"env-{env}.npz", "env", [StreamKey(env=env)])
        rows = events_of(env, events, one.dtype)
        one.append(rows)
        one.close()
        if fault == "one step lost in each env":
            rows = np.delete(rows, events // 2 + env)
        elif fault == "every observation differs":
            rows["h_obs"] ^= 1
        elif fault == "everything differs":
            rows = events_of(env + envs, events, one.dtype)
        rows["stream"] = env
        trainer.append(rows)
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--events", type=int, default=1_000_000, help="of each env")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of one comparison each; the best time, and the median ratio")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directories = {fault: Path(temporary, str(at)) for at, fault in enumerate(FAULTS)}
        for fault, directory in directories.items():
            write(directory, options.envs, options.events, fault)
        rounds = [{fault: _timed(directory) for fault, directory in directories.items()} for _ in range(options.repeat)]
    for fault in FAULTS:
        rate = options.envs * options.events / min(one[fault][0] for one in rounds) / 1e6
        ratio = statistics.median(one[fault][0] / one[FAULTS[0]][0] for one in rounds)
        print(f"{fault:28s} {rate:6.1f} million events a second  {ratio:5.2f}x  report of {len(rounds[0][fault][1]):,} characters")


def _timed(directory: Path) -> tuple[float, str]:
    start = time.perf_counter()
    report = str(compare(directory))
    return time.perf_counter() - start, report


if __name__ == "__main__":
    main()
