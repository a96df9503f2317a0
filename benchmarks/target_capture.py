"""Capturing the tapped layers against transformers' forward with all hidden states and logits, in one run.

    python benchmarks/target_capture.py [--rows 8] [--length 512] [--dtype float32] [--repeats 5]

A Llama of 135 million random parameters (30 layers, tied head) is written to a temporary directory and loaded twice: as
`Target` (the layers up to the last of the default five taps, no head) and whole. The features have to be equal bit for
bit. Seconds: both ways in turn, medians. Memory: the peak of a process that makes one forward, above what it holds
before.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from peak_memory import peak_megabytes
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_dflash.config import TargetSettings
from ds_dflash.target import Target, default_layer_ids, open_target

LAYERS = 30
TAPS = default_layer_ids(LAYERS, 5)


def write_target(directory: str, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(directory)


Rows = list[np.ndarray]


def capture(directory: str, dtype: str) -> Callable[[Rows], Tensor]:
    settings = TargetSettings(path=directory, dtype=dtype)  # type: ignore[arg-type]
    target = Target.load(open_target(settings), settings, TAPS, torch.device("cpu"), zero=None)
    return target.capture


def usual(directory: str, dtype: str) -> Callable[[Rows], Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))

    @torch.no_grad()
    def forward(rows: Rows) -> Tensor:
        ids = torch.from_numpy(np.stack(rows))
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        return torch.cat([output.hidden_states[tap + 1].flatten(0, 1) for tap in TAPS], dim=-1)

    return forward


WAYS = {"usual": usual, "ours": capture}


def seconds(forwards: dict[str, Callable[[Rows], Tensor]], rows: Rows, repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in forwards}
    for _ in range(repeats):
        for way, forward in forwards.items():
            started = time.perf_counter()
            forward(rows)
            times[way].append(time.perf_counter() - started)
    return {way: statistics.median(values) for way, values in times.items()}


def measure_memory(way: str, directory: str, options: argparse.Namespace) -> int:
    """In a process of its own."""
    command = [sys.executable, __file__, "--forward", way, "--target", directory, "--dtype", options.dtype]
    command += ["--rows", str(options.rows), "--length", str(options.length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--forward", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = list(np.random.default_rng(0).integers(0, 49_152, (options.rows, options.length)))
    if options.forward:
        forward = WAYS[options.forward](options.target, options.dtype)
        forward([row[:8] for row in rows])  # reads the weights from the disk
        print(peak_megabytes(lambda: forward(rows)))
        return
    with tempfile.TemporaryDirectory() as directory:
        write_target(directory, getattr(torch, options.dtype))
        forwards = {way: load(directory, options.dtype) for way, load in WAYS.items()}
        if not torch.equal(*(forward(rows) for forward in forwards.values())):
            sys.exit("error: the features differ")
        taken = seconds(forwards, rows, options.repeats)
        held = {way: measure_memory(way, directory, options) for way in WAYS}
    print(f"{options.rows} x {options.length} tokens, {options.dtype}, taps {TAPS}: features equal bit for bit")
    print(f"{'':20}{'usual':>9}{'ours':>9}{'ratio':>8}")
    print(f"{'seconds':20}{taken['usual']:9.2f}{taken['ours']:9.2f}{taken['ours'] / taken['usual']:8.2f}")
    print(f"{'forward memory, MB':20}{held['usual']:9}{held['ours']:9}{held['ours'] / held['usual']:8.2f}")


if __name__ == "__main__":
    main()
