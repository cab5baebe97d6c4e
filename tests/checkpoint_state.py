"""Everything that a checkpoint holds, for comparisons bit by bit."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jrec.checkpoint import Checkpoints, DeviceRows, Saved
from jrec.run.identity import meta_of


def latest(folder: pathlib.Path) -> Saved:
    """The newest checkpoint of a run folder."""
    steps = [int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
    return Saved(folder / "checkpoints" / str(max(steps)))


def contents(saved: Saved) -> dict[str, bytes]:
    """Bits of dense arrays by path, and of every table's rows and slots, whatever pieces they are in."""
    arrays = {path: array.tobytes() for path, array in saved.arrays().items()}
    for name, record in saved.manifest.tables.items():
        rows = np.arange(record.shape.rows)
        for array in ("values", *record.shape.slots):
            arrays[f"{name}/{array}"] = saved.table(name).read(array, rows).tobytes()
    return arrays


def final_arrays(folder: pathlib.Path) -> tuple[int, dict[str, bytes], dict]:
    """Step, every array's bits, and the loader's position of a run's latest checkpoint."""
    saved = latest(folder)
    return saved.step, contents(saved), meta_of(saved)


def whole_stack_checkpoint(folder: pathlib.Path, stack, optimizer, arrays) -> Saved:
    """A checkpoint as one device writes it, of a stack's arrays, "values" and slots."""
    on_device = {name: jnp.asarray(array) for name, array in arrays.items()}
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, arrays={}, sources=[DeviceRows(stack, optimizer.slots, lambda: on_device)])
    return checkpoints.open()


def flatten(tree) -> dict:
    """Leaves by readable path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
