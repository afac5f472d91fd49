"""Collect samples in another process, and learn from them in this one.

The two processes exchange weights and samples through a pipe. Across machines, use Ray, a shared
folder (``torch.save`` and ``torch.load``) or a socket instead.
"""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

from lightning.pytorch import Trainer
from torch.optim import Adam
from torch.utils.data import DataLoader, IterableDataset

from mtrl_lightning import SAC, Temperature, ToyReach, evaluate
from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.networks import MLP
from mtrl_lightning.policy import LoadedPolicy
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.rollout import Collector, Sample
from mtrl_lightning.transitions import TransitionBatch

TASKS = (0, 1, 2)  # one environment each, with its own ring buffer in the replay
SAMPLE_STEPS = 60  # environment steps per sample
UPDATES = 20  # per sample
WARMUP_STEPS = 600
TOTAL_STEPS = 1_800


def make_agent() -> SAC:
    """Return an agent; both processes need the same networks."""
    small = partial(MLP, width=64, depth=2)
    adam = partial(Adam, lr=3e-3)
    temperature = partial(Temperature, initial=0.1)
    spec = ToyReach().spec
    return SAC(
        spec,
        actor=small,
        critic=small,
        temperature=temperature,
        actor_optimizer=adam,
        critic_optimizer=adam,
    )


def collect(learner: Connection) -> None:
    """Send a sample for every state received; stop at None."""
    envs = VectorEnv(ToyReach(), list(TASKS), num_workers=0)
    collector = Collector(envs, make_agent())
    while (state := learner.recv()) is not None:
        collector.set_state(state)  # ignores weights that are older than its own
        mode = "explore" if collector.weights_seq_no else "random"
        learner.send(collector.sample(num_steps=SAMPLE_STEPS, mode=mode))


class RemoteSamples(IterableDataset[TransitionBatch]):
    """Put the samples of a collector into the replay, and sample batches.

    Args:
        agent: the algorithm that learns.
        collector: the other process, which collects a sample while this one learns.
    """

    def __init__(self, agent: SAC, collector: Connection) -> None:
        self.agent = agent
        self.collector = collector
        self.replay = ReplayBuffer(agent.spec, TOTAL_STEPS, tasks=TASKS)
        self.largest_lag = 0

    def __iter__(self) -> Iterator[TransitionBatch]:
        """Yield ``UPDATES`` batches for each sample, once the warm-up is over."""
        counters = self.agent.counters
        self.send_weights()
        while counters.env_steps < TOTAL_STEPS:
            sample: Sample = self.collector.recv()
            self.send_weights()
            self.largest_lag = max(self.largest_lag, counters.updates - sample.weights_seq_no)
            self.replay.add(sample.transitions)
            counters.env_steps += len(sample.transitions.task_E)
            if counters.env_steps >= WARMUP_STEPS:
                for _ in range(UPDATES):
                    yield self.replay.sample(96)

    def send_weights(self) -> None:
        """Send the agent's weights and the number of updates applied to them."""
        self.collector.send(
            {"weights": self.agent.get_weights(), "weights_seq_no": self.agent.counters.updates}
        )


if __name__ == "__main__":
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    process = processes.Process(target=collect, args=(there,), daemon=True)
    process.start()
    there.close()  # if the process ends, `recv` raises an error instead of waiting

    agent = make_agent()
    samples = RemoteSamples(agent, here)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(agent, DataLoader(samples, batch_size=None))
    here.recv()  # receive the pending sample, which would block the pipe
    here.send(None)
    process.join()

    print(f"{len(samples.replay):,} transitions, at most {samples.largest_lag} updates old")
    results = evaluate(LoadedPolicy(agent), ToyReach(), num_episodes=5, num_workers=0)
    print(f"success {results['eval/success']:.2f}")
