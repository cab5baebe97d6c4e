"""The client of `benchmarks.serve_load`: its times are those at which requests were due."""

import asyncio

from benchmarks.open_loop import fire, post


async def _fired(delay, **options):
    async def answer(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            await asyncio.sleep(delay)
            writer.write(b"HTTP/1.1 200 OK\r\nX-Path: " + head.split()[1] + b"\r\ncontent-length: 1\r\n\r\n" + body)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await fire(port, [post("/a", b"1"), post("/b", b"2")], **options)


def test_requests_do_not_wait_for_earlier_ones():
    answers = asyncio.run(_fired(0.5, count=20, rate=1000))
    assert [(answer.status, answer.headers["x-path"], answer.body) for answer in answers[:2]] == [
        (200, "/a", b"1"),
        (200, "/b", b"2"),
    ]
    assert all(answer.latency >= 0.49 for answer in answers)
    assert max(answer.sent for answer in answers) < min(answer.done for answer in answers)
    assert [round(answer.due - answers[0].due, 6) for answer in answers] == [k / 1000 for k in range(20)]


def test_a_connection_that_fails_is_an_answer_without_status():
    assert [answer.status for answer in asyncio.run(fire(1, [post("/", b"")], count=2, rate=100))] == [0, 0]
