"""``jrec.fit``: a table of clicks into a trained model, by what the commands do, one after the other."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jrec import compile_cache
from jrec.app.config.typed_toml import toml_value
from jrec.errors import ConfigError
from jrec.json_values import JsonMapping, JsonObject
from jrec.outputs import write_file
from jrec.prepare.prepare import prepare
from jrec.prepare.prepare_options import PrepareOptions
from jrec.prepare.readers.lines import check_inputs
from jrec.prepare.readers.streams import InMemory, Input, InputLike, read_names, spool
from jrec.progress import Progress
from jrec.shown import Shown, counted

if TYPE_CHECKING:
    from jrec.app.callbacks import Callback
    from jrec.app.first_choice import FirstChoice
    from jrec.app.predict import LoadedRun
    from jrec.serving.format import Dtype

_LOG, _SCHEMA, _DATA, _CONFIG, _RUN = "log", "schema.toml", "data", "model.toml", "run"


def fit(
    data: InputLike | Sequence[InputLike] | Mapping[str, object],
    *,
    label: str | Sequence[str] = "",
    numeric: bool | Sequence[str] = False,
    time: str = "",
    weight: str = "",
    schema: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    seed: int | None = None,
    quick: bool = False,
    config: Mapping[str, object] | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> FittedModel:
    """Trains a model of a table's label, one of two values or a number, or of several labels.

    Guesses a schema, prepares a dataset, chooses a configuration and trains as ``jrec prepare csv``, ``jrec init`` and
    ``jrec train`` do: these commands with the files of ``folder`` give the same bits. Where ``jrec init`` proposes
    target means for a guessed schema (docs/crosses.md), they are tried, and kept where valid says that they are better.

    Args:
      data: A table (of pandas, polars, Arrow, …), columns by name, or paths of Parquet, CSV or JSON lines files.
        Several tables or paths, in a list, follow each other.
      label: The column to predict, of two values. Or several, of which a line may lack any: all are learnt side by
        side, and the first decides (docs/several_labels.md).
      numeric: Whether the label is a number, such as a rating or a price, and predictions are numbers. Of several
        labels the names of those that are.
      time: The column that says when a line was; "" to guess it. The last tenth of the lines is then the test split,
        the tenth before it is for early stopping. Without times, these are drawn at random.
      weight: The column of how much each line counts, in training and in metrics: finite numbers of at least 0; "" for
        none.
      schema: A file that says what the columns mean (docs/formats.md), in place of ``label``, ``time``, ``weight`` and
        a guess.
      folder: Where everything is kept, a new or an empty folder; None for a temporary one, which goes with the model.
      epochs: Passes over the training split at most; None as ``jrec init`` says.
      seed: The seed of first values and of the order of examples; None as ``jrec init`` says.
      quick: Whether to choose the kind of model by a rule, and train no trials.
      config: Keys of a configuration that win, such as ``{"model.embedding_dim": 32}`` (docs/configuration.md).
      quiet: Whether to write neither messages nor progress to standard error.
      callbacks: Functions that the training calls after log records, evaluations and checkpoints, with an
        ``jrec.app.callbacks.Event``; what one raises ends it.

    Returns:
      The model.

    Raises:
      ConfigError: If neither ``label`` nor ``schema`` is given, the folder is in use, or a key of ``config`` is wrong.
      DatasetError: If the table cannot be read, or its label cannot be learned.
      DivergedError: If the loss becomes NaN or infinite.
      KeyboardInterrupt: On SIGINT or SIGTERM.

    Example:
      >>> model = jrec.fit(clicks, label="click", time="ts")  # doctest: +SKIP
      >>> model.predict(new_clicks)  # doctest: +SKIP
      array([0.0312, 0.4471], dtype=float32)
    """
    labels = [label] if isinstance(label, str) and label else [*label]
    numbers = (labels if numeric else []) if isinstance(numeric, bool) else [*numeric]
    if odd := [name for name in numbers if name not in labels]:
        raise ConfigError(f"numeric names {odd[0]!r}, but the labels are {', '.join(labels) or 'none'}")
    if bool(label) == (schema is not None):
        raise ConfigError(
            f"label is {label!r} and schema is {schema}; give label, the column to predict, or schema, a file that"
            " says which one that is"
        )
    for key, value in (("time", time), ("weight", weight), ("numeric", numeric)):
        if schema is not None and value:
            raise ConfigError(
                f"{key} is {value!r}, but the schema {schema} says which column that is; leave one of them out"
            )

    def say(line: str) -> None:
        if not quiet:
            sys.stderr.write(f"jrec: {line}\n")

    with compile_cache.enabled(), _kept(folder) as (place, temporary):
        inputs = _spooled(data, place)
        with contextlib.ExitStack() as named:
            for one in inputs:
                named.enter_context(one.errors_by_name())
            check_inputs([one.file for one in inputs], keep_order=True)
            if schema is None:
                guess = {"labels": labels, "numeric": numbers, "time": time, "weight": weight}
                _guess(inputs, place, guess, say=say)
            prepared = functools.partial(_prepare, inputs, place, quiet=quiet, say=say)
            prepared(place / _SCHEMA if schema is None else schema)
            own = {"epochs": epochs, "max_steps": None if epochs is None else 0, "seed": seed} | dict(config or {})
            settings = {"out": str(place / _RUN), **({"log.progress": "off"} if quiet else {}), **own}
            overrides = [f"{key}={toml_value(value)}" for key, value in settings.items() if value is not None]
            _choose(place, overrides, prepared if schema is None else None, quick=quick, say=say)
        metrics = _train(place, overrides, quiet=quiet, say=say, callbacks=callbacks)

        from jrec.app.predict import load_run

        model = FittedModel(place, load_run(place / _RUN), metrics)
        if temporary:
            weakref.finalize(model, shutil.rmtree, place, ignore_errors=True)
        return model


class FittedModel:
    """A trained model; ``jrec.fit`` makes it.

    Attributes:
      folder: What was made: ``schema.toml``, the dataset ``data``, ``model.toml``, the run ``run`` with its report.
      run: The run, for what ``predict`` does not give (``jrec.load_run``).
      metrics: By split, "valid" and "test", its metrics by name, "auc" and "log_loss" among them, or "rmse" and "r2".
        Of several labels they are the first one's, and under "tasks" each label's own.
    """

    def __init__(self, folder: pathlib.Path, run: LoadedRun, metrics: dict[str, JsonObject]):
        self.folder, self.run, self.metrics = folder, run, metrics

    def __repr__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()

    def _shown(self) -> Shown:
        schema = self.run.restored.schema
        features = counted(len(schema.dense) + len(schema.categorical), "feature")
        tables = counted(len(schema.tables), "table")
        rows = counted(sum(table.rows for table in schema.tables), "row")
        examples = counted(schema.splits["train"].examples, "example")
        names = {"rmse": "RMSE", "r2": "R2"} if schema.numbers is not None else {"auc": "AUC", "log_loss": "log loss"}
        splits = [
            (split, *(_measured(name, metrics[key]) for key, name in names.items()))
            for split, metrics in self.metrics.items()
        ]
        return Shown((f"jrec model of {features} ({tables} of {rows}), {examples}", f"folder: {self.folder}"), splits)

    def predict(self, data: InputLike | Sequence[InputLike] | Mapping[str, object]) -> Any:
        """Probabilities, or of a label that is a number such numbers, (rows,) float32, in the order of the rows.

        Of several labels by name.

        Values that training did not see are read as unknown; a warning names some where they are many.

        Args:
          data: As of ``fit``; the label may be absent.

        Raises:
          DatasetError: If a column is missing, or a value is none that it may have.
        """
        if not _is_log(data):
            return self.run.predict(with_index(data))
        pieces, tasks = [piece.predictions for piece in self._scored(data)], self._tasks
        none = np.empty(0, np.float32)
        if tasks:
            return {task: np.concatenate([none, *(piece[task] for piece in pieces)]) for task in tasks}
        return np.concatenate([none, *pieces])

    def evaluate(self, data: InputLike | Sequence[InputLike] | Mapping[str, object]) -> dict[str, Any]:
        """Metrics on other rows, by name as in ``metrics``.

        Args:
          data: As of ``fit``, with the label, and with the weights where they are to count.

        Raises:
          DatasetError: As ``predict``; if the label is absent.
        """
        from jrec.metrics import ScoreAccumulator, evaluate_labels

        pieces = list(self._scored(data if _is_log(data) else _table(data)))
        if not pieces or any(piece.labels is None for piece in pieces):
            raise ConfigError("the data to evaluate has no rows, or no label column; give rows with their labels")
        numbers, tasks = self.run.restored.config.model.numbers_by_label, self._tasks
        scores = {task: ScoreAccumulator(numbers=numbers.get(task), several=bool(tasks)) for task in tasks or ("",)}
        for piece, (task, scored) in itertools.product(pieces, scores.items()):
            logits, labels = (part[task] if task else part for part in (piece.logits, piece.labels))
            scored.update(logits, labels, piece.weights)
        every = {task: scored.label_scores() for task, scored in scores.items()}
        metrics = {task: evaluate_labels(own).to_dict() for task, own in every.items() if own.labels.size or not task}
        if not metrics:
            raise ConfigError("the data to evaluate knows no label of any row; give rows with labels")
        first = metrics.get(tasks[0] if tasks else "", {})
        return {**first, "tasks": metrics} if tasks else first

    @property
    def _tasks(self) -> tuple[str, ...]:
        return self.run.restored.config.model.multi_task.tasks

    def save(self, folder: str | os.PathLike[str], *, dtype: Dtype | None = None, overwrite: bool = False) -> None:
        """Writes the model for ``jrec.serving.load`` and ``jrec serve``, as ``jrec export`` does.

        Args:
          folder: The folder to make.
          dtype: Of rows, such as "int8"; None as they were trained.
          overwrite: Whether to replace an export there.

        Raises:
          OutputError: If the folder may not or cannot be written.
        """
        from jrec.app.export import export_run

        export_run(self.folder / _RUN, folder, dtype=dtype, overwrite=overwrite)

    def _scored(self, data: Any) -> Iterator[Any]:
        return self.run.of_log(data)


def _measured(name: str, value: float | None) -> str:
    return f"no {name}" if value is None else f"{name} {value:.4g}"


def _is_log(data: object) -> bool:
    """Whether data are a path, or several paths or tables that follow each other, and not one table in memory."""
    return isinstance(data, list | tuple | str | os.PathLike)


def with_index(data: Any) -> Any:
    """A DataFrame of pandas with its index as columns, where that has names, else without; other data as it is."""
    if not hasattr(data, "reset_index"):
        return data
    return data.reset_index(drop=all(name is None for name in data.index.names))


def _table(data: Any) -> Any:
    """Columns by name as a table; other data as it is."""
    data = with_index(data)
    if not isinstance(data, Mapping) or hasattr(data, "__arrow_c_stream__"):
        return data
    import pyarrow as pa

    return pa.table(dict(data))


@contextlib.contextmanager
def _kept(folder: str | os.PathLike[str] | None) -> Iterator[tuple[pathlib.Path, bool]]:
    """The folder of a fit, and whether it is a temporary one, which an error removes."""
    if folder is None:
        place = pathlib.Path(tempfile.mkdtemp(prefix="jrec-fit-"))
        try:
            yield place, True
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return
    place = pathlib.Path(folder).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(
            f"folder is {place}, where something is already; name a new folder, or take the model that is there by"
            f" jrec.load_run({str(place / _RUN)!r})"
        )
    place.mkdir(parents=True, exist_ok=True)
    yield place, False


def _spooled(data: object, place: pathlib.Path) -> list[Input]:
    """The files of the data; of tables in memory, files that keep them."""
    return [
        spool(name, place / f"{_LOG}{number or ''}.arrow")
        if isinstance(name, InMemory)
        else Input(name=name, file=name)
        for number, name in enumerate(read_names(_table(data)))
    ]


def _guess(inputs: Sequence[Input], place: pathlib.Path, guess: JsonMapping, *, say: Callable[[str], None]) -> None:
    """Makes the schema."""
    from jrec.prepare.readers.guess import guess_schema, questions

    first, *further = (one.file for one in inputs)
    text = guess_schema(first, further, **guess)
    for question in questions(text):
        say(f"guessed, please check: {question}")
    write_file(place / _SCHEMA, text + "\n")


def _prepare(
    inputs: Sequence[Input],
    place: pathlib.Path,
    schema: str | os.PathLike[str],
    *,
    quiet: bool,
    say: Callable[[str], None],
) -> None:
    """Makes the dataset."""
    from jrec.prepare.joined import csv_source
    from jrec.prepare.readers import load_schema

    source = csv_source(load_schema(os.fspath(schema)))
    ordered = source.timed or source.histories
    prepare(
        source,
        [one.file for one in inputs],
        place / _DATA,
        PrepareOptions(split_by="time" if ordered else "random", keep_order=True),
        command="jrec.fit",
        progress=Progress(show=False if quiet else None),
        report=say,
        bad_line_remedy="Fix the line, or leave it out of what you give; `jrec prepare csv --on-bad-line skip` can",
    )


def _choose(
    place: pathlib.Path,
    overrides: Sequence[str],
    prepared: Callable[[pathlib.Path], None] | None,
    *,
    quick: bool,
    say: Callable[[str], None],
) -> None:
    """Chooses the configuration, and with ``prepared``, which makes the dataset of a schema, target means as well."""
    from jrec.app.config import load_config
    from jrec.app.first_choice import first_choice

    path = place / _CONFIG
    choose = functools.partial(first_choice, str(place / _DATA), str(path))
    choice = choose(quick=True, say=say if quick else lambda line: None)
    write_file(path, choice.config)
    load_config(path, overrides)  # so that a mistake in it is answered before trials, which take minutes
    if not quick:
        choice = choose(quick=False, say=say)
        if prepared is not None and choice.score is not None and choice.proposal.sections:
            choice = _with_means(
                place, choice, prepared, choose=functools.partial(choose, quick=False, say=say), say=say
            )
    write_file(path, choice.config)
    write_file(path.with_suffix(".html"), choice.page)


def _with_means(
    place: pathlib.Path,
    without: FirstChoice,
    prepared: Callable[[pathlib.Path], None],
    *,
    choose: Callable[[], FirstChoice],
    say: Callable[[str], None],
) -> FirstChoice:
    """Prepares the log with the target means that a choice proposes; keeps the better dataset, and its choice."""
    data, schema, before, longer = place / _DATA, place / _SCHEMA, place / "without", place / "with.toml"
    say("the same trials with these target means:")
    write_file(longer, f"{schema.read_text(encoding='utf-8')}\n{without.proposal.sections}")
    # The new one has the old one's name: the configuration that comes of it reads data.path as that of the other would.
    data.rename(before)
    prepared(longer)
    choice = choose()
    better = choice.better_than(without)
    shutil.rmtree(before if better else data)
    if better:
        longer.replace(schema)
    else:
        before.rename(data)
        longer.unlink()
    name, scores = choice.metric.name, f"{choice.score:.4f} with them, {without.score:.4f} without"
    say(f"valid {name} {scores}: they are {'kept' if better else 'left out'}")
    return choice if better else without


def _train(
    place: pathlib.Path,
    overrides: Sequence[str],
    *,
    quiet: bool,
    say: Callable[[str], None],
    callbacks: Sequence[Callback],
) -> dict[str, JsonObject]:
    """Trains by the configuration; returns the metrics by split."""
    from jrec.app.config import load_config
    from jrec.app.preflight import check_start
    from jrec.app.report import summary

    run = load_config(place / _CONFIG, overrides)
    start = check_start(run, resume=False, overwrite=False)

    from jrec.app.reported_run import train_and_report  # loads JAX

    outcome, content, report = train_and_report(run, start, callbacks=callbacks)
    if content is None:  # a signal, which ends a run with a checkpoint
        raise KeyboardInterrupt(f"stopped after step {outcome.step:,}")
    if not quiet:
        sys.stderr.write(f"{summary(content)}\n")
    say(f"{counted(outcome.step, 'step')}; report: {report}")
    tasks = content.get("tasks", {})
    return {
        split: metrics | ({"tasks": {task: own["splits"].get(split) for task, own in tasks.items()}} if tasks else {})
        for split, metrics in content["splits"].items()
    }
