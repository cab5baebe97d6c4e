"""What tests of ``jrec serve`` share: a model that answers when it is let go, and Arrow streams."""

import threading
import types

import numpy as np
import pyarrow as pa

from jrec.serving.model import Encoded, Scored


class Fake:
    """A model that answers when it is let go, with a row's "x" as its score."""

    raw_columns, unknown, items, history_cache = ("x",), None, 0, None

    def __init__(self, version="a"):
        self.manifest = types.SimpleNamespace(id=version * 64, run="run", step=1, numbers_by_label={})
        self.go, self.begun, self.batches = threading.Event(), threading.Event(), []

    def encoded(self, columns):
        self.begun.set()
        assert self.go.wait(30)
        if "bad" in columns["x"]:
            raise ValueError("column 'x' holds 'bad'")
        return Encoded(self, np.float32(columns["x"]), {})

    def has_candidates(self, columns):
        return False

    def answer(self, request, k):
        del k
        self.batches.append(request.dense.tolist())
        return Scored(request.dense, self.manifest)


def stream(table, **options):
    """An Arrow table as a stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
