"""Collect episodes of a policy: ``mtrl-lightning collect --policy scripted --env env/...``.

PyTorch is imported when the command runs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl_lightning.cli import TRUST
from mtrl_lightning.cli.config_names import find_config
from mtrl_lightning.cli.loaded_run import add_trust_argument, data_of, load_run
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import best_checkpoint
from mtrl_lightning.utils.text import text_table, whole

if TYPE_CHECKING:
    from mtrl_lightning.demonstrations import Collected
    from mtrl_lightning.spec import EnvSpec
    from mtrl_lightning.transitions import Policy

HELP = "Collect full-length episodes of a policy, such as MetaWorld's scripted experts."
DESCRIPTION = (
    "Run episodes of every task with a policy's deterministic actions, write a Minari data set per"
    " task into a folder (requires the extra [minari]), and print the results of each task. The"
    " same seed gives the same episodes. POLICY is scripted (MetaWorld's own experts), random, a"
    f" run (its best checkpoint), a checkpoint, or a policy of this package.{TRUST} Actions are"
    " recorded after the run's data.action_transforms; export --to minari writes those before."
)
SCRIPTED = "scripted"
RANDOM = "random"
OF_BENCHMARK = ("benchmark", "wrappers", "pixels", "info_keys", "store_info")
"""Options of the data module that are recorded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``collect``."""
    parser.add_argument("--policy", required=True, help="policy to collect with; see above")
    parser.add_argument(
        "--env",
        required=True,
        metavar="NAME_OR_FILE",
        help="the tasks: a configuration by name, such as env/metaworld_mt10, or a YAML file, as"
        " for fit -c",
    )
    parser.add_argument(
        "--episodes", type=int, required=True, metavar="N", help="number of episodes per task"
    )
    parser.add_argument("--split", help="split (default: train; for test episodes: eval)")
    parser.add_argument(
        "--successes_only",
        action="store_true",
        help="keep only successful episodes, and continue until there are N per task",
    )
    parser.add_argument(
        "--attempts",
        type=int,
        help="with --successes_only, maximum number of episodes to run per requested success; if"
        " there are fewer successes, they are written before the command fails",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="STD",
        help="standard deviation of normal noise on the actions (default: 0). Transitions contain"
        " the noisy actions, and the policy's actions as policy_action",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the episodes and the noise (default: 0)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="new folder for the data sets (default: collections/ENV_POLICY)",
    )
    parser.add_argument(
        "--num_workers",
        type=int,
        help="worker processes that step environments (default: one per core); 0 to use this"
        " process",
    )
    add_trust_argument(parser)
    parser.add_argument(
        "fit_options",
        nargs="*",
        metavar="-- FIT_OPTION",
        help="after --: options of fit for the benchmark, such as"
        " --data.benchmark.init_args.horizon 200",
    )


def run(options: argparse.Namespace) -> None:
    """Collect episodes, write them, and print the results of each task."""
    if options.policy not in (SCRIPTED, RANDOM):  # unknown runs fail before PyTorch is imported
        best_checkpoint(options.policy)
    name = f"{find_config(options.env).stem}_{options.policy}"
    folder = options.folder or Path("collections") / re.sub(r"[^-\w]", "_", name)

    from mtrl_lightning.demonstrations import collect, write_data_sets
    from mtrl_lightning.demonstrations.collecting import ATTEMPTS
    from mtrl_lightning.demonstrations.minari_files import check_new
    from mtrl_lightning.utils.quiet import quiet

    check_new(folder)
    with quiet():
        described = _described_data(options.env, options.fit_options)
        benchmark = data_of({"data": described}).benchmark
        policy = _policy(options.policy, benchmark.spec, options.trust)
    split = options.split or benchmark.splits[0]
    collected = collect(
        policy,
        benchmark,
        options.episodes,
        split=split,
        successes_only=options.successes_only,
        attempts=ATTEMPTS if options.attempts is None else options.attempts,
        seed=options.seed,
        noise=options.noise,
        num_workers=options.num_workers,
        progress=True,
    )
    arguments = described["init_args"]
    facts = {name: arguments[name] for name in OF_BENCHMARK if arguments.get(name)}
    facts |= {"policy": options.policy, "seed": options.seed, "split": split}
    facts |= {"noise": options.noise, "successes_only": options.successes_only}
    facts |= {"attempts": collected.attempts}
    write_data_sets(folder, benchmark.spec, collected.episodes, facts)
    print(table(collected, benchmark.spec))
    print(f"Collected in {folder}: Minari reads them with MINARI_DATASETS_PATH={folder.resolve()}")
    missing = [
        f"{name} has {len(episodes)} of {options.episodes} successes after"
        f" {collected.attempts[name]} attempts"
        for name, episodes in collected.episodes.items()
        if len(episodes) < options.episodes
    ]
    if missing:
        sys.exit(f"\nerror: {', '.join(missing)}: raise --attempts, or use a better policy")


def _described_data(env: str, fit_options: Sequence[str]) -> dict[str, Any]:
    """Return the section ``data`` of a configuration, as plain values."""
    from jsonargparse import ArgumentError

    from mtrl_lightning.cli.lightning_cli import parsed

    try:
        # fit requires a model and a complete data module, but they have no effect
        config = parsed(["fit", "--model=SAC", "-c", env, *fit_options])
    except ArgumentError as error:
        raise ConfigurationError(f"--env {' '.join([env, *fit_options])}: {error}") from error
    return config["data"]


def _policy(policy: str, spec: EnvSpec, trust: Sequence[str]) -> Policy:
    """Return the policy, with the action transforms of its run."""
    from mtrl_lightning.demonstrations import ScriptedPolicy, UniformPolicy
    from mtrl_lightning.rollout.action_transforms import with_action_transforms

    if policy == SCRIPTED:
        return ScriptedPolicy(spec)
    if policy == RANDOM:
        return UniformPolicy(spec)
    run = load_run(policy, trust)
    return with_action_transforms(run.policy, run.data.action_transforms)


def table(collected: Collected, spec: EnvSpec) -> str:
    """Return a text table of the episodes of each task, with the mean success of its attempts."""
    lines = [["task", "episodes", "steps", "return", *["attempts", "success"] * spec.has_success]]
    rates = []
    for name, episodes in collected.episodes.items():
        num_steps = sum(one.num_steps for one in episodes)
        return_ = sum(one.rewards.sum() for one in episodes) / max(1, len(episodes))
        lines.append([name, whole(len(episodes)), whole(num_steps), f"{return_:.1f}"])
        if spec.has_success:
            successes = sum(one.infos["success"].any() for one in episodes)
            rates.append(successes / collected.attempts[name])
            lines[-1] += [whole(collected.attempts[name]), f"{rates[-1]:.2f}"]
    if spec.has_success:
        lines.append(["mean", "", "", "", "", f"{sum(rates) / len(rates):.3f}"])
    return text_table(lines, num_texts=1)
