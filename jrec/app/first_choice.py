"""What ``jrec init`` writes: a dataset's first configuration, by rules and by short trials, and the page about them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from jrec.app import first_config, first_ranking, first_towers
from jrec.app.first_config import LARGE
from jrec.app.first_page import first_page
from jrec.app.first_rules import Choice, Metric, Proposal, Rules, render
from jrec.data.schema import Schema

TRIALS_SUFFIX = ".trials.jsonl"
"""Of the file beside a configuration that keeps the trials of a search."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstChoice:
    """A configuration, and what led to it.

    Attributes:
      config: TOML.
      page: HTML.
      metric: What trials were compared by.
      score: The best trial's; None where nothing was tried.
      proposal: What the schema of the log could say besides.
    """

    config: str
    page: str
    metric: Metric
    score: float | None
    proposal: Proposal

    def better_than(self, other: FirstChoice) -> bool:
        """Whether its best trial was better than the other's, by the same metric and on the same examples."""
        assert self.score is not None
        assert other.score is not None
        return self.metric.loss(self.score) < self.metric.loss(other.score)


def first_choice(
    data: str,
    out: str,
    *,
    quick: bool,
    say: Callable[[str], None],
    minutes: float | None = None,
    next_item: bool = False,
    two_towers: str = "",
) -> FirstChoice:
    """Chooses a configuration.

    Args:
      data: The dataset's folder.
      out: The file that the configuration is for, which the page names.
      quick: Whether to train nothing and go by rules only.
      say: Takes messages for the user.
      minutes: How long trials may take, variants of the best kind included, and kept beside ``out``; None
        for one trial of each kind.
      next_item: Whether the model is to rank the item that follows a history, although the dataset has labels; of one
        without labels it always does.
      two_towers: The feature whose values two towers are to rank; "" for other models.

    Raises:
      DatasetError: If the dataset cannot be used.
      ConfigError: If it has no training examples, or neither a label nor a history, or its items cannot be ranked.
      KeyboardInterrupt: On SIGINT or SIGTERM during a trial.
    """
    schema = Schema.load(data)
    rules = _rules(data, schema, next_item, two_towers)
    for line in rules.warnings():
        say(line)
    chosen, notes, trials, metric, proposal = rules.candidates(), [], [], rules.metric, Proposal()
    if not quick:
        from jrec.app.first_search import search  # loads JAX
        from jrec.app.first_trials import Trial, notes_of, try_all

        if rules.valid and rules.examples < LARGE:

            def tried(trial: Trial[Choice], left: float | None = None) -> None:
                beside = (
                    f", {metric.beside[1]} {trial.beside:.4f}" if metric.beside and trial.beside is not None else ""
                )
                seed = f" (seed {trial.seed})" if trial.seed else ""
                remains = "" if left is None else f"; {left / 60:.1f} min left"
                say(f"{trial.candidate.title}{seed}: valid {metric.name} {trial.score:.4f}{beside}{remains}")

            if minutes is None:
                trials = try_all(data, rules, chosen, on_trial=tried)
            else:
                kept, dataset = pathlib.Path(out).with_suffix(TRIALS_SUFFIX), schema.identity
                trials = search(data, rules, chosen, minutes=minutes, kept=kept, dataset=dataset, on_trial=tried)
            chosen, notes = [trial.candidate for trial in trials], notes_of(trials, metric)
        proposal = rules.proposal(data, schema)
        notes += proposal.lines
        for line in proposal.lines:
            say(line)
    keys = rules.config(data, chosen[0], best_step=trials[0].best_step if trials else 0)
    return FirstChoice(
        config=render(schema.title, keys, rules, notes),
        page=first_page(schema.title, out, keys, rules, chosen, trials),
        metric=metric,
        score=trials[0].score if trials else None,
        proposal=proposal,
    )


def _rules(data: str, schema: Schema, next_item: bool, two_towers: str) -> Rules[Any]:
    if two_towers:
        return first_towers.facts_of(data, schema, two_towers)
    if next_item or not schema.labels:
        return first_ranking.facts_of(data, schema)
    return first_config.facts_of(data, schema)
