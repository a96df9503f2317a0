"""What a run leaves behind: output_dir/run_name, and whether it may be gone on with."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ds_dflash.checkpoint import Progress, newest_checkpoint
from ds_dflash.config import Settings, describe_changes, load_settings
from ds_dflash.errors import UserError


class RunDirectory:
    """output_dir/run_name: config.json, plan.json, metrics.jsonl, checkpoints/, drafter/, result.json, wandb/."""

    def __init__(self, settings: Settings) -> None:
        self.path = settings.output_dir / settings.run_name
        self._settings = settings

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def drafter(self) -> Path:
        return self.path / "drafter"

    @property
    def profile(self) -> Path | None:
        """Where the profile goes, if the settings ask for one."""
        return self.path / "profile" if self._settings.training.profile else None

    def check(self) -> None:
        """Raise UserError if the directory belongs to other settings, or is not a run's."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise UserError(f"{self.path} is a file: choose another output_dir or run_name.")
        if not (self.path / "config.json").exists():
            if any(self.path.iterdir()):
                raise UserError(f"{self.path} is not empty and not a run: choose another output_dir or run_name.")
            return
        saved = load_settings(self.path / "config.json").to_dict()
        changes = describe_changes(saved, self._settings.to_dict())
        if changes:
            raise UserError(
                f"{self.path} holds a run with other settings ({changes}): set them back, choose another run_name, or"
                " start over with --fresh."
            )

    def finished_update(self) -> int | None:
        """The last update of a run that is finished under the present settings, else None."""
        newest, result = newest_checkpoint(self.checkpoints), self._result()
        if newest is None or not (self.drafter / "model.safetensors").is_file():
            return None
        progress, training = Progress.read(newest), self._settings.training
        by_epochs = progress.position["epoch"] >= training.num_epochs
        by_updates = training.max_updates is not None and progress.update >= training.max_updates
        return progress.update if result.get("updates") == progress.update and (by_epochs or by_updates) else None

    def write_result(self, result: dict[str, Any]) -> None:
        """result.json: how many updates the run had, and which of them `drafter/` is of."""
        self._write("result.json", result)

    def _result(self) -> dict[str, Any]:
        try:
            result = json.loads((self.path / "result.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return result if isinstance(result, dict) else {}

    def open(self, fresh: bool, plan: dict[str, Any]) -> None:
        """Make the directory and write what is known from the start (one rank only); `fresh` moves an old run aside."""
        self._lock()
        if fresh and self.path.exists():
            start = self._settings.drafter.init_from
            if start is not None and Path(start).resolve().is_relative_to(self.path.resolve()):
                raise UserError(
                    f"drafter.init_from {start} lies in the run that --fresh moves aside: copy it elsewhere first."
                )
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
                number += 1
            os.rename(self.path, aside)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for stale in self.checkpoints.glob(".*.writing"):
            shutil.rmtree(stale)
        for name, content in (("config.json", self._settings.to_dict()), ("plan.json", plan)):
            self._write(name, content)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        temporary = self.path / f".{name}.writing"
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, self.path / name)

    def _lock(self) -> None:
        """Held until this process ends; raises UserError if another job has the run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._held = FileLock(self.path.parent / f".{self.path.name}.lock")
        try:
            self._held.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"Another job is training {self.path}: wait for its end, or choose another run_name."
            ) from None
