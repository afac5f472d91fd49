"""A mistake on the command line ends it with code 2 and one error, perhaps with tips."""

import pytest

from tests.helpers.command_line import fails

STARTS = {
    "unknown option": (["--evaluation.evry=900"], "evaluation.evry"),
    "option of another type": (["--data.total_steps=many"], "total_steps"),
    "value out of range": (["--model.init_args.discount=1.5"], "discount"),
    "unknown task": (["--data.exclude_from_training=[gaol-1]"], "gaol-1"),
    "batch size that the tasks do not divide": (["--data.batch_size=97"], "batch_size"),
    "missing checkpoint": (["--ckpt_path=nowhere.ckpt"], "nowhere"),
}
CONTINUATIONS = {
    "other tasks": (["--data.benchmark.init_args.num_tasks=4"], "tasks"),
    "another protocol": (["--data.benchmark.init_args.horizon=5"], "horizon"),
    "another network": (["--model.init_args.actor.init_args.width=17"], "network"),
}


def check(code, error, word):
    assert code == 2 and word in error and "Traceback" not in error
    first, *rest = error.strip().splitlines()
    assert first.startswith("error: ")
    assert all(line.startswith(("tip: ", "  ")) for line in rest), error


@pytest.mark.parametrize("name", STARTS)
def test_a_run_that_cannot_start_leaves_no_folder(command_line, capsys, name):
    options, word = STARTS[name]
    check(*fails(command_line, capsys, "fit", *options), word)
    assert not any(command_line.root.iterdir())


@pytest.mark.parametrize("name", CONTINUATIONS)
def test_a_run_is_not_continued_as_another(command_line, capsys, name):
    command_line.finished()
    capsys.readouterr()
    options, word = CONTINUATIONS[name]
    last = ["--ckpt_path=last", "--data.total_steps=1200"]
    check(*fails(command_line, capsys, "fit", *last, *options), word)


def test_a_damaged_checkpoint(command_line, capsys):
    command_line.finished()
    capsys.readouterr()
    path = command_line.folder() / "checkpoints" / "last.ckpt"
    path.write_bytes(path.read_bytes()[:5000])
    check(*fails(command_line, capsys, "fit", f"--ckpt_path={path}"), "last.ckpt")
