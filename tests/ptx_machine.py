"""A small PTX machine in NumPy: runs the code that Mosaic GPU generated for an H200, thread by thread, on a CPU.

It knows the instructions that jrec's kernels compile to and refuses others. Every access is checked against the bounds
and the alignment of the buffers; warp-wide instructions wait for the whole warp and are never guarded; two blocks that
write the same place are found. Approximate instructions are computed exactly.
"""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np

THREADS, WARP = 128, 32
_TYPES = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
_WARP_WIDE = ("shfl", "redux", "vote", "elect")  # wait for all threads of the warp, as their .sync says
_BUFFER_BITS = 40  # a pointer is (buffer number + 1) << 40, plus the offset


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: ``@guard opcode operands``."""

    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel: its instructions, where labels point, and its parameters' names in order."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    parameters: tuple[str, ...]


class MachineError(Exception):
    """The program did something a GPU would not forgive, or that the machine does not know."""


def parse(ptx: str) -> Program:
    """Parses the only kernel of a PTX module."""
    (header, body), *others = re.findall(r"\.entry\s+\w+\((.*?)\)\s*(?:\.\w+[^\n]*\n)*\{(.*?)\n\}", ptx, re.DOTALL)
    assert not others
    parameters = tuple(re.findall(r"(\w+_param_\d+)", header))
    instructions, labels = [], {}
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if label := re.match(r"(\$\w+):$", line):
            labels[label[1]] = len(instructions)
        elif line and not line.startswith("."):
            instructions.append(_instruction(line))
    return Program(tuple(instructions), labels, parameters)


def _instruction(line: str) -> Instruction:
    found = re.match(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*?);?$", line)
    assert found, line
    operands = tuple(o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", found[4]) if o.strip())
    return Instruction(found[2], found[1] == "!", tuple(re.split(r"[.:]+", found[3])), operands, line)


class Machine:
    """Runs a program over buffers, block after block."""

    def __init__(self, program: Program, buffers: list[np.ndarray], writable: set[int]) -> None:
        """``buffers`` in parameter order, as bytes; parameters that share a buffer pass the same array."""
        self.program, self.writable = program, writable
        self.buffers = buffers
        self.writers = [np.full(b.size, -1, np.int64) for b in buffers]
        if len(buffers) != len(program.parameters):
            raise MachineError(f"{len(program.parameters)} parameters, but {len(buffers)} buffers")

    def run(self, grid: int) -> None:
        """Runs all blocks."""
        for block in range(grid):
            with np.errstate(all="ignore"):
                self._run_block(block)

    def _run_block(self, block: int) -> None:
        self.block = block
        self.registers: dict[str, np.ndarray] = {}
        pc = np.zeros(THREADS, np.int64)
        waiting = np.zeros(THREADS, bool)  # at a warp-wide instruction, for the rest of the warp
        end = len(self.program.instructions)
        for _ in range(1_000_000):
            if np.all(pc == end):
                return
            if np.all(waiting | (pc == end)):
                raise MachineError("threads wait for each other at different instructions")
            here = int(pc[~waiting].min())
            instruction = self.program.instructions[here]
            arrived = pc == here
            if instruction.opcode[0] in _WARP_WIDE:
                whole = np.repeat(arrived.reshape(-1, WARP).all(axis=1), WARP)
                waiting = np.where(arrived, ~whole, waiting)
                arrived &= whole
                if not arrived.any():
                    continue
            active = arrived
            if instruction.guard is not None and instruction.opcode[0] in _WARP_WIDE:
                raise MachineError(f"{instruction.text}: guarded, so that part of the warp may be missing")
            if instruction.guard is not None:
                active = arrived & (self._read(instruction.guard, "pred") != instruction.negated)
            pc[arrived] = here + 1
            if instruction.opcode[0] == "bra":
                pc[active] = self.program.labels[instruction.operands[0]]
            elif instruction.opcode[0] == "ret":
                pc[active] = end
            elif active.any():
                try:
                    self._execute(instruction, active)
                except MachineError as error:
                    raise MachineError(f"{instruction.text}: {error}") from None
        raise MachineError("a thread never ends")

    def _execute(self, instruction: Instruction, active: np.ndarray) -> None:
        name, *rest = instruction.opcode
        if (handler := getattr(self, f"_do_{name}", None)) is not None:
            handler(rest, instruction.operands, active)
        elif name in _PURE:
            kind = rest[-1]
            destination, *sources = instruction.operands
            values = [self._read(s, kind) for s in sources]
            self._write(destination, _PURE[name](rest, *values), active)
        else:
            raise MachineError("unknown instruction")

    # Registers hold raw bits in 64-bit words.

    def _read(self, operand: str, kind: str) -> np.ndarray:
        if kind == "pred":
            return self._bits(operand) != 0
        dtype = np.dtype(_TYPES[kind])
        if operand == "%tid.x":
            return np.arange(THREADS).astype(dtype)
        if operand == "%ctaid.x":
            return np.full(THREADS, self.block).astype(dtype)
        return self._bits(operand).astype(np.dtype(f"u{dtype.itemsize}")).view(dtype)

    def _bits(self, operand: str) -> np.ndarray:
        if operand.startswith("%"):
            if operand not in self.registers:
                raise MachineError(f"{operand} is read before it is written")
            return self.registers[operand]
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.uint64)
        return np.full(THREADS, int(operand, 0) % 2**64, np.uint64)

    def _write(self, register: str, values: np.ndarray, active: np.ndarray) -> None:
        if not re.fullmatch(r"%\w+", register):
            raise MachineError(f"cannot write {register}")
        values = np.ascontiguousarray(values)
        if values.dtype == bool:
            bits = values.astype(np.uint64)
        else:
            bits = values.view(np.dtype(f"u{values.dtype.itemsize}")).astype(np.uint64)
        old = self.registers.get(register, np.zeros(THREADS, np.uint64))
        self.registers[register] = np.where(active, bits, old)

    # Memory.

    def _place(self, operand: str, size: int, active: np.ndarray) -> tuple[int, np.ndarray]:
        found = re.fullmatch(r"\[(%\w+)(?:\+(-?\d+))?\]", operand)
        assert found, operand
        address = self._read(found[1], "s64")[active] + int(found[2] or 0)
        numbers = np.unique((address >> _BUFFER_BITS) - 1)
        if numbers.size != 1 or not 0 <= numbers[0] < len(self.buffers):
            raise MachineError(f"address in no buffer, or in several: {address}")
        number = int(numbers[0])
        offset = address & (2**_BUFFER_BITS - 1)
        if np.any(offset % size):
            raise MachineError(f"misaligned access of {size} bytes")
        if np.any(offset + size > self.buffers[number].size):
            raise MachineError(f"access past the end of parameter {number}")
        return number, offset[:, None] + np.arange(size)

    @staticmethod
    def _vector(rest: list[str], operand: str) -> tuple[int, np.dtype, list[str]]:
        registers = [r.strip() for r in operand.strip("{}").split(",")]
        dtype = np.dtype(_TYPES[rest[-1]])
        return len(registers) * dtype.itemsize, dtype, registers

    def _do_ld(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        if rest[0] == "param":
            number = self.program.parameters.index(operands[1].strip("[]"))
            self._write(operands[0], np.full(THREADS, (number + 1) << _BUFFER_BITS, np.uint64), active)
            return
        size, dtype, registers = self._vector(rest, operands[0])
        number, bytes_ = self._place(operands[1], size, active)
        read = self.buffers[number][bytes_].view(dtype)
        for i, register in enumerate(registers):
            values = np.zeros(THREADS, dtype)
            values[active] = read[:, i]
            self._write(register, values, active)

    def _do_st(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        size, _, registers = self._vector(rest, operands[1])
        number, bytes_ = self._place(operands[0], size, active)
        if number not in self.writable:
            raise MachineError(f"parameter {number} is read-only")
        if np.unique(bytes_).size != bytes_.size:
            raise MachineError("two threads of a block write the same place at once")
        writers = self.writers[number]
        if np.any((writers[bytes_] >= 0) & (writers[bytes_] != self.block)):
            raise MachineError("two blocks write the same place")
        writers[bytes_] = self.block
        stacked = np.stack([self._read(r, rest[-1])[active] for r in registers], axis=1)
        self.buffers[number][bytes_] = stacked.view(np.uint8)

    # Warp-wide instructions.

    def _do_shfl(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        lane = np.arange(THREADS) % WARP
        by, clamp = self._read(operands[2], "s32"), self._read(operands[3], "s32")
        group = clamp >> 8 & WARP - 1  # the bits of a lane's number that its source has too
        source = {"bfly": lane ^ by, "idx": lane & group | by & ~group}[rest[1]]
        if np.any(clamp & WARP - 1 != WARP - 1):
            raise MachineError("a shuffle whose clamp leaves lanes out is not known")
        values = self._read(operands[1], "b32")[np.arange(THREADS) // WARP * WARP + source]
        self._write(operands[0], values, active)

    def _do_redux(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        reduce = {("sync", "max", "s32"): np.max, ("sync", "add", "s32"): np.sum}[tuple(rest)]
        reduced = reduce(self._read(operands[1], "s32").reshape(-1, WARP), axis=1).astype(np.int32)
        self._write(operands[0], np.repeat(reduced, WARP), active)

    def _do_vote(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        assert rest == ["sync", "ballot", "b32"]
        votes = self._read(operands[1], "pred").reshape(-1, WARP).astype(np.uint64)
        ballots = np.sum(votes << np.arange(WARP, dtype=np.uint64), axis=1).astype(np.uint32)
        self._write(operands[0], np.repeat(ballots, WARP), active)

    def _do_elect(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        leader, elected = operands[0].split("|")
        self._write(leader, np.zeros(THREADS, np.uint32), active)
        self._write(elected, np.arange(THREADS) % WARP == 0, active)

    def _do_bar(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        if not active.all():
            raise MachineError("part of the block is missing at a barrier")

    def _do_fence(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        pass

    # Moves and conversions.

    def _do_mov(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        target, source = operands
        if target.startswith("{"):
            low, high = (r.strip() for r in target.strip("{}").split(","))
            bits = self._read(source, "b32")
            self._write(low, (bits & 0xFFFF).astype(np.uint16), active)
            self._write(high, (bits >> 16).astype(np.uint16), active)
        elif source.startswith("{"):
            low, high = (self._read(r.strip(), "b16").astype(np.uint32) for r in source.strip("{}").split(","))
            self._write(target, low | high << 16, active)
        else:
            self._write(target, self._read(source, rest[0]), active)

    def _do_cvta(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        self._write(operands[0], self._read(operands[1], "b64"), active)

    def _do_cvt(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        *_, target, source = rest
        if target.endswith("x2"):
            high, low = (self._read(o, source).astype(_TYPES[target[:-2]]).view(np.uint16) for o in operands[1:])
            self._write(operands[0], low.astype(np.uint32) | high.astype(np.uint32) << 16, active)
        else:
            self._write(operands[0], self._read(operands[1], source).astype(_TYPES[target]), active)

    def _do_setp(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a, b = (self._read(o, rest[-1]) for o in operands[1:])
        self._write(operands[0], _COMPARISONS[rest[0]](a, b), active)

    def _do_selp(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a, b = (self._read(o, rest[-1]) for o in operands[1:3])
        self._write(operands[0], np.where(self._read(operands[3], "pred"), a, b), active)

    def _do_mul(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a, b = (self._read(o, rest[-1]) for o in operands[1:])
        if rest[0] == "wide":
            wide = {"s32": np.int64, "u32": np.uint64}[rest[-1]]
            a, b = a.astype(wide), b.astype(wide)
        elif rest[0] == "hi":
            assert rest[1] == "s32"
            self._write(operands[0], (a.astype(np.int64) * b >> 32).astype(np.int32), active)
            return
        self._write(operands[0], a * b, active)

    def _do_mad(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a, b = (self._read(o, rest[-1]) for o in operands[1:3])
        if rest[0] == "wide":
            wide, kind = {"s32": (np.int64, "s64"), "u32": (np.uint64, "u64")}[rest[-1]]
            self._write(operands[0], a.astype(wide) * b.astype(wide) + self._read(operands[3], kind), active)
        else:
            assert rest[0] == "lo"
            self._write(operands[0], a * b + self._read(operands[3], rest[-1]), active)

    def _do_shl(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a = self._read(operands[1], rest[-1])
        self._write(operands[0], a << self._read(operands[2], "b32").astype(a.dtype), active)

    def _do_shr(self, rest: list[str], operands: tuple[str, ...], active: np.ndarray) -> None:
        a = self._read(operands[1], rest[-1])
        self._write(operands[0], a >> self._read(operands[2], "b32").astype(a.dtype), active)


def _fused(rest: list[str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _power_of_two(rest: list[str], a: np.ndarray) -> np.ndarray:
    """To half a unit in the last place, where a GPU is within two."""
    tiny = np.finfo(np.float32).tiny
    assert "ftz" in rest
    powers = np.exp2(np.where(np.abs(a) < tiny, 0, a.astype(np.float64))).astype(np.float32)
    return np.where(powers < tiny, np.float32(0), powers)


def _greater(rest: list[str], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(np.maximum(a, b), 0) if "relu" in rest else np.maximum(a, b)


_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "neu": np.not_equal, "leu": lambda a, b: ~(a > b), "ltu": lambda a, b: ~(a >= b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}  # fmt: skip
_PURE = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "div": lambda _, a, b: a / b if a.dtype == np.float32 else (a.astype(np.float64) / b).astype(a.dtype),
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda _, a: ~a,
    "neg": lambda _, a: -a,
    "abs": lambda _, a: np.abs(a),
    "popc": lambda _, a: np.bitwise_count(a).astype(np.uint32),
    "bfe": lambda _, a, first, length: (a >> first) & ((np.uint32(1) << length) - np.uint32(1)),
    "min": lambda _, a, b: np.minimum(a, b),
    "max": _greater,
    "fma": _fused,
    "ex2": _power_of_two,
    "sqrt": lambda _, a: np.sqrt(a),
    "rsqrt": lambda _, a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32),
}
