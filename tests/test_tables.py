"""Which tables a configuration compresses, into what shapes, and what it answers to rules that cannot be followed."""

import types

import jax
import pytest

from jrec.app.build import build_layout, build_modules, parameter_counts
from jrec.app.config import TrainConfig
from jrec.app.tables import describe_tables, plan_tables, tables_total, tt_options
from jrec.data.schema import CategoricalFeature, Table
from jrec.errors import ConfigError
from jrec.ops.tt import TTShape
from jrec.run.step import compile_run

ROWS = {"country": 200, "user": 100_000, "item": 30_000, "tiny": 3, "unread": 10**6}


def schema(rows=ROWS):
    features = [
        CategoricalFeature(name=f"f_{n}", table=n, max_length=1, fixed_length=True, weighted=False)
        for n in rows
        if n != "unread"
    ]
    return types.SimpleNamespace(tables=[Table(name=n, rows=r) for n, r in rows.items()], categorical=features)


def config(tables, **model):
    return TrainConfig.from_dict({"data": {"path": "d"}, "tables": tables, "model": model})


def placed(tables, **model):
    plan = plan_tables(config(tables, **model), schema())
    assert [t.name for t in plan.tables] == [n for n in ROWS if n != "unread"]
    return {t.name: t for t in plan.tables}, plan.notes


@pytest.mark.parametrize(
    ("rules", "compressed"),
    [
        ({}, set()),
        ({"tt": {"largest": 1}}, {"user"}),
        ({"tt": {"largest": 2}}, {"user", "item"}),
        ({"tt": {"min_rows": 30_000}}, {"user", "item"}),
        ({"tt": {"min_rows": 30_001}}, {"user"}),
        ({"tt": {"largest": 1, "min_rows": 30_000}}, {"user", "item"}),
        ({"tt": {"largest": 1}, "overrides": {"user": {"tier": "sharded"}}}, set()),
        ({"tt": {"rank": 4}, "overrides": {"item": {"tier": "tt"}}}, {"item"}),
    ],
)
def test_rules_and_overrides_choose_tables_among_those_that_features_read(rules, compressed):
    tables, notes = placed(rules)
    assert {name for name, t in tables.items() if t.tier == "tt"} == compressed
    assert not notes


def test_shapes_are_those_of_the_search_unless_an_override_gives_its_own():
    rules = {
        "tt": {"rank": 6, "cores": 2, "largest": 2, "dtype": "bfloat16"},
        "overrides": {
            "item": {"ranks": [4, 8], "row_factors": [30, 25, 40], "dim_factors": [2, 4, 2]},
            "country": {"tier": "tt", "rank": 3, "cores": 4},
        },
    }
    tables, notes = placed(rules)
    assert tables["user"].tt_shape == TTShape.search(100_000, 16, num_cores=2, ranks=6)
    assert tables["item"].tt_shape == TTShape(
        rows=30_000, dim=16, row_factors=(30, 25, 40), dim_factors=(2, 4, 2), ranks=(4, 8)
    )
    assert tables["country"].tt_shape == TTShape.search(200, 16, num_cores=4, ranks=(3, 3, 3))
    assert {t.dtype for t in tables.values() if t.tier == "tt"} == {"bfloat16"}
    assert tables["tiny"].dtype == "float32"
    assert not notes


def test_a_selected_table_takes_at_most_the_ranks_it_needs_and_says_so():
    tables, notes = placed({"tt": {"rank": 100, "largest": 1}})
    shape = tables["user"].tt_shape
    assert shape.max_ranks[0] < 100 < shape.max_ranks[1]
    assert shape.ranks == (shape.max_ranks[0], 100)
    assert f"ranks [{shape.max_ranks[0]}, 100] instead of [100, 100]" in notes["user"]


def test_a_selected_table_whose_cores_are_no_smaller_stays_whole_and_says_so():
    tables, notes = placed({"tt": {"rank": 8, "largest": 4}})
    assert tables["tiny"].tier == "sharded"
    assert "stays whole: cores of ranks" in notes["tiny"]
    assert tables["country"].tier == "tt"


def parts(tables, **model):
    """(tier, first row, rows) by table and part."""
    plan = plan_tables(config(tables, **model), schema())
    return {(t.name, t.tier): (t.first_row, t.rows, t.table_rows) for t in plan.tables}, plan.notes


def test_the_first_rows_of_tensor_train_tables_stay_whole_where_that_is_asked_for():
    rules = {"tt": {"largest": 2, "rank": 4, "whole_rows": 500}, "overrides": {"item": {"whole_rows": 0}}}
    found, notes = parts(rules, table_dtype="bfloat16")
    assert found == {
        ("country", "sharded"): (0, 200, 200),
        ("user", "sharded"): (0, 500, 100_000),
        ("user", "tt"): (500, 99_500, 100_000),
        ("item", "tt"): (0, 30_000, 30_000),
        ("tiny", "sharded"): (0, 3, 3),
    }
    assert not notes
    layout = build_layout(config(rules), schema())
    assert layout.stacks["tt_user"].tt_shape == TTShape.search(99_500, 16, ranks=4)
    assert layout.order == ("f_country", "f_user", "f_item", "f_tiny")
    rules["overrides"] = {"user": {"tier": "tt", "whole_rows": 7, "rank": 5}}
    found, _ = parts(rules | {"tier": "host"})
    assert (found["user", "host"], found["user", "tt"]) == ((0, 7, 100_000), (7, 99_993, 100_000))


def test_a_selected_table_that_whole_rows_leave_too_little_of_stays_whole_and_says_so():
    found, notes = parts({"tt": {"largest": 4, "rank": 8, "whole_rows": 190}})
    assert found["country", "sharded"] == (0, 200, 200)
    assert "stays whole: cores of ranks [" in notes["country"]
    assert "its rows from 190 on have 160" in notes["country"]
    assert "stays whole: tables.tt.whole_rows is 190, and it has 3 rows" in notes["tiny"]
    assert ("user", "tt") in found


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"overrides": {"usr": {"tier": "tt"}}}, ["tables.overrides.usr", "no table of that name", "user"]),
        (
            {"overrides": {"country": {"tier": "tt", "rank": 64}}},
            ["tables.overrides.country", "ranks[0] is 64, but 10 already", "[10, "],
        ),
        (
            {"overrides": {"user": {"tier": "tt", "ranks": [8]}}},
            ["tables.overrides.user", "3 row_factors need", "2 ranks"],
        ),
        (
            {"overrides": {"user": {"tier": "tt", "row_factors": [10, 10], "dim_factors": [4, 4]}}},
            ["tables.overrides.user", "hold 100 rows, but the table has 100,000"],
        ),
        ({"overrides": {"user": {"tier": "sharded", "rank": 8}}}, ["user.rank shapes", "tier is 'sharded'"]),
        ({"overrides": {"user": {"rank": 8, "ranks": [8, 8]}}}, ["user.rank is 8 and", "ranks is [8, 8]; set one"]),
        ({"overrides": {"user": {"row_factors": [400, 400]}}}, ["row_factors is set alone"]),
        ({"tt": {"cache": {"rows": 5, "fraction": 0.1}}}, ["cache.rows is 5", "fraction 0.1; set one"]),
        (
            {"overrides": {"user": {"tier": "sharded", "whole_rows": 8}}},
            ["user.whole_rows = 8 keeps", "user.tier is 'sharded'"],
        ),
        (
            {"overrides": {"tiny": {"tier": "tt", "whole_rows": 3}}},
            ["tables.overrides.tiny.whole_rows is 3", "has 3 rows", "none are left for cores"],
        ),
        (
            {"tt": {"largest": 1}, "overrides": {"user": {"whole_rows": 200_000}}},
            ["tables.overrides.user.whole_rows is 200000", "has 100,000 rows"],
        ),
        (
            {"tt": {"whole_rows": 500}, "overrides": {"country": {"tier": "tt"}}},
            ["tables.tt.whole_rows is 500", "'country' has 200 rows", "set tables.overrides.country.whole_rows"],
        ),
        ({"initial_bound": 0}, ["tables.initial_bound is 0", "at least 1e-06"]),
        ({"overrides": {"user": {"initial_bound": 2e4}}}, ["user.initial_bound is 20000", "at most 10000"]),
        ({"tt": {"whole_rows": -1}}, ["tables.tt.whole_rows is -1", "at least 0"]),
        ({"tt": {"cores": 5}}, ["tables.tt.cores is 5", "at most 4"]),
        ({"tt": {"rank": 0}}, ["tables.tt.rank is 0", "at least 1"]),
        ({"tt": {"ranks": 8}}, ["unknown key tables.tt.ranks", "tables.tt.rank"]),
        ({"tt": {"initializer": "normal"}}, ["tables.tt.initializer must be one of", "sampled_gaussian"]),
        ({"tt": {"dtype": "float16"}}, ["tables.tt.dtype must be one of"]),
        ({"tt": {"contraction": "naive"}}, ["tables.tt.contraction must be one of", "sample"]),
        (
            {"tt": {"contraction": "sample", "cache": {"rows": 5}}},
            ["'sample', which cached rows", "no tables.tt.cache"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_key_value_and_bound(rules, words):
    with pytest.raises(ConfigError) as caught:
        build_layout(config(rules), schema())
    for word in words:
        assert word in str(caught.value)


def test_cores_follow_the_tables_dtype_and_half_precision_needs_another():
    tables, _ = placed({"tt": {"largest": 1}}, table_dtype="bfloat16")
    assert tables["user"].dtype == tables["tiny"].dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"table_dtype is 'float16'.*tables.tt.dtype"):
        placed({"tt": {"largest": 1}}, table_dtype="float16")
    tables, _ = placed({"tt": {"largest": 1, "dtype": "bfloat16"}}, table_dtype="float16")
    assert (tables["user"].dtype, tables["tiny"].dtype) == ("bfloat16", "float16")


def test_a_tables_own_initial_bound_goes_before_that_of_all():
    rules = {"initial_bound": 0.5, "tt": {"largest": 1, "whole_rows": 10}, "overrides": {"item": {"initial_bound": 2}}}
    parts = [(t.name, t.first_row, t.initial_bound) for t in plan_tables(config(rules), schema()).tables]
    assert {("user", 0, 0.5), ("user", 10, 0.5), ("item", 0, 2.0), ("tiny", 0, 0.5)} <= set(parts)
    assert {t.initial_bound for t in placed({})[0].values()} == {None}


def test_caches_by_rows_or_fraction_never_pass_their_table():
    def cached(cache, **overrides):
        whole = config({"tt": {"largest": 3, "rank": 4, "cache": cache}, "overrides": overrides})
        return {n: c.cache_rows for n, c in tt_options(whole, build_layout(whole, schema())).caches.items()}

    assert cached({}) == {}
    assert cached({"rows": 500}) == {"user": 500, "item": 500, "country": 200}
    assert cached({"fraction": 0.0001}) == {"user": 10, "item": 3}  # a 10,000th of 200 rows is none
    whole = config({"tt": {"largest": 1, "cache": {"rows": 9, "refresh_every": 0, "warmup_steps": 7}}})
    (cache,) = tt_options(whole, build_layout(whole, schema())).caches.values()
    assert tt_options(whole, build_layout(whole, schema())).contraction is None
    by_bag = config({"tt": {"largest": 1, "contraction": "sample"}})
    assert tt_options(by_bag, build_layout(by_bag, schema())).contraction == "sample"
    assert (cache.refresh_every, cache.warmup_steps) == (None, 7)


def test_tables_are_described_with_what_they_hold_and_what_that_saves():
    rules = {"tt": {"largest": 1, "rank": 8, "cache": {"rows": 10}}}
    described = describe_tables(config(rules, table_dtype="bfloat16"), schema())
    shape = TTShape.search(100_000, 16, ranks=8)
    user = described["user"]
    assert user["parameters"] == shape.num_parameters + 160
    assert user["bytes"] == 2 * shape.num_parameters + 4 * 160  # cached rows are float32
    assert user["compression"] == pytest.approx(1_600_000 / user["parameters"])
    assert (user["row_factors"], user["ranks"], user["cache_rows"]) == (list(shape.row_factors), [8, 8], 10)
    assert (described["tiny"]["parameters"], described["tiny"]["bytes"]) == (48, 96)
    total = tables_total(described)
    whole = 16 * (200 + 100_000 + 30_000 + 3)
    assert total["uncompressed_parameters"] == whole
    assert total["uncompressed_bytes"] == 2 * whole
    assert total["parameters"] == whole - 1_600_000 + user["parameters"]


def test_a_table_in_parts_is_described_as_one():
    rules = {"tt": {"largest": 1, "rank": 8, "whole_rows": 1000, "dtype": "bfloat16", "cache": {"rows": 10}}}
    described = describe_tables(config(rules), schema())
    assert list(described) == [n for n in ROWS if n != "unread"]
    shape = TTShape.search(99_000, 16, ranks=8)
    user = described["user"]
    assert (user["tier"], user["rows"], user["whole_rows"], user["whole_tier"]) == ("tt", 100_000, 1000, "sharded")
    assert user["parameters"] == 16_000 + shape.num_parameters + 160
    assert user["bytes"] == 4 * 16_000 + 2 * shape.num_parameters + 4 * 160
    assert user["compression"] == pytest.approx(1_600_000 / user["parameters"])
    assert user["row_factors"] == list(shape.row_factors)
    assert tables_total(described)["parameters"] == 16 * (200 + 30_000 + 3) + user["parameters"]


def test_abstract_modules_have_the_structure_of_real_ones_and_no_values():
    of = types.SimpleNamespace(**vars(schema({"user": 5000, "item": 300})), dense=[types.SimpleNamespace(name="age")])
    how = config(
        {"tt": {"rank": 4}, "overrides": {"user": {"tier": "tt"}}}, bottom_mlp=[16], top_mlp=[8, 1], embedding_dim=16
    )
    layout = build_layout(how, of)
    (model, optimizer), (abstract, no_slots) = (build_modules(how, of, layout, 10, abstract=a) for a in (False, True))
    (state, _), (expected, _) = compile_run(model, optimizer), compile_run(abstract, no_slots)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(expected))
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (state, expected)]
    assert shapes[0] == shapes[1]
    assert parameter_counts(model) == parameter_counts(abstract)
