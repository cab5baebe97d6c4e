"""The HTTP application: scores, health, metrics, and taking over what is exported."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jrec.errors import JrecError
from jrec.serving.answers import Answer
from jrec.serving.format import Manifest
from jrec.serving.http import bodies
from jrec.serving.http.arrow import UnreadableError
from jrec.serving.http.batcher import Batcher, Future, QueueFullError, Rows, StoppingError, TooManyScoresError
from jrec.serving.http.follower import Follower
from jrec.serving.http.memory import DECODED, Held, Memory
from jrec.serving.http.metadata import described_model
from jrec.serving.http.metrics import CONTENT_TYPE, Metrics
from jrec.serving.model import Encoded, OutdatedError

VERSION_HEADER = "X-Jrec-Version"
RETRY_SECONDS = 1
_SMALL = 16 << 10  # bytes that are decoded in less time than another thread takes to begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What requests may be, and how often what is exported is looked at.

    Attributes:
      max_rows: The most rows of a request.
      max_bytes: The most bytes of its body.
      max_values: The most values that a row has in one column.
      poll: Seconds between two looks; 0 for none but at ``POST /reload``.
      memory: The most bytes that requests take together, from their first byte to their answer.
      body_seconds: How long a body may take to come.
      seconds: How long a request may wait for its answer, from the end of its body on.
      hosts: What the header Host may name, without the port; () for anything.
    """

    max_rows: int
    max_bytes: int
    poll: float
    max_values: int = 65_536
    memory: int = 64 << 20
    body_seconds: float = 10.0
    seconds: float = 30.0
    hosts: tuple[str, ...] = ()


class _TooLargeError(JrecError):
    pass


class _MediaTypeError(JrecError):
    pass


class _SlowBodyError(JrecError):
    pass


class _DeadlineError(JrecError):
    pass


_FAILURES: dict[type[Exception], tuple[int, str]] = {
    _MediaTypeError: (415, "media_type"),
    _TooLargeError: (413, "too_large"),
    bodies.TooManyRowsError: (413, "too_many_rows"),
    TooManyScoresError: (413, "too_many_rows"),
    _SlowBodyError: (408, "slow_body"),
    _DeadlineError: (504, "deadline"),
    OutdatedError: (503, "outdated"),
    bodies.MalformedError: (400, "malformed"),
    UnreadableError: (400, "malformed"),
    QueueFullError: (503, "queue_full"),
    StoppingError: (503, "stopping"),
    JrecError: (422, "bad_input"),
    ValueError: (422, "bad_input"),
}
"""Status and kind of an error by its class, or the nearest that it is one of."""


class Server:
    """Answers requests for scores by a batcher, and keeps its model at the newest of what is exported.

    Args:
      batcher: What scores.
      follower: What takes over exports and deltas.
      metrics: Where requests are counted.
      options: What requests may be.
      report: Takes messages for whoever runs the server.
    """

    def __init__(
        self,
        batcher: Batcher,
        follower: Follower,
        metrics: Metrics,
        options: Options,
        report: Callable[[str], None],
    ):
        self._batcher, self._follower, self._metrics, self._options = batcher, follower, metrics, options
        self._report, self._said = report, ""
        self._looking = asyncio.Lock()
        self._memory = Memory(options.memory)
        # One thread, so that what large bodies take in Python is taken once, and from one arena.
        self._large = concurrent.futures.ThreadPoolExecutor(1, "jrec-large-bodies")
        self.accepted, self.answered = 0, collections.Counter[int]()
        metrics.watch(batcher, follower, self._memory)
        self.app = Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/reload", self._reload, methods=["POST"]),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._show_metrics),
                Route("/metadata", self._metadata),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[*options.hosts])] if options.hosts else [],
            lifespan=self._lifespan,
        )

    def refuse(self) -> None:
        """Answers requests that wait, and those that come, by 503."""
        self._batcher.refuse()

    @property
    def end(self) -> str:
        """What became of the requests that were accepted, for the last message."""
        scored, refused = self.answered[200], self.answered[503]
        failed = self.answered.total() - scored - refused
        lost = self.accepted - self.answered.total()
        return (
            f"of {self.accepted:,} requests {scored:,} were answered with scores, {refused:,} by 503, {failed:,} by"
            f" other errors, and {lost:,} not at all"
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(self._follow()) if self._options.poll else None
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
            # Beside the event loop, which still has to send what the last batches come to.
            await run_in_threadpool(self._batcher.stop)
            self._large.shutdown(wait=False, cancel_futures=True)

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        self.accepted += 1
        try:
            with Held(self._memory) as held:
                response, kind = await self._scored(request, held), ""
        except ClientDisconnect:
            response, kind = Response(status_code=499), "disconnected"  # as nginx counts it; nobody reads it
        except asyncio.CancelledError:  # the server ends before the request was scored
            response, kind = self._failed(StoppingError("the server is stopping; send the request to another one"))
        except Exception as problem:
            response, kind = self._failed(problem)
        self.answered[response.status_code] += 1
        self._metrics.answered(response.status_code, kind, time.perf_counter() - begin)
        return response

    async def _scored(self, request: Request, held: Held) -> Response:
        kind = _kind_of(request)
        # Only ``_rows`` has the body's bytes: while rows wait, there is no more of the request than ``held`` counts.
        rows = await self._rows(request, kind, held)
        if (k := request.query_params.get("k")) is not None and not self._follower.model.items:
            raise bodies.UnfitError("the model ranks no items, so that a request has no k; leave it out")
        rows = dataclasses.replace(rows, k=bodies.wanted_items(k))
        if k is not None and self._follower.model.has_candidates(rows.columns):
            raise bodies.UnfitError("a request with candidates has a score for each of them; leave k out")
        result = await self._answer(request, self._batcher.submit(rows))
        kind = _accepted(request, kind)
        version = version_of(result.manifest)
        body = bodies.answer(result, version, kind, instances=rows.instances)
        return Response(body, media_type=kind, headers={VERSION_HEADER: version})

    async def _rows(self, request: Request, kind: str, held: Held) -> Rows:
        """The values of a body. A large body's are encoded at once, beside the event loop and one body at a time.

        A value takes many times its bytes in Python, but few where it is encoded; small bodies are encoded with those
        that are scored beside them, in a fraction of the time.
        """
        options = self._options
        content = await _body(request, options, held)
        decode = functools.partial(
            bodies.rows_of, content, kind, max_rows=options.max_rows, max_bytes=options.max_bytes,
            max_values=options.max_values, names=self._follower.model.raw_columns,
        )  # fmt: skip
        if len(content) <= _SMALL:
            held.now(DECODED * len(content))
            return decode()

        def encoded() -> Rows:
            rows = decode()
            return dataclasses.replace(rows, columns=self._follower.model.encoded(rows.columns))

        try:
            async with asyncio.timeout(options.seconds):
                rows = await asyncio.get_running_loop().run_in_executor(self._large, encoded)
        except TimeoutError as problem:
            raise self._late() from problem
        assert isinstance(rows.columns, Encoded)
        held.now(rows.columns.nbytes)
        return rows

    async def _answer(self, request: Request, scored: Future) -> Answer:
        """The scores of a request that somebody still waits for.

        Raises:
          ClientDisconnect: If the client has left.
          _DeadlineError: If they took too long.
        """
        scores, left = asyncio.wrap_future(scored), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({scores, left}, timeout=self._options.seconds, return_when=asyncio.FIRST_COMPLETED)
            if scores.done():
                return scores.result()
            if left.done():
                raise ClientDisconnect
            raise self._late()
        finally:
            left.cancel()
            scored.cancel()  # one that waits is not scored then
            scores.add_done_callback(_seen)

    def _late(self) -> _DeadlineError:
        return _DeadlineError(
            f"the request was not scored within {self._options.seconds:g} s; send it later, or raise --timeout"
        )

    def _failed(self, problem: Exception) -> tuple[Response, str]:
        code, kind = next((_FAILURES[base] for base in type(problem).__mro__ if base in _FAILURES), (500, "internal"))
        message = str(problem)
        if code == 500:
            trace = "".join(traceback.format_exception(problem))
            self._report(f"a request failed by a defect:\n{trace}")
            message = "the server failed; its log says why"
        headers = {"Retry-After": str(RETRY_SECONDS)} if code == 503 else None
        return Response(bodies.failure(message, kind), code, headers=headers, media_type=bodies.JSON), kind

    async def _healthz(self, request: Request) -> Response:
        return Response("ok\n", media_type="text/plain")

    async def _readyz(self, request: Request) -> Response:
        code = 503 if self._batcher.stopping else 200
        return Response(bodies.encode(self._state()), code, media_type=bodies.JSON)

    async def _show_metrics(self, request: Request) -> Response:
        manifest = self._follower.model.manifest
        return Response(
            self._metrics.text(version=version_of(manifest), run=manifest.run), headers={"Content-Type": CONTENT_TYPE}
        )

    async def _metadata(self, request: Request) -> Response:
        return Response(bodies.encode(described_model(self._follower.model)), media_type=bodies.JSON)

    async def _reload(self, request: Request) -> Response:
        try:
            _kind_of(request)  # which a form of another site, sent by a browser, has not
        except _MediaTypeError as problem:
            return Response(bodies.failure(str(problem), "media_type"), 415, media_type=bodies.JSON)
        try:
            taken = await self._look(again=True)
        except (JrecError, OSError) as problem:
            return Response(bodies.failure(str(problem), "reload"), 409, media_type=bodies.JSON)
        passed_over = self._follower.passed_over
        return Response(
            bodies.encode({**self._state(), "taken": taken, "passed_over": passed_over}), media_type=bodies.JSON
        )

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._options.poll)
            with contextlib.suppress(JrecError, OSError):  # which was said and counted
                await self._look(again=False)

    async def _look(self, *, again: bool) -> list[str]:
        """Takes over what is new, and says so; what cannot be taken over is said once."""
        async with self._looking:
            try:
                taken = await run_in_threadpool(self._follower.check, again=again)
            except Exception as problem:
                self._metrics.takeover(1, failed=True)
                known = isinstance(problem, (JrecError, OSError))
                message = str(problem) if known else "".join(traceback.format_exception(problem))
                if message != self._said:
                    self._report(f"not taken over: {message}")
                self._said = message
                raise
            if taken:
                self._metrics.takeover(len(taken))
                self._said = ""
                self._report(f"took over {', '.join(map(str, taken))}: now {described(self._follower.model.manifest)}")
        return [str(folder) for folder in taken]

    def _state(self) -> dict[str, object]:
        manifest = self._follower.model.manifest
        return {
            "ready": not self._batcher.stopping,
            "version": version_of(manifest),
            "id": manifest.id,
            "run": manifest.run,
            "step": manifest.step,
            "folder": str(self._follower.folder),
            "age_seconds": round(time.time() - self._follower.written, 1),
        }


def version_of(manifest: Manifest) -> str:
    """The name of an export or a delta in headers and messages: 12 digits of its id, as ``jrec export`` prints them."""
    return manifest.id[:12]


def described(manifest: Manifest) -> str:
    """An export or a delta in a message."""
    return f"version {version_of(manifest)} of run {manifest.run}, step {manifest.step:,}"


def _kind_of(request: Request) -> str:
    """The content type of a request's body.

    Raises:
      _MediaTypeError: If it is none that is read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (bodies.JSON, bodies.ARROW):
        raise _MediaTypeError(f"the content type is {kind or 'not given'}; send {bodies.JSON} or {bodies.ARROW}")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise _MediaTypeError(f"the content encoding is {coding}; send the body as it is")
    return kind


def _accepted(request: Request, kind: str) -> str:
    """The answer's content type: what the header Accept names first, or else the request's own."""
    wanted = request.headers.get("accept", "").lower()
    places = {offered: wanted.find(offered) for offered in (bodies.JSON, bodies.ARROW)}
    named = [offered for offered, place in places.items() if place >= 0]
    return min(named, key=places.__getitem__) if named else kind


async def _body(request: Request, options: Options, held: Held) -> bytes:
    """A request's body, whose bytes are held from the first on.

    Raises:
      _TooLargeError: As soon as it has more bytes than it may, whatever the header says.
      _SlowBodyError: If it does not come in time.
      QueueFullError: If requests take too many bytes together.
    """
    most, pieces, size = options.max_bytes, [], 0
    said = request.headers.get("content-length", "")
    # The header is anybody's: Python converts no number of thousands of digits.
    if said.isdecimal() and int(said[:20]) > most:
        raise _TooLargeError(_too_large(f"{int(said[:20]):,}", most))
    try:
        async with asyncio.timeout(options.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise _TooLargeError(_too_large(f"more than {most:,}", most))
                held.now(size)
                pieces.append(piece)
    except TimeoutError as problem:
        raise _SlowBodyError(
            f"{size:,} bytes of the body came within {options.body_seconds:g} s, and not all; send it faster, or in"
            " several requests"
        ) from problem
    return b"".join(pieces)


def _seen(scores: asyncio.Future[Answer]) -> None:
    """Takes an error that nobody waits for anymore, which asyncio would print."""
    if not scores.cancelled():
        scores.exception()


async def _left(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(size: str, most: int) -> str:
    return f"the body has {size} bytes, but at most {most:,} are read; send fewer rows, or raise --max-body"
