"""Synthetic click logs of published sizes, with labels from a known teacher."""

from jrec.prepare.synth.generate import SynthOptions, synthesize
from jrec.prepare.synth.shapes import SHAPES, Shape, SynthFeature, shape_like

__all__ = ["SHAPES", "Shape", "SynthFeature", "SynthOptions", "shape_like", "synthesize"]
