"""Weights & Biases with each env step once, also where a run goes on."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning.fabric.utilities.logger import _add_prefix
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn


class EnvStepWandbLogger(WandbLogger):
    """Log to Weights & Biases with the environment step as W&B's step, each step once over all of a run's sessions."""

    _logged, _first = -1, 0

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row, unless W&B has it from an earlier session."""
        if step is None:
            super().log_metrics(metrics)
        elif step > self._logged:
            row = _add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
            self.experiment.log(row, step=max(step, self._first))

    @rank_zero_only
    def go_on(self, rows: list[dict[str, float]], env_steps: int) -> None:
        """Bring W&B to the state of a checkpoint: drop points later than it, and log what a killed run did not.

        Points can be dropped from offline files that were not synced. Others stay, and the run adds
        those after them: it repeats the steps between exactly unless its configuration was changed.

        Args:
            rows: ``metrics.csv`` up to the checkpoint.
            env_steps: of the checkpoint.
        """
        run = self.experiment
        self._logged = run.starting_step - 1
        if run.offline:
            here = Path(run.dir).parent
            files = [
                f
                for f in here.parent.glob(f"*run-*-{run.id}/run-{run.id}.wandb")
                if not f.parent.samefile(here)
            ]
            self._logged = max((_rewind_offline(path, env_steps) for path in files), default=-1)
        if self._logged > env_steps:
            rank_zero_warn(
                f"W&B has points up to env step {self._logged} from before, later than the"
                f" checkpoint's {env_steps}:"
                " they stay as they are, and this run adds those after them"
            )
        for row in rows:
            self.log_metrics(
                {**row, "env_steps": int(row["env_steps"])}, step=int(row["env_steps"])
            )
        # an evaluation at the checkpoint's own step may be made up for, and W&B takes no step twice
        self._first = max([self._logged, *(int(row["env_steps"]) for row in rows)]) + 1
        if self._logged <= env_steps:
            self._logged = env_steps - 1


def _rewind_offline(path: Path, env_steps: int) -> int:
    """Cut a W&B file before its first point later than ``env_steps``; return the last env step that it has then.

    What a killed run left of a record is cut, too: ``wandb sync`` would stop there and leave out
    later sessions.
    """
    wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, last, whole, names_run = path.read_bytes(), -1, 0, False
    may_cut = (
        path.parent.name.startswith("offline-") and not path.with_suffix(".wandb.synced").exists()
    )
    for end, data in _wandb_records(content):
        record = wandb_internal_pb2.Record.FromString(data)
        names_run = names_run or record.HasField("run")
        items = {
            item.key or "/".join(item.nested_key): item.value_json for item in record.history.item
        }
        step = json.loads(items.get("env_steps", "-1"))
        if may_cut and step > env_steps:
            break
        last, whole = max(last, step), end
    if may_cut and not names_run:
        path.unlink()  # of no run, hence of no use to W&B
    elif may_cut and whole < len(content):
        os.truncate(path, whole)
    return last


def _wandb_records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the end and the content of each record: LevelDB's log format, whose first block has a header before."""
    block, position, record = 32768, 7, b""
    while position + 7 <= len(content):
        size, kind = (
            int.from_bytes(content[position + 4 : position + 6], "little"),
            content[position + 6],
        )
        if block - position % block < 7 or kind == 0:  # the rest of a block is padding
            position += block - position % block
            continue
        position += 7 + size
        if position > len(content):
            return
        record += content[position - size : position]
        if kind in (1, 4):  # whole, or the last part
            yield position, record
            record = b""
