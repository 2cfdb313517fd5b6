"""Writes ledgers of the format's first version, from the text of the reference's README alone; the library only reads them.

An ``.npz`` without pickles: a JSON ``meta`` string, the env index of each stream and stream offsets, and the columns ``kind h_obs h_act
h_rew terminated truncated episode step``, concatenated over streams; with values, ``values_obs_{j}`` and ``values_act_{j}``. Digests are 64
bits of blake2b over shape, dtype and bytes of the value after the cast to its space. Truncated is "truncated and not terminated".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

#: Kind (0 reset, 1 step), action, observation, reward, terminated, truncated.
Event = tuple[Any, ...]


def leaves_of(space: spaces.Space, value: Any) -> list[np.ndarray]:
    """The value cast to its space, leaf by leaf."""
    if isinstance(space, spaces.Dict):
        return [leaf for key in sorted(space.spaces) for leaf in leaves_of(space[key], value[key])]
    if isinstance(space, spaces.Tuple):
        return [leaf for one, part in zip(space.spaces, value) for leaf in leaves_of(one, part)]
    return [np.asarray(value, np.int64 if isinstance(space, spaces.Discrete) else space.dtype)]


def digest(leaves: Sequence[np.ndarray]) -> int:
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        hashed.update(f"{leaf.shape}{leaf.dtype.str}".encode() + leaf.tobytes())
    return int.from_bytes(hashed.digest(), "little")


def described(space: spaces.Space) -> dict[str, Any]:
    return {"type": type(space).__name__, "repr": str(space)}


def write(
    path: Path,
    side: str,
    streams: Mapping[int, Sequence[Event]],
    observation_space: spaces.Space,
    action_space: spaces.Space,
    *,
    reward_dtype: type = np.float32,
    keep_values: bool = False,
    members: Mapping[str, str] | None = None,
    said: Mapping[str, Any] | None = None,
) -> None:
    """Write a ledger.

    Args:
        path: The file.
        side: ``"env"`` or ``"trainer"``.
        streams: Env index -> events.
        observation_space: As declared.
        action_space: As declared.
        reward_dtype: Of the rewards.
        keep_values: Whether values are stored too.
        members: Other names for members of the file.
        said: Entries of the meta to be changed; those that are `None` are left out.
    """
    events = [event for one in streams.values() for event in one]
    observations = [leaves_of(observation_space, event[2]) for event in events]
    no_action = leaves_of(action_space, action_space.sample())
    actions = [leaves_of(action_space, event[1]) if event[0] else [np.zeros_like(leaf) for leaf in no_action] for event in events]
    bits = {4: np.uint32, 8: np.uint64}[np.dtype(reward_dtype).itemsize]
    kind = np.array([event[0] for event in events], np.uint8)
    episode, step = [], []
    for one in streams.values():
        at = [-1, 0]
        for event in one:
            at = [at[0], at[1] + 1] if event[0] else [at[0] + 1, 0]
            episode.append(at[0])
            step.append(at[1])
    own = {
        "format_version": 1,
        "side": side,
        "reward_dtype": np.dtype(reward_dtype).name,
        "observation_space": described(observation_space),
        "action_space": described(action_space),
        "package_version": "0.1.0",
        **(said or {}),
    }
    columns: dict[str, Any] = {
        "meta": np.array(json.dumps({name: value for name, value in own.items() if value is not None})),
        "stream_index": np.array(list(streams), np.int64),
        "stream_offsets": np.cumsum([0, *map(len, streams.values())], dtype=np.int64),
        "kind": kind,
        "h_obs": np.array([digest(one) for one in observations], np.uint64),
        "h_act": np.array([digest(one) if event[0] else 0 for one, event in zip(actions, events)], np.uint64),
        "h_rew": np.array([event[3] for event in events], reward_dtype).view(bits).astype(np.uint64),
        "terminated": np.array([event[4] for event in events], bool),
        "truncated": np.array([event[5] and not event[4] for event in events], bool),
        "episode": np.array(episode, np.int64),
        "step": np.array(step, np.int64),
    }
    if keep_values:
        for which, values in (("obs", observations), ("act", actions)):
            for j in range(len(values[0])):
                columns[f"values_{which}_{j}"] = np.stack([one[j] for one in values])
    names = members or {}
    np.savez_compressed(path, **{names.get(name, name): column for name, column in columns.items()})
