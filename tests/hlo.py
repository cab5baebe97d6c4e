"""What a compiled program launches and holds, read off its optimized HLO."""

from __future__ import annotations

import collections
import dataclasses
import math
import re

# Instructions that name, view or order arrays; everything else that a computation runs is at least one launch.
_FREE = frozenset(
    (
        "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "opt-barrier", "partition-id",
        "replica-id", "add-dependency", "async-update",
    )
)  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%[\w.\-]+) = (.*?[\])}]|token\[\]) ([a-z][\w\-]*)\((.*)$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: With its "%".
      shape: Of the result, as HLO writes it.
      opcode: "fusion", "copy", "while", ….
      rest: Operands and attributes.
    """

    name: str
    shape: str
    opcode: str
    rest: str

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute (``calls``, ``body``, ``branch_computations``, …) lists."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%[\w.\-]+)", self.rest)
        return re.findall(r"%[\w.\-]+", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop: how often it runs, where XLA knows it, and what one iteration launches, its condition included."""

    trips: int | None
    once: Launches


@dataclasses.dataclass(frozen=True)
class Launches:
    """What a computation launches, loops apart.

    A "sort" may be many kernels: CUB's radix sort on a device, a bitonic sort of about a hundred where XLA compiles
    ahead of time without CUB's data. All else is one kernel or one copy each.

    Attributes:
      kinds: How many launches by opcode, loops' left out. A fusion around a sort counts as "sort".
      loops: Its loops.
    """

    kinds: dict[str, int]
    loops: tuple[Loop, ...] = ()

    @property
    def total(self) -> int:
        """All launches, loops with known trip counts unrolled; a loop of unknown length counts once."""
        return sum(self.kinds.values()) + sum((loop.trips or 1) * loop.once.total for loop in self.loops)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items(), key=lambda of: -of[1]))
        loops = "".join(f"; loop x{loop.trips or '?'}: {{{loop.once}}}" for loop in self.loops)
        return f"{self.total} launches ({kinds}{loops})"


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation of ``compiled.as_text()`` by its name, and the entry's name."""
    found: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if start := re.match(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$", line):
            current = start[2]
            found[current] = []
            entry = current if start[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            found[current].append(Instruction(*match.groups()))
    if not entry:
        raise ValueError("no ENTRY computation in this text; give compiled.as_text()")
    return found, entry


def launches(text: str) -> Launches:
    """Counts what the program of ``compiled.as_text()`` launches."""
    found, entry = computations(text)
    return _launches(found, entry)


def branches(text: str) -> list[Launches]:
    """What each branch of the program's one conditional launches, the branch with the fewest loops first."""
    found, _ = computations(text)
    (conditional,) = [i for instructions in found.values() for i in instructions if i.opcode == "conditional"]
    attributes = ("branch_computations", "true_computation", "false_computation")
    every = [_launches(found, name) for attribute in attributes for name in conditional.called(attribute)]
    return sorted(every, key=lambda branch: sum(len(loop.once.loops) for loop in branch.loops))


def _launches(found: dict[str, list[Instruction]], name: str) -> Launches:
    kinds: collections.Counter[str] = collections.Counter()
    loops: list[Loop] = []
    for instruction in found[name]:
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            continue
        if opcode == "while":
            parts = [_launches(found, n) for a in ("body", "condition") for n in instruction.called(a)]
            trips = _TRIPS.search(instruction.rest)
            loops.append(Loop(int(trips[1]) if trips else None, _sum(parts)))
        elif opcode in ("call", "conditional", "async-start"):
            attributes = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation")
            inner = [_launches(found, n) for a in attributes for n in instruction.called(a)]
            largest = max(inner, key=lambda of: of.total, default=Launches({opcode: 1}))
            kinds.update(largest.kinds)
            loops += largest.loops
        elif opcode == "fusion" and any(i.opcode == "sort" for n in instruction.called("calls") for i in found[n]):
            kinds["sort"] += 1
        else:
            kinds[opcode] += 1
    return Launches(dict(kinds), tuple(loops))


def _sum(parts: list[Launches]) -> Launches:
    kinds: collections.Counter[str] = collections.Counter()
    for part in parts:
        kinds.update(part.kinds)
    return Launches(dict(kinds), tuple(loop for part in parts for loop in part.loops))


def arrays(text: str, dtype: str, elements: int) -> list[str]:
    """Names of the launches that write an array of so many elements, whatever its shape, loops' included.

    A result that XLA writes into the buffer of an operand, as a scatter's, is among them.

    Args:
      text: As ``compiled.as_text()`` gives it.
      dtype: "f32", "s32", "pred", ….
      elements: How many elements the array has.
    """
    found, entry = computations(text)
    names, seen, waiting = [], set(), [entry]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in found[name]:
            if instruction.opcode in ("while", "call", "conditional"):
                attributes = ("body", "condition", "branch_computations", "to_apply")
                waiting += [n for attribute in attributes for n in instruction.called(attribute)]
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
                shapes = re.findall(rf"\b{dtype}\[([\d,]*)\]", instruction.shape)
                sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in shapes]
                names += [instruction.name] * sizes.count(elements)
    return names


def copies(text: str) -> list[str]:
    """The shapes of the arrays that are copied as they are, loops' included, in no order."""
    found, _ = computations(text)
    fused = {n for of in found.values() for i in of if i.opcode.startswith("fusion") for n in i.called("calls")}
    return [
        i.shape for name, of in found.items() if name not in fused for i in of if i.opcode in ("copy", "copy-start")
    ]


def scatters(text: str) -> list[Instruction]:
    """All scatters of the program, within fusions too."""
    found, _ = computations(text)
    return [i for instructions in found.values() for i in instructions if i.opcode == "scatter"]
