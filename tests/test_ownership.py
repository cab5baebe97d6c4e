"""Arrays that a program hands over and goes on writing to: jrec has taken what it needs of them, at every door."""

import dataclasses
import itertools

import jax
import numpy as np
import pyarrow as pa
import pytest
from distribute_cases import DENSE, columns, layout_of, mesh_of, modules, three_tiers
from grids import some_of
from growing_cases import growing
from growing_cases import layout_of as growing_layout

import jrec
from jrec import ops
from jrec.data import GrowingVocabulary, Growth, pack_batch
from jrec.data.blocks import ListColumn
from jrec.data.packing import kept_orders
from jrec.host import HostTable
from jrec.run.options import HostOptions

STEPS, SIZE = 5, 64
ON_HOST = [("user", "host")]
PLACES = {
    "device": lambda: jrec.distribute(*modules(layout_of())),
    "in place": lambda: jrec.distribute(*modules(layout_of(tiers=ON_HOST))),
    "pipeline": lambda: jrec.distribute(*modules(layout_of(tiers=ON_HOST)), host=HostOptions(pipeline="on")),
    "mesh": lambda: jrec.distribute(*modules(layout_of()), mesh=mesh_of(2)),
    "three tiers": lambda: jrec.distribute(*modules(layout_of()), mesh=mesh_of(2), plan=three_tiers(2, layout_of())),
    "growing": lambda: jrec.distribute(*modules(growing_layout()), growing=growing()),
}


def examples(number):
    return {**columns(number, SIZE), "seen": np.random.default_rng(number).integers(0, 60, SIZE)}


def other_types(arrays):
    """float64, int32 and bool in the place of what packing would take as it is."""
    changed = {"label": np.bool_, "price": np.float64, "user": np.int32, "tags": np.int32, "seen": np.uint16}
    return {name: array.astype(changed.get(name, array.dtype)) for name, array in arrays.items()}


def ragged(arrays):
    """Lists of the tags, all of one length; values and offsets are arrays that can be written to."""
    absent_as_ids = np.maximum(arrays.pop("tags"), 0)
    offsets = np.arange(SIZE + 1, dtype=np.int64) * absent_as_ids.shape[1]
    return {**arrays, "tags.values": absent_as_ids.reshape(-1), "tags.offsets": offsets}


def as_lists(arrays):
    return {**arrays, "tags": ListColumn(arrays["tags.offsets"], arrays["tags.values"])}


def as_arrow(arrays):
    """An Arrow table on the memory of the arrays."""
    tags = pa.FixedSizeListArray.from_arrays(pa.array(arrays["tags"].reshape(-1)), arrays["tags"].shape[1])
    return pa.table({name: pa.array(array) for name, array in arrays.items() if name != "tags"} | {"tags": tags})


def same(arrays):
    return arrays


def as_masked(arrays):
    return {**arrays, "tags": np.ma.MaskedArray(arrays["tags"], arrays["tags"] < 0)}


KINDS = {
    "arrays": (same, same),
    "other types": (other_types, same),
    "lists": (ragged, as_lists),
    "Arrow": (same, as_arrow),
    "masked": (same, as_masked),
}


def batch_of(layout, number):
    return pack_batch(layout, examples(number), dense=DENSE)


def copies(tree):
    """A batch of copies is the program's own: not one that jrec has packed."""
    return jax.tree.map(np.copy, tree)


def written_over(old, new):
    """The old arrays, of a dictionary or a batch, with the content of the new ones."""
    jax.tree.map(np.copyto, old, new)
    return old


def one_buffer(made):
    buffer = made[0]
    return (written_over(buffer, one) for one in [copies(buffer), *made[1:]])


def two_buffers(made):
    buffers = itertools.cycle(made[:2])
    kept = [copies(one) for one in made]
    return (written_over(buffer, one) for buffer, one in zip(buffers, kept, strict=False))


def shuffled_in_place(made):
    """Two epochs over the same arrays, whose examples change places in between."""
    for _ in range(2):
        yield from made
        for number, one in enumerate(made):
            order = np.random.default_rng(number).permutation(SIZE)
            for name, array in one.items():
                if not name.startswith("tags."):
                    array[:] = array[order]


def batches_shuffled_in_place(made):
    for _ in range(2):
        yield from made
        for one in made:
            for leaf in (one.dense, one.labels):
                leaf[:] = leaf[::-1].copy()


REUSES = {"one buffer": one_buffer, "two buffers": two_buffers, "in place": shuffled_in_place}


def losses(run, step, items, **options):
    return [float(step(batch)[0]) for batch in run.feed(items, **options)]


@pytest.mark.parametrize("place", some_of(PLACES, "pipeline", "in place", "three tiers", "growing"))
def test_a_feed_trains_the_examples_that_its_items_held_when_they_were_read(place):
    def trained(kept):
        """Losses by what was fed; ``kept`` sees every item before it is fed."""
        out = {}
        with PLACES[place]() as run:
            step = run.compile()
            for (kind, (made, given)), (reuse, reused) in itertools.product(KINDS.items(), REUSES.items()):
                items = reused([made(examples(number)) for number in range(STEPS)])
                out[kind, reuse] = losses(run, step, (given(kept(item)) for item in items), dense=DENSE)
            if place != "growing":  # which packed batches cannot be
                wait = {} if place == "device" else {"packed batches": same}
                all_reuses = {**REUSES, "in place": batches_shuffled_in_place}
                for (kind, made), (reuse, reused) in itertools.product(
                    {"batches": copies, **wait}.items(), all_reuses.items()
                ):
                    items = reused([made(batch_of(run.layout, number)) for number in range(STEPS)])
                    out[kind, reuse] = losses(run, step, map(kept, items), workers=3)
            out["no threads"] = losses(
                run,
                step,
                (kept(one) for one in one_buffer([examples(n) for n in range(STEPS)])),
                dense=DENSE,
                workers=0,
            )
        return out

    fed, of_copies = trained(same), trained(copies)
    assert [what for what, values in fed.items() if values != of_copies[what]] == []


def memory_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]


def shared(tree, other):
    return [(a.dtype, a.shape) for a in memory_of(tree) for b in memory_of(other) if np.shares_memory(a, b)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_jrec_has_not_packed_is_copied_since_its_step_may_still_read_it(workers):
    with PLACES["device"]() as run:
        step, packed = run.compile(), batch_of(layout_of(), 0)
        given = [copies(packed), dataclasses.replace(packed, labels=packed.labels[:]), packed]
        for fed, batch in zip(run.feed(given, workers=workers), given, strict=True):
            assert (shared(fed.batch, batch) == []) == (batch is not packed)
            jax.tree.map(np.testing.assert_array_equal, fed.batch, batch)
            step(fed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_batch_has_arrays_of_its_own(kind):
    made, given = KINDS[kind]
    arrays = made(examples(0))
    extras = ("weight", "group")
    arrays["weight"], arrays["group"] = np.ones(SIZE, np.float32), np.arange(SIZE, dtype=np.int32)
    batch = pack_batch(layout_of(), given(arrays), dense=DENSE, extras=extras, cast="host")
    assert shared(batch, arrays) == []


def test_predictions_are_the_programs_own():
    with PLACES["device"]() as run:
        arrays = examples(0)
        logits = run.predict(arrays, dense=DENSE)
        first = logits.copy()
        logits[:] = 7
        np.testing.assert_array_equal(run.predict(arrays, dense=DENSE), first)
        rows = run.rows("user", arrays["user"])
        first = rows.copy()
        rows[:] = 7
        np.testing.assert_array_equal(run.rows("user", arrays["user"]), first)


def test_orders_of_a_feed_may_be_written_over():
    order = np.arange(300, dtype=np.uint32)
    with PLACES["device"]() as run:
        step = run.compile()
        feed = run.feed(map(examples, range(2)), dense=DENSE, orders={"user": order})
        order[:] = 0
        expected = pack_batch(run.layout, examples(0), dense=DENSE)
        fed = next(feed)
        (name,) = expected.bags
        np.testing.assert_array_equal(fed.batch.bags[name].ids, expected.bags[name].ids)
        step(fed)


def test_only_orders_that_nobody_can_write_to_are_kept_as_they_are(tmp_path):
    order = np.arange(5, dtype=np.uint32)
    np.save(tmp_path / "order.npy", order)
    mapped, view = np.load(tmp_path / "order.npy", mmap_mode="r"), order[:]
    view.flags.writeable = False
    kept = kept_orders({"mapped": mapped, "view": view, "own": order})
    assert [
        np.shares_memory(kept[name], one) for name, one in (("mapped", mapped), ("view", view), ("own", order))
    ] == [
        True,
        False,
        False,
    ]


def test_a_table_in_host_memory_keeps_no_array_that_it_was_given_or_gave():
    (stack,) = layout_of(tiers=ON_HOST).host_stacks
    words, rows = np.array([[1, 2]], np.uint32), np.arange(3, dtype=np.int32)
    table = HostTable(stack, ops.Adagrad(learning_rate=0.1), words)
    values, slots = table.fetch(rows)
    table.store(rows, values, slots)
    expected = table.read(rows)
    for array in (words, rows, values, *slots.values(), table.read(rows), table.made_rows()):
        array[...] = 0
    np.testing.assert_array_equal(table.read(np.arange(3)), expected)
    np.testing.assert_array_equal(table.keys, [[1, 2]])


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_growing_vocabulary_keeps_no_array_that_it_was_given_or_gave(evict):
    growth = Growth(capacity=8, admit_after=1, evict=evict)
    vocabulary, other = GrowingVocabulary(growth), GrowingVocabulary(growth)
    keys, rng = np.zeros(6, np.uint64), np.random.default_rng(0)

    def spoil(*arrays):
        for array in arrays:
            array[:] = 3

    for _ in range(5):
        keys[:] = rng.integers(10, 25, 6)
        rows, new = vocabulary.map(keys)
        own_rows, own_new = other.map(keys.copy())
        np.testing.assert_array_equal(rows, own_rows)
        np.testing.assert_array_equal(new.keys, own_new.keys)
        spoil(rows, new.rows, new.keys, keys, vocabulary.keys, *vocabulary.state().values())
    for clock in range(6):
        for array, expected in zip(
            vocabulary.at(clock).state().values(), other.at(clock).state().values(), strict=True
        ):
            np.testing.assert_array_equal(array, expected)
    state = other.state()
    vocabulary.restore(state)
    spoil(*state.values())
    np.testing.assert_array_equal(vocabulary.keys, other.keys)
