"""Places named by a URI: a ledger or a directory of them on a file system that pyarrow knows, such as ``s3://bucket/run``.

Recording needs files that can be appended to, so ledgers are recorded into a local directory and stored at the URI afterwards, and
fetched from there before they are read. pyarrow is imported only once there is such a URI. ``file://`` is just a way to write a path.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .directory import inside
from .errors import LedgerError
from .format import JOURNAL, SEALED

__all__ = ["Remote", "fetched", "located"]

#: Two letters or more, since one is a drive of Windows.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")

#: Bytes of a file that travel at once.
_PIECE = 1 << 24


def located(place: str | os.PathLike[str]) -> Path | str:
    """The local path that a path or a ``file://`` URI names, or any other URI as it is.

    Raises:
        LedgerError: A ``file://`` URI names another machine.
    """
    name = os.fspath(place)
    if not _URI.match(name):
        return Path(name)
    if not name.lower().startswith("file://"):
        return name
    parts = urlsplit(name)
    if parts.netloc not in ("", "localhost"):
        raise LedgerError(f"{name} names a file of the machine {parts.netloc!r}: write file:/// and an absolute path, or the path alone.")
    return Path(url2pathname(parts.path))


class Remote:
    """A directory, or a ledger, at a URI.

    Args:
        uri: Anything that `located` leaves as it is.

    Raises:
        LedgerError: pyarrow is missing, knows no such file system, or can't reach it; or the URI holds a password.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        with self._told("can't be used"):
            if urlsplit(uri).password is not None:
                raise LedgerError("the URI holds a password, and would be printed: give credentials where the file system looks for them.")
            try:
                from pyarrow import fs
            except ImportError:
                raise LedgerError(f"{uri} can't be used without pyarrow: install it (pip install pyarrow), or name a directory.") from None
            self._fs: Any = fs
            self._filesystem, path = fs.FileSystem.from_uri(uri)
        self._path = path.rstrip("/")
        if not self._path:
            raise LedgerError(f"{uri} names no directory: add its path.")

    def below(self, name: str) -> Remote:
        """The directory of a name in this one."""
        parts = urlsplit(self.uri)
        return Remote(parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl())

    def read_text(self, name: str) -> str | None:
        """What a small file in the directory holds; `None` where there is no such file."""
        with self._told("can't be read"):
            try:
                with self._filesystem.open_input_stream(f"{self._path}/{name}") as file:
                    return str(file.read().decode())
            except FileNotFoundError:
                return None

    def store(self, directory: Path, names: Iterable[str]) -> None:
        """Copy files of a local directory to this one, in bounded memory."""
        with self._told("can't be written"):
            paths = {name: f"{self._path}/{name}" for name in names}
            for parent in {path.rpartition("/")[0] for path in paths.values()}:
                self._filesystem.create_dir(parent, recursive=True)
            for name, path in paths.items():
                with open(directory / name, "rb") as source, self._filesystem.open_output_stream(path) as target:
                    while piece := source.read(_PIECE):
                        target.write(piece)
                        target.flush()  # waits for it: pyarrow would keep in memory what is read faster than it is sent

    def fetch(self, directory: Path) -> Path:
        """Copy the ledgers that are here into a local directory, in bounded memory, but for those that it has.

        Returns:
            What is in the place of the URI: the directory, or a file in it.
        """
        with self._told("can't be read"):
            single = self._path.endswith((SEALED, JOURNAL))
            if single:  # its other half belongs to it
                stem = self._path.rpartition(".")[0]
                found, base = self._filesystem.get_file_info([stem + SEALED, stem + JOURNAL]), self._path.rpartition("/")[0]
            else:
                selector = self._fs.FileSelector(self._path, allow_not_found=True, recursive=True)
                found, base = self._filesystem.get_file_info(selector), self._path
            for info in found:
                target = directory / os.path.relpath(info.path, base)
                if info.type != self._fs.FileType.File or target.suffix not in (SEALED, JOURNAL):
                    continue
                if inside(target, directory) and not target.exists():  # an object's name may hold ".."
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part = target.with_name(f"{target.name}.part")  # what was interrupted must not look like a ledger
                    with self._filesystem.open_input_stream(info.path) as source, open(part, "wb") as file:
                        shutil.copyfileobj(source, file, _PIECE)
                    os.replace(part, target)
            return directory / self._path.rpartition("/")[2] if single else directory

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Tell of pyarrow's errors in one sentence."""
        try:
            yield
        except LedgerError:
            raise
        except (OSError, ValueError, NotImplementedError) as error:  # those of pyarrow are among these
            reason = str(error).partition("\n")[0]
            raise LedgerError(f"{self.uri} {what} ({reason}): check the URI and the credentials, or name a directory.") from None


@contextmanager
def fetched(place: str | os.PathLike[str]) -> Iterator[Path]:
    """A place as a local path; what a URI names is fetched into a temporary directory, which errors don't speak of.

    Raises:
        LedgerError: It can't be fetched, or the place has no name.
    """
    if not os.fspath(place):  # pathlib would take it for the current directory
        raise LedgerError("an empty path was given: name a directory with ledgers, or one of them.")
    path = located(place)
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="stepledger-") as directory:
        remote = Remote(path)
        local = remote.fetch(Path(directory))
        try:
            yield local
        except LedgerError as error:
            raise LedgerError(str(error).replace(str(local), path.rstrip("/"))) from None
