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
from jrec.serving.answers import Answer
from jrec.serving.candidates import CANDIDATES
from jrec.serving.model import Encoded, Model, OutdatedError

if TYPE_CHECKING:
    import pyarrow as pa

    from jrec.serving.http.metrics import Metrics

Columns = Mapping[str, Sequence[object]]
Future = concurrent.futures.Future[Answer]


class QueueFullError(JrecError):
    """No more rows or bytes may wait; the request may be sent again later."""


class TooManyScoresError(JrecError):
    """A request of more rows than a model that ranks items scores at once."""


class StoppingError(JrecError):
    """The server is about to end and takes no more requests."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Raw values of a request.

    Attributes:
      columns: By name, or an Arrow table; or what ``Model.encoded`` made of them.
      count: How many rows there are.
      k: How many items are wanted for each, of a model that ranks items.
      instances: Whether they came as "instances", which are answered by "predictions".
    """

    columns: Columns | pa.Table | Encoded
    count: int
    k: int = 10
    instances: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What is scored together, and what may wait.

    Attributes:
      batch_rows: The most rows that are scored together; a larger request is scored by itself.
      delay: Seconds that the first request of a batch waits for others, where the model is idle.
      queue_rows: The most rows that wait. A larger request is taken when nothing else waits.
      scores: The most scores at once, rows times items, of a model that ranks items.
    """

    batch_rows: int
    delay: float
    queue_rows: int
    scores: int = 1 << 24

    def rows_of(self, model: Model) -> int:
        """The most rows that a model scores together; of one that ranks items, those that a request may have."""
        return max(1, self.scores // model.items) if model.items else self.batch_rows


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
          TooManyScoresError: If a model that ranks items does not score as many at once.
          StoppingError: After ``stop``.
        """
        model = self._model()
        ranks = model.items and not model.has_candidates(rows.columns)
        if ranks and rows.count > (most := self._limits.rows_of(model)):
            raise TooManyScoresError(
                f"the request has {rows.count:,} rows, but of a model that ranks {model.items:,} items it may have"
                f" {most:,}; send several, or raise --max-scores"
            )
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

    def refuse(self) -> None:
        """Takes no more requests, and lets those that wait have a ``StoppingError``."""
        with self._changed:
            self._stopping = True
            waiting = [*self._queue]
            self._queue.clear()
            self._queued = 0
            self._changed.notify()
        for one in waiting:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(StoppingError("the server is stopping; send the request to another one"))

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
            # From its arrival on: a request that waited while the model was busy does not wait for others once more.
            until = self._queue[0].since + self._limits.delay
            most = min(self._limits.batch_rows, self._limits.rows_of(self._model()))
            while not self._stopping and self._queued < most:
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(left)
                if not self._queue:  # refused meanwhile
                    return []
            # The first one always, also one larger than a batch; then in order, so that no stream of small requests
            # keeps a large one waiting for ever.
            batch = [self._queue.popleft()]
            room = most - _weight(batch[0].rows)
            while self._queue and (weight := _weight(self._queue[0].rows)) <= room:
                batch.append(self._queue.popleft())
                room -= weight
            self._queued -= sum(_weight(one.rows) for one in batch)
        return [one for one in batch if one.future.set_running_or_notify_cancel()]

    def _answer(self, model: Model, requests: Sequence[_Waiting]) -> None:
        """Scores the requests that can be encoded together; the others have their errors."""
        good, encoded = _encoded(model, requests)
        if good:
            self._score(model, good, encoded)

    def _score(self, model: Model, requests: Sequence[_Waiting], encoded: Encoded | None) -> None:
        begin = time.perf_counter()
        try:
            encoded = encoded or model.encoded(_joined([one.rows for one in requests], model.raw_columns))
            # The best of the greatest k begin with the best of every smaller one.
            most = max(one.rows.k for one in requests)
            results = model.answer(encoded, most)
        except OutdatedError as problem:  # a delta came in between
            # Of a large body only the rows are left, and those are outdated: its client has the values. Others are
            # encoded anew.
            if isinstance(requests[0].rows.columns, Encoded):
                requests[0].future.set_exception(problem)
            else:
                self._score(model, requests, None)
            return
        except Exception as problem:
            _blame(requests, problem, lambda some: self._score(model, some, None))
            return
        count = sum(one.rows.count for one in requests)
        self._metrics.batch(rows=count, requests=len(requests), seconds=time.perf_counter() - begin)
        first = 0
        for one in requests:
            lines = slice(first, first + one.rows.count)
            own = results.of_rows(lines, one.rows.k)
            # Each request by itself: one with absurd numbers fails alone. JSON has no NaN, which would go out as null.
            if (finite := own.finite()).all():
                one.future.set_result(own)
            else:
                row = int(finite.argmin())
                one.future.set_exception(
                    ValueError(f"the score of row {row} is not finite: its numbers are too large for the model")
                )
            first = lines.stop


def _encoded(model: Model, requests: Sequence[_Waiting]) -> tuple[list[_Waiting], Encoded | None]:
    """The requests that the model can encode, and all of them encoded where that was one step; others fail."""
    good = list(requests)
    if isinstance(encoded := requests[0].rows.columns, Encoded):
        return good, encoded
    try:
        return good, model.encoded(_joined([one.rows for one in requests], model.raw_columns))
    except Exception as problem:
        good = []
        _blame(requests, problem, lambda some: good.extend(_encoded(model, some)[0]))
    return good, None


def _blame(requests: Sequence[_Waiting], problem: Exception, again: Callable[[Sequence[_Waiting]], None]) -> None:
    """Gives a problem to the request that it is of: tries each half again, where there are several."""
    if len(requests) == 1:
        requests[0].future.set_exception(problem)
        return
    # Halves, since an error does not say whose it is: one bad request of n costs about 2 log2(n) more calls.
    middle = len(requests) // 2
    again(requests[:middle])
    again(requests[middle:])


def _weight(rows: Rows) -> int:
    return max(rows.count, 1)


def _kind(rows: Rows) -> object:
    """Requests of one kind can be joined: Arrow tables of the same types, or Python's columns; encoded ones cannot.

    Those that name candidates have another answer than those that do not.
    """
    if isinstance(rows.columns, Encoded):
        return rows
    return CANDIDATES in rows.columns if isinstance(rows.columns, Mapping) else rows.columns.schema


def _joined(requests: Sequence[Rows], names: Sequence[str]) -> Columns | pa.Table:
    """The columns of all requests, of one kind, one after the other."""
    if len(requests) == 1:
        return requests[0].columns
    columns: list[Any] = [one.columns for one in requests]
    if not isinstance(columns[0], Mapping):
        import pyarrow as pa

        return pa.concat_tables(columns)
    names = [*names, CANDIDATES] if CANDIDATES in columns[0] else names
    return {name: list(itertools.chain.from_iterable(one[name] for one in columns)) for name in names}
