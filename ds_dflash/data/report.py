"""What a prepared dataset holds, for people to look at: figures, coloured rows, a histogram of lengths."""

from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from ds_dflash.data.prepared import PreparedDataset

SUPERVISED = "\033[32m"
PLAIN = "\033[0m"
HISTOGRAM_BINS = 60


def describe(prepared: PreparedDataset) -> str:
    """Rows in = kept + dropped, by reason with the first such row, and the figures of tokens and lengths."""
    accounting = prepared.accounting
    dropped = accounting["dropped"]
    lines = [
        f"rows: {accounting['rows_in']} in = {accounting['rows_kept']} kept + {sum(dropped.values())} dropped "
        f"(format {accounting['format']})"
    ]
    first = accounting["first_dropped"]
    lines += [f"  dropped {count} as {reason}; first: {first[reason]}" for reason, count in dropped.items()]
    if accounting["rows_truncated"]:
        lines.append(f"  cut {accounting['rows_truncated']} to max_length, {accounting['tokens_cut']} tokens lost")
    lines.append(
        f"tokens: {accounting['tokens']}, supervised {accounting['supervised_tokens']} "
        f"({accounting['supervised_share']:.1%})"
    )
    figures = ", ".join(f"{name} {value:.0f}" for name, value in accounting["lengths"].items())
    return "\n".join([*lines, f"lengths: {figures}"])


def show(prepared: PreparedDataset, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    """The first `count` rows as text, supervised tokens in green."""
    rows = prepared.rows(range(min(count, len(prepared))))
    blocks = []
    for number, (input_ids, loss_mask) in enumerate(rows):
        title = f"--- row {number}: {len(input_ids)} tokens, {int(loss_mask.sum())} supervised"
        blocks.append(f"{title}\n{colour(input_ids, loss_mask, tokenizer)}")
    return "\n".join(blocks)


def colour(input_ids: np.ndarray, loss_mask: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens [length], supervised ones in green."""
    edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(input_ids)]
    pieces = []
    for first, last in pairwise(edges):
        text = tokenizer.decode(input_ids[first:last], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(f"{SUPERVISED}{text}{PLAIN}" if loss_mask[first] else str(text))
    return "".join(pieces)


def histogram(prepared: PreparedDataset, path: Path) -> None:
    """Writes a PNG of the rows' lengths."""
    matplotlib.use("Agg")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(prepared.lengths, bins=HISTOGRAM_BINS, color="#4878a8")
    median = float(np.median(prepared.lengths))
    axes.axvline(median, color="#333333", linestyle="--", label=f"median {median:.0f}")
    axes.set_xlabel("length [tokens]")
    axes.set_ylabel("rows")
    axes.set_title(f"{len(prepared)} rows, {prepared.accounting['tokens']} tokens")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
