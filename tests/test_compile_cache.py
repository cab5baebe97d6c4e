"""What tests compiled is kept for the next run, but never half an entry."""

import zlib

from compile_cache import close_run_folder, open_run_folder


def test_whole_entries_outlive_a_run_and_halves_do_not(tmp_path):
    lasting, whole = tmp_path / "lasting", zlib.compress(b"a program" * 100)
    run = open_run_folder(lasting)
    (run / "one-cache").write_bytes(whole)
    (run / "killed-cache").write_bytes(whole[:-3])
    close_run_folder(run, lasting)
    assert not run.exists()
    assert [entry.name for entry in lasting.iterdir()] == ["one-cache"]
    again = open_run_folder(lasting)
    assert (again / "one-cache").read_bytes() == whole
    close_run_folder(again, lasting)
    assert (lasting / "one-cache").read_bytes() == whole


def test_the_oldest_entries_make_room(tmp_path, monkeypatch):
    lasting = tmp_path / "lasting"
    monkeypatch.setattr("compile_cache.KEEP_BYTES", 250)
    for number in range(4):
        run = open_run_folder(lasting)
        (run / f"{number}-cache").write_bytes(zlib.compress(bytes([number]) * 10) + bytes(80))
        close_run_folder(run, lasting)
    assert sorted(entry.name for entry in lasting.iterdir()) == ["2-cache", "3-cache"]


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "file").touch()
    run = open_run_folder(tmp_path / "file" / "lasting")
    (run / "one-cache").write_bytes(zlib.compress(b"x"))
    close_run_folder(run, tmp_path / "file" / "lasting")
    assert not run.exists()
