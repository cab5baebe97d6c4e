"""Errors that a user can fix. The command line prints them as one line; anything else is a defect and shows its trace.

``ConfigError`` and ``DivergedError`` are also ``ValueError``, so that library callers can catch them the ordinary way.
A plain ``ValueError`` is never turned into a one-line message: it may be a slip in the code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class JrecError(Exception):
    """The base of all expected errors: the message says what is wrong, where, and what to do.

    Attributes:
      exit_code: The command's, when it ends so.
    """

    exit_code = 2


class ConfigError(JrecError, ValueError):
    """A configuration, or a combination of configuration and data, that cannot be used as it is."""


class CheckpointError(JrecError):
    """A checkpoint that is missing, damaged, or of another model, dataset or configuration."""


class OutputError(JrecError):
    """A file or folder that cannot be written as asked: it exists, is an input, is being written, or the disk fails."""


class DivergedError(JrecError, ValueError):
    """Training produced a NaN or an infinity."""


@contextlib.contextmanager
def value_errors_are_config_errors(subject: str) -> Iterator[None]:
    """Turns a ``ValueError`` raised inside into a ``ConfigError`` that begins with ``subject``.

    For calls into the library whose arguments come straight from the user's configuration and data, such as building
    the embedding layout, and only for those.
    """
    try:
        yield
    except JrecError:
        raise
    except ValueError as error:
        raise ConfigError(f"{subject}: {error}") from error


class ProcessError(JrecError):
    """Another process of the run has ended, or cannot be reached."""


class LostProcessError(ProcessError):
    """Another process was killed, or stopped, without a word: the same command may well succeed when it is repeated."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


def print_error(error: JrecError | OSError) -> None:
    """Prints an error to stderr as one line, unless it has been printed."""
    if not vars(error).get("printed"):
        vars(error)["printed"] = True
        sys.stderr.write(f"jrec: error: {_one_line(error)}\n")
        sys.stderr.flush()


def _one_line(error: JrecError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror:
        places = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{places}: {error.strerror}" if places else error.strerror
    return " ".join(line.strip() for line in str(error).splitlines()) or type(error).__name__
