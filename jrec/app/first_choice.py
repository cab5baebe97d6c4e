"""What ``jrec init`` writes: a dataset's first configuration, by rules and by short trials, and the page about them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from jrec.app.first_config import LARGE, candidates, facts_of, first_config, render, warnings
from jrec.app.first_page import first_page
from jrec.data.schema import DatasetError, Schema

TRIALS_SUFFIX = ".trials.jsonl"
"""Of the file beside a configuration that keeps the trials of a search."""


def first_choice(
    data: str, out: str, *, quick: bool, say: Callable[[str], None], minutes: float | None = None
) -> tuple[str, str]:
    """Chooses a configuration.

    Args:
      data: The dataset's folder.
      out: The file that the configuration is for, which the page names.
      quick: Whether to train nothing and go by rules alone.
      say: Takes messages for the user.
      minutes: How long trials may take, those of variants of the best kind among them, and kept beside ``out``; None
        for one trial of each kind.

    Returns:
      The configuration, as TOML, and its page, as HTML.

    Raises:
      DatasetError: If the dataset cannot be used, or does not have one label.
      ConfigError: If it has no training examples.
      KeyboardInterrupt: On SIGINT or SIGTERM during a trial.
    """
    schema = Schema.load(data)
    if not schema.labels:
        raise DatasetError(
            f"{data} has no labels, and `jrec init` writes models of clicks; prepare it with them, or train a"
            " model that ranks items: docs/next_item.md has the configuration for histories, docs/two_towers.md for"
            " features of users and items"
        )
    schema.check_one_label("`jrec init` tries models of one label")
    facts = facts_of(data, schema)
    for line in warnings(facts):
        say(line)
    chosen, notes, trials = candidates(facts), [], []
    if not quick:
        from jrec.app.first_search import search  # loads JAX
        from jrec.app.first_trials import Trial, notes_of, try_all
        from jrec.app.pairs import proposal, telling_pairs

        if facts.valid and facts.examples < LARGE:
            name = facts.metric[1]

            def tried(trial: Trial, left: float | None = None) -> None:
                auc = "" if trial.auc is None else f", AUC {trial.auc:.4f}"
                seed = f" (seed {trial.seed})" if trial.seed else ""
                remains = "" if left is None else f"; {left / 60:.1f} min left"
                say(f"{trial.candidate.title}{seed}: valid {name} {trial.score:.4f}{auc}{remains}")

            if minutes is None:
                trials = try_all(data, facts, chosen, on_trial=tried)
            else:
                kept, dataset = pathlib.Path(out).with_suffix(TRIALS_SUFFIX), schema.identity
                trials = search(data, facts, chosen, minutes=minutes, kept=kept, dataset=dataset, on_trial=tried)
            chosen, notes = [trial.candidate for trial in trials], notes_of(trials, facts)
        pairs = [] if facts.numeric else telling_pairs(data, schema)  # of click rates
        notes += (proposed := proposal(pairs))
        for line in proposed:
            say(line)
    keys = first_config(data, facts, chosen[0], best_step=trials[0].best_step if trials else 0)
    return render(schema.name, keys, facts, notes), first_page(schema.name, out, keys, facts, chosen, trials)
