"""Requests of `jrec serve` before they reach a model: scored together, refused when too many wait, bounded."""

import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from serve_cases import Fake, stream

from jrec.serving.http import bodies
from jrec.serving.http.arrow import UnreadableError, _is_compressed, table_of
from jrec.serving.http.batcher import Batcher, Limits, QueueFullError, Rows, StoppingError, TooManyScoresError
from jrec.serving.http.memory import Held, Memory
from jrec.serving.http.metrics import Metrics
from jrec.serving.model import Best, OutdatedError, Scored


def rows(*values):
    return Rows(columns={"x": list(values)}, count=len(values))


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def batcher(fake):
    made = Batcher(lambda: fake, Limits(batch_rows=4, delay=0, queue_rows=6), Metrics())
    yield made
    fake.go.set()
    made.stop()


def test_requests_that_wait_are_scored_together_up_to_the_batch(fake, batcher):
    first = batcher.submit(rows(1))
    assert fake.begun.wait(30)
    futures = [batcher.submit(one) for one in (rows(2, 3), rows(4), rows(5), rows(6))]
    assert (batcher.queued_requests, batcher.queued_rows) == (4, 5)
    fake.go.set()
    assert [future.result(30).scores.tolist() for future in [first, *futures]] == [[1], [2, 3], [4], [5], [6]]
    assert fake.batches == [[1], [2, 3, 4, 5], [6]]


def test_a_request_larger_than_a_batch_is_scored_alone(fake, batcher):
    fake.go.set()
    assert batcher.submit(rows(*range(9))).result(30).scores.tolist() == list(range(9))


def test_a_bad_request_does_not_harm_those_beside_it(fake, batcher):
    batcher.submit(rows(0))
    assert fake.begun.wait(30)
    good, bad, after = (batcher.submit(one) for one in (rows(1), rows("bad"), rows(2)))
    fake.go.set()
    assert (good.result(30).scores, after.result(30).scores) == (1, 2)
    with pytest.raises(ValueError, match="holds 'bad'"):
        bad.result(30)


def test_the_first_request_waits_for_others_where_that_is_asked_for(fake):
    fake.go.set()
    batcher = Batcher(lambda: fake, Limits(batch_rows=2, delay=20.0, queue_rows=6), Metrics())
    begin = time.monotonic()
    futures = [batcher.submit(rows(1)), batcher.submit(rows(2))]
    assert [future.result(10).scores.tolist() for future in futures] == [[1], [2]]
    assert time.monotonic() - begin < 10  # a full batch waits no longer
    assert fake.batches == [[1, 2]]
    left = batcher.submit(rows(3))
    batcher.stop()  # nor does the end
    assert left.result(0).scores == 3
    assert time.monotonic() - begin < 15


def test_requests_get_as_many_items_as_each_asks_for(fake, batcher):
    asked = []

    def best(encoded, k):
        asked.append(k)
        lines = [[10 * int(x) + rank for rank in range(k)] for x in encoded.dense]
        return Best([[float(item) for item in line] for line in lines], lines, fake.manifest)

    fake.items, fake.answer = 10, best
    first = batcher.submit(Rows(columns={"x": [1]}, count=1, k=1))
    assert fake.begun.wait(30)
    others = [batcher.submit(Rows(columns={"x": x}, count=len(x), k=k)) for x, k in (([2, 3], 3), ([4], 2))]
    fake.go.set()
    assert first.result(30).items == [[10]]
    assert [future.result(30).items for future in others] == [[[20, 21, 22], [30, 31, 32]], [[40, 41]]]
    assert others[1].result(30).scores == [[40.0, 41.0]]
    assert asked == [1, 3]


def test_bad_requests_cost_the_others_no_further_scoring(fake, batcher):
    first = batcher.submit(rows(0))
    assert fake.begun.wait(30)
    others = [batcher.submit(rows(one)) for one in (1, "bad", 2, "bad")]
    fake.go.set()
    assert [first.result(30).scores, others[0].result(30).scores, others[2].result(30).scores] == [0, 1, 2]
    assert fake.batches == [[0], [1, 2]]
    for one in (others[1], others[3]):
        with pytest.raises(ValueError, match="holds 'bad'"):
            one.result(30)


def test_a_score_that_is_no_number_is_an_error_of_its_own_request(fake, batcher):
    first = batcher.submit(rows(0))
    assert fake.begun.wait(30)
    others = [batcher.submit(one) for one in (rows(1), rows(2, np.nan), rows(np.inf))]
    fake.go.set()
    assert (first.result(30).scores, others[0].result(30).scores) == (0, 1)
    for one, row in ((others[1], 1), (others[2], 0)):
        with pytest.raises(ValueError, match=f"the score of row {row} is not finite"):
            one.result(30)


def test_requests_of_a_model_that_ranks_are_cut_by_what_they_score(fake):
    fake.go.set()
    fake.items, seen = 10, []

    def best(encoded, k):
        seen.append(len(encoded.dense))
        return Best([[0.0]] * len(encoded.dense), [[0]] * len(encoded.dense), fake.manifest)

    fake.answer = best
    batcher = Batcher(lambda: fake, Limits(batch_rows=100, delay=0, queue_rows=100, scores=39), Metrics())
    with pytest.raises(TooManyScoresError, match="has 4 rows, but of a model that ranks 10 items it may have 3;"):
        batcher.submit(rows(1, 2, 3, 4))
    for future in [batcher.submit(rows(k, k)) for k in range(9)]:
        assert len(future.result(30).items) == 2
    batcher.stop()
    assert seen == [2] * 9


def test_what_waits_is_refused_when_the_end_is_near(fake, batcher):
    first = batcher.submit(rows(0))
    assert fake.begun.wait(30)
    left = [batcher.submit(rows(k)) for k in (1, 2)]
    left[1].cancel()
    batcher.refuse()
    with pytest.raises(StoppingError, match="send the request to another one"):
        left[0].result(0)
    with pytest.raises(StoppingError):
        batcher.submit(rows(3))
    fake.go.set()
    assert first.result(30).scores == 0
    assert batcher.queued_rows == 0


def test_a_delta_in_between_is_encoded_again(fake, batcher):
    encode, outdated = fake.encoded, [True]

    def answer(request, k):
        if outdated.pop(0) if outdated else False:
            raise OutdatedError("the model took over a delta")
        return Scored(request.dense, fake.manifest)

    fake.go.set()
    fake.answer = answer
    assert batcher.submit(rows(1, 2)).result(30).scores.tolist() == [1, 2]
    outdated.append(True)
    encoded = encode({"x": [1]})
    with pytest.raises(OutdatedError):
        batcher.submit(Rows(columns=encoded, count=1)).result(30)


def test_all_requests_together_take_so_many_bytes():
    memory = Memory(100)
    with Held(memory) as one, Held(memory) as other:
        one.now(500)  # alone it may
        with pytest.raises(QueueFullError, match="requests take 500 bytes already, and at most 100 may"):
            other.now(1)
        one.now(60)
        other.now(40)
        with pytest.raises(QueueFullError):
            other.now(41)
        assert memory.taken == 100
        other.now(20)
        assert memory.taken == 80
    assert memory.taken == 0


@pytest.mark.parametrize("kind", [bodies.JSON, bodies.ARROW])
def test_values_of_a_row_are_bounded(kind):
    columns = {"history": [["i1"] * 5, ["i2"]]}
    content = json.dumps({"columns": columns}).encode() if kind == bodies.JSON else stream(pa.table(columns))
    assert bodies.rows_of(content, kind, max_rows=9, max_bytes=10_000, max_values=5).count == 2
    with pytest.raises(bodies.TooManyRowsError, match="column 'history' has 5 values in a row, but at most 4 may be"):
        bodies.rows_of(content, kind, max_rows=9, max_bytes=10_000, max_values=4)


@pytest.mark.parametrize("dtype", [pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 5)])
def test_values_of_a_request_are_bounded_as_those_of_a_row(dtype):
    """Of JSON by its commas: a list of one byte takes many times that where it is encoded."""
    content = stream(pa.table({"items": pa.array([[1] * 5] * 32, dtype)}))
    assert bodies.rows_of(content, bodies.ARROW, max_rows=99, max_bytes=10_000, max_values=10).count == 32
    with pytest.raises(
        bodies.TooManyRowsError, match="column 'items' has 160 values, but at most 144 may be; send sev"
    ):
        bodies.rows_of(content, bodies.ARROW, max_rows=99, max_bytes=10_000, max_values=9)
    with pytest.raises(bodies.TooManyRowsError, match="column 'items' has 5 values in a row, but at most 4 may be"):
        bodies.rows_of(content, bodies.ARROW, max_rows=99, max_bytes=10_000, max_values=4)


@pytest.mark.parametrize("k", ["0", "1001", "-1", "x", "1e2", "", "9" * 400])
def test_numbers_of_items_that_are_refused(k):
    assert [bodies.wanted_items(asked) for asked in (None, "1", "1000")] == [10, 1, 1000]
    with pytest.raises(bodies.UnfitError, match="must be a number from 1 to 1,000"):
        bodies.wanted_items(k)


def test_answers_of_items():
    nothing: Any = None
    found = Best([[0.5, 0.25], []], [["a", "b"], []], nothing)
    assert json.loads(bodies.answer(found, "v", bodies.JSON)) == {
        "items": [["a", "b"], []], "scores": [[0.5, 0.25], []], "version": "v"
    }  # fmt: skip
    for items in (found.items, [[3, 4], []]):
        table = pa.ipc.open_stream(bodies.answer(found._replace(items=items), "v", bodies.ARROW)).read_all()
        assert table.to_pydict() == {"item": items, "score": [[0.5, 0.25], []]}


def test_a_request_that_nobody_waits_for_is_left_out(fake, batcher):
    batcher.submit(rows(0))
    assert fake.begun.wait(30)
    assert batcher.submit(rows(1)).cancel()
    last = batcher.submit(rows(2))
    fake.go.set()
    assert last.result(30).scores == 2
    assert fake.batches == [[0], [2]]


def test_a_full_queue_refuses_and_a_stopped_one_finishes(fake, batcher):
    batcher.submit(rows(0))
    assert fake.begun.wait(30)
    waiting = [batcher.submit(rows(1, 2, 3)), batcher.submit(rows(4, 5, 6))]
    with pytest.raises(QueueFullError, match="6 rows wait already, and at most 6 may"):
        batcher.submit(rows(7))
    stopping = threading.Thread(target=batcher.stop)
    stopping.start()
    while not batcher.stopping:
        time.sleep(0.001)
    with pytest.raises(StoppingError):
        batcher.submit(rows(7))
    fake.go.set()
    stopping.join(30)
    assert [future.result(0).scores.tolist() for future in waiting] == [[1, 2, 3], [4, 5, 6]]


# Arrow streams


LARGE = {
    "compressed": (pa.table({"user": ["u" * 1000] * 9}), {"compression": "zstd"}, "compressed"),
    "a compressed dictionary": (
        pa.table({"user": pa.array(["u" * 1000] * 9).dictionary_encode()}), {"compression": "lz4"}, "compressed",
    ),
    "a long text of a dictionary": (
        pa.table({"user": pa.array(["u" * 1000] * 9).dictionary_encode()}), {}, "holds 9,000 values or",
    ),
    "lists of nothing": (pa.table({"user": pa.array([[None] * 9000])}), {}, "holds 9,000 values or bytes"),
    "a structure": (pa.table({"user": [{"a": 1}]}), {}, "column 'user' holds struct"),
    "a view": (pa.table({"user": pa.array(["u1"], pa.string_view())}), {}, "column 'user' holds string_view"),
    "runs": (pa.table({"user": pa.RunEndEncodedArray.from_arrays([50], ["u1"])}), {}, "column 'user' holds run_end"),
    "a dictionary in a list": (
        pa.table({"user": pa.array([["u1"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))}), {}, "holds list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LARGE)
def test_arrow_streams_that_are_larger_in_memory_are_refused(fault):
    table, options, message = LARGE[fault]
    with pytest.raises(UnreadableError, match=message):
        table_of(stream(table, **options), limit=8000, check_count=lambda count: None)


def test_compression_is_seen_in_every_message():
    table = pa.table({"user": pa.array(["u" * 1000] * 9).dictionary_encode()})
    for compression, told in ((None, False), ("zstd", True), ("lz4", True)):
        messages = pa.ipc.MessageReader.open_stream(stream(table, compression=compression))
        found = {message.type: _is_compressed(message.metadata.to_pybytes()) for message in messages}
        assert found == {"schema": False, "dictionary": told, "record batch": told}


def test_texts_outside_of_their_buffer_are_refused():
    content = bytearray(stream(pa.table({"user": ["u" * 777]})))
    at = content.rindex(np.int32(777).tobytes())  # the end of the text in the buffer of offsets
    content[at : at + 4] = np.int32(10**6).tobytes()
    with pytest.raises(bodies.MalformedError, match="no Arrow stream"):
        bodies.rows_of(bytes(content), bodies.ARROW, max_rows=50, max_bytes=2000)


def test_texts_that_end_before_they_begin_are_refused():
    """Only a full check looks at the bounds between the first and the last."""
    content = bytearray(stream(pa.table({"user": ["u" * 777, "v", "w"]})))
    at = content.rindex(np.array([777, 778], np.int32).tobytes())
    content[at : at + 4] = np.int32(10**6).tobytes()
    with pytest.raises(bodies.MalformedError, match="no Arrow stream"):
        bodies.rows_of(bytes(content), bodies.ARROW, max_rows=50, max_bytes=2000)


def test_rows_of_arrow_are_counted_before_they_are_read():
    table = pa.table({"user": pa.nulls(10**7)})
    with pytest.raises(bodies.TooManyRowsError, match="10,000,000 rows"):
        bodies.rows_of(stream(table), bodies.ARROW, max_rows=50, max_bytes=1000)
