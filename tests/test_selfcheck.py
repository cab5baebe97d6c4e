"""The check of GPU kernels finds kernels that are wrong, slow, crash or hang, and none of them is ever chosen."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time

import broken_kernels as broken
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken_kernels import MACHINE

from jrec import cli, ops
from jrec.environment import CACHE_VARIABLE
from jrec.errors import ConfigError
from jrec.ops import verdicts
from jrec.ops.verdicts import CAST, KernelClass, Verdict, gpu_choice, read_verdicts
from jrec.pallas.segments import level_sizes
from jrec.pallas.tuning import tune
from jrec.selfcheck import check, child, trials
from jrec.selfcheck.check import SelfCheckError, classes_of, parse_classes, prove, run_child, usual_classes
from jrec.selfcheck.trials import Sizes, Wrong

PRODUCTS = KernelClass(kernel="tt_products", dtype="float32", dim=(2, 4, 2, 4))
SIZES = Sizes(rows=50, bags=64, length=4)
BROKEN = (sys.executable, "-m", "broken_kernels")  # on the CPU


def gather(dim, dtype="float32"):
    return KernelClass(kernel="gather_reduce", dtype=dtype, dim=dim)


def update(dim=4, dtype="float32", optimizer="SGD", kernel="casted_update"):
    return KernelClass(kernel=kernel, dtype=dtype, dim=dim, optimizer=optimizer)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a machine whose GPU is its CPU."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(verdicts, "local_machine", lambda: MACHINE)
    verdicts.reread()
    yield tmp_path / "cache"
    verdicts.reread()


@pytest.fixture
def on_cpu(monkeypatch):
    """Checks' processes run on the CPU, with broken kernels."""
    monkeypatch.setattr(check, "PLATFORM", "cpu")
    monkeypatch.setattr(check, "COMMAND", BROKEN)


def answer(monkeypatch, *, right=True, machine=MACHINE):
    """Lets checks answer at once; returns the classes that they are asked for."""
    asked = []

    def run(wanted, **options):
        asked.extend(wanted)
        time.sleep(0.05)
        return machine, dict.fromkeys(wanted, Verdict(right=right, ratio=0.5 if right else None, why="row 3"))

    monkeypatch.setattr(check, "run_child", run)
    return asked


def dispatched(of):
    """Whether a program that is traced now for a GPU holds the kernel of a gather-reduce class."""
    verdicts.reread()
    table, ids = jax.ShapeDtypeStruct((50, of.dim), jnp.float32), jax.ShapeDtypeStruct((6, 3), jnp.int32)
    traced = jax.jit(lambda table, ids: ops.gather_reduce(table, ids)).trace(table, ids)
    return "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dim", "why"),
    [
        (broken.WRONG, "wrong: case 0, single: result[0][299, 0] is"),
        (broken.WRONG_NAN, "wrong: case 0, past the end: result"),
        (broken.ROUNDED, "wrong: case 0, single: result"),
        (broken.LOSES_ONE, "wrong: case 0, single: result"),
        (broken.UNSTEADY, "wrong: case 0, single: two runs gave different bits"),
        (broken.REFUSE, "not covered: no rows of this dim"),
    ],
)
def test_a_broken_kernel_is_found(monkeypatch, dim, why):
    broken.install(monkeypatch.setattr)
    verdict = child.check(gather(dim), SIZES)
    assert not verdict.right
    assert verdict.why.startswith(why)
    assert verdict.choice == "xla"


def test_a_row_that_nobody_named_must_keep_its_bits(monkeypatch):
    broken.install(monkeypatch.setattr)
    verdict = child.check(update(kernel="row_update"), SIZES)
    assert not verdict.right
    assert "result[0] has other bits in a row that nobody named" in verdict.why


def test_a_right_kernel_is_timed_and_a_slow_one_not_chosen(monkeypatch):
    broken.install(monkeypatch.setattr)
    assert child.check(gather(broken.FAST), SIZES).ratio > 0
    slow = child.check(gather(broken.SLOW), SIZES)
    assert slow.right
    assert slow.ratio > 1
    assert slow.choice == "xla"


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(gather(16), marks=pytest.mark.slow),
        update(optimizer="RowWiseAdagrad"),
        pytest.param(update(dtype="bfloat16", optimizer="Adam"), marks=pytest.mark.slow),
        pytest.param(update(dtype="float16", optimizer="RMSProp"), marks=pytest.mark.slow),
        pytest.param(update(optimizer="Momentum"), marks=pytest.mark.slow),
        pytest.param(update(optimizer="Adagrad", kernel="row_update"), marks=pytest.mark.slow),
        CAST,
        pytest.param(PRODUCTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_xla_itself_passes_at_full_size(of, monkeypatch):
    """With XLA on both sides all cases must be right, in their full sizes, and the timed loops run."""
    compiled, looped = child._compiled, child.looped
    monkeypatch.setattr(child, "_compiled", lambda trial, side, *args, **how: compiled(trial, "xla", *args, **how))
    monkeypatch.setattr(child, "looped", lambda trial, side: looped(trial, "xla"))
    verdict = child.check(of, dataclasses.replace(SIZES, weighted=True))
    assert verdict.right, verdict.why
    assert verdict.ratio > 0


@pytest.mark.parametrize("change", ["table", "slot", "untouched", "nan", "shape"])
def test_the_judge_of_updates_sees_every_mistake(change):
    trial = next(trials.small_trials(update(dim=8, optimizer="Adagrad"), tiny=True))
    arguments = trial.draw(np.random.default_rng(0), "half padding")
    want = jax.tree.map(np.array, trial.run("xla")(*jax.device_put(arguments)))
    ((new, slots),) = jax.tree.map(np.copy, want)
    cast = arguments[1]
    touched = int(cast.rows[0])
    trial.judge(arguments, [(new, slots)], want)
    if change == "table":
        new[touched, 3] += 1e-4
    elif change == "slot":
        slots["sum"][touched, 3] *= 1 + 1e-4
    elif change == "untouched":
        spared = next(row for row in range(new.shape[0]) if row not in cast.rows)
        new[spared, 0] = np.nextafter(new[spared, 0], np.float32(np.inf))
    elif change == "nan":
        new[touched, 0] = np.nan
    else:
        new = new[:, :4]
    with pytest.raises(Wrong, match="'sum'" if change == "slot" else r"result\[0\]\[0\]"):
        trial.judge(arguments, [(new, slots)], want)


@pytest.mark.parametrize("change", [1e-3, np.nan])
def test_the_judge_of_products_sees_mistakes(change):
    trial = next(trials.small_trials(PRODUCTS, tiny=True))
    arguments = trial.draw(np.random.default_rng(0), "power law")
    want = jax.tree.map(np.array, jax.jit(trial.run("xla"))(*arguments))
    trial.judge(arguments, want, want)
    for number in range(3):
        got = jax.tree.map(np.copy, want)
        got[number][0, 0, 0] += change
        with pytest.raises(Wrong, match=rf"result\[{number}\]\[0, 0, 0"):
            trial.judge(arguments, got, want)


def test_no_sum_of_the_check_is_rounded():
    """So the order of additions, which is the kernels' own, changes no bit."""
    for kind in trials.KINDS:
        rng = np.random.default_rng(0)
        ids, offsets, weights = trials.draw_lookups(rng, trials._HOT, kind)
        terms = trials._terms(rng, (trials._HOT.rows, 1), kind)[:, 0]
        real = (ids >= 0) & (ids < trials._HOT.rows) & (np.arange(ids.size) < offsets[-1])
        products = np.abs(terms[np.where(real, ids, 0)] * weights).astype(np.float64) * real
        if kind == "single":
            assert np.add.reduceat(real.astype(int), np.minimum(offsets[:-1], ids.size - 1)).max() <= 1
            assert np.bincount(ids[real]).max() == 1
        else:
            assert products.sum() * 32 < 2**24
            assert np.all(products * 32 % 1 == 0)


@pytest.mark.parametrize("tiny", [True, False])
@pytest.mark.parametrize("of", [gather(8), update(8), update(8, kernel="row_update"), CAST, PRODUCTS], ids=str)
def test_every_kind_of_ids_can_be_drawn_in_all_sizes(of, tiny):
    for trial in trials.small_trials(of, tiny=tiny):
        rng = np.random.default_rng(0)
        shapes = [jax.tree.map(np.shape, trial.draw(rng, kind)) for kind in trials.KINDS]
        assert all(shape == shapes[0] for shape in shapes)  # or it would be compiled for each


def test_casts_are_checked_in_every_width_of_their_sort():
    rng = np.random.default_rng(0)
    largest = {int(one.draw(rng, "power law")[0].max()) for one in trials.small_trials(CAST, tiny=False)}
    assert any(0 <= row < 2**8 for row in largest)
    assert any(2**8 <= row < 2**16 for row in largest)
    assert any(row >= 2**16 for row in largest)


def test_the_hot_bag_splits_its_segment_twice_and_others_are_empty():
    ids, offsets, _ = trials.draw_lookups(np.random.default_rng(0), trials._HOT, "power law")
    lengths = np.diff(offsets)
    config = tune(dim=64, itemsize=4, length=None)
    assert len(level_sizes(ids.size, config.split, top=config.top)) == 2
    assert lengths.max() > 2 * config.split**2
    assert np.bincount(ids).max() > 2 * config.split**2
    assert lengths.min() == 0
    assert offsets[-1] < ids.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ABORT", "was ended by signal 6, Aborted"),
        ("SEGFAULT", "was ended by signal 11"),
        ("EXIT", "ended with exit code 0"),
        ("RAISE", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("HANG", "did not end within 20 s"),
    ],
)
def test_a_crash_or_a_hang_lets_no_kernel_of_the_check_in(on_cpu, name, why):
    """Not those that were right before it either; but what earlier checks found stays."""
    kept = gather(64)
    verdicts.keep_verdicts(MACHINE, {kept: Verdict(right=True, ratio=0.5)})
    bad, right = gather(getattr(broken, name)), gather(broken.FAST)
    found = prove(dict.fromkeys([right, bad], SIZES), MACHINE, seconds=20)
    assert why in found[bad].why
    assert f"at {str(bad)!r}" in found[right].why
    for of in (right, bad):
        assert not found[of].right
        assert not dispatched(of)
    assert dispatched(kept)
    assert read_verdicts(MACHINE).keys() == {kept, bad, right}  # and the next run does not hang again


@pytest.mark.parametrize(
    ("end", "why"), [("sys.exit(3)", "ended with exit code 3"), ("time.sleep(600)", "did not end within 2 s")]
)
def test_what_a_process_says_before_a_bad_end_does_not_count(monkeypatch, end, why):
    said = {"machine": MACHINE, "verdicts": {str(gather(16)): {"right": True, "ratio": 0.5, "why": ""}}}
    code = f"import sys, time; print({json.dumps(said)!r}, flush=True); {end}"
    monkeypatch.setattr(check, "COMMAND", (sys.executable, "-c", code))
    begin = time.monotonic()
    found = prove({gather(16): SIZES}, MACHINE, seconds=2)
    assert time.monotonic() - begin < 60
    assert why in found[gather(16)].why
    assert gpu_choice(gather(16)) == "xla"


@pytest.mark.slow
def test_a_process_that_ends_by_itself_lets_in_what_is_right_and_fast(on_cpu):
    classes = [gather(dim) for dim in (broken.WRONG, broken.FAST, broken.REFUSE, broken.SLOW)]
    found = prove(dict.fromkeys(classes, SIZES), MACHINE, seconds=120)
    assert [verdict.right for verdict in found.values()] == [False, True, False, True]
    for of in classes:
        assert dispatched(of) == (found[of].ratio is not None and found[of].ratio < 1)
    assert not dispatched(gather(broken.SLOW))


def test_only_classes_without_a_verdict_are_checked(monkeypatch):
    asked = answer(monkeypatch)
    prove({gather(16): SIZES}, MACHINE)
    prove({gather(16): SIZES, gather(32): SIZES}, MACHINE)
    assert asked == [gather(16), gather(32)]
    assert gpu_choice(gather(16)) == "pallas"
    asked = answer(monkeypatch, right=False)
    prove({gather(16): SIZES}, MACHINE, again=True)
    assert (gpu_choice(gather(16)), gpu_choice(gather(32))) == ("xla", "pallas")


def test_a_check_on_another_device_says_nothing_of_this_one(monkeypatch):
    answer(monkeypatch, machine="NVIDIA L4")
    with pytest.raises(SelfCheckError, match="the check ran on NVIDIA L4, not on a CPU"):
        prove({gather(16): SIZES}, MACHINE)
    assert read_verdicts(MACHINE) == {}


def test_processes_that_need_the_same_verdicts_check_once(monkeypatch):
    asked = answer(monkeypatch)
    wanted = {gather(16): SIZES, gather(32): SIZES}
    checkers = [threading.Thread(target=prove, args=(wanted, MACHINE)) for _ in range(3)]
    for checker in checkers:
        checker.start()
    for checker in checkers:
        checker.join(30)
    assert asked == list(wanted)


def test_a_process_without_a_device_is_told_of(monkeypatch):
    monkeypatch.setattr(check, "PLATFORM", "nowhere")
    with pytest.raises(SelfCheckError, match=r"ended with exit code 1\. Its last words: .*nowhere"):
        run_child({gather(16): None})


def test_no_process_outlives_its_time():
    """Whoever started it may have ended; and nothing that hangs in a driver's code hears of anything but a signal."""
    request = {"classes": {str(gather(broken.HANG)): None}, "seconds": 2, "interpret": False}
    done = subprocess.run([*BROKEN, json.dumps(request)], env=check.environment("cpu"), check=False, timeout=120)
    assert done.returncode == -signal.SIGALRM


def test_the_process_shares_the_gpu_and_goes_by_no_override(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    environment = check.environment("cuda")
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["JAX_PLATFORMS"] == "cuda"
    assert environment[verdicts.KERNELS_VARIABLE] == "auto"


def test_classes_of_a_model():
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
    from jrec.ops.tt.shape import TTShape

    shape = TTShape.search(1000, 16, ranks=4)
    tables = [
        TableConfig(name="a", rows=10, dim=20),
        TableConfig(name="b", rows=10, dim=16, dtype="bfloat16"),
        TableConfig(name="c", rows=1000, dim=16, tier="tt", tt_shape=shape),
    ]
    features = [FeatureConfig(name=t.name, table=t.name, max_length=5 if t.name == "a" else 1) for t in tables]
    layout = EmbeddingLayout.build(tables, features)
    found = classes_of(layout, optimizer=lambda _: "Adam", batch_size=512)
    assert {CAST, gather(20), gather(16), gather(16, "bfloat16"), update(20, optimizer="Adam")} < set(found)
    assert update(16, "bfloat16", "Adam") in found
    assert update(16, "float32", "Adam") not in found
    assert [of.dim for of in found if of.kernel == "tt_products"] == [
        (shape.core_shapes[0][2], *shape.core_shapes[1][1:]),
        (shape.core_shapes[0][2] * shape.core_shapes[1][2], *shape.core_shapes[2][1:]),
    ]
    assert found[CAST] == found[gather(20)]  # the greatest stack's sizes
    assert (found[gather(20)].rows, found[gather(20)].bags, found[gather(20)].lookups) == (10, 512, 2560)
    assert found[gather(16, "bfloat16")].length == 1
    most = classes_of(layout, optimizer=lambda _: "Adam", batch_size=1 << 24)
    assert max(sizes.lookups for sizes in most.values()) <= 1 << 20


def test_a_traced_step_asks_for_no_other_classes_than_those_of_its_model():
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig

    table = TableConfig(name="a", rows=40, dim=16, dtype="bfloat16")
    layout = EmbeddingLayout.build([table], [FeatureConfig(name="a", table="a")])
    optimizer = ops.RowWiseAdagrad(learning_rate=0.1)

    def step(rows, ids):
        bags = {"x": ops.Bags(ids=ids)}
        out, residuals = ops.lookup({"x": rows}, bags)
        slots = {"x": optimizer.init(rows)}
        return ops.apply_gradients(optimizer, {"x": rows}, slots, residuals, out)

    jax.jit(step).trace(jax.ShapeDtypeStruct((40, 16), jnp.bfloat16), jax.ShapeDtypeStruct((6, 3), jnp.int32))
    asked = set(verdicts.choices())
    assert str(update(16, "bfloat16", "RowWiseAdagrad")) in asked
    assert asked <= set(map(str, classes_of(layout, optimizer=lambda _: "RowWiseAdagrad", batch_size=6)))


def test_classes_are_named_as_they_are_printed():
    assert {gather(64), gather(128, "bfloat16"), update(16, optimizer="Adam"), CAST} < set(usual_classes())
    assert list(parse_classes(map(str, usual_classes()))) == list(usual_classes())
    for text in ("gather_reduce", "gather_reduce float32 many", "casted_update float32 16 SGD Adam"):
        with pytest.raises(ConfigError, match="--only takes a whole kernel class"):
            parse_classes([text])


def test_the_command_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(verdicts, "local_machine", lambda: None)
    for arguments in (["kernels", "check"], ["kernels"]):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "there is no NVIDIA GPU that JAX can use here" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["row_update float32 16 SGD", "gather_reduce float32 16", "casted_update float32 16 SGD"]
)
def test_the_command_tries_kernels_in_the_interpreter(capsys, only):
    arguments = ["--interpret", "--json", "--timeout", "600", "--only", only, "--only", str(CAST)]
    assert cli.main(["kernels", "check", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kernel_class"] for line in lines] == [only, str(CAST)]
    for line in lines:
        assert (line["right"], line["ratio"], line["why"]) == (True, None, "not timed")
    assert read_verdicts(MACHINE) == {}


def test_the_command_checks_and_shows(capsys, monkeypatch):
    asked = answer(monkeypatch)
    assert cli.main(["kernels", "check", "--only", "gather_reduce float32 16"]) == 0
    assert asked == [gather(16)]
    assert capsys.readouterr().out == "gather_reduce float32 16: pallas, 0.50 of XLA's time\n"
    answer(monkeypatch, right=False)
    assert cli.main(["kernels", "check", "--only", "gather_reduce float32 32", "--json"]) == 1
    line = json.loads(capsys.readouterr().out)
    assert line == {"kernel_class": "gather_reduce float32 32", "right": False, "ratio": None, "why": "row 3"}
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "xla")
    assert cli.main(["kernels"]) == 0
    shown = capsys.readouterr()
    assert "gather_reduce float32 32: xla, row 3" in shown.out.splitlines()
    assert "JREC_KERNELS=xla overrides all verdicts" in shown.err
    assert str(verdicts.verdict_file(MACHINE)) in shown.err
