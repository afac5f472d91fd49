import re
from functools import cache, wraps
from itertools import cycle, permutations
from pathlib import Path

import pytest
import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch import Trainer

from mtrl_lightning import algorithms
from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.cli.config_files import ExtendingConfigFile
from mtrl_lightning.cli.lightning_cli import RunParser
from mtrl_lightning.data import TaskData, demonstration_data, env_data
from mtrl_lightning.replay.rollout_buffer import rows_per_task
from mtrl_lightning.transitions import RolloutConfig
from tests.algorithms.test_options import options_of
from tests.helpers.command_line import CONFIGS, ROOT, SHORT, resolve, skip_without_renderer
from tests.helpers.tiers import slow_unless

FILES = sorted(
    path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    for path in ROOT.glob("configs/**/*.yaml")
)
SUITES = [name for name in FILES if name.startswith(("env/metaworld", "env/dmc"))]
EXPERIMENTS = [name for name in FILES if name.startswith("experiment/")]
DESCRIBED = re.compile(r"# (Measured|Not measured): \S")
"""The first line of an experiment: whether docs/results.md has a run of it."""
QUICK_EXPERIMENTS = [name for name in EXPERIMENTS if "cpu" in name or "mtmhsac" in name]


def test_every_file_says_what_it_is_in_short_lines():
    for name in FILES:
        text = (ROOT / "configs" / f"{name}.yaml").read_text()
        assert text.startswith("# "), name
        assert [line for line in text.splitlines() if len(line) > 100] == [], name
        assert name not in EXPERIMENTS or DESCRIBED.match(text), name
        if "-c experiment/" in text.partition("\nextends")[0] and name in EXPERIMENTS:
            assert f"-c {name} " in text.replace("\n", " "), name


def test_every_name_in_a_comment_is_one_of_a_configuration():
    for name in FILES:
        text = (ROOT / "configs" / f"{name}.yaml").read_text()
        named = re.findall(r"-c ((?:\w+/)?\w+)(?![\w/.])", text)
        assert set(named) <= {*FILES, "FILE"}, name


def built(command_line, monkeypatch, names):
    """Return the spec of the algorithm that files describe, which is built and not trained."""
    seen = []

    @wraps(Trainer.fit)  # LightningCLI reads its signature
    def fit(trainer, model, **options):
        seen.append(model.spec)

    monkeypatch.setattr(Trainer, "fit", fit)
    command_line("fit", configs=names, small=False)
    return seen[0]


@pytest.mark.parametrize("suite", slow_unless(("env/toy", "env/metaworld_mt10"), SUITES))
def test_every_file_of_a_suite_makes_a_run_of_its_tasks(command_line, monkeypatch, suite):
    if "dmc" in suite:
        pytest.importorskip("dm_control")
    names = ("base", suite, "algorithm/mtsac", "network/multi_head")
    spec = built(command_line, monkeypatch, names)
    suite, is_mtrl, _ = suite.partition("_mtrl")
    tasks = {
        "env/dmcontrol": 3,
        "env/dmc19": 19,
        "env/dmc21": 21,
        "env/metaworld_mt1": 1,
        "env/metaworld_custom": 4,
        "env/metaworld_hard9": 9,
        "env/metaworld_ml10": 15,
        "env/metaworld_ml45": 50,
    }.get(suite) or int(suite.rpartition("_mt")[2])
    assert spec.num_tasks == tasks and spec.horizon == (150 if is_mtrl else 500)


class _Composed(Exception):  # noqa: N818
    """Raised once a run is composed and checked, before environments are started."""


def check_composition(command_line, monkeypatch, *names, options=()):
    def composed(*args, **kwargs):
        raise _Composed

    monkeypatch.setattr(env_data, "VectorEnv", composed)
    monkeypatch.setattr(demonstration_data, "load_demonstrations", composed)
    needed = ["--data.demonstrations=some"] if "algorithm/bc" in names else []
    with pytest.raises(_Composed):
        command_line("fit", *needed, *options, configs=names, small=False)


ENVS = [name for name in FILES if name.startswith("env/") and name != "env/toy"]
ALGORITHMS = [name for name in FILES if name.startswith("algorithm/")]
PAIRS = [
    *(("env/toy", algorithm) for algorithm in ALGORITHMS),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(ENVS, cycle(ALGORITHMS))),
]


@pytest.mark.parametrize(("env", "algorithm"), PAIRS)
def test_algorithms_go_with_environments_by_default(command_line, monkeypatch, env, algorithm):
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


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless(QUICK_EXPERIMENTS, EXPERIMENTS))
def test_every_experiment_is_complete(command_line, monkeypatch, name):
    num_tasks = {"dmc21": 21, "hipbmdp": 8, "pixels": 1}.get(Path(name).name.split("_")[0])
    if num_tasks is None:
        num_tasks = 50 if "mt50" in name else 10
    else:
        pytest.importorskip("dm_control")
    if "pixels" in name:
        skip_without_renderer()
    assert built(command_line, monkeypatch, [name]).num_tasks == num_tasks


@pytest.mark.parametrize(
    ("name", "envs_per_task", "rows"), [("mtppo", 10, 320), ("toppo", 4, 125), ("toppo", 2, 50)]
)
def test_on_policy_experiments_have_equal_minibatches(name, envs_per_task, rows):
    tasks = 50 if envs_per_task == 2 else 10
    config = resolve(f"experiment/mt{tasks}_{name}")
    assert config["name"] == f"mt{tasks}_{name}"
    data = config["data"]["init_args"]
    assert data["envs_per_task"] == envs_per_task
    ppo = config["model"]["init_args"]
    collection = RolloutConfig(ppo["num_steps"], ppo["num_epochs"], ppo["num_minibatches"])
    found = rows_per_task(tasks * envs_per_task, tasks, collection)
    assert found == rows * collection.num_minibatches
    assert data["benchmark"]["init_args"]["tasks"] == f"MT{tasks}"


BENCHMARK = "data.init_args.benchmark.init_args"
PROTOCOLS = {
    # McLean et al. 2025, arXiv 2505.11289: 2 M steps per task, 4,000 random steps of each first,
    # and evaluation on each of the 50 goals once
    "metaworld_plus": {
        f"{BENCHMARK}.reward_version": "v2",
        f"{BENCHMARK}.horizon": 500,
        f"{BENCHMARK}.num_goals": 50,
        "data.init_args.warmup_updates": 0,
        "data.init_args.updates_per_step": 1,
        "data.init_args.envs_per_task": 1,
        "evaluation.num_episodes": 50,
        "model.init_args.discount": 0.99,
        "model.init_args.tau": 0.005,
        "model.init_args.num_critics": 2,
        "model.init_args.actor_max_grad_norm": 1.0,
        "model.init_args.critic_max_grad_norm": 1.0,
    },
    # github.com/facebookresearch/mtrl, config/setup/metaworld.yaml (Sodhani et al. 2021, arXiv
    # 2102.06177): horizon 150, batches of 1,280, a replay of 1 M, 1,500 random steps of each task
    "mtrl": {
        f"{BENCHMARK}.reward_version": "v1",
        f"{BENCHMARK}.horizon": 150,
        f"{BENCHMARK}.num_goals": 50,
        "data.init_args.warmup_updates": 1500,
        "data.init_args.updates_per_step": 1,
        "data.init_args.envs_per_task": 1,
        "model.init_args.discount": 0.99,
        "model.init_args.tau": 0.005,
        "model.init_args.num_critics": 2,
        "model.init_args.actor_max_grad_norm": None,
        "model.init_args.critic_max_grad_norm": None,
    },
}
PER_BENCHMARK = {  # where None: 1,280 and 1,000,000 on MT10, 128 and 100,000 per task in MetaWorld+
    ("metaworld_plus", 10): (None, None, 20_000_000, 40_000, 200_000),
    ("metaworld_plus", 50): (None, None, 100_000_000, 200_000, 1_000_000),
    ("mtrl", 10): (None, None, 20_000_000, 15_000, 100_000),
    ("mtrl", 50): (1300, 1_000_000, 100_000_000, 75_000, 500_000),
}
SIZES = (
    "data.init_args.batch_size",
    "data.init_args.capacity",
    "data.init_args.total_steps",
    "data.init_args.warmup_steps",
    "evaluation.every",
)
OWN = re.compile("cpu|ppo|brc|_bc$|dmc|hipbmdp|pixels")
PUBLISHED = [name for name in EXPERIMENTS if not OWN.search(name)]
"""Those of MT10 and MT50 with one of the protocols; where they differ is said in their files."""
FAST = ("mtmhsac", "mt10_mtrl_cagrad", "mt50_moore", "mt50_mtrl_famo")


def at(config, path):
    """Return the option ``a.b`` of a configuration."""
    for key in path.split("."):
        config = config[key]
    return config


def check_protocol(config, protocol, tasks):
    expected = PROTOCOLS[protocol] | dict(
        zip(SIZES, PER_BENCHMARK[protocol, tasks], strict=True),
        **{f"{BENCHMARK}.tasks": f"MT{tasks}"},
    )
    assert {path: at(config, path) for path in expected} == expected


@pytest.mark.parametrize("name", slow_unless([f"experiment/{name}" for name in FAST], PUBLISHED))
def test_experiments_are_those_of_the_published_protocol(name):
    protocol = "mtrl" if "mtrl_" in name else "metaworld_plus"
    config = resolve(name)
    check_protocol(config, protocol, 50 if "mt50" in name else 10)
    assert config["name"] == Path(name).name
    for kind in ("{}.class_path", "{}_gradient.class_path"):
        found = [at(config, f"model.init_args.{kind.format(part)}") for part in ("actor", "critic")]
        assert found[0] == found[1]
    for optimizer in ("actor", "critic", "temperature"):
        init = at(config, f"model.init_args.{optimizer}_optimizer.init_args")
        assert (init["lr"], init["eps"]) == (3e-4, 1e-5)


@pytest.mark.parametrize(
    ("protocol", "experiment"), [("metaworld_plus", "mtmhsac"), ("mtrl", "mtrl_film")]
)
def test_the_mt50_file_of_a_protocol_changes_its_sizes(protocol, experiment):
    config = resolve(f"experiment/{experiment}", f"protocol/{protocol}_on_mt50")
    check_protocol(config, protocol, 50)


OWNED = {  # what a file of each group may name, below model.init_args
    "encoder": {"encoder", "conditioning"},
    "network": {"actor", "critic"},
    "gradient": {"actor_gradient", "critic_gradient"},
}
OF_THE_RUN = {"spec", "seed", "compile", "on_nonfinite", "max_skipped_updates"}
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
        assert content.keys() == {"data"} and content["data"]["init_args"].keys() == {"benchmark"}
        return
    if group == "algorithm":
        assert content.pop("data").keys() == {"class_path"}
    assert set(content) == {"model"}
    path = content["model"].get("class_path", "mtrl_lightning.algorithms.SAC")
    algorithm = getattr(algorithms, path.rsplit(".", 1)[1])
    options = options_of(algorithm) - OF_THE_RUN
    of_others = set().union(*OWNED.values())
    assert set(content["model"]["init_args"]) == OWNED.get(group, options - of_others)
    assert ("class_path" in content["model"]) == (group == "algorithm")


@cache
def small_parser():
    """Return a parser of model and data alone, which is several times as fast."""
    parser = RunParser(exit_on_error=False)
    parser.add_argument("-c", "--config", action=ActionConfigFile)
    parser.add_lightning_class_args(Algorithm, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(TaskData, "data", subclass_mode=True, required=False)
    parser.set_defaults({"data": {"class_path": "mtrl_lightning.data.ReplayData"}})
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


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_later_file_of_a_group_replaces_the_earlier_one(group):
    start = small_parser().get_defaults()
    if group in OWNED:
        start = apply(start, "algorithm/mtsac")
    alone = {name: apply(start, name) for name in files_of(group)}
    assert len(alone) > 1
    for first, second in permutations(alone, 2):
        found = without_empty(apply(alone[first], second))
        expected = without_empty(alone[second])
        if group == "algorithm":  # options that both data modules have stay
            for config in (found, expected):
                config["data"] = config["data"]["class_path"]
        assert found == expected, (first, second)


def loggers_of(*names, options=()):
    loggers = resolve("quickstart", *names, options=options)["trainer"]["logger"]
    return loggers and [logger["class_path"].rpartition(".")[2] for logger in loggers]


def test_loggers_of_several_files_are_all_used():
    assert loggers_of("logger/wandb", "logger/tensorboard") == [
        "WandbLogger",
        "TensorBoardLogger",
    ]
    assert loggers_of("logger/csv", "logger/tensorboard") == ["TensorBoardLogger"]
    assert loggers_of("logger/tensorboard", "logger/csv") is False
    names = ("logger/tensorboard", "logger/wandb")
    options = ("--trainer.logger.offline=true",)
    last = resolve("quickstart", *names, options=options)["trainer"]["logger"][-1]
    assert last["init_args"]["offline"] is True


@pytest.mark.slow
def test_loggers_write_into_the_run_or_their_folder(command_line, tmp_path):
    more = tmp_path / "more.yaml"
    loggers = [
        {"class_path": "CSVLogger", "init_args": {"save_dir": folder, "name": "second"}}
        for folder in (".", str(tmp_path / "elsewhere"))
    ]
    more.write_text(yaml.safe_dump({"trainer": {"logger+": loggers}}))
    command_line("fit", *SHORT, "-c", str(more), configs=(*CONFIGS, "logger/tensorboard"))
    folder = command_line.folder()
    assert len(list(folder.glob("tensorboard/events.*"))) == 1
    for parent in (folder, tmp_path / "elsewhere"):
        assert (parent / "second" / "version_0" / "metrics.csv").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    assert saved[1]["init_args"]["save_dir"] == ".", "a repeated run writes into its own folder"
