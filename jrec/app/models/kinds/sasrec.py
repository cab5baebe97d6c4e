"""SASRec: the encoder of a user's items uses only attention; everything else is shared with HSTU."""

from jrec.app.models.kinds.hstu import NextItemKind

KIND = NextItemKind("sasrec")
