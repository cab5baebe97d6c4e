"""A transformer of bytes whose n-gram rows lie in files: FOLDER STEPS [FILES MEMORY]; goes on from its last checkpoint.

Writes JSON: the losses of its own steps, and what the rows' files took of memory at most, in bytes by the system.
"""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import optax
from flax import nnx

import jrec

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import ngram_memory as example


@dataclasses.dataclass(frozen=True)
class OnHost(jrec.nn.NGramConfig):
    """Rows in host memory."""

    def table(self, tier="host", **options):
        return super().table(tier=tier, **options)


def main(folder, steps, files="", memory=""):
    """See the module."""
    example.NGRAMS, example.LENGTH, example.BATCH = OnHost(rows=480_000, dim=32, sizes=(2, 3), heads=8), 16, 4
    checkpoints, losses, most = pathlib.Path(folder) / "checkpoints", [], 0
    model = example.LanguageModel(memory=True, rngs=nnx.Rngs(0))
    rows = jrec.ops.RowWiseAdagrad(learning_rate=0.1)
    optimizer = jrec.nn.SparseOptimizer(model, dense=optax.adam(2e-3), embedding=rows)
    text = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    with jrec.distribute(model, optimizer, host=jrec.HostOptions(folder=files, memory=memory)) as run:
        if checkpoints.exists() and any(path.name.isdigit() for path in checkpoints.iterdir()):
            run.restore(checkpoints)
        step, tables = run.compile(loss=example.loss_of), list(run.host_tables.values())
        batches = list(example.batches(text, int(steps), 0, memory=True))[run.steps :]
        with run.feed(batches, label=None, extras=["next"], workers=1, prefetch=1) as feed:
            for batch in feed:
                losses.append(float(step(batch)[0]))
                most = max(most, *(4096 * sum(int(file.resident().sum()) for file in t._files) for t in tables))
                if run.steps % 10 == 0:
                    run.save(checkpoints)
        size = sum(table.nbytes for table in tables)
        run.save(checkpoints)
    return {"losses": losses, "bytes": size, "resident": most}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
