"""The whole living state of a run is compared with that of its continuation.

What a checkpoint does not hold would differ.
"""

import random
import re

import numpy as np
import pytest
import torch

from mtrl_lightning.callbacks import EnvStepCheckpoint
from mtrl_lightning.data import ReplayData
from tests.helpers.object_graph import graph_of
from tests.helpers.runs import CONNECTORS

pytestmark = pytest.mark.slow

DEAD = {
    r"stopwatch\.|collector\.times\.": "times",
    r"MetricsCallback\._measured": "times",
    r"\._arrays\.|\._buffer|\.envs\._groups\.\d+\._asked": "the last step's values, never read",
    r"update.*\.grad_norm": "of the last step, read right after it",
    r"\._announced_builds_E": "each process builds the environments and calls the listeners",
    r"EvaluationCallback\._evaluators\.": "each evaluation resets them by the episode's number",
    r"algorithm\.generators\._": "made when first used; their states are compared",
    r"SignalCallback\._replaced_handlers": "handlers of this process",
    r"algorithm\._acting_tasks": "the last step's, kept while they are the same",
    r"'target_encoder'\._(seen|task_rows)": "it observes nothing, and gets copies of statistics",
    r"data\.is_training": "set when training starts",
    r"collector\._first_ends": "of a warning about a run's first episodes",
    r"Checkpoint\.(_last_|current_score|_env_steps)": "of the last save, Lightning's own",
    r"(Curves|Report)Callback\._": "times, and whether it has warned",
    r"_SaveConfig|EnvStepProgressBar": "Lightning's own",
    r"_metric_attributes|_param_requires_grad_state": "Lightning's own",
    r"_compiler_ctx|_fabric|_jit_is_scripting|_log_hyperparams|_current_fx_name": "Lightning's own",
    r"prepare_data_per_node": "Lightning's own",
}


def living(graph):
    dead = re.compile("|".join(DEAD))
    return {path: repr(value) for path, value in graph.items() if not dead.search(path)}


def test_a_continued_run_lives_on_as_the_one_that_saved(command_line, monkeypatch):
    graphs = {}
    save = EnvStepCheckpoint.save

    def save_and_walk(self, trainer, pl_module):
        _ = torch.rand(3), np.random.rand(3), random.random()  # as a user's network might
        save(self, trainer, pl_module)
        graphs.setdefault(("saved", pl_module.counters.env_steps), graph_of(trainer, pl_module))

    begin = ReplayData.begin

    def walk_and_begin(self):
        graphs["continued"] = graph_of(self.trainer, self.algorithm)
        begin(self)

    monkeypatch.setattr(EnvStepCheckpoint, "save", save_and_walk)
    options = [
        "--data.capacity=480",
        "--checkpoint.save_top_k=-1",
        "--metrics.every=250",
        "--data.total_steps=630",
        "--data.benchmark=tests.helpers.altered_reach.Reporting",
        "--data.info_keys=[place,steps,score]",
        "--data.listeners+=tests.helpers.diary.Diary",
        "--model.init_args.encoder=mtrl_lightning.networks.Standardize",
        *CONNECTORS,
    ]
    command_line("fit", *options)
    monkeypatch.setattr(EnvStepCheckpoint, "save", save)
    monkeypatch.setattr(ReplayData, "begin", walk_and_begin)
    path = command_line.folder() / "checkpoints" / "env_steps=000000000600.ckpt"
    command_line("fit", *options, f"--ckpt_path={path}")
    before, after = living(graphs["saved", 600]), living(graphs["continued"])
    assert len(before) > 500
    pairs = {path: (before.get(path, "")[:80], after.get(path, "")[:80]) for path in before | after}
    assert {path: pairs[path] for path in pairs if before.get(path) != after.get(path)} == {}
