"""``export`` writes a run's policy, or its replay."""

import numpy as np

from mtrl_lightning.__main__ import main
from mtrl_lightning.export.policy import load_exported
from mtrl_lightning.policy import load_policy
from tests.helpers.command_line import fails
from tests.helpers.demonstrations import need_minari


def test_a_run_is_exported(command_line, tmp_path, capsys):
    options = ["--data.total_steps=330", "--evaluation.every=330", "--data.capacity=150"]
    transforms = "[{class_path: tests.helpers.transforms.Scale, init_args: {factor: 0.5}}]"
    command_line("fit", *options, f"--data.action_transforms={transforms}")
    run = command_line.folder()
    main(["export", str(run), "--to", "torch.export"])
    folder = run / "export"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "policy.pt2"]
    observation_1D = np.array([[0.3, -0.2]], np.float32)
    policy = load_policy(run / "checkpoints" / "best.ckpt")
    exported = load_exported(folder / "policy.pt2", "torch.export")
    action_1A = exported(observation_1D, np.array([2]))
    np.testing.assert_allclose(action_1A, 0.5 * policy.act(observation_1D, 2), atol=1e-5)

    need_minari()
    capsys.readouterr()
    main(["export", str(run), "--to", "minari", f"--folder={tmp_path / 'data'}"])
    lines = capsys.readouterr().out.splitlines()
    # 110 steps of each environment, of which a ring holds 50: those from step 60 on, where an
    # episode of 20 steps happens to begin, and what the oldest one holds is left out
    assert lines[1].split() == ["goal-0", "2", "30"]
    (run / "config.yaml").unlink()
    code, error = fails(main, capsys, ["export", str(run), "--to=torch.export"])
    assert code == 2 and "config.yaml" in error
