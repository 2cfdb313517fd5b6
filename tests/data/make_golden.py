"""Makes the golden files: ledgers of every kind and version, and beside them what they hold, read without stepledger.

    PYTHONPATH=tests python tests/data/make_golden.py tests/data/golden/NAME ...

Only what is named is made again, for a version of the format that is new: files that are there stay as the version wrote that they are of.
"""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import version1
from common import Walk, drive, drive_one, vector_of
from gymnasium import spaces

from stepledger import LearnerLedger, LedgerEnv, LedgerVectorEnv
from stepledger.format import KEPT

PARTS = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "n": spaces.Discrete(5, start=-2), "t": spaces.Text(5)})


def run(
    directory: Path, *, journal: bool = False, keep_values: Any = False, space: spaces.Space | None = None, learner: bool = False
) -> None:
    """Two environments and their vector env; of a journal, as a killed process leaves it."""
    made = Path(tempfile.mkdtemp()) if journal else directory
    envs = [LedgerEnv(Walk((3 + i, 5, 1), i, space), made, i, keep_values=keep_values) for i in range(2)]
    vector = LedgerVectorEnv(vector_of([lambda one=one: one for one in envs]), made / "trainer.npz", keep_values=keep_values)
    if learner:
        learn(vector, LearnerLedger(made / "learner.npz", each_step_once=True))
    else:
        drive(vector, 14)
    if journal:
        for one in (*envs, vector):
            one.write_journal()
            if keep_values and keep_values is not True:
                one.save_values({str(made / name): [0] for name in ("env-0.npz", "env-1.npz", "trainer.npz")})
        for path in made.glob("*.journal"):
            shutil.copy(path, directory)
    vector.close()


def learn(vector: LedgerVectorEnv, ledger: LearnerLedger) -> None:
    """Every transition of the vector env once."""
    vector.action_space.seed(0)
    obs, _ = vector.reset(seed=0)
    ended = np.zeros(vector.num_envs, bool)
    for _ in range(14):
        actions = vector.action_space.sample()
        after, rewards, terminated, truncated, _ = vector.step(actions)
        was = ~ended  # the row after an episode's end is a reset
        ledger.transitions(obs[was], actions[was], rewards[was], after[was], terminated[was], truncated[was])
        obs, ended = after.copy(), terminated | truncated
    ledger.close()


def first_version(directory: Path, *, fault: bool = False, **options: Any) -> None:
    """As the reference's README says; with a fault, one observation comes a second time."""
    space, action = spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Discrete(4)
    streams = {i: drive_one(Walk((3 + i, 5, 1), i), 14) for i in range(2)}
    for i, events in streams.items():
        version1.write(directory / f"env-{i}.npz", "env", {i: events}, space, action, **options)
    if fault:
        streams[1] = [*streams[1]]
        kind, act, _, *rest = streams[1][7]
        streams[1][7] = (kind, act, streams[1][6][2], *rest)
    version1.write(directory / "trainer.npz", "trainer", streams, space, action, **options)


def sb3(directory: Path) -> None:
    """Stable-Baselines3: its vector env and its learner tap."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    from stepledger.sb3 import LedgerCallback

    envs = DummyVecEnv([lambda i=i: LedgerEnv(Walk((3 + i, 5, 1), i), directory, i) for i in range(2)])
    PPO("MlpPolicy", envs, n_steps=8, batch_size=8, n_epochs=1).learn(16, callback=LedgerCallback(directory))
    envs.close()


def rllib(directory: Path) -> None:
    """RLlib: all of its taps."""
    from ray.rllib.algorithms.ppo import PPOConfig

    from stepledger_ray import attach

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    config.training(train_batch_size=32, minibatch_size=16, num_epochs=1)
    algorithm = attach(config, str(directory)).build_algo()
    algorithm.train()
    algorithm.stop()
    for path in directory.glob("*.json"):
        path.unlink()


MAKERS = {
    "2-sealed": lambda directory: run(directory, learner=True),
    "2-sealed-values": lambda directory: run(directory, keep_values=True, space=PARTS),
    "2-journal": lambda directory: run(directory, journal=True),
    "2-journal-values": lambda directory: run(directory, journal=True, keep_values=True, space=PARTS),
    # From here on the number of a stream takes a byte, and not four.
    "2-journal-byte": lambda directory: run(directory, journal=True),
    "2-journal-byte-values": lambda directory: run(directory, journal=True, keep_values=True, space=PARTS),
    "2-sb3": sb3,
    "2-rllib": rllib,
    "3-sealed-window": lambda directory: run(directory, keep_values=4, space=PARTS),
    "3-journal-window": lambda directory: run(directory, journal=True, keep_values=4, space=PARTS),
    "1-sealed": first_version,
    "1-sealed-values": lambda directory: first_version(directory, keep_values=True),
    "1-sealed-fault": lambda directory: first_version(directory, fault=True),
    "1-sealed-float64": lambda directory: first_version(directory, reward_dtype=np.float64),
}


def content(path: Path) -> dict[str, Any]:
    """What a ledger holds, as JSON can say it, by NumPy alone."""
    return in_journal(path) if path.suffix == ".journal" else in_archive(path)


def in_archive(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        members = {name: archive[name] for name in archive.files}
    meta = json.loads(str(members.pop("meta")))
    indices, offsets = members.pop("stream_index"), members.pop("stream_offsets")
    keys = meta.get("stream_keys", [[0, int(index), "", 0] for index in indices])
    whose = members.pop("values_index", np.arange(offsets[-1]))
    texts = {name.removesuffix("_offsets") for name in members if name.endswith("_offsets")}
    streams = []
    for begin, end in itertools.pairwise(offsets):
        rows = slice(*np.searchsorted(whose, [begin, end]))
        values = {}
        for name in sorted(one for one in members if one.startswith("values_") and not one.endswith("_offsets")):
            if name in texts:
                at = members[f"{name}_offsets"]
                values[name] = [members[name][at[i] : at[i + 1]].tobytes().decode() for i in range(rows.start, rows.stop)]
            else:
                values[name] = members[name][rows].tolist()
        columns = {name: column[begin:end].tolist() for name, column in members.items() if not name.startswith("values_")}
        kept = (whose[rows] - begin).tolist() if type(meta.get("keep_values")) is int else None
        streams.append({"key": keys[len(streams)], "columns": columns, "values": values, "kept": kept})
    return {"meta": meta, "streams": streams}


def in_journal(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    file = io.BytesIO(data)

    def record() -> np.ndarray:
        array = np.lib.format.read_array(file)
        file.seek(8, io.SEEK_CUR)  # its checksum
        return array

    meta = json.loads(record().tobytes())
    windowed = type(meta["keep_values"]) is int
    leaves = [(f"values_{which}_{j}", one) for which in ("obs", "act") for j, one in enumerate(meta["values"][which])]
    streams: list[dict[str, Any]] = [
        {"key": key, "columns": {}, "values": {}, "kept": [] if windowed else None} for key in meta["stream_keys"]
    ]
    while file.tell() < len(data):
        events = record()
        owner = events["stream"]
        if events.dtype != KEPT:
            for number, stream in enumerate(streams):
                for name in events.dtype.names:
                    if name != "stream":
                        stream["columns"].setdefault(name, []).extend(events[name][owner == number].tolist())
        if events.dtype == KEPT:
            for number, stream in enumerate(streams):
                stream["kept"].extend(events["event"][owner == number].tolist())
        elif windowed:
            continue
        for name, layout in leaves:
            column = record()
            if layout is None:
                ends = np.cumsum(record())
                column = [column[a:b].tobytes().decode() for a, b in zip([0, *ends], ends)]
            for number, stream in enumerate(streams):
                rows = [one for one, who in zip(column, owner) if who == number]
                stream["values"].setdefault(name, []).extend(one if isinstance(one, str) else one.tolist() for one in rows)
    return {"meta": meta, "streams": streams}


def main() -> None:
    for argument in sys.argv[1:]:
        directory = Path(argument).absolute()
        directory.mkdir(parents=True)
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(directory,))  # some ledgers are closed at exit
        maker.start()
        maker.join()
        found = {path.name: content(path) for path in sorted(directory.iterdir()) if path.suffix in (".npz", ".journal")}
        (directory / "content.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        print(f"{directory}: {', '.join(found)}")


def make(directory: Path) -> None:
    MAKERS[directory.name](directory)


if __name__ == "__main__":
    main()
