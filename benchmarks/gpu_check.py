"""The check of GPU kernels, class by class: is each right, and its time by XLA's.

What ``jrec kernels check`` does, in this process and with a line for every class as it is found, so that a class that
crashes costs only itself: the next call goes on behind it. Verdicts are kept as those of the command are, and
``jrec train`` on the same machine takes them.

Examples:
  python -m benchmarks.gpu_check
  python -m benchmarks.gpu_check --only "gather_reduce float32 64" --tiny
"""

from __future__ import annotations

import argparse
import functools

from benchmarks import gpu_run, harness, resume
from jrec.ops.verdicts import KernelClass, keep_verdicts, local_machine, read_verdicts
from jrec.selfcheck import child
from jrec.selfcheck.check import USUAL, parse_classes

# The classes of the whole steps and of `jrec train` on a GPU's first call, and what else they may need.
CLASSES = (
    "tensor_cast int32 1",
    "gather_reduce float32 16", "casted_update float32 16 RowWiseAdagrad",
    "gather_reduce float32 128", "casted_update float32 128 RowWiseAdagrad",
)  # fmt: skip
MORE = (
    "casted_update float32 16 Adagrad",
    "row_update float32 16 RowWiseAdagrad", "row_update float32 128 RowWiseAdagrad", "row_update float32 16 Adagrad",
)  # fmt: skip


def check(report: harness.Report, kernel_class: KernelClass, *, tiny: bool) -> None:
    """Checks a class, reports its time by XLA's, and keeps the verdict.

    Raises:
      ValueError: If the kernel is not right.
    """
    verdict = child.check(kernel_class, None if tiny else USUAL, interpret=tiny)
    machine = None if tiny else local_machine()
    if machine is not None:
        keep_verdicts(machine, {**read_verdicts(machine), kernel_class: verdict})
    if not verdict.right:
        raise ValueError(f"{kernel_class} is not right: {verdict.why}")
    if verdict.ratio is not None:
        report.add(str(kernel_class), "check, right; its time by XLA's", verdict.ratio, "x")


def work(arguments: argparse.Namespace, report: harness.Report, cases: resume.Cases) -> None:
    """Checks every class that was asked for."""
    wanted = parse_classes(arguments.only or (MORE if arguments.more else CLASSES))
    cases.run({str(one): functools.partial(check, report, one, tiny=arguments.tiny) for one in wanted})


def main() -> None:
    """Checks the classes."""
    parser = gpu_run.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="check only these classes")
    parser.add_argument("--more", action="store_true", help="check those of other optimizers, instead of the steps'")
    arguments = parser.parse_args()
    gpu_run.run(arguments, "gpu_check", functools.partial(work, arguments))


if __name__ == "__main__":
    main()
