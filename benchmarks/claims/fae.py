"""FAE's claims."""

from benchmarks.claims.claim import GPU, OPEN, Claim, Figure, Lost, Paper, Rule

FAE = Paper(
    name="FAE",
    title="Accelerating Recommendation System Training by Leveraging Popular Choices (VLDB 2021)",
    hardware="1 to 4 V100 and a Xeon Silver 4116",
    evaluation=(
        "Figure 9",
        "Figure 10",
        "Figure 11",
        "Figure 12",
        "Figure 13",
        "Figure 14",
        "Figure 15",
        "Table III",
        "Table IV",
        "Table V",
        "Table VI",
    ),
    claims=(
        Claim(
            where="Figure 9",
            says="with 99.9 % confidence the Rand-Em Box's estimate is within 10 % of the measured size",
            rule=Lost(paper=10.0),
            figures=(
                Figure(
                    file="fae_calibration",
                    case="Rand-Em Box, .* 6.8 % hot",
                    metric="upper bound above the truth, median",
                    of="bound above the truth, median, 6.8 % of the rows hot, as in the paper's Kaggle",
                    unit=" %",
                ),
                Figure(
                    file="fae_calibration",
                    case="Rand-Em Box, .* 1 % hot",
                    metric="upper bound above the truth, median",
                    of="1 % of the rows hot",
                    unit=" %",
                ),
                Figure(
                    file="fae_calibration",
                    case="Rand-Em Box, .* % hot",
                    metric="99.9 % upper bound holds, of 1,000 trials",
                    of="of 1,000 trials in which the bound holds, the least of ten cases first",
                    unit=" %",
                ),
            ),
            difference="The rarer hot rows are, the looser the bound: within 10 % only where some 7 % of rows are hot."
            " Chunks are drawn at random here.",
        ),
        Claim(
            where="Figure 10",
            says="one threshold is estimated 14.5× to 61× faster than by a scan of the tables",
            rule=Rule(paper=14.5),
            figures=(
                Figure(
                    file="fae_calibration",
                    case="^Rand-Em Box, [0-9,]+ rows$",
                    metric="one threshold, median",
                    ratio=True,
                    of="tables of 1 and 10 million rows",
                ),
            ),
            difference="The box reads as many rows of any table: the gain grows with the table, and a million rows"
            " are few.",
        ),
        Claim(
            where="Figure 11",
            says="inputs are classified as hot or cold in at most 110 s (45 to 80 million inputs, 16 cores)",
            rule=OPEN,
            figures=(
                Figure(
                    file="fae_calibration",
                    case="inputs$",
                    metric="packing, median",
                    of="classified, written and verified on 2 cores",
                    unit=" inputs/s",
                ),
            ),
            difference="At this rate 45 million inputs take about the paper's time on an eighth of its cores, but a"
            " run of"
            " that size has not been measured.",
        ),
        Claim(
            where="Figure 12",
            says="accuracy over the iterations reaches the baseline's",
            rule=OPEN,
            difference="Only final accuracies are compared here (Table III).",
        ),
        Claim(
            where="Table III",
            says="test accuracy as the baseline's: 78.86 % and 78.86 % on Kaggle, at most 0.18 points lost",
            rule=Lost(paper=0.18),
            figures=(
                Figure(
                    file="fae_training",
                    case="criteo_kaggle_80k",
                    metric="AUC lost, mean",
                    of="AUC lost, mean of three seeds",
                    unit=" %",
                ),
                Figure(
                    file="fae_training",
                    case="criteo_kaggle_80k",
                    metric="AUC lost, greatest",
                    of="greatest of the seeds",
                    unit=" %",
                ),
            ),
            difference="A public sample of 79,067 lines in order of time, AUC in place of accuracy.",
        ),
        Claim(
            where="Figure 13",
            says="2.34× faster training on average over Kaggle, Taobao and Terabyte, 1 to 4 GPUs",
            rule=GPU,
            figures=(
                Figure(
                    file="fae_training",
                    case="Criteo Kaggle by 64",
                    metric="training, FAE",
                    ratio=True,
                    of="against all rows in host memory, on a CPU",
                ),
            ),
            difference="On a CPU host memory and device memory are the same, so nothing is saved by hot rows but"
            " bytes moved.",
        ),
        Claim(
            where="Table IV",
            says="ten epochs of Kaggle in 122.7 minutes against 245.3 on one GPU",
            rule=GPU,
            difference="Absolute times of the paper's machine.",
        ),
        Claim(
            where="Figure 14",
            says="the baseline spends most of its time in transfers and in the optimizer on the CPU",
            rule=GPU,
            difference="A breakdown needs a GPU beside the CPU.",
        ),
        Claim(
            where="Table V",
            says="transfers between CPU and GPU of Kaggle take 2.5 minutes in place of 11.05 (4.4×)",
            rule=Rule(paper=4.42),
            figures=(
                Figure(
                    file="fae_training",
                    case="Criteo Kaggle by 64",
                    metric="rows and slots moved, FAE",
                    ratio=True,
                    of="bytes of rows and slots that need not move",
                ),
                Figure(
                    file="fae_training",
                    case="Criteo Kaggle by 64",
                    metric="hot examples",
                    of="of the examples are hot",
                    unit=" %",
                ),
            ),
            difference="Bytes, not minutes, of a synthetic Kaggle with a 64th of its rows.",
        ),
        Claim(
            where="Figure 15",
            says="up to 4.7× with larger mini-batches",
            rule=GPU,
            difference="Speed on GPUs.",
        ),
        Claim(
            where="Table VI",
            says="5.3 % to 8.8 % less power of a GPU",
            rule=GPU,
            difference="Power of GPUs.",
        ),
    ),
)
