"""A disk that fails at the n-th call that writes to it."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: What a disk, or the system in front of it, answers.
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)


class FaultyDisk:
    """Files below a directory, of which the n-th call that writes fails.

    Args:
        directory: Where the disk is mounted, so to speak.
        at: Number of the call that fails, from 0.
        how: ``"once"``; ``"torn"``: the call writes half of what it was given first; ``"from then on"``: all later calls fail too.
        number: The error.

    Attributes:
        calls: The calls so far: what was called, and the name of the file.
    """

    def __init__(self, directory: Path, at: int | None = None, how: str = "once", number: int = errno.ENOSPC) -> None:
        self.directory = str(directory)
        self.at, self.how, self.number = at, how, number
        self.calls: list[str] = []

    def has(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.directory)

    def check(self, what: str, path: Any, data: Any = None, write: Any = None) -> None:
        call = len(self.calls)
        self.calls.append(f"{what} {os.path.basename(os.fspath(path)) if not isinstance(path, int) else ''}")
        if self.at is not None and (call == self.at or (call > self.at and self.how == "from then on")):
            if self.how == "torn" and write is not None:
                write(bytes(data)[: len(data) // 2])
            raise OSError(self.number, os.strerror(self.number), str(path))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[FaultyDisk]:
        """Everything in this process that writes below the directory goes to this disk."""
        disk, plain = self, io.open

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                disk.check("write", self.name, data, super().write)
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                disk.check("truncate", self.name)
                return super().truncate(size)

        def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if not disk.has(file) or not set(mode) & set("wax+") or "b" not in mode:
                return plain(file, mode, buffering, *args, **options)
            disk.check("open", file)
            raw = Raw(file, mode.replace("b", ""))
            if buffering == 0:
                return raw
            return (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)

        def checked(name: str) -> Any:
            original = getattr(os, name)

            def call(path: Any, *args: Any, **options: Any) -> Any:
                if isinstance(path, int) or disk.has(path):
                    disk.check(name, path)
                return original(path, *args, **options)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rename", "replace", "unlink", "ftruncate"):
                patch.setattr(os, name, checked(name))
            patch.setattr(builtins, "open", opened)
            patch.setattr(io, "open", opened)
            yield self
