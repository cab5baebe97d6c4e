"""How do I search hyperparameters? Optuna proposes, `jrec train` runs, and its report answers.

python examples/optuna_sweep.py    (needs optuna: pip install optuna)
"""

import json
import pathlib
import tempfile

import optuna  # pyright: ignore[reportMissingImports]

from jrec.cli import main as jrec


def main(trials: int = 6, folder: str | None = None) -> dict[str, float]:
    """Searches learning rates and the size of rows; returns the best trial's values and its log loss on valid."""
    work = pathlib.Path(folder or tempfile.mkdtemp())
    jrec(["synth", "--like", "quickstart", "--rows", "20000", "--out", str(work / "data")])

    def objective(trial: optuna.Trial) -> float:
        out = work / f"trial{trial.number}"
        keys = {
            "optimizer.learning_rate": trial.suggest_float("dense", 1e-3, 1e-1, log=True),
            "optimizer.embedding.learning_rate": trial.suggest_float("rows", 1e-2, 1.0, log=True),
            "model.embedding_dim": trial.suggest_categorical("dim", [8, 16]),
            "data.path": work / "data", "data.batch_size": 256, "out": out, "evaluate.baselines": "off",
        }  # fmt: skip
        if jrec(["train", "quickstart", *(f"{key}={value}" for key, value in keys.items())]):
            raise optuna.TrialPruned
        report = json.loads((out / "report" / "metrics.json").read_text())
        return report["splits"]["valid"]["log_loss"]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))  # storage= keeps it, for many processes
    study.optimize(objective, n_trials=trials)
    return {**study.best_params, "log loss": study.best_value}


if __name__ == "__main__":
    print(main())
