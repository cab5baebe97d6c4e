"""The HTTP application: scores, health, metrics, and taking over what is exported."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import traceback
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jrec.errors import JrecError
from jrec.serving.format import Manifest
from jrec.serving.http import bodies
from jrec.serving.http.arrow import UnreadableError
from jrec.serving.http.batcher import Batcher, QueueFullError, StoppingError
from jrec.serving.http.follower import Follower
from jrec.serving.http.metrics import CONTENT_TYPE, Metrics

VERSION_HEADER = "X-Jrec-Version"
RETRY_SECONDS = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What requests may be, and how often what is exported is looked at.

    Attributes:
      max_rows: The most rows of a request.
      max_bytes: The most bytes of its body.
      poll: Seconds between two looks; 0 for none but at ``POST /reload``.
    """

    max_rows: int
    max_bytes: int
    poll: float


class _TooLargeError(JrecError):
    pass


class _MediaTypeError(JrecError):
    pass


_FAILURES: dict[type[Exception], tuple[int, str]] = {
    _MediaTypeError: (415, "media_type"),
    _TooLargeError: (413, "too_large"),
    bodies.TooManyRowsError: (413, "too_many_rows"),
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
        metrics.watch(batcher, follower)
        self.app = Starlette(
            routes=[
                Route("/predict", self._predict, methods=["POST"]),
                Route("/reload", self._reload, methods=["POST"]),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._show_metrics),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(self._follow()) if self._options.poll else None
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
            await run_in_threadpool(self._batcher.stop)

    async def _predict(self, request: Request) -> Response:
        begin = time.perf_counter()
        try:
            response, kind = await self._scored(request), ""
        except ClientDisconnect:
            response, kind = Response(status_code=499), "disconnected"  # as nginx counts it; nobody reads it
        except Exception as problem:
            response, kind = self._failed(problem)
        self._metrics.answered(response.status_code, kind, time.perf_counter() - begin)
        return response

    async def _scored(self, request: Request) -> Response:
        kind = _kind_of(request)
        content = await _body(request, self._options.max_bytes)
        rows = bodies.rows_of(content, kind, max_rows=self._options.max_rows, max_bytes=self._options.max_bytes)
        if (k := request.query_params.get("k")) is not None and not self._follower.model.ranks:
            raise bodies.UnfitError("the model ranks no items, so that a request has no k; leave it out")
        rows = dataclasses.replace(rows, k=bodies.wanted_items(k))
        found = await asyncio.wrap_future(self._batcher.submit(rows))
        kind = _accepted(request, kind)
        version = version_of(found.manifest)
        return Response(bodies.answer(found, version, kind), media_type=kind, headers={VERSION_HEADER: version})

    def _failed(self, problem: Exception) -> tuple[Response, str]:
        code, kind = next((_FAILURES[of] for of in type(problem).__mro__ if of in _FAILURES), (500, "internal"))
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

    async def _reload(self, request: Request) -> Response:
        try:
            taken = await self._look(again=True)
        except (JrecError, OSError) as problem:
            return Response(bodies.failure(str(problem), "reload"), 409, media_type=bodies.JSON)
        return Response(bodies.encode({**self._state(), "taken": taken}), media_type=bodies.JSON)

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


async def _body(request: Request, most: int) -> bytes:
    """A request's body.

    Raises:
      _TooLargeError: As soon as it has more bytes than ``most``, whatever the header says.
    """
    pieces, size = [], 0
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:
        raise _TooLargeError(_too_large(f"{int(said):,}", most))
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise _TooLargeError(_too_large(f"more than {most:,}", most))
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(size: str, most: int) -> str:
    return f"the body has {size} bytes, but at most {most:,} are read; send fewer rows, or raise --max-body"
