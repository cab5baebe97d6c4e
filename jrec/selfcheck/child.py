"""The process that compares and times kernels, and may die of it: ``python -m jrec.selfcheck.child REQUEST``.

It writes lines of JSON to its standard output: its machine, each class that it comes to, and, in the end, all verdicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import PyTree

from jrec.ops.dispatch import Implementation
from jrec.ops.verdicts import KernelClass, Verdict, local_machine
from jrec.selfcheck import trials
from jrec.selfcheck.trials import Arguments, Sizes, Trial, Wrong

LOOP = 32  # calls in one timed program: what is measured is the device's time
_ROUNDS = 8  # the first is left out
_SEED = 20
_State = tuple[Arguments, PyTree]  # of a loop: arguments and result


def check(kernel_class: KernelClass, sizes: Sizes | None, *, interpret: bool = False) -> Verdict:
    """Compares a kernel with XLA, and times both.

    Args:
      kernel_class: The class.
      sizes: The sizes of a model's step, which are compared too, and timed. None times nothing.
      interpret: Whether kernels run in Pallas' interpreter, at tiny sizes.
    """
    try:
        for number, small in enumerate(trials.small_trials(kernel_class, tiny=interpret)):
            _compare(small, f"case {number}", trials.TINY_KINDS if interpret else trials.KINDS, interpret=interpret)
        if sizes is None:
            return Verdict(right=True, why="not timed")
        own = trials.trial(kernel_class, trials.fitted(kernel_class, sizes))
        _compare(own, "the model's sizes", ("power law",), interpret=interpret)
        return Verdict(right=True, ratio=_ratio(own))
    except NotImplementedError as refusal:
        return Verdict(right=False, why=f"not covered: {_line(refusal)}")
    except Wrong as mistake:
        return Verdict(right=False, why=f"wrong: {_line(mistake)}")


def _compare(trial: Trial, name: str, kinds: tuple[str, ...], *, interpret: bool) -> None:
    rng = np.random.default_rng(_SEED)
    draws = [(kind, trial.draw(rng, kind)) for kind in kinds]
    kernel, xla = (_compiled(trial, side, draws[0][1], interpret=interpret) for side in ("pallas", "xla"))
    for kind, arguments in draws:
        first, second, want = (_run(program, arguments) for program in (kernel, kernel, xla))
        try:
            if not trials.same_bits(first, second):
                raise Wrong("two runs gave different bits")
            trial.judge(arguments, first, want)
        except Wrong as mistake:
            raise Wrong(f"{name}, {kind}: {mistake}") from None


def _compiled(trial: Trial, side: Implementation, arguments: object, *, interpret: bool) -> jax.stages.Compiled:
    from jrec.pallas.interpret import interpreted

    function = jax.jit(trial.run(side), donate_argnums=(0,) if trial.in_place else ())
    # XLA multiplies float32 matrices in TF32 by default, of 10 bits; the kernels do not.
    with jax.default_matmul_precision("highest"), interpreted() if interpret else contextlib.nullcontext():
        return function.lower(*jax.device_put(arguments)).compile()


def _run(program: jax.stages.Compiled, arguments: Arguments) -> PyTree:
    placed = jax.device_put(arguments)
    # NaN is left in memory that the results are likely to be made in: what a kernel does not write shows.
    for leaf in jax.tree.leaves(program.out_info):
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            jax.numpy.full(leaf.shape, jax.numpy.nan, leaf.dtype).block_until_ready().delete()
    return jax.tree.map(np.asarray, program(*placed))


def looped(trial: Trial, side: Implementation) -> Callable[[Arguments, PyTree], _State]:
    """``LOOP`` calls as a function of arguments and result to the next ones; the result is None where it replaces.

    XLA runs a loop of a known length without asking the host. The barrier makes each call depend on the one before, so
    that none is left out or made once for all.
    """
    run = trial.run(side)

    def again(_: jax.Array, state: _State) -> _State:
        arguments, _ = state
        result = run(*arguments)
        state = ((result, *arguments[1:]), None) if trial.in_place else (arguments, result)
        return jax.lax.optimization_barrier(state)

    return lambda arguments, result: jax.lax.fori_loop(0, LOOP, again, (arguments, result))


def _ratio(trial: Trial) -> float:
    """The kernel's median time by XLA's; they take turns, so that a change of the clock hits both."""
    drawn = trial.draw(np.random.default_rng(_SEED), "power law")
    programs, states = [], []
    for side in ("pallas", "xla"):
        arguments = jax.tree.map(jax.numpy.array, drawn)
        shapes = None if trial.in_place else jax.eval_shape(trial.run("xla"), *arguments)
        result = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
        programs.append(jax.jit(looped(trial, side), donate_argnums=(0, 1)).lower(arguments, result).compile())
        states.append((arguments, result))

    def seconds(number: int) -> float:
        begin = time.perf_counter()
        states[number] = jax.block_until_ready(programs[number](*states[number]))
        return time.perf_counter() - begin

    rounds = [(seconds(0), seconds(1)) for _ in range(_ROUNDS)]
    kernel, xla = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    return kernel / xla


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def main() -> None:
    """Answers the request in the command line: classes, and as JSON what else ``check`` takes."""
    request = json.loads(sys.argv[1])
    signal.alarm(request["seconds"])  # whoever started this may have ended
    jax.devices()
    _say(machine=local_machine())
    verdicts = {}
    for text, sizes in request["classes"].items():
        _say(at=text)
        sizes = None if sizes is None else Sizes(**sizes)
        verdict = check(KernelClass.parse(text), sizes, interpret=request["interpret"])
        verdicts[text] = dataclasses.asdict(verdict)
    _say(verdicts=verdicts)


def _say(**content: object) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
