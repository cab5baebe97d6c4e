"""Whether a configured run's rows in host memory travel through the pipeline, or stay in place."""

from __future__ import annotations

from jrec.errors import ConfigError
from jrec.ops.layout import EmbeddingLayout
from jrec.run.in_place_feed import needs_pipeline
from jrec.train.config import TrainConfig


def reads_in_place(config: TrainConfig, layout: EmbeddingLayout) -> bool:
    """Whether a run pools and updates its rows in host memory in place, as ``tables.host.pipeline`` says.

    Args:
      config: The run's configuration.
      layout: The run's tables.

    Raises:
      ConfigError: If the pipeline is "off", but the run needs it.
    """
    check_pipeline(config)
    return bool(layout.host_stacks) and config.tables.host.pipeline != "on" and _needs_pipeline(config) is None


def check_pipeline(config: TrainConfig) -> None:
    """Raises ConfigError if the pipeline is "off", but the run needs it. Starts JAX's devices only where it is off."""
    if config.tables.host.pipeline == "off" and (reason := _needs_pipeline(config)) is not None:
        raise ConfigError(f"tables.host.pipeline is 'off', but {reason}; set it to 'auto' or leave it out")


def _needs_pipeline(config: TrainConfig) -> str | None:
    named = config.tables.implementation
    return needs_pipeline(planned=config.planned, implementation=None if named == "auto" else named)
