"""Which implementation of an op runs: native kernels on CPU, on NVIDIA GPUs what their verdicts say, XLA elsewhere.

``None`` decides by the platform the program is *lowered* for, so one program may hold all of them. On a GPU it takes a
Pallas kernel only where ``jrec.ops.verdicts`` has it as right and faster. An explicit name never falls back silently.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
from jaxtyping import PyTree

from jrec.ops.sizes import all_static
from jrec.ops.verdicts import KernelClass, gpu_choice

Implementation = Literal["xla", "native", "pallas"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)


@functools.cache
def native_unavailable() -> str | None:
    """Why the native CPU kernels cannot run here, or None where they can; warns once, since defaults lean on them."""
    try:
        from jrec.native import xla
    except ImportError as error:
        reason = f"they cannot be imported: {error}"
    else:
        reason = xla.unavailable()
    if reason is not None:
        warnings.warn(f"jrec's native CPU kernels are off ({reason}); XLA's slower ones are used", stacklevel=3)
    return reason


def dispatch[Result](
    op: str,
    implementation: Implementation | None,
    args: tuple[object, ...],
    *,
    xla: Callable[..., Result],
    native: Callable[..., Result] | None = None,
    pallas: Callable[..., Result] | None = None,
    kernel: KernelClass | None = None,
) -> Result:
    """Calls the implementation of ``op`` that ``implementation`` names, or the default of the lowering platform.

    Args:
      op: The op's name, for messages.
      implementation: A name, or None for the default.
      args: The arguments, pytrees of arrays.
      xla: The reference.
      native: The CPU's kernel, or None.
      pallas: The GPU's kernel, or None.
      kernel: Which verdict decides on ``pallas`` where nobody named it; None never takes it.

    Raises:
      ValueError: For an unknown name.
      NotImplementedError: Where the named implementation does not cover this op or cannot run here.
    """
    if not all_static(args):
        if implementation in ("native", "pallas"):
            raise NotImplementedError(
                f"{op}: {implementation} kernels need static shapes; export 'xla' or None instead"
            )
        # Scratch and grids of kernels are static sizes; XLA's programs are of any.
        implementation = "xla" if implementation is None else implementation
    if implementation is None:
        per_platform: dict[str, Callable[..., Result]] = {}
        if native is not None and native_unavailable() is None:
            per_platform["cpu"] = native
        if pallas is not None and kernel is not None and gpu_choice(kernel) == "pallas":
            # A chosen kernel may decline, a named one may not: that is why only this one has a way out.
            per_platform["cuda"] = _where_it_serves(pallas, xla)
        # A program may be lowered for another platform than it is traced on, as an export's: all branches are traced,
        # and one is lowered.
        return jax.lax.platform_dependent(*args, **per_platform, default=xla) if per_platform else xla(*args)
    if implementation == "xla":
        return xla(*args)
    if implementation == "native":
        if native is None:
            raise NotImplementedError(f"{op} has no native implementation for these arguments; use 'xla' or None")
        if (reason := native_unavailable()) is not None:
            raise NotImplementedError(f"{op}: native kernels cannot run here ({reason}); use 'xla' or None")
        return native(*args)
    if implementation == "pallas":
        if pallas is None:
            raise NotImplementedError(f"{op} has no Pallas implementation for these arguments; use 'xla' or None")
        return pallas(*args)
    raise ValueError(
        f"implementation={implementation!r} is unknown; choose None or one of {', '.join(IMPLEMENTATIONS)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call[Request, Result]:
    """One call of an op among several of the same op, whose kernels may share launches.

    Attributes:
      args: The arguments, pytrees of arrays.
      xla: The reference.
      native: The CPU's kernel, or None.
      request: Turns the arguments into what the GPU's kernel takes of them.
      kernel: Which verdict decides on the GPU's kernel where nobody named it.
    """

    args: tuple[PyTree, ...]
    xla: Callable[..., Result]
    native: Callable[..., Result] | None
    request: Callable[..., Request]
    kernel: KernelClass

    def dispatch(
        self, op: str, implementation: Implementation | None, together: Callable[[Sequence[Request]], list[Result]]
    ) -> Result:
        """The result of a single call; see the function ``dispatch``."""

        def pallas(*args: PyTree) -> Result:
            return together([self.request(*args)])[0]

        return dispatch(
            op, implementation, self.args, xla=self.xla, native=self.native, pallas=pallas, kernel=self.kernel
        )


def dispatch_together[Request, Result](
    op: str,
    implementation: Implementation | None,
    calls: Sequence[Call[Request, Result]],
    together: Callable[[Sequence[Request]], list[Result]],
) -> list[Result]:
    """What ``dispatch`` returns for each call, from as few launches on a GPU as kernels can share.

    Args:
      op: The op's name, for messages.
      implementation: A name, or None for the default.
      calls: Independent of each other.
      together: The GPU's kernel for any number of requests, from launches that they share: a result each.

    Raises:
      ValueError: For an unknown name.
      NotImplementedError: Where the named implementation does not cover the op or cannot run here.
    """
    if implementation == "pallas" and all_static([call.args for call in calls]):
        return together([call.request(*call.args) for call in calls])
    chosen = [i for i, call in enumerate(calls) if implementation is None and gpu_choice(call.kernel) == "pallas"]
    chosen = [i for i in chosen if all_static(calls[i].args)]
    if len(chosen) < 2:
        return [call.dispatch(op, implementation, together) for call in calls]
    alone = [i for i in range(len(calls)) if i not in chosen]

    def pallas(*args: tuple[PyTree, ...]) -> list[Result]:
        requests = [calls[i].request(*of_call) for i, of_call in zip(chosen, args, strict=True)]
        try:
            return together(requests)
        except NotImplementedError:  # one of them is not covered: the others do not pay for it
            each = [_where_it_serves(lambda *a, i=i: together([calls[i].request(*a)])[0], calls[i].xla) for i in chosen]
            return [run(*of_call) for run, of_call in zip(each, args, strict=True)]

    def xla(*args: tuple[PyTree, ...]) -> list[Result]:
        return [calls[i].xla(*of_call) for i, of_call in zip(chosen, args, strict=True)]

    def native(*args: tuple[PyTree, ...]) -> list[Result]:
        return [(calls[i].native or calls[i].xla)(*of_call) for i, of_call in zip(chosen, args, strict=True)]

    per_platform = {"cuda": _where_it_serves(pallas, xla)}
    if native_unavailable() is None:
        per_platform["cpu"] = native
    shared = jax.lax.platform_dependent(*(calls[i].args for i in chosen), **per_platform, default=xla)
    results = dict(zip(chosen, shared, strict=True))
    results |= {i: calls[i].dispatch(op, None, together) for i in alone}
    return [results[i] for i in range(len(calls))]


def _where_it_serves[Result](pallas: Callable[..., Result], xla: Callable[..., Result]) -> Callable[..., Result]:
    """A chosen, not a named, kernel: XLA takes what it does not cover, such as rows too long for it.

    Under ``vmap`` XLA does all, since a kernel over a batch is other code than the one that was checked.
    """

    @jax.custom_batching.custom_vmap
    def run(*args: PyTree) -> Result:
        try:
            return jax.jit(pallas, inline=True)(*args)  # in a trace of its own, which vanishes where it is refused
        except NotImplementedError:
            return xla(*args)

    @run.def_vmap
    def batched(size: int, is_batched: PyTree[bool], *args: PyTree) -> tuple[Result, PyTree[bool]]:
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(is_batched))
        out = jax.vmap(xla, in_axes=axes, axis_size=size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run
