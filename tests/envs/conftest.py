import pytest


@pytest.fixture(scope="module")
def few_goals():
    """Six goals a task instead of fifty, whose drawing takes most of the time."""
    import metaworld

    from mtrl_lightning.envs.benchmarks.metaworld import _goals

    _goals.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metaworld, "_N_GOALS", 6)
        yield
    _goals.cache_clear()
