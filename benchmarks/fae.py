"""FAE: what calibrating and packing cost (--part calibration), and training on hot and cold batches (--part training).

A part is a module with ``add_arguments(parser)`` and ``measure(report, arguments)``.

Examples:
  python -m benchmarks.fae --part training
  jrec synth --like criteo-kaggle --rows 56250000 --out kaggle                # 45 million of these are for training
  python -m benchmarks.fae --part calibration --measure packing --kaggle kaggle --quick
"""

from __future__ import annotations

import importlib
import sys

from benchmarks import harness

PARTS = {"calibration": "benchmarks.studies.fae.calibration", "training": "benchmarks.fae_training"}


def main() -> None:
    """Runs the parts asked for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    chosen, _ = parser.parse_known_args(["--part", "all"] if _wants_help() else None)
    modules = [importlib.import_module(m) for name, m in PARTS.items() if chosen.part in (name, "all")]
    for module in modules:
        module.add_arguments(parser)
    arguments = parser.parse_args()
    with harness.Report(arguments, "fae") as report:
        for module in modules:
            module.measure(report, arguments)


def _wants_help() -> bool:
    return bool({"-h", "--help"} & set(sys.argv[1:]))


if __name__ == "__main__":
    main()
