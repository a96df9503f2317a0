"""Rows to token ids, supervision masks and lengths: a prepared, cached dataset."""

from ds_dflash.data.build import load_tokenizer
from ds_dflash.data.cache import prepare
from ds_dflash.data.prepared import PreparedDataset
from ds_dflash.data.report import describe, histogram, show

__all__ = ["PreparedDataset", "describe", "histogram", "load_tokenizer", "prepare", "show"]
