"""Progressive validation: training in order of time, of which the model scores each window before it learns from it.

What a window's scores are worth is what a model that is trained every so often is worth on the time that follows: no
example is kept from training, and none is scored by a model that has seen it or a later one (Blum, Kalai and Langford,
"Beating the Hold-Out: Bounds for K-fold and Progressive Cross-Validation", COLT 1999).
"""

from __future__ import annotations

import dataclasses
import datetime

from jrec.app.config import TrainConfig
from jrec.data.moments import Moments, duration_seconds
from jrec.data.schema import Schema
from jrec.errors import ConfigError

MOST = 10_000
"""Windows of a run; every one is an evaluation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Some training examples in a row.

    Attributes:
      step: The steps before it, after which it is scored.
      start, stop: Its first example, and one past its last, as training counts them.
      since: When it begins, in seconds since 1970: a multiple of the windows' duration.
    """

    step: int
    start: int
    stop: int
    since: int


def windows_of(config: TrainConfig, schema: Schema, total: int) -> tuple[Window, ...]:
    """The windows that a run of ``total`` steps scores: all but the first, up to the one after its last step.

    They begin with a batch, and so up to a batch earlier than their moment; one that would have none is part of the
    window before it.

    Raises:
      ConfigError: If training is shorter than two windows, or longer than ``MOST``.
      DatasetError: If the dataset does not say when its examples were.
    """
    if not config.evaluate.progressive:
        return ()
    seconds, size = duration_seconds(config.evaluate.progressive), config.data.batch_size
    assert seconds is not None  # as the configuration has checked
    moments = Moments.load(config.data.path, schema, "train")
    first, last = moments.first // seconds + 1, moments.last // seconds
    if last - first >= MOST:
        raise ConfigError(
            f"evaluate.progressive is {config.evaluate.progressive!r}, of which {config.data.path} has"
            f" {last - first + 2:,} windows, each an evaluation; give a longer duration, of at most {MOST:,} windows"
        )
    begins: dict[int, int] = {}
    for since in range(first * seconds, last * seconds + 1, seconds):
        # Of moments between which no batch begins the first one names the window.
        begins.setdefault(moments.examples_before(since) // size, since)
    steps = [step for step in begins if step > 0]
    if not steps or steps[0] > total:
        raise ConfigError(
            f"evaluate.progressive is {config.evaluate.progressive!r}, but the run's {total:,} steps on"
            f" {config.data.path}, from {moment(moments.first)} to {moment(moments.last)}, are not two windows of it;"
            " give a shorter duration"
        )
    ends = [*(step * size for step in steps[1:]), moments.examples]
    return tuple(
        Window(step=step, start=step * size, stop=stop, since=begins[step])
        for step, stop in zip(steps, ends, strict=True)
        if step <= total
    )


def moment(seconds: int) -> str:
    """Seconds since 1970 for people, UTC: "2024-05-01" at midnight, else "2024-05-01 13:30", and with odd seconds."""
    text = (datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)).isoformat(sep=" ")
    return text.removesuffix(" 00:00:00").removesuffix(":00")
