"""Heads for several labels of an example: a shared bottom, or a mixture of experts with a gate for each task (MMoE)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from jrec.batch import Batch
from jrec.nn.losses import mean_of_positions, of_members, smoothed_labels
from jrec.nn.mlp import MLP, check_rate
from jrec.nn.optimizer import Loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTaskConfig:
    """What the tasks share, and what each has of its own.

    Attributes:
      tasks: Their names, such as "click" and "purchase".
      experts: 1 for a shared bottom (Caruana 1997): one MLP that all tasks read. More for MMoE (Ma et al., KDD 2018,
        section 4.2): as many MLPs, of whose outputs each task reads a mean with weights by a gate of its own.
      expert_mlp: Layer sizes of the shared bottom, or of each expert.
      tower_mlp: Layer sizes of each task's own MLP, before its logit; () for none.
      compute_dtype: The dtype of the MLPs; parameters, gates and logits are float32.
      dropout: The rate of dropout after hidden layers, in training.

    Raises:
      ValueError: If a task has no name or is named twice, or a number is out of range.
    """

    tasks: tuple[str, ...]
    experts: int = 1
    expert_mlp: tuple[int, ...] = (64,)
    tower_mlp: tuple[int, ...] = (32,)
    compute_dtype: DTypeLike = "float32"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks) or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={list(self.tasks)} must be names, at least one, each once")
        if self.experts < 1 or not self.expert_mlp or min((*self.expert_mlp, *self.tower_mlp)) < 1:
            raise ValueError(
                f"experts={self.experts} must be at least 1, expert_mlp={list(self.expert_mlp)} have a layer, and"
                f" layers, those of tower_mlp={list(self.tower_mlp)} too, at least 1 element"
            )
        check_rate(self.dropout)


class MultiTaskHeads(nnx.Module):
    """From a vector of each example to one logit for each task.

      >>> config = MultiTaskConfig(tasks=("click", "purchase"), experts=4)
      >>> heads = MultiTaskHeads(16, config, rngs=nnx.Rngs(0))
      >>> {task: logits.shape for task, logits in heads(jnp.ones((2, 16))).items()}
      {'click': (2,), 'purchase': (2,)}

    Args:
      inputs: Elements of the vector, such as the pooled rows and dense features side by side, or an interaction.
      config: The heads' configuration.
      rngs: Its ``params`` stream; dropout needs a ``dropout`` stream, too.
    """

    def __init__(self, inputs: int, config: MultiTaskConfig, *, rngs: nnx.Rngs):
        self.config = config
        options = {"dtype": jnp.dtype(config.compute_dtype), "dropout": config.dropout, "rngs": rngs}
        sizes = (inputs, *config.expert_mlp)
        self.experts = nnx.List(MLP(sizes, activate_last=True, **options) for _ in range(config.experts))
        # One matrix for all gates. Zeros: at first every task reads all experts alike, which start differently.
        width = len(config.tasks) * config.experts
        zeros = nnx.initializers.zeros_init()
        self.gates = (
            nnx.Linear(inputs, width, use_bias=False, kernel_init=zeros, rngs=rngs) if config.experts > 1 else None
        )
        tower = (config.expert_mlp[-1], *config.tower_mlp, 1)
        self.towers = nnx.List(MLP(tower, activate_last=False, **options) for _ in config.tasks)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        """Logits (batch,) float32 by task, of ``x`` (batch, inputs)."""
        computed = x.astype(jnp.dtype(self.config.compute_dtype))
        shared = jnp.stack([expert(computed) for expert in self.experts], axis=1)
        if self.gates is None:
            read = [shared[:, 0]] * len(self.towers)
        else:
            gates = self.gates(x.astype(jnp.float32)).reshape(x.shape[0], len(self.towers), -1)
            # In float32, as the gates are: bfloat16 could not tell nearly equal shares apart.
            weights = jax.nn.softmax(gates, axis=2).astype(shared.dtype)
            read = list(jnp.moveaxis(jnp.einsum("bte,bed->btd", weights, shared), 1, 0))
        logits = (tower(each)[:, 0].astype(jnp.float32) for tower, each in zip(self.towers, read, strict=True))
        return dict(zip(self.config.tasks, logits, strict=True))


def multi_task_loss(
    weights: Mapping[str, float],
    *,
    label: str | None = None,
    label_smoothing: float = 0.0,
    number_losses: Mapping[str, Loss] | None = None,
) -> Loss:
    """The sum of the tasks' losses, each a mean over the examples that have the task's label, and over members.

    A task's loss is the binary cross entropy, or, where its labels are numbers, what ``number_losses`` says. A label
    below 0 is missing, as a purchase is where nothing was clicked, and NaN is not taken; of numbers, as of how long
    somebody watched, NaN is the missing one. On a mesh each mean is taken over the whole batch.

    Args:
      weights: How much each task counts. Its label is the column of that name, which batches carry as one of
        ``extras`` (``run.feed(..., label=None, extras=list(weights))``).
      label: The task whose label is ``Batch.labels``, as in the batches of a dataset with several; None for none.
      label_smoothing: As of ``smoothed_labels``, of every task's labels of 0 and 1.
      number_losses: By task whose labels are numbers its loss of (batch,) outputs, a mean over the examples by
        ``Batch.mask``: ``squared_error``, ``huber()``, ``poisson``, or one of these scaled by ``of_numbers``.

    Returns:
      A loss of what ``MultiTaskHeads`` returns, for ``Run.compile`` or ``train_step``.

    Raises:
      ValueError: If there are no tasks, a weight is negative or not finite, or ``number_losses`` has another task; in
        the step, if a task has no logits.

    Example:
      >>> numbers = {"seconds": jrec.nn.huber(delta=2.0)}
      >>> loss = multi_task_loss({"click": 1.0, "seconds": 0.1}, label="click", number_losses=numbers)
    """
    number_losses = number_losses or {}
    if not weights or not all(0 <= weight < float("inf") for weight in weights.values()):
        raise ValueError(f"weights={dict(weights)} must have a number of at least 0 for each task, of at least one")
    if unknown := sorted(number_losses.keys() - weights.keys()):
        raise ValueError(f"number_losses has {unknown[0]!r}, but the tasks are {', '.join(weights)}")

    def loss(outputs: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
        if absent := sorted(weights.keys() - outputs.keys()):
            raise ValueError(f"the model has no logits of task {absent[0]!r}, only of {', '.join(sorted(outputs))}")
        total = jnp.zeros((), jnp.float32)
        for task, weight in weights.items():
            labels = (batch.labels if task == label else batch.extras[task]).astype(jnp.float32)
            if (own := number_losses.get(task)) is not None:
                total += weight * _mean_of_known(own, outputs[task], labels, batch)
                continue
            smoothed = smoothed_labels(labels, label_smoothing)
            losses = of_members(optax.sigmoid_binary_cross_entropy, outputs[task], smoothed)
            total += weight * mean_of_positions(losses[:, None], (labels >= 0)[:, None], batch.mask)
        return total

    return loss


def _mean_of_known(loss: Loss, outputs: jax.Array, labels: jax.Array, batch: Batch) -> jax.Array:
    """A loss over the examples whose number is known, of all devices."""
    known = ~jnp.isnan(labels)
    # Labels of 0, since NaN times a mask of 0 is NaN.
    own = dataclasses.replace(batch, labels=jnp.where(known, labels, 0), mask=jnp.where(known, batch.mask, 0))
    # This device's mean, as the loss of each of its examples, has their sum.
    each = jnp.broadcast_to(loss(outputs, own), batch.mask.shape)
    return mean_of_positions(each[:, None], known[:, None], batch.mask)
