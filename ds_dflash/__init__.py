"""ds_dflash: a DeepSpeed trainer for DFlash drafters."""

import os

# Read by OpenMP when torch loads it. Threads that spin while they wait bring every process to a crawl where more of
# them are at work than there are cores: small decoding steps beside other work took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
