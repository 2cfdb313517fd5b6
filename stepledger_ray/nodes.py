"""The run directory on other nodes, and how what was written there comes into the driver's."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stepledger.directory import find, inside
from stepledger.errors import LedgerError
from stepledger.format import JOURNAL, SEALED
from stepledger.result import Progress

from .processes import Deadline
from .run import Run, check_writable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["claim", "collect", "discard", "holds", "ledgers", "on_node"]

#: Bytes of a file that travel at once.
_PIECE = 1 << 24
#: Pieces that are under way at a time, so that the driver's memory does not grow with a file.
_UNDER_WAY = 2

#: Says whose the run directory of a node is that does not share the driver's file system.
_MARK = "node.txt"


def claim(run: Run) -> str:
    """In a worker: make the run directory of this node. What an earlier run left there is moved into ``old1``, ``old2``, ...

    Returns:
        The node's id.

    Raises:
        LedgerError: It can't be written.
    """
    check_writable(run.directory)
    if not run.is_here():
        directory = Path(run.directory)
        with open(directory / f".{_MARK}", "w") as lock:  # several workers of a node come at the same time
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
            mark = directory / _MARK
            if not mark.exists() or mark.read_text() != run.id:
                _set_aside(directory)
                mark.write_text(run.id)
    return str(ray.get_runtime_context().get_node_id())


def _set_aside(directory: Path) -> None:
    number = 1
    while (directory / f"old{number}").exists():
        number += 1
    for path in ledgers(directory):
        target = directory / f"old{number}" / path.relative_to(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def ledgers(directory: Path) -> list[Path]:
    """The files of ledgers in a run directory, without those that were set aside."""
    return [path for name in find(directory) for path in (name, name.with_suffix(JOURNAL)) if path.exists()]


def collect(run: Run, nodes: Mapping[str, Iterable[str]], progress: Progress | None = None) -> dict[str, str]:
    """Copy into the driver's run directory what was written on nodes that don't share its file system; dead workers' files too.

    Args:
        run: The run.
        nodes: Node id -> who recorded there.
        progress: Called with the number of bytes that have come and the number of all.

    Returns:
        For each node that gave no answer, a sentence about it.
    """
    problems: dict[str, str] = {}
    there: dict[str, list[tuple[str, int]]] = {}
    here = ray.get_runtime_context().get_node_id()
    lists = {node: on_node(node, _listed).remote(run) for node in nodes if node != here}
    deadline = Deadline()
    for node, files in lists.items():
        with _asked(node, nodes[node], problems):
            there[node] = ray.get(files, timeout=deadline.left)
    done, total = 0, sum(size for files in there.values() for _, size in files)
    deadline = Deadline(total)
    for node, files in there.items():
        with _asked(node, nodes[node], problems):
            for name, size in files:
                for came in _copy(run, on_node(node, _piece), name, size, deadline):
                    done += came
                    if progress is not None:
                        progress(done, total)
    return problems


def discard(run: Run, nodes: Iterable[str]) -> None:
    """Remove the run directories of nodes from which all has come and which don't share the driver's file system."""
    with contextlib.suppress(ray.exceptions.RayError):  # a node that has died since needs no order
        ray.get([on_node(node, _remove).remote(run) for node in nodes], timeout=Deadline().left)


def on_node(node: str, function: Any) -> Any:
    """A function as a task on a node."""
    return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))(function)


@contextlib.contextmanager
def _asked(node: str, who: Iterable[str], problems: dict[str, str]) -> Iterator[None]:
    """Add a sentence to the problems where a node gives no answer."""
    try:
        yield
    except (ray.exceptions.RayError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        problems[node] = f"node {_name(node)} gave no ledgers of {', '.join(sorted(who))} ({reason})"


def _name(node: str) -> str:
    for one in ray.nodes():
        if one["NodeID"] == node:
            return f"{one['NodeManagerAddress']} ({node[:8]})"
    return node[:8]


def holds(run: Run) -> str:
    """On a node: whether its run directory is the ``"driver"``'s too, or one of ``"workers"``; empty where it has none of this run."""
    if run.is_here():
        return "driver"
    mark = Path(run.directory) / _MARK
    return "workers" if mark.exists() and mark.read_text() == run.id else ""


def _listed(run: Run) -> list[tuple[str, int]]:
    """On a node: the ledgers there, unless its run directory is the driver's too."""
    directory, whose = Path(run.directory), holds(run)
    if whose == "driver":
        return []
    if not whose:
        raise LedgerError(f"{directory} holds nothing of this run.")
    return [(str(path.relative_to(directory)), path.stat().st_size) for path in ledgers(directory)]


def _remove(run: Run) -> None:
    """On a node: remove the run directory, unless it is the driver's too."""
    if not run.is_here():
        shutil.rmtree(run.directory, ignore_errors=True)


def _piece(path: str, begin: int, size: int) -> bytes:
    """On a node: a part of a file."""
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(size)


def _copy(run: Run, piece: Any, name: str, size: int, deadline: Deadline) -> Iterator[int]:
    """Copy a file from a node piece by piece; yields each piece's size once it is here."""
    target = Path(run.directory, name)
    if not inside(target, Path(run.directory)) or target.suffix not in (SEALED, JOURNAL):
        raise LedgerError(f"it names a file that is no ledger of the run: {name!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    under_way: deque[Any] = deque()
    try:
        with open(temporary, "wb") as file:
            for begin in range(0, size, _PIECE):
                under_way.append(piece.remote(str(target), begin, min(_PIECE, size - begin)))
                if len(under_way) == _UNDER_WAY:
                    yield file.write(ray.get(under_way.popleft(), timeout=deadline.left))
            while under_way:
                yield file.write(ray.get(under_way.popleft(), timeout=deadline.left))
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
