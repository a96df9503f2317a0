"""Checkpoints: one directory a save, whole or absent, that any number of drafter ranks can go on from.

directory.py: what a checkpoint is, saving, finding and loading one; engine_files.py: how the drafter engine's files are
written, checked and read; resharding.py: the optimizer state of so many ranks cut anew for another number.
"""

from ds_dflash.checkpoint.directory import (
    Progress,
    best_checkpoint,
    checkpoint_to_resume,
    is_whole,
    load_checkpoint,
    newest_checkpoint,
    replace_progress,
    save_checkpoint,
)

__all__ = [
    "Progress",
    "best_checkpoint",
    "checkpoint_to_resume",
    "is_whole",
    "load_checkpoint",
    "newest_checkpoint",
    "replace_progress",
    "save_checkpoint",
]
