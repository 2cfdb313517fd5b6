"""A comparison that is made in parts is the one that is made at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import rewrite

from stepledger import LedgerError, compare
from stepledger.split import compare_part, join, split

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from comparing import write


def change(name: str, column: str, row: int) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (path,) = directory.glob(name)
        with np.load(path) as archive:
            values = archive[column].copy()
        values[row] ^= 1
        rewrite(path, {column: values})

    return apply


def remove(name: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        for path in directory.glob(name):
            path.unlink()

    return apply


CASES: dict[str, list[Callable[[Path], Any]]] = {
    "equal": [],
    "different in two runners": [change("runner-1.0-vector*", "h_obs", 300), change("runner-3.0-vector*", "h_rew", 900)],
    "different at the learner": [change("learner*", "h_next", 77)],
    "different at two taps": [change("runner-2.0-env-1*", "h_act", 5), change("runner-2.0-episode*", "h_obs", 50)],
    "one ledger missing": [remove("runner-2.0-env-3*")],
    "a runner's tap missing": [remove("runner-2.0-vector*")],
    "a tap missing": [remove("runner-*-episode*")],
    "the learner missing": [remove("learner*")],
    "an empty journal": [lambda directory: (directory / "runner-9.0-env-0.journal").touch()],
    "a foreign file": [lambda directory: np.savez(directory / "other.npz", a=np.zeros(3))],
}


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_parts_put_together_are_the_whole(tmp_path: Path, case: str, parts: int) -> None:
    write(tmp_path, runners=3, events=600)
    for apply in CASES[case]:
        apply(tmp_path)
    whole = compare(tmp_path)
    shares, empty, left_out = split(tmp_path, parts)
    assert len(shares) == min(parts, 3) + 1
    assert sorted({path for share in shares for path in share.paths}) == sorted(
        path for path in tmp_path.iterdir() if path.name != "other.npz" and path.stat().st_size
    )
    joined = join([compare_part(share) for share in shares], empty, left_out)
    assert joined.exit_status == whole.exit_status
    assert sorted(map(str, joined.differences)) == sorted(map(str, whole.differences))
    assert [hop.name for hop in joined.hops] == [hop.name for hop in whole.hops]
    for one, other in zip(joined.hops, whole.hops):
        assert {**vars(one), "unpaired": sorted(one.unpaired)} == {**vars(other), "unpaired": sorted(other.unpaired)}


def test_what_can_not_be_compared_at_once_can_not_be_in_parts(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="holds no ledgers"):
        split(tmp_path, 2)
    write(tmp_path, runners=1, events=100)
    remove("*vector*")(tmp_path)
    remove("*episode*")(tmp_path)
    remove("learner*")(tmp_path)
    with pytest.raises(LedgerError, match="only ledgers of the tap 'env'"):
        split(tmp_path, 2)
    (tmp_path / "env.npz").write_bytes(b"no ledger")
    with pytest.raises(LedgerError, match=r"env\.npz is no ledger"):
        split(tmp_path, 2)
