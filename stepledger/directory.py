"""A directory with ledgers: which of the files in it are theirs."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from .errors import LedgerError
from .format import JOURNAL, SEALED

__all__ = ["find", "inside", "is_directory"]


def is_directory(path: Path) -> bool:
    """Whether this is a directory.

    Raises:
        LedgerError: Nobody can tell.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LedgerError(f"{path} can't be read ({error.strerror or error}): check the path and its permissions.") from None


def inside(path: Path, directory: Path) -> bool:
    """Whether a path that somebody else has named lies in a directory, whatever ``..``, links and roots it holds."""
    return path.resolve().is_relative_to(directory.resolve())


def find(directory: Path) -> list[Path]:
    """The names (``*.npz``) of the ledgers in a directory and below it.

    Left out: recordings that were set aside (``env-0.old1.npz``, and what lies in a directory ``old1``) and hidden directories, such
    as the ``.venv`` of a project that is compared from its root.

    A link to a file in the directory is followed, and one to a directory is not searched.

    Raises:
        LedgerError: The directory can't be read, or a ledger in it is a link to a file that lies elsewhere, which nobody has named.
    """

    def refuse(error: OSError) -> None:
        raise LedgerError(f"{error.filename} can't be read ({error.strerror or error}): check the path and its permissions.")

    names = set()
    for parent, directories, files in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if not name.startswith(".") and not _ASIDE.fullmatch(name)]
        paths = [Path(parent, name) for name in files if name.endswith((SEALED, JOURNAL))]
        for path in paths:
            # A journal that was listed may have become a sealed ledger since.
            if (path.is_file() or path.with_suffix(SEALED).is_file()) and not _SET_ASIDE.search(path.stem):
                names.add(path.with_suffix(SEALED))
                if path.is_symlink() and path.is_file() and not inside(path, directory):
                    raise LedgerError(f"{path} is a link that leads out of {directory}: put a copy in its place, or name the file itself.")
    return sorted(names, key=_natural)


#: `Path.stem` of ``env-0.old1.npz``, and the name of a directory of such: a file ``old1.npz`` is somebody's own name.
_SET_ASIDE, _ASIDE = re.compile(r"\.old\d+$"), re.compile(r"old\d+")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts ``env-10`` behind ``env-9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
