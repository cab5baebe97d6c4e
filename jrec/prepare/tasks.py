"""Work in pieces: by threads of this process, or by workers of a cluster, which may die."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jrec.data.schema import DatasetError
from jrec.errors import JrecError


@dataclasses.dataclass(frozen=True)
class Task[R]:
    """One piece of work.

    Attributes:
      title: What it does, for messages, such as "reading log.csv, bytes 0 to 1000".
      function: A function of a module. Called again with the same arguments, it makes the same files anew.
      arguments: Its arguments; for workers in other processes, pickled.
    """

    title: str
    function: Callable[..., R]
    arguments: tuple[object, ...]


type _Future[R] = concurrent.futures.Future[R | JrecError]  # of ``_outcome``


@contextlib.contextmanager
def running[R](
    executor: concurrent.futures.Executor, tasks: Sequence[Task[R]], *, attempts: int
) -> Iterator[Iterator[R]]:
    """Runs tasks, as many at a time as the executor has workers; no task runs any more when the block ends.

    Args:
      executor: Has the workers.
      tasks: What is to be done.
      attempts: How often a task is tried whose worker dies or whose function raises; 1 lets the error pass. Errors that
        explain a mistake (``JrecError``) are never tried again.

    Yields:
      What the functions return, in the order of the tasks. Shuts the executor down where the block ends by an error.

    Raises:
      DatasetError: If a task has failed ``attempts`` times; names the task.
    """
    # All at once: the executor limits how many run; results are small, and what is large lies in files.
    pending = [executor.submit(_outcome, task) for task in tasks]
    try:
        yield (_result(executor, task, future, attempts) for task, future in zip(tasks, pending, strict=True))
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise


def _result[R](executor: concurrent.futures.Executor, task: Task[R], future: _Future[R], attempts: int) -> R:
    outcome = _tried(executor, task, future, attempts)
    if isinstance(outcome, JrecError):
        raise outcome
    return outcome


def _tried[R](executor: concurrent.futures.Executor, task: Task[R], future: _Future[R], attempts: int) -> R | JrecError:
    # Whatever is raised, since executors have errors of their own for a worker that died; mistakes come back as
    # results.
    for _ in range(attempts - 1):
        with contextlib.suppress(Exception):
            return future.result()
        future = executor.submit(_outcome, task)
    try:
        return future.result()
    except Exception as error:
        if attempts == 1:
            raise
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1].rstrip(".")
        raise DatasetError(
            f"{task.title} failed {attempts} times on the workers, the last time with: {why}. See that each worker has"
            " memory for it, and the same files under the same paths"
        ) from error


def _outcome[R](task: Task[R]) -> R | JrecError:
    """The result, or the mistake that the function found: executors may wrap what is raised in errors of their own."""
    try:
        return task.function(*task.arguments)
    except JrecError as error:
        return error
