"""Weights of other libraries' models: PyTorch's files read without running them, and the runs made of them."""

from jrec.app.imports.dlrm import DLRMWeights as DLRMWeights
from jrec.app.imports.dlrm import read_dlrm as read_dlrm
from jrec.app.imports.run import import_dlrm as import_dlrm
from jrec.app.imports.torch_file import read_state_dict as read_state_dict
