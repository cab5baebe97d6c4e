"""Which features train together: from the placements and models that are tested, the tables of what_trains_together.md.

``python tests/feature_table.py`` writes them into the page; ``test_placement_changes`` holds the page against them.
"""

from __future__ import annotations

import functools
import itertools
import pathlib

import model_cases as models
import placement_cases as cases

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "what_trains_together.md"
BEGIN, END = "<!-- {}: tests/feature_table.py -->\n", "<!-- end of {} -->\n"

NAMES = {
    "one": "one device",
    "devices": "several devices",
    "processes": "several processes",
    "cores": "tensor-train tables",
    "whole": "uncompressed rows before cores",
    "cache": "cache of a tensor-train table",
    "host": "host tables",
    "plan": "plan",
    "host rows": "plan with host rows",
    "tables-on": "plan by `--tables-on`",
    "fae": "`schedule=fae`",
    "16 bits": "16-bit rows",
    "reorder": "`jrec reorder`",
    "resume": "resumed in another placement",
    "compress": "`jrec compress` of the run",
}
EXCLUSIVE = {frozenset({"one", "devices"}), frozenset({"one", "processes"}), frozenset({"one", "tables-on"})}


def features_of(placement: cases.Placement) -> frozenset[str]:
    """What a run of a placement uses, of ``NAMES``."""
    plan, keys = placement.plan, " ".join(placement.keys)
    found = {
        "one": placement.devices == 1,
        "devices": placement.devices > 1,
        "processes": placement.processes > 1,
        "cores": placement.cores_from is not None,
        "whole": bool(placement.cores_from),
        "cache": "tables.tt.cache" in keys,
        "host": cases.HOST_TABLES in keys or "tier='host'" in keys or (placement.hot is not None and plan is None),
        "plan": plan is not None,
        "host rows": plan is not None and plan.host > 0,
        "tables-on": plan is not None and bool(plan.tables_on),
        "fae": placement.hot is not None,
        "16 bits": True,
        "reorder": placement.reordered,
    }
    return frozenset(name for name, used in found.items() if used)


@functools.cache
def trained_pairs() -> set[frozenset[str]]:
    """Pairs of features that some test runs together."""
    runs = [features_of(placement) for placement in cases.PLACEMENTS.values()]
    for move in cases.MOVES.values():
        narrow = set() if move.dtype == "float32" else {"16 bits"}
        runs += [features_of(placement) - {"16 bits"} | narrow | {"resume"} for placement in move.placements()]
    for name, dtype in cases.COMPRESSED.items():
        narrow = set() if dtype == "float32" else {"16 bits"}
        runs.append(features_of(cases.PLACEMENTS[name]) - {"16 bits"} | narrow | {"compress", "resume"})
    return {frozenset(pair) for run in runs for pair in itertools.combinations(sorted(run), 2)}


def cell(row: str, column: str) -> str:
    """What the page says of a pair."""
    pair = frozenset({row, column})
    if row == column or pair in EXCLUSIVE:
        return ""
    return "yes" if pair in trained_pairs() else "no"


def markdown() -> str:
    """The table: a column for each feature by its row's number."""
    numbers = {name: number for number, name in enumerate(NAMES, 1)}
    lines = [
        f"| | {' | '.join(map(str, numbers.values()))} |",
        f"| --- | {' | '.join('---' for _ in numbers)} |",
        *(f"| {numbers[row]} {NAMES[row]} | {' | '.join(cell(row, c) for c in NAMES)} |" for row in NAMES),
    ]
    return "\n".join(lines) + "\n"


def markdown_of_models() -> str:
    """The table of what a model has besides rows, under the same numbers."""
    trained = models.trained()

    def cell(model: str, feature: str) -> str:
        return "never" if (model, feature) in models.NEVER else "yes" if feature in trained[model] else "no"

    lines = [
        f"| | {' | '.join(map(str, range(1, len(NAMES) + 1)))} |",
        f"| --- | {' | '.join('---' for _ in NAMES)} |",
        *(f"| {model} | {' | '.join(cell(model, feature) for feature in NAMES)} |" for model in models.MODELS),
    ]
    return "\n".join(lines) + "\n"


def page_with(text: str) -> str:
    """The page's text with the tables in their places."""
    for name, table in (("features", markdown()), ("models", markdown_of_models())):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{table}{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text()))
