"""What can be wrong with a plan."""

from __future__ import annotations

from jrec.errors import JrecError


class PlanError(JrecError):
    """A plan that cannot be made, is damaged, or does not belong to the dataset or mesh it is used with."""
