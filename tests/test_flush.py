"""How much a killed process may lose is the user's to say, at all taps."""

from __future__ import annotations

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import Walk, drive_one, walk, walks
from gymnasium.vector import SyncVectorEnv

from stepledger import LearnerLedger, LedgerEnv, LedgerError, LedgerVectorEnv, read

HAS_SB3 = importlib.util.find_spec("stable_baselines3") is not None
NEEDS_SB3 = [pytest.mark.sb3, pytest.mark.skipif(not HAS_SB3, reason="needs Stable-Baselines3")]


def vecenv(directory: Path, **options: Any) -> Any:
    from stable_baselines3.common.vec_env import DummyVecEnv

    from stepledger.sb3 import LedgerVecEnv

    return LedgerVecEnv(DummyVecEnv([Walk, Walk]), directory / "trainer.npz", **options)


def callback(directory: Path, **options: Any) -> Any:
    from stepledger.sb3 import LedgerCallback

    return LedgerCallback(directory, **options)


TAPS: dict[str, Any] = {
    "LedgerEnv": lambda directory, **options: LedgerEnv(Walk(), directory, 0, **options),
    "LedgerVectorEnv": lambda directory, **options: LedgerVectorEnv(SyncVectorEnv([Walk, Walk]), directory / "trainer.npz", **options),
    "LearnerLedger": lambda directory, **options: LearnerLedger(directory / "learner.npz", **options),
    "LedgerVecEnv": vecenv,
    "LedgerCallback": callback,
}
PARAMETERS = [*list(TAPS)[:3], *(pytest.param(name, marks=NEEDS_SB3) for name in list(TAPS)[3:])]


@pytest.mark.parametrize("tap", PARAMETERS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"flush_every": value}, "is no number of events: use 1 or more") for value in (0, -1, 1.5, True, "8", 1 << 62)),
        *(({"flush_seconds": value}, "is no number of seconds: use 0 or more") for value in (-1, float("nan"), float("inf"), False, "2")),
    ],
    ids=str,
)
def test_what_is_no_number_is_refused_in_one_sentence(tmp_path: Path, tap: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LedgerError, match=says):
        TAPS[tap](tmp_path, **options)


@pytest.mark.parametrize("every", [1, 10, np.int64(64), 700])
@pytest.mark.parametrize("n", [1, 3])
def test_no_more_events_are_in_memory_than_was_said(tmp_path: Path, every: Any, n: int) -> None:
    envs = walks(tmp_path, n=n, flush_every=every)
    learner = LearnerLedger(tmp_path / "learner.npz", flush_every=every)
    obs, _ = envs.reset()
    given, rows = 0, max(1, int(every) // n)
    for step in range(150):
        actions = np.full(n, step % 4)
        next_obs, reward, terminated, truncated, _ = envs.step(actions)
        learner.transitions(obs, actions, reward, next_obs, terminated, truncated)
        obs, given = next_obs, given + n
        if step % 11 == 0 and step > 2:
            counts = {name: events(tmp_path / f"{name}.npz") for name in ("env-0", "trainer", "learner")}
            assert step + 2 - int(every) < counts["env-0"] <= step + 2
            assert (step + 2 - rows) * n < counts["trainer"] <= (step + 2) * n
            assert given - int(every) < counts["learner"] <= given
    envs.close()
    learner.close()


def events(path: Path) -> int:
    try:
        return read(path).events
    except LedgerError:  # nothing was written yet
        return 0


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_block_is_written_when_it_is_as_old_as_was_said(tmp_path: Path, seconds: float) -> None:
    env = walk(tmp_path, 0, lengths=(1000,), flush_seconds=seconds)
    env.reset()
    for step in range(60):
        time.sleep(0.005 if seconds else 0)
        env.step(0)
        if seconds == 0:
            assert read(tmp_path / "env-0.journal").events == step + 2
    assert read(tmp_path / "env-0.journal").events >= (61 if seconds == 0 else 30)
    env.close()


@pytest.mark.sb3
@pytest.mark.skipif(not HAS_SB3, reason="needs Stable-Baselines3")
@pytest.mark.parametrize("options", [{"flush_every": 12}, {"flush_seconds": 0.0}])
def test_rows_of_a_callback_are_written_as_was_said(tmp_path: Path, options: dict[str, Any]) -> None:
    from stable_baselines3 import A2C
    from stable_baselines3.common.callbacks import BaseCallback, CallbackList
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Look(BaseCallback):
        """Reads the ledgers at every step."""

        def _on_step(self) -> bool:
            steps = 2 * self.n_calls
            if self.n_calls > 3:
                # The row of the last step of both environments is there only with the next one; its reset comes with it.
                assert events(tmp_path / "vector.npz") >= steps - options.get("flush_every", 0) - 4
                assert events(tmp_path / "learner.npz") >= steps - options.get("flush_every", 0) - 4
            return True

    model = A2C("MlpPolicy", DummyVecEnv([functools.partial(Walk, seed=i) for i in range(2)]), n_steps=5, device="cpu")
    one = callback(tmp_path, **options)
    model.learn(120, callback=CallbackList([one, Look()]))
    one.close()
    assert one.comparison is not None
    assert one.comparison.equal


def test_the_options_change_nothing_of_the_ledger(tmp_path: Path) -> None:
    ledgers = []
    for every in (1, 7, None):
        env = walk(tmp_path / str(every), 0, flush_every=every, keep_values=True)
        drive_one(env, 50)
        env.close()
        ledgers.append(read(tmp_path / str(every) / "env-0.npz"))
    for ledger in ledgers[1:]:
        for name, column in ledgers[0].streams[0].columns.items():
            np.testing.assert_array_equal(ledger.streams[0].columns[name], column)
