"""A mistake on the command line ends it with code 2 and one error, perhaps with tips."""

import pytest

from mtrl_lightning.cli.lightning_cli import main
from tests.helpers.command_line import fails

QUICK = ["fit", "-c", "quickstart"]
MISTAKES = [
    ([*QUICK, "--nam=x"], "nam"),
    (["fit", "-c", "quickstrt"], "did you mean quickstart"),
    ([*QUICK, "--seed_everything=-1"], "seed_everything"),
    ([*QUICK, "--data.total_steps=x"], "total_steps"),
    (["fit", "--resume", "nowhere"], "nowhere"),
    (["fit", "--resume=mt10"], "--init_from mt10"),
    (["validate"], "validate RUN"),
    (["validate", "--config=quickstart"], "validate RUN"),
    (["test", "mt11"], "mt10"),
]
STARTS = [
    ("--model.init_args.discount=1.5", "discount"),
    ("--data.exclude_from_training=[gaol-1]", "gaol-1"),
    ("--best.monitor=eval/sucess", "eval/success"),
    ("--data.batch_size=97", "batch_size"),  # which the tasks do not divide
    ("--ckpt_path=nowhere.ckpt", "nowhere"),
]
CONTINUATIONS = [
    ("--data.benchmark.init_args.num_tasks=4", "tasks"),
    ("--data.benchmark.init_args.horizon=5", "horizon"),
    ("--model.init_args.actor.init_args.width=17", "actor"),
]


def check(code, error, word):
    assert code == 2 and word in error and "Traceback" not in error
    first, *rest = error.strip().splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith(("tip: ", "  ")) for line in rest), error


@pytest.mark.parametrize(("args", "word"), MISTAKES)
def test_mistake_ends_the_program_with_one_error(tmp_path, monkeypatch, capsys, args, word):
    monkeypatch.chdir(tmp_path)
    check(*fails(main, capsys, args), word)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "word"), STARTS)
def test_run_that_cannot_start_leaves_no_folder(command_line, capsys, option, word):
    check(*fails(command_line, capsys, "fit", option), word)
    assert not any(command_line.root.iterdir())


@pytest.mark.parametrize(("option", "word"), CONTINUATIONS)
def test_run_is_not_continued_as_another(command_line, capsys, option, word):
    command_line.finished()
    capsys.readouterr()

    def content():
        files = [path for path in command_line.folder().rglob("*") if path.is_file()]
        # Lightning writes the model's hparams.yaml before it restores weights
        return {path: path.read_bytes() for path in files if path.name != "hparams.yaml"}

    before = content()
    last = ["--ckpt_path=last", "--data.total_steps=1200"]
    check(*fails(command_line, capsys, "fit", *last, option), word)
    assert content() == before
