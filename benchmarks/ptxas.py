"""What CUDA's assembler reports of a kernel: registers, spills, stack and shared memory.

PTX names as many registers as it likes. Which values get one of a thread's 255, and which go to local memory, is
decided only by ptxas.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
import struct
import subprocess
import tempfile

_OPTIONS = ("-v", "-O3")  # as XLA assembles Mosaic's kernels; a test compares the reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What ``ptxas -v`` says of one kernel.

    Attributes:
      registers: Registers of a thread.
      spill_store_bytes: Bytes that a thread stores for lack of registers.
      spill_load_bytes: Bytes that it loads again.
      stack_bytes: A thread's stack frame, where spills and arrays lie.
      shared_bytes: Static shared memory of a thread block.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assembled:
    """A kernel's binary, and the report on it."""

    cubin: bytes
    report: Report

    @property
    def instructions(self) -> int:
        """Machine instructions, 16 bytes each, with the few that fill the code up to a multiple of 128 bytes."""
        return sum(size for name, size in _sections(self.cubin) if name.startswith(".text.")) // 16


def _sections(elf: bytes) -> list[tuple[str, int]]:
    """Names and sizes of a 64-bit little-endian ELF file's sections."""
    start, entry, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + number * entry) for number in range(count)]
    strings = headers[names][4]
    return [(elf[strings + h[0] : elf.index(b"\0", strings + h[0])].decode(), h[5]) for h in headers]


@functools.cache
def tool(name: str) -> pathlib.Path:
    """A program of CUDA's toolkit, as installed in this environment.

    Raises:
      RuntimeError: Where it is not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in (spec and spec.submodule_search_locations) or ():
        if candidates := sorted(pathlib.Path(root).glob(f"cu*/bin/{name}")):
            return candidates[-1]
    raise RuntimeError(
        f"CUDA's {name} is not installed here: run in the environment that"
        " `bash scripts/setup.sh .venv-aot requirements/aot.txt` makes"
    )


@functools.cache
def version(assembler: pathlib.Path) -> str:
    """A ptxas's version, such as "13.0.88".

    Raises:
      RuntimeError: Where it does not say.
    """
    text = subprocess.run([assembler, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if found is None:
        raise RuntimeError(f"{assembler} --version reports in an unknown form: {text!r}")
    return found[1]


@functools.lru_cache(maxsize=512)
def assemble(ptx: str, assembler: pathlib.Path | None = None) -> Assembled:
    """Assembles one kernel for the GPU that it names.

    Args:
      ptx: The kernel's code.
      assembler: The ptxas to run, or None for this environment's.

    Raises:
      RuntimeError: Where ptxas is missing, or refuses the code.
    """
    program, target = assembler or tool("ptxas"), re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise RuntimeError(f"the code names no GPU by .target: {ptx[:200]!r}")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [program, *_OPTIONS, f"-arch={target[1]}", source, "-o", binary]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program} refuses a kernel: {done.stderr.strip()}")
        return Assembled(cubin=binary.read_bytes(), report=parse_report(done.stdout + done.stderr))


def parse_report(text: str) -> Report:
    """Reads what ``ptxas -v`` printed of one kernel.

    Raises:
      RuntimeError: Where the text does not have the form that is known.
    """
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    used = re.search(r"Used (\d+) registers(.*)", text)
    if frame is None or used is None:
        raise RuntimeError(f"ptxas -v reports in an unknown form: {text!r}")
    shared = re.search(r"(\d+) bytes smem", used[2])
    return Report(
        registers=int(used[1]),
        spill_store_bytes=int(frame[2]),
        spill_load_bytes=int(frame[3]),
        stack_bytes=int(frame[1]),
        shared_bytes=int(shared[1]) if shared else 0,
    )
