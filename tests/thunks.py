"""What the host does to run a compiled program, read off XLA's dump of its thunks: launches, graphs, loops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_THUNK = re.compile(r"^( *)\d+: (k\w+) ")
_PART = re.compile(r"^ *(condition|body):$")
COMMAND_BUFFER = "kCommandBuffer"  # one CUDA graph: its thunks are nodes


@dataclasses.dataclass
class Thunk:
    """One thunk: a kernel, a copy, a loop, …

    Attributes:
      kind: As XLA names it, "kCustomKernel" or "kWhile" say.
      line: The dump's line.
      inside: What it holds; of a loop its "condition" and "body".
    """

    kind: str
    line: str
    inside: list[Thunk] = dataclasses.field(default_factory=list)

    def part(self, kind: str) -> list[Thunk]:
        """What a loop's "condition" or "body" holds."""
        (found,) = [thunk for thunk in self.inside if thunk.kind == kind]
        return found.inside

    def every(self, *, within: str | None = None) -> Iterator[Thunk]:
        """Itself and all that it holds, but for what thunks of the kind ``within`` hold."""
        yield self
        for thunk in self.inside if self.kind != within else ():
            yield from thunk.every(within=within)


def parse(text: str) -> Thunk:
    """The program of a file "….thunk_sequence_after_thunk_passes.txt"."""
    program = Thunk("program", "")
    open_: list[tuple[int, Thunk]] = [(-1, program)]  # what may hold the next line, with its indent
    for line in text.splitlines():
        if part := _PART.match(line):
            # Not indented as its loop is: a condition follows the loop's line, a body the condition.
            while open_[-1][1].kind != "kWhile":
                open_.pop()
            indent, loop = open_[-1]
            loop.inside.append(Thunk(part[1], line))
            open_.append((indent, loop.inside[-1]))
        elif thunk := _THUNK.match(line):
            indent = len(thunk[1])
            while open_[-1][0] >= indent:
                open_.pop()
            open_[-1][1].inside.append(Thunk(thunk[2], line))
            open_.append((indent, open_[-1][1].inside[-1]))
    if not program.inside:
        raise ValueError("no thunk in this text: XLA's dump has changed its form")
    return program
