"""``jrec prepare``: a raw click log into a dataset folder."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence

from jrec.app.commands.arguments import (
    COUNT,
    SEED,
    THREADS,
    add_join,
    add_quiet,
    by_name,
    fractions,
    integer,
    options_of,
    progress_of,
)
from jrec.data.schema import LOG_ENDINGS

DESCRIPTION = "Turn a raw click log into a dataset that `jrec train` reads. docs/formats.md describes every format."
EPILOG = """examples:
  jrec prepare criteo-kaggle --input train.txt --out data/kaggle
  jrec prepare criteo-terabyte --input $(ls -v day_*.gz) --max-rows 40000000 --out data/terabyte
  jrec prepare criteo-terabyte --input $(ls -v day_*.gz) --out /shared/terabyte --ray auto
  jrec prepare avazu --input train.gz --min-count 4 --out data/avazu
  jrec prepare taobao --input UserBehavior.csv --on-bad-line skip --positives-per-user 10 --out data/taobao_sequences
  jrec prepare taobao --form intent --input UserBehavior.csv --on-bad-line skip --out data/taobao
  jrec prepare movielens --input ratings.dat --users users.dat --movies movies.dat --out data/ml1m
  jrec prepare csv --schema clicks.toml --input monday.csv tuesday.csv.gz --out data/clicks
  jrec prepare csv --schema clicks.toml --train a.parquet --valid b.parquet --test c.parquet --out data/clicks
  jrec prepare csv --schema clicks.toml --input monday.csv --growing user,item --out data/monday
  jrec prepare csv --schema clicks.toml --input tuesday.csv --join users=new_users.csv --out data/tuesday
  jrec prepare csv --schema ratings.toml --input ratings.csv --split-by leave-one-out --out data/next_item
  jrec prepare csv --input ml-100k.inter --out data/ml100k  # guesses a schema that joins ml-100k.user and ml-100k.item
  jrec prepare avazu --input train.zst --out data/avazu
  jrec prepare csv --schema clicks.toml --input s3://logs/clicks/ --out data/clicks
  jrec prepare csv --schema clicks.toml --input friday.csv --vocabulary-from data/clicks --split 0,0,1 --out data/friday

The output folder appears when it is complete. An interrupted run is started anew by the same command. A pipe is copied
to disk beside DIR first, since it can be read only once.
"""
_SPLITS = ("train", "valid", "test")
_LEARNED = ("min_count", "max_rows", "growing", "key_seed")
FORMATS = {
    "criteo-kaggle": "Criteo's Kaggle challenge: train.txt",
    "criteo-terabyte": "Criteo's Terabyte log: day_0.gz to day_23.gz",
    "avazu": "Avazu's Kaggle challenge: train.gz",
    "taobao": "Taobao UserBehavior.csv: the next item after a history, or purchase intent",
    "movielens": "MovieLens ratings.dat, ratings.csv, or a CSV of user and movie ids",
    "csv": "any delimited text, JSON lines, Parquet or Arrow files, described by --schema",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments: a subcommand a format."""
    formats = parser.add_subparsers(dest="format", metavar="FORMAT", required=True)
    for name, description in FORMATS.items():
        one = formats.add_parser(
            name,
            help=description,
            description=description,
            epilog=EPILOG,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "csv":
            one.add_argument(
                "--schema", metavar="FILE",
                help="TOML or JSON file of the columns; without it one is guessed, shown, and written beside DIR",
            )  # fmt: skip
            add_join(one)
        if name == "taobao":
            _add_taobao(one)
        if name == "movielens":
            one.add_argument("--users", metavar="FILE", help="users.dat to join: gender, age, occupation, zip code")
            one.add_argument("--movies", metavar="FILE", help="movies.dat or movies.csv to join: genres, year")
            one.add_argument(
                "--negatives", type=COUNT, default=1, metavar="N",
                help="for input without ratings: movies drawn as negatives for each interaction (default 1)",
            )  # fmt: skip
            one.add_argument("--seed", type=SEED, default=0, help="seed of the drawn negatives (default 0)")
        _add_common(one)


def meant(arguments: Sequence[str]) -> str:
    """The command that was meant, where a file stands in place of the format."""
    name = arguments[0] if arguments else "-"
    if name in FORMATS or name.startswith("-") or not (pathlib.Path(name).exists() or name.endswith(LOG_ENDINGS)):
        return ""
    files = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    rest = arguments[len(files) :]
    out = [] if "--out" in rest else ["--out", f"data/{pathlib.Path(name).name.partition('.')[0]}"]
    schema = "" if "--schema" in rest else ", which guesses a schema first"
    command = shlex.join(["jrec", "prepare", "csv", "--input", *files, *rest, *out])
    return f"FORMAT is {name!r}, a file; did you mean `{command}`{schema}? Formats: {', '.join(FORMATS)}"


def _add_taobao(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--form", choices=("sequence", "intent"), default="sequence",
        help="sequence (default): is an item the user's next one after a history? intent: does an event buy, cart or"
        " favour, or only view? The options below are of sequences",
    )  # fmt: skip
    parser.add_argument(
        "--history", type=COUNT, metavar="N", help="behaviours before the target that an example keeps (default 20)"
    )
    parser.add_argument("--negatives", type=COUNT, metavar="N", help="items drawn for each positive (default 1)")
    parser.add_argument(
        "--draw", choices=("popularity", "uniform"),
        help="negatives are items of other events of about the same time (default), or drawn from all items alike",
    )  # fmt: skip
    parser.add_argument(
        "--positives-per-user", type=COUNT, metavar="N", help="choose up to N of a user's behaviours (default all)"
    )
    parser.add_argument("--seed", type=SEED, help="seed of negatives and chosen positives (default 0)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    from jrec.prepare.prepare_options import SPLIT_BY, PrepareOptions

    default = PrepareOptions()
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help="files, folders, patterns (*, **/), URIs (s3://, gs://) or pipes, in order of time: text, plain or"
        " compressed, and for csv tables (Parquet, Arrow, JSON lines); - is standard input",
    )
    for name in _SPLITS:
        text = "instead of --input: files of the training split" if name == "train" else f"files of the {name} split"
        parser.add_argument(f"--{name}", nargs="+", metavar="FILE", help=text)
    parser.add_argument("--out", required=True, metavar="DIR", help="the dataset folder to make")
    parser.add_argument(
        "--split", type=fractions, default=default.split, metavar="A,B,C",
        help="fractions of the examples, in order of time, for train, valid and test (default 0.8,0.1,0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--split-by", choices=SPLIT_BY, default=default.split_by,
        help="split in order of time (default), draw each example's split at random, or take of each user the last"
        " example for the test, the one before for validation and the one before that for training (needs a history)",
    )  # fmt: skip
    parser.add_argument(
        "--split-seed", type=SEED, default=default.split_seed, help="seed of --split-by random (default 0)"
    )
    parser.add_argument(
        "--min-count", type=COUNT, metavar="N",
        help="values seen less often in training share the out-of-vocabulary row (default 2)",
    )  # fmt: skip
    parser.add_argument(
        "--max-rows",
        type=integer(1, 2**32 - 1),
        metavar="N",
        help="hash the values of tables that would have more rows",
    )
    parser.add_argument(
        "--growing", metavar="TABLE[,TABLE]",
        help="store keys in the place of rows for these tables ('all' for all): training gives new values rows as they"
        " come, and takes rows from old ones ([tables.growth])",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary-from", metavar="DATASET",
        help="give values the rows that they have in this earlier dataset, new ones its out-of-vocabulary rows or hash"
        " buckets; what is of its rows (runs, plans) fits the result. Allows --split 0,0,1",
    )  # fmt: skip
    parser.add_argument(
        "--on-bad-line", choices=("error", "skip"), default=default.on_bad_line,
        help="stop at a malformed line (default), or count such lines and keep them aside in DIR/bad_lines.tsv",
    )  # fmt: skip
    parser.add_argument(
        "--no-labels", action="store_true",
        help="for `jrec predict`: the log has no labels, or its labels do not matter (Criteo's, Avazu's and csv logs)",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a finished dataset at DIR")
    parser.add_argument("--keep-order", action="store_true", help="accept inputs whose numbers are not ascending")
    parser.add_argument(
        "--block-size", type=COUNT, default=default.block_size, metavar="N", help="examples in a block (default 8192)"
    )
    parser.add_argument(
        "--shard-examples", type=COUNT, default=None, metavar="N",
        help="examples in a full shard, a multiple of the block size (default about a million)",
    )  # fmt: skip
    parser.add_argument(
        "--key-seed",
        type=integer(0, 2**64 - 1),
        metavar="N",
        help="seed of the hash of long values (default 0)",
    )
    parser.add_argument(
        "--threads", type=THREADS, default=default.threads, metavar="N", help="threads (default: the cores, at most 8)"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS",
        help="parse, encode and write on a Ray cluster whose machines see the same files: HOST:PORT, auto, or local to"
        " start one here; a piece of work whose worker dies is done once more (docs/clusters.md)",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Prepares the dataset and says what is in it."""
    if args.format == "csv" and args.schema is None:
        return _guess(args)
    from jrec.data.schema import Schema
    from jrec.outputs import check_output
    from jrec.prepare.prepare import prepare
    from jrec.prepare.prepare_options import PrepareOptions, refuse_learned

    shard_examples = args.shard_examples
    if shard_examples is None:
        shard_examples = max((1 << 20) // args.block_size, 1) * args.block_size
    growing = {} if args.growing is None else {"growing": _names(args.growing)}
    if args.vocabulary_from is None:
        key_seed = args.key_seed or 0
    elif learned := [name for name in _LEARNED if getattr(args, name) is not None]:
        raise refuse_learned(learned[0], args.vocabulary_from)
    else:
        key_seed = Schema.load(args.vocabulary_from, check_files=False).key_seed
    more = {"labels": not args.no_labels, "shard_examples": shard_examples, **growing}
    options = options_of(PrepareOptions, args, **more)
    check_output(args.out, inputs=[getattr(args, name, None) or "" for name in ("schema", "users", "movies")])
    with _workers(args) as workers:
        schema = prepare(
            _source(args, key_seed),
            _inputs(args),
            args.out,
            options,
            command=shlex.join(["jrec", *sys.argv[1:]]),
            progress=progress_of(args),
            report=lambda message: print(message, file=sys.stderr),
            workers=workers,
        )
    print(f"{args.out}: {schema.sizes}")
    return 0


@contextlib.contextmanager
def _workers(args: argparse.Namespace) -> Iterator[concurrent.futures.Executor | None]:
    """Ray's, if they are asked for."""
    if args.ray is None:
        yield None
        return
    from jrec.app.ray import RayExecutor, connected

    with connected(args.ray, cpus=args.threads):
        yield RayExecutor()


def _guess(args: argparse.Namespace) -> int:
    """Writes a guessed schema beside the dataset to be, and shows it; prepares nothing."""
    from jrec.data.schema import DatasetError
    from jrec.outputs import write_file
    from jrec.prepare.readers.guess import guess_schema, questions
    from jrec.prepare.readers.lines import check_inputs
    from jrec.prepare.readers.streams import read_names
    from jrec.prepare.splits import flat

    if args.join:
        raise DatasetError("--join names files that a schema joins; give it with --schema")
    inputs = _inputs(args)
    first, *further = read_names(inputs if isinstance(inputs, list) else flat(inputs))
    path = pathlib.Path(f"{args.out.rstrip('/')}.schema.toml")
    if path.exists():
        raise DatasetError(f"--schema is not given, but {path} exists; pass it as --schema, or remove it to guess anew")
    check_inputs([first], keep_order=True)
    text = guess_schema(first, further)
    write_file(path, text + "\n", inputs=[first])
    print(text)
    for question in questions(text):
        print(f"jrec: please decide: {question}", file=sys.stderr)
    print(
        f"jrec: nothing is prepared yet: this schema is only a guess, written to {path}. Look at it, change what is"
        f" wrong, and run the same command with --schema {shlex.quote(str(path))}",
        file=sys.stderr,
    )
    return 1


def _names(text: str) -> tuple[str, ...]:
    """A list of names with commas."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _inputs(args: argparse.Namespace) -> list[str] | dict[str, list[str]]:
    from jrec.data.schema import DatasetError

    by_split = {name: files for name in _SPLITS if (files := getattr(args, name))}
    if bool(args.input) == bool(by_split):
        raise DatasetError(
            "give either --input, a log to split, or the files of each split as --train, --valid and --test"
        )
    return args.input or by_split


def _source(args: argparse.Namespace, key_seed: int):
    from jrec.prepare import readers

    if args.format == "csv":
        from jrec.prepare.joined import csv_source

        return csv_source(readers.load_schema(args.schema)).with_joined(by_name(args.join))
    if args.format == "movielens":
        options = readers.MovieLensOptions(
            users=args.users, movies=args.movies, negatives=args.negatives, seed=args.seed
        )
        return readers.MovieLens(options, key_seed)
    if args.format == "avazu":
        return readers.Avazu()
    if args.format == "taobao":
        return _taobao(args)
    return readers.Criteo(args.format)


def _taobao(args: argparse.Namespace):
    from jrec.data.schema import DatasetError
    from jrec.prepare import readers

    names = ("history", "negatives", "draw", "positives_per_user", "seed")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.form == "sequence":
        return readers.TaobaoSequences(readers.SequenceOptions(**options))
    if options:
        option = next(iter(options)).replace("_", "-")
        raise DatasetError(f"--{option} is an option of --form sequence; --form intent has no sequences")
    return readers.Taobao()
