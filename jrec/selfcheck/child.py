"""A process that checks kernel classes one after another, and may die of any: ``python -m jrec.selfcheck.child``.

It reads one line of JSON from its standard input (``Request``) and ends when that is closed, so that it does not
outlive whoever started it. It writes a line of JSON per event to its standard output: "device", then for each class
"start", "at" where it is, and "verdict".
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jrec.ops.dispatch import Implementation
from jrec.ops.verdicts import KernelClass, Verdict
from jrec.selfcheck import kernels, timing, trials
from jrec.selfcheck.trial import Draw, Program, Wrong

POISONED = 3
"""Exit code of a process whose GPU context may be broken: nothing that it would say of other classes counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a child is told.

    Attributes:
      classes: The kernel classes, as text.
      kernels: The module whose functions are on trial.
      interpret: Whether kernels run in Pallas' interpreter, at tiny sizes, and nothing is timed.
      tiny: Whether sizes are tiny although nothing is interpreted; for tests.
    """

    classes: tuple[str, ...]
    kernels: str = "jrec.selfcheck.kernels"
    interpret: bool = False
    tiny: bool = False

    @property
    def small(self) -> bool:
        """Whether sizes are tiny."""
        return self.interpret or self.tiny


class _CompileError(Exception):
    """What the compiler raised, as text."""


class _CrashError(Exception):
    """What running raised, as text: after it, this process is of no use."""


def check(kernel_class: KernelClass, request: Request, at: Callable[[str], None]) -> Verdict:
    """Checks one class here.

    Args:
      kernel_class: The class.
      request: How to check it.
      at: Told where the check is.

    Raises:
      _CrashError: If a run failed.
    """
    table = importlib.import_module(request.kernels)
    error = 0.0
    try:
        for program in trials.programs(kernel_class, tiny=request.small):
            error = max(error, _try(program, table, request, at))
    except NotImplementedError as refusal:
        return Verdict(kernel_class=kernel_class, right=False, reason="not covered", detail=_line(refusal))
    except Wrong as mistake:
        return Verdict(kernel_class=kernel_class, right=False, reason="wrong", detail=_line(mistake))
    except _CompileError as failure:
        return Verdict(kernel_class=kernel_class, right=False, reason="does not compile", detail=_line(failure))
    if request.interpret:
        return Verdict(kernel_class=kernel_class, right=True, reason="not timed", error=error)
    size = timing.SMALL if request.tiny else timing.Size()
    ours = theirs = 0.0
    for case in timing.cases(kernel_class, size):
        at("timing")
        pair = []
        for source, implementation in _sides(table):
            with _compiling():
                pair.append(timing.compiled(case, source, implementation, size))
        with _running():
            spent = timing.seconds(pair, case, size)
        ours, theirs = ours + spent[0], theirs + spent[1]
    reason = "faster" if ours < theirs else "slower"
    return Verdict(
        kernel_class=kernel_class, right=True, reason=reason, kernel_seconds=ours, xla_seconds=theirs, error=error
    )


def _sides(table: ModuleType) -> tuple[tuple[ModuleType, Implementation], ...]:
    return (table, "pallas"), (kernels, "xla")


def _try(program: Program, table: ModuleType, request: Request, at: Callable[[str], None]) -> float:
    """The largest error of the kernel in any draw."""
    runs = []
    for source, implementation in _sides(table):
        at(f"{program.name}: compiling")
        function = jax.jit(program.build(source, implementation), donate_argnums=program.donated)
        with _compiling(), _interpreter(request):
            # What a compiled program and the interpreter take alike: traced here, under the interpreter if asked for.
            runs.append(function.lower(*_placed(program.draws[0])).compile())
    error = 0.0
    for draw in program.draws:
        at(f"{program.name}: {draw.name}")
        where = f"{program.name}, {draw.name}: "
        with _running():
            first, second, want = (_run(run, draw) for run in (runs[0], runs[0], runs[1]))
        error = max(error, _judge(draw, first, 1.0, where))
        _judge(draw, want, program.xla_slack, f"{where}XLA itself: ")
        if not _same_bits(first, second):
            raise Wrong(f"{where}two runs gave different bits")
        if (share := _agreement(first, want)) < program.agreement:
            raise Wrong(f"{where}only {100 * share:.2f} % of the elements have the bits of XLA's")
    return error


def _placed(draw: Draw) -> Any:
    return jax.device_put(draw.arguments)


def _run(run: Callable[..., Any], draw: Draw) -> Any:
    arguments = _placed(draw)
    _poison(run)
    return jax.tree.map(np.asarray, run(*arguments))


def _poison(run: Any) -> None:
    """Leaves NaN in memory that the outputs are likely to be made in: what a kernel does not write shows."""
    for leaf in jax.tree.leaves(run.out_info):
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            jax.numpy.full(leaf.shape, jax.numpy.nan, leaf.dtype).block_until_ready().delete()


def _judge(draw: Draw, out: Any, slack: float, where: str) -> float:
    try:
        return draw.judge(out, slack)
    except Wrong as mistake:
        raise Wrong(f"{where}{mistake}") from None


def _bits(out: Any) -> list[np.ndarray]:
    return [np.atleast_1d(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in jax.tree.leaves(out)]


def _same_bits(one: Any, two: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(_bits(one), _bits(two), strict=True))


def _agreement(one: Any, two: Any) -> float:
    pairs = list(zip(_bits(one), _bits(two), strict=True))
    return min((float(np.mean(a == b)) for a, b in pairs if a.size), default=1.0)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    try:
        yield
    except NotImplementedError:
        raise
    except Exception as error:
        raise _CompileError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _running() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _CrashError(f"{type(error).__name__}: {error}") from error


def _interpreter(request: Request) -> contextlib.AbstractContextManager[object]:
    from jrec.pallas.interpret import interpreted

    return interpreted() if request.interpret else contextlib.nullcontext()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def main() -> int:
    """Answers one request."""
    request = Request(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = jax.devices()[0]
    say("device", kind=device.device_kind, platform=device.platform)
    for text in request.classes:
        kernel_class = KernelClass.parse(text)
        say("start", kernel_class=text)
        try:
            verdict = check(kernel_class, request, lambda where: say("at", where=where))
        except _CrashError as crash:
            say(
                "verdict",
                **Verdict(kernel_class=kernel_class, right=False, reason="crashed", detail=_line(crash)).to_dict(),
            )
            return POISONED
        say("verdict", **verdict.to_dict())
    return 0


def say(event: str, **content: Any) -> None:
    """Writes one event."""
    sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(4)


if __name__ == "__main__":
    sys.exit(main())
