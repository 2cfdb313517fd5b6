"""Long runs: memory stays flat, space on disk is what it should be, and large ledgers are compared in bounded memory."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from common import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from scale import COMPARE, LOAD, run, write_apart

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

LINE = re.compile(r"([\d,]+) events(?:, +([\d,]+) events a second)?, +([\d.]+) MB \( *([\d.]+) at most\), +([\d.]+) bytes per event")


@pytest.mark.parametrize(
    ("envs", "events", "every"),
    [pytest.param(8, 600_000, 100_000, id="short"), pytest.param(64, 100_000_000, 10_000_000, id="long", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("retain", ["all", "differences"])
def test_memory_and_space_stay_bounded_however_long_a_run_is(retain: str, envs: int, events: int, every: int) -> None:
    arguments = ["--envs", envs, "--events", events, "--every", every, "--retain", retain]
    command = [sys.executable, str(BENCHMARKS / "long.py"), *map(str, arguments)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    print(output)
    lines = [(int(one[0].replace(",", "")), one[1], *map(float, one[2:])) for one in LINE.findall(output)]
    recording = [line for line in lines if line[1]]
    assert recording[-1][0] >= events
    assert recording[-1][2] < recording[1][2] + 16
    closed = lines[len(recording)]
    assert closed[4] <= (1 if retain == "differences" else 27)
    assert closed[3] < recording[1][2] + 64
    assert f"no difference: {recording[-1][0]:,} events compared" in output
    if events > 1_000_000:  # else a moment at which the machine is slow is all that is seen
        speeds = [int(line[1].replace(",", "")) for line in recording]
        assert statistics.median(speeds[-4:]) > 0.7 * statistics.median(speeds[:4])


@pytest.mark.long
def test_a_hundred_million_events_are_compared_in_bounded_memory(tmp_path: Path) -> None:
    write_apart(tmp_path, 64, 100_000_000 // 64, True, "")
    run(LOAD, tmp_path)  # what reads the files first takes them from the disk
    loaded, one = run(LOAD, tmp_path), run(COMPARE, tmp_path, 1)
    several = run(COMPARE, tmp_path, os.cpu_count() or 1)
    print(loaded, one, several, sep="\n")
    for found in (one, several):
        assert (found["status"], found["events"]) == (0, 100_000_000)
        assert found["peak_mb"] < 500
        assert found["seconds"] < 2 * loaded["seconds"]
