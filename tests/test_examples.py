"""The programs of ``examples/`` learn what they say they learn."""

import importlib.util
import pathlib

import pytest

pytestmark = [
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.usefixtures("quick_compilation"),
    pytest.mark.slow,
]
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name, **options):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(**options)


@pytest.fixture(autouse=True)
def ordinary_promotion():
    """As a user's program has it; the tests' strict promotion refuses some of optax and Flax."""
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_every_program_is_here_and_short():
    programs = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert programs.keys() <= tested
    assert len(programs) >= 8
    for name, text in programs.items():
        assert text.count("\n") <= 120, name


def test_dlrm_dataframe():
    losses = run("dlrm_dataframe", examples=20_000)
    assert losses["model"] < losses["constant"] - 0.05


def test_dcn_own_loop():
    losses = run("dcn_own_loop", steps=120)
    assert losses["model"] < losses["constant"] - 0.02


def test_two_tower():
    recalls = run("two_tower", steps=200)
    assert recalls["recall in 20"] > recalls["of the most frequent"] + 0.15


def test_sequence_model():
    assert run("sequence_model", steps=200)["next above another"] > 0.8


def test_tt_in_flax():
    found = run("tt_in_flax", steps=100)
    assert found["jrec.nn.TTEmbed"]["parameters"] < found["nnx.Embed"]["parameters"] / 50
    assert min(figures["accuracy"] for figures in found.values()) > 0.95


def test_multi_device():
    found = run("multi_device", steps=60)
    assert found["largest difference from one device"] < 1e-4
    assert found["last losses"] < found["first loss"] - 0.05
    assert min(found[f"{tier} rows"] for tier in ("replicated", "sharded", "host")) > 0


def test_host_tables():
    found = run("host_tables", steps=100)
    assert found["last losses"] < found["first losses"] - 0.05
    assert 0 < found["rows that memory holds"] <= 20_000


def test_hot_cold():
    found = run("hot_cold", examples=30_000)
    assert found["last losses"] < found["first losses"] - 0.05
    assert 0.5 < found["hot examples"] < 1
