"""What each operation of a traced program depends on: arguments, and collectives that ran before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.extend import core

Names = frozenset[str]
COLLECTIVES = frozenset(("all_to_all", "all_gather", "psum"))


@dataclasses.dataclass(frozen=True)
class Operation:
    """A primitive, and for each operand the names of the arguments and the collectives that it depends on."""

    name: str
    operands: tuple[Names, ...]


def operations(traced: jax.stages.Traced, name: Callable[[str], str]) -> list[Operation]:
    """The operations of a program in its order, and of what it calls; a loop or a branch is one operation.

    Args:
      traced: As ``jax.jit(...).trace`` gives it.
      name: Gives an argument's name by its path, such as "[0].sharded".
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(traced.args_info[0])]
    found: list[Operation] = []
    _walk(traced.jaxpr.jaxpr, [frozenset((name(path),)) for path in paths], found)
    return found


def _walk(jaxpr: core.Jaxpr, arguments: Sequence[Names], found: list[Operation]) -> list[Names]:
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def names(atom) -> Names:
        return frozenset() if isinstance(atom, core.Literal) else known.get(atom, frozenset())

    for equation in jaxpr.eqns:
        operands = tuple(names(atom) for atom in equation.invars)
        called = [getattr(p, "jaxpr", p) for p in equation.params.values() if hasattr(p, "eqns")]
        if len(called) == 1 and len(called[0].invars) == len(operands):
            results = _walk(called[0], operands, found)
        else:
            found.append(Operation(equation.primitive.name, operands))
            results = [frozenset().union({equation.primitive.name} & COLLECTIVES, *operands)] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [names(atom) for atom in jaxpr.outvars]
