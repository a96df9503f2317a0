"""The drafter's optimizer state, saved by so many ranks, cut anew for another number of them.

DeepSpeed (0.19.8, ZeRO-1) lays all parameters of a group end to end, fills the end up with zeros until the shares of
the ranks are equal and even, and keeps a share on each rank: the fp32 masters, and the optimizer's state in tensors of
the same length (Adam: both moments). What is not such a tensor (the step counter) is the same on all ranks. So the
shares without their filling, end to end, are the whole, and any number of ranks can cut their own out of it: nothing is
computed, all bits stay.

    file["optimizer_state_dict"]
        single_partition_of_fp32_groups   [group] masters, with or without the filling
        base_optimizer_state              torch's: state[parameter number][name], param_groups
        param_slice_mappings              [group] {parameter: its piece's place in this share}: where the filling starts

DeepSpeed's own way, the universal format, gives the same bits, but is not taken: a run would have to convert first,
which writes the state of each parameter into files of their own, twice, and reads all of them as pickles that may run
code. It knows Adam's state only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class UnknownFormError(Exception):
    """The files are not laid out as above; the text says where."""


def cut_anew(files: Sequence[Mapping[str, Any]], shares: Sequence[int], rank: int, ranks: int) -> dict[str, Any]:
    """The file that `rank` of `ranks` would find, had they saved.

    files: the content of all saved files, by rank; tensors may be memory-mapped, only this rank's share is copied.
    shares: for each parameter group, the elements that a rank holds now, filling included. Raises UnknownFormError.
    """
    _expect("optimizer_state_dict" in files[0], "there is no optimizer_state_dict")
    states = [file["optimizer_state_dict"] for file in files]
    for state in states:
        _check_form(state, len(shares))
    zero = files[0].get("ds_config", {}).get("zero_optimization", {})
    _expect(not zero.get("round_robin_gradients"), "zero_optimization.round_robin_gradients orders it by the ranks")
    masters, optimizer, paddings = [], {}, []
    for group, share in enumerate(shares):
        lengths = [_content(state["param_slice_mappings"][group]) for state in states]
        whole = sum(lengths)
        _expect(whole <= share * ranks, f"it has {whole} elements, and the drafter has {share * ranks} at most")
        cut = _cutter(lengths, share, rank * share)
        masters.append(cut([state["single_partition_of_fp32_groups"][group] for state in states]))
        number = states[0]["base_optimizer_state"]["param_groups"][group]["params"][0]
        optimizer[number] = _join([state["base_optimizer_state"]["state"].get(number, {}) for state in states], cut)
        paddings.append(max(0, min(share, (rank + 1) * share - whole)))
    state = dict(states[0])
    del state["param_slice_mappings"]  # DeepSpeed makes it anew
    state |= {
        "single_partition_of_fp32_groups": masters,
        "base_optimizer_state": {**states[0]["base_optimizer_state"], "state": optimizer},
        "group_paddings": paddings,
        "partition_count": [ranks] * len(shares),
    }
    return {**files[0], "optimizer_state_dict": state}


Cut = Callable[[Sequence[Tensor]], Tensor]


def _cutter(lengths: Sequence[int], share: int, start: int) -> Cut:
    """Cuts [start, start + share) out of pieces whose first `lengths` elements are content, filled up with zeros."""

    def cut(pieces: Sequence[Tensor]) -> Tensor:
        taken = torch.zeros(share, dtype=pieces[0].dtype)
        begin = 0
        for piece, length in zip(pieces, lengths, strict=True):
            _expect(
                piece.dim() == 1 and len(piece) >= length, f"a share has {tuple(piece.shape)}, not {length} elements"
            )
            first, last = max(begin, start), min(begin + length, start + share)
            if first < last:
                taken[first - start : last - start] = piece[first - begin : last - begin]
            begin += length
        return taken

    return cut


def _join(entries: Sequence[Mapping[str, Any]], cut: Cut) -> dict[str, Any]:
    """One parameter group's optimizer state from that of all ranks."""
    _expect(all(entry.keys() == entries[0].keys() for entry in entries), "the ranks' optimizer states differ in kind")
    joined = {}
    for name, value in entries[0].items():
        values = [entry[name] for entry in entries]
        if isinstance(value, Tensor) and value.dim() == 1:
            joined[name] = cut(values)
        else:
            _expect(all(other == value for other in values), f"{name} is {values} on the ranks, not one value")
            joined[name] = value
    return joined


def _content(mapping: Mapping[str, Any]) -> int:
    """Elements of a share that are not filling: the parameters' pieces lie without a gap from its start."""
    end = 0
    for name, address in mapping.items():
        _expect(address.start == end, f"{name} starts at {address.start} of a share, not at {end}")
        end += address.numel
    return end


def _check_form(state: Mapping[str, Any], groups: int) -> None:
    for name in ("single_partition_of_fp32_groups", "param_slice_mappings"):
        _expect(len(state.get(name, ())) == groups, f"{name} is not one for each of {groups} parameter groups")
    optimizer = state.get("base_optimizer_state")
    is_torchs = isinstance(optimizer, dict) and len(optimizer.get("param_groups", ())) == groups
    _expect(is_torchs, f"base_optimizer_state is not that of a torch optimizer of {groups} parameter groups")


def _expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise UnknownFormError(otherwise)
