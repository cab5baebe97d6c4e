"""Which dataset something belongs to: two digests, so that runs, plans, profiles and FAE folders are not mixed up.

*Rows* says what each column and each row number means: features, tables, how values got their rows, bijections. What
holds numbers of rows (a model, a plan, a profile, hot rows) is right on any dataset of the same rows. *Examples* says
which examples the shards hold, in what order. A dataset that was moved or copied has the identity that it had.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from jrec.errors import JrecError

_SHOWN = 5  # differences that a message names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a dataset, as files that depend on it record it. Two are equal where both digests are.

    Attributes:
      name: The dataset's name, for messages.
      path: The folder it lay in, for messages; "" where it was not read from one.
      rows: SHA-256 of what columns and row numbers mean, in hexadecimal.
      examples: SHA-256 of the shards' content, in hexadecimal.
      columns: Short digests of what each "feature NAME", "table NAME" and "order of table NAME" (of a bijection) means;
        they tell what differs.
    """

    name: str = dataclasses.field(compare=False)
    path: str = dataclasses.field(compare=False)
    rows: str
    examples: str
    columns: Mapping[str, str] = dataclasses.field(compare=False)

    @property
    def digests(self) -> dict[str, str]:
        """Both digests, without what is for messages only."""
        return {"rows": self.rows, "examples": self.examples}

    def __str__(self) -> str:
        where = f" at {self.path}" if self.path else ""
        return f"{self.name!r}{where} (rows {self.rows[:8]}, examples {self.examples[:8]})"

    def difference(self, other: Identity) -> str:
        """What differs between two datasets, in words; "" where nothing does."""
        if self.rows == other.rows:
            return "" if self.examples == other.examples else "rows mean the same, but the examples are others"
        names = dict.fromkeys((*self.columns, *other.columns))
        differing = [name for name in names if self.columns.get(name) != other.columns.get(name)]
        if not differing:
            return "the same columns and tables come in another order"
        more = f" and {len(differing) - _SHOWN:,} more" if len(differing) > _SHOWN else ""
        return f"not the same in both: {', '.join(differing[:_SHOWN])}{more}"

    def check(
        self, other: Identity, *, subject: str, remedy: str, error: type[JrecError], examples: bool = False
    ) -> None:
        """Refuses another dataset.

        Args:
          other: The dataset that is to be used.
          subject: What belongs to this dataset, as the beginning of a sentence: "the plan p.bin".
          remedy: What to do instead.
          error: The exception to raise.
          examples: Whether the examples have to be the same, too.

        Raises:
          JrecError: As ``error``; the message names both datasets, and what differs.
        """
        if self.rows == other.rows and not (examples and self.examples != other.examples):
            return
        raise error(f"{subject} is of dataset {self}, not of {other}: {self.difference(other)}; {remedy}")


def digest_of(content: object) -> str:
    """SHA-256 of JSON content, in hexadecimal."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()
