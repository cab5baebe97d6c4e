"""Tensor Casting's claims."""

from benchmarks.claims.claim import GPU, OPEN, Claim, Figure, Paper, Rule

DEFAULT = r"^rm[1-4], batch (1,024|2,048|4,096), dim 64$"

TENSOR_CASTING = Paper(
    name="Tensor Casting",
    title="Tensor Casting: Co-Designing Algorithm-Architecture for Personalized Recommendation Training (HPCA 2021)",
    hardware="a V100 with a Xeon, and an emulated near-memory processor (NMP)",
    evaluation=(
        "Figure 4",
        "Figure 5",
        "Figure 6",
        "Figure 12",
        "Figure 13",
        "Figure 14",
        "Figure 15",
        "Figure 16",
        "Figure 17",
    ),
    claims=(
        Claim(
            where="Figure 4",
            says="backward of the embeddings is 62 % to 92 % of a training step",
            rule=GPU,
            figures=(
                Figure(
                    file="casting_overlap",
                    case="",
                    metric="no casting: embeddings' backward pass",
                    of="of the baseline's step on a CPU, RM1 to RM4",
                    unit=" %",
                ),
            ),
            difference="The paper's MLPs are on a GPU; on a CPU those of RM3 and RM4 take nearly all of the step.",
        ),
        Claim(
            where="Figure 5",
            says="expanded gradients are 10 times the batch's; coalesced ones shrink with the log's locality",
            rule=Rule(paper=10.0),
            figures=(
                Figure(
                    file="casting_counted",
                    case="",
                    metric="gradient, expanded",
                    of="expanded gradient by the batch's, 10 ids a bag",
                ),
                Figure(
                    file="casting_counted",
                    case="power law",
                    metric="gradient, coalesced",
                    of="coalesced, ids of a power law",
                ),
                Figure(
                    file="casting_counted",
                    case="uniform",
                    metric="gradient, coalesced",
                    of="coalesced, uniform ids",
                ),
            ),
            difference="Two laws in place of the logs named (Books, MovieLens-20M, Taobao, Kaggle), of which only"
            " samples"
            " are at hand.",
        ),
        Claim(
            where="Figure 6",
            says="a casted gather-reduce moves half as many bytes as expand and coalesce",
            rule=Rule(paper=2.0),
            figures=(
                Figure(
                    file="casting_counted",
                    case="power law",
                    metric="traffic, casted gather-reduce",
                    inverse=True,
                    of="fewer bytes, ids of a power law, batches of 1,024 to 32,768",
                ),
                Figure(
                    file="casting_counted",
                    case="uniform",
                    metric="traffic, casted gather-reduce",
                    inverse=True,
                    of="fewer bytes, uniform ids",
                ),
            ),
            difference="Loads and stores counted; the sort, which both sides need, left out.",
        ),
        Claim(
            where="Figure 12",
            says="gradient coalescing 1.1× to 9.5× faster by casting, on a CPU",
            rule=Rule(paper=1.1),
            figures=(
                Figure(
                    file="casting",
                    case=DEFAULT,
                    metric="cast + casted gather-reduce",
                    ratio=True,
                    of="RM1 to RM4, batches of 1,024 to 4,096, 2 cores",
                ),
            ),
            difference="The baseline uses the same native kernels, threads and radix sort, so that only the algorithm"
            " differs; the paper's baseline is a tuned PyTorch.",
        ),
        Claim(
            where="Figure 13",
            says="1.2× to 1.6× end to end in software alone, 1.4× to 2.8× with larger batches; 2.0× to 15× with NMP",
            rule=Rule(paper=1.2),
            figures=(
                Figure(
                    file="casting_overlap",
                    case="rm[12]",
                    metric="step, cast ahead",
                    ratio=True,
                    of="whole step, RM1 and RM2, the cast on an idle core",
                ),
                Figure(
                    file="casting_overlap",
                    case="rm[34]",
                    metric="step, cast ahead",
                    ratio=True,
                    of="RM3 and RM4",
                ),
                Figure(
                    file="casting_overlap",
                    case="rm[12]",
                    metric="step, cast given",
                    ratio=True,
                    of="RM1 and RM2 if all of the cast were hidden",
                ),
            ),
            difference="One core computes, one casts; the paper casts on a GPU while the CPU gathers. NMP is not to"
            " be had.",
        ),
        Claim(
            where="Figure 14",
            says="less energy in proportion to time, also in software alone",
            rule=OPEN,
            difference="Energy is not measured.",
        ),
        Claim(
            where="Figure 15",
            says="NMP is active 92 % of the time on RM1 and RM2",
            rule=OPEN,
            difference="Utilization of hardware that does not exist here.",
        ),
        Claim(
            where="Figure 16",
            says="the gain is robust over batch sizes of 1,024 to 32,768",
            rule=Rule(paper=1.2),
            figures=(
                Figure(
                    file="casting",
                    case=r"^rm[1-4], batch [0-9,]+, dim 64$",
                    metric="cast + fused update",
                    ratio=True,
                    peer="expand-coalesce-scatter",
                    of="cast and fused update against expand, coalesce and scatter",
                ),
            ),
            difference="Of the embeddings' backward pass, not of the whole step; 1.2× is the paper's least end to end.",
        ),
        Claim(
            where="Figure 17",
            says="the gain is robust over dims of 32 to 256",
            rule=Rule(paper=1.2),
            figures=(
                Figure(
                    file="casting",
                    case=r"^rm[1-4], batch 2,048, dim [0-9]+$",
                    metric="cast + fused update",
                    ratio=True,
                    of="cast and fused update against expand, coalesce and scatter",
                ),
            ),
            difference="As in Figure 16.",
        ),
    ),
)
