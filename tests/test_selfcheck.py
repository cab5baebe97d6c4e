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
import reference as plain

from jrec import cli, ops
from jrec.commands import kernel_check
from jrec.environment import CACHE_VARIABLE
from jrec.ops import verdicts
from jrec.ops.local_gpu import Gpu
from jrec.ops.verdicts import CAST, KernelClass, Machine, Verdict, gpu_choice
from jrec.pallas.segments import level_sizes
from jrec.pallas.tuning import tune
from jrec.selfcheck import child, reference, report, runner, store, timing, trials
from jrec.selfcheck.child import Request
from jrec.selfcheck.classes import all_classes, classes_of, select
from jrec.selfcheck.ensure import ensure, missing
from jrec.selfcheck.runner import How, run_checks
from jrec.selfcheck.trial import Wrong

pytestmark = pytest.mark.usefixtures("quick_compilation")

GPU = Gpu(kind="cpu", driver="580.1")  # the children's device is a CPU
HOW = How(platform="cpu", kernels="broken_kernels", tiny=True, timeout=60.0)
BROKEN_REQUEST = Request(classes=(), kernels="broken_kernels", tiny=True)


def gather(dim, dtype="float32"):
    return KernelClass(kernel="gather_reduce", dtype=dtype, dim=dim)


def update(dim=4, dtype="float32", optimizer="SGD", kernel="casted_update"):
    return KernelClass(kernel=kernel, dtype=dtype, dim=dim, optimizer=optimizer)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and a machine whose GPU is its CPU."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(verdicts.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(verdicts, "local_gpu", lambda: GPU)
    verdicts.reread()
    yield tmp_path / "cache"
    verdicts.agree(None)
    verdicts.reread()


def judged(of, request=BROKEN_REQUEST):
    """The verdict of a check in this process."""
    return child.check(of, request, lambda where: None)


def dispatched(of):
    """Whether a program that is traced now for a GPU holds the kernel of a gather-reduce class."""
    verdicts.reread()
    table, ids = jax.ShapeDtypeStruct((50, of.dim), jnp.float32), jax.ShapeDtypeStruct((6, 3), jnp.int32)
    traced = jax.jit(lambda table, ids: ops.gather_reduce(table, ids)).trace(table, ids)
    return "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("dim", "reason", "detail"),
    [
        (broken.WRONG, "wrong", "padded, half padding: sums[9, 0] is"),
        (broken.WRONG_NAN, "wrong", "past the end: sums"),
        (broken.UNSTEADY, "wrong", "two runs gave different bits"),
        (broken.SLOW, "slower", ""),
        (broken.REFUSE, "not covered", "no rows of this dim"),
        (broken.NO_COMPILE, "does not compile", "ptxas died"),
    ],
)
def test_a_broken_kernel_is_found(dim, reason, detail):
    verdict = judged(gather(dim))
    assert verdict.reason == reason
    assert detail in verdict.detail
    assert verdict.choice == "xla"
    assert gpu_choice(gather(dim)) == "xla"


def test_a_kernel_that_raises_when_it_runs_ends_the_child():
    with pytest.raises(child._CrashError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        judged(gather(broken.RAISE))


def test_a_row_that_nobody_named_must_keep_its_bits():
    verdict = judged(update(kernel="row_update"))
    assert (verdict.reason, verdict.right) == ("wrong", False)
    assert "within 0" in verdict.detail


def test_a_right_kernel_is_timed():
    verdict = judged(gather(broken.FAST))
    assert verdict.right
    assert verdict.reason in ("faster", "slower")
    assert verdict.kernel_seconds > 0
    assert verdict.xla_seconds > 0
    assert 0 < verdict.error <= 1


@pytest.mark.parametrize(
    "of",
    [
        gather(16),
        update(optimizer="RowWiseAdagrad"),
        pytest.param(update(dtype="bfloat16", optimizer="Adam"), marks=pytest.mark.slow),
        pytest.param(update(dtype="float16", optimizer="RMSProp"), marks=pytest.mark.slow),
        pytest.param(update(optimizer="Momentum"), marks=pytest.mark.slow),
        pytest.param(update(optimizer="Adagrad", kernel="row_update"), marks=pytest.mark.slow),
        CAST,
        pytest.param(KernelClass(kernel="tt_products", dtype="float32", dim=(2, 4, 2, 4)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_xla_itself_passes_at_full_size(of, monkeypatch):
    """With XLA on both sides all cases must be right, in their full sizes."""
    monkeypatch.setattr(child, "_sides", lambda table: ((child.kernels, "xla"), (child.kernels, "xla")))
    monkeypatch.setattr(timing, "Size", lambda: timing.SMALL)
    verdict = judged(of, Request(classes=()))
    assert verdict.right, verdict.detail
    assert verdict.error <= 1


@pytest.mark.parametrize("change", ["table", "slot", "untouched", "nan", "dtype"])
def test_the_judge_of_updates_sees_every_mistake(change):
    of = update(dim=8, optimizer="Adagrad")
    draw = next(iter(trials.programs(of, tiny=True))).draws[0]
    table, slots, cast, gradients, weights = jax.device_put(draw.arguments)
    optimizer = trials.make_optimizer("Adagrad", learning_rate=0.1)
    new, new_slots = ops.casted_update(optimizer, table, slots, cast, gradients, weights=weights, implementation="xla")
    new, new_slots = np.array(new), {"sum": np.array(new_slots["sum"])}
    touched = int(cast.rows[0])
    assert draw.judge((new, new_slots), 1.0) <= 1
    if change == "table":
        new[touched, 3] += 1e-4
    elif change == "slot":
        new_slots["sum"][touched, 3] *= 1 + 1e-4
    elif change == "untouched":
        spared = next(row for row in range(table.shape[0]) if row not in cast.rows)
        new[spared, 0] = np.nextafter(new[spared, 0], np.float32(np.inf))
    elif change == "nan":
        new[touched, 0] = np.nan
    else:
        new = new[:, :4]
    with pytest.raises(Wrong, match="sum" if change == "slot" else "table"):
        draw.judge((new, new_slots), 1.0)


def test_the_reference_of_sums_and_casts_is_that_of_the_tests():
    """Two independent wordings of the same mathematics."""
    rng = np.random.default_rng(3)
    case = plain.make_case(plain.Shape(rows=20, dim=5, bags=9, capacity=40, weighted=True), rng, past=True)
    sums, _ = reference.segment_sums(case.table, case.ids, case.offsets, case.weights)
    np.testing.assert_allclose(sums, plain.gather_reduce(case), rtol=1e-12)
    want = plain.tensor_cast(case.ids, case.offsets, 20, 12)
    jax.tree.map(np.testing.assert_array_equal, reference.cast_of(case.ids, case.offsets, 20, 12), want)


def test_casts_are_checked_in_every_width_of_their_sort():
    largest = {int(draw.arguments[0].max()) for program in trials.programs(CAST) for draw in program.draws}
    assert any(0 <= row < 2**8 for row in largest)
    assert any(2**8 <= row < 2**16 for row in largest)
    assert any(row >= 2**16 for row in largest)


def test_the_hot_case_splits_its_segments_twice():
    sizes = next(sizes for sizes in trials.SIZES if sizes.hot)
    lookups = trials.draw_lookups(np.random.default_rng(0), sizes, "power law")
    lengths = np.diff(lookups.offsets)
    config = tune(dim=64, itemsize=4, length=None)
    assert len(level_sizes(sizes.capacity, config.split, top=config.top)) == 2
    assert lengths.max() > 2 * config.split**2
    assert lengths.min() == 0
    ragged = next(sizes for sizes in trials.SIZES if sizes.length is None and not sizes.hot)
    assert trials.draw_lookups(np.random.default_rng(0), ragged, "power law").offsets[-1] < ragged.capacity


@pytest.mark.slow
def test_a_crash_and_a_hang_lose_only_their_class():
    """One child aborts, the next hangs; both classes have a verdict, and XLA computes them."""
    crash, hang = gather(broken.ABORT), gather(broken.HANG_TRACE)
    checked = ensure([crash, hang], GPU, dataclasses.replace(HOW, timeout=5.0))
    found = {of: verdict.reason for of, verdict in checked.verdicts.items()}
    assert found == {crash: "crashed", hang: "timed out"}
    assert "SIGABRT" in checked.verdicts[crash].detail
    assert "no answer within 5 s" in checked.verdicts[hang].detail
    for of in (crash, hang):
        assert gpu_choice(of) == "xla"
        assert not dispatched(of)
    assert missing([crash, hang], GPU) == ()


@pytest.mark.slow
def test_a_child_goes_on_after_every_mishap_and_only_right_and_fast_kernels_are_chosen():
    names = ("SLOW", "WRONG", "ABORT", "WRONG_NAN", "SEGFAULT", "HANG", "RAISE", "REFUSE", "EXIT", "NO_COMPILE", "FAST")
    classes = [gather(getattr(broken, name)) for name in names]
    checked = ensure(classes, GPU, dataclasses.replace(HOW, timeout=20.0))
    reasons = {name: checked.verdicts[of].reason for name, of in zip(names, classes, strict=True)}
    assert reasons.pop("FAST") in ("faster", "slower")
    assert reasons == {
        "SLOW": "slower",
        "WRONG": "wrong",
        "ABORT": "crashed",
        "WRONG_NAN": "wrong",
        "SEGFAULT": "crashed",
        "HANG": "timed out",
        "RAISE": "crashed",
        "REFUSE": "not covered",
        "EXIT": "crashed",
        "NO_COMPILE": "does not compile",
    }
    for name, of in zip(names, classes, strict=True):
        assert dispatched(of) == (checked.verdicts[of].reason == "faster"), name


def test_a_verdict_is_kept_before_the_next_class_begins(monkeypatch):
    """What was found is there although the check was interrupted."""

    def interrupted(todo, how, *, deadline):
        yield Verdict(kernel_class=todo[0], right=True, reason="faster")
        raise KeyboardInterrupt

    monkeypatch.setattr("jrec.selfcheck.ensure.run_checks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure([gather(16), gather(32)], GPU, HOW)
    verdicts.reread()
    assert gpu_choice(gather(16)) == "pallas"
    assert missing([gather(16), gather(32)], GPU) == (gather(32),)


def test_a_device_other_than_expected_gets_the_verdicts(monkeypatch):
    def on_a_slice(todo, how, *, deadline):
        if how.device != "NVIDIA H200 MIG 1g":
            raise runner.OtherDeviceError("NVIDIA H200 MIG 1g")
        yield Verdict(kernel_class=todo[0], right=True, reason="slower")

    monkeypatch.setattr("jrec.selfcheck.ensure.run_checks", on_a_slice)
    checked = ensure([gather(16)], Gpu(kind="NVIDIA H200", driver="1"), HOW)
    assert checked.machine == Machine.of(Gpu(kind="NVIDIA H200 MIG 1g", driver="1"))
    assert checked.new == 1


def test_processes_that_need_the_same_verdicts_check_once(monkeypatch):
    ran = []

    def one_after_another(todo, how, *, deadline):
        for of in todo:
            ran.append(of)
            time.sleep(0.05)
            yield Verdict(kernel_class=of, right=True, reason="faster")

    monkeypatch.setattr("jrec.selfcheck.ensure.run_checks", one_after_another)
    classes = [gather(16), gather(32)]
    checkers = [threading.Thread(target=ensure, args=(classes, GPU, HOW)) for _ in range(3)]
    for checker in checkers:
        checker.start()
    for checker in checkers:
        checker.join(30)
    assert ran == classes


def test_waiting_for_another_check_ends(cache):
    cache.mkdir()
    with store.locked(cache / "kernels.check.lock", seconds=0), pytest.raises(store.LockTimeoutError):
        ensure([gather(16)], GPU, HOW, wait=0.1)


def test_a_child_without_a_device_is_told_of():
    with pytest.raises(runner.SelfCheckError, match=r"ended with exit code 1\. Its last words: .*nowhere"):
        list(run_checks([gather(16)], dataclasses.replace(HOW, platform="nowhere")))


def test_no_child_outlives_its_parent():
    process = subprocess.Popen(
        [sys.executable, "-m", "jrec.selfcheck.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=runner._environment("cpu"),
    )
    request = dataclasses.asdict(dataclasses.replace(BROKEN_REQUEST, classes=(str(gather(broken.HANG_TRACE)),)))
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    while json.loads(process.stdout.readline())["event"] != "start":
        pass
    process.stdin.close()
    assert process.wait(20) == 4
    process.stdout.close()


def test_children_share_the_gpu_and_go_by_no_override(monkeypatch):
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "pallas")
    environment = runner._environment("cuda")
    assert environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environment["JAX_PLATFORMS"] == "cuda"
    assert verdicts.KERNELS_VARIABLE not in environment
    assert runner._how_it_ended(-signal.SIGSEGV) == "was ended by SIGSEGV"


def test_the_time_of_a_check_is_bounded():
    assert list(run_checks([gather(16)], HOW, deadline=time.monotonic() - 1)) == []


def test_classes_of_a_model():
    from jrec.ops.layout import EmbeddingLayout, FeatureConfig, TableConfig
    from jrec.ops.tt.shape import TTShape

    shape = TTShape.search(1000, 16, ranks=4)
    tables = [
        TableConfig(name="a", rows=10, dim=20),
        TableConfig(name="b", rows=10, dim=16, dtype="bfloat16"),
        TableConfig(name="c", rows=1000, dim=16, tier="tt", tt_shape=shape),
    ]
    layout = EmbeddingLayout.build(tables, [FeatureConfig(name=t.name, table=t.name) for t in tables])
    found = classes_of(layout, optimizer=lambda _: "Adam")
    assert len(found) == len(set(found))
    assert {CAST, gather(20), gather(16), gather(16, "bfloat16"), update(20, optimizer="Adam")} < set(found)
    assert update(16, "bfloat16", "Adam") in found
    assert update(16, "float32", "Adam") not in found
    assert [of.dim for of in found if of.kernel == "tt_products"] == [
        (shape.core_shapes[0][2], *shape.core_shapes[1][1:]),
        (shape.core_shapes[0][2] * shape.core_shapes[1][2], *shape.core_shapes[2][1:]),
    ]
    kernels = [of.kernel for of in found]
    assert kernels.index("row_update") > max(i for i, kernel in enumerate(kernels) if kernel != "row_update")


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
    assert update(16, "bfloat16", "RowWiseAdagrad") in asked
    assert asked <= set(classes_of(layout, optimizer=lambda _: "RowWiseAdagrad"))


def test_classes_are_selected_by_their_words():
    classes = all_classes()
    assert len(classes) == len(set(classes))
    assert select(classes, ["casted_update float32 64 SGD"]) == (update(64),)
    assert select(classes, ["casted_update float32 48 Adam"]) == (update(48, optimizer="Adam"),)
    assert {of.kernel for of in select(classes, ["row_* 64"])} == {"row_update"}
    assert set(select(classes, ["gather_reduce bfloat16", "64 Momentum"])) >= {gather(16, "bfloat16")}


def test_the_table_says_what_was_chosen():
    fast = Verdict(kernel_class=gather(16), right=True, reason="faster", kernel_seconds=1e-5, xla_seconds=2.5e-5)
    hang = Verdict(kernel_class=update(), right=False, reason="timed out", detail="no answer within 60 s")
    lines = report.table([fast, hang]).splitlines()
    assert lines[1].split() == ["gather_reduce", "float32", "16", "pallas", "faster", "10.0", "25.0", "2.50x"]
    assert lines[2].split() == [*str(update()).split(), "xla", "timed", "out", "-", "-", "-"]
    assert lines[3] == "casted_update float32 4 SGD: timed out: no answer within 60 s"
    assert report.summary({v.kernel_class: v for v in (fast, hang)}) == (
        "1 of 2 kernel classes are right and faster than XLA; 1 timed out"
    )


def test_the_command_without_a_gpu_says_so(capsys):
    assert cli.main(["kernels", "check"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "there is no NVIDIA GPU that JAX can use here" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["row_update float32 16 SGD", "gather_reduce float32 16", "casted_update float32 16 SGD"]
)
def test_the_command_tries_kernels_in_the_interpreter(capsys, only):
    assert cli.main(["kernels", "check", "--interpret", "--json", "--only", only, "--only", "tensor_cast"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kernel_class"] for line in lines] == [only, str(CAST)]
    assert (lines[0]["reason"], lines[0]["right"]) == ("not timed", True)
    assert lines[1]["reason"] in ("not timed", "not covered")
    assert not verdicts.verdict_file().exists()


def test_the_command_shows_and_forgets(capsys, monkeypatch):
    machine = Machine.of(GPU)
    fast = Verdict(kernel_class=gather(16), right=True, reason="faster", kernel_seconds=1e-5, xla_seconds=2e-5)
    store.record(verdicts.verdict_file(), machine, [fast])
    monkeypatch.setattr("jrec.ops.local_gpu.local_gpu", lambda: GPU)
    monkeypatch.setenv(verdicts.KERNELS_VARIABLE, "xla")
    assert cli.main(["kernels", "show"]) == 0
    shown = capsys.readouterr().out
    assert "JREC_KERNELS=xla overrides all of these" in shown
    assert f"cpu, driver 580.1, jax {machine.jax}" in shown
    assert "holds here" in shown
    assert "2.00x" in shown
    assert cli.main(["kernels", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == dataclasses.asdict(machine)
    assert cli.main(["kernels", "forget", "--only", "gather_reduce"]) == 0
    assert capsys.readouterr().out.startswith("1 verdicts removed")
    assert cli.main(["kernels", "show"]) == 0
    assert "no verdicts in" in capsys.readouterr().out


def test_processes_agree_on_what_all_of_them_chose(monkeypatch):
    classes = (gather(16), gather(32), gather(64))
    fast = [Verdict(kernel_class=of, right=True, reason="faster") for of in classes[:2]]
    store.record(verdicts.verdict_file(), Machine.of(GPU), fast)
    verdicts.reread()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [gpu_choice(of) for of in classes] == ["xla"] * 3  # nobody has asked the others yet
    other = np.zeros(kernel_check._ROOM, np.int32)
    other[:4] = 3, 0, 1, 1

    def gathered(mine):
        return np.stack([mine, other])

    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gathered)
    kernel_check.agree_on_kernels(classes)
    assert [gpu_choice(of) for of in classes] == ["xla", "pallas", "xla"]
    other[0] = 0  # a process that decides by no verdicts
    kernel_check.agree_on_kernels(classes)
    assert [gpu_choice(of) for of in classes] == ["xla"] * 3
