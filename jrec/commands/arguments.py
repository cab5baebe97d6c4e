"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse


def fractions(text: str) -> tuple[float, ...]:
    """``0.8,0.1,0.1``."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three fractions like 0.8,0.1,0.1") from None
