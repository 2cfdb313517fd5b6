"""Lints at the taps of Stable-Baselines3: clean training is silent, and what LedgerCallback alone sees is looked at."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from stepledger import LedgerEnv, checks, compare, read
from stepledger.sb3 import LedgerCallback, LedgerVecEnv
from stepledger.sb3.digests import Digester

pytestmark = pytest.mark.sb3

OPTIONS: dict[Any, dict[str, Any]] = {PPO: {"n_steps": 128, "n_epochs": 1}, SAC: {"learning_starts": 1000}}


def made(name: str, directory: Path, index: int) -> gym.Env:
    return LedgerEnv(gym.make(name), directory, index)


def learn(of: Any, venv: Any, callback: Any, steps: int = 300) -> Any:
    model = of("MlpPolicy", venv, seed=0, device="cpu", policy_kwargs={"net_arch": [8]}, **OPTIONS[of])
    model.learn(steps, callback=callback)
    return model


@pytest.mark.parametrize(
    ("of", "name", "kind"), [(PPO, "Pendulum-v1", SubprocVecEnv), (SAC, "Pendulum-v1", DummyVecEnv), (PPO, "CartPole-v1", DummyVecEnv)]
)
def test_clean_training_is_silent(tmp_path: Path, of: Any, name: str, kind: Any) -> None:
    venv = LedgerVecEnv(kind([functools.partial(made, name, tmp_path, index) for index in range(2)]), tmp_path / "trainer.npz")
    learn(of, venv, None)
    venv.close()
    comparison = compare(tmp_path)
    assert comparison.exit_status == 0
    assert comparison.warnings == ()


@pytest.mark.parametrize("with_env_side", [False, True])
def test_a_second_learn_that_resets_is_no_reset_in_the_middle(tmp_path: Path, with_env_side: bool) -> None:
    makers = [functools.partial(made, "Pendulum-v1", tmp_path, index) for index in range(2)]
    venv = DummyVecEnv(makers) if with_env_side else make_vec_env("Pendulum-v1", 2)
    callback = LedgerCallback(tmp_path)
    model = learn(PPO, venv, callback)
    model.learn(200, callback=callback)
    assert callback.comparison is not None
    assert callback.comparison.warnings == ()


class Broken(gym.Wrapper):
    """Gives NaN, and goes beyond its bounds, from its 50th step on."""

    steps = 0

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        self.steps += 1
        return np.array([3, 0, np.nan], np.float32) if self.steps == 50 else observation, *rest


def test_what_the_callback_alone_sees_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = LedgerCallback(tmp_path)
    learn(SAC, DummyVecEnv([lambda: Broken(gym.make("Pendulum-v1"))]), callback, 60)
    assert callback.comparison is not None
    assert [(one.code, one.tap, one.count) for one in callback.comparison.warnings] == [("SL602", "vector", 1), ("SL603", "vector", 1)]
    assert "3.0 is above 1.0" in callback.comparison.warnings[0].text
    assert "warning: env 0: the observation is not finite (call 50: [2]: nan) [SL603, tap vector]" in capsys.readouterr().out


class Seed(BaseCallback):
    """Nothing but a place to look at the tap while it records."""

    def __init__(self, ledger: LedgerCallback) -> None:
        super().__init__()
        self._ledger, self.swapped = ledger, []

    def _on_step(self) -> bool:
        self.swapped.append("of" in vars(self._ledger._watch._given))
        return True


def test_afterwards_the_functions_that_digest_are_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CALLS", 20)
    ledger = LedgerCallback(tmp_path)
    other = Seed(ledger)
    learn(PPO, make_vec_env("CartPole-v1", 2), [ledger, other])
    assert other.swapped[0]
    assert not any(other.swapped[20:])
    assert isinstance(ledger._watch._given, Digester)
    assert read(tmp_path / "vector.npz").meta["checks"]["calls"] == 20


def test_environments_of_one_seed_are_named(tmp_path: Path) -> None:
    venv = DummyVecEnv([functools.partial(made, "CartPole-v1", tmp_path, index) for index in range(3)])
    venv = LedgerVecEnv(venv, tmp_path / "trainer.npz")
    learn(PPO, venv, None, 600)
    venv.close()
    assert compare(tmp_path).warnings == ()

    class Same(gym.Wrapper):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return self.env.reset(seed=None if seed is None else 3, options=options)

    same = tmp_path / "same"
    venv = DummyVecEnv(
        [functools.partial(lambda index: LedgerEnv(Same(gym.make("CartPole-v1")), same, index), index) for index in range(3)]
    )
    venv = LedgerVecEnv(venv, same / "trainer.npz")
    learn(PPO, venv, None, 600)
    venv.close()
    assert [(one.code, one.env) for one in compare(same).warnings] == [("SL609", 1), ("SL609", 2)]
