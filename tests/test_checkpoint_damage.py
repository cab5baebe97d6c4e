"""Random bits of checkpoints of every tier are flipped: none is read without a word."""

import re

import jax
import mesh_runs
import numpy as np
import pytest
from checkpoint_cases import make, save
from checkpoint_state import contents, whole_stack_checkpoint
from jax.sharding import Mesh
from mesh_plans import some_plan
from mesh_runs import OPTIMIZERS

from jrec.checkpoint import Checkpoints, Saved
from jrec.errors import CheckpointError
from jrec.run.placement.checkpoint import MeshSource, saved_stack


def of_tier(tier, folder):
    """A checkpoint with a dense array, and pieces of several times where the tier has them."""
    checkpoints, rng = Checkpoints(folder / "c", chunk_bytes=8000), np.random.default_rng(0)
    if tier == "mesh":
        layout, optimizer = mesh_runs.layout(tt=False), OPTIMIZERS["rowwise_adagrad"]
        (stack,) = layout.members
        plan, mesh = some_plan(2, seed=1, replicate=0.3, tt=False), Mesh(np.array(jax.devices()[:2]), ("devices",))
        rows = {"values": rng.normal(size=(stack.rows, stack.dim)).astype(np.float32), "sum": np.ones(stack.rows)}
        one = whole_stack_checkpoint(folder / "one", stack, optimizer, rows)
        placed = saved_stack(one, stack, plan, mesh, optimizer)
        sources = [MeshSource(stack, plan, mesh, optimizer, lambda: placed)]
        checkpoints.save(3, arrays={"w": np.arange(9.0)}, sources=sources, meta={"loader": {"position": 3}})
        return checkpoints.open().folder
    tables = make(tier, rows=(300,))
    for step, count in ((1, 600), (2, 20), (3, 20)):
        tables.write(rng, rows=count)
        save(checkpoints, tables, step)
    return checkpoints.open().folder


@pytest.mark.parametrize("tier", ["device", "host", "mesh"])
@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_read_without_a_word(tier, flips, tmp_path):
    folder, rng = of_tier(tier, tmp_path), np.random.default_rng(7)
    expected = contents(Saved(folder)), Saved(folder).manifest
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = 0
    for _ in range(flips):
        path = files[int(rng.integers(len(files)))]
        whole = path.read_bytes()
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        error = ""
        try:
            assert (contents(Saved(folder)), Saved(folder).manifest) == expected  # as of a group's attributes
        except CheckpointError as raised:
            error = str(raised)
        if error:
            assert re.search(rf"{re.escape(str(path))} (is damaged|is of format)", error)
            named += 1
        path.write_bytes(whole)
    groups = sum(path.name == "zarr.json" and path.parent.parent.name == "tables" for path in files)
    assert named >= flips * (1 - groups / len(files)) * 0.8
