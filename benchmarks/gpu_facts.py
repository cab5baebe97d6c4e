"""What ``benchmarks.gpu_model`` knows of the compiled kernels: registers, loops and launches, kept as JSON.

Compiling needs CUDA's compiler, which ``bash scripts/setup.sh .venv-aot requirements/aot.txt`` installs:

  JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu .venv-aot/bin/python -m benchmarks.gpu_facts

writes ``benchmarks/results/gpu_facts.json`` anew; the other commands read it and need no compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import re
import sys
from typing import Any

from benchmarks import harness
from benchmarks.gpu_model_cases import CASES, SWEEP, Case
from jrec.pallas.tuning import TuningConfig

PATH = pathlib.Path(__file__).parent / "results" / "gpu_facts.json"
_IDLE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")  # of HLO; these launch nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """An innermost loop of a kernel's PTX.

    Attributes:
      instructions: PTX instructions of one trip, whichever branches are taken.
      row_loads: 16-byte loads among them, or the widest that the kernel has.
    """

    instructions: int
    row_loads: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled Mosaic kernel; see ``ahead_of_time.CompiledKernel`` for the fields that have the same names.

    Attributes:
      ptx_instructions: Instructions of its PTX, of which ptxas makes somewhat fewer of the machine.
      loops: Its innermost loops in PTX.
    """

    name: str
    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    grid: int
    launches: int
    instructions: int
    ptx_instructions: int
    loops: tuple[Loop, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """A compiled program.

    Attributes:
      kernels: Its Mosaic kernels.
      others: Kernels of XLA's own, as (HLO opcode, bytes read, bytes written).
    """

    kernels: tuple[Kernel, ...]
    others: tuple[tuple[str, int, int], ...]


def key(case: Case, program: str, config: TuningConfig | None) -> str:
    """The name of a program among the facts."""
    words = [case.name, program]
    if config is not None:
        words += [f"{f.name}={getattr(config, f.name)}" for f in dataclasses.fields(config) if f.name != "blocks"]
    return " ".join(words)


def load(path: pathlib.Path = PATH) -> dict[str, Facts]:
    """The facts that were kept.

    Raises:
      FileNotFoundError: Where there are none, with the command that makes them.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; python -m benchmarks.gpu_facts writes it (see its --help)")
    return {name: _from_json(fields) for name, fields in json.loads(path.read_text())["programs"].items()}


def _from_json(fields: dict[str, Any]) -> Facts:
    kernels = [Kernel(**k | {"loops": tuple(Loop(**loop) for loop in k["loops"])}) for k in fields["kernels"]]
    return Facts(kernels=tuple(kernels), others=tuple((op, read, written) for op, read, written in fields["others"]))


def compiled(case: Case, name: str, config: TuningConfig | None) -> Facts:
    """Compiles a program of a case for an H200: its "forward", "update" or "cast"."""
    from benchmarks import ahead_of_time as aot

    program = {"forward": _forward, "update": _update, "cast": _cast}[name](case, config, aot.shape)
    built = aot.compile_program(*program)
    kernels = [_kernel(k) for k in built.kernels]
    return Facts(kernels=tuple(kernels), others=tuple(other_kernels(built.executable.as_text() or "")))


def _forward(case: Case, config: TuningConfig | None, shape: Any) -> tuple[Any, ...]:
    import jax.numpy as jnp

    from jrec.pallas.gather_reduce import gather_reduce

    run = functools.partial(gather_reduce, config=config)
    return run, shape((case.rows, case.dim)), shape((case.bags, case.length), jnp.int32)


def _update(case: Case, config: TuningConfig | None, shape: Any) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    from jrec import ops
    from jrec.pallas.casted_update import UpdateRequest, casted_update

    optimizer = ops.RowWiseAdagrad(learning_rate=0.01)
    i32 = functools.partial(shape, dtype=jnp.int32)

    def update(table: Any, slots: Any, cast: Any, gradients: Any, step: jax.Array) -> Any:
        return casted_update(
            UpdateRequest(
                optimizer=optimizer, table=table, slots=slots, **cast, bag_gradients=gradients, weights=None,
                step=step, gradient_scale=jnp.float32(1), config=config,
            )
        )  # fmt: skip

    lookups = case.lookups
    cast = {"rows": i32((lookups,)), "offsets": i32((lookups + 1,)), "sources": i32((lookups,)), "num_unique": i32(())}
    table, gradients = shape((case.rows, case.dim)), shape((case.bags, case.dim))
    return jax.jit(update, donate_argnums=(0, 1)), table, {"sum": shape((case.rows,))}, cast, gradients, i32(())


def _cast(case: Case, config: TuningConfig | None, shape: Any) -> tuple[Any, ...]:
    import jax.numpy as jnp

    from jrec import ops

    del config
    run = functools.partial(ops.tensor_cast, num_rows=case.rows, implementation="pallas")
    return run, shape((case.bags, case.length), jnp.int32)


def _kernel(kernel: Any) -> Kernel:
    common = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(Kernel) if hasattr(kernel, f.name)}
    instructions, loops = loops_of(kernel.ptx)
    return Kernel(**common, ptx_instructions=instructions, loops=loops)


def loops_of(ptx: str) -> tuple[int, tuple[Loop, ...]]:
    """How many instructions a kernel has, and its innermost loops in the order of the code."""
    code = []
    for line in ptx[ptx.index(".entry") :].splitlines():
        text = line.strip().partition("//")[0].strip()
        if re.fullmatch(r"\$L__BB\w+:", text) or (text.endswith(";") and not text.startswith(".")):
            code.append(text)
    places = {text[:-1]: number for number, text in enumerate(code) if text.endswith(":")}
    last_branch: dict[int, int] = {}  # to the same place: several branches close one loop
    for number, text in enumerate(code):
        target = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", text)
        if target and places[target[1]] <= number:
            last_branch[places[target[1]]] = number
    spans = list(last_branch.items())
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    widths = [_load_bytes(text) for text in code]
    widest = max(widths, default=0)
    loops = [
        Loop(
            instructions=sum(not text.endswith(":") for text in code[first : last + 1]),
            row_loads=sum(width == widest for width in widths[first : last + 1]),
        )
        for first, last in sorted(inner)
    ]
    return sum(not text.endswith(":") for text in code), tuple(loops)


def _load_bytes(instruction: str) -> int:
    load = re.search(r"\bld\.global\S*?(?:\.v(\d))?\.[bfus](\d+)", instruction)
    return int(load[1] or 1) * int(load[2]) // 8 if load else 0


def other_kernels(hlo: str) -> list[tuple[str, int, int]]:
    """What an optimized program launches beside Mosaic's kernels: opcode, bytes read, bytes written."""
    entry = hlo[hlo.index("\nENTRY") :].split("\n}")[0]
    sizes: dict[str, int] = {}
    kernels = []
    for line in entry.splitlines():
        parsed = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)", line)
        if parsed is None:
            continue
        name, result, opcode, rest = parsed.groups()
        sizes[name] = _array_bytes(result)
        if opcode in _IDLE or "mosaic_gpu" in rest:
            continue
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        operands = re.findall(r"%[\w.\-]+", rest.split("), ")[0])
        kernels.append((target[1] if target else opcode, sum(sizes.get(o, 0) for o in operands), sizes[name]))
    return kernels


def _array_bytes(result: str) -> int:
    widths = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
    total = 0
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
        size = widths.get(kind, 0)
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size
    return total


def wanted() -> list[tuple[Case, str, TuningConfig | None]]:
    """Every program that the model needs facts of: the cases as tuned, and the sweep's updates."""
    programs: list[tuple[Case, str, TuningConfig | None]] = []
    for case in CASES.values():
        programs += [(case, "forward", case.forward_config()), (case, "cast", None)]
        programs.append((case, "update", case.update_config()))
    return programs + [(case, "update", config) for case, configs in SWEEP for config in configs]


def main() -> None:
    """Compiles every program and writes the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=PATH, help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    import jax

    programs = {}
    pending = {key(*program): program for program in wanted()}
    for number, (name, program) in enumerate(pending.items()):
        print(f"{number + 1}/{len(pending)} {name}", file=sys.stderr, flush=True)
        programs[name] = dataclasses.asdict(compiled(*program))
    text = json.dumps({"commit": harness.commit(), "jax": jax.__version__, "programs": programs}, indent=1)
    # One line a kernel or loop: a change of a kernel is a change of its line.
    text = re.sub(r"\n {6,}", " ", text)
    arguments.out.write_text(re.sub(r"\n {5}(?=\])", "", text) + "\n")


if __name__ == "__main__":
    main()
