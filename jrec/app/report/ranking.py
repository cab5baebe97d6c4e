"""How well a model ranks items: HR@k, NDCG@k and MRR of each user's next item among all, and what reports say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jrec.app.report.content import Content
from jrec.data.schema import DatasetError
from jrec.metrics import LabelEvaluation, LabelScores, evaluate_labels, evaluate_tasks
from jrec.nn.ranking import ranking_metrics

NEVER = np.iinfo(np.int32).max
"""The rank of an item that has no row of its own, so that no model can name it."""
LEFT_OUT = NEVER - 1
"""The rank of an item of the history, where these are left out, so that no list of the best has it."""
_MANY = 0.1  # of a split's items


NONE_COUNTS = "each of its examples has weight 0, or lacks the label (of several the first one, of items to rank a 1)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankScores:
    """The ranks of the examples of a split.

    Attributes:
      ranks: (examples,) int32, how many other items score at least as high as the one that came next; ``NEVER`` of an
        item that training did not see, ``LEFT_OUT`` of one that was left out.
      candidates: The items that are ranked, before a history's items are left out.
      at: The k of HR@k and NDCG@k.
    """

    ranks: np.ndarray
    candidates: int
    at: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankingEvaluation:
    """The metrics of ``RankScores``.

    Attributes:
      examples: How many there are.
      unknown_items: How many of their items training did not see; they count as not found.
      repeated_items: How many of them are left out because the history has them; they count as not found.
      metrics: "hr@k" and "ndcg@k" for every k, and "mrr".
      first: The k that decides which step is the best.
    """

    examples: int
    unknown_items: int
    repeated_items: int
    metrics: Mapping[str, float]
    first: int

    @property
    def hr(self) -> float:
        """HR at the first k."""
        return self.metrics[f"hr@{self.first}"]

    @property
    def ndcg(self) -> float:
        """NDCG at the first k."""
        return self.metrics[f"ndcg@{self.first}"]

    @property
    def mrr(self) -> float:
        """The mean of 1 / (1 + rank)."""
        return self.metrics["mrr"]

    def to_dict(self) -> dict[str, float]:
        """The metrics in JSON types."""
        counts = ("examples", "unknown_items", "repeated_items")
        return {**self.metrics, **{name: getattr(self, name) for name in counts}}


AnyScores = LabelScores | RankScores

AnyEvaluation = LabelEvaluation | RankingEvaluation


def has_examples(scores: AnyScores) -> bool:
    """Whether an example counts: of several labels, for the first."""
    return bool((scores.ranks if isinstance(scores, RankScores) else scores.labels).size)


def evaluated(scores: AnyScores) -> AnyEvaluation:
    """All metrics of some scores.

    Raises:
      DatasetError: If there are no examples.
      DivergedError: If a logit is NaN or infinite.
    """
    if not isinstance(scores, RankScores):
        return evaluate_labels(scores)
    if not has_examples(scores):
        raise DatasetError(
            "there are no examples to evaluate: the split, or what was read of it, is empty, or has no line with label"
            " 1; evaluate more batches (evaluate.batches), or leave the split out (evaluate.splits,"
            " evaluate.final_splits)"
        )
    return RankingEvaluation(
        examples=scores.ranks.size,
        unknown_items=int(np.count_nonzero(scores.ranks == NEVER)),
        repeated_items=int(np.count_nonzero(scores.ranks == LEFT_OUT)),
        metrics=ranking_metrics(np.where(scores.ranks >= LEFT_OUT, np.inf, scores.ranks), scores.at),
        first=scores.at[0],
    )


def evaluated_by_task(scores: AnyScores) -> dict[str, AnyEvaluation]:
    """The metrics of every task of which any label is known, the first task's first; {} where there is one label."""
    return {} if isinstance(scores, RankScores) else {**evaluate_tasks(scores)}


def metric_names(at: tuple[int, ...] | list[int]) -> dict[str, tuple[str, str]]:
    """By key of the metrics, what texts call it, and its unit."""
    names = {}
    for k in at:
        names[f"hr@{k}"] = (f"HR@{k}", f"share of items among the {k} best")
        names[f"ndcg@{k}"] = (f"NDCG@{k}", "mean of 1 / log2(2 + rank)")
    return {**names, "mrr": ("MRR", "mean of 1 / (1 + rank)")}


OTHERS = {
    "examples": ("examples", "count"),
    "unknown_items": ("unknown items", "count, not in training"),
    "repeated_items": ("repeated items", "count, left out with the history"),
}
"""Of an evaluation, what is no metric."""


def units(at: tuple[int, ...]) -> dict[str, str]:
    """By key of ``RankingEvaluation.to_dict``, its unit."""
    return {key: unit for key, (_, unit) in {**metric_names(at), **OTHERS}.items()}


def lines(content: Content) -> Iterator[str]:
    """The metrics of every split beside the baselines', for the terminal."""
    names = metric_names(content["ranking"]["at"])
    yield f"{'split':<22}" + "".join(f"{name:>10}" for name, _ in names.values())
    for split, metrics in content["splits"].items():
        yield f"{split:<22}" + "".join(f"{metrics[key]:>10.4f}" for key in names)
        for baseline, of_baseline in baselines(content, split).items():
            yield f"{f'  {baseline}, {split}':<22}" + "".join(f"{of_baseline[key]:>10.4f}" for key in names)


_BASELINES = {"popularity": "popularity does", "transitions": "transitions do", "ease": "EASE does"}


def baselines(content: Content, split: str) -> dict[str, Mapping[str, float]]:
    """By baseline the metrics of ranking a split's items by it, of those that were computed."""
    sections = content.get("baselines", {})
    computed = {name: sections[name]["splits"] for name in _BASELINES if name in sections}
    return {name: splits[split] for name, splits in computed.items() if split in splits}


def findings(content: Content) -> dict[str, list[str]]:
    """The report's section ``judgement`` of a model that ranks items."""
    split, metrics = list(content["splits"].items())[-1]
    at, ranked = content["ranking"]["at"], content["ranking"]["candidates"]
    warnings, advice = [], []
    names, beyond = metric_names(at), {f"hr@{k}": k for k in at if k >= ranked}
    for baseline, of_baseline in baselines(content, split).items():
        worse = [key for key in names if key not in beyond and metrics[key] <= of_baseline[key]]
        if worse:
            figures = ", ".join(f"{names[key][0]} {metrics[key]:.4f} against {of_baseline[key]:.4f}" for key in worse)
            warnings.append(f"the model ranks {split}'s items no better than their {_BASELINES[baseline]}: {figures}")
    if warnings:
        advice.append("more epochs=, another optimizer.learning_rate and optimizer.embedding.learning_rate")
    if beyond:
        key, k = next(iter(beyond.items()))
        warnings.append(
            f"evaluate.at has {k:,}, but only {ranked:,} items are ranked, all of them among the {k:,} best:"
            f" {names[key][0]} does not tell models apart"
        )
    repeated = metrics["repeated_items"] / metrics["examples"]
    if repeated > _MANY:
        warnings.append(
            f"{100 * repeated:.1f} % of {split}'s items are in the user's history, which is left out, and count as not"
            " found"
        )
        advice.append("evaluate.leave_out_history=false, where users come back to items")
    share = metrics["unknown_items"] / metrics["examples"]
    if share > _MANY:
        warnings.append(
            f"{100 * share:.1f} % of {split}'s items are none of those that are ranked, since training has them less"
            " often than --min-count, or for two towers no line with them; they count as not found"
        )
    return {"warnings": warnings, "advice": advice}
