"""What docs/performance.md says around its figures: a section a benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
      title: Its heading.
      files: The results it shows, without ``.jsonl``.
      text: What was measured and how.
      columns: Titles of the table's columns by metric; a row a case. Empty lists every line.
      pattern: The pattern of the metrics that a list shows.
      cases: The pattern of the cases that are shown.
      figures: Files in ``docs/figures``.
    """

    title: str
    files: tuple[str, ...]
    text: str
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pattern: str = ""
    cases: str = ""
    figures: tuple[str, ...] = ()


HEAD = """# Appendix: measured lines

[Results](results.md) answers the papers' claims; here is what the benchmarks measured, a section a benchmark. All of
it is from virtual machines of one kind with 24 GB that share their hosts ({devices}): believe the ratios, not the
milliseconds. Times are medians; both sides of a comparison run in turn in one run, on all cores. A ratio in brackets is
the peer's time by jrec's, so above 1 jrec is faster. The JSON lines are in `{folder}/`; `python -m benchmarks.page
{folder}` writes this page from them. **Nothing here was measured on a GPU**; what is known of the GPU kernels is in
[kernels.md](kernels.md).
"""

PREFIXES = {
    "prefixes, random order": "at random",
    "prefixes, order of frequency": "by frequency",
    "prefixes, reordered": "reordered",
}

SECTIONS = (
    Section(
        title="Whole training steps against PyTorch",
        files=("train_kaggle", "train_rm1", "train_rm1_one_hot", "train_rm2", "train_rm3", "train_rm4"),
        text="""\
`python -m benchmarks.train_step --model kaggle` (rm1, ..): DLRM with `EmbeddingBag(sparse=True)`, the same
weights, batches, MLPs and Adagrad on both sides; losses are compared before anything is timed. "Cast in loader" is
how `jrec train` runs where loader threads have cores of their own.""",
        columns={"step, median": "step", "step, cast in loader, median": "cast in loader"},
    ),
    Section(
        title="Whole training steps against a plain JAX user's choice",
        files=("plain_jax", "plain_jax_kept"),
        text="""\
`python -m benchmarks.plain_jax`: a Kaggle-like DLRM of 26 tables of 16 against the same model of `nnx.Embed`s trained
by optax, whose gradients are as large as the tables. glibc gives freed memory back and zeroes it again at every step;
"memory kept" (`--keep-memory`) keeps it for both sides.""",
        columns={"step, median": "step", "step, cast in loader, median": "cast in loader"},
    ),
    Section(
        title="Tensor Casting hidden",
        files=("casting_overlap",),
        text="""\
`python -m benchmarks.casting_overlap --plot docs/figures`: whole steps with the cast made ahead on an idle core, in the
step, or with expand, coalesce and scatter in its place; the step on one core, the loader on the other. "Given" casts
were made beforehand: what hiding all of it would reach.""",
        columns={
            "step, cast ahead": "cast ahead",
            "step, cast in the step": "in the step",
            "step, no casting": "no casting",
            "step, cast given": "given",
            "cast, alone": "cast alone",
            "cast hidden": "hidden",
        },
        figures=("figure12_overlap.png",),
    ),
    Section(
        title="Embedding forward and backward against FBGEMM and PyTorch",
        files=("embedding",),
        text="""\
`python -m benchmarks.embedding --device cpu`: 8 tables, 2,048 bags, 20 ids a bag (1 in the one-hot case), Zipf 1.2
unless said. Forward is a jitted lookup; backward is cast, casted gather-reduce and optimizer step, in place.
FBGEMM is its CPU table-batched embedding with row-wise Adagrad, with the PyTorch it was built for; PyTorch is
`EmbeddingBag(sparse=True)` with Adagrad, outputs as a list. FBGEMM's backward pass takes several times as long beside
other programs: earlier figures of it were no fair ones.""",
        columns={
            "forward, median": "forward",
            "backward, median": "backward",
            "backward, cast in loader, median": "backward, cast in loader",
        },
    ),
    Section(
        title="Tensor Casting: the backward pass as a gather-reduce",
        files=("casting",),
        text="""\
`python -m benchmarks.casting --plot docs/figures`: the paper's Figures 6, 12, 16 and 17 on RM1 to RM4 (all tables
of a model). The baseline expands, sorts, accumulates and scatters; both sides use the same native kernels, threads
and radix sort, so the ratio is the algorithm's.""",
        columns={
            "cast + casted gather-reduce": "cast + casted gather-reduce",
            "cast + fused update": "cast + fused update",
        },
        figures=(
            "figure06_traffic.png",
            "figure12_latency.png",
            "figure16_batch.png",
            "figure17_dim.png",
        ),
    ),
    Section(
        title="Tensor Casting: gradients and traffic, counted",
        files=("casting_counted",),
        text="""\
`python -m benchmarks.casting --counted`: Figures 5 and 6 for ids of two laws over Kaggle's largest table.""",
        columns={
            "gradient, expanded": "expanded gradient",
            "gradient, coalesced": "coalesced gradient",
            "traffic, expand and coalesce": "traffic of expand and coalesce",
            "traffic, casted gather-reduce": "traffic of casted gather-reduce",
        },
    ),
    Section(
        title="Placement: extra memory against communication",
        files=("oper",),
        text="""\
`python -m benchmarks.oper`: OPER's Table 2. Power-law accesses (1.05) of the logs' cardinalities on a DGX-A100,
16,384 examples a device and step; what a link fetches in a forward pass by the cost model, over the memory spent on
copies of rows. The ratio is to no copies. [placement.md](placement.md) describes the planner.""",
        columns={
            "table 2: mean a link": "mean a link",
            "table 2: variance over links": "variance",
            "table 2: copies": "copies",
            "table 2: degree of balance, links": "balance of links",
            "table 2: reduction at 1 %, the paper's": "the paper's reduction",
        },
    ),
    Section(
        title="Placement: threshold against time and balance",
        files=("oper",),
        text="""\
OPER's Table 3: `greedy` is the paper's algorithm, `oper` exchanges pieces afterwards, as `jrec plan` does.""",
        columns={
            "table 3: time": "time",
            "table 3: degree of balance, links": "links",
            "table 3: degree of balance, lookups": "lookups",
            "table 3: degree of balance, memory": "memory",
        },
    ),
    Section(
        title="Placement: distance to the exact optimum",
        files=("oper",),
        text="""\
The same pieces without copies, placed by the planner's two steps and by the exact program (HiGHS). The program
minimizes only time, and may leave all rows on one device as far as memory goes.""",
        columns={
            "milp: greedy above the solver's best": "greedy",
            "milp: greedy and exchanges above the solver's best": "greedy and exchanges",
            "milp: greedy and exchanges above the solver's bound": "above the bound",
            "milp: greedy and exchanges, degree of balance, memory": "balance of memory",
        },
    ),
    Section(
        title="Placement: strategies",
        files=("oper",),
        text="""\
OPER's Figure 10 in training: the device, or link, with most work; and a step's embedding work if nothing overlaps.""",
        columns={
            "figure 10: memory, max": "memory, max",
            "figure 10: lookup, max": "lookup, max",
            "figure 10: link, max": "link, max",
            "figure 10: link, min": "link, min",
            "figure 10: a step, nothing overlapped": "step",
        },
        figures=("figure10_kaggle.svg", "figure10_terabyte.svg"),
    ),
    Section(
        title="Placement: time and memory of planning",
        files=("oper",),
        text="""\
From the counts of single rows, as a dataset holds them, to the plan; and addresses looked up in the plan.""",
        pattern=r"^plan from row counts|^addresses",
    ),
    Section(
        title="Many devices",
        files=("scaling",),
        text="""\
`python -m benchmarks.scaling`: steps on virtual CPU devices, which share the two cores, so that their times say
nothing of scaling; bytes fetched over every link, counted from routes beside the cost model (the ratio is the
model's figure by the count), on capped and full tables; RM1 to RM4 in the modes of a lookup; H200 projections
from one device's step, by the assumptions that the command prints.""",
    ),
    Section(
        title="Tensor-train tables",
        files=("tt",),
        text="""\
`python -m benchmarks.tt --device cpu --plot docs/figures`: the largest Kaggle table (10,131,227 x 16) at rank 32
against TT-Rec's algorithm in PyTorch (a batched GEMM a lookup), tensorly-torch and the uncompressed table with
row-wise Adagrad; ranks, dims and rows; EL-Rec's breakdown (Figures 14, 17, 18); memory (TT-Rec, Figure 8; EL-Rec,
Table III); pooling factors and the cache of full rows (TT-Rec, Figures 11, 12). [tensor_train.md](tensor_train.md)
says what they mean.""",
        pattern=r"^(forward|forward and backward|step|step, all on|step, hit rate [0-9.]+%), median$|^memory",
        figures=(
            "tt_figure14_breakdown.png",
            "tt_figure17_lookup.png",
            "tt_figure18_backward.png",
            "tt_figure8_memory.png",
            "tt_figure12_cache.png",
        ),
    ),
    Section(
        title="Tensor-train tables: parameters",
        files=("tt_footprints",),
        text="""\
`python -m benchmarks.tt --parts footprints`: models of TT-Rec's Figure 5 and EL-Rec's Table III, counted.""",
        columns={
            "footprint, uncompressed": "uncompressed",
            "footprint, compressed": "compressed",
            "footprint, compression": "compression",
            "footprint, compression, the paper's": "the paper's",
            "footprint, compressed, the paper's": "compressed, the paper's",
        },
        cases="Figure 5|Table III",
    ),
    Section(
        title="Tensor-train tables: accuracy",
        files=("accuracy_tt",),
        text="""\
`python -m benchmarks.accuracy_tt`: the largest tables compressed against whole tables, three seeds, three
initializations of the cores (TT-Rec, Figure 6c), on public samples.""",
    ),
    Section(
        title="Criteo Terabyte at full size in 24 GB",
        files=("terabyte_tt",),
        text="""\
`python -m benchmarks.terabyte_tt`: 26 tables capped at 40 M rows, dim 64, tables of a million rows and more
compressed.""",
    ),
    Section(
        title="MLPerf's DLRM-DCNv2",
        files=("mlperf_memory", "mlperf_step"),
        text="""\
`python -m benchmarks.mlperf`: the model of `configs/mlperf_dlrm_dcnv2.toml`, 26 tables of 204 M rows of 128 floats, 214
ids an example, three cross layers of rank 512. Memory is that of the training step with row-wise Adagrad, compiled
ahead of time for one H200 (141 GB), not run there. Steps are timed on this machine's CPU with a 64th of the rows,
against PyTorch's `EmbeddingBag(sparse=True)`, Adagrad and a row-wise Adagrad written in PyTorch.
For scale, not ours: published submissions of MLPerf Training train 13.5 to 14.3 million examples a second
on 8 H200.""",
    ),
    Section(
        title="Host tables against FBGEMM",
        files=("host_table",),
        text="""\
`python -m benchmarks.host_table`: gather(-reduce) and fused row-wise Adagrad on rows in host memory, without a
device. Shares are of the copy bandwidth that the same run measured; bytes are those the kernels ask for, rows that
caches hold included, so that a share may pass 1.""",
        columns={
            "gather, median": "gather",
            "update, median": "update",
            "both, median": "both",
            "both, bandwidth": "both, bandwidth",
            "gather, bandwidth by copy": "gather by copy bandwidth",
            "update, bandwidth by copy": "update by copy bandwidth",
        },
    ),
    Section(
        title="The host tier's pipeline",
        files=("pipeline",),
        text="""\
`python -m benchmarks.pipeline`: pipelined against sequential (queue length 1), a plain loop that pools and updates
on the host, and tables on the device at a size that fits; runs on a CPU are "in place".
All stages share two cores here, and device memory is
host memory.""",
    ),
    Section(
        title="Reordering: products of a batch",
        files=("reorder",),
        text="""\
`python -m benchmarks.reorder`: mean unique prefixes of a batch of 1,024, before and after `jrec reorder`; the ratio is
to the order of frequency, which `jrec prepare` gives ([reordering.md](reordering.md)).""",
        columns=PREFIXES,
        cases="batch 1,024$",
    ),
    Section(
        title="Reordering: cost",
        files=("reorder",),
        text="""\
The index graph and its communities by a table, memory of all tables of a dataset, and what a step and a pass over the
dataset gain or lose.""",
        pattern="^(graph|communities|edges|modularity.*|memory|step.*|loader.*)$",
    ),
    Section(
        title="FAE: calibrating and packing",
        files=("fae_calibration",),
        text="""\
`python -m benchmarks.fae --part calibration`: how often the Rand-Em Box's 99.9 % bound holds and how far above the
truth it lies, what a 5 % sample costs and finds beside a full scan, and how fast examples are packed
([fae.md](fae.md)).""",
    ),
    Section(
        title="FAE: hot and cold batches",
        files=("fae_training",),
        text="""\
`python -m benchmarks.fae --part training`: training with hot rows on the device against all rows in host memory, the
same examples in the same run, and test AUC on the public Criteo sample, three seeds. Device memory is host memory
here: bytes and schedules are the result, not seconds.""",
    ),
    Section(
        title="Loading",
        files=("loader",),
        text="""\
`python -m benchmarks.loader`: Criteo-shaped examples (13 dense features, 26 ids), batches of 2,048, shuffled.""",
    ),
    Section(
        title="Preparing",
        files=("prepare",),
        text="""\
`python -m benchmarks.prepare`: a synthetic log in Criteo's format, from text to a finished dataset in a process of
its own.""",
    ),
    Section(
        title="Whole runs at full size",
        files=("full_size",),
        text="""\
`python -m benchmarks.full_size`: `jrec train` on synthetic datasets with as many rows as the real ones: memory of
each phase against tables, slots and 1.2 GB; how long checkpoints take, for how much of it steps wait, and how much
slower they are meanwhile on cores that training and writing share; a run killed and resumed against an uninterrupted
one; and steps against a model's with 1 M rows.""",
    ),
    Section(
        title="Start-up",
        files=("startup",),
        text="""\
`python -m benchmarks.startup --quick --against ../jrec-before`: whole processes on the quickstart's model, beside the
last commit that neither kept compiled programs nor put garbage collection off until the model is made. "Warm" finds
bytecode, native kernels and compiled programs where earlier runs left them. "Cold" finds no compiled programs, and
pays for keeping them.""",
        pattern=", median$",
    ),
    Section(
        title="Many tables",
        files=("many_tables",),
        text="""\
`python -m benchmarks.many_tables`: 500 tables of 10,000 rows against 26 of them.""",
    ),
    Section(
        title="A program of one's own",
        files=("library_step",),
        text="""\
`python -m benchmarks.library_step`: steps of `jrec.distribute` beside a `jax.jit` step on a split state that may be
overwritten, written by hand; and the same lookups in tables of more rows, of the same 4,096 ("scan") or of all.""",
    ),
    Section(
        title="Lookups of INT8 and INT4 rows against FBGEMM",
        files=("quantized",),
        text="""\
`python -m benchmarks.quantized`: all tables in one native call, against FBGEMM's quantized table-batched embedding for
inference on the CPU, and against jrec's own lookups of float32 rows. FBGEMM keeps a row's scale and bias in float16,
jrec in float32.""",
        columns={
            "forward, median": "forward",
            "forward, against float32 rows, median": "beside float32 rows",
            "error of outputs, jrec": "error",
            "error of outputs, FBGEMM": "FBGEMM's error",
        },
    ),
    Section(
        title="Exported models: quality and latency",
        files=("serving",),
        text="""\
`python -m benchmarks.serving`: exports of a DLRM trained on real clicks. "Rows to logits" is a request whose values are
rows already, against PyTorch's EmbeddingBag and MLPs in inference mode; "raw columns" begins with texts.""",
        pattern=r"test AUC|AUC lost|tables|median$",
    ),
    Section(
        title="Two days of a model's life",
        files=("lifecycle",),
        text="""\
`python -m benchmarks.lifecycle`: every command in a process of its own, and the greatest difference between scores that
must be equal.""",
        pattern=r"",
    ),
    Section(
        title="Tables that grow",
        files=("growing",),
        text="""\
`python -m benchmarks.growing`: the Kaggle model with [tables that grow](growing.md) against a dataset whose values have
rows already, in one process in turn; and the AUC of the sample's last tenth after one pass in order of time, mean of
three seeds, at about the same number of rows by hashing, by leaving rare values out, and by growth.""",
        pattern=r"step|keys|rows|test auc, mean",
    ),
    Section(
        title="Accuracy on real clicks",
        files=("accuracy",),
        text="""\
`python -m benchmarks.accuracy`: `jrec prepare criteo-kaggle` and `jrec train configs/criteo_kaggle.toml` on a
public sample of 79,067 lines in time order, the last tenth of it the test, against scikit-learn's logistic
regression on hashed features of the same lines.""",
    ),
    Section(
        title="Accuracy on real histories",
        files=("accuracy_tbsm",),
        text="""\
`python -m benchmarks.accuracy_tbsm`: `jrec prepare taobao` and `jrec train` on two public samples, 10,000 events of 114
users and 96,168 of two hours; the last tenth of the examples is the test. Negatives are as popular as positives, so a
rule of popularity cannot tell them apart. "TBSM" is `configs/tbsm_taobao_sample.toml`, tuned only on the first sample,
"RMC1" the paper's architecture of `configs/tbsm_taobao.toml`. Rules need no training: is the target's category in the
history, and how often?""",
    ),
)
