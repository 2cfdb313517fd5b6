"""One comparison in several processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from .result import Comparison, Progress
from .sources import Checksums, SealedSource, Source
from .split import Part, PartResult, compare_part, cut, join

__all__ = ["compare_in_processes"]


def compare_in_processes(
    sources: Sequence[Source], empty: Sequence[str], left_out: str, jobs: int, progress: Progress | None = None
) -> Comparison:
    """Compare ledgers of which none was read yet.

    A runner's streams may be shared out between processes, which then find out that they are equal. Where one of them is not, all of the
    runner is compared once more in one process: what happened may show in the other streams only.

    Args:
        sources: The ledgers.
        empty: A sentence for each ledger that was stopped before it held anything.
        left_out: What is to be said of ledgers that are left out.
        jobs: Number of processes.
        progress: Called with the number of bytes done and the number of all.

    Raises:
        LedgerError: They can't be compared.
    """
    parts = cut(sources, jobs)
    found: dict[Part, PartResult] = {}
    again: set[Part] = set()
    # Not forked: the program that compares may have threads.
    with ProcessPoolExecutor(min(jobs, len(parts)), multiprocessing.get_context("spawn")) as pool:
        for part, result, waiting in _made(pool, parts):
            found[part] = result
            if part.whole is not None and not result.equal and part.whole not in again:
                again.add(part.whole)
                for future, other in waiting.items():
                    if other.whole is part.whole:
                        future.cancel()
            if progress is not None:
                progress(sum(one.size for one in found), sum(one.size for one in parts))
        for part, result, _ in _made(pool, list(again)):
            found[part] = result
    results = {part: result for part, result in found.items() if part.whole not in again}
    _check(sources, list(results.values()))
    # In the order of their streams, in which one process says what it has to say.
    return join([results[part] for part in sorted(results, key=lambda part: min(part.keys) if part.keys else ())], empty, left_out)


def _made(pool: ProcessPoolExecutor, parts: Sequence[Part]) -> Iterator[tuple[Part, PartResult, dict[Future[PartResult], Part]]]:
    """Parts as they become ready, each with those that are not; without those that are cancelled meanwhile."""
    try:
        waiting = {pool.submit(compare_part, part): part for part in parts}
    except BrokenProcessPool:
        yield from ((part, compare_part(part), {}) for part in parts)
        return
    for future in as_completed(list(waiting)):
        part = waiting.pop(future)
        if future.cancelled():
            continue
        try:
            result = future.result()
        except BrokenProcessPool:  # somebody has killed it, for the memory it took or by mistake
            result = compare_part(part)
        yield part, result, waiting


def _check(sources: Sequence[Source], results: Sequence[PartResult]) -> None:
    """Check the ledgers of which no part has read all.

    Raises:
        LedgerError: One is damaged.
    """
    checksums: dict[Path, Checksums] = {}
    for result in results:
        for path, columns in result.checksums.items():
            for name, some in columns.items():
                checksums.setdefault(path, {}).setdefault(name, {}).update(some)
    for source in sources:
        if isinstance(source, SealedSource) and source.path in checksums:
            source.check(checksums[source.path])
