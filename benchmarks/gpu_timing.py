"""Times of short programs on a GPU: loops inside one compiled program, so that Python and dispatch are not measured.

A kernel of 20 microseconds cannot be timed by calls from Python, which take longer. Here one dispatch runs many calls.
For the loop to measure what it says, XLA must neither hoist a call out of it (its inputs would be the same in every
trip) nor drop one (nobody would read its output). Both are prevented by ``optimization_barrier`` and by nothing that
costs a kernel:

* The inputs of every call pass a barrier together with the output of the call before, so they depend on it, and a call
  cannot run before its predecessor, be shared with another trip, or leave the loop.
* That output is passed on through the barrier and carried to the next trip, so it is needed. (A barrier whose result
  nobody used would lose that operand, which is why outputs of all batches are carried, not only the last one.)
* Updates carry their table and slots from call to call, which are their outputs.

``tests/test_aot_gpu_timing.py`` counts the calls in the body of the loop that is compiled for an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import pathlib
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

DISPATCH_SECONDS = 0.02  # aimed at for one dispatch: a hundred times what launching the program takes
MAX_ROUNDS = 2000
COPY_BYTES = 4 << 30
_DEVICE = "/device:GPU:"
_CALL = r"cu(da)?[A-Z]"  # of CUDA's driver and runtime, among the host's events
_STREAM = "Stream #"  # other lines of a device repeat the same time by module, operation or step

# (fixed, state, batch) -> (state, output): the state is carried and donated; the output may be None.
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """All launches of one kernel in a trace: how many, and their seconds together."""

    name: str
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What a loop measured.

    Attributes:
      seconds: Median time of one call.
      spread: Slowest minus fastest dispatch, as a fraction of the median.
      calls: Calls in one dispatch.
      dispatches: How many dispatches were timed.
      kernels: Kernels of one dispatch by time, from the profiler; empty where it gave none.
    """

    seconds: float
    spread: float
    calls: int
    dispatches: int
    kernels: tuple[Kernel, ...] = ()

    def details(self, *, top: int = 6) -> dict[str, Any]:
        """Details of a result line: spread and calls, and by call launches, kernels' time and the slowest kernels.

        Args:
          top: How many kernels are listed. None are, nor launches, where the profiler gave none.
        """
        values: dict[str, Any] = {"spread": rounded(self.spread), "calls": self.calls, "dispatches": self.dispatches}
        if self.kernels:
            values["launches"] = rounded(sum(kernel.count for kernel in self.kernels) / self.calls)
            values["kernel_us"] = rounded(1e6 * sum(kernel.seconds for kernel in self.kernels) / self.calls)
            values["kernels"] = [[k.name, rounded(1e6 * k.seconds / self.calls)] for k in self.kernels[:top]]
        return values


def rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


class Loop:
    """Many calls of ``step`` in one compiled program, over batches in rotation.

    Args:
      step: What to time.
      fixed: Inputs that no call changes, such as a forward pass's table.
      state: What calls change. It is donated: only the loop may use it from now on.
      batches: Two or more inputs of equal shapes, taken in turn.
      rounds: Turns over all batches in one dispatch.
    """

    def __init__(self, step: Step, fixed: Any, state: Any, batches: Sequence[Any], *, rounds: int) -> None:
        if len(batches) < 2:
            raise ValueError(f"{len(batches)} batch: a loop needs two or more, so that calls differ")
        self.calls = rounds * len(batches)
        self._fixed, self.state, self._batches = fixed, state, tuple(batches)
        _, output = jax.eval_shape(step, fixed, state, batches[0])
        self.outputs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (output,) * len(batches))
        self._run = jax.jit(functools.partial(repeat, step, rounds=rounds), donate_argnums=(1, 2))

    def dispatch(self) -> None:
        """Runs all calls once and waits for them."""
        self.state, self.outputs = self._run(self._fixed, self.state, self.outputs, self._batches)
        jax.block_until_ready((self.state, self.outputs))

    def time(self, *, seconds: float = 0.5, least: int = 3, profile: bool = True) -> Timing:
        """Compiles, warms up, and times dispatches until ``seconds`` have passed, at least ``least`` of them."""
        self.dispatch()
        samples: list[float] = []
        until = time.perf_counter() + seconds
        while len(samples) < least or (time.perf_counter() < until and len(samples) < 50):
            start = time.perf_counter()
            self.dispatch()
            samples.append(time.perf_counter() - start)
        median = statistics.median(samples)
        return Timing(
            seconds=median / self.calls,
            spread=(max(samples) - min(samples)) / median,
            calls=self.calls,
            dispatches=len(samples),
            kernels=profiled(self.dispatch) if profile else (),
        )


def repeat(step: Step, fixed: Any, state: Any, outputs: Any, batches: Any, *, rounds: int) -> Any:
    """``rounds`` turns of ``step`` over ``batches``; ``outputs`` holds the last output for each batch."""

    def turn(_: jax.Array, carry: Any) -> Any:
        state, outputs = carry
        outputs = list(outputs)
        for number, batch in enumerate(batches):
            rest = outputs[:number] + outputs[number + 1 :]  # this batch's old output ends here
            batch, state, rest = jax.lax.optimization_barrier((batch, state, rest))
            state, output = step(fixed, state, batch)
            outputs = [*rest[:number], output, *rest[number:]]
        return state, tuple(outputs)

    # A static number of trips: with a dynamic one the host would wait for the loop's condition in every trip.
    return jax.lax.fori_loop(0, rounds, turn, (state, tuple(outputs)))


def rounds_for(seconds: float, batches: int, *, target: float = DISPATCH_SECONDS) -> int:
    """How many rounds fill a dispatch, if a call takes about ``seconds``."""
    return max(1, min(MAX_ROUNDS, round(target / (seconds * batches))))


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes read and written per second by a large copy on the device: what a memory-bound kernel can reach."""
    source = [jnp.full((size // 8192, 1024), value, jnp.float32) for value in (0.0, 1.0)]
    loop = Loop(lambda _, state, batch: (state, batch + jnp.float32(1)), None, None, source, rounds=4)
    return 2 * source[0].nbytes / loop.time(profile=False).seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What the profiler saw of a program.

    Attributes:
      kernels: Kernels, copies and fills of the GPU's streams, the slowest first; on a CPU XLA's operations. () where
        the profiler does not work on this machine.
      span: Seconds from the start of the first to the end of the last.
      calls: The host's calls of CUDA's driver and runtime, the slowest functions first; launches of single kernels are
        not among them.
      in_graphs: How many of the launches were nodes of CUDA graphs, as far as the profiler says so.
    """

    kernels: tuple[Kernel, ...] = ()
    span: float = 0.0
    calls: tuple[Kernel, ...] = ()
    in_graphs: int = 0


def profiled(run: Callable[[], Any]) -> tuple[Kernel, ...]:
    """Kernels of one ``run()``, the slowest first; see ``Trace``."""
    return traced(run).kernels


def traced(run: Callable[[], Any], *, keep: pathlib.Path | None = None) -> Trace:
    """A trace of one ``run()``, which must wait for its end.

    Args:
      run: What to trace.
      keep: A path, less ".xplane.pb.gz", for the profiler's own file; None to keep none.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the trace
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
        except RuntimeError:
            return Trace()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return Trace()
        if keep is not None:
            keep.parent.mkdir(parents=True, exist_ok=True)
            keep.with_name(f"{keep.name}.xplane.pb.gz").write_bytes(gzip.compress(files[0].read_bytes()))
        with warnings.catch_warnings():
            # jaxlib's type of an event's statistics has no __module__, which Python deprecates at its first use.
            warnings.simplefilter("ignore", DeprecationWarning)
            return trace_of(jax.profiler.ProfileData.from_file(str(files[0])))


def trace_of(profile: Any) -> Trace:
    """What is of interest in the profiler's data."""
    events = list(_events(profile))
    calls = summed(
        (re.sub(r" \(CudaGraph:\d+\)", "", event.name), event.duration_ns / 1e9)
        for plane in profile.planes
        if not plane.name.startswith(_DEVICE)
        for line in plane.lines
        for event in line.events
        if re.match(_CALL, event.name)
    )
    return Trace(
        kernels=summed((name, duration) for name, _, duration, _ in events),
        span=max((start + duration for _, start, duration, _ in events), default=0.0)
        - min((start for _, start, *_ in events), default=0.0),
        calls=calls[:12],
        in_graphs=sum(in_graph for *_, in_graph in events),
    )


def summed(events: Iterable[tuple[str, float]]) -> tuple[Kernel, ...]:
    """(name, seconds) of single launches added up by name, the slowest first."""
    totals: dict[str, tuple[int, float]] = {}
    for name, seconds in events:
        count, total = totals.get(name, (0, 0.0))
        totals[name] = count + 1, total + seconds
    kernels = [Kernel(name=name, count=count, seconds=seconds) for name, (count, seconds) in totals.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


def _events(profile: Any) -> Iterator[tuple[str, float, float, bool]]:
    """(name, seconds at its start, seconds it took, whether a graph's node) of what ran on the devices."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith(_DEVICE)]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith(_STREAM):
                continue
            for event in line.events:
                # A host's line mixes XLA's operations with Python's calls and the thread pool's.
                if devices or (not event.name.startswith("end: ") and any(k == "hlo_op" for k, _ in event.stats)):
                    name, in_graph = (
                        " ".join(event.name.split())[:120],
                        any("graph_id" in key for key, _ in event.stats),
                    )
                    yield name, event.start_ns / 1e9, event.duration_ns / 1e9, in_graph
