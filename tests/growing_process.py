"""One of two processes of a run whose tables grow: PORT PROCESS FOLDER."""

import numpy as np
from growing_cases import DENSE, ROWS, STEPS, columns, growing, layout_of, modules, three_tiers
from process_pair import join_pair

import jrec


def part(step, process):
    """This process's half of a batch."""
    return {name: column[process * 8 : process * 8 + 8] for name, column in columns(step).items()}


def main():
    """Trains half of the steps, saves, restores into another run, and trains the rest."""
    process, folder, mesh = join_pair()
    half, losses = STEPS // 2, []
    for steps in (range(half), range(half, STEPS)):
        places = {"mesh": mesh, "plan": three_tiers(4, layout_of()), "growing": growing()}
        with jrec.distribute(*modules(layout_of()), **places) as run:
            if steps.start:
                run.restore(folder / "c")
            step = run.compile()
            losses += [float(step(batch)[0]) for batch in run.feed((part(n, process) for n in steps), dense=DENSE)]
            run.save(folder / "c")
            tables = {name: run.table(name) for name in ROWS}
            logits = run.predict({k: v for k, v in columns(99).items() if k != "label"}, dense=DENSE)
    np.savez(folder / f"{process}.npz", losses=losses, logits=logits, **tables)


if __name__ == "__main__":
    main()
