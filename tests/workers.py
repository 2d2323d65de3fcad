"""Work in worker processes: a crash or a hang is the failure of one piece of it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as Hang
from typing import Any, TypeVar

import switches as switches
from pebble import ProcessExpired, ProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

Result = TypeVar("Result")
# TVM and LLVM keep what they compiled, so that a worker is replaced after as many pieces.
_PIECES_A_WORKER = 150
_COLUMNS = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def each(
    function: Callable[..., Result],
    pieces: Sequence[tuple[Any, ...]],
    failed: Callable[[tuple[Any, ...], str], Result],
    done: Callable[[Result], None],
    *,
    title: str,
    workers: int,
    seconds: float,
) -> None:
    """Call ``function(*piece)`` for every piece, in `workers` processes of one thread each.

    Args:
        function: of a module that a new process can import.
        pieces: arguments that can be pickled.
        failed: makes the result of a piece that raised, crashed or did not end, and why.
        done: called in this process with each result, in the order of `pieces`.
        title: what the pieces are, beside the progress bar.
        workers: how many processes.
        seconds: how long one piece may take.
    """
    os.environ.update({"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"})
    pool = ProcessPool(
        max_workers=workers,
        max_tasks=_PIECES_A_WORKER,
        context=multiprocessing.get_context("spawn"),
    )
    with pool, Progress(*_COLUMNS, console=Console(stderr=True)) as bar:
        futures = [pool.schedule(function, list(piece), timeout=seconds) for piece in pieces]
        for piece, future in bar.track(
            zip(pieces, futures, strict=True), total=len(pieces), description=title
        ):
            try:
                result = future.result()
            except Hang:
                result = failed(piece, f"did not end within {seconds:g} s")
            except ProcessExpired as crash:
                result = failed(piece, f"ended its process with {crash.exitcode}")
            except Exception as error:
                result = failed(piece, f"{type(error).__name__}: {error}")
            done(result)
