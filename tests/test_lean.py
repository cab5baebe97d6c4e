"""The command starts without what only other programs need, and then collects garbage as any program does."""

import gc
import subprocess
import sys

import pytest

from jrec import lean


@pytest.fixture
def collects(monkeypatch):
    monkeypatch.setattr(lean, "UNUSED", ())
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_garbage_is_collected_once_the_start_is_over(collects):
    with lean.start():
        assert not gc.isenabled()
        lean.over()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    with pytest.raises(ZeroDivisionError), lean.start():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_who_collects_no_garbage_is_left_alone(collects):
    gc.disable()
    try:
        with lean.start():
            pass
        lean.over()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_grain_is_imported_without_orbax():
    code = "import sys; from jrec import lean\nwith lean.start():\n  import grain\n  print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'grain'" in done.stdout
    assert "'tensorstore'" not in done.stdout
    assert "orbax.checkpoint._src" not in done.stdout
