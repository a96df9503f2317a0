"""The frozen target: opening its checkpoint, loading what is needed of it, capturing the tapped layers.

Only the decoder layers up to the last tapped one are loaded, without the head: nothing above is gathered or computed.
The features of tapped layer i are the output of decoder layer i (0-based, before the final norm), taken by hooks; all
hidden states are never kept. The drafter's embedding and head are read straight from the checkpoint's shards, on its
own rank.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import logging as transformers_logging
from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

from ds_dflash.accelerator import deepspeed
from ds_dflash.config import TargetSettings
from ds_dflash.errors import UserError
from ds_dflash.kernels import attention_kernel, describe_kernels

RESERVED_MASK_IDS = {"qwen3": 151_669, "qwen3_moe": 151_669, "qwen3_5": 248_070, "qwen3_5_moe": 248_070}
"""Ids inside the embedding that these targets' tokenizers never use, by model type."""


@dataclass(frozen=True, eq=False)
class TargetCheckpoint:
    """A target's directory with its configuration; nothing is loaded."""

    path: Path
    config: PretrainedConfig

    @property
    def text(self) -> PretrainedConfig:
        """The configuration of the language model, also inside a multimodal one."""
        return self.config.get_text_config()

    def layer_ids(self, configured: Sequence[int] | None, drafter_layers: int) -> list[int]:
        """The tapped layers: as configured (increasing), else spread over the target by `default_layer_ids`."""
        layers = self.text.num_hidden_layers
        ids = list(configured) if configured else default_layer_ids(layers, drafter_layers)
        if configured and ids[-1] >= layers:
            raise UserError(
                f"target.layer_ids names layer {ids[-1]}, but {self.path} has {layers} layers: ids go from 0 to"
                f" {layers - 1}."
            )
        if min(ids) < 0 or len(set(ids)) < len(ids):
            raise UserError(
                f"The target {self.path} has {layers} layers, too few for the default taps of a drafter of"
                f" {drafter_layers} layers ({ids}): set target.layer_ids."
            )
        return ids

    def mask_token_id(self, configured: int | None, tokenizer: PreTrainedTokenizerBase | None) -> int:
        """The mask token: as configured, else the tokenizer's, else one reserved for the model type."""
        rows = self._shape(self._embedding_name())[0]
        reserved = RESERVED_MASK_IDS.get(self.text.model_type.removesuffix("_text"))
        candidates = [configured, tokenizer.mask_token_id if tokenizer else None, reserved]
        found = next((candidate for candidate in candidates if candidate is not None), None)
        if found is None:
            raise UserError(
                f"The tokenizer of {self.path} has no mask token and none is reserved for {self.text.model_type}: set"
                f" drafter.mask_token_id to an id below {rows} that its text never contains."
            )
        if not 0 <= found < rows:
            raise UserError(
                f"drafter.mask_token_id {found} is outside the target's embedding of {rows} rows: choose an id from 0"
                f" to {rows - 1}."
            )
        return found

    def embedding_and_head(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The frozen embedding and head, each [V, H], read from the shards; one tensor for both when tied."""
        embedding = self._read(self._embedding_name()).to(device, dtype)
        head = self._head_name()
        return embedding, embedding if head is None else self._read(head).to(device, dtype)

    def check_shards(self) -> None:
        """Raise UserError naming a shard that cannot be read; only the files' headers are looked at."""
        for file in sorted(set(self._shards().values())):
            with self._open(file):
                pass

    def _embedding_name(self) -> str:
        names = [name for name in self._shards() if name.endswith("embed_tokens.weight")]
        names = [name for name in names if "visual" not in name and "vision" not in name and "audio" not in name]
        if len(names) != 1:
            raise UserError(
                f"{self.path} should hold one tensor named *embed_tokens.weight for the text, but has"
                f" {names or 'none'}."
            )
        return names[0]

    def _head_name(self) -> str | None:
        tied = getattr(self.config, "tie_word_embeddings", False) or getattr(self.text, "tie_word_embeddings", False)
        if tied:
            return None
        if "lm_head.weight" not in self._shards():
            raise UserError(
                f"{self.path} has no tensor lm_head.weight and its config does not say tie_word_embeddings: the"
                " checkpoint is incomplete."
            )
        return "lm_head.weight"

    def _shards(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return {name: self.path / file for name, file in _weight_map(index).items()}
        single = self.path / "model.safetensors"
        if not single.exists():
            raise UserError(f"{self.path} holds no model.safetensors and no model.safetensors.index.json.")
        with self._open(single) as file:
            return dict.fromkeys(file.keys(), single)

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"The target's shard {file} cannot be read ({error}): fetch it again.") from None

    def _read(self, name: str) -> Tensor:
        with self._shard_of(name) as shard:
            return shard.get_tensor(name)

    def _shape(self, name: str) -> list[int]:
        with self._shard_of(name) as shard:
            return shard.get_slice(name).get_shape()

    def _shard_of(self, name: str) -> Any:
        file = self._shards()[name]
        shard = self._open(file)
        if name not in set(shard.keys()):
            raise UserError(f"The target's shard {file} lacks the tensor {name} that the index places in it.")
        return shard


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from a checkpoint's index."""
    try:
        content = json.loads(index.read_text())
    except ValueError as error:
        raise UserError(f"{index} is not JSON ({error}): fetch it again.") from None
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise UserError(f"{index} has no weight_map: fetch it again.")
    return content["weight_map"]


def open_target(settings: TargetSettings) -> TargetCheckpoint:
    """Find the target's directory (or fetch it from the hub into its cache) and read its configuration."""
    path = Path(settings.path)
    if not path.is_dir():
        path = _fetch(settings.path)
    if not (path / "config.json").is_file():
        raise UserError(f"target.path {path} holds no config.json: it should be a Hugging Face model directory.")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"The config.json of target.path {path} cannot be used: {reason}") from None
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The config.json of target.path {path} cannot be used: {reason}") from None
    return TargetCheckpoint(path, config)


def _fetch(name: str) -> Path:
    if Path(name).is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise UserError(f"target.path {name} does not exist: give a model directory or a hub id (owner/name).")
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.path {name} is neither a directory nor a model that the hub gave ({type(error).__name__}:"
            f" {reason})."
        ) from None


def default_layer_ids(target_layers: int, drafter_layers: int) -> list[int]:
    """round(1 + j (n - 4) / (L - 1)) for j = 0 .. L - 1, halves to even; [n // 2] for L = 1."""
    if drafter_layers == 1:
        return [target_layers // 2]
    return [round(1 + j * (target_layers - 4) / (drafter_layers - 1)) for j in range(drafter_layers)]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a transformers language model, with or without head, also inside a multimodal one."""
    for name in ("model", "language_model"):
        model = getattr(model, name, model)
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"The target's class {type(model).__name__} has no list of decoder layers named `layers`.")
    return layers


class TapRecorder:
    """Keeps the outputs of the tapped layers while it is entered."""

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self._layers = [layers[index] for index in layer_ids]
        self._hidden: dict[int, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "TapRecorder":
        for tap, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(lambda _, __, out, tap=tap: self._keep(tap, out)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._hidden.clear()

    def hidden(self) -> list[Tensor]:
        """The recorded outputs [rows, length, H], in the order of the taps."""
        return [self._hidden[tap] for tap in range(len(self._layers))]

    def _keep(self, tap: int, output: Tensor | tuple[Tensor, ...]) -> None:
        self._hidden[tap] = output[0] if isinstance(output, tuple) else output


class Target:
    """The target's layers up to the last tap, frozen, on this rank: whole, or a ZeRO-3 part of it."""

    def __init__(self, model: nn.Module, layer_ids: Sequence[int], device: torch.device) -> None:
        self._model = model
        self._device = device
        self._layer_ids = list(layer_ids)
        self._taps = TapRecorder(decoder_layers(getattr(model, "module", model)), layer_ids)

    @classmethod
    def load(
        cls,
        checkpoint: TargetCheckpoint,
        settings: TargetSettings,
        layer_ids: Sequence[int],
        device: torch.device,
        zero: dict[str, Any] | None,
    ) -> "Target":
        """Load the layers up to the highest of `layer_ids`.

        zero: DeepSpeed's `zero_optimization` settings to shard it by, over the default process group; None: whole.
        """
        if zero is None:
            model = load_layers(checkpoint, settings, max(layer_ids) + 1).to(device).eval()
            return cls(model, layer_ids, device)
        dtype = weights_dtype(checkpoint, settings)
        engine_config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {**zero, "stage": 3},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
        }
        zero_state = HfDeepSpeedConfig(engine_config)  # while it lives, from_pretrained partitions what it loads
        model = load_layers(checkpoint, settings, max(layer_ids) + 1)
        engine_config["zero_optimization"] = {**forward_only_keys(model), **zero, "stage": 3}
        engine = deepspeed.initialize(model=model, config=engine_config)[0]
        del zero_state
        unset_hf_deepspeed_config()
        engine.eval()
        return cls(engine, layer_ids, device)

    def describe(self) -> str:
        """One line for the log: layers, taps, number format, kernels."""
        model: Any = getattr(self._model, "module", self._model)
        layers = len(decoder_layers(model))
        dtype = str(model.dtype).removeprefix("torch.")
        return f"{layers} layers up to the last tap of {self._layer_ids}, {dtype}, {describe_kernels(model.config)}"

    @torch.no_grad()
    def capture(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Features [tokens, taps * H] of the real tokens of `rows` (int64 [length] each), row after row.

        The batch is right-padded, one document a row. No rows: a one-token forward all the same, since under
        ZeRO-3 every rank has to take part; the result has no tokens.
        """
        lengths = torch.tensor([len(row) for row in rows] or [1])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        ids[mask] = torch.from_numpy(np.concatenate([*rows, np.zeros(0 if rows else 1, np.int64)]))
        ids, mask = ids.to(self._device), mask.to(self._device)
        with self._taps as recorded:
            self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
            features = torch.cat([tap[mask] for tap in recorded.hidden()], dim=-1)
        return features if rows else features[:0]


def forward_only_keys(model: nn.Module) -> dict[str, int]:
    """ZeRO-3 keys for forwards alone: the next layer is gathered while one computes, and nothing is kept for later.

    DeepSpeed's own choices are for training, where a backward soon wants the same layers again.
    """
    weights = [layer.parameters() for layer in decoder_layers(model)]
    largest = max(sum(weight.ds_numel for weight in of_layer) for of_layer in weights)  # type: ignore[attr-defined]
    return {
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": 3 * largest,
        "stage3_max_reuse_distance": 0,
    }


def load_layers(checkpoint: TargetCheckpoint, settings: TargetSettings, layers: int) -> nn.Module:
    """The first `layers` decoder layers with embedding and final norm, frozen, from the checkpoint's shards."""
    config = copy.deepcopy(checkpoint.text)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    attention = attention_kernel(settings.attn_implementation, config, weights_dtype(checkpoint, settings))
    return _load(AutoModel, config, checkpoint, settings, attention)


def load_whole(checkpoint: TargetCheckpoint, settings: TargetSettings, device: torch.device) -> PreTrainedModel:
    """The whole language model with its head, frozen: for decoding."""
    config, attention = copy.deepcopy(checkpoint.text), settings.attn_implementation
    return _load(AutoModelForCausalLM, config, checkpoint, settings, attention).to(device).eval()


def _load(
    auto: Any, config: PretrainedConfig, checkpoint: TargetCheckpoint, settings: TargetSettings, attention: str | None
) -> Any:
    checkpoint.check_shards()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the layers above and the head are reported as unexpected keys
    try:
        model, report = auto.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=weights_dtype(checkpoint, settings),
            attn_implementation=attention,
            trust_remote_code=settings.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, and not as a table
            output_loading_info=True,
        )
    except (SafetensorError, OSError, ValueError, ImportError) as error:
        raise UserError(f"The target {checkpoint.path} cannot be loaded: {str(error).splitlines()[0]}") from None
    except RuntimeError as error:  # under ZeRO-3 transformers does not report sizes, but fails
        mismatch = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), None)
        if mismatch is None:
            raise
        raise UserError(f"The shards of {checkpoint.path} do not fit its config: {mismatch}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    _check_report(report, checkpoint)
    return model.requires_grad_(False)


def _check_report(report: dict[str, Any], checkpoint: TargetCheckpoint) -> None:
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise UserError(
            f"The shards of {checkpoint.path} lack {len(missing)} tensors of its config, first {missing[0]}."
        )
    if mismatched:
        name, found, expected = mismatched[0]
        raise UserError(
            f"The shards of {checkpoint.path} and its config differ in {len(mismatched)} tensors, first {name}:"
            f" {tuple(found)} in the shard, {tuple(expected)} by the config."
        )


def weights_dtype(checkpoint: TargetCheckpoint, settings: TargetSettings) -> torch.dtype:
    """The number format of the target on its ranks, and of the features that travel."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    stored = checkpoint.text.dtype or checkpoint.config.dtype
    return stored if isinstance(stored, torch.dtype) else torch.float32
