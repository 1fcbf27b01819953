"""The same function over many tasks in several processes, results as they come.

Processes are spawned, not forked: the parent may have threads (jax's, a progress bar's).
"""

import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from hotloop.errors import DataError

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")

_shared: Any = None


def in_processes(
    fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Sequence[Task], workers: int
) -> Generator[tuple[Task, Result]]:
    """(task, fn(shared, task)) in the order in which they end; `shared` goes to each process once.

    One worker, or one task, is done in this process.
    """
    if workers == 1 or len(tasks) < 2:
        yield from ((task, fn(shared, task)) for task in tasks)
        return
    with ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), _adopt, (shared,)) as pool:
        futures = {pool.submit(_call, fn, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise DataError("a worker process was killed: is there memory for so many workers?") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _adopt(shared: Any) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    _shared = shared


def _call(fn: Callable[[Any, Any], Any], task: Any) -> Any:
    return fn(_shared, task)
