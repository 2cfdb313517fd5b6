"""How fast the ledgers of a large RLlib run are compared, and in how much memory.

    python benchmarks/comparing.py --events 10_000_000 --runners 8

Writes the ledgers of a run without a difference (env, vector, episode and learner taps, 4 envs per EnvRunner), compares them as
``algorithm.stop()`` does, in Ray tasks, and prints events compared per second over all hops and the driver's peak of memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np

from stepledger import Comparison, compare
from stepledger.digest import SpaceDigest
from stepledger.format import RESET, STEP, TRANSITION, Place, StreamKey
from stepledger.recorder import BatchRecorder, describe

ENVS = 4
EPISODE = 200  # events, the reset among them


def write(directory: Path, runners: int, events: int) -> None:
    """Write ledgers with this many events per stream at each tap."""
    box, discrete = SpaceDigest(gym.spaces.Box(-1, 1, (4,))), SpaceDigest(gym.spaces.Discrete(2))
    columns = {"h_id": "<u8", "t": "<i8"}
    options = {"reward_dtype": "<f8", "digest": "xxh3_64", "run": "benchmark"}
    learner = BatchRecorder(
        directory / "learner-0.0.npz",
        describe(
            "learner", box, discrete, [StreamKey()], columns={"h_next": "<u8", **columns, "n": "<i8"}, each_step="once",
            runners=list(range(1, runners + 1)), **options,
        ),
    )  # fmt: skip
    for runner in range(1, runners + 1):
        place = Place(str(directory), StreamKey(runner=runner), "benchmark", taps=("env", "vector", "episode", "learner"))
        taps = {
            tap: BatchRecorder(place.path(tap), describe(tap, box, discrete, [StreamKey()], **more, **options))
            for tap, more in {"vector": {}, "episode": {"columns": columns}}.items()
        }
        for tap in taps.values():
            tap._meta.update(place.meta(ENVS))
        for env in range(ENVS):
            rng = np.random.default_rng([runner, env])
            at = place._replace(key=place.key._replace(env=env))
            one = BatchRecorder(at.path(f"env-{env}"), describe("env", box, discrete, [at.key], **options) | at.meta())
            rows = np.zeros(events, taps["episode"].dtype)
            rows["t"] = np.arange(events) % EPISODE
            rows["kind"] = np.where(rows["t"] == 0, RESET, STEP)
            rows["h_id"] = (runner * ENVS + env << 40) + np.arange(events) // EPISODE
            for name in ("h_obs", "h_act", "h_rew"):
                rows[name] = rng.integers(1, 1 << 63, events)
            rows["h_act"][rows["kind"] == RESET] = 0
            rows["h_rew"][rows["kind"] == RESET] = 0
            rows["truncated"] = rows["t"] == EPISODE - 1
            steps = np.flatnonzero(rows["kind"] == STEP)
            learned = np.zeros(len(steps), learner.dtype)
            for name in ("h_act", "h_rew", "h_id", "t", "truncated"):
                learned[name] = rows[name][steps]
            learned["kind"], learned["n"], learned["h_obs"], learned["h_next"] = (
                TRANSITION,
                1,
                rows["h_obs"][steps - 1],
                rows["h_obs"][steps],
            )
            learner.append(learned)
            for stream, recorder in ((0, one), (env, taps["vector"]), (env, taps["episode"])):
                part = np.zeros(events, recorder.dtype)
                for name in recorder.dtype.names:
                    part[name] = stream if name == "stream" else rows[name]
                recorder.append(part)
            one.close()
        for tap in taps.values():
            tap.close()
    learner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=10_000_000, help="events compared over all hops")
    parser.add_argument("--runners", type=int, default=8)
    parser.add_argument("--driver", action="store_true", help="in this process, as stepledger.compare does")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        # In a process of its own, so that its memory is not counted.
        size = arguments.events // (3 * ENVS * arguments.runners)
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(Path(temporary), arguments.runners, size))
        writer.start()
        writer.join()
        if arguments.driver:
            compare_run: Callable[[str], Comparison] = compare
        else:
            import ray

            from stepledger_ray.tasks import compare_run

            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
            started = ray.remote(lambda: time.sleep(0.5))  # the workers are there already at the end of a job
            ray.get([started.remote() for _ in range(os.cpu_count() or 1)])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        found = compare_run(temporary)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(found)
    rate = found.events / seconds / 1e6
    print(f"{found.events:,} events in {seconds:.2f} s: {rate:.1f} million a second; peak of memory {before >> 10} -> {peak >> 10} MB")


if __name__ == "__main__":
    main()
