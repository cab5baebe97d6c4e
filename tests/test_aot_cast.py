"""The cast compiles for an H200 to a sort and two launches after it, and what was compiled gives the right cast."""

import functools
import itertools
import re

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from cast_cases import CUTS, KINDS, MORE_CUTS, MORE_SHAPES, SHAPES, _assert_identical, _draw, check_cut
from grids import some_of

from jrec import ops

pytestmark = [pytest.mark.aot, aot.needs_environment()]

BAGS, LENGTH = 16_384, 20
LOOKUPS = BAGS * LENGTH
MORE_BAGS = 409_600  # of 80 lookups: more than a trip of 2048 warps takes


def _launches(hlo):
    """(name, is it a Mosaic kernel) of what the entry computation launches, in order."""
    entry = hlo[hlo.index("\nENTRY ") :]
    quiet = "parameter|constant|get-tuple-element|tuple|bitcast"
    lines = re.findall(r"^ +(?:ROOT )?(%[\w.-]+) = .*?[})\]] ([a-z][\w-]*)\((.*)$", entry, re.MULTILINE)
    names = [(re.search(r'op_name="([^"]*)"', rest), op, rest) for _, op, rest in lines if not re.fullmatch(quiet, op)]
    return [(f"{op} {name[1] if name else '?'}", '"mosaic_gpu' in rest) for name, op, rest in names]


@pytest.mark.parametrize(("rows", "key"), [(200, "ui8"), (60_000, "ui16"), (1_000_000, "i32")])
def test_the_sort_is_one_that_cub_takes(rows, key):
    """One key, one value and one comparison. XLA would sort anything else by itself, in about a hundred kernels."""
    cast = jax.jit(functools.partial(ops.tensor_cast, num_rows=rows, implementation="pallas"))
    text = cast.trace(aot.shape((BAGS, LENGTH), jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    ((operands, compared),) = re.findall(r'"stablehlo\.sort"\((.*?)\).*?\(\{(.*?)\}\)', text, re.DOTALL)
    assert operands.count("%") == 2
    assert re.findall(r"stablehlo\.compare LT, .*tensor<(\w+)>, tensor<\w+>", compared) == [key]
    assert compared.count("stablehlo") == 2  # the comparison, and what returns it


SIZES = (200, 60_000, 1_000_000, 2**31 - 1)
FORMS = ("padded", "ragged", "padded, many")
# Keys of each width in every form.
SOME_FORMS = [*((form, SIZES[k]) for k, form in enumerate(FORMS)), ("ragged", SIZES[3]), ("padded", SIZES[1]),
              ("padded, many", SIZES[0])]  # fmt: skip


@pytest.mark.parametrize(("form", "rows"), some_of(itertools.product(FORMS, SIZES), *SOME_FORMS))
def test_two_launches_follow_the_sort(form, rows):
    bags, length = (MORE_BAGS, 80) if form == "padded, many" else (BAGS, LENGTH)
    ids = aot.shape((bags * length,) if form == "ragged" else (bags, length), jnp.int32)
    offsets = aot.shape((bags + 1,), jnp.int32) if form == "ragged" else None
    cast = functools.partial(ops.tensor_cast, num_rows=rows, implementation="pallas")
    compiled, modules = aot.compile_checked(f"cast {form} {rows}", cast, ids, offsets)
    launches = _launches(compiled.as_text())
    (sort,) = [i for i, (name, _) in enumerate(launches) if name.endswith("/sort")]
    print(*(name for name, _ in launches), sep="\n")  # noqa: T201, shown by -s
    assert [mosaic for _, mosaic in launches[sort + 1 :]] == [True, True]
    assert len(launches[:sort]) == 1
    assert set(modules) == {"cast_count", "cast_write"} | ({"cast_keys"} if form == "ragged" else set())
    # The keys, for ragged lookups their bags, and the counts; the positions and all the rest are results.
    width = 1 if rows < 2**8 else 2 if rows < 2**16 else 4
    kept = ids.size * (width + (4 if form == "ragged" else 0))
    assert compiled.memory_analysis().temp_size_in_bytes <= kept + 2048 * 4 + 4096


def test_a_given_capacity_bounds_what_is_written():
    ids = aot.shape((BAGS, LENGTH), jnp.int32)
    cast = functools.partial(ops.tensor_cast, num_rows=1_000_000, unique_capacity=1000, implementation="pallas")
    compiled, _ = aot.compile_checked("cast of 1000 unique rows", cast, ids)
    assert compiled.memory_analysis().output_size_in_bytes <= 2 * 4 * LOOKUPS + 2 * 4 * 1001 + 1024


# Every shape with two kinds of ids, and every kind with three shapes.
SOME_KINDS = [
    (case, KINDS[(number + further) % len(KINDS)])
    for number, case in enumerate(SHAPES + MORE_SHAPES)
    for further in (0, 3)
]


@pytest.mark.parametrize(
    ("case", "kind"), some_of(itertools.product(SHAPES + MORE_SHAPES, KINDS), *SOME_KINDS), ids=str
)
def test_numbers(case, kind):
    ids, offsets = _draw(case, np.random.default_rng(case.rows % 1000), kind)
    with aot.ptx_machine_launches() as modules:
        got = ops.tensor_cast(
            jnp.asarray(ids),
            None if offsets is None else jnp.asarray(offsets),
            num_rows=case.rows,
            unique_capacity=case.unique_capacity,
            implementation="pallas",
        )
    assert len(modules) == (2 if offsets is None else 3)
    _assert_identical(got, reference.tensor_cast(ids, offsets, case.rows, case.unique_capacity))


@pytest.mark.parametrize(("runs", "unique_capacity"), CUTS + MORE_CUTS)
def test_every_cut(runs, unique_capacity):
    with aot.ptx_machine_launches() as modules:
        check_cut(runs, unique_capacity)
    assert len(modules) == 2
