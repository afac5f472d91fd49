"""A listener of episodes that the command line names, too."""

from mtrl_lightning.rollout import EpisodeListener


class Diary(EpisodeListener):
    """Writes a line at each event, and keeps the number of finished episodes in the checkpoints.

    Args:
        path: a file for the lines, each with that number; None to keep them in memory only.
    """

    def __init__(self, path: str | None = None) -> None:
        self.lines: list[tuple] = []
        self.num_ended = 0
        self._path = path

    def _write(self, *line):
        self.lines.append(line)
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(f"{self.num_ended} {line}\n")

    def on_environment_created(self, env, task):
        self._write("built", env, task)

    def on_episode_created(self, env, task):
        self._write("created", env, task)

    def on_episode_ended(self, env, episode):
        self.num_ended += 1
        self._write("ended", env, episode.task, episode.env)

    def state_dict(self):
        return {"num_ended": self.num_ended}

    def load_state_dict(self, state):
        self.num_ended = state["num_ended"]
