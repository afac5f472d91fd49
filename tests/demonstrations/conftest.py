from tests.envs.conftest import few_goals

__all__ = ["few_goals"]
