"""Synthetic click logs of published sizes, with labels from a known teacher."""

from jrec.data.synth.generate import SynthOptions, synthesize
from jrec.data.synth.shapes import SHAPES, Shape, SynthFeature, shape_like

__all__ = ["SHAPES", "Shape", "SynthFeature", "SynthOptions", "shape_like", "synthesize"]
