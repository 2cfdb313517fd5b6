"""What must hold of a ledger whose file was damaged, whatever was done to it: the tests of damage and the fuzzer ask this."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from stepledger import Ledger, LedgerError, Stream, compare, read
from stepledger.recover import recover

REFUSED, PREFIX, WHOLE = "refused", "prefix", "whole"


class Subject:
    """A ledger, the intact partner that it is compared with, and what both say as long as the ledger is intact too.

    Args:
        path: The ledger; it is copied, and not changed.
        partner: The other side of its boundary.
    """

    def __init__(self, path: Path, partner: Path) -> None:
        self.path = path
        self.data = path.read_bytes()
        self.partner = partner
        self.original = read(path)
        self._sides = (lambda own: (own, partner)) if self.original.meta["tap"] == "env" else (lambda own: (partner, own))
        verdict = compare(*self._sides(path))
        self.status = verdict.exit_status
        self._places = places(verdict)

    def check(self, data: bytes | bytearray, directory: Path, *, recovering: bool = True) -> str:
        """Read, compare and recover a file of this content; whether it was refused, or read as a prefix of the ledger, or whole.

        Args:
            data: The damaged file's content.
            directory: Where it can be written; nothing else may be changed there.
            recovering: Whether a journal is recovered too.

        Raises:
            AssertionError: Something was said that is not so.
        """
        path = directory / self.path.name
        path.write_bytes(data)
        try:
            outcome = self._read(path)
            self._compare(path, outcome)
            if recovering and path.suffix == ".journal":
                self._recover(path, outcome, data)
        finally:
            path.unlink(missing_ok=True)
            path.with_suffix(".npz").unlink(missing_ok=True)
        return outcome

    def _read(self, path: Path) -> str:
        try:
            ledger = read(path)
        except LedgerError as error:
            assert_sentence(error, path)
            return REFUSED
        return self._outcome(ledger)

    def _outcome(self, ledger: Ledger) -> str:
        """Whether a ledger that was read is the original or a prefix of it, which says that it is one."""
        original = self.original
        assert {**ledger.meta, "stopped": None, "ended": None} == {**original.meta, "stopped": None, "ended": None}
        assert list(ledger.streams) == list(original.streams)
        for one, whole in zip(ledger.streams.values(), original.streams.values()):
            assert_prefix(one, whole)
        if ledger.events == original.events:
            return WHOLE
        assert ledger.open_end, "a part of the events is taken for all"
        return PREFIX

    def _compare(self, path: Path, outcome: str) -> None:
        try:
            comparison = compare(*self._sides(path))
        except LedgerError as error:
            if outcome == WHOLE:
                raise AssertionError("what is whole is not compared") from error
            if outcome == REFUSED:
                assert_sentence(error, path)
            return
        assert outcome != REFUSED, "it can't be read, and was compared"
        assert places(comparison) <= self._places, "a difference that there is not"
        if outcome == WHOLE:
            assert (comparison.exit_status, places(comparison)) == (self.status, self._places)
        else:
            assert comparison.exit_status == (1 if comparison.differences else 3 if comparison.events else 2)

    def _recover(self, path: Path, outcome: str, data: bytes | bytearray) -> None:
        try:
            (result,) = recover(path)
        except LedgerError as error:
            assert_sentence(error, path)
            return
        if outcome == REFUSED:
            assert result.outcome == ("damaged" if data else "empty")
            assert not data or path.read_bytes() == data, "what can't be read was changed"
            return
        assert result.outcome == "sealed"
        assert not path.exists()
        sealed = read(path.with_suffix(".npz"))
        assert sealed.open_end
        assert self._outcome(sealed) == outcome


def subject(directory: Path, *, journal: bool, keep_values: Any = False, side: str = "env-0", faulty: bool = False) -> Subject:
    """A small ledger of one environment, sealed or as a killed process leaves it, in several blocks.

    Args:
        directory: Where it and its partner are written.
        journal: Whether it is a journal.
        keep_values: As in `LedgerEnv`.
        side: ``"env-0"`` or ``"trainer"``: which of both.
        faulty: The trainer received a reward that the environment did not give.
    """
    from common import Walk, drive, vector_of
    from gymnasium import Wrapper, spaces

    from stepledger import LedgerEnv, LedgerVectorEnv

    class Fault(Wrapper):
        calls = 0

        def step(self, action: Any) -> Any:
            self.calls += 1
            obs, reward, *rest = super().step(action)
            return (obs, reward + 1.5 * (self.calls == 7), *rest)

    made = directory / "made"
    space = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "t": spaces.Text(3)}) if keep_values else None
    env = LedgerEnv(Walk((3, 5, 1), 0, space), made, 0, keep_values=keep_values)
    vector = vector_of([lambda: Fault(env) if faulty else env])
    envs = LedgerVectorEnv(vector, made / "trainer.npz", keep_values=keep_values)
    if journal:
        envs.reset(seed=0)
        for _ in range(3):
            for _ in range(3):
                envs.step(envs.action_space.sample())
            for one in (env, envs):
                one.write_journal()
                if keep_values and keep_values is not True:
                    one.save_values({str(made / "env-0.npz"): [0], str(made / "trainer.npz"): [0]})
        shutil.copy(made / f"{side}.journal", directory)
    else:
        drive(envs, 9)
    envs.close()
    partner = directory / {"env-0": "trainer.npz", "trainer": "env-0.npz"}[side]
    shutil.copy(made / partner.name, partner)
    if not journal:
        shutil.copy(made / f"{side}.npz", directory)
    return Subject(directory / f"{side}{'.journal' if journal else '.npz'}", partner)


def assert_sentence(error: LedgerError, path: Path | None = None) -> None:
    """What went wrong is said in one line that names the file, where it is one file's fault."""
    text = str(error)
    assert path is None or str(path) in text, text
    assert text.isprintable(), text
    assert text.endswith("."), text


def assert_prefix(one: Stream, whole: Stream) -> None:
    """A stream holds the first events of another, and nothing else."""
    assert (one.begin, one.last) == (whole.begin, whole.last)
    assert one.data.keys() == whole.data.keys()
    for name, column in one.data.items():
        assert column.dtype == whole.data[name].dtype
        assert column.tobytes() == whole.data[name][: len(one)].tobytes(), name
    assert one.values.keys() == whole.values.keys()
    rows = len(one)
    if whole.kept is not None:
        assert one.kept is not None
        rows = len(one.kept)
        np.testing.assert_array_equal(one.kept, whole.kept[:rows])
    for name, values in one.values.items():
        assert len(values) == rows
        expected = whole.values[name][:rows]
        assert values == expected if isinstance(values, list) else values.tobytes() == expected.tobytes()


def places(comparison: Any) -> set[tuple[Any, ...]]:
    """Where differences are, and in what."""
    return {(one.env, one.episode, one.step, one.fields) for one in comparison.differences}
