import pytest

from tests.helpers.recorded_runs import make_run, options_of


@pytest.fixture
def runs(tmp_path):
    """Two methods of two seeds each on two tasks, ``mlp`` and ``moe``."""
    for seed in (1, 2):
        mlp = {"reach": (0.0, 0.5, 0.6 + seed / 10), "push": (0.0, 0.0, 0.2)}
        moe = {"reach": (0.1, 0.8, 1.0), "push": (0.0, 0.4, 0.8 + seed / 10)}
        folder = tmp_path / "runs"
        make_run(folder / "mlp" / f"version_{seed}", mlp, options=options_of(seed, name="mlp"))
        other = options_of(seed, name="moe", network="MOORE")
        make_run(folder / "moe" / f"version_{seed}", moe, options=other, rate=5.0)
    return folder
