"""Holding a directory against the contract with engines, and against a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import Qwen3Config

from ds_dflash.errors import UserError
from ds_dflash.export.findings import Finding, unservable
from ds_dflash.export.reading import FLOATS, OpenDrafter, check_numbers, open_drafter
from ds_dflash.target import TargetCheckpoint


@dataclass(frozen=True, eq=False)
class Inspection:
    """What a directory is, as far as it can be told, and all that is off with it."""

    description: str
    findings: Sequence[Finding]

    @property
    def violations(self) -> list[str]:
        return [finding.sentence for finding in self.findings if finding.breaks_contract]

    @property
    def warnings(self) -> list[str]:
        return [finding.sentence for finding in self.findings if not finding.breaks_contract]


def inspect(directory: Path, target: TargetCheckpoint | None = None) -> Inspection:
    """Hold a directory against the contract, and against a target; nothing is written."""
    opened = open_drafter(directory)
    findings = list(opened.findings)
    for name, tensor in opened.tensors.read():
        if opened.tensors.formats[name] in FLOATS:
            findings += check_numbers(name, tensor)
    if target is not None and opened.config is not None:
        findings += [unservable(sentence) for sentence in _misfits(opened.config, target)]
    return Inspection(_describe(opened), findings)


def _describe(opened: OpenDrafter) -> str:
    tensors, config = opened.tensors, opened.config
    numbers = ", ".join(sorted({FLOATS.get(number, number) for number in tensors.formats.values()})) or "no numbers"
    weights = f"{len(tensors.files)} tensors, {tensors.parameters:,} parameters, {numbers}"
    if config is None:
        return f"format {opened.format}: {weights}"
    types, own = config.layer_types or [], config.dflash_config
    sliding = types.count("sliding_attention")
    kinds = f" ({sliding} of them sliding over {config.sliding_window} tokens)" if sliding else ""
    depth = f" of {config.num_target_layers}" if config.num_target_layers else ""
    return (
        f"format {opened.format}: {config.num_hidden_layers} layers{kinds}, hidden size {config.hidden_size},"
        f" block size {config.block_size}, taps {' '.join(map(str, own['target_layer_ids']))}{depth}, mask id"
        f" {own['mask_token_id']}, {weights}"
    )


def check_fits(config: Qwen3Config, target: TargetCheckpoint, directory: Path) -> None:
    """Raise UserError if a drafter was not made for this target."""
    for sentence in _misfits(config, target):
        raise UserError(f"{directory}: {sentence}")


def _misfits(config: Qwen3Config, target: TargetCheckpoint) -> list[str]:
    text, own, given = target.text, config.dflash_config, f"the target {target.path}"
    taps, layers, sentences = own["target_layer_ids"], text.num_hidden_layers, []
    if config.hidden_size != text.hidden_size:
        sentences.append(f"the drafter has hidden size {config.hidden_size} and {given} {text.hidden_size}")
    if config.vocab_size != text.vocab_size:
        # vLLM then maps the drafter's ids to the target's by a table that the checkpoint does not have: all zeros.
        sentences.append(f"the drafter has a vocabulary of {config.vocab_size} and {given} of {text.vocab_size}")
    if taps[-1] >= layers:
        sentences.append(f"the drafter taps layer {taps[-1]} and {given} has {layers} layers")
    elif config.num_target_layers not in (None, layers):
        sentences.append(f"the drafter is for {config.num_target_layers} layers and {given} has {layers}")
    sentences = [f"{sentence}: it was trained for another target." for sentence in sentences]
    try:
        target.mask_token_id(own["mask_token_id"], None)
    except UserError as error:
        sentences.append(str(error))
    return sentences
