import pytest
import yaml

from mtrl_lightning.cli.config_files import files_of
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import (
    CONFIGS,
    SHORT,
    SMALL,
    config_args,
    fails,
    parser,
    resolve,
)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def parse(*args):
    return parser().parse_args(args)


def test_an_extended_file_is_one_given_before(tmp_path):
    write(
        tmp_path, "parts/c.yaml", "metrics: {every: 3}\nevaluation: {every: 3, num_episodes: 3}\n"
    )
    write(tmp_path, "parts/b.yaml", "extends: c.yaml\nevaluation: {every: 2}\n")
    write(tmp_path, "own.yaml", "extends: [parts/b.yaml]\ncheckpoint: {every: 1}\n")
    found = parse(*config_args(*CONFIGS), "-c", str(tmp_path / "own.yaml"))
    assert found.metrics.every == 3 and found.checkpoint.every == 1
    assert (found.evaluation.every, found.evaluation.num_episodes) == (2, 3)
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
    for config in (found, expected):
        config.pop("config")
    assert found == expected
    (tmp_path / "env").mkdir()
    write(tmp_path, "env/toy.yaml", "data: {batch_size: 3}\n")  # wins over the name
    text = f"extends: [base, env/toy.yaml, {', '.join(CONFIGS[1:])}]\n"
    extended = parse("-c", write(tmp_path, "own.yaml", text))
    assert extended.data.batch_size == 3
    assert extended.data.benchmark == expected.data.benchmark


@pytest.mark.slow
def test_the_saved_configuration_is_complete_and_repeats_the_run(command_line, tmp_path):
    names = [name for name in config_args(*CONFIGS) if name != "-c"]
    path = write(tmp_path, "own.yaml", f"extends: {names}\nname: extended\n")
    command_line("fit", "-c", path, *SMALL, *SHORT, configs=(), small=False)
    saved = command_line.folder("extended") / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    assert "extends" not in content and content["data"]["batch_size"] == 96
    command_line("fit", "-c", str(saved), configs=(), small=False)
    assert command_line.rows("extended", 1) == command_line.rows("extended", 0)


PACO = ("base", "env/toy", "algorithm/mtsac", "network/paco")
OPTION = "--model.init_args.actor.init_args.max_loss"


@pytest.mark.parametrize(
    ("options", "actor"),
    [
        ([OPTION, "null"], None),
        ([f"{OPTION}=null"], None),
        ([f"{OPTION}=null", f"{OPTION}=7"], 7.0),
        ([f"{OPTION}=7", OPTION, "null"], None),
    ],
)
def test_null_for_an_option_of_a_class_within_a_class(options, actor):
    sac = resolve(*PACO, options=options)["model"]["init_args"]
    assert sac["actor"]["init_args"]["max_loss"] == actor
    assert sac["actor"]["init_args"]["num_sets"] == 5
    assert sac["critic"]["init_args"]["max_loss"] == 3e3


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
def test_a_users_file_in_a_folder_named_like_a_group_is_read_as_any_other(
    command_line, tmp_path, capsys, text, message
):
    path = write(tmp_path, "network/own.yaml", text)
    code, error = fails(command_line, capsys, "fit", "-c", path, configs=CLONING, small=False)
    assert code == 2 and message in error


def test_a_named_file_comes_behind_the_other_files_and_before_all_options():
    width = "--model.init_args.actor.init_args.width=7"
    for named in (["--config.network=network/moore"], ["--config.network", "network/moore"]):
        config = parse("-c", "quickstart", width, *named, "--name", "x")
        actor = config["model"]["init_args"]["actor"]
        assert actor["class_path"] == "mtrl_lightning.networks.MOORE", "it replaces quickstart's"
        assert actor["init_args"]["width"] == 7 and config["name"] == "x"
    for missing in (["--config.x"], ["--config.x="], ["--config.a=env/toy", "--config.x", "-c=a"]):
        with pytest.raises(ConfigurationError, match=r"--config.x needs a configuration"):
            parse(*missing)


def test_files_of_a_repeated_name_keep_the_order_of_the_command_line(tmp_path):
    contents = {
        "one": "name: one\nroot: one",
        "two": "name: two\nroot: two",
        "three": "name: three",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    named = zip(("a", "b", "a"), contents, strict=True)
    files = [f"--config.{parameter}={tmp_path / file}" for parameter, file in named]
    config = parse("-c", "quickstart", *files)
    assert (config["name"], config["root"]) == ("three", "two")
