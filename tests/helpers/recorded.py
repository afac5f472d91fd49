"""A replay that was filled from real steps, beside the episodes that the collector saw."""

from typing import NamedTuple

import torch

from mtrl_lightning.checkpoints import FORMAT
from mtrl_lightning.envs import VectorEnv
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.rollout import Collector
from mtrl_lightning.utils.counters import Counters
from tests.helpers.fakes import Uniform


class Seen(NamedTuple):
    """An episode, or a part of one, as the collector saw it."""

    env: int
    task: int
    observations: list
    actions: list
    rewards: list
    terminated: bool


class Recorded:
    """A replay, and the episodes that were added to it."""

    def __init__(self, benchmark, tasks, num_steps, capacity):
        envs = VectorEnv(benchmark, tasks, seed=3, num_workers=0, max_restarts=5)
        self.spec = benchmark.spec
        self.collector = Collector(envs, Uniform(2, seed=0))
        self.buffer = ReplayBuffer(self.spec, capacity * len(tasks), tasks=tasks)
        self.seen: list[Seen] = []
        running: dict[int, Seen] = {}
        for _ in range(num_steps):
            transitions, _ = self.collector.step("explore")
            self.buffer.add(transitions)
            for env in set(running) - set(transitions.env_E.tolist()):
                self.seen.append(running.pop(env))  # it was rebuilt
            for row, env in enumerate(transitions.env_E.tolist()):
                task = int(transitions.task_E[row])
                one = running.setdefault(env, Seen(env, task, [], [], [], False))
                one.observations.append(transitions.observation_ED[row])
                one.actions.append(transitions.action_EA[row])
                one.rewards.append(transitions.reward_E[row])
                is_terminated = bool(transitions.terminated_E[row])
                if is_terminated or transitions.truncated_E[row]:
                    one.observations.append(transitions.next_observation_ED[row])
                    self.seen.append(running.pop(env)._replace(terminated=is_terminated))
        self.seen += running.values()
        envs.close()

    def kept(self):
        """Return the seen episodes that the rings hold from their start on, by ring."""
        storage = self.buffer.storage
        kept = {env: [] for env in range(storage.num_envs)}
        for env, episodes_of_ring in kept.items():
            number = 0
            for one in [one for one in self.seen if one.env == env]:
                if number >= storage.added_E[env] - storage.size_E[env]:
                    episodes_of_ring.append((number, one))
                number += len(one.rewards)
        return kept

    def save(self, folder):
        """Write what a run leaves of its replay; return the run's folder."""
        run = folder / "try" / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        counters = Counters(env_steps=self.collector.counters.env_steps)
        content = {
            "state_dict": {},
            "hyper_parameters": {"_class_path": "mtrl_lightning.algorithms.SAC"},
            "mtrl_lightning": {
                "format": FORMAT,
                "spec": self.spec.to_dict(),
                "counters": counters.state_dict(),
                "data": "ReplayData",
            },
            "ReplayData": {"replay": ReplaySnapshots(run / "replay").save(self.buffer.storage)},
        }
        torch.save(content, run / "checkpoints" / "last.ckpt")
        return run
