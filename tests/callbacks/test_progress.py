import re


def test_the_bar_counts_env_steps_and_shows_rate_time_left_success_and_return(command_line, capsys):
    command_line("fit", "--trainer.enable_progress_bar=true", "--rollout.updates_per_step=2")
    bar = capsys.readouterr().err.replace("\r", "\n").splitlines()
    last = [line for line in bar if "env steps/s" in line][-1]
    assert re.search(r"100%.*900/900 \[\d+:\d+<00:00, [\d.]+k? env steps/s", last), last
    for name in ("eval success", "success", "return"):
        assert re.search(rf"\b{name}=-?\d+\.\d\d", last), last


def test_a_continued_run_begins_where_it_was(command_line, capsys):
    command_line.finished()
    command_line(
        "fit",
        "--trainer.enable_progress_bar=true",
        "--ckpt_path=last",
        "--rollout.total_steps=1200",
    )
    bar = [
        line
        for line in capsys.readouterr().err.replace("\r", "\n").splitlines()
        if "env steps" in line
    ]
    assert "75%" in bar[0] and "900/1.20k" in bar[0]
