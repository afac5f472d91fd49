"""Tune options with Optuna: several workers share trials in a SQLite file, weak trials are pruned.

    python examples/tune_optuna.py --trials 10 --workers 2

Run it again, or several times at once on the same machine, to add trials to the study.
"""

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import optuna
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Adam

from mtrl_lightning import SAC, Temperature, ToyReach, train
from mtrl_lightning.networks import MLP

FOLDER = Path("runs/tuned")


class PruneWeak(Callback):
    """Report the success rate of each evaluation, and stop a run that Optuna prunes.

    Args:
        trial: the run's trial.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial
        self.num_evaluations = 0
        self.is_pruned = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report the evaluation's success rate from ``trainer.callback_metrics``."""
        if self.is_pruned:
            return
        self.num_evaluations += 1
        self.trial.report(float(trainer.callback_metrics["eval/success"]), self.num_evaluations)
        self.is_pruned = self.trial.should_prune()
        trainer.should_stop = trainer.should_stop or self.is_pruned


def objective(trial: optuna.Trial) -> float:
    """Train with the options that the trial suggests, and return the final success rate."""
    adam = partial(Adam, lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True))
    network = partial(MLP, width=trial.suggest_categorical("width", [32, 64, 128]), depth=2)
    pruning = PruneWeak(trial)
    run = train(
        ToyReach(),
        partial(
            SAC,
            actor=network,
            critic=network,
            temperature=partial(Temperature, initial=0.1),
            actor_optimizer=adam,
            critic_optimizer=adam,
        ),
        total_steps=6_000,
        data={"batch_size": 96},
        evaluation={"every": 1_000},
        callbacks=[pruning],
        num_workers=0,
        root=str(FOLDER),
        name=f"trial_{trial.number:04d}",
    )
    if pruning.is_pruned:
        raise optuna.TrialPruned
    return run.evaluation["eval/success"]


def open_study() -> optuna.Study:
    """Return the study in ``runs/tuned/optuna.db``, which all workers share."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return optuna.create_study(
        storage=f"sqlite:///{FOLDER}/optuna.db",
        study_name="toy_reach",
        direction="maximize",
        sampler=optuna.samplers.TPESampler(constant_liar=True),  # for several workers
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
        load_if_exists=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10, help="of each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes at the same time")
    options = parser.parse_args()
    study = open_study()
    if options.workers == 1:
        study.optimize(objective, n_trials=options.trials)
    else:
        command = [sys.executable, __file__, f"--trials={options.trials}"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores
        workers = [subprocess.Popen(command) for _ in range(options.workers)]
        for worker in workers:
            worker.wait()
    print(f"best of {len(study.trials)} trials: {study.best_value:.2f} with {study.best_params}")
