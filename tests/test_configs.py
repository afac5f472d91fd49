"""The files of ``configs/``: each is complete, goes with the others, and has published numbers."""

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from mtrl_lightning import algorithms
from mtrl_lightning.cli.config_files import files_of
from mtrl_lightning.cli.lightning_cli import MultiTaskCLI, parsed
from tests.helpers.command_line import CONFIGS, ROOT, SHORT, only_composed, skip_without_renderer
from tests.helpers.tiers import slow_unless

FILES = sorted(
    path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    for path in ROOT.glob("configs/**/*.yaml")
)
EXPERIMENTS = [name for name in FILES if name.startswith("experiment/")]
ALGORITHMS = [name for name in FILES if name.startswith("algorithm/")]


def composed(command_line, monkeypatch, *names):
    """Compose and check a run of these files; return its configuration and its tasks."""
    built = []
    monkeypatch.setattr(MultiTaskCLI, "before_fit", lambda cli: built.append(cli))
    cloning = any(name == "algorithm/bc" or name.endswith("_bc") for name in names)
    demonstrations = ["--data.demonstrations=some"] if cloning else []
    with only_composed():
        command_line("fit", *demonstrations, configs=names, small=False)
    return built[0].config.fit.as_dict(), built[0].model.spec


ENVS = {
    "env/classic_discrete": (5, 500),
    "env/dmc19": (19, 500),
    "env/dmc21": (21, 500),
    "env/dmcontrol": (3, 500),
    "env/gymnasium": (2, 200),
    "env/hipbmdp": (8, 500),
    "env/metaworld_custom": (4, 500),
    "env/metaworld_hard9": (9, 500),
    "env/metaworld_ml10": (15, 500),
    "env/metaworld_ml45": (50, 500),
    "env/metaworld_mt1": (1, 500),
    "env/metaworld_mt10": (10, 500),
    "env/metaworld_mt10_mtrl": (10, 150),
    "env/metaworld_mt25": (25, 500),
    "env/metaworld_mt50": (50, 500),
    "env/metaworld_mt50_mtrl": (50, 150),
    "env/minigrid": (3, 288),
    "env/toy": (3, 20),
    "env/toy_conflict": (6, 20),
}
"""Numbers of tasks, and of steps of an episode."""
PARTS = {
    "algorithm/sac_ae": ("encoder/mlp",),
    "algorithm/deepmdp": ("encoder/mlp",),
    "algorithm/hipbmdp": ("encoder/mlp_context",),
    "algorithm/drq": ("pixels", "encoder/pixels_small"),
}
"""What an algorithm needs."""
PAIRS = [
    *(("env/toy", algorithm) for algorithm in ALGORITHMS),
    *((env, "algorithm/mtppo") for env in ENVS if env != "env/toy"),
]
FAST_PAIRS = [("env/toy", f"algorithm/{name}") for name in ("bc", "hipbmdp", "mtppo")]


def test_every_environment_is_tried():
    assert {name for name in FILES if name.startswith("env/")} == {*ENVS}


@pytest.mark.parametrize("pair", slow_unless(FAST_PAIRS, PAIRS), ids="-".join)
def test_algorithms_go_with_environments_by_default(command_line, monkeypatch, pair):
    env, algorithm = pair
    if "env/dmc" in env or "hipbmdp" in env:
        pytest.importorskip("dm_control")
    if env == "env/minigrid":
        pytest.importorskip("minigrid")
    if algorithm == "algorithm/drq":
        skip_without_renderer()
    parts = ("base", env, algorithm, *PARTS.get(algorithm, ()), "network/mlp", "gradient/mean")
    _, spec = composed(command_line, monkeypatch, *parts)
    assert (spec.num_tasks, spec.horizon) == ENVS[env]


BENCHMARK = "data.init_args.benchmark.init_args"
OF_BOTH = {
    f"{BENCHMARK}.num_goals": 50,
    "data.init_args.updates_per_step": 1,
    "data.init_args.envs_per_task": 1,
    "model.init_args.discount": 0.99,
    "model.init_args.tau": 0.005,
    "model.init_args.num_critics": 2,
}
PROTOCOLS = {
    # McLean et al. 2025, arXiv 2505.11289: 2 M steps per task, 4,000 random steps of each first,
    # and evaluation on each of the 50 goals once
    "metaworld_plus": {
        **OF_BOTH,
        f"{BENCHMARK}.reward_version": "v2",
        f"{BENCHMARK}.horizon": 500,
        "data.init_args.warmup_updates": 0,
        "evaluation.num_episodes": 50,
        "model.init_args.actor_max_grad_norm": 1.0,
        "model.init_args.critic_max_grad_norm": 1.0,
    },
    # github.com/facebookresearch/mtrl, config/setup/metaworld.yaml (Sodhani et al. 2021, arXiv
    # 2102.06177): horizon 150, batches of 1,280, a replay of 1 M, 1,500 random steps of each task
    "mtrl": {
        **OF_BOTH,
        f"{BENCHMARK}.reward_version": "v1",
        f"{BENCHMARK}.horizon": 150,
        "data.init_args.warmup_updates": 1500,
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
"""Experiments with numbers of their own; where others differ from a protocol is in their files."""
COMPLETE = [
    ("toy_conflict", "algorithm/mtppo"),  # takes the place of SAC
    ("experiment/mtmhsac", "protocol/metaworld_plus_on_mt50"),
    ("experiment/mtrl_film", "protocol/mtrl_on_mt50"),
    *((name,) for name in EXPERIMENTS),
]
FAST = [*COMPLETE[:2], ("experiment/mt10_sac_cpu",), ("experiment/mt10_mtrl_cagrad",)]
NUM_TASKS = {"toy": 6, "dmc21": 21, "hipbmdp": 8, "pixels": 1}


def at(config, path):
    """Return the option ``a.b`` of a configuration."""
    for key in path.split("."):
        config = config[key]
    return config


@pytest.mark.parametrize("names", slow_unless(FAST, COMPLETE), ids=" ".join)
def test_experiments_are_complete_and_follow_their_protocol(command_line, monkeypatch, names):
    name, text = Path(names[0]).name, " ".join(names)
    if "dmc" in name or "hipbmdp" in name:
        pytest.importorskip("dm_control")
    if "pixels" in name:
        skip_without_renderer()
    config, spec = composed(command_line, monkeypatch, *names)
    tasks = NUM_TASKS.get(name.split("_")[0]) or (50 if "mt50" in text else 10)
    assert spec.num_tasks == tasks and config["name"] == name
    if name == "toy_conflict" or OWN.search(name):
        return
    protocol = "mtrl" if "mtrl_" in text else "metaworld_plus"
    sizes = zip(SIZES, PER_BENCHMARK[protocol, tasks], strict=True)
    expected = PROTOCOLS[protocol] | dict(sizes) | {f"{BENCHMARK}.tasks": f"MT{tasks}"}
    assert {path: at(config, path) for path in expected} == expected
    for kind in ("{}.class_path", "{}_gradient.class_path"):
        found = [at(config, f"model.init_args.{kind.format(part)}") for part in ("actor", "critic")]
        assert found[0] == found[1]
    for optimizer in ("actor", "critic", "temperature"):
        init = at(config, f"model.init_args.{optimizer}_optimizer.init_args")
        assert (init["lr"], init["eps"]) == (3e-4, 1e-5)


OWNED = {  # what a file of each group may name, below model.init_args
    "encoder": {"encoder", "conditioning"},
    "network": {"actor", "critic"},
    "gradient": {"actor_gradient", "critic_gradient"},
}
OF_THE_RUN = {"spec", "seed", "compile", "on_nonfinite", "max_skipped_updates"}


def named(name):
    """Return the options that a file and the files that it extends name, with their values."""
    found = {}
    for file in files_of(name):
        content = yaml.safe_load(file.read_text())
        content.pop("extends", None)
        for section, given in content.items():
            options = given.pop("init_args", {}) | given
            found |= {f"{section}.{option}": value for option, value in options.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.split("/")[0] in OWNED])
def test_each_network_encoder_and_gradient_method_is_built(command_line, monkeypatch, name):
    if "pixels" in name or "multi_input" in name:
        pytest.skip("the tasks have states")
    own = {"network": "network/mlp", "encoder": "encoder/identity", "gradient": "gradient/mean"}
    parts = {**own, name.split("/")[0]: name}.values()
    composed(command_line, monkeypatch, "base", "algorithm/mtsac", *parts, "env/toy_conflict")


def test_file_names_all_keys_of_its_group_and_no_other():
    """A later file of the group then replaces all of the earlier one."""
    of_others = set().union(*OWNED.values())
    for name in FILES:
        group = name.split("/")[0]
        if group not in ("env", "algorithm", *OWNED):
            continue
        found = named(name)
        if group == "env":
            assert found.keys() == {"data.benchmark"}, name
        elif group == "algorithm":
            algorithm = getattr(algorithms, found["model.class_path"].rpartition(".")[2])
            parser = ArgumentParser()
            parser.add_class_arguments(algorithm, "model")
            options = {*vars(parser.get_defaults().model)} - OF_THE_RUN - of_others
            expected = {f"model.{option}" for option in options}
            assert found.keys() == {"data.class_path", "model.class_path", *expected}, name
        else:
            assert found.keys() == {f"model.{option}" for option in OWNED[group]}, name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("logger/wandb", "logger/tensorboard"), ["WandbLogger", "TensorBoardLogger"]),
        (("logger/csv", "logger/tensorboard"), ["TensorBoardLogger"]),
        (("logger/tensorboard", "logger/csv"), False),
    ],
)
def test_loggers_of_several_files_are_all_used(names, expected):
    given = [word for name in ("quickstart", *names) for word in ("-c", name)]
    loggers = parsed(["fit", *given])["trainer"]["logger"]
    found = loggers and [logger["class_path"].rpartition(".")[2] for logger in loggers]
    assert found == expected


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
    assert any(folder.glob("tensorboard/events.*"))
    for parent in (folder, tmp_path / "elsewhere"):
        assert (parent / "second" / "version_0" / "metrics.csv").exists()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["logger"]
    assert saved[1]["init_args"]["save_dir"] == ".", "a repeated run writes into its own folder"
