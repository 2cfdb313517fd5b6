"""Faults in environments of Gymnasium whose observations, rewards or actions take few values, so that equal ones are no evidence."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import pytest
from common import MODES, vector_of
from faults import ENV_FAULTS, FAULTS, VECTOR_FAULTS, Dose, FaultyEnv, FaultyVectorEnv, read_log
from test_faults import CODES, LASTING, impossible

from stepledger import Comparison, LedgerEnv, LedgerVectorEnv, compare

NAMES = ["CartPole-v1", "FrozenLake-v1", "Taxi-v3", "Blackjack-v1", "CliffWalking-v1"]
DOSES = {"one": Dose(at=7), "some": Dose(0.01, 3), "many": Dose(0.1, 5), "every": Dose()}
#: A change of a number needs its value to be named, and of few whole ones each is some factor of each.
OF_DIGESTS = [fault for fault in FAULTS if fault.partition(":")[2] not in ("f16", "bf16", "scale", "clip", "uint8", "bgr", "transpose")]
#: Where few values take turns, a zero may also be that of the step before, and that of another environment.
ALIKE = {"SL101", "SL102", "SL103", "SL113"}
#: A step filled in, or repeated, has what the one before had too.
REPEATED = {"SL302", "SL303", "SL311"}

ENVS = 3


def run(directory: Path, name: str, fault: str, level: str, dose: Dose, mode: str) -> Comparison:
    def make(index: int) -> gym.Env:
        env = LedgerEnv(gym.make(name), directory / "envs")
        # One that is made at one event is made in one environment: resets of all of them at once are another fault.
        faulty = level == "env" and (dose.at is None or index == 0)
        return FaultyEnv(env, fault, dose, index=index, log=directory / "log") if faulty else env

    makers: list[Callable[[], gym.Env]] = [functools.partial(make, index) for index in range(ENVS)]
    envs = vector_of(makers, "sync", mode)
    if level == "vector":
        envs = FaultyVectorEnv(envs, fault, dose, log=directory / "log")
    envs = LedgerVectorEnv(envs, directory / "trainer.npz")
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(300):
        _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
        if mode == "Disabled" and (terminated | truncated).any():
            envs.reset(options={"reset_mask": terminated | truncated})
    envs.close()
    return compare(directory / "envs", directory / "trainer.npz")


def cases() -> list[object]:
    """Every combination that can exist; one in a few, another one for each environment, and the others take long."""
    found = []
    for name in NAMES:
        for fault in OF_DIGESTS:
            for level in ("env", "vector"):
                for mode in MODES:
                    for dose in DOSES:
                        if fault not in (ENV_FAULTS if level == "env" else VECTOR_FAULTS) or impossible(mode, fault, level, "sync"):
                            continue
                        case = f"{name}-{fault}@{level}-{mode}-{dose}"
                        marks = [pytest.mark.long] if zlib.crc32(case.encode()) % 32 else []
                        found.append(pytest.param(name, fault, level, mode, dose, id=case, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:.*even though this environment has already returned")
@pytest.mark.parametrize(("name", "fault", "level", "mode", "dose"), cases())
def test_each_injection_is_a_difference_where_it_was_made(tmp_path: Path, name: str, fault: str, level: str, mode: str, dose: str) -> None:
    comparison = run(tmp_path, name, fault, level, DOSES[dose], mode)
    injections = read_log(tmp_path / "log") if (tmp_path / "log").exists() else []
    (hop,) = comparison.hops
    if not injections:
        assert comparison.equal
        return
    assert comparison.exit_status == 1
    streams = {one.env for one in injections}
    if fault in LASTING:
        assert hop.differences == (1 if fault == "streams:swapped" else len(streams))
    elif dose in ("many", "every") and fault.endswith((":stale", ":swap", ":reset_obs")):  # some in a row may be one
        assert hop.differences <= len(injections)
    elif fault.startswith("step"):
        assert hop.differences <= len(injections)  # those in a row are one
    else:
        assert hop.differences == len(injections)
        places = {(one.env, one.episode, one.step) for one in injections}
        assert {(one.env, one.episode, one.step) for one in comparison.differences} <= places
    expected = {CODES[fault]}
    expected |= ALIKE if CODES[fault] in ALIKE else REPEATED if CODES[fault] in REPEATED else set()
    if fault.startswith("final_obs"):
        expected |= {"SL114"}
    named = [bool(expected & {why.code for why in one.explanations}) for one in comparison.differences]
    # Of steps that are lost everywhere it can't be told which of some equal ones it were.
    least = 0.7 if dose == "every" and fault == "step:lost" else 0.9 if fault.startswith(("step", "reset")) else 1
    assert sum(named) >= least * len(named), [str(one) for one, known in zip(comparison.differences, named) if not known][:3]
