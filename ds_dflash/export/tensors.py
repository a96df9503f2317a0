"""The weights of a directory: `model.safetensors`, or shards with `model.safetensors.index.json`.

Headers are read first; the numbers come one tensor at a time, so that a check never holds more than one of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_dflash.export.findings import Finding, broken

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class StoredTensors:
    """The tensors of a directory by name: file, shape and number format ("BF16")."""

    files: dict[str, Path] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, file after file."""
        for path in dict.fromkeys(self.files.values()):
            with safe_open(path, "pt") as file:
                for name in (name for name, place in self.files.items() if place == path):
                    yield name, file.get_tensor(name)

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def find_tensors(directory: Path) -> tuple[StoredTensors, list[Finding]]:
    """The tensors of a directory, and what is off with its files."""
    tensors, findings = StoredTensors(), []
    expected, index_findings = _listed(directory)
    findings += index_findings
    for path, names in expected.items():
        found = _headers(path)
        if isinstance(found, Finding):
            findings.append(found)
            continue
        for name in sorted(found) if names is None else names:
            if name not in found:
                findings.append(broken(f"{path.name} lacks the tensor {name} that {INDEX} places in it."))
                continue
            tensors.files[name] = path
            tensors.shapes[name], tensors.formats[name] = found[name]
    if not findings and not tensors.files:
        findings.append(broken(f"{SINGLE} holds no tensors."))
    return tensors, findings


def _listed(directory: Path) -> tuple[dict[Path, list[str] | None], list[Finding]]:
    """The files to read, each with the tensors wanted of it (None: all)."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() and index.is_file():  # transformers reads the one, vLLM what the other lists
        return {single: None}, [broken(f"it holds both {SINGLE} and {INDEX}: engines differ in which one they read.")]
    if single.is_file():
        return {single: None}, []
    if not index.is_file():
        return {}, [broken(f"it holds no {SINGLE}: it is not a drafter in the serving format.")]
    content = parse_json(index)
    if isinstance(content, Finding):
        return {}, [content]
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        return {}, [broken(f"{INDEX} has no weight_map of tensors to files.")]
    outside = sorted({file for file in places.values() if Path(file).name != file})
    if outside:
        return {}, [broken(f"{INDEX} names {outside[0]}: shards are files of the directory itself.")]
    files: dict[Path, list[str] | None] = {}
    for file in sorted(set(places.values())):
        files[directory / file] = sorted(name for name, place in places.items() if place == file)
    return files, []


def _headers(path: Path) -> dict[str, tuple[tuple[int, ...], str]] | Finding:
    """Shape and number format of every tensor of a file."""
    if not path.is_file():
        return broken(f"it holds no {path.name}, which {INDEX} names.")
    path.open("rb").close()  # a file that may not be read is said to be so; safetensors says that it does not exist
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        return broken(f"{path.name} cannot be read ({error}).")


def parse_json(path: Path) -> Any:
    """The content of a JSON file, or a Finding."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # nested too deeply: RecursionError
        return broken(f"{path.name} is not JSON ({error}).")
