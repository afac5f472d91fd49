"""A custom callback that stops training when every task is solved."""

from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Adam

from mtrl_lightning import SAC, Temperature, ToyReach, train
from mtrl_lightning.networks import MLP


class StopWhenSolved(Callback):
    """Stop training when the success rate of the worst task reaches a threshold.

    Args:
        success: required success rate of every task, from 0 to 1.
    """

    def __init__(self, success: float = 0.9) -> None:
        self.success = success

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the evaluation's metrics, which are in ``trainer.callback_metrics``."""
        success = {
            name.removeprefix("eval/success/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("eval/success/")
        }
        worst = min(success, key=lambda task: success[task])
        print(f"worst task: {worst}, success {success[worst]:.2f}")
        if success[worst] >= self.success:
            trainer.should_stop = True  # the last checkpoint is written before the run ends


if __name__ == "__main__":
    small = partial(MLP, width=64, depth=2)
    adam = partial(Adam, lr=1e-3)
    agent = partial(
        SAC,
        actor=small,
        critic=small,
        temperature=partial(Temperature, initial=0.1),
        actor_optimizer=adam,
        critic_optimizer=adam,
    )
    run = train(
        ToyReach(),
        agent,
        total_steps=9_000,
        data={"batch_size": 96},
        evaluation={"every": 1_500},
        callbacks=[StopWhenSolved()],
        num_workers=0,
        name="until_solved",
    )
    print(f"{run.algorithm.counters.env_steps:,} environment steps")
