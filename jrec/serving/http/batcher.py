"""Requests that come together are scored together: a bounded queue, and one thread that calls the model."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jrec.errors import JrecError
from jrec.serving.model import Best, Model, Scored

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.serving.http.metrics import Metrics

Columns = Mapping[str, Sequence[Any]]
Future = concurrent.futures.Future[Scored | Best]


class QueueFullError(JrecError):
    """As many rows wait as may; the request may be sent again later."""


class StoppingError(JrecError):
    """The server is about to end and takes no more requests."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Raw values of a request.

    Attributes:
      columns: By name, or an Arrow table.
      count: How many rows there are.
      k: How many items are wanted for each, of a model that ranks items.
    """

    columns: Columns | pa.Table
    count: int
    k: int = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What is scored together, and what may wait.

    Attributes:
      batch_rows: The most rows that are scored together; a larger request is scored by itself.
      delay: Seconds that the first request of a batch waits for others, where the model is idle.
      queue_rows: The most rows that wait. A larger request is taken when nothing else waits.
    """

    batch_rows: int
    delay: float
    queue_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Waiting:
    rows: Rows
    future: Future
    since: float


class Batcher:
    """Scores requests in batches, each by one version of the model.

    Args:
      model: Gives the model of the next batch. A batch that has begun is scored by the model that it began with, and
        ``Model.apply`` changes a model between two batches.
      limits: What is scored together, and what may wait.
      metrics: Where batches are counted.
    """

    def __init__(self, model: Callable[[], Model], limits: Limits, metrics: Metrics):
        self._model, self._limits, self._metrics = model, limits, metrics
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._queued = 0  # rows; a request without rows counts as one
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jrec-scores", daemon=True)
        self._thread.start()

    @property
    def queued_rows(self) -> int:
        """How many rows wait."""
        return self._queued

    @property
    def queued_requests(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def stopping(self) -> bool:
        """Whether no more requests are taken."""
        return self._stopping

    def submit(self, rows: Rows) -> Future:
        """Takes a request; the future has its scores, or the error that the model raised for it.

        Raises:
          QueueFullError: If too many rows wait.
          StoppingError: After ``stop``.
        """
        waiting = _Waiting(rows=rows, future=concurrent.futures.Future(), since=time.monotonic())
        with self._changed:
            if self._stopping:
                raise StoppingError("the server is stopping; send the request to another one")
            if self._queue and self._queued + _weight(rows) > self._limits.queue_rows:
                raise QueueFullError(
                    f"{self._queued:,} rows wait already, and at most {self._limits.queue_rows:,} may; send the request"
                    " again later"
                )
            self._queue.append(waiting)
            self._queued += _weight(rows)
            self._changed.notify()
        return waiting.future

    def stop(self) -> None:
        """Takes no more requests, and returns when all that were taken have their answer."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            model = self._model()
            for _, alike in itertools.groupby(batch, key=lambda one: _kind(one.rows)):
                self._answer(model, list(alike))

    def _next(self) -> list[_Waiting] | None:
        """The next requests that somebody still waits for, in the order in which they came; None at the end."""
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if not self._queue:
                return None
            until = self._queue[0].since + self._limits.delay
            while not self._stopping and self._queued < self._limits.batch_rows:
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
            batch = [self._queue.popleft()]
            room = self._limits.batch_rows - _weight(batch[0].rows)
            while self._queue and (weight := _weight(self._queue[0].rows)) <= room:
                batch.append(self._queue.popleft())
                room -= weight
            self._queued -= sum(_weight(one.rows) for one in batch)
        return [one for one in batch if one.future.set_running_or_notify_cancel()]

    def _answer(self, model: Model, requests: Sequence[_Waiting]) -> None:
        """Scores requests together. Where that fails, scores each half, and so finds the request that is to blame."""
        begin = time.perf_counter()
        try:
            columns = _joined([one.rows for one in requests], model.raw_columns)
            found = model.best(columns, max(one.rows.k for one in requests)) if model.ranks else model.scored(columns)
        except Exception as problem:
            if len(requests) == 1:
                requests[0].future.set_exception(problem)
                return
            middle = len(requests) // 2
            self._answer(model, requests[:middle])
            self._answer(model, requests[middle:])
            return
        count = sum(one.rows.count for one in requests)
        self._metrics.batch(rows=count, requests=len(requests), seconds=time.perf_counter() - begin)
        first = 0
        for one in requests:
            lines = slice(first, first + one.rows.count)
            one.future.set_result(_of_request(found, lines, one.rows.k))
            first = lines.stop


def _of_request(found: Scored | Best, lines: slice, k: int) -> Scored | Best:
    """What a request gets of a batch: its own lines, of ranked items as many as it wants."""
    if isinstance(found, Best):
        scores, items = ([line[:k] for line in column[lines]] for column in (found.scores, found.items))
        return Best(scores, items, found.manifest)
    scores = found.scores
    own = {task: each[lines] for task, each in scores.items()} if isinstance(scores, Mapping) else scores[lines]
    return Scored(own, found.manifest)


def _weight(rows: Rows) -> int:
    return max(rows.count, 1)


def _kind(rows: Rows) -> object:
    """Requests of one kind can be joined: Arrow tables of the same types, or Python's columns."""
    return None if isinstance(rows.columns, Mapping) else rows.columns.schema


def _joined(requests: Sequence[Rows], names: Sequence[str]) -> Columns | pa.Table:
    """The columns of all requests, of one kind, one after the other."""
    if len(requests) == 1:
        return requests[0].columns
    columns = [one.columns for one in requests]
    if not isinstance(columns[0], Mapping):
        import pyarrow as pa

        return pa.concat_tables(columns)
    return {name: list(itertools.chain.from_iterable(one[name] for one in columns)) for name in names}
