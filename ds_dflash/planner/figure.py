"""The picture of a plan: lengths with pools or buckets, padding by length, the mix of lengths in each update."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ds_dflash.batching import BatchSampler, PlanSettings
from ds_dflash.batching.grouping import pool_size
from ds_dflash.batching.plan import Dispatch
from ds_dflash.batching.statistics import BUCKETS, LengthMix

BINS = 80
UPDATES = 64
BLUE, ORANGE, GREY = "#4878a8", "#d9772b", "#555555"


def draw_plan(sampler: BatchSampler, settings: PlanSettings, path: Path) -> None:
    """Write a PNG about the first epoch (of very large data its first block)."""
    mix = LengthMix.of(sampler)
    dispatch = next(sampler.plan(sampler.start()).dispatches())
    figure = Figure(figsize=(11, 12), layout="constrained")
    lengths_axes, padding_axes, mix_axes = figure.subplots(3, 1)
    _draw_lengths(lengths_axes, sampler, settings, mix, dispatch)
    _draw_padding(padding_axes, sampler, dispatch)
    _draw_mix(mix_axes, sampler, mix, dispatch)
    figure.suptitle(
        f"{settings.grouping} grouping, {settings.ordering} ordering: {sampler.accounting['kept']:,} samples, "
        f"{settings.token_budget:,} padded tokens a micro-batch, {sampler.ranks} ranks x {sampler.rounds} rounds"
    )
    figure.savefig(path, format="png", dpi=110)


def _draw_lengths(
    axes: Axes, sampler: BatchSampler, settings: PlanSettings, mix: LengthMix, dispatch: Dispatch
) -> None:
    edges = _bins(mix)
    lengths = np.arange(len(mix.histogram))
    axes.hist(lengths, edges, weights=mix.histogram, color=BLUE, alpha=0.8, label="all samples")
    kept = len(dispatch.indices)
    if settings.grouping == "pooled":
        size = pool_size(kept)
        pool = sampler.lengths_of(np.random.default_rng(0).choice(dispatch.indices, min(size, kept), replace=False))
        scale = mix.histogram.sum() / len(pool)
        label = f"{len(pool):,} at random, as in each of {-(-kept // size):,} pools (new ones every epoch), scaled"
        axes.hist(pool, edges, weights=np.full(len(pool), scale), histtype="step", color=ORANGE, lw=1.6, label=label)
    used = np.unique(np.searchsorted(sampler.bucket_edges, np.flatnonzero(mix.histogram), "right"))
    for number in used[1:]:
        label = (
            f"edges of {len(used)} buckets" if number == used[1] else "_"
        )  # matplotlib lists no label that begins so
        axes.axvline(sampler.bucket_edges[number - 1], color=ORANGE, lw=1.4, label=label)
    axes.set(title="Lengths", xlabel="length [tokens]", ylabel="samples", xlim=(edges[0], edges[-1]))
    axes.legend(loc="upper right")


def _draw_padding(axes: Axes, sampler: BatchSampler, dispatch: Dispatch) -> None:
    lengths = sampler.lengths_of(dispatch.indices).astype(np.int64)
    padded = np.repeat(dispatch.longest.astype(np.int64), np.diff(dispatch.offsets))
    edges = np.linspace(lengths.min(), lengths.max() + 1, BINS + 1)
    cell = np.searchsorted(edges, lengths, "right") - 1
    computed = np.bincount(cell, padded, BINS)
    padding = computed - np.bincount(cell, lengths, BINS)
    share = 100 * padding / np.maximum(computed, 1)
    axes.bar(edges[:-1], share, np.diff(edges), align="edge", color=BLUE, alpha=0.8, label="of samples of this length")
    overall = 100 * padding.sum() / computed.sum()
    axes.axhline(overall, color=ORANGE, lw=1.6, label=f"of all: {overall:.2f} %")
    axes.set(title="Padding by length", xlabel="length [tokens]", ylabel="padding [% of tokens computed]")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(1.0, 1.15 * share.max()))
    axes.legend(loc="upper right")


def _draw_mix(axes: Axes, sampler: BatchSampler, mix: LengthMix, dispatch: Dispatch) -> None:
    sizes = np.diff(dispatch.offsets).reshape(-1, sampler.product).sum(1)[:UPDATES]
    shares = 100 * mix.shares(sampler.lengths_of(dispatch.indices[: sizes.sum()]), sizes)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.95, BUCKETS))
    bounds = [int(np.flatnonzero(mix.histogram)[0]), *mix.edges.tolist(), len(mix.histogram)]
    below = np.zeros(len(sizes))
    for bucket in np.flatnonzero(mix.token_share):
        label = f"{bounds[bucket]:,} to {bounds[bucket + 1] - 1:,}"
        axes.bar(np.arange(len(sizes)), shares[:, bucket], 1.0, below, color=colours[bucket], label=label)
        below += shares[:, bucket]
    for level in np.cumsum(100 * mix.token_share)[:-1]:
        axes.axhline(level, color="white", lw=1.2, ls="--")
    axes.set(title=f"Lengths in the first {len(sizes)} updates (dashed: in all data)", xlabel="update")
    axes.set(ylabel="tokens [%]", xlim=(-0.5, len(sizes) - 0.5), ylim=(0, 100))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], title="length [tokens]", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bins(mix: LengthMix) -> list[float]:
    shortest = int(np.flatnonzero(mix.histogram)[0])
    return np.linspace(shortest, len(mix.histogram), min(BINS, len(mix.histogram) - shortest) + 1).tolist()
