"""The contract of `config.json`, field by field.

`settle` puts every field at its own place; `check_fields` then finds all that is wrong or missing. Each rule names what
vLLM (`models/qwen3_dflash.py`) or SGLang (`models/dflash.py`, `speculative/dflash_utils.py`) would do otherwise. Fields
that nobody reads are left alone.
"""

from collections.abc import Callable
from typing import Any

from ds_dflash.export.findings import Finding, broken, odd, unservable

Fields = dict[str, Any]
Place = Callable[[str], str]
"""Where a format keeps a field, for sentences."""

REQUIRED_FIELDS = [
    "architectures",
    "model_type",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
]
"""What is written."""

SIZES = {
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "vocab_size": 100_000_000,
    "block_size": 100_000,
    "num_target_layers": 100_000,
    "max_position_embeddings": 10**12,
}
"""Whole numbers from 1 to what no model comes near: larger ones are slips, and would be allocated."""

SHAPING = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "block_size")
"""Sizes that must be given; the others have a default in transformers' Qwen3Config."""

QWEN3_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}

OTHER_NETWORKS = {
    "attention_bias": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "markov_rank": 0,
    "output_multiplier": 1,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "projector_type": "dflash",
    "sample_from_anchor": False,
    "shift_label": False,
    "use_aux_hidden_state": True,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "hidden_act": "silu",
    "quantization_config": None,
}
"""Fields of the engines' other drafters, at top level or in dflash_config, with the value of the one trained here."""


def settle(fields: Fields) -> tuple[Fields, list[Finding]]:
    """`fields` with block_size at top level and the ids in `dflash_config`; published ones have them anywhere."""
    settled, findings = dict(fields), []
    own = settled.get("dflash_config")
    if own is not None and not isinstance(own, dict):
        findings.append(broken(f"dflash_config is {short(own)}, but should be an object."))
    own = dict(own) if isinstance(own, dict) else {}
    for name, home, away in [
        ("block_size", settled, own),
        ("num_target_layers", settled, own),
        ("mask_token_id", own, settled),
        ("target_layer_ids", own, settled),
    ]:
        if away.get(name) is None:
            continue
        given = home.setdefault(name, away[name])
        if given != away[name]:
            findings.append(
                broken(
                    f"{name} is {short(settled.get(name))} at top level and {short(own.get(name))} in dflash_config."
                )
            )
        elif name not in (fields if home is settled else fields.get("dflash_config") or {}):
            where = "in dflash_config" if home is own else "at top level"
            findings.append(odd(f"{name} is not {where}, where older engines look for it."))
    settled["dflash_config"] = own
    return settled, findings


def check_fields(fields: Fields, place: Place = str, knows_target: bool = True) -> list[Finding]:
    """All that is off with settled `fields`; sentences call a field `place(field)`.

    knows_target: whether the format has a place for the target's number of layers.
    """
    return [
        *_check_missing(fields, place),
        *(_check_depth(fields, place) if knows_target else []),
        *_check_kind(fields, place),
        *_check_sizes(fields, place),
        *_check_numbers(fields, place),
        *_check_ids(fields, place),
        *_check_rope(fields, place),
        *_check_layers(fields, place),
        *_check_causality(fields, place),
    ]


def has_shapes(fields: Fields) -> bool:
    """Whether the shapes of the tensors follow from settled `fields`."""
    ids = fields["dflash_config"].get("target_layer_ids")
    sizes = [name for name in (*SHAPING, *QWEN3_DEFAULTS) if _wrong_size(fields, name)]
    if sizes or _size(fields, "head_dim") % 2:
        return False
    return isinstance(ids, list) and 0 < len(ids) <= SIZES["num_hidden_layers"]


def _check_missing(fields: Fields, place: Place) -> list[Finding]:
    own = fields["dflash_config"]
    missing = [name for name in SHAPING if fields.get(name) is None]
    missing += [f"dflash_config.{name}" for name in ("mask_token_id", "target_layer_ids") if own.get(name) is None]
    if missing:
        names = ", ".join(place(name) for name in missing)
        return [broken(f"config.json lacks {names}: it is not the config of a DFlash drafter.")]
    optional = [name for name in REQUIRED_FIELDS if name not in fields and name not in CHECKED_APART]
    optional = [name for name in optional if name != "dtype" or "torch_dtype" not in fields]
    if optional:
        names = ", ".join(place(name) for name in optional)
        return [odd(f"config.json leaves out {names}: engines take the default of transformers' Qwen3Config.")]
    return []


CHECKED_APART = ("architectures", "model_type", "num_target_layers", "rope_theta", "rope_scaling", "rope_parameters")


def _check_depth(fields: Fields, place: Place) -> list[Finding]:
    if fields.get("num_target_layers") is not None or fields.get("num_hidden_layers") is None:
        return []
    sentence = f"{place('num_target_layers')} is missing: SGLang takes num_hidden_layers in its place"
    ids, layers = fields["dflash_config"].get("target_layer_ids"), _size(fields, "num_hidden_layers")
    if _are_ids(ids) and ids and max(ids) >= layers:
        return [unservable(f"{sentence} and refuses the layer id {max(ids)} as too large.")]
    return [odd(f"{sentence}.")]


def _check_kind(fields: Fields, place: Place) -> list[Finding]:
    findings = []
    if fields.get("architectures") != ["DFlashDraftModel"]:
        # Both engines choose the drafter's class by this name; "DFlash2DraftModel" is another network.
        level = unservable if fields.get("architectures") is None else broken
        findings.append(
            level(f'architectures is {short(fields.get("architectures"))}, but should be ["DFlashDraftModel"].')
        )
    if fields.get("model_type") != "qwen3":
        findings.append(
            unservable(
                f'{place("model_type")} is {short(fields.get("model_type"))}, but should be "qwen3": it says with which'
                " defaults engines read the fields."
            )
        )
    if fields.get("tie_word_embeddings") is True:
        # The Qwen3-4B drafter is published so. Both engines take the head from the target in any case.
        findings.append(odd(f"{place('tie_word_embeddings')} is true, but a drafter has no embedding and no head."))
    for name, neutral in OTHER_NETWORKS.items():
        for where, values in (("", fields), ("dflash_config.", fields["dflash_config"])):
            if values.get(name) is not None and values[name] != neutral:
                findings.append(
                    broken(f"{place(where + name)} is {short(values[name])}: the drafter trained here has {neutral!r}.")
                )
    for name, own in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        given, right = fields.get(name), fields.get(own)
        if given is not None and given != right:
            findings.append(
                broken(f"{place(name)} is {short(given)} and {place(own)} {short(right)}: they are equal here.")
            )
    return findings


def _check_sizes(fields: Fields, place: Place) -> list[Finding]:
    given = [name for name in SIZES if fields.get(name) is not None or (name in QWEN3_DEFAULTS and name in fields)]
    findings = [
        broken(f"{place(name)} is {short(fields[name])}, but should be a whole number from 1 to {SIZES[name]}.")
        for name in given
        if _wrong_size(fields, name)
    ]
    if fields.get("block_size") == 1:
        findings.append(broken(f"{place('block_size')} is 1, but a block has at least 2 tokens."))
    heads, groups, width = (_size(fields, name) for name in ("num_attention_heads", *QWEN3_DEFAULTS))
    if heads and groups and heads % groups:
        findings.append(
            broken(f"{place('num_attention_heads')} is {heads}, no multiple of num_key_value_heads, {groups}.")
        )
    if width and width % 2:
        findings.append(broken(f"{place('head_dim')} is {width}, but the rotary embedding needs an even number."))
    return findings


def _wrong_size(fields: Fields, name: str) -> bool:
    value: Any = fields.get(name, QWEN3_DEFAULTS.get(name))
    return not _is_whole(value) or not 1 <= value <= SIZES[name]


def _size(fields: Fields, name: str) -> int:
    """A size, 0 if it is not usable."""
    value: Any = fields.get(name, QWEN3_DEFAULTS.get(name))
    return 0 if _wrong_size(fields, name) else value


def _check_numbers(fields: Fields, place: Place) -> list[Finding]:
    findings = []
    epsilon = fields.get("rms_norm_eps")
    if epsilon is not None and not (_is_number(epsilon) and epsilon > 0):
        findings.append(broken(f"{place('rms_norm_eps')} is {short(epsilon)}, but should be a number above 0."))
    for name in ("initializer_range", "attention_dropout", "max_window_layers"):
        value = fields.get(name)
        if value is not None and not (_is_number(value) and value >= 0):
            findings.append(broken(f"{place(name)} is {short(value)}, but should be a number."))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = fields.get(name)
        if ids is not None and not _are_ids(ids if isinstance(ids, list) else [ids]):
            findings.append(broken(f"{place(name)} is {short(ids)}, but should be a token id or null."))
    return findings


def _check_ids(fields: Fields, place: Place) -> list[Finding]:
    findings = []
    own, vocabulary = fields["dflash_config"], fields.get("vocab_size")
    mask, ids = own.get("mask_token_id"), own.get("target_layer_ids")
    name = place("dflash_config.mask_token_id")
    if mask is not None and not (_is_whole(mask) and mask >= 0):
        findings.append(broken(f"{name} is {short(mask)}, but should be a token id."))
    elif mask is not None and _size(fields, "vocab_size") and mask >= vocabulary:
        findings.append(
            broken(f"{name} is {short(mask)}, but vocab_size is {vocabulary}: the embedding has no such row.")
        )
    name = place("dflash_config.target_layer_ids")
    if ids is None:
        return findings
    if not _are_ids(ids) or not ids:
        findings.append(broken(f"{name} is {short(ids)}, but should be a list of layer numbers, counted from 0."))
    elif ids != sorted(set(ids)):
        # vLLM captures the layers in their own order, whatever the list's: features would be swapped in silence.
        findings.append(broken(f"{name} is {short(ids)}, but should increase: engines tap layers in their order."))
    elif _size(fields, "num_target_layers") and ids[-1] >= fields["num_target_layers"]:
        layers = fields["num_target_layers"]
        findings.append(broken(f"{name} names layer {ids[-1]}, but num_target_layers is {layers}."))
    return findings


def _check_rope(fields: Fields, place: Place) -> list[Finding]:
    findings = []
    for name in ("rope_parameters", "rope_scaling"):
        form = fields.get(name)
        if form is None:
            continue
        if not isinstance(form, dict):
            findings.append(broken(f"{place(name)} is {short(form)}, but should be an object or null."))
            continue
        kind = form.get("rope_type", form.get("type", "default"))
        if kind != "default":
            findings.append(
                broken(f'{place(name)} has rope_type {short(kind)}: a drafter has the plain one, "default".')
            )
            continue
        findings += _not_plain({key: form[key] for key in form if key not in PLAIN}, f"{place(name)}.")
    findings += _not_plain({"partial_rotary_factor": fields.get("partial_rotary_factor")}, place(""))
    return findings + _check_bases(fields, place)


def rope_bases(fields: Fields) -> Fields:
    """The base of the rotary embedding at every place that gives one."""
    places = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict):
            places[f"{name}.rope_theta"] = fields[name].get("rope_theta")
    return {name: value for name, value in places.items() if value is not None}


PLAIN = ("rope_type", "type", "rope_theta")


def _not_plain(rest: Fields, where: str) -> list[Finding]:
    """Findings for what makes a rotary embedding partial, multimodal or scaled."""
    neutral = {"partial_rotary_factor": 1, "mrope_interleaved": False, "factor": 1}
    return [
        broken(f"{where}{name} is {short(value)}: a drafter's rotary embedding is plain, over all of head_dim.")
        for name, value in rest.items()
        if value is not None and value != neutral.get(name)
    ]


def _check_bases(fields: Fields, place: Place) -> list[Finding]:
    bases = rope_bases(fields)
    wrong = [
        broken(f"{place(name)} is {short(value)}, but should be a number above 0.")
        for name, value in bases.items()
        if not (_is_number(value) and value > 0)
    ]
    if wrong:
        return wrong
    if not bases:
        # Qwen3Config takes 10,000, vLLM's drafter 1,000,000.
        return [broken(f"{place('rope_theta')} is missing, and engines take different bases in its place.")]
    if len(set(bases.values())) > 1:
        given = " and ".join(f"{place(name)} is {value}" for name, value in bases.items())
        return [broken(f"{given}: they should be equal.")]
    if fields.get("rope_theta") is None:
        # Published drafters written with transformers 5 are so. With transformers 4, Qwen3Config reads rope_theta only.
        return [odd(f"{place('rope_theta')} is missing: engines on transformers 4 read it alone, and take 10000.")]
    if not fields.get("rope_parameters"):
        return [odd(f"{place('rope_parameters')} is missing: transformers 5 makes it from rope_theta.")]
    return []


def _check_layers(fields: Fields, place: Place) -> list[Finding]:
    types, layers = fields.get("layer_types"), _size(fields, "num_hidden_layers")
    if types is not None and (not isinstance(types, list) or not all(kind in LAYER_TYPES for kind in types)):
        return [broken(f"{place('layer_types')} is {short(types)}, but should list {' or '.join(LAYER_TYPES)}.")]
    if types is not None and layers and len(types) != layers:
        return [broken(f"{place('layer_types')} has {len(types)} entries, but num_hidden_layers is {layers}.")]
    window, uses = fields.get("sliding_window"), fields.get("use_sliding_window")
    if uses not in (None, True, False):
        return [broken(f"{place('use_sliding_window')} is {short(uses)}, but should be true or false.")]
    if types is None and uses:
        # transformers slides the layers from max_window_layers on; a drafter that slides says which of its layers do.
        return [broken(f"{place('use_sliding_window')} is true, but layer_types does not say which layers slide.")]
    if SLIDING not in (types or []):
        return [odd(f"{place('use_sliding_window')} is true, but no layer slides.")] if uses else []
    findings = _check_window(window, fields, place)
    if not findings and not uses:
        # Qwen3Config drops the window then, and both engines stop at a sliding layer without one.
        findings.append(unservable(f"{place('use_sliding_window')} should be true: layer_types has {SLIDING} layers."))
    return findings


SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)


def _check_window(window: Any, fields: Fields, place: Place) -> list[Finding]:
    name, block_size = place("sliding_window"), _size(fields, "block_size")
    if not _is_whole(window):
        return [broken(f"{name} is {short(window)}, but layer_types has {SLIDING} layers: it should be a number.")]
    if window < block_size:
        return [broken(f"{name} is {window}, but should be at least block_size, {block_size}.")]
    other = fields["dflash_config"].get("swa_window_size")
    if other is not None and other != window:  # vLLM takes this one
        return [broken(f"{name} is {window} and dflash_config.swa_window_size {short(other)}: they should be equal.")]
    return []


def _check_causality(fields: Fields, place: Place) -> list[Finding]:
    """In the block sliding layers are causal and full ones not; engines take an override of it for all layers."""
    own = fields["dflash_config"]
    override = own.get("causal") if fields.get("is_causal") is None else fields["is_causal"]
    types = fields.get("layer_types") if isinstance(fields.get("layer_types"), list) else None
    findings = []
    if override is not None and any((kind == SLIDING) != bool(override) for kind in types or ["full_attention"]):
        name = place("dflash_config.causal" if fields.get("is_causal") is None else "is_causal")
        findings.append(
            broken(
                f"{name} is {short(override)} for all layers: here sliding layers are causal in a block, full ones not."
            )
        )
    if own.get("use_swa") and (not types or set(types) != {SLIDING}):  # vLLM: all layers slide, none is causal
        findings.append(broken(f"{place('dflash_config.use_swa')} is true: here layer_types says which layers slide."))
    return findings


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Not NaN, and nothing that overflows where it is computed with."""
    return (_is_whole(value) or isinstance(value, float)) and abs(value) <= 1e30


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(number) and number >= 0 for number in value)


def short(value: Any) -> str:
    """A value as it is shown: text in quotes, and cut where it is long."""
    if _is_whole(value) and abs(value) >= 10**20:
        return f"a number of {value.bit_length()} bits"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
