"""Faults that really happen between an environment and its trainer, to try a ledger on.

    env = FaultyEnv(LedgerEnv(env, "ledger", index), "obs:f16")                          # in the environment's process
    envs = LedgerVectorEnv(FaultyVectorEnv(envs, "obs:swap", Dose(0.01)), "ledger/trainer.npz")   # in the trainer's

Both go between the two ledgers. `FAULTS` names all faults, `ENV_FAULTS` those that `FaultyEnv` can make, `VECTOR_FAULTS` those that
`FaultyVectorEnv` can (and `faults_sb3.FaultyVecEnv`, its counterpart for Stable-Baselines3). With ``log=`` each injection is written
down: where it was, counted as the environment counts, and in which fields the trainer's event then differs. A change that changes
nothing, such as zeroing a reward of zero, is no injection.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper

__all__ = [
    "ENV_FAULTS",
    "EVERY",
    "FAULTS",
    "VECTOR_FAULTS",
    "Batch",
    "BatchFaults",
    "Dose",
    "FaultyEnv",
    "FaultyVectorEnv",
    "Injection",
    "read_log",
]

Array = npt.NDArray[Any]
#: Observation, reward, terminated, truncated.
_Reply = tuple[Any, Any, bool, bool]

_VALUES = {
    "zero": "is zero",
    "stale": "is that of the step before",
    "swap": "is that of the next environment",
    "f16": "is rounded to float16",
    "bf16": "is rounded to bfloat16",
    "scale": "is halved",
    "clip": "is clipped to [-1, 1] (uint8: to [64, 192])",
    "nan": "is NaN",
}
_IMAGE = {
    "uint8": "is quantised to 8 bits, 1/32 apart",
    "bgr": "has its colour channels reversed",
    "transpose": "has rows and columns exchanged; not square: channels first, read as if last",
}
#: Name -> end flags (terminated, truncated) before and after.
_FLAGS = {
    "terminated:spurious": ((False, False), (True, False)),
    "terminated:drop": ((True, False), (False, False)),
    "terminated:as_truncated": ((True, False), (False, True)),
    "truncated:spurious": ((False, False), (False, True)),
    "truncated:drop": ((False, True), (False, False)),
    "truncated:as_terminated": ((False, True), (True, False)),
    "both:as_terminated": ((True, True), (True, False)),
    "both:as_truncated": ((True, True), (False, True)),
}
_SEQUENCE = {
    "step:lost": "the environment is stepped twice, and only the second result arrives",
    "step:repeated": "the environment is not stepped, and the last result arrives again",
    "step:filled": "the environment is not stepped, and the result is invented: the last observation, no reward, no end",
    "reset:lost": "the environment is reset within an episode, and nobody is told",
    "reset:extra": "the environment is not reset, and its last observation arrives as that of a reset",
    "reset:hidden": "the environment is reset instead of stepped, and the observation arrives as that of a step",
    "reply:shifted": "from one step on, each reply is the one before",
}

#: Name -> what the fault does.
FAULTS: dict[str, str] = {
    **{f"{what}:{how}": f"the {what} {does}" for what in ("obs", "action", "reward", "final_obs") for how, does in _VALUES.items()},
    **{f"obs:{how}": f"the observation {does}" for how, does in _IMAGE.items()},
    **{name: f"terminated, truncated: {before} becomes {after}" for name, (before, after) in _FLAGS.items()},
    **_SEQUENCE,
    "streams:swapped": "from one step on, the replies of two environments are exchanged",
    "final_obs:reset_obs": "the first observation of the next episode is in the final one's place",
    "final_obs:missing": "the final observation is not delivered",
}
#: Faults that take two environments, or a final observation apart from the step's own.
_VECTOR_ONLY = {"streams:swapped", "final_obs:reset_obs", "final_obs:missing", *(name for name in FAULTS if name.endswith(":swap"))}
ENV_FAULTS = frozenset(FAULTS) - _VECTOR_ONLY
VECTOR_FAULTS = frozenset(FAULTS) - frozenset(_SEQUENCE)

#: Rewards are compared as float32.
_REWARD = spaces.Box(-np.inf, np.inf, (), np.float32)


@dataclass(frozen=True)
class Dose:
    """How often a fault happens.

    Attributes:
        rate: Probability at each event that the fault applies to.
        seed: Of the random numbers behind the rate.
        at: Once only: at this event of those that the fault applies to, counted from 0, or if nothing changes there, at the next.
    """

    rate: float = 1.0
    seed: int = 0
    at: int | None = None


EVERY = Dose()


@dataclass(frozen=True)
class Injection:
    """One fault that happened.

    Attributes:
        env: Position of the environment.
        episode: Counted by the environment, from 0 at its first reset.
        step: 0 is the reset, k the k-th step.
        fields: Those in which the two sides differ there; ``("event",)`` if only one side has it.
        kind: ``"changed"``, ``"lost"``: the trainer got no such event, ``"extra"``: it got one that the environment never gave, which
            comes before the one at this place.
    """

    env: int
    episode: int
    step: int
    fields: tuple[str, ...]
    kind: str = "changed"


def read_log(path: str | os.PathLike[str]) -> list[Injection]:
    """The injections in a log, in order of place; none if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            found = [Injection(**{**row, "fields": tuple(row["fields"])}) for row in map(json.loads, file)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda one: (one.env, one.episode, one.step))


def _bfloat16(x: Array) -> Array:
    """Rounded to the nearest bfloat16, ties to even; numpy has no such dtype."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def _transpose(x: Array) -> Array:
    return x.swapaxes(0, 1) if x.shape[0] == x.shape[1] else np.moveaxis(x, -1, 0).reshape(x.shape)


def _wrong(how: str, x: Array) -> Array:
    """A wrong value in place of this one; the same where the fault does not apply to such values."""
    floating, image = x.dtype.kind == "f", x.ndim == 3
    if how == "zero":
        return np.zeros_like(x)
    if how == "scale":
        return (x * 0.5).astype(x.dtype)
    if how == "clip":
        return np.clip(x, *((64, 192) if x.dtype == np.uint8 else (-1, 1)))
    if how == "nan" and floating:
        return np.full_like(x, np.nan)
    if how == "f16" and floating:
        return x.astype(np.float16).astype(x.dtype)
    if how == "bf16" and floating:
        return _bfloat16(x).astype(x.dtype)
    if how == "uint8" and floating:
        return (np.clip(np.round(x * 32), -128, 127) / 32).astype(x.dtype)
    if how == "bgr" and image:
        return x[..., ::-1].copy()
    if how == "transpose" and image:
        return _transpose(x).copy()
    return x


def _leafwise(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _leafwise(change, part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_leafwise(change, part) for part in value)
    return change(value)


def _same(one: Any, other: Any, space: gym.Space[Any]) -> bool:
    """Whether two values are the same bits once they are cast to the space."""
    if isinstance(space, spaces.Dict):
        return all(_same(one[key], other[key], part) for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(map(_same, one, other, space.spaces))
    return bool(np.asarray(one).astype(space.dtype).tobytes() == np.asarray(other).astype(space.dtype).tobytes())


class _Injector:
    """Decides when a fault happens, and writes down where it did."""

    def __init__(
        self, name: str, known: Iterable[str], dose: Dose, stream: int, log: str | os.PathLike[str] | None, exclusive: bool
    ) -> None:
        if name not in known:
            raise ValueError(f"the fault {name!r} can't be made here: use one of {', '.join(sorted(known))}.")
        self.name = name
        self.target, self.how = name.split(":")
        self._dose = dose
        self._random = np.random.default_rng([dose.seed, stream])
        self._log = None if log is None else os.path.abspath(log)
        self._exclusive = exclusive
        self._asked = self._made = 0

    def due(self) -> bool:
        """Whether to make the fault at this event; asked at every event that it applies to."""
        self._asked += 1
        if self._dose.at is not None:
            return self._asked > self._dose.at and not self._made
        return bool(self._random.random() < self._dose.rate)

    def made(self, env: int, episode: int, step: int, *fields: str, kind: str = "changed") -> None:
        """Write down that it was made."""
        self._made += 1
        if self._log is not None:
            with open(self._log, "a", encoding="utf-8") as file:  # appended in one write, so processes can share it
                file.write(json.dumps(asdict(Injection(env, episode, step, fields, kind))) + "\n")

    def value(self, value: Any, earlier: Any, neighbour: Any, space: gym.Space[Any], place: tuple[int, int, int], name: str) -> Any:
        """The value that is delivered in place of this one."""
        if (self.how == "stale" and earlier is None) or not self.due():
            return value
        wrong = {"stale": earlier, "swap": neighbour}.get(self.how)
        if wrong is None:
            # Of a number, a number: some environments look it up in a table.
            wrong = _leafwise(lambda x: _wrong(self.how, np.asarray(x))[()], value)
        if _same(value, wrong, space):
            return value
        self.made(*place, name)
        return wrong

    def flags(self, terminated: bool, truncated: bool) -> tuple[bool, bool, tuple[str, ...]]:
        """The end flags that are delivered, and which of them differ."""
        before, after = _FLAGS.get(self.name, (None, None))
        if after is None or before != (terminated, truncated):
            return terminated, truncated, ()
        differ = self.differing_flags((terminated, truncated), after)
        if not differ or not self.due():
            return terminated, truncated, ()
        return *after, differ

    def differing_flags(self, before: tuple[bool, bool], after: tuple[bool, bool]) -> tuple[str, ...]:
        """Which end flags differ for the trainer."""
        if self._exclusive:
            before, after = ((terminated, truncated and not terminated) for terminated, truncated in (before, after))
        return tuple(name for name, one, other in zip(("terminated", "truncated"), before, after) if one != other)


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Makes faults in the environment's own process, outside its ledger.

    Args:
        env: The environment in its ledger.
        fault: A name in `ENV_FAULTS`.
        dose: How often.
        index: The environment's position, for the log.
        log: File to which injections are appended.
        exclusive: Truncated is delivered only where terminated is not set, as Stable-Baselines3 does.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        fault: str,
        dose: Dose = EVERY,
        *,
        index: int = 0,
        log: str | os.PathLike[str] | None = None,
        exclusive: bool = False,
    ) -> None:
        super().__init__(env)
        self._fault = _Injector(fault, ENV_FAULTS, dose, index, log, exclusive)
        self._index, self._episode, self._at = index, -1, 0
        self._last: _Reply | None = None
        self._sent: Any = None
        self._late: _Reply | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, with faults."""
        fault, last = self._fault, self._last
        if fault.name == "reset:extra" and last is not None and fault.due():
            fault.made(*self._place(1), "event", kind="extra")
            return last[0], {}
        observation, info = self._reset(seed=seed, options=options)
        if fault.target == "obs":
            observation = fault.value(observation, last and last[0], None, self.observation_space, self._place(), "obs")
        return self._shifted((observation, 0.0, False, False))[0], info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, with faults."""
        fault, last = self._fault, self._last
        if last is None:
            raise gym.error.ResetNeeded("reset a FaultyEnv before its first step.")
        if fault.name == "step:filled" and fault.due():
            fault.made(*self._place(1), "event", kind="extra")
            return last[0], 0.0, False, False, {}
        if fault.name == "step:repeated" and self._at and fault.due():
            fault.made(*self._place(1), "event", kind="extra")
            return *last, {}
        if fault.name == "reset:hidden" and fault.due():
            observation, info = self._reset()
            fault.made(*self._place(), "kind", "action")
            return observation, 0.0, False, False, info
        if fault.name == "reset:lost" and fault.due():
            self._reset()
            fault.made(*self._place(), "event", kind="lost")
        sent = action
        if fault.target == "action":
            sent = fault.value(action, self._sent, None, self.action_space, self._place(1), "action")
        self._sent = copy.deepcopy(action)
        *reply, info = self._step(sent)
        if fault.name == "step:lost" and not (reply[2] or reply[3]) and fault.due():
            fault.made(*self._place(), "event", kind="lost")
            *reply, info = self._step(sent)
        return *self._wrong_reply(last, *reply), info

    def _wrong_reply(self, last: _Reply, observation: Any, reward: Any, terminated: bool, truncated: bool) -> _Reply:
        fault = self._fault
        if fault.name == "reply:shifted" and self._late is None and self._at > 1 and fault.due():
            reply = (observation, reward, terminated, truncated)
            fault.made(*self._place(), *_differing(last, reply, self.observation_space), *fault.differing_flags(last[2:], reply[2:]))
            self._late = last
        if fault.target == "obs" or (fault.target == "final_obs" and (terminated or truncated)):
            observation = fault.value(observation, last[0], None, self.observation_space, self._place(), "obs")
        elif fault.target == "reward":
            wrong = fault.value(reward, last[1] if self._at > 1 else None, None, _REWARD, self._place(), "reward")
            reward = reward if wrong is reward else float(wrong)
        terminated, truncated, differ = fault.flags(terminated, truncated)
        if differ:
            fault.made(*self._place(), *differ)
        return self._shifted((observation, reward, terminated, truncated))

    def _shifted(self, reply: _Reply) -> _Reply:
        if self._late is not None:
            reply, self._late = self._late, copy.deepcopy(reply)
        return reply

    def _place(self, ahead: int = 0) -> tuple[int, int, int]:
        return self._index, self._episode, self._at + ahead

    def _reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self._episode, self._at = self._episode + 1, 0
        self._last = (copy.deepcopy(observation), 0.0, False, False)
        return observation, info

    def _step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._at += 1
        self._last = (copy.deepcopy(observation), reward, bool(terminated), bool(truncated))
        return observation, reward, bool(terminated), bool(truncated), info


def _differing(one: tuple[Any, ...], other: tuple[Any, ...], space: gym.Space[Any]) -> list[str]:
    """Which of observation and reward differ in two replies."""
    return [name for name, a, b, declared in zip(("obs", "reward"), one, other, (space, _REWARD)) if not _same(a, b, declared)]


@dataclass
class Batch:
    """A vector env's reply to a step.

    Attributes:
        obs: Observations, each array with the environments along its first axis, in dicts or not.
        reward, terminated, truncated: ``(n,)``.
        final: Where an environment that has ended is reset within the same step: its final observation, by position.
    """

    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    final: dict[int, Any] = field(default_factory=dict)


class BatchFaults:
    """Makes faults in what passes between a vector env and its trainer, for Gymnasium's and Stable-Baselines3's alike.

    Args:
        name: A name in `VECTOR_FAULTS`.
        dose: How often.
        n: Number of environments.
        observation_space: Of one environment.
        action_space: Of one environment.
        mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``: when an environment that has ended is reset.
        log: File to which injections are appended.
        exclusive: Truncated is delivered only where terminated is not set, as Stable-Baselines3 does.
    """

    def __init__(
        self,
        name: str,
        dose: Dose,
        n: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        mode: str,
        log: str | os.PathLike[str] | None,
        exclusive: bool = False,
    ) -> None:
        self._fault = _Injector(name, VECTOR_FAULTS, dose, 0, log, exclusive)
        self._n, self._observation_space, self._action_space = n, observation_space, action_space
        self._same_step, self._next_step = mode == "SameStep", mode == "NextStep"
        self._episode, self._step = [-1] * n, [0] * n
        self._resetting = np.zeros(n, bool)  # next-step: the next step is this environment's reset
        self._earlier: Batch | None = None
        self._sent: Any = None
        self._exchanged = list(range(n))

    def mask(self, mask: Array) -> Array:
        """Which environments to reset when the trainer asks for these."""
        return mask[self._exchanged]

    def reset(self, obs: Any, mask: Array | None = None) -> Any:
        """The observations that are delivered after a reset of all environments, or of those in the mask."""
        clean, obs = obs, _copied(obs)
        for env in range(self._n):
            if mask is None or mask[env]:
                self._episode[env], self._step[env], self._resetting[env] = self._episode[env] + 1, 0, False
                if self._fault.target == "obs":
                    self._change(obs, env, clean, "obs")
        zeros = np.zeros(self._n)
        self._earlier = Batch(clean, zeros if self._earlier is None else self._earlier.reward, zeros, zeros)
        return _take(obs, self._exchanged)

    def send(self, actions: Any) -> Any:
        """The actions that the environments get."""
        sent = _copied(actions)
        if self._fault.target == "action":
            for env in np.flatnonzero(~self._resetting).tolist():
                earlier = None if self._sent is None else _row(self._sent, env)
                neighbour = _row(actions, (env + 1) % self._n)
                place = (env, self._episode[env], self._step[env] + 1)
                _put(sent, env, self._fault.value(_row(actions, env), earlier, neighbour, self._action_space, place, "action"))
        self._sent = _copied(actions)
        return sent

    def receive(self, clean: Batch) -> Batch:
        """The reply that the trainer gets."""
        batch = Batch(_copied(clean.obs), clean.reward.copy(), clean.terminated.copy(), clean.truncated.copy(), {**clean.final})
        ended = (clean.terminated | clean.truncated) & ~self._resetting
        for env in range(self._n):
            if self._resetting[env]:
                self._episode[env], self._step[env] = self._episode[env] + 1, 0
            else:
                self._step[env] += 1
                self._change_step(batch, env, clean, bool(ended[env]))
            if self._same_step and ended[env]:
                self._episode[env], self._step[env] = self._episode[env] + 1, 0
            if self._fault.target == "obs":
                self._change(batch.obs, env, clean.obs, "obs")
        if self._fault.name == "streams:swapped":
            batch = self._exchange(batch, ended)
        self._resetting = ended & self._next_step
        self._earlier = clean
        return batch

    def _change_step(self, batch: Batch, env: int, clean: Batch, ended: bool) -> None:
        fault, place = self._fault, self._place(env)
        if fault.target == "reward":
            self._change(batch.reward, env, clean.reward, "reward")
        elif fault.name == "final_obs:missing":
            if env in clean.final and fault.due():
                del batch.final[env]
                fault.made(*place, "obs")
        elif fault.target == "final_obs" and ended:
            if env in clean.final:
                self._change_final(batch, env, clean)
            elif fault.how != "reset_obs":
                self._change(batch.obs, env, clean.obs, "obs")
        terminated, truncated, differ = fault.flags(bool(clean.terminated[env]), bool(clean.truncated[env]))
        if differ:
            batch.terminated[env], batch.truncated[env] = terminated, truncated
            if self._same_step and (terminated or truncated) != ended:
                # The trainer takes the reset's observation for the step's, or looks for a final observation that is not there.
                differ = ("obs", *differ)
            fault.made(*place, *differ)

    def _change_final(self, batch: Batch, env: int, clean: Batch) -> None:
        fault, final = self._fault, clean.final[env]
        if fault.how == "reset_obs":
            if fault.due():
                batch.final[env] = _row(clean.obs, env)
                fault.made(*self._place(env), "obs")
            return
        assert self._earlier is not None
        earlier, neighbour = _row(self._earlier.obs, env), _row(clean.obs, (env + 1) % self._n)
        batch.final[env] = fault.value(final, earlier, neighbour, self._observation_space, self._place(env), "obs")

    def _change(self, rows: Any, env: int, clean: Any, name: str) -> None:
        """Change an environment's row of observations or rewards."""
        earlier = None
        if self._earlier is not None:
            earlier = _row(self._earlier.obs if name == "obs" else self._earlier.reward, env)
        space = self._observation_space if name == "obs" else _REWARD
        neighbour = _row(clean, (env + 1) % self._n)
        _put(rows, env, self._fault.value(_row(clean, env), earlier, neighbour, space, self._place(env), name))

    def _exchange(self, batch: Batch, ended: Array) -> Batch:
        """Exchange the replies of the first two environments, beginning at a step in which neither is reset or ends."""
        order = self._exchanged
        if order == sorted(order) and not (self._resetting | ended)[:2].any() and self._fault.due():
            rows = [(_row(batch.obs, env), batch.reward[env]) for env in (0, 1)]
            for env in (0, 1):
                self._fault.made(*self._place(env), *_differing(rows[0], rows[1], self._observation_space))
            order[0], order[1] = order[1], order[0]
        final = {order.index(env): value for env, value in batch.final.items()}
        return Batch(_take(batch.obs, order), batch.reward[order], batch.terminated[order], batch.truncated[order], final)

    def _place(self, env: int) -> tuple[int, int, int]:
        return env, self._episode[env], self._step[env]


def _copied(batch: Any) -> Any:
    return _leafwise(np.array, batch)


def _row(batch: Any, env: int) -> Any:
    return _leafwise(lambda part: part[env], batch)


def _put(batch: Any, env: int, value: Any) -> None:
    if isinstance(batch, (dict, tuple)):
        for key, part in batch.items() if isinstance(batch, dict) else enumerate(batch):
            _put(part, env, value[key])
    else:
        batch[env] = value


def _take(batch: Any, order: list[int]) -> Any:
    return _leafwise(lambda part: part[order], batch)


class FaultyVectorEnv(VectorWrapper):
    """Makes faults in the trainer's process, inside its ledger.

    Args:
        env: The vector env.
        fault: A name in `VECTOR_FAULTS`.
        dose: How often.
        log: File to which injections are appended.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], fault: str, dose: Dose = EVERY, *, log: str | os.PathLike[str] | None = None) -> None:
        super().__init__(env)
        mode = (env.metadata or {}).get("autoreset_mode", "NextStep")  # Gymnasium 1.0 has no other
        mode = str(getattr(mode, "value", mode))
        self._faults = BatchFaults(fault, dose, env.num_envs, env.single_observation_space, env.single_action_space, mode, log)

    def reset(self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments, with faults."""
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            mask = self._faults.mask(mask)
            options = {**(options or {}), "reset_mask": mask.copy()}
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        return self._faults.reset(observations, mask), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:  # type: ignore[override]
        """Step the environments, with faults."""
        observations, rewards, terminated, truncated, infos = self.env.step(self._faults.send(actions))
        final = {int(env): infos["final_obs"][env] for env in np.flatnonzero(infos.get("_final_obs", False))}
        batch = self._faults.receive(Batch(observations, rewards, terminated, truncated, final))
        if final:
            infos = {**infos, "final_obs": np.full(self.num_envs, None), "_final_obs": np.zeros(self.num_envs, bool)}
            for env, observation in batch.final.items():
                infos["final_obs"][env], infos["_final_obs"][env] = observation, True
        return batch.obs, batch.reward, batch.terminated, batch.truncated, infos

    def __getattr__(self, name: str) -> Any:
        """What a ledger asks of the vector env that it is around."""
        if name in ("call", "get_attr", "set_attr"):
            return getattr(self.env, name)
        raise AttributeError(name)
