"""One of two processes of a run by ``jrec.distribute``: PORT PROCESS FOLDER."""

import numpy as np
from distribute_cases import DENSE, ROWS, STEPS, columns, layout_of, modules, three_tiers
from process_pair import join_pair

import jrec


def part(step, process):
    """This process's half of a batch."""
    return {name: np.split(column, 2)[process] for name, column in columns(step).items()}


def main():
    """Trains half of the steps, saves, restores into another run, and trains the rest."""
    process, folder, mesh = join_pair()
    half, losses = STEPS // 2, []
    for steps in (range(half), range(half, STEPS)):
        with jrec.distribute(*modules(layout_of()), mesh=mesh, plan=three_tiers(4, layout_of())) as run:
            if steps.start:
                assert run.restore(folder / "c") == {"of": "half"}
            step = run.compile()
            for some in (steps[:2], steps[2:]):  # a feed after another one
                feed = run.feed((part(n, process) for n in some), dense=DENSE)
                losses += [float(step(batch)[0]) for batch in feed]
            run.save(folder / "c", meta={"of": "half"})
            run.save(folder / "whole")
            tables = {name: run.table(name) for name in ROWS}
            logits = run.predict(columns(99), dense=DENSE)
    np.savez(folder / f"{process}.npz", losses=losses, logits=logits, **tables)


if __name__ == "__main__":
    main()
