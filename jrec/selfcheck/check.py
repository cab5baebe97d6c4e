"""Which kernels are checked, in one process that may crash or hang, and what is kept of it.

A check that does not end by itself loses all of its classes: XLA computes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from jrec.errors import ConfigError, JrecError
from jrec.json_values import JsonObject
from jrec.ops.layout import EmbeddingLayout
from jrec.ops.tt.shape import TTShape
from jrec.ops.verdicts import (
    CAST,
    KERNELS_VARIABLE,
    KernelClass,
    Verdict,
    keep_verdicts,
    read_verdicts,
    verdict_file,
)
from jrec.outputs import open_lock
from jrec.selfcheck.trials import Sizes

COMMAND, PLATFORM = (sys.executable, "-m", "jrec.selfcheck.child"), "cuda"
USUAL = Sizes(rows=1_000_000, bags=8_192, length=20)
MAX_LOOKUPS = 1 << 20  # of a model's step, as far as it is checked and timed
START_SECONDS, CLASS_SECONDS = 60, 30  # for the process and for each class; compilation takes most of it
_END_SECONDS = 5  # after which a process that was killed is left to the system

Wanted = Mapping[KernelClass, Sizes]


class SelfCheckError(JrecError):
    """Kernels could not be checked at all."""


def usual_classes() -> dict[KernelClass, Sizes]:
    """The classes of usual models; a run checks its own besides."""
    classes = [CAST]
    for dtype in ("float32", "bfloat16"):
        for dim in (16, 32, 64, 128):
            classes += _of_rows(dim, dtype, ("RowWiseAdagrad", "SGD", "Adam"))
    for dim in (16, 64):
        classes += _of_cores(TTShape.search(1_000_000, dim, ranks=32))
    return dict.fromkeys(classes, USUAL)


def classes_of(
    layout: EmbeddingLayout, *, optimizer: Callable[[str], str | None], batch_size: int
) -> dict[KernelClass, Sizes]:
    """What a model may run on a GPU, with the sizes of its steps.

    Args:
      layout: The model's tables.
      optimizer: By table, the class name of its rows' optimizer; None where they are not updated.
      batch_size: Examples in a step.
    """
    wanted: dict[KernelClass, Sizes] = {}
    for stack in sorted(layout.members, key=lambda stack: -stack.capacity(batch_size)):
        batch = max(1, min(batch_size, MAX_LOOKUPS // stack.capacity(1)))
        sizes = Sizes(
            rows=stack.rows,
            bags=stack.num_bags(batch),
            length=stack.padded_length,
            capacity=stack.capacity(batch),
            weighted=stack.weighted,
        )
        classes = [CAST]
        if stack.compressed:
            for table in stack.tables:
                assert table.tt_shape is not None
                classes += _of_cores(table.tt_shape)
        else:
            names = {optimizer(table.name) for table in stack.tables}
            classes += _of_rows(stack.dim, stack.dtype, sorted(name for name in names if name is not None))
            # Activations and gradients are summed in float32 whatever the table's dtype.
            classes += _of_rows(stack.dim, "float32", ())
        for one in classes:
            wanted.setdefault(one, sizes)
    return wanted


def _of_rows(dim: int, dtype: str, optimizers: Iterable[str]) -> list[KernelClass]:
    updates = [(kernel, optimizer) for optimizer in optimizers for kernel in ("casted_update", "row_update")]
    return [
        KernelClass(kernel=kernel, dtype=dtype, dim=dim, optimizer=optimizer)
        for kernel, optimizer in [("gather_reduce", None), *updates]
    ]


def _of_cores(shape: TTShape) -> list[KernelClass]:
    """Products of every level, and sums of rows that are made of them; cores are widened to float32 before."""
    classes, height = _of_rows(shape.dim, "float32", ()), shape.core_shapes[0][2]
    for _, rank, columns, right_rank in shape.core_shapes[1:]:
        classes.append(KernelClass(kernel="tt_products", dtype="float32", dim=(height, rank, columns, right_rank)))
        height *= columns
    return classes


def parse_classes(texts: Iterable[str]) -> dict[KernelClass, Sizes]:
    """The classes of these texts, with usual sizes.

    Raises:
      ConfigError: If one is no class.
    """
    try:
        return {KernelClass.parse(text): USUAL for text in texts}
    except ValueError:
        raise ConfigError("--only takes a whole kernel class, such as 'casted_update float32 48 Adam'") from None


def prove(
    wanted: Wanted, machine: str, *, again: bool = False, seconds: int | None = None
) -> dict[KernelClass, Verdict]:
    """The verdicts of classes, after a check of those that have none.

    Of several processes on a host one checks at a time; the others wait for it and find its verdicts.

    Args:
      wanted: The classes.
      machine: What the verdicts hold for.
      again: Whether classes with a verdict are checked too.
      seconds: For the check; None for a time by the number of classes.

    Raises:
      SelfCheckError: If nothing could be checked.
      OSError: If verdicts cannot be written.
    """
    lock = verdict_file(machine).with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system takes it from a process that ends, however it ends
        known = read_verdicts(machine)
        unchecked = {one: sizes for one, sizes in wanted.items() if again or one not in known}
        if unchecked:
            where, new = run_child(unchecked, seconds=seconds)
            if where != machine:
                raise SelfCheckError(f"the check ran on {where}, not on {machine}; set CUDA_VISIBLE_DEVICES to one GPU")
            known |= new
            keep_verdicts(machine, known)
    return {one: known[one] for one in wanted}


def run_child(
    wanted: Mapping[KernelClass, Sizes | None], *, seconds: int | None = None, interpret: bool = False
) -> tuple[str | None, dict[KernelClass, Verdict]]:
    """Checks classes in one process: its machine (see ``local_machine``), and a verdict for each class.

    Args:
      wanted: The classes, with the sizes to time; None times nothing.
      seconds: When to end the process; None for a time by the number of classes.
      interpret: Whether kernels run in Pallas' interpreter on the CPU.

    Raises:
      SelfCheckError: If the process has no device.
    """
    seconds = seconds or START_SECONDS + CLASS_SECONDS * len(wanted)
    classes = {str(one): None if sizes is None else dataclasses.asdict(sizes) for one, sizes in wanted.items()}
    request = {"classes": classes, "seconds": seconds, "interpret": interpret}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = _run([*COMMAND, json.dumps(request)], output, errors, "cpu" if interpret else PLATFORM, seconds)
        said = _events(output)
        ended = f"the check's process {_how(code, seconds)}. {_tail(errors)}".strip()
    if "machine" not in said:
        raise SelfCheckError(ended)
    # Of a process that died, no verdict counts, also of classes that it had passed: what broke it may have broken
    # those.
    if code == 0 and "verdicts" in said:
        return said["machine"], {
            KernelClass.parse(text): Verdict(**verdict) for text, verdict in said["verdicts"].items()
        }
    lost = Verdict(right=False, why=f"lost with the whole check, at {said.get('at')!r}: {ended}")
    return said["machine"], dict.fromkeys(wanted, lost)


def environment(platform: str) -> dict[str, str]:
    """The child's environment: it takes of the GPU's memory only what it needs, and imports what this process does."""
    changes = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", KERNELS_VARIABLE: "auto"}
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def _run(command: Sequence[str], output: IO[bytes], errors: IO[bytes], platform: str, seconds: float) -> int | None:
    """Runs a command; its exit code, or None where it did not end in time."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment(platform),
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # The whole session: compilers that the check started outlive it otherwise.
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver does not let go is not waited for
            process.wait(_END_SECONDS)


def _how(code: int | None, seconds: int) -> str:
    if code in (None, -signal.SIGALRM):
        return f"did not end within {seconds} s"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"


def _events(output: IO[bytes]) -> JsonObject:
    """The latest of everything that the child said."""
    said: JsonObject = {}
    output.seek(0)
    for line in output:
        with contextlib.suppress(ValueError, TypeError):  # what a compiler or a driver prints
            said |= json.loads(line)
    return said


def _tail(errors: IO[bytes]) -> str:
    """The last words on a child's standard error."""
    errors.seek(0)
    text = " ".join(errors.read()[-400:].decode(errors="replace").split())
    return f"Its last words: {text}" if text else ""
