"""Lines as libsvm and libFM have them, ``LABEL INDEX:VALUE INDEX:VALUE …``, rewritten as lines of three fields."""

from __future__ import annotations

import numpy as np

from jrec.kernel_cache import compiled

COLUMNS = ("label", "features", "values")
DELIMITER, SEPARATOR = "\t", " "
HINT = "; a libsvm line is LABEL INDEX:VALUE INDEX:VALUE …, its fields separated by single spaces, without qid"
_NEWLINE, _RETURN, _SPACE, _TAB, _HASH, _COLON = 10, 13, 32, 9, 35, 58


def rewritten(text: bytes) -> bytes:
    """Whole lines as ``COLUMNS``: the label, then all indices, then all values.

    A comment behind "#" is dropped. A line with only a label has empty lists. One that is none of libsvm's stays as it
    is, and so has too few fields.
    """
    out = np.empty(len(text) + 2 * text.count(b"\n"), np.uint8)  # two tabs more, behind a label without pairs
    return out[: _rewrite(np.frombuffer(text, np.uint8), out)].tobytes()


@compiled
def _rewrite(text, out):
    """Rewrites lines. Returns how many bytes were written."""
    start, written = 0, 0
    while start < text.shape[0]:
        newline = start
        while text[newline] != _NEWLINE:
            newline += 1
        end = start
        # svmlight's comments; libsvm itself has none.
        while end < newline and text[end] != _HASH:
            end += 1
        while end > start and (text[end - 1] == _SPACE or text[end - 1] == _RETURN or text[end - 1] == _TAB):
            end -= 1
        first, valid = start, True
        while first < end and text[first] != _SPACE:
            valid &= text[first] != _COLON
            first += 1
        at, pairs, colons = first, 0, 0
        while at < end:
            if text[at] == _SPACE:
                valid &= colons == pairs and text[at + 1] != _SPACE and text[at + 1] != _COLON
                pairs += 1
            elif text[at] == _COLON:
                valid &= colons == pairs - 1 and at + 1 < end and text[at + 1] != _SPACE and text[at - 1] != 100  # qid:
                colons += 1
            at += 1
        if not valid or end == start or colons != pairs:
            for i in range(start, newline + 1):
                out[written] = text[i]
                written += 1
            start = newline + 1
            continue
        for i in range(start, first):
            out[written] = text[i]
            written += 1
        # All indices first, then all values: two lists of one length, as any log's list with weights.
        for values in range(2):
            taking = False
            if pairs == 0:
                out[written] = _TAB
                written += 1
            for i in range(first, end):
                if text[i] == _SPACE:
                    out[written] = _TAB if i == first else _SPACE
                    written += 1
                    taking = values == 0
                elif text[i] == _COLON:
                    taking = values == 1
                elif taking:
                    out[written] = text[i]
                    written += 1
        out[written] = _NEWLINE
        written += 1
        start = newline + 1
    return written
