"""Recording for long: whether memory stays flat, the disk holds what it should, and recording stays as fast as it was.

    python benchmarks/long.py
    python benchmarks/long.py --retain differences
    python benchmarks/long.py --events 10_000_000 --every 1_000_000

64 environments that cost next to nothing are stepped in one process, each in a `LedgerEnv`, and their vector env in a `LedgerVectorEnv`, so
that each event is recorded twice. Every ten million events it prints the memory of the process, how many events were recorded a second
since the last line, and the bytes per event that one side takes on disk. With ``--retain differences`` what was recorded is compared ten
times between two lines, and dropped where it is equal, as `stepledger_ray` does with ``compare_every``; that is not part of the time that
recording takes. Else all is compared at the end.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from stepledger import LedgerEnv, LedgerVectorEnv, compare, read
from stepledger.follow import Watcher

EPISODE = 200  # steps


class Trivial(gym.Env):
    """Gives observations from a short list, and ends after `EPISODE` steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, index: int) -> None:
        self._pool = list(np.random.default_rng(index).standard_normal((1009, 4), np.float32))  # a prime: not in step with episodes
        self._at = self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._step = 0
        return self._pool[self._at], {}

    def step(self, action: Any) -> Any:
        """Give the next observation of the list."""
        self._step += 1
        self._at = at = self._at + 1 if self._at < 1008 else 0
        return self._pool[at], 1.0, False, self._step == EPISODE, {}


class Trivials(gym.vector.VectorEnv):
    """Steps environments one after the other, with next-step autoreset: what `SyncVectorEnv` does, without what makes it slow."""

    def __init__(self, envs: list[gym.Env]) -> None:
        self.envs = envs
        self.num_envs = len(envs)
        self.single_observation_space, self.single_action_space = envs[0].observation_space, envs[0].action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, self.num_envs)
        if hasattr(gym.vector, "AutoresetMode"):
            self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self._ended = np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all."""
        self._ended[:] = False
        return np.stack([env.reset()[0] for env in self.envs]), {}

    def step(self, actions: Any) -> Any:
        """Step all, or reset those whose episode has ended."""
        if self._ended.any():  # all at once: their episodes have one length
            result = [(env.reset()[0], 0.0, False, False) for env in self.envs]
        else:
            result = [env.step(action)[:4] for env, action in zip(self.envs, actions)]
        observations, rewards, terminated, truncated = zip(*result)
        self._ended = np.array(truncated)
        return np.array(observations), np.array(rewards), np.array(terminated), self._ended, {}

    def close_extras(self, **_: Any) -> None:
        """Close all."""
        for env in self.envs:
            env.close()


def memory(name: str) -> float:
    """Of this process, in megabytes: ``VmRSS`` now, ``VmHWM`` the most."""
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) / 1024


def run(directory: Path, number: int, events: int, every: int, retain: str) -> None:
    """Record so many events of all environments."""
    ones = [LedgerEnv(Trivial(index), directory, index) for index in range(number)]
    envs = LedgerVectorEnv(Trivials(list(ones)), directory / "trainer.npz")
    actions = [np.full(number, action) for action in range(4)]
    envs.reset()
    recorded, spent, begun = number, 0.0, time.perf_counter()
    watcher: Watcher | None = None
    calls = max(1, every // 10 // number)
    while recorded < events:
        for _ in range(10):
            start = time.perf_counter()
            for call in range(calls):
                envs.step(actions[call % 4])
            spent += time.perf_counter() - start
            recorded += calls * number
            if retain == "differences":
                for one in ones:
                    one.write_journal()
                envs.write_journal()
                watcher = watcher or Watcher(directory, str(read(directory / "trainer.journal").meta["run"]))
                found, drop, error = watcher.compare(False)
                assert found.equal, str(found)
                assert not error, error
                for one in ones:
                    one.forget(drop)
                envs.forget(drop)
        print(line(directory, recorded, 10 * calls * number / spent), flush=True)
        spent = 0.0
    print(f"recorded in {time.perf_counter() - begun:.0f} s; closing", flush=True)
    start = time.perf_counter()
    envs.close()
    print(f"closed in {time.perf_counter() - start:.0f} s: {line(directory, recorded)}", flush=True)
    if watcher is not None:
        found, _, error = watcher.compare(True)
        assert not error, error
    else:
        start = time.perf_counter()
        found = compare(directory)
        seconds = time.perf_counter() - start
        print(f"compared in {seconds:.1f} s, {recorded / seconds / 1e6:.1f} million events a second: {line(directory, recorded)}")
    print(found)
    assert found.exit_status == 0


def line(directory: Path, recorded: int, speed: float = 0) -> str:
    """Where it is, in one line."""
    size = sum(path.stat().st_size for path in directory.iterdir()) / 2 / recorded
    rate = f", {speed:>9,.0f} events a second" if speed else ""
    return f"{recorded:>13,} events{rate}, {memory('VmRSS'):6.1f} MB ({memory('VmHWM'):6.1f} at most), {size:6.3f} bytes per event and side"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--events", type=int, default=100_000_000, help="of all environments")
    parser.add_argument("--every", type=int, default=10_000_000, help="events between two lines")
    parser.add_argument("--retain", choices=("all", "differences"), default="all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run(Path(directory), options.envs, options.events, options.every, options.retain)


if __name__ == "__main__":
    main()
