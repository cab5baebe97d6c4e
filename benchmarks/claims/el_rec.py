"""EL-Rec's claims."""

from benchmarks.claims.claim import GPU, OPEN, Claim, Figure, Lost, Paper, Rule

SAMPLE = "criteo_kaggle_80k"


def _table_iii(factors: str, of: str) -> Figure:
    return Figure(
        file="tt_footprints",
        case=f"Table III.*rank 128, {factors}",
        metric="footprint, compressed",
        by="footprint, compressed, the paper's",
        of=of,
    )


def _reordering(metric: str, case: str, of: str) -> Figure:
    return Figure(file="reorder", case=case, metric=metric, ratio=True, of=of)


EL_REC = Paper(
    name="EL-Rec",
    title="EL-Rec: Efficient Large-Scale Recommendation Model Training via Tensor-Train Embedding Table (SC 2022)",
    hardware="1 to 4 V100 (p3.8xlarge) or T4 (g4dn.12xlarge)",
    evaluation=(
        "Table III",
        "Table IV",
        "Figure 11",
        "Figure 12",
        "Figure 13",
        "Figure 14",
        "Figure 15",
        "Figure 16",
        "Figure 17",
        "Figure 18",
    ),
    claims=(
        Claim(
            where="Table III",
            says="models of 87.6 MB (Avazu), 797.9 MB (Terabyte) and 258.2 MB (Kaggle), tables above a million rows"
            " compressed",
            rule=Rule(paper=1.0, better="less"),
            figures=(
                _table_iii("factors of dim ascending", "the paper's bytes at rank 128, in jrec's shapes"),
                _table_iii("greatest factor of dim in the middle", "with its greatest factor in the middle core"),
            ),
            difference="The paper prints no shapes. Its bytes are those of 16 as 2 × 4 × 2; with 2 × 2 × 4, as TT-Rec"
            " and jrec have it, the middle core, which has nearly all parameters, is half as large: 43.9 MB for Avazu.",
        ),
        Claim(
            where="Figure 11",
            says="3× DLRM with tables in host memory, 1.5× FAE, on one GPU",
            rule=GPU,
            difference="Compares GPU memory with host memory over PCIe.",
        ),
        Claim(
            where="Figure 12",
            says="1.4× DLRM on 4 GPUs",
            rule=GPU,
            difference="Speed on GPUs; jrec's cores are data parallel on a mesh, too.",
        ),
        Claim(
            where="Figure 13",
            says="one table of 40 M rows of 128: 1.35× TorchRec, 1.07× HugeCTR",
            rule=GPU,
            figures=(
                Figure(
                    file="tt",
                    case="^40,000,000 rows x 16, rank 32, 32,768 lookups$",
                    metric="compression",
                    of="fewer parameters for 40 M rows of 16, trained in one process",
                ),
            ),
            difference="The others need several GPUs for the table; jrec's fits one, and has not been timed there.",
        ),
        Claim(
            where="Table IV",
            says="at most 0.1 % of accuracy lost",
            rule=Lost(paper=0.1),
            figures=(
                Figure(
                    file="accuracy_tt",
                    case=SAMPLE,
                    metric="AUC lost, 5 tables, 3 cores, rank 32, mean",
                    of="AUC lost on Kaggle's sample, 5 tables at rank 32, mean of three seeds",
                    unit=" %",
                ),
            ),
            difference="A public sample of 79,067 lines, see TT-Rec's Figure 6 (a).",
        ),
        Claim(
            where="Figure 14",
            says="throughput falls by 52 % without aggregation, 13 % without reordering, 10 % without reuse",
            rule=Rule(paper=1 / 0.48, of="mean"),
            figures=(
                Figure(
                    file="tt",
                    case="rank 32, 32,768 lookups$",
                    metric="step, all on, median",
                    peer="without aggregation",
                    ratio=True,
                    of="step without aggregation by step with all, 2.5 to 10 M rows",
                ),
                Figure(
                    file="tt",
                    case="rank 32, 32,768 lookups$",
                    metric="step, all on, median",
                    peer="without reuse",
                    ratio=True,
                    of="without reuse",
                ),
                _reordering("step, fastest", "sessions.*batch 4,096$", "reordered, planted sessions"),
            ),
            difference="Two CPU cores; ids are sorted either way.",
        ),
        Claim(
            where="Figure 15",
            says="the loss falls as the uncompressed model's",
            rule=OPEN,
            difference="Only final log losses are compared (accuracy_tt).",
        ),
        Claim(
            where="Figure 16",
            says="the pipeline is 1.30× the sequential one, and 2.44× DLRM",
            rule=GPU,
            figures=(
                Figure(
                    file="pipeline",
                    case="12.0 GB",
                    metric="step, pipelined",
                    peer="sequential",
                    ratio=True,
                    of="pipelined against sequential, all stages on two cores",
                ),
                Figure(
                    file="pipeline",
                    case="12.0 GB",
                    metric="overlap efficiency",
                    of="of the step's time the slowest stage works",
                    unit="",
                ),
            ),
            difference="On a CPU the stages share the cores that the step needs; there jrec updates rows in place"
            " instead.",
        ),
        Claim(
            where="Figure 17",
            says="lookup 1.83× TT-Rec's: 1.75× by reuse, 1.05× by reordering",
            rule=Rule(paper=1.83, of="mean"),
            figures=(
                Figure(
                    file="tt",
                    case="^10,000,000 rows",
                    metric="forward, index and reuse, median",
                    peer="TT-Rec's",
                    ratio=True,
                    of="against TT-Rec's algorithm, 2,048 to 32,768 lookups",
                ),
                Figure(
                    file="tt",
                    case="^10,000,000 rows",
                    metric="forward, with reuse, median",
                    peer="without reuse",
                    ratio=True,
                    of="by reuse",
                ),
            ),
            difference="Two CPU cores; both sides in XLA or jrec's native kernels.",
        ),
        Claim(
            where="Figure 18",
            says="backward 1.70× TT-Rec's: 1.40× by aggregation, 1.15× by the fused update, 1.06× by reordering",
            rule=Rule(paper=1.40, of="mean"),
            figures=(
                Figure(
                    file="tt",
                    case="^10,000,000 rows",
                    metric="backward and update, aggregation and fused update, median",
                    peer="without aggregation",
                    ratio=True,
                    of="by aggregation, 2,048 to 32,768 lookups",
                ),
                Figure(
                    file="tt",
                    case="^10,000,000 rows",
                    metric="backward and update, aggregation and fused update, median",
                    peer="without fused update",
                    ratio=True,
                    of="by the fused update",
                ),
            ),
            difference="Two CPU cores.",
        ),
    ),
)
