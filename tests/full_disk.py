"""launch.sh whose drafter rank FULL_DISK_RANK finds no room for its file in the checkpoint of update FULL_DISK_STEP."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from ds_dflash.checkpoint.engine_files import EngineFiles
from ds_dflash.train import main

save = EngineFiles.save


def refused_save(self, state_dict, path):
    is_last_straw = f"step-{int(os.environ['FULL_DISK_STEP']):06d}" in path and path.endswith("_optim_states.pt")
    if is_last_straw and dist.get_rank() == int(os.environ["FULL_DISK_RANK"]):
        Path(path).symlink_to("/dev/full")
    save(self, state_dict, path)


EngineFiles.save = refused_save
sys.exit(main())
