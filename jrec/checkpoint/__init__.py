"""Checkpoints: dense arrays and rows of every tier, in files with checksums, whole or not there."""

from jrec.checkpoint.changing import ChangingRows as ChangingRows
from jrec.checkpoint.checkpoints import Checkpoints as Checkpoints
from jrec.checkpoint.copied import CopiedRows as CopiedRows
from jrec.checkpoint.device import DeviceRows as DeviceRows
from jrec.checkpoint.host import HostRows as HostRows
from jrec.checkpoint.saved import Saved as Saved
