import pytest
import yaml

from mtrl_lightning.cli.config_files import files_of
from mtrl_lightning.cli.lightning_cli import parsed
from tests.helpers.command_line import (
    CONFIGS,
    SHORT,
    SMALL,
    config_args,
    fails,
    resolve,
)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def parse(*args):
    return parsed(["fit", *args])


def test_an_extended_file_is_one_given_before(tmp_path):
    write(
        tmp_path, "parts/c.yaml", "metrics: {every: 3}\nevaluation: {every: 3, num_episodes: 3}\n"
    )
    write(tmp_path, "parts/b.yaml", "extends: c.yaml\nevaluation: {every: 2}\n")
    write(tmp_path, "own.yaml", "extends: [parts/b.yaml]\ncheckpoint: {every_n_env_steps: 1}\n")
    found = parse(*config_args(*CONFIGS), "-c", str(tmp_path / "own.yaml"))
    assert found["metrics"]["every"] == 3 and found["checkpoint"]["every_n_env_steps"] == 1
    assert (found["evaluation"]["every"], found["evaluation"]["num_episodes"]) == (2, 3)
    assert "extends" not in found


def test_a_changed_class_drops_options_as_with_several_files(tmp_path):
    from_files = resolve("experiment/mt10_paco", "network/mlp")
    path = write(
        tmp_path,
        "both.yaml",
        f"extends: {[name for name in config_args('experiment/mt10_paco') if name != '-c']}\n"
        "model:\n  init_args:\n"
        "    actor: {class_path: mtrl_lightning.networks.MLP}\n"
        "    critic: {class_path: mtrl_lightning.networks.MLP}\n",
    )
    extended = resolve(options=["-c", path])
    assert extended == from_files
    assert "num_sets" not in extended["model"]["init_args"]["actor"]["init_args"]


def test_files_come_in_the_order_in_which_they_are_named(tmp_path):
    for name, text in (("a", "[b.yaml, c.yaml]"), ("b", "d.yaml"), ("c", "d.yaml"), ("d", "[]")):
        write(tmp_path, f"{name}.yaml", f"extends: {text}\n")
    assert [path.stem for path in files_of(str(tmp_path / "a.yaml"))] == ["d", "b", "d", "c", "a"]


def test_names_stand_for_files_after_c_and_in_extends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [word for name in CONFIGS for word in ("-c", name)]
    found, expected = parse(*names), parse(*config_args(*CONFIGS))
    assert found == expected
    (tmp_path / "env").mkdir()
    write(tmp_path, "env/toy.yaml", "data: {init_args: {batch_size: 3}}\n")  # wins over the name
    text = f"extends: [base, env/toy.yaml, {', '.join(CONFIGS[1:])}]\n"
    extended = parse("-c", write(tmp_path, "own.yaml", text))
    assert extended["data"]["init_args"].pop("batch_size") == 3
    assert expected["data"]["init_args"].pop("batch_size") is None
    assert extended["data"] == expected["data"]


@pytest.mark.slow
def test_the_saved_configuration_is_complete_and_repeats_the_run(command_line, tmp_path):
    names = [name for name in config_args(*CONFIGS) if name != "-c"]
    path = write(tmp_path, "own.yaml", f"extends: {names}\nname: extended\n")
    command_line("fit", "-c", path, *SMALL, *SHORT, configs=(), small=False)
    saved = command_line.folder("extended") / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    assert "extends" not in content and content["data"]["init_args"]["batch_size"] == 96
    command_line("fit", "-c", str(saved), configs=(), small=False)
    assert command_line.rows("extended", 1) == command_line.rows("extended", 0)


CLONING = ("base", "env/toy", "algorithm/bc", "network/mlp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Unexpected config"),
        ("model: {init_args: null}", "model"),
        ("model: {init_args: [", "Problems parsing config"),
        (
            "model: {init_args: {critic: {class_path: mtrl_lightning.networks.MLP}}}",
            "Option 'critic.class_path' is not accepted",
        ),
    ],
)
def test_user_file_in_a_folder_named_like_a_group(command_line, tmp_path, capsys, text, message):
    path = write(tmp_path, "network/own.yaml", text)
    code, error = fails(command_line, capsys, "fit", "-c", path, configs=CLONING, small=False)
    assert code == 2 and message in error
