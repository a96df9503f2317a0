"""The serving checkpoint: what vLLM (method `dflash`) and SGLang (algorithm DFLASH) read and training can start from.

A directory with `model.safetensors` (bf16) and `config.json`, in the format of the published drafters ("dflash") or of
the package `speculators`. Engines pass over wrong names in silence or add prefixes of their own, so names, shapes and
fields are checked here, when it is written and when it is read. Directories that others wrote are read too: weights in
shards or in another number format, fields left out that have a default. Code that comes with one is never run.

A check reads all numbers once, tensor by tensor; writing reads back what it wrote.
"""

from ds_dflash.export.checking import Inspection, check_fits, inspect
from ds_dflash.export.fields import REQUIRED_FIELDS
from ds_dflash.export.reading import load_drafter, read_drafter, read_drafter_config
from ds_dflash.export.writing import serving_config, write_drafter

FORMATS = ("dflash", "speculators")

__all__ = [
    "FORMATS",
    "REQUIRED_FIELDS",
    "Inspection",
    "check_fits",
    "inspect",
    "load_drafter",
    "read_drafter",
    "read_drafter_config",
    "serving_config",
    "write_drafter",
]
