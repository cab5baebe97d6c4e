"""Checks of lookups that a program packed itself; ``jrec.data`` packs none that they would refuse."""

from __future__ import annotations

import numpy as np

from jrec.batch import Batch
from jrec.native.host_cast import checked_ids
from jrec.ops.layout import EmbeddingLayout, Stack
from jrec.ops.types import Bags


def check_rows(layout: EmbeddingLayout, batch: Batch) -> None:
    """Refuses addresses that are no rows of their feature's table: lookups have NaN, nothing or another table's rows.

    Raises:
      ValueError: Naming the feature, the address and those of its table; or on ids and offsets that do not fit.
    """
    for stack in layout.members:
        bags = batch.bags[stack.name]
        offsets = None if bags.offsets is None else np.asarray(bags.offsets)
        ids, offsets = checked_ids(np.asarray(bags.ids), offsets, wide=True)
        for feature in stack.features:
            first = feature.first_bag * len(batch.labels)
            end = first + feature.config.bags_per_example * len(batch.labels)
            of_feature = ids[first:end] if offsets is None else ids[offsets[first] : offsets[end]]
            odd = (of_feature >= feature.base + feature.rows) | ((of_feature >= 0) & (of_feature < feature.base))
            if odd.any():
                raise ValueError(
                    f"a bag of feature {feature.config.name!r} holds address {of_feature[odd][0]:,}, but table"
                    f" {feature.config.table!r} has {feature.base:,} to {feature.base + feature.rows - 1:,} in stack"
                    f" {stack.name}; addresses are a table's base and an id below the table's rows"
                )


def check_lengths(stack: Stack, bags: Bags, examples: int) -> None:
    """Refuses longer bags than the layout says, by which devices of a mesh have room for rows.

    Raises:
      ValueError: Naming the feature, its longest bag and its ``max_length``.
    """
    ids = np.asarray(bags.ids)
    lengths = np.full(len(ids), ids.shape[-1]) if bags.offsets is None else np.diff(np.asarray(bags.offsets))
    for feature in stack.features:
        config, first = feature.config, feature.first_bag * examples
        of_feature = lengths[first : first + config.bags_per_example * examples]
        if (of_feature > (most := 1 if config.unpooled else config.max_length)).any():
            raise ValueError(
                f"a bag of feature {config.name!r} holds {of_feature.max():,} ids, but max_length is {most:,}; raise"
                " FeatureConfig.max_length"
            )
