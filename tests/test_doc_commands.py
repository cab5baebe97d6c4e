"""Every shell command of the documentation is one that its program takes; those that can run here do, page by page."""

import argparse
import ast
import gzip
import importlib
import pathlib
import re
import shlex
import shutil

import jax
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
import shop_logs
from doc_commands import COMMANDS, PAGES, ROOT, DocCommand, block_commands, check, commands_of, inline_commands

from jrec import cli

BLOCKS = {page: block_commands(page) for page in PAGES}
INLINE = {page: inline_commands(page) for page in PAGES}

NOT_RUN = {
    r"pip |\S*python\S* -m (venv|pip) |bash scripts/": "installs packages",
    r"\S*python\S* -m pytest ": "tests",
    r"python\S* -m benchmarks\.": "measures for minutes; tests/test_benchmark*.py run benchmarks on small data",
    r"python -m scripts\.site_pictures ": "needs Chromium; tests/test_site*.py",
    r"jrec serve ": "goes on until it is stopped; tests/test_serve.py",
    r"jrec follow ": "goes on until it is stopped; tests/test_follow.py",
    r"curl ": "asks a server; tests/test_serve.py",
    r"psql |jrec prepare .* --input - ": "reads a database; tests/test_prepare_streams.py has pipes",
    r"jrec prepare .* --input s3://": "reads a bucket",
    r"jrec prepare (criteo|avazu|taobao|movielens)": "logs under research terms; tests/test_prepare_formats.py",
    r"jrec .*( --distributed| --coordinator )": "several hosts; tests/test_mesh_processes.py",
    r"jrec train CONFIG ": "only the end of a command; tests/test_mesh_checkpoint.py, tests/test_run_length.py",
    r"jrec train .* model=my_package": "the package is the reader's; tests/test_own_model.py",
    r"jrec train .*'?log\.to=": "needs a tracker's package; tests/test_trackers.py",
    r"jrec train .*(evaluate\.progressive|data\.half_life)=": "a log with times; test_order_of_time.py",
    r"jrec predict runs/next .*--why ": "a run of another page; tests/test_why_best.py",
    r"jrec import-dlrm |jrec eval runs/imported ": "a file of PyTorch's; tests/test_import_dlrm.py",
    r"jrec \S+ runs/script|jrec train shop.toml": "a run of the page's program; tests/test_library_page.py",
}
"""Commands of code blocks that the test of stories leaves out, and why, or which test has the like."""

SMALLER = {
    r"(jrec train (?:configs/|criteo-kaggle)\S*.*)": r"\1 max_steps=24 data.batch_size=64 data.workers=0",
    r"(jrec train next_item\S*.*)": r"\1 max_steps=8 model.embedding_dim=8 data.workers=0 evaluate.every_steps=4",
    r"(jrec train din\S*.*)": r"\1 max_steps=8 model.embedding_dim=8 data.workers=0",
    r"(jrec train towers\S*.*)": r"\1 max_steps=8 model.embedding_dim=8 data.workers=0 evaluate.every_steps=4",
    r"max_steps=(\d)0000": r"max_steps=\g<1>0",
    r"capacity=1000000": "capacity=500",
    r"-hardware h200x8 (.*)--tables-on 4-7": r"-hardware h200x8 \1--devices 4 --tables-on 2-3",
    r"mesh\.devices=8": "mesh.devices=4",
    r"a100-4x4 ": "a100-4x4 --devices 4 ",
    r"--devices 16": "--devices 4",
    r"--relative-error 0.1 --rank 128": "--relative-error 0.1 --rank 8",
    r"--rank 32 ": "--rank 4 ",
    r"--whole-rows 10000": "--whole-rows 100",
    r"(jrec reorder data/kaggle.*)": r"\1 --min-rows 100",
    r"(jrec init \S+ --out \S+)": r"\1 --quick",
}
"""What is replaced in a command before it runs, for small data, few steps and four devices."""

AFTER = {"docs/scale_up.md": "docs/from_csv.md"}
"""Pages that go on where another one ends."""

EXIT_CODES = {r"jrec prepare csv --input (?!.*--schema)": 1}
"""Commands that are to end with another code than 0."""

JOIN = """
[[join]]
file = "users.csv"
name = "users"
key = "user"
on = "user_id"
[[join.dense]]
column = "age"
missing = 30
[[join.categorical]]
column = "city"
"""
SYNTHESIZED = {
    "kaggle": "criteo-kaggle",
    "criteo_kaggle": "criteo-kaggle",
    "terabyte": "criteo-terabyte",
    "quickstart": "quickstart",
    "rm1": "rm1",
}
KEPT = {
    page: [command.text for command in commands if not any(re.match(pattern, command.text) for pattern in NOT_RUN)]
    for page, commands in BLOCKS.items()
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A configuration of nothing but data."""
    path = tmp_path_factory.mktemp("base") / "base.toml"
    path.write_text('[data]\npath = "data/clicks"\n')
    return path


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page] or INLINE[page]])
def test_every_command_is_one_that_its_program_takes(page, base):
    wrong = []
    for command in BLOCKS[page] + INLINE[page]:
        try:
            check(command, base)
        except ValueError as error:
            wrong.append(str(error))
    assert not wrong


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("jrec trane quickstart", "trane"),
        ("jrec train quickstart --resum", "--resum"),
        ("jrec train clicks.toml data.batchsize=3", "batchsize"),
        ("srun -n 2 jrec train clicks.toml \\\n  data.batch_size=none", "batch_size"),
        ("jrec train clicks.yaml", "does not end in .toml"),
        ("jrec train configs/absent.toml", "not in the repository"),
        ("jrec predict runs/a b.csv --out scores.json", "does not end in .parquet"),
        ("jrec plan data/a --hardware h300x8", "neither a preset"),
        ("psql -c 'COPY a' | jrec prepare csv --input -", "--out"),
        ("A=1 python -m benchmarks.embedding --device tpus", "tpus"),
        ("python -m benchmarks.absent", "no module"),
        ("bash scripts/absent.sh", "not in the repository"),
        ("pip install '.[trains]'", "no extra trains"),
    ],
)
def test_a_wrong_command_is_refused(script, why, base):
    *_, command = commands_of("page", script, 7, strict=False)
    with pytest.raises(ValueError, match=f"page:7: .*{re.escape(why)}"):
        check(command, base)


@pytest.mark.parametrize("text", ["jrec export RUN --hot", "jrec train OUT/config.toml epoch=2"])
def test_a_wrong_command_in_prose_is_refused(text, base):
    with pytest.raises(ValueError, match=f"page:1: .*{text.split()[-1].partition('=')[0]}"):
        check(DocCommand("page", 1, tuple(text.split()), inline=True), base)


def test_a_program_that_nobody_checks_is_refused():
    with pytest.raises(ValueError, match=r"page:2: .*'docker'"):
        commands_of("page", "jrec train quickstart\ndocker run x", 1, strict=True)


@pytest.mark.parametrize("table", [NOT_RUN, SMALLER, EXIT_CODES], ids=["NOT_RUN", "SMALLER", "EXIT_CODES"])
def test_no_entry_is_out_of_date(table):
    kept = [text for texts in KEPT.values() for text in texts]
    commands = [command.text for page in BLOCKS.values() for command in page] if table is NOT_RUN else kept
    assert not [pattern for pattern in table if not any(re.search(pattern, text) for text in commands)]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with everything that pages take for granted: logs, datasets, configurations, runs and exports."""
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_logs(folder)
        for name, like in SYNTHESIZED.items():
            run(f"jrec synth --like {like} --rows 3000 --table-rows 2000 --out data/{name}")
        (folder / "configs").symlink_to(ROOT / "configs")
        run("jrec links --devices 4 --out node.toml")
        for day in ("monday", "tuesday"):
            rows = " --vocabulary-from data/monday" if day == "tuesday" else ""
            run(f"jrec prepare csv --schema clicks.toml --input {day}.csv --out data/{day}{rows}")
            run(f"jrec train model.toml data.path=data/{day} out=runs/{day}")
        shutil.copytree("data/monday", "data/clicks")
        shutil.copytree("runs/monday", "runs/clicks")
        run("jrec export runs/monday --out exports/monday")
        run("jrec plan data/kaggle --hardware h200x8 --devices 4 --config configs/criteo_kaggle.toml --out plan")
        run("jrec train configs/criteo_kaggle.toml data.path=data/kaggle mesh.devices=4 plan=plan out=runs/kaggle")
    return folder


def write_logs(folder):
    for seed, day in enumerate(("monday", "tuesday", "clicks", "tomorrow")):
        shop_logs.write_log(folder / f"{day}.csv", 1000, seed=seed % 2, label=day != "tomorrow")
    (folder / "tuesday.csv.gz").write_bytes(gzip.compress((folder / "tuesday.csv").read_bytes()))
    table = pyarrow.csv.read_csv(folder / "monday.csv")
    pyarrow.parquet.write_table(table, folder / "monday.parquet")
    pyarrow.feather.write_feather(table, folder / "tuesday.arrow", compression="uncompressed")
    users = "user_id,age,city\n" + "".join(f"u{n},{20 + n},c{n % 3}\n" for n in range(45))
    (folder / "users.csv").write_text(users)
    (folder / "users_tuesday.csv").write_text(users)
    (folder / "users_tuesday.csv.gz").write_bytes(gzip.compress(users.encode()))
    (folder / "clicks_users.toml").write_text(shop_logs.TWO_FEATURES + JOIN)
    ratings = "".join(f"u{n % 40}\ti{n % 7}\t{n % 5 + 1}\t{n}\n" for n in range(1000))
    (folder / "ml-100k.inter").write_text(f"user_id:token\titem_id:token\trating:float\ttimestamp:float\n{ratings}")
    plays = "".join(f"u{n % 40},i{(n + 3 * (n // 40)) % 60},{n}\n" for n in range(400))
    (folder / "plays.csv").write_text(f"user,item,at\n{plays}")
    for name, text in zip(("plays", "next_item"), toml_blocks("docs/next_item.md"), strict=True):
        (folder / f"{name}.toml").write_text(text)
    views = "".join(f"u{n % 40},c{n % 3},i{(n * 7 + n // 40) % 60},k{n % 5},{n % 9},{n},{n % 2}\n" for n in range(2000))
    (folder / "views.csv").write_text(f"user,country,item,kind,price,at,click\n{views}")
    for name, text in zip(("views", "towers"), toml_blocks("docs/two_towers.md"), strict=True):
        (folder / f"{name}.toml").write_text(text)
    (folder / "shop.csv").write_text(f"user,country,item,kind,price,at,click\n{views}")
    for name, text in zip(("shop", "din"), toml_blocks("docs/din.md"), strict=True):
        (folder / f"{name}.toml").write_text(text)
    lines = "".join(
        f"{n % 2},{'' if n % 2 == 0 else n % 3 // 2},{'' if n % 2 == 0 else n % 11},{n % 7},u{n % 40},i{n % 9}\n"
        for n in range(1000)
    )
    (folder / "log.csv").write_text(f"click,bought,seconds,price,user,item\n{lines}")
    for name, text in zip(("columns", "tasks"), toml_blocks("docs/several_labels.md"), strict=True):
        (folder / f"{name}.toml").write_text(text)
    ratings = "".join(f"{n % 5 + n % 7 / 7:.2f},{n % 3},{n % 11},u{n % 40},i{n % 9}\n" for n in range(1000))
    (folder / "ratings.csv").write_text(f"rating,trust,price,user,item\n{ratings}")
    for name, text in zip(("ratings", "numbers"), toml_blocks("docs/targets.md"), strict=True):
        (folder / f"{name}.toml").write_text(text)
    (folder / "clicks.toml").write_text(shop_logs.TWO_FEATURES)
    (folder / "model.toml").write_text(shop_logs.CONFIG.replace("[data]", '[data]\npath = "data/clicks"'))


def toml_blocks(page):
    """The TOML of a page, block by block."""
    return re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(text, code=0):
    """Runs a command of jrec in this process, whose devices are four."""
    for pattern, smaller in SMALLER.items():
        text = re.sub(pattern, smaller, text)
    program, *arguments = shlex.split(text)
    assert program == "jrec"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert cli.main(arguments) == code, text


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if KEPT[page] and page not in AFTER.values()])
def test_the_commands_of_a_page_run_one_after_the_other(page, given, tmp_path, monkeypatch):
    shutil.copytree(given, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    commands = [*dict.fromkeys(KEPT.get(AFTER.get(page), []) + KEPT[page])]  # one that the page repeats runs once
    for made in re.findall(r"(?:--out |\bout=)(\S+)", " ".join(commands)):
        path = pathlib.Path(made)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for command in commands:
        run(command, next((code for pattern, code in EXIT_CODES.items() if re.match(pattern, command)), 0))


def helps():
    """What ``--help`` of the command and of its subcommands ends in, and what begins benchmarks and scripts."""
    yield "jrec --help", cli.EXAMPLES
    for name, command in COMMANDS.items():
        parsers = [cli.command_parser(command, importlib.import_module(command.module))]
        for parser in parsers:  # subcommands of a command join behind it
            nested = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
            parsers += [one for some in nested for one in some.values()]
            if parser.epilog:
                yield f"jrec {name} --help", parser.epilog
    for path in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")]):
        yield str(path.relative_to(ROOT)), ast.get_docstring(ast.parse(path.read_text())) or ""


HELPS = [
    command
    for place, text in helps()
    for command in commands_of(place, text, 1, strict=False)
    if command.words[:2] != ("jrec", "COMMAND")
]


@pytest.mark.parametrize("command", HELPS, ids=lambda command: command.place)
def test_examples_of_helps_are_what_their_program_takes(command, base):
    check(command, base)


def test_every_command_has_an_example_in_its_help():
    assert COMMANDS.keys() <= {command.words[1] for command in HELPS if command.words[0] == "jrec"}
