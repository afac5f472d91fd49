"""The whole living state of a run is compared with that of its continuation.

What a checkpoint does not hold would differ.
"""

import random
import re

import numpy as np
import pytest
import torch

from mtrl_lightning.callbacks import CheckpointCallback
from mtrl_lightning.run.loop import TrainingLoop
from tests.helpers.object_graph import graph_of
from tests.helpers.runs import CONNECTORS

pytestmark = pytest.mark.slow

DEAD = {
    r"stopwatch\.|collector\.times\.": "times",
    r"MetricsCallback\._measured": "times",
    r"\._arrays\.|\._buffer|\.envs\._groups\.\d+\._asked": "the last step's values, never read",
    r"update.*\.grad_norm": "of the last step, read right after it",
    r"_metaworld_views\._(vectors|rows)": "room for vectors, written before each reading",
    r"\._announced_builds_E": "each process builds the environments and calls the listeners",
    r"session\.is_(restoring|training)": "set by the loop, when training starts",
    r"loop\._next_action": "the rest of the list is done when a continued run starts",
    r"MetricsCallback\._csv_fingerprint": "of the checkpoint that is continued",
    r"OptionsCallback\._previous": "options of the checkpoint that is continued",
    r"EvaluationCallback\._evaluators\.": "each evaluation resets them by the episode's number",
    r"algorithm\.generators\._": "made when first used; their states are compared",
    r"InterruptionCallback\._replaced_handlers": "handlers of this process",
    r"algorithm\._acting_tasks": "the last step's, kept while they are the same",
    r"algorithm\._has_been_saved": "each process warns once of what no checkpoint can rebuild",
    r"'target_encoder'\._(seen|task_rows)": "it observes nothing, and gets copies of statistics",
    r"(CheckpointCallback|session\.checkpoints)\.(folder|_saved_at)": "set by the continuation",
    r"(CheckpointCallback|session\.checkpoints)\._manifests_of_files": "read again",
    r"(ReplayCallback|session\.replay_files)\._snapshots\.folder": "set by the continuation",
    r"(Curves|Report)Callback\._": "times, and whether it has warned",
    r"_SaveConfig|EnvStepProgressBar": "Lightning's own",
    r"_metric_attributes|_param_requires_grad_state": "Lightning's own",
    r"_compiler_ctx|_fabric|_jit_is_scripting|_log_hyperparams|_current_fx_name": "Lightning's own",
    r"prepare_data_per_node": "Lightning's own",
}


def living(graph):
    return {
        path: value
        for path, value in graph.items()
        if not any(re.search(dead, path) for dead in DEAD)
    }


@pytest.mark.parametrize(
    "benchmark", ["tests.helpers.altered_reach.Reporting", "mtrl_lightning.envs.MetaWorld"]
)
def test_a_continued_run_lives_on_as_the_one_that_saved(command_line, monkeypatch, benchmark):
    graphs = {}
    write = CheckpointCallback._write

    def write_and_walk(self, best):
        trainer = self._trainer
        algorithm = self.session.algorithm
        _ = torch.rand(3), np.random.rand(3), random.random()  # as a user's network might
        write(self, best)
        graphs.setdefault(("saved", algorithm.counters.env_steps), graph_of(trainer, algorithm))

    begin = TrainingLoop._begin

    def walk_and_begin(self):
        graphs["continued"] = graph_of(self.session.trainer, self.session.algorithm)
        begin(self)

    monkeypatch.setattr(CheckpointCallback, "_write", write_and_walk)
    options = [
        "--data.capacity=480",
        "--checkpoint.keep_last=-1",
        "--metrics.every=250",
        "--rollout.total_steps=630",
        f"--data.benchmark={benchmark}",
    ]
    options += ["--model.init_args.encoder=mtrl_lightning.networks.Standardize"]
    if "MetaWorld" in benchmark:
        options += [
            "--data.benchmark.init_args.tasks=[reach,push,box-close]",
            "--data.benchmark.init_args.horizon=23",
        ]
    else:
        options += [
            "--data.info_keys=[place,steps,score]",
            "--rollout.listeners+=tests.helpers.diary.Diary",
            *CONNECTORS,
        ]
    command_line("fit", *options)
    monkeypatch.setattr(CheckpointCallback, "_write", write)
    monkeypatch.setattr(TrainingLoop, "_begin", walk_and_begin)
    path = command_line.folder() / "checkpoints" / "step_000000000600.ckpt"
    command_line("fit", *options, f"--ckpt_path={path}", "--overwrite_metrics")
    before, after = living(graphs["saved", 600]), living(graphs["continued"])
    assert len(before) > 500
    differing = [
        path for path in {**before, **after} if repr(before.get(path)) != repr(after.get(path))
    ]
    assert not differing, [
        (path, repr(before.get(path))[:80], repr(after.get(path))[:80]) for path in differing
    ]
