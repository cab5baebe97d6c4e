"""What `repr` of runs, layouts, schemas and results shows: a few lines with tables, rows, bytes and places."""

import dataclasses
import re
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest
import shop_logs
from distribute_cases import DENSE, columns, layout_of, mesh_of, modules, three_tiers

import jrec
from jrec.data.schema import Schema
from jrec.ops import TTShape
from jrec.run.step import StepResults
from jrec.shown import MOST, MOST_IN_NOTEBOOKS, Shown


def table(name, rows, **options):
    return jrec.TableConfig(name=name, rows=rows, dim=8, **options)


def layout(*tables):
    return jrec.EmbeddingLayout.build(tables, [jrec.FeatureConfig(name=t.name, table=t.name) for t in tables])


def notebook(html):
    """The lines above the table that a notebook shows, and its rows of cells; it is well-formed."""
    shown = ET.fromstring(html)
    heads = [shown.text, *(line.tail for line in shown.findall("br"))]
    return heads, [["".join(cell.itertext()) for cell in row] for row in shown.iter("tr")]


def says_the_same(shown):
    """Whether a notebook shows the words of ``repr`` in their order, but for the punctuation of one-liners."""
    heads, rows = notebook(shown._repr_html_())
    words = " ".join([*heads, *(cell for row in rows for cell in row)])
    return re.sub("[:,]", "", words).split() == re.sub("[:,]", "", repr(shown)).split()


def test_a_layout_names_tables_rows_bytes_places_and_readers():
    shape = TTShape.search(10_000, 8, ranks=4)
    tables = layout(
        table("user", 1_000_000, dtype="bfloat16"),
        table("item", 200, tier="host"),
        table("word", 10_000, tier="tt", tt_shape=shape),
    )
    assert repr(tables).splitlines() == [
        f"EmbeddingLayout: 3 tables of 1,010,200 rows, {16_006_400 / 1e6 + shape.num_parameters * 4 / 1e6:.3g} MB",
        "  user  1,000,000 x 8  bfloat16  sharded       16 MB   read by user",
        "  item  200 x 8        float32   host          6.4 kB  read by item",
        f"  word  10,000 x 8     float32   tensor train  {shape.num_parameters * 4 / 1e3:.3g} kB    read by word",
    ]
    assert says_the_same(tables)
    many = repr(layout(*(table(f"t{number}", 10) for number in range(MOST + 5))))
    assert len(many.splitlines()) == MOST + 2
    assert many.endswith("… and 5 more")


def test_a_run_and_its_results_are_a_few_lines():
    with jrec.distribute(*modules(layout_of())) as run:
        step = run.compile()
        for batch in run.feed([columns(0), columns(1)], dense=DENSE):
            _, outputs = step(batch)
        assert repr(run).splitlines()[:3] == [
            "Run: step 2, 1 device",
            "EmbeddingLayout: 3 tables of 430 rows, 13.8 kB",
            "  user  300 x 8  float32  sharded  9.6 kB   read by user",
        ]
        assert says_the_same(run)
        assert repr(run).endswith("read by tags (mean of up to 4)")
        shown = (
            f"StepResults: loss {float(outputs.loss):.6g}, examples 16, logits float32[16], labels float32[16], mask"
        )
        assert repr(outputs).startswith(shown)
        assert says_the_same(outputs)
        assert notebook(outputs._repr_html_())[1][0] == ["loss", f"{float(outputs.loss):.6g}"]


def test_a_run_by_a_plan_says_so_and_what_host_memory_has():
    layout, mesh = layout_of(planned=True), mesh_of(4)
    with jrec.distribute(*modules(layout), mesh=mesh, plan=three_tiers(4, layout_of())) as run:
        assert repr(run).startswith("Run: step 0, 4 devices, rows by a plan, ")
        assert " in host memory so far\n" in repr(run)
        assert "  by plan  " in repr(run)
        assert says_the_same(run)


def test_results_are_shown_while_a_program_is_traced():
    seen = []
    results = StepResults(loss=jax.numpy.float32(1.5), examples=jax.numpy.float32(4), logits=[np.ones(3)])
    jax.jit(lambda one: seen.append(repr(one)))(results)
    assert seen == ["StepResults: loss float32[], examples float32[], logits 1 array"]
    assert repr(results) == "StepResults: loss 1.5, examples 4, logits 1 array"
    assert says_the_same(results)


@pytest.mark.parametrize(("labels", "tasks", "words"), [(True, (), ""), (False, (), ", no labels")])
def test_a_schema_and_a_loaded_run_are_a_few_lines(tmp_path, labels, tasks, words):
    shop_logs.write_log(tmp_path / "log.csv", 400)
    dataset = shop_logs.prepare(tmp_path, tmp_path / "log.csv", "data")
    schema = dataclasses.replace(Schema.load(dataset), labels=labels, tasks=tasks)
    user, item = (schema.table(name).rows for name in ("user", "item"))
    assert repr(schema).splitlines() == [
        f"Schema of shop: train 320, valid 40, test 40 examples{words}; dense: price",
        f"  user  {user} rows  read by user",
        f"  item  {item} rows  read by item, history (up to 5 ids)",
    ]
    assert says_the_same(schema)
    if labels:
        run = jrec.load_run(shop_logs.trained(tmp_path, dataset, "max_steps=1"))
        assert repr(run).splitlines()[:2] == [
            f"LoadedRun of {tmp_path / 'run'}: model.kind 'dlrm', step 1",
            f"EmbeddingLayout: 2 tables of {user + item} rows, {(user + item) * 32 / 1e3:.3g} kB",
        ]
        assert says_the_same(run)


def test_a_notebook_shows_names_of_a_log_as_text():
    name = '<script>alert("&")</script>'
    shown = layout(table(name, 10))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert says_the_same(layout(table(name, 10)))
    heads, _ = notebook(Shown((name,)).html())
    assert heads == [name]


def test_a_notebook_shows_no_more_tables_than_a_reader_scrolls():
    _, rows = notebook(layout(*(table(f"t{number}", 10) for number in range(400)))._repr_html_())
    assert len(rows) == MOST_IN_NOTEBOOKS + 1
    assert rows[-1] == [f"… and {400 - MOST_IN_NOTEBOOKS} more"]
