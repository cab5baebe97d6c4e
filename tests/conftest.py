"""Strictness for every test: 4 CPU devices, no silent dtype or rank promotion, real data where it is present."""

import contextlib
import gc
import os
import pathlib
import signal
import sys
import tempfile

# Each flag once: workers inherit those of the run's first process, and JAX looks compiled programs up by the flags.
os.environ["XLA_FLAGS"] = " ".join(
    dict.fromkeys(
        (
            *os.environ.get("XLA_FLAGS", "").split(),
            "--xla_force_host_platform_device_count=4",
            # XLA's older code generator compiles in half the time: the newer one sets up MLIR anew for every kernel.
            # Most programs run once or a few times, so that what LLVM would make of them is never paid back.
            *(
                "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
                "--xla_backend_optimization_level=0",
                "--xla_llvm_disable_expensive_passes=true",
                "--xla_cpu_parallel_codegen_split_count=1",
            )
            * (os.environ.get("JREC_TEST_CODEGEN") != "default"),
        )
    )
)

os.environ.setdefault("JREC_KEEP_MEMORY", "0")  # a worker runs thousands of tests: what one frees, others may have

import cover
import hypothesis
import jax
import pytest

from jrec import compile_cache

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell's background jobs do, and all that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test's files have to outlive a loss of power. That jrec waits for the disk, tests/faults checks by the calls of
# processes of their own; the disk itself only takes time.
os.fsync = os.fstat

# Only where Python keeps bytecode does pytest keep the assertions that it rewrites, which take a run 10 s.
sys.dont_write_bytecode = False

# Garbage is looked for less often than by default, which takes an eighth of a run's time.
gc.set_threshold(50_000, 20, 100)

# Tests that choose a cache folder of their own have the kernels of all others, which take a minute and more to compile.
CACHE_HOME = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
os.environ.setdefault("JREC_KERNEL_CACHE", str(CACHE_HOME / "jrec" / "kernels"))

# Tests compile the same programs again and again: the workers of a run, all that they start, and later runs do so once.
# Of 5,000 programs 3,000 took less than 20 ms each; to read those too, rather than to compile them, takes a tenth less.
COMPILED = contextlib.ExitStack()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    try:
        lasting = compile_cache.run_folder(CACHE_HOME / "jrec-tests" / compile_cache.machine_kind(), limit=2 << 30)
        folder = str(COMPILED.enter_context(lasting))
    except OSError:  # a home that cannot be written to
        folder = COMPILED.enter_context(tempfile.TemporaryDirectory(prefix="jrec-tests-"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same cases in every run, however busy the machine: a change fails for what it does, not for what chance finds.
# "thorough" draws others.
hypothesis.settings.register_profile(
    "jrec",
    deadline=None,
    print_blob=True,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=500)
hypothesis.settings.load_profile("jrec")

VARIANTS = "kernel variants compiled for sm_90a"
SHARED_DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
NO_SHARED_DATA = "the real click-log samples (a shared/data folder beside the checkout) are absent on this machine"


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real click-log samples that lies beside the checkout on development machines and in CI."""
    if not SHARED_DATA.is_dir():
        pytest.skip(NO_SHARED_DATA)
    return SHARED_DATA


@pytest.fixture(autouse=True)
def _compiled_variants(request, record_property):
    """Takes down how many kernels a test compiled ahead of time, for the summary."""
    yield
    if request.node.get_closest_marker("aot"):
        import aot

        record_property(VARIANTS, list(aot.compiled_variants))
        aot.compiled_variants.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases that others stand for line by line, as ``cover`` measured: CI runs them, not the default run."""
    full = cover.left_to_full()
    for item in items:
        if item.nodeid in full:
            item.add_marker("full")


def pytest_collection_finish():
    """Modules and tests stay, so garbage is not looked for among them."""
    gc.freeze()


def pytest_unconfigure():
    """Keeps what was compiled; only in the first process of a run."""
    COMPILED.close()


def pytest_terminal_summary(terminalreporter):
    """Says how many tests lacked real logs, and how many kernels were compiled, by this process or by workers."""
    reports = [report for of in terminalreporter.stats.values() for report in of if hasattr(report, "user_properties")]
    if compiled := [found for report in reports for name, found in report.user_properties if name == VARIANTS]:
        _registers(terminalreporter, [tuple(variant) for found in compiled for variant in found])
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NO_SHARED_DATA in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of real logs were skipped: {NO_SHARED_DATA}")


def _registers(terminalreporter, variants):
    """A line a kernel: its variants, and the registers that they take, by the other ptxas too where there is one."""
    terminalreporter.write_line(f"{len(variants)} {VARIANTS}")
    for kernel in sorted({name for name, *_ in variants}):
        ours, theirs = zip(*((ours, theirs) for name, ours, theirs in variants if name == kernel), strict=True)
        line = f"{kernel:30} {len(ours):4} variants, {min(ours):3} to {max(ours):3} registers"
        if any(theirs):
            more = sum(b > a for a, b in zip(ours, theirs, strict=True))
            fewer = sum(b < a for a, b in zip(ours, theirs, strict=True))
            line += f"; by the other ptxas {min(theirs):3} to {max(theirs):3}, more in {more}, fewer in {fewer}"
        terminalreporter.write_line(line)
