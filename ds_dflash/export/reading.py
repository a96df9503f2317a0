"""Reading a drafter's directory, of either format, with all that is off with it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import Qwen3Config

from ds_dflash.drafter import DFlashDraftModel
from ds_dflash.export import speculators
from ds_dflash.export.fields import REQUIRED_FIELDS, Fields, check_fields, has_shapes, rope_bases, settle, short
from ds_dflash.export.findings import Finding, broken, odd, refuse, unservable
from ds_dflash.export.speculators import MARK, TARGET_TENSORS, from_speculators
from ds_dflash.export.tensors import StoredTensors, find_tensors, parse_json


def read_drafter(directory: Path) -> tuple[Qwen3Config, dict[str, Tensor]]:
    """Configuration and weights of a serving checkpoint, of either format, checked against the contract.

    The weights are of the file's number format. Raises UserError naming what is off.
    """
    opened = open_drafter(directory)
    refuse(opened.broken, directory)
    weights = {name: tensor for name, tensor in opened.tensors.read() if name not in opened.passed_over}
    refuse([finding for name, tensor in weights.items() for finding in check_numbers(name, tensor)], directory)
    assert opened.config is not None
    return opened.config, weights


def read_drafter_config(directory: Path) -> Qwen3Config:
    """The drafter's configuration from `config.json`; raises UserError naming what is off."""
    read = _read_config(directory)
    refuse([finding for finding in read.findings if finding.level == "broken"], directory)
    assert read.config is not None
    return read.config


def load_drafter(directory: Path, dtype: torch.dtype, device: torch.device) -> DFlashDraftModel:
    """A drafter ready to decode, or to continue training from."""
    config, weights = read_drafter(directory)
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(weights)
    return drafter.to(device, dtype)


@dataclass(frozen=True, eq=False)
class _Config:
    """`config.json`: its format, the settled fields, the configuration where they make one, and what is off."""

    format: str
    fields: Fields
    config: Qwen3Config | None
    findings: list[Finding]


@dataclass(frozen=True, eq=False)
class OpenDrafter:
    """A directory of which all but the numbers has been read."""

    format: str
    config: Qwen3Config | None
    tensors: StoredTensors
    findings: list[Finding]

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "broken"]

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Tensors that are the target's."""
        return TARGET_TENSORS if self.format == "speculators" else ()


def _read_config(directory: Path) -> _Config:
    if not directory.is_dir():
        return _Config("dflash", {}, None, [broken("it is not a directory that exists.")])
    file = directory / "config.json"
    if not file.is_file():
        return _Config(
            "dflash", {}, None, [broken("it holds no config.json: it is not a drafter in the serving format.")]
        )
    content = parse_json(file)
    if not isinstance(content, dict):
        shown = content if isinstance(content, Finding) else broken("config.json is not a JSON object.")
        return _Config("dflash", {}, None, [shown])
    kind = "speculators" if MARK in content else "dflash"
    flat, findings = from_speculators(content) if kind == "speculators" else (content, [])
    if not flat:
        return _Config(kind, {}, None, findings or [broken("config.json is empty.")])
    fields, places = settle(flat)
    if kind == "speculators":  # vLLM asks the target how deep it is, and SGLang doesn't read this format
        findings = [*findings, *places, *check_fields(fields, speculators.place, knows_target=False)]
    else:
        findings = [*places, *check_fields(fields)]
    findings += _check_code(content, directory)
    if any(finding.level == "broken" for finding in findings):
        return _Config(kind, fields, None, findings)
    config = _make_config(fields)
    if isinstance(config, Finding):
        return _Config(kind, fields, None, [*findings, config])
    return _Config(kind, fields, config, findings)


def _make_config(fields: Fields) -> Qwen3Config | Finding:
    """A Qwen3Config of the fields that are known; further ones are left out."""
    kept = {name: fields[name] for name in REQUIRED_FIELDS if fields.get(name) is not None and name not in REPLACED}
    own = {name: fields["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    kept |= {
        "dflash_config": own,
        "layer_types": fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"],
        "use_sliding_window": "sliding_attention" in (fields.get("layer_types") or []),
        "num_target_layers": fields.get("num_target_layers"),
        "rope_parameters": {"rope_type": "default", "rope_theta": next(iter(rope_bases(fields).values()))},
    }
    try:
        return Qwen3Config(**kept)
    except StrictDataclassError as error:
        return broken(f"config.json cannot be used: {str(error).splitlines()[-1].strip()}.")


REPLACED = ("rope_theta", "rope_scaling", "rope_parameters", "model_type", "dtype", "tie_word_embeddings")


def _check_code(fields: Fields, directory: Path) -> list[Finding]:
    """`auto_map` names code that engines run when they are allowed to, so it has to be there; and what else is."""
    findings = []
    if (directory / "mask_embedding.pt").exists():  # vLLM puts it in the place of the embedding's row
        findings.append(broken("it holds mask_embedding.pt: here the mask is a row of the target's embedding."))
    named = fields.get("auto_map")
    if named is None:
        return findings
    places = named.values() if isinstance(named, dict) else [named]
    for place in [place for entry in places for place in (entry if isinstance(entry, list) else [entry])]:
        if place is None or (isinstance(place, str) and "--" in place):  # another repository's
            continue
        file = f"{place.rpartition('.')[0]}.py" if isinstance(place, str) else None
        if file is None or not (directory / file).is_file():
            findings.append(
                unservable(f"auto_map names {short(place)}, but the directory has no file {file} with its code.")
            )
    return findings


def open_drafter(directory: Path) -> OpenDrafter:
    """Read a directory's config and the headers of its weights, and find what is off."""
    read = _read_config(directory)
    if not directory.is_dir():
        return OpenDrafter(read.format, None, StoredTensors(), read.findings)
    tensors, findings = find_tensors(directory)
    findings = [*read.findings, *findings]
    opened = OpenDrafter(read.format, read.config, tensors, findings)
    if tensors.files and read.fields and has_shapes(read.fields):
        found = {name: shape for name, shape in tensors.shapes.items() if name not in opened.passed_over}
        findings += compare_shapes(shapes_of(_shape_config(read.fields)), found)
    findings += _check_formats(tensors, read.fields)
    for name in opened.passed_over:
        if name in tensors.files:
            findings.append(odd(f"the tensor {name} is the target's: it is passed over here, and engines share it."))
    return opened


def _shape_config(fields: Fields) -> Qwen3Config:
    """A configuration with what the shapes of the tensors follow from."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    own = {"target_layer_ids": [0] * len(fields["dflash_config"]["target_layer_ids"])}
    kept: Fields = {name: fields[name] for name in (*names, "num_key_value_heads", "head_dim") if name in fields}
    kept |= {"layer_types": ["full_attention"] * fields["num_hidden_layers"], "dflash_config": own}
    return Qwen3Config(**kept)


def shapes_of(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}


def compare_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    prefixes = Counter(name.removesuffix("fc.weight") for name in found if name.endswith(".fc.weight"))
    prefix = next(iter(prefixes), "")
    if prefix and all(name.startswith(prefix) for name in found):
        # vLLM adds `model.` itself, so that the names would match nothing.
        return [broken(f"the tensor fc.weight and all others are named with {prefix} before: names stand without it.")]
    findings = []
    for name in sorted({*expected, *found}):
        shape, right = found.get(name), expected.get(name)
        if shape == right:
            continue
        if right is None:
            # vLLM stops at a name that it doesn't know, or serves with an lm_head that it finds; SGLang passes over it.
            findings.append(broken(f"the tensor {name} is {shape}, but its config.json asks for none."))
        else:
            findings.append(broken(f"the tensor {name} is {shape or 'missing'}, but its config.json asks for {right}."))
    return findings


FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def _check_formats(tensors: StoredTensors, fields: Fields) -> list[Finding]:
    """Number formats. Engines cast the three floats on loading; anything else is quantised."""
    others = sorted({number for number in tensors.formats.values() if number not in FLOATS})
    if others:
        name = next(name for name, number in tensors.formats.items() if number == others[0])
        return [broken(f"the tensor {name} holds numbers of the format {others[0]}: weights are BF16, F16 or F32.")]
    held = sorted({FLOATS[number] for number in tensors.formats.values()})
    findings = (
        [odd(f"the weights are {' and '.join(held)}: we write bfloat16.")] if held and held != ["bfloat16"] else []
    )
    named = fields.get("dtype", fields.get("torch_dtype"))
    if held and named is not None and [named] != held:
        findings.append(odd(f"config.json says dtype {short(named)}, but the weights are {' and '.join(held)}."))
    return findings


NEVER_ZERO = ("fc.weight", "hidden_norm.weight", "norm.weight")


def check_numbers(name: str, tensor: Tensor) -> list[Finding]:
    wrong = int(tensor.numel() - tensor.isfinite().sum())
    if wrong:
        return [broken(f"the tensor {name} has {wrong} numbers that are not finite.")]
    if name in NEVER_ZERO and not tensor.any():
        return [broken(f"the tensor {name} is all zeros: nothing can come of it.")]
    return []
