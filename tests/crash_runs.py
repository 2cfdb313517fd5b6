"""Runs that are to be killed, and a process that starts and kills them. Only the environments, not the ledgers, say what happened.

As a script: reads one JSON object a line (`Kill`), forks a run from what is imported here already, kills it or one of its workers, and
answers with a line of JSON when all of its processes have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from stepledger import LearnerLedger, LedgerEnv, LedgerVectorEnv
from stepledger.digest import SpaceDigest
from stepledger.format import RESET

try:
    import torch
    from stable_baselines3 import A2C
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from stepledger.sb3 import LedgerCallback, LedgerVecEnv
except ImportError:  # the tests that need it are skipped
    A2C = None

#: Environments of each run.
N = 2
#: Their actions.
ACTIONS = 4


def record_dtype(size: int) -> np.dtype[Any]:
    """What an environment writes down of each event, and a training loop of each transition."""
    obs = ("<f4", (size,))
    names = [("kind", "u1"), ("action", "u1"), ("obs", *obs), ("reward", "<f8"), ("terminated", "?"), ("truncated", "?"), ("next", *obs)]
    return np.dtype([*names, ("time", "<f8")])


class Witness:
    """Appends what happened to a file, in one call, before anybody is told of it."""

    def __init__(self, path: Path, size: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._record = np.zeros(1, record_dtype(size))

    def write(self, **said: Any) -> None:
        record = self._record
        for name, value in said.items():
            record[name][0] = value
        record["time"] = time.time()
        os.write(self._file, record.tobytes())

    @staticmethod
    def read(path: Path, size: int) -> np.ndarray:
        data = path.read_bytes() if path.exists() else b""
        whole = len(data) // record_dtype(size).itemsize
        return np.frombuffer(data[: whole * record_dtype(size).itemsize], record_dtype(size))


def columns(happened: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """What a ledger's columns say where it says what happened."""
    space = SpaceDigest(spaces.Box(-np.inf, np.inf, (size,), np.float32))
    actions = SpaceDigest(spaces.Discrete(ACTIONS))

    def digests(space: SpaceDigest, values: Any) -> np.ndarray:
        return np.frombuffer(b"".join(space.rows(values)), ">u8")

    act = digests(actions, happened["action"].astype(np.int64))
    return {
        "kind": happened["kind"],
        "h_obs": digests(space, happened["obs"]),
        "h_act": np.where(happened["kind"] == RESET, 0, act),
        "h_rew": np.where(happened["kind"] == RESET, np.uint32(0), happened["reward"].astype("<f4").view("<u4")),
        "terminated": happened["terminated"],
        "truncated": happened["truncated"],
        "h_next": digests(space, happened["next"]),
    }


class Witnessed(gym.Env):
    """Random observations and rewards; episodes of 1 to 20 steps that end in each of the three ways; its witness is not the ledger.

    Args:
        path: Where it writes what happened.
        seed: Of its course.
        size: Of its observations.
        pause: Seconds that a step takes besides.
    """

    def __init__(self, path: Path, seed: int = 0, size: int = 3, pause: float = 0.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(ACTIONS)
        self._path, self._size, self._pause = path, size, pause
        self._rng = np.random.default_rng(seed)
        self._left = 0
        self._witness: Witness | None = None

    def _say(self, **said: Any) -> None:
        if self._witness is None:  # in the process in which it lives
            self._witness = Witness(self._path, self._size)
        self._witness.write(**said)

    def _observation(self) -> Any:
        return np.resize(self._rng.standard_normal(min(self._size, 64)).astype(np.float32), self._size)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = int(self._rng.integers(1, 20))
        obs = self._observation()
        self._say(kind=0, action=0, obs=obs, reward=0, terminated=False, truncated=False)
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._pause:
            time.sleep(self._pause)
        self._left -= 1
        end = [(True, False), (False, True), (True, True)][int(self._rng.integers(3))] if self._left == 0 else (False, False)
        obs, reward = self._observation(), float(np.float32(self._rng.normal())) + int(action)
        self._say(kind=1, action=int(action), obs=obs, reward=reward, terminated=end[0], truncated=end[1])
        return obs, reward, *end, {}


@dataclass
class Kill:
    """A run, and when it is killed.

    Attributes:
        kind: Of `RUNS`.
        directory: Of the run; what the witnesses write lies beside its ledgers.
        victim: ``"trainer"``; ``"worker"``: that of environment 0; or ``"all"`` of them at once.
        phase: From when on: ``"start"``: from the fork; ``"run"``: from so many events; ``"close"``: from when it begins to close.
        events: See phase.
        delay: Seconds after it.
        steps: Steps of the whole run, of all environments.
        size: Of the observations.
        pause: Seconds that a step takes besides.
        flush_calls: After so many steps the ledgers are sealed, again and again; 0: never.
        options: Of all taps.
    """

    kind: str
    directory: str
    victim: str
    phase: str
    events: int
    delay: float
    steps: int
    size: int = 3
    pause: float = 0.0
    flush_calls: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def env(self, index: int, **options: Any) -> LedgerEnv:
        env = Witnessed(self.path(f"env-{index}.witness"), index, self.size, self.pause)
        return LedgerEnv(env, self.directory, index, **self.options, **options)

    def makers(self) -> list[Any]:
        return [functools.partial(self.env, index) for index in range(N)]

    def path(self, name: str) -> Path:
        return Path(self.directory, name)

    def say(self, name: str, text: str = "") -> None:
        temporary = self.path(f"{name}.said")
        temporary.write_text(text)
        temporary.rename(self.path(name))


def gymnasium_run(kill: Kill, kind: Any, learner: bool) -> None:
    envs = LedgerVectorEnv(kind(kill.makers()), kill.path("trainer.npz"), **kill.options)
    kill.say("pids", json.dumps([process.pid for process in getattr(envs.unwrapped, "processes", [])]))
    rng = np.random.default_rng(0)
    flushing = {name: value for name, value in kill.options.items() if name.startswith("flush_")}
    ledger = LearnerLedger(kill.path("learner.npz"), **flushing) if learner else None
    witness = Witness(kill.path("learner.witness"), kill.size) if learner else None
    obs, _ = envs.reset()
    fresh = np.zeros(N, bool)
    for step in range(kill.steps):
        actions = rng.integers(ACTIONS, size=N)
        next_obs, rewards, terminated, truncated, _ = envs.step(actions)
        if ledger is not None and witness is not None:
            took = [env for env in range(N) if not fresh[env]]  # in next-step mode the step after an end is the reset
            for env in took:
                said = {"obs": obs[env], "action": actions[env], "reward": rewards[env], "next": next_obs[env]}
                witness.write(kind=2, terminated=terminated[env], truncated=truncated[env], **said)
            if took:
                ledger.transitions(obs[took], actions[took], rewards[took], next_obs[took], terminated[took], truncated[took])
        obs, fresh = next_obs, terminated | truncated
        if kill.flush_calls and step % kill.flush_calls == 0:
            envs.flush()
            envs.call("flush")
            if ledger is not None:
                ledger.flush()
    kill.say("closing")
    if ledger is not None:
        ledger.close()
    envs.close()


def sb3_run(kill: Kill, kind: Any) -> None:
    envs = LedgerVecEnv(kind(kill.makers()), kill.path("trainer.npz"), **kill.options)
    kill.say("pids", json.dumps([process.pid for process in getattr(envs.unwrapped, "processes", [])]))
    rng = np.random.default_rng(0)
    envs.reset()
    for step in range(kill.steps):
        envs.step(rng.integers(ACTIONS, size=N))
        if kill.flush_calls and step % kill.flush_calls == 0:
            envs.flush()
            envs.env_method("flush")
    kill.say("closing")
    envs.close()


def callback_run(kill: Kill) -> None:
    envs = DummyVecEnv(kill.makers())
    kill.say("pids", "[]")
    model = A2C("MlpPolicy", envs, n_steps=8, policy_kwargs={"net_arch": [4]}, device="cpu", seed=0)
    options = {name: value for name, value in kill.options.items() if name.startswith("flush_")}
    with contextlib.redirect_stdout(sys.stderr):
        model.learn(N * kill.steps, callback=LedgerCallback(kill.directory, **options))
    kill.say("closing")
    envs.close()


RUNS: dict[str, Any] = {
    "sync": lambda kill: gymnasium_run(kill, SyncVectorEnv, learner=True),
    "async": lambda kill: gymnasium_run(kill, functools.partial(AsyncVectorEnv, context="fork"), learner=False),
    "subproc": lambda kill: sb3_run(kill, lambda makers: SubprocVecEnv(makers, start_method="fork")),
    "callback": lambda kill: callback_run(kill),
}


def wait_for(condition: Any, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def reap(pid: int, group: int, seconds: float = 60) -> dict[str, Any]:
    """Wait until all processes of a run have ended; its orphans are this process's children."""
    end, status, late = time.monotonic() + seconds, None, False
    while True:
        try:
            ended, what = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return {"status": status, "late": late}
        if ended == pid:
            status = os.waitstatus_to_exitcode(what)
        if not ended:
            if time.monotonic() > end:
                late = True
                os.killpg(group, signal.SIGKILL)
            time.sleep(0.002)


def killed(kill: Kill, pid: int) -> dict[str, Any]:
    """Kill the run at its moment."""
    ended = False

    def gone() -> bool:
        nonlocal ended
        ended = ended or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        return ended

    victim = pid
    if kill.victim == "worker":
        wait_for(lambda: kill.path("pids").exists() or gone())
        victim = 0 if ended else json.loads(kill.path("pids").read_text())[0]
    witness, size = kill.path("env-0.witness"), record_dtype(kill.size).itemsize
    if kill.phase == "run":
        wait_for(lambda: (witness.exists() and witness.stat().st_size >= kill.events * size) or gone())
    elif kill.phase == "close":
        wait_for(lambda: kill.path("closing").exists() or gone())
    time.sleep(kill.delay)
    moment = time.time()
    if not gone():
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if kill.victim == "all" else os.kill)(victim, signal.SIGKILL)
    return {"moment": moment, **reap(pid, pid)}


def main() -> None:
    if A2C is not None:
        torch.set_num_threads(1)  # its threads are not there in a forked process, and wait for each other on a busy machine
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: whoever the killed leave behind is waited for too
    for line in sys.stdin:
        kill = Kill(**json.loads(line))
        Path(kill.directory).mkdir(parents=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(os.open(kill.path("stderr.txt"), os.O_WRONLY | os.O_CREAT), 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            sys.stdin = open(os.devnull)
            RUNS[kill.kind](kill)
            return  # as a script ends
        print(json.dumps({**asdict(kill), **killed(kill, pid)}), flush=True)


if __name__ == "__main__":
    main()
