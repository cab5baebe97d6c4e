"""SASRec: the encoder of a user's items by attention alone; everything else is HSTU's."""

from jrec.app.models.kinds.hstu import NextItemKind

KIND = NextItemKind("sasrec")
