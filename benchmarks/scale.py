"""How fast, and in how much memory, two large ledgers are compared that are equal.

    python benchmarks/scale.py
    python benchmarks/scale.py --envs 64 --events 10_000_000 --jobs 1 2 4

Writes the ledgers of both sides of a vector env, and compares them as ``stepledger compare`` does, from the files to the report, in a
process of its own; in another one `numpy.load` reads all members of the same files. Prints the seconds of both, by the clock and of the
processors, and the most memory that one process of each has taken; and how much faster so many processes at once compute checksums than
one does, which is what this machine can give at the moment. The files have been read once before, so that all are in the system's cache,
if it has room for them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

from stepledger.digest import SpaceDigest
from stepledger.format import RESET, STEP, StreamKey
from stepledger.recorder import BatchRecorder, describe

EPISODE = 200  # events, the reset among them
ROWS = 8192  # events of each stream that are written at a time

COMPARE = """
import json, resource, sys, time
from pathlib import Path
from stepledger import compare

if __name__ == "__main__":
    start = time.perf_counter()
    result = compare(sys.argv[1], jobs=int(sys.argv[2]))
    report = str(result)
    seconds = time.perf_counter() - start
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    peaks = [int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024, usage[1].ru_maxrss / 1024]
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mb": max(peaks), "status": result.exit_status, "events": result.events}))
"""

LOAD = """
import json, sys, time
from pathlib import Path
import numpy as np

start = time.perf_counter()
for path in sorted(Path(sys.argv[1]).glob("*.npz")):
    with np.load(path) as archive:
        for name in archive.files:
            archive[name]
seconds = time.perf_counter() - start
peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
print(json.dumps({"seconds": seconds, "cpu": time.process_time(), "peak_mb": peak}))
"""

CHECKSUMS = """
import json, os, sys, time, zlib
from concurrent.futures import ProcessPoolExecutor

def work(data):
    for _ in range(300):
        zlib.crc32(data)

if __name__ == "__main__":
    jobs, data = int(sys.argv[1]), os.urandom(1 << 22)
    with ProcessPoolExecutor(jobs) as pool:
        list(pool.map(len, [data] * jobs))
        start = time.perf_counter()
        list(pool.map(work, [data] * jobs))
        print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def write(directory: Path, envs: int, events: int, *, seal: bool = True, fault: str = "") -> list[BatchRecorder]:
    """Write both sides, of so many events in each of the streams, in memory that does not grow with them.

    Args:
        directory: Where the ledgers are written.
        envs: Number of environments.
        events: Of each.
        seal: Whether they are sealed; else they are left as the journals of a killed process.
        fault: ``"lost"``: a step of the last environment never reached the trainer; ``"everything"``: all observations differ.

    Returns:
        The recorders: one that nobody holds seals its ledger.
    """
    box, discrete = SpaceDigest(gym.spaces.Box(-1, 1, (4,))), SpaceDigest(gym.spaces.Discrete(2))
    options = {"reward_dtype": "<f4", "digest": "xxh3_64"}
    keys = [StreamKey(env=env) for env in range(envs)]
    trainer = BatchRecorder(directory / "trainer.npz", describe("vector", box, discrete, keys, **options))
    ones = [BatchRecorder(directory / f"env-{key.env}.npz", describe("env", box, discrete, [key], **options)) for key in keys]
    trainer._meta["autoreset_mode"] = "NextStep"
    rng = np.random.default_rng(0)
    for begin in range(0, events, ROWS):
        at = np.arange(begin, min(begin + ROWS, events))
        rows = np.zeros((envs, len(at)), trainer.dtype)
        step = at % EPISODE > 0
        for name in ("h_obs", "h_act"):
            rows[name] = rng.integers(1, 1 << 63, rows.shape)
        rows["kind"] = np.where(step, STEP, RESET)
        rows["h_act"] *= step
        rows["h_rew"] = step
        rows["truncated"] = at % EPISODE == EPISODE - 1
        for one, part in zip(ones, rows):
            one.append(part.copy())
        rows["stream"] = np.arange(envs)[:, None]
        if fault == "everything":
            rows["h_obs"] ^= 1
        # As they come from a vector env: a few calls at a time.
        for first in range(0, len(at), max(1, ROWS // envs)):
            part = rows[:, first : first + max(1, ROWS // envs)].reshape(-1)
            if fault == "lost" and begin == events // 2 // ROWS * ROWS and first == 0:
                part = np.delete(part, -5)
            trainer.append(part)
    for one in (*ones, trainer):
        if seal:
            one.close()
        else:
            one.write()
    return [*ones, trainer]


def run(code: str, *arguments: object) -> dict[str, float]:
    """What code prints, run in a fresh interpreter."""
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary, "script.py")
        script.write_text(code)
        output = subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--events", type=int, default=100_000_000, help="of all environments")
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=1, help="the fastest counts")
    parser.add_argument("--journals", action="store_true", help="compare the journals of a killed process: np.load can't read those")
    parser.add_argument("--fault", default="", choices=("", "lost", "everything"))
    parser.add_argument("--directory", help="where the ledgers are written, or were before, and stay")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.directory or temporary)
        if not any(directory.glob("*")):
            directory.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            write_apart(directory, options.envs, options.events // options.envs, not options.journals, options.fault)
            print(f"written in {time.perf_counter() - start:.0f} s")
        size = sum(path.stat().st_size for path in directory.iterdir())
        events = options.envs * (options.events // options.envs)
        print(f"{events:,} events of {options.envs} envs on each side, {size / 1e9:.2f} GB, {size / 2 / events:.1f} bytes per event")
        loaded = None
        for number in range(options.repeat + 1):  # the first fills the system's cache
            if not options.journals:
                found = run(LOAD, directory)
                if number and (loaded is None or found["seconds"] < loaded["seconds"]):
                    loaded = found
        if loaded is not None:
            print(
                f"np.load of all members:   {loaded['seconds']:6.1f} s ({loaded['cpu']:6.1f} s of processor), {loaded['peak_mb']:5.0f} MB"
            )
        for jobs in options.jobs:
            if jobs > 1:
                at_once = run(CHECKSUMS, jobs)["seconds"] / jobs
                print(f"checksums in {jobs} processes at once are {run(CHECKSUMS, 1)['seconds'] / at_once:.2f}x as fast as in one")
            best = min((run(COMPARE, directory, jobs) for _ in range(options.repeat)), key=lambda one: one["seconds"])
            rate = events / best["seconds"] / 1e6
            beside = f", {best['seconds'] / loaded['seconds']:.2f}x np.load" if loaded is not None else ""
            print(
                f"compared in {jobs} process{'es' if jobs > 1 else '  '}:   {best['seconds']:6.1f} s ({best['cpu']:6.1f} s of processor), "
                f"{best['peak_mb']:5.0f} MB, {rate:.1f} million events a second{beside}; exit status {best['status']}"
            )


def write_apart(*arguments: object) -> None:
    """`write` in a process of its own, whose memory is not counted."""
    import multiprocessing

    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments)
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit("the ledgers could not be written")


def _write(directory: Path, envs: int, events: int, seal: bool, fault: str) -> None:
    recorders = write(directory, envs, events, seal=seal, fault=fault)
    os._exit(not recorders)  # else journals would be sealed


if __name__ == "__main__":
    main()
