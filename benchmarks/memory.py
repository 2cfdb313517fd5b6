"""The memory that recording takes: one million events against ten million, each in a process of its own.

    python benchmarks/memory.py

A trivial environment is stepped as fast as it goes. What is printed is the most memory that the process has taken, before and after
its ledger was sealed: it must not grow with the number of events.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from stepledger import LedgerEnv


class Trivial(gym.Env):
    """Gives the same step again and again."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)
    given = np.zeros(4, np.float32), 0.0, False, False, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Give the one observation."""
        return self.given[0], {}

    def step(self, action: Any) -> Any:
        """Give the one step."""
        return self.given


def peak() -> float:
    """The most memory that this process has taken, in megabytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins with what the parent had
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def record(directory: str, events: int) -> None:
    env = LedgerEnv(Trivial(), directory, 0)
    env.reset()
    step = env.step
    start = time.perf_counter()
    for _ in range(events - 1):
        step(1)
    microseconds = (time.perf_counter() - start) / events * 1e6
    before = peak()
    env.close()
    size = Path(directory, "env-0.npz").stat().st_size / events
    print(f"{events:>12,} events: {before:6.1f} MB while recording, {peak():6.1f} MB with sealing ", end="")
    print(f"({microseconds:.2f} us per event, {size:.1f} bytes on disk)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.directory:
        record(arguments.directory, arguments.events[0])
        return
    for events in arguments.events:
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run([sys.executable, __file__, str(events), "--directory", directory], check=True)


if __name__ == "__main__":
    main()
