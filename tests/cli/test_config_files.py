import pytest
import yaml

from mtrl_lightning.cli.lightning_cli import main, parsed
from tests.helpers.command_line import CONFIGS, SHORT, SMALL, config_args, fails


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_names_stand_for_files_after_c_and_in_extends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parsed(["fit", *config_args(*CONFIGS)])
    assert parsed(["fit", *(word for name in CONFIGS for word in ("-c", name))]) == expected
    write(tmp_path, "env/toy.yaml", "data: {init_args: {batch_size: 3}}\n")  # wins over the name
    text = f"extends: [base, env/toy.yaml, {', '.join(CONFIGS[1:])}]\n"
    extended = parsed(["fit", "-c", write(tmp_path, "own.yaml", text)])
    assert extended["data"]["init_args"].pop("batch_size") == 3
    assert expected["data"]["init_args"].pop("batch_size") is None
    assert extended["data"] == expected["data"]


def test_files_merge_in_order_and_the_last_of_a_group_wins(tmp_path):
    values = write(tmp_path, "values.yaml", "data: {init_args: {total_steps: 7}}\n")
    files = ["network/paco", values, "encoder/care", "gradient/cagrad", "network/moore"]
    inner = write(tmp_path, "inner.yaml", f"extends: [{', '.join(files)}]\n")
    outer = write(tmp_path, "outer.yaml", f"extends: [algorithm/mtppo, algorithm/mttd3, {inner}]\n")

    def merged(*names):
        config = parsed(["fit", "-c", "env/toy", *(w for name in names for w in ("-c", name))])
        return config["model"], config["data"]

    found = merged(outer)
    assert found == merged("algorithm/mtppo", "algorithm/mttd3", *files)
    assert found == merged("algorithm/mttd3", *files[1:])


def test_files_that_extend_each_other_are_one_error(tmp_path, capsys):
    write(tmp_path, "inner.yaml", "extends: outer.yaml\n")
    outer = write(tmp_path, "outer.yaml", "extends: inner.yaml\n")
    code, error = fails(main, capsys, ["fit", "-c", "quickstart", "-c", outer])
    assert code == 2 and "cycle" in error


@pytest.mark.slow
def test_saved_configuration_is_complete_and_repeats_the_run(command_line, tmp_path):
    names = [name for name in config_args(*CONFIGS) if name != "-c"]
    path = write(tmp_path, "own.yaml", f"extends: {names}\nname: extended\n")
    command_line("fit", "-c", path, *SMALL, *SHORT, configs=(), small=False)
    saved = command_line.folder("extended") / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    assert "extends" not in content and content["data"]["init_args"]["batch_size"] == 96
    command_line("fit", "-c", str(saved), configs=(), small=False)
    assert command_line.rows("extended", 1) == command_line.rows("extended", 0)
