"""ds_dflash: a DeepSpeed trainer for DFlash drafters."""

__version__ = "0.1.0"
