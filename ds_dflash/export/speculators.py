"""The format of the package `speculators` (vllm-project/speculators, read with version 0.9.0).

The same tensors under the same names: embedding, head and final norm of the target are left out there too and read
from the target that `speculators_config` names. The config nests the layers' fields in `transformer_layer_config`.
Layer ids count hidden states, whose first is the embedding's output: one more than the number of the tapped layer
(`convert/dflash/converter.py` there adds 1, vLLM's `configs/speculators/algos.py` takes it off again).
"""

from collections.abc import Sequence
from typing import Any

from ds_dflash.export.fields import SLIDING, Fields, short
from ds_dflash.export.findings import Finding, broken, odd, unservable

MARK = "speculators_model_type"
"""The field that tells this format from the other."""

TARGET_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's that versions up to 0.7 keep in the file."""

AT_TOP = ("architectures", "block_size", "num_target_layers", "target_hidden_size", "draft_vocab_size")
"""Fields that this format keeps beside `transformer_layer_config`."""


def to_speculators(flat: Fields, target: str, target_architectures: Sequence[str]) -> Fields:
    """The config of this format from that of the other (`serving_config`).

    target: directory or hub name that engines load the target from.
    """
    own = flat["dflash_config"]
    layer = {name: value for name, value in flat.items() if name not in (*AT_TOP, "dflash_config")}
    return {
        "architectures": ["DFlashDraftModel"],
        MARK: "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": flat["block_size"] - 1,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "block_size": flat["block_size"],
        "draft_vocab_size": flat["vocab_size"],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        # Of no meaning without sliding layers, but vLLM since #47745 makes full layers causal too where it is false.
        "sliding_window_non_causal": SLIDING not in flat["layer_types"],
        "num_target_layers": flat["num_target_layers"],  # not of this format, which lets further fields pass
        "tie_word_embeddings": False,
        "dtype": flat["dtype"],
    }


def from_speculators(fields: Fields) -> tuple[Fields, list[Finding]]:
    """The config in the other format, and what is off with the fields that only this one has."""
    if fields[MARK] != "dflash":
        return {}, [broken(f"{MARK} is {short(fields[MARK])}: only drafters of the type dflash are trained here.")]
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return {}, [broken("config.json lacks transformer_layer_config: it is not the config of a DFlash drafter.")]
    flat = {**layer, **{name: fields[name] for name in AT_TOP if name in fields}}
    flat["sample_from_anchor"] = fields.get("sample_from_anchor", False)
    ids, findings = _layer_numbers(fields.get("aux_hidden_state_layer_ids"))
    flat["dflash_config"] = {"mask_token_id": fields.get("mask_token_id"), "target_layer_ids": ids}
    # vLLM and the package take an architecture of either name.
    flat["architectures"] = ["DFlashDraftModel"]
    return flat, [*findings, *_check_causality(fields, flat), *_check_proposal(fields)]


def place(name: str) -> str:
    """Where this format keeps a field of the other one."""
    at_top = {
        "dflash_config.mask_token_id": "mask_token_id",
        "dflash_config.target_layer_ids": "aux_hidden_state_layer_ids, less 1,",
        "sample_from_anchor": "sample_from_anchor",
        **{name: name for name in AT_TOP},
    }
    return at_top.get(name, f"transformer_layer_config.{name}")


def _layer_numbers(ids: Any) -> tuple[Any, list[Finding]]:
    """Layers counted from 0; what is no list of numbers stays as it is, for the checks to come."""
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        return ids, []
    if 0 in ids:
        return ids, [broken("aux_hidden_state_layer_ids has 0, the embedding's output: here only layers are tapped.")]
    return [number - 1 for number in ids], []


def _check_causality(fields: Fields, flat: Fields) -> list[Finding]:
    types: Any = flat.get("layer_types") if isinstance(flat.get("layer_types"), list) else []
    value, slides, full = fields.get("sliding_window_non_causal"), SLIDING in types, set(types) != {SLIDING}
    if value not in (None, True, False):
        return [broken(f"sliding_window_non_causal is {short(value)}, but should be true or false.")]
    if slides and value:
        return [broken("sliding_window_non_causal is true: here sliding layers are causal in a block.")]
    if slides and value is None:
        return [unservable("sliding_window_non_causal is missing: the package takes false for it, vLLM true.")]
    if full and value is False:
        return [
            odd(
                "sliding_window_non_causal is false and there are full_attention layers: vLLM since #47745 makes these"
                " causal too, until #56692 is in; the format dflash is not affected."
            )
        ]
    return []


def _check_proposal(fields: Fields) -> list[Finding]:
    """What vLLM takes from `speculators_config` (`configs/speculators/base.py`); it refuses a directory without."""
    own = fields.get("speculators_config")
    methods = own.get("proposal_methods") if isinstance(own, dict) else None
    target = own.get("verifier") if isinstance(own, dict) else None
    method = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    tokens, block_size = method.get("speculative_tokens"), fields.get("block_size")
    findings = []
    if type(block_size) is int and tokens != block_size - 1:
        findings.append(
            unservable(
                f"speculators_config.proposal_methods has speculative_tokens {short(tokens)}, but a block of"
                f" {block_size} drafts {block_size - 1}."
            )
        )
    if not isinstance(target, dict) or not isinstance(target.get("name_or_path"), str):
        findings.append(unservable("speculators_config.verifier.name_or_path, the target of the drafter, is missing."))
    return findings
