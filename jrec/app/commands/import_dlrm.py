"""``jrec import-dlrm``: a run of a DLRM that PyTorch trained."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Make a run of a DLRM that facebookresearch/dlrm or TorchRec trained, for `jrec eval`, `jrec predict`, `jrec export`,
`jrec compress` and `jrec train --resume`.

CKPT is a safetensors file, or what torch.save wrote: a state_dict, or a dictionary that has one as "state_dict". Its
ending does not matter, nothing in it is run, and PyTorch is not needed. DATA is a dataset with the model's features in
its order, each with a table of its own. Row i of a table is PyTorch's id i; where the dataset numbers its rows
differently, as `jrec prepare` does, FOLDER/TABLE.parquet of --rows has the values of PyTorch's ids in their order, one
column, or FOLDER/TABLE.npy says of each of the dataset's rows which row of the checkpoint it is (-1: zeros). Keys after
the options are of the run's configuration, such as its optimizers; slots of optimizers begin fresh."""
EPILOG = """examples:
  jrec import-dlrm dlrm.pt data/kaggle --rows numbers --out runs/imported
  jrec import-dlrm dlrm.safetensors data/synthetic --out runs/imported
  jrec import-dlrm dlrm.pt data/kaggle --rows numbers --out runs/imported optimizer.embedding.name=rowwise_adagrad
  jrec eval runs/imported data/kaggle
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="the file of torch.save or safetensors")
    parser.add_argument("data", metavar="DATA", help="the dataset's folder")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="keys of the run's configuration")
    parser.add_argument("--out", required=True, metavar="RUN", help="the new run's folder")
    parser.add_argument("--rows", metavar="FOLDER", help="values of the checkpoint's rows, or their numbers")
    parser.add_argument("--interaction", choices=("dot", "concat"), help="where the layers' widths do not tell")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in that folder, if any")


def run(args: argparse.Namespace) -> int:
    """Imports; returns 0."""
    from jrec.app.imports import import_dlrm

    config = import_dlrm(
        args.checkpoint,
        args.data,
        args.out,
        overrides=args.overrides,
        rows=args.rows,
        interaction=args.interaction,
        overwrite=args.overwrite,
    )
    model = config.model
    print(
        f"{model.interaction} interaction, bottom MLP {list(model.bottom_mlp)}, top MLP {list(model.top_mlp)}, rows of"
        f" {model.embedding_dim} {model.table_dtype}; run: {config.out}"
    )
    return 0
