"""Runs of Lightning's own trainer: killed at a random batch, whoever saved, they end as the whole.

``tests/matrix/test_continuation.py`` has the runs of the command line.
"""

import json
import random
import shutil
from functools import partial

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from mtrl_lightning.algorithms import PPO, SAC, BehaviourCloning
from mtrl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, MetricsCallback
from mtrl_lightning.data import DemonstrationData, ReplayData, RolloutData
from mtrl_lightning.envs import ToyReach
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MLP
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.fitting import QUIET, rows_of
from tests.helpers.runs import assert_same
from tests.helpers.tiers import slow_unless

BENCHMARK = ToyReach(num_tasks=3, horizon=10)
NARROW = partial(MLP, width=8, depth=1)
REPLAY = {"batch_size": 12, "capacity": 150, "num_workers": 0, "seed": 1}


def make_sac(folder, total_steps=240, kind=ReplayData):
    options = {"warmup_steps": 30, "updates_per_step": 1.5, "chunk_mebibytes": 0.002}
    data = kind(BENCHMARK, total_steps, **REPLAY, **options)
    return SAC(data.spec, seed=1, actor=NARROW, critic=NARROW), data


def make_ppo(folder):
    data = RolloutData(BENCHMARK, total_steps=240, num_workers=0, seed=1)
    options = {"num_steps": 10, "num_epochs": 3, "num_minibatches": 2, "max_kl": 0.02}
    return PPO(data.spec, seed=1, actor=NARROW, critic=NARROW, **options), data


def make_bc(folder):
    source = folder.parent / "demonstrations"
    if not source.exists():
        write_demonstrations(source, num_episodes=1)
    data = DemonstrationData(ToyReach(), source, total_steps=60, batch_size=12, seed=1)
    return BehaviourCloning(data.spec, seed=1, actor=NARROW), data


MAKE = {"sac": make_sac, "ppo": make_ppo, "bc": make_bc}
EVERY = {"sac": 60, "ppo": 60, "bc": 15}


def train(kind, folder, callbacks=(), ckpt_path=None):
    """Train to the end, and return all that has to be equal there."""
    model, data = MAKE[kind](folder)
    evaluation = EvaluationCallback(EVERY[kind], num_episodes=1, num_workers=0)
    given = [*callbacks, evaluation, MetricsCallback(every=EVERY[kind] // 2)]
    trainer = L.Trainer(**QUIET, default_root_dir=folder, callbacks=given)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return {
        "weights": model.state_dict(),
        "optimizers": [update.optimizer.state_dict() for update in model.updates],
        "counters": model.counters.state_dict(),
        "generators": model.generators.state_dict(),
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "evaluation": evaluation.results,
        "rows": rows_of(folder),
    }


class KilledError(Exception):
    """Ends a run abruptly."""


class Kill(Callback):
    """End the run at a batch, by an exception in a hook."""

    def __init__(self, batch, hook):
        self.batch = batch
        setattr(self, hook, self.kill)

    def kill(self, trainer, *args):
        if trainer.fit_loop.total_batch_idx >= self.batch:
            raise KilledError


class Save(Callback):
    """A user's own callback, which saves in one of Lightning's hooks."""

    def __init__(self, folder, hook):
        self.folder = folder
        self.count = 0
        setattr(self, hook, self.save)

    def save(self, trainer, *args):
        self.count += 1
        trainer.save_checkpoint(self.folder / f"own_{self.count:04d}.ckpt")


END_HOOKS = ("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end")
SAVERS = {
    "EnvStepCheckpoint": lambda folder: EnvStepCheckpoint(30, save_top_k=-1, dirpath=str(folder)),
    "ModelCheckpoint": lambda folder: ModelCheckpoint(
        folder, "{step:05d}", every_n_train_steps=3, save_top_k=-1
    ),
    "exception": lambda folder: ModelCheckpoint(folder, "{step:05d}", save_on_exception=True),
    **{hook: partial(lambda hook, folder: Save(folder, hook), hook) for hook in END_HOOKS},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the end of the uninterrupted run of a kind."""
    ends = {}

    def end(kind):
        if kind not in ends:
            ends[kind] = train(kind, tmp_path_factory.mktemp(kind) / "run")
        return ends[kind]

    return end


@pytest.mark.parametrize("saver", slow_unless(["ModelCheckpoint"], SAVERS))
@pytest.mark.parametrize("kind", slow_unless(["ppo"], MAKE))
def test_killed_run_ends_as_the_uninterrupted_one(tmp_path, whole, kind, saver):
    last = whole(kind)["global_step"]
    folder, saved = tmp_path / "run", tmp_path / "run" / "checkpoints"
    rng = random.Random(f"{kind} {saver}")
    hooks = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]
    hook = hooks[-1] if saver == "exception" else rng.choice(hooks)
    kill = Kill(rng.randrange(last // 2, last - 1), hook)
    with pytest.raises(KilledError):
        train(kind, folder, [SAVERS[saver](saved), kill])
    found = sorted(saved.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    if not found:  # killed before this hook was called
        assert saver == "on_train_epoch_end" and kind != "ppo"
        return
    assert_same(train(kind, folder, ckpt_path=found[-1]), whole(kind))


def test_replay_files_are_those_that_checkpoints_need(tmp_path):
    folder = tmp_path / "run"
    train("sac", folder, [EnvStepCheckpoint(30, save_top_k=2), ModelCheckpoint(folder / "own")])
    replay = folder / "replay"
    index = json.loads((replay / "index.json").read_text())
    present = {path: of for path, of in index.items() if (replay / path).exists()}
    needed = {
        chunk["file"] for manifest in present.values() for chunk in manifest["all_ranks"]["chunks"]
    }
    assert {path.name for path in replay.glob("rows*")} == needed
    assert len(present) == 3


@pytest.mark.slow
def test_checkpoint_outside_the_run_resumes_elsewhere(tmp_path, whole):
    train("sac", tmp_path / "run", [Save(tmp_path, "on_validation_end")])
    for path in sorted(tmp_path.glob("*.ckpt"))[1:-1]:
        found = train("sac", tmp_path / path.stem, ckpt_path=path)
        assert_same(found["weights"], whole("sac")["weights"])


def fit(folder, model, data, ckpt_path=None):
    trainer = L.Trainer(**QUIET, default_root_dir=folder, callbacks=EnvStepCheckpoint(30))
    trainer.fit(model, data, ckpt_path=ckpt_path)


def test_second_fit_in_another_folder_resumes_from_there(tmp_path):
    model, data = make_sac(tmp_path, kind=partial(ReplayData, restore_replay=False))
    fit(tmp_path / "first", model, data)
    data.total_steps = 300
    fit(tmp_path / "second", model, data)
    shutil.rmtree(tmp_path / "first")
    last = tmp_path / "second" / "checkpoints" / "last.ckpt"
    resumed, of_resumed = make_sac(tmp_path, 330)
    fit(tmp_path / "second", resumed, of_resumed, last)
    assert resumed.counters.env_steps == 330
    with pytest.warns(UserWarning, match="empty replay"):
        fit(tmp_path / "third", model, data, last)
    assert len(data.buffer) == 0, "not the rows of the fit before"
    # under another name of its class, the data module would lose its state silently
    renamed = type("RenamedData", (ReplayData,), {})
    with pytest.raises(ConfigurationError, match="RenamedData"):
        fit(tmp_path / "fourth", *make_sac(tmp_path, 360, renamed), last)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step"])
def test_checkpoint_in_the_middle_of_an_update_is_refused(tmp_path, hook):
    with pytest.raises(ConfigurationError, match="on_train_batch_end"):
        train("sac", tmp_path / "run", [Save(tmp_path, hook)])
    assert not list(tmp_path.glob("*.ckpt"))


def test_exception_in_an_update_is_the_users_and_writes_nothing(tmp_path):
    saver = SAVERS["exception"](tmp_path / "checkpoints")
    with pytest.warns(UserWarning, match="middle"), pytest.raises(KilledError):
        train("sac", tmp_path / "run", [saver, Kill(3, "on_before_optimizer_step")])
    assert not list((tmp_path / "checkpoints").glob("*.ckpt"))
