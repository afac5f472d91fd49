from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ActionConfigFile, Namespace

from mtrl_lightning import algorithms
from mtrl_lightning.algorithms import SAC, Algorithm
from mtrl_lightning.algorithms.arguments import parameters_of
from mtrl_lightning.callbacks import read_metrics, rollout
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.cli.config_files import ConfigFileParser, ExtendingConfigFile
from mtrl_lightning.cli.lightning_cli import MultiTaskCLI
from mtrl_lightning.replay.rollout_buffer import rows_per_task
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.types import RolloutConfig
from tests.conftest import CONFIGS, ROOT, resolve, skip_without_renderer

FILES = sorted(
    path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    for path in ROOT.glob("configs/**/*.yaml")
)
SUITES = [name for name in FILES if name.startswith(("env/metaworld", "env/dmc"))]
EXPERIMENTS = [name for name in FILES if name.startswith("experiment/")]
OWN = (
    "quickstart",
    "quickstart_ppo",
    "dmcontrol_quickstart",
    "toy_conflict",
    "experiment/dmc21_cpu",
    "experiment/dmc21_sac_cpu",
    "experiment/hipbmdp_deepmdp",
    "experiment/hipbmdp_distral",
    "experiment/hipbmdp_hipbmdp",
    "experiment/hipbmdp_sac",
    "experiment/mt10_sac_cpu",
    "experiment/pixels_drq",
    "experiment/pixels_sac_ae",
)
"""Complete settings of our own, which no protocol gives."""
PUBLISHED = [
    name for name in EXPERIMENTS if name not in OWN and not name.endswith(("_brc", "_cpu", "ppo"))
]
LOGGERS = [name for name in FILES if name.startswith("logger/")]
TINY = [
    "--trainer.enable_progress_bar=false",
    "--evaluation.num_episodes=1",
    "--data.benchmark.init_args.horizon=5",
    "--data.benchmark.init_args.num_goals=2",
    "--model.init_args.actor.init_args.width=8",
    "--model.init_args.critic.init_args.width=8",
    "--trainer.accelerator=cpu",
]


PLUS = ("ars", "moore", "mtmhsac", "mtsac", "paco", "soft_modularization", "wide")
MTRL = (
    "aligned_mtl",
    "cagrad",
    "care",
    "famo",
    "film",
    "mtsac",
    "multi_head",
    "nash_mtl",
    "pcgrad",
    "separate",
    "soft_modularization",
)
TASKS = (10, 50)


def test_every_file_is_known():
    experiments = [
        f"experiment/mt{tasks}_{name}"
        for tasks in TASKS
        for name in (*PLUS, *(f"mtrl_{n}" for n in MTRL))
    ]
    others = (
        "dmc21_cpu",
        "dmc21_sac_cpu",
        "hipbmdp_deepmdp",
        "hipbmdp_distral",
        "hipbmdp_hipbmdp",
        "hipbmdp_sac",
        "mt10_brc",
        "mt10_cpu",
        "mt10_mtppo",
        "mt10_sac_cpu",
        "mt10_toppo",
        "mt50_cpu",
        "mt50_toppo",
        "pixels_drq",
        "pixels_sac_ae",
    )
    experiments += [f"experiment/{name}" for name in others]
    assert sorted(experiments) == sorted(EXPERIMENTS)
    assert [name for name in FILES if name not in EXPERIMENTS] == [
        "algorithm/deepmdp",
        "algorithm/distral",
        "algorithm/drq",
        "algorithm/hipbmdp",
        "algorithm/mtppo",
        "algorithm/mtsac",
        "algorithm/mtsac_mtrl",
        "algorithm/mttd3",
        "algorithm/sac_ae",
        "base",
        "connectors",
        "dmcontrol_quickstart",
        "encoder/care",
        "encoder/identity",
        "encoder/language",
        "encoder/mixture_attention",
        "encoder/mixture_cluster",
        "encoder/mixture_ensemble",
        "encoder/mixture_gate",
        "encoder/mixture_identity",
        "encoder/mlp",
        "encoder/mlp_context",
        "encoder/pixels",
        "encoder/pixels_context",
        "encoder/pixels_small",
        "encoder/shared_task_embedding",
        "encoder/standardize",
        "encoder/task_embedding",
        "encoder/task_encoder",
        "env/dmc19",
        "env/dmc21",
        "env/dmcontrol",
        "env/gymnasium",
        "env/hipbmdp_cartpole_cart",
        "env/hipbmdp_cartpole_pole",
        "env/hipbmdp_cheetah_torso",
        "env/hipbmdp_finger_length",
        "env/hipbmdp_finger_spinner",
        "env/hipbmdp_walker_foot",
        "env/hipbmdp_walker_friction",
        "env/metaworld_custom",
        "env/metaworld_mt1",
        "env/metaworld_mt10",
        "env/metaworld_mt10_mtrl",
        "env/metaworld_mt25",
        "env/metaworld_mt50",
        "env/metaworld_mt50_mtrl",
        "env/toy",
        "env/toy_conflict",
        "gradient/aligned_mtl",
        "gradient/cagrad",
        "gradient/cagrad_fast",
        "gradient/fairgrad",
        "gradient/famo",
        "gradient/gradnorm",
        "gradient/mean",
        "gradient/nash_mtl",
        "gradient/pcgrad",
        "logger/csv",
        "logger/tensorboard",
        "logger/wandb",
        "mt10_quickstart",
        "network/film",
        "network/film_scalar",
        "network/mlp",
        "network/mlp_residual",
        "network/moore",
        "network/multi_head",
        "network/multi_head_mtrl",
        "network/paco",
        "network/separate",
        "network/soft_modularization",
        "network/soft_modularization_mt50",
        "pixels",
        "pixels_papers",
        "protocol/metaworld_plus",
        "protocol/metaworld_plus_mt10",
        "protocol/metaworld_plus_mt50",
        "protocol/mtrl",
        "protocol/mtrl_mt10",
        "protocol/mtrl_mt50",
        "quickstart",
        "quickstart_ppo",
        "sweep/hyperband",
        "sweep/learning_rates",
        "sweep/networks_gradients",
        "sweep/protocol_seeds",
        "toy_conflict",
        "video",
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_is_and_is_short(name):
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    longest = 50 if name in (*OWN, "experiment/mt10_brc") else 32
    assert len(text.splitlines()) <= longest
    assert [line for line in text.splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("suite", SUITES)
def test_every_file_of_a_suite_makes_a_run_of_its_tasks(command_line, monkeypatch, suite):
    if "dmc" in suite:
        pytest.importorskip("dm_control")
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line(
        "fit", configs=("base", suite, "algorithm/mtsac", "network/multi_head"), small=False
    )
    suite, is_mtrl, _ = suite.partition("_mtrl")
    tasks = {
        "env/dmcontrol": 3,
        "env/dmc19": 19,
        "env/dmc21": 21,
        "env/metaworld_mt1": 1,
        "env/metaworld_custom": 4,
    }.get(suite) or int(suite.rpartition("_mt")[2])
    assert seen[0].num_tasks == tasks and seen[0].horizon == (150 if is_mtrl else 500)


class _Composed(Exception):  # noqa: N818
    """Raised once a run is composed and checked, before environments are started."""


def check_composition(command_line, monkeypatch, *names):
    def composed(*args, **kwargs):
        raise _Composed

    monkeypatch.setattr(rollout, "VectorEnv", composed)
    with pytest.raises(_Composed):
        command_line("fit", configs=names, small=False)


@pytest.mark.parametrize("algorithm", [name for name in FILES if name.startswith("algorithm/")])
@pytest.mark.parametrize("env", [name for name in FILES if name.startswith("env/")])
def test_every_algorithm_goes_with_every_environment_by_default(
    command_line, monkeypatch, env, algorithm
):
    if "env/dmc" in env or "hipbmdp" in env:
        pytest.importorskip("dm_control")
    if algorithm == "algorithm/hipbmdp" and env == "env/metaworld_mt1":
        pytest.skip("HiP-BMDP compares tasks, and there is one")
    if algorithm == "algorithm/drq":
        skip_without_renderer()
        if env == "env/gymnasium":
            pytest.importorskip("pygame")  # draws Gymnasium's pendulum
    needed = {
        "algorithm/sac_ae": ("encoder/mlp",),
        "algorithm/deepmdp": ("encoder/mlp",),
        "algorithm/hipbmdp": ("encoder/mlp_context",),
        "algorithm/drq": ("pixels", "encoder/pixels_small"),
    }.get(algorithm, ())
    parts = ("base", env, algorithm, *needed, "network/mlp", "gradient/mean")
    check_composition(command_line, monkeypatch, *parts)


@pytest.mark.parametrize("quick", ["toy_conflict", "quickstart"])
def test_ppo_takes_the_place_of_sac_in_a_complete_file(command_line, monkeypatch, quick):
    check_composition(command_line, monkeypatch, quick, "algorithm/mtppo")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(command_line, monkeypatch, name):
    num_tasks = {"dmc21": 21, "hipbmdp": 8, "pixels": 1}.get(Path(name).name.split("_")[0])
    if num_tasks is None:
        num_tasks = parts_of(name)[0]
    else:
        pytest.importorskip("dm_control")
    if "pixels" in name:
        skip_without_renderer()
    seen = []
    monkeypatch.setattr(MultiTaskCLI, "fit", lambda self, model, **kwargs: seen.append(model.spec))
    command_line("fit", configs=[name], small=False)
    assert seen[0].num_tasks == num_tasks


@pytest.mark.parametrize("name", ["quickstart", "experiment/mt10_mtmhsac"])
def test_complete_files_train_and_their_checkpoint_alone_rebuilds_the_model(command_line, name):
    envs = {"quickstart": 18}.get(name, 10)
    steps = (f"--rollout.warmup_steps={envs}", f"--rollout.total_steps={3 * envs}")
    command_line("fit", *TINY, *steps, configs=[name], small=False)
    run = Path(name).name
    path = command_line.folder(run) / "checkpoints" / "last.ckpt"
    rebuilt = SAC.load_from_checkpoint(path)
    assert rebuilt.counters.env_steps == 3 * envs
    saved = load_checkpoint(path)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in rebuilt.state_dict().items())


@pytest.mark.parametrize(
    ("name", "envs_per_task", "rows"), [("mtppo", 10, 320), ("toppo", 4, 125), ("toppo", 2, 50)]
)
def test_on_policy_experiments_have_equal_minibatches(name, envs_per_task, rows):
    tasks = 50 if envs_per_task == 2 else 10
    config = resolve(f"experiment/mt{tasks}_{name}")
    assert config["name"] == f"mt{tasks}_{name}"
    assert config["rollout"]["envs_per_task"] == envs_per_task
    ppo = config["model"]["init_args"]
    collection = RolloutConfig(ppo["num_steps"], ppo["num_epochs"], ppo["num_minibatches"])
    found = rows_per_task(tasks * envs_per_task, tasks, collection)
    assert found == rows * collection.num_minibatches
    assert config["data"]["benchmark"]["init_args"]["tasks"] == f"MT{tasks}"
    is_balanced = name == "toppo"
    assert ppo["critic"]["init_args"]["layer_norm"] == is_balanced
    assert ("FairGrad" in ppo["critic_gradient"]["class_path"]) == is_balanced
    if is_balanced:
        assert ppo["critic_gradient"]["init_args"]["alpha"] == 1.0


SIZES = {  # of the papers: MT10 and MT50
    "soft_modularization": {
        "SoftModularization": (
            {"depth": 2, "num_modules": 2},
            {"depth": 4, "num_modules": 4},
            {"width": 256, "embedding_dim": 400},
        )
    },
    "paco": {"PaCo": ({"num_sets": 5}, {"num_sets": 20}, {"width": 400, "depth": 3})},
    "moore": {"MOORE": ({"num_experts": 4}, {"num_experts": 6}, {"width": 400, "depth": 3})},
    "wide": {"MultiHead": ({}, {}, {"width": 4096, "depth": 3})},
    "ars": {"MultiHead": ({}, {}, {"width": 400, "depth": 3})},
    "mtmhsac": {"MultiHead": ({}, {}, {"width": 400, "depth": 3})},
    "mtsac": {"MLP": ({}, {}, {"width": 400, "depth": 3})},
    "multi_head": {"MultiHead": ({}, {}, {"width": 400, "depth": 4, "head_width": 400})},
    "film": {"FiLM": ({}, {}, {"width": 400, "depth": 3, "scalar": True})},
    "separate": {"Separate": ({}, {}, {"width": 400, "depth": 3})},
    "care": {"MLP": ({}, {}, {"width": 400, "depth": 3})},
}
OTHERS = {  # options of these networks that no experiment changes, and their defaults
    "MLP": {"residual": False},
    "MultiHead": {"residual": False, "head_width": 0},
    "PaCo": {"max_loss": 3e3},
}
CONDITIONING = {  # the one-hot where none is named
    "care": {"class_path": "mtrl_lightning.networks.NoConditioning"},
    "film": {
        "class_path": "mtrl_lightning.networks.TaskEncoder",
        "init_args": {
            "width": 50,
            "depth": 2,
            "out_dim": 50,
            "embedding": {
                "class_path": "mtrl_lightning.networks.Language",
                "init_args": {"path": None},
            },
        },
    },
}
METHODS = {
    "pcgrad": "PCGrad",
    "cagrad": "CAGrad",
    "famo": "FAMO",
    "nash_mtl": "NashMTL",
    "aligned_mtl": "AlignedMTL",
}

NUMBERS = {
    "cagrad": lambda tasks: {"c": {10: 0.9, 50: 0.5}[tasks], "num_sampled": None},
    "famo": lambda tasks: {"lr": 0.025, "decay": {10: 0.001, 50: 0.01}[tasks]},
    "nash_mtl": lambda tasks: {"max_norm": 1.0, "update_every": 1},
}


def parts_of(name):
    """Return the number of tasks, whether it is mtrl's protocol, and the method."""
    tasks, method = name[len("experiment/mt") :].split("_", 1)
    return int(tasks), method.startswith("mtrl_"), method.removeprefix("mtrl_")


@pytest.mark.parametrize("name", PUBLISHED)
def test_experiments_are_the_published_protocol(name):
    config = resolve(name)
    tasks, is_mtrl, method = parts_of(name)
    assert config["name"] == name.removeprefix("experiment/")
    assert f"-c {name} " in (ROOT / "configs" / f"{name}.yaml").read_text()
    assert config["data"]["benchmark"]["init_args"] == {
        "tasks": f"MT{tasks}",
        "reward_version": "v1" if is_mtrl else "v2",
        "horizon": 150 if is_mtrl else 500,
        "num_goals": 50,
        "goal_seed": 0,
        "fast": True,
        "evaluation_horizon": None,
    }
    data = config["data"]
    rollout = config["rollout"]
    sac = config["model"]["init_args"]
    if is_mtrl:
        sizes = {10: (None, None), 50: (1300, 1_000_000)}[tasks]  # none: 1280, 1,000,000
        assert (data["batch_size"], data["capacity"]) == sizes
        assert rollout["warmup_steps"] == 1_500 * tasks and rollout["warmup_updates"] == 1_500
        evaluation = {"every": 10_000 * tasks, "num_episodes": 10}
    else:
        assert data["batch_size"] is None and data["capacity"] is None  # 128, 100,000 per task
        assert rollout["warmup_steps"] == 4_000 * tasks and rollout["warmup_updates"] == 0
        evaluation = {"every": 20_000 * tasks, "num_episodes": 50}
    assert {key: config["evaluation"][key] for key in evaluation} == evaluation
    assert rollout["total_steps"] == 2_000_000 * tasks
    assert rollout["updates_per_step"] == 1 and rollout["envs_per_task"] == 1
    assert (sac["discount"], sac["tau"], sac["num_critics"]) == (0.99, 0.005, 2)
    assert {sac["actor_max_grad_norm"], sac["critic_max_grad_norm"]} == {None if is_mtrl else 1.0}
    assert (sac["log_std_min"], sac["log_std_max"]) == (-10 if method == "moore" else -20, 2)
    assert sac["temperature"]["init_args"] == {
        "initial": 1.0,
        "per_task": method not in ("pcgrad", "cagrad", "famo", "nash_mtl"),
    }
    for optimizer in ("actor", "critic", "temperature"):
        init = sac[f"{optimizer}_optimizer"]["init_args"]
        assert (init["lr"], init["eps"]) == (3e-4, 1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_experiments_have_the_published_network_and_method(name):
    config = resolve(name)
    sac = config["model"]["init_args"]
    tasks, _, method = parts_of(name)
    ((cls, (on_mt10, on_mt50, always)),) = SIZES["mtsac" if method in METHODS else method].items()
    for network, bound in (("actor", 1e-3), ("critic", 3e-3)):
        assert sac[network]["class_path"] == f"mtrl_lightning.networks.{cls}"
        given = dict(sac[network]["init_args"])
        assert given.pop("layer_norm", False) == (method == "ars" and network == "critic")
        assert given.pop("conditioning", None) is None
        sizes = on_mt10 if tasks == 10 else on_mt50
        assert given == {**OTHERS.get(cls, {}), **always, **sizes, "output_bound": bound}
        wanted, gradient = METHODS.get(method, "Mean"), sac[f"{network}_gradient"]
        assert gradient["class_path"] == f"mtrl_lightning.gradients.{wanted}"
        assert gradient.get("init_args") == NUMBERS.get(method, lambda tasks: None)(tasks)
    chosen = {
        "task_weighting": "ByTemperature" if method == "soft_modularization" else "EqualWeights",
        "encoder": "CARE" if method == "care" else "Identity",
        "reward_scale": "MeanReward" if method == "ars" else "RewardScale",
    }
    found = {part: sac[part]["class_path"].rsplit(".", 1)[1] for part in chosen}
    assert found == chosen
    assert sac["conditioning"] == CONDITIONING.get(method)
    if method == "care":
        encoder = sac["encoder"]["init_args"]
        assert encoder.pop("conditioning")["class_path"] == "mtrl_lightning.networks.Language"
        sizes = {"width": 50, "depth": 2, "out_dim": 50, "context_dim": 50}
        assert encoder == {"num_experts": {10: 6, 50: 10}[tasks], **sizes}
    resets = {10: {"every": 4_000_000, "times": 4}, 50: {"every": 14_000_000, "times": 6}}
    never = {"every": None, "times": None}
    assert config["resets"] == (resets[tasks] if method == "ars" else never)


OWNED = {  # what a file of each group may name, below model.init_args
    "encoder": {"encoder", "conditioning"},
    "network": {"actor", "critic"},
    "gradient": {"actor_gradient", "critic_gradient"},
}
OF_THE_RUN = {"self", "spec", "seed", "compile", "on_nonfinite", "max_skipped_updates"}
GROUPS = (*OWNED, "algorithm", "env")


def files_of(group):
    return [name for name in FILES if name.startswith(f"{group}/")]


def merged(name):
    """Return what a file and the files that it extends name."""
    path = ROOT / "configs" / f"{name}.yaml"
    content = yaml.safe_load(path.read_text())
    extended = content.pop("extends", [])
    result = {}
    for other in [extended] if isinstance(extended, str) else extended:
        base = (path.parent / other).resolve().relative_to(ROOT / "configs").with_suffix("")
        result = deep_merge(result, merged(base.as_posix()))
    return deep_merge(result, content)


def deep_merge(a, b):
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return b
    return {**a, **{key: deep_merge(a.get(key), value) for key, value in b.items()}}


@pytest.mark.parametrize("name", [name for group in GROUPS for name in files_of(group)])
def test_every_file_names_all_keys_of_its_group_and_no_other(name):
    group, content = name.split("/")[0], merged(name)
    if group == "env":
        assert set(content) == {"data"}
        assert set(content["data"]) == {"benchmark"}
        return
    if name == "algorithm/mtppo":  # sets the options of a replay back
        defaults = resolve("env/toy", "algorithm/mtsac", "network/mlp", "gradient/mean")
        for section in ("data", "rollout", "replay"):
            assert content.pop(section).items() <= defaults[section].items()
    assert set(content) == {"model"}
    path = content["model"].get("class_path", "mtrl_lightning.algorithms.SAC")
    algorithm = getattr(algorithms, path.rsplit(".", 1)[1])
    options = set(parameters_of(algorithm)) - OF_THE_RUN
    of_others = set().union(*OWNED.values())
    assert set(content["model"]["init_args"]) == OWNED.get(group, options - of_others)
    assert ("class_path" in content["model"]) == (group == "algorithm")


@cache
def small_parser():
    """Return a parser of model and data alone, which is several times as fast."""
    parser = ConfigFileParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_lightning_class_args(Algorithm, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(MultiTaskData, "data", required=False)
    parser.link_arguments("data.spec", "model.init_args.spec", apply_on="instantiate")
    return parser


def apply(config, *names):
    """Return the configuration after further files, as ``-c`` leaves it: without defaults."""
    config = config.clone()
    option = ExtendingConfigFile(option_strings=["--config"], dest="config")
    for name in names:
        option(small_parser(), config, str(ROOT / "configs" / f"{name}.yaml"))
    config.pop("config")
    return config


def without_empty(value):
    """Return a configuration as a dictionary; no ``init_args`` and empty ones mean the same."""
    if isinstance(value, Namespace):
        value = {key: without_empty(item) for key, item in vars(value).items()}
        return {key: item for key, item in value.items() if (key, item) != ("init_args", {})}
    return value


@pytest.mark.parametrize("group", GROUPS)
def test_a_later_file_of_a_group_replaces_the_earlier_one_completely(group):
    start = small_parser().get_defaults()
    if group in OWNED:
        start = apply(start, "algorithm/mtsac")
    alone = {name: apply(start, name) for name in files_of(group)}
    assert len(alone) > 1
    for first, second in permutations(alone, 2):
        found = without_empty(apply(alone[first], second))
        expected = without_empty(alone[second])
        if group == "algorithm":  # what mtppo sets back, to the defaults, stays
            found, expected = found["model"], expected["model"]
        assert found == expected, (first, second)


def loggers_of(*names, options=()):
    loggers = resolve("quickstart", *names, options=options)["trainer"]["logger"]
    return loggers and [logger["class_path"].rpartition(".")[2] for logger in loggers]


def test_loggers_of_several_files_are_all_used():
    assert loggers_of("logger/wandb", "logger/tensorboard") == [
        "EnvStepWandbLogger",
        "TensorBoardLogger",
    ]
    assert loggers_of("logger/csv", "logger/tensorboard") == ["TensorBoardLogger"]
    assert loggers_of("logger/tensorboard", "logger/csv") is False
    names = ("logger/tensorboard", "logger/wandb")
    options = ("--trainer.logger.offline=true",)
    last = resolve("quickstart", *names, options=options)["trainer"]["logger"][-1]
    assert last["init_args"]["offline"] is True


def test_a_run_logs_to_two_loggers_and_once_to_one_that_is_named_twice(command_line, tmp_path):
    more = tmp_path / "more.yaml"
    logger = {"class_path": "CSVLogger", "init_args": {"save_dir": ".", "name": "second"}}
    more.write_text(yaml.safe_dump({"trainer": {"logger+": [logger]}}))
    names = (*CONFIGS, "logger/tensorboard", "logger/tensorboard")
    command_line("fit", "-c", str(more), configs=names)
    folder = command_line.folder()
    assert len(list(folder.glob("tensorboard/events.*"))) == 1
    assert (folder / "second" / "version_0" / "metrics.csv").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    kinds = [logger["class_path"].rpartition(".")[2] for logger in saved]
    assert kinds == ["TensorBoardLogger", "CSVLogger"]


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_leaves_metrics_csv_in_the_run_folder(command_line, logger):
    offline = ["--trainer.logger.init_args.offline=true"] if logger.endswith("wandb") else []
    command_line("fit", *offline, configs=(*CONFIGS, logger))
    assert "eval/success" in read_metrics(command_line.folder())
    assert not [p.name for p in command_line.root.iterdir() if p.name != "run"]
