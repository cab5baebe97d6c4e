"""Plain Python twins of preparation, and a reader of finished datasets, for the tests of ``jrec prepare``."""

import collections
import itertools
import json
import math

import numpy as np
import pyarrow.parquet as pq

from jrec.data.blocks import ListColumn, ShardReader
from jrec.data.schema import Schema

SPLITS = ("train", "valid", "test")


def read_dataset(folder):
    """(schema, all examples as columns in order of the splits; lists as lists of lists)."""
    schema = Schema.load(folder)
    columns = collections.defaultdict(list)
    for split in SPLITS:
        for shard in schema.splits[split].shards:
            reader = ShardReader(folder, shard)
            for block in range(len(reader)):
                for name, column in reader.read(block).items():
                    if isinstance(column, ListColumn):
                        ends = column.offsets
                        lists = (column.values[a:b].tolist() for a, b in itertools.pairwise(ends))
                        columns[name].extend(lists)
                    else:
                        columns[name].extend(column.tolist())
    return schema, dict(columns)


def read_vocabulary(folder, table):
    """By row: the value (None for the OOV row), and the counts."""
    content = pq.read_table(folder / table.vocabulary).to_pydict()
    assert content["row"] == list(range(table.rows))
    counts = np.load(folder / table.counts, allow_pickle=False)
    assert content["count"] == counts.tolist()
    return content["value"], counts.tolist()


def bounds(rows, fractions=(0.8, 0.1, 0.1)):
    train = math.floor(rows * fractions[0] + 1e-6)
    return train, math.floor(rows * (fractions[0] + fractions[1]) + 1e-6), rows


def check_table(folder, schema, table_name, values, columns, train_rows, min_count):
    """Checks a table against the raw values of its features.

    Args:
      values: by feature, per example in order of the dataset, the raw text or the list of raw texts.
      columns: the dataset's columns.
    """
    table = schema.table(table_name)
    seen = collections.Counter()
    for column in values.values():
        for one in column[:train_rows]:
            seen.update(one if isinstance(one, list) else (one,))
    vocabulary, counts = read_vocabulary(folder, table)
    kept = {v: c for v, c in seen.items() if c >= min_count}
    assert table.rows == len(kept) + 1
    assert counts == sorted(counts, reverse=True)
    assert vocabulary[table.oov_row] is None
    assert counts[table.oov_row] == sum(c for c in seen.values() if c < min_count)
    row_of = {v: i for i, v in enumerate(vocabulary) if v is not None}
    assert {v: counts[i] for v, i in row_of.items()} == kept
    for feature, column in values.items():
        oov = table.oov_row
        expected = [
            [row_of.get(v, oov) for v in one] if isinstance(one, list) else row_of.get(one, oov) for one in column
        ]
        assert columns[feature] == expected


def provenance(folder):
    return json.loads((folder / "schema.json").read_text())["provenance"]
