"""Another number of drafter ranks finds the very bits that were saved, or says why it cannot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import distributed
import pytest
import tiny
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from resharding_ranks import updates_before

from ds_dflash.checkpoint.resharding import UnknownFormError, cut_anew


def share_of(elements, ranks):
    """As DeepSpeed makes it: equal, even."""
    return -(-elements // (2 * ranks)) * 2


def saved_files(elements, ranks, filled):
    """What so many ranks have saved of a parameter group; `filled`: whether masters keep their filling (bf16)."""
    share, files = share_of(elements, ranks), []
    for rank in range(ranks):
        content = max(0, min(share, elements - rank * share))
        own = torch.full((share,), -1.0)  # zeros in DeepSpeed's files: here it shows if filling is taken for content
        own[:content] = torch.arange(1, elements + 1)[rank * share :][:content]
        half = content // 2
        pieces = {"a": fragment_address(half, 0), "b": fragment_address(content - half, half)}
        state = {
            "single_partition_of_fp32_groups": [own if filled else own[:content]],
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(300.0), "exp_avg": own * 2, "exp_avg_sq": own * 3}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
            "param_slice_mappings": [pieces],
            "group_paddings": [share - content],
            "partition_count": [ranks],
        }
        files.append({"optimizer_state_dict": state, "ds_config": {"zero_optimization": {"stage": 1}}})
    return files


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("elements", [24, 25, 31, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 1), (3, 2), (5, 3), (3, 8)])
def test_the_shares_of_any_number_of_ranks_make_the_same_whole(elements, before, after, filled):
    files, share = saved_files(elements, before, filled), share_of(elements, after)
    cut = [cut_anew(files, [share], rank, after)["optimizer_state_dict"] for rank in range(after)]
    expected = torch.zeros(share * after)
    expected[:elements] = torch.arange(1, elements + 1)
    for name, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
        shares = [state["base_optimizer_state"]["state"][0][name] for state in cut]
        assert all(len(part) == share for part in shares)
        assert torch.equal(torch.cat(shares), expected * factor)
    assert torch.equal(torch.cat([state["single_partition_of_fp32_groups"][0] for state in cut]), expected)
    assert [state["base_optimizer_state"]["state"][0]["step"] for state in cut] == [300.0] * after
    assert sum(share - state["group_paddings"][0] for state in cut) == elements


def gap(state):
    state["param_slice_mappings"][0]["b"].start += 1


def other_step(state):
    state["base_optimizer_state"]["state"][0]["step"] = torch.tensor(299.0)


def elastic(state):
    state["base_optimizer_state"] = [state["base_optimizer_state"]["state"][0]]


def matrix(state):
    state["base_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(2)


def second_group(state):
    state["single_partition_of_fp32_groups"].append(torch.zeros(2))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (gap, r"b starts at \d+ of a share, not at \d+"),
        (other_step, r"step is .* on the ranks, not one value"),
        (elastic, "base_optimizer_state is not that of a torch optimizer"),
        (matrix, r"a share has \(2,\), not \d+ elements"),
        (second_group, "single_partition_of_fp32_groups is not one for each"),
        (lambda state: state.pop("param_slice_mappings"), "param_slice_mappings is not one for each"),
    ],
)
def test_a_form_that_is_not_known_is_refused_with_the_place(damage, reason):
    files = saved_files(25, 2, filled=False)
    damage(files[1]["optimizer_state_dict"])
    with pytest.raises(UnknownFormError, match=reason):
        cut_anew(files, [share_of(25, 3)], 0, 3)


def test_the_state_of_another_drafter_or_in_an_order_of_the_ranks_is_refused():
    with pytest.raises(UnknownFormError, match="it has 25 elements, and the drafter has 24 at most"):
        cut_anew(saved_files(25, 2, filled=False), [8], 0, 3)
    files = saved_files(25, 2, filled=False)
    files[0]["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    with pytest.raises(UnknownFormError, match="round_robin_gradients"):
        cut_anew(files, [share_of(25, 3)], 0, 3)


# ------------------------------------------------------------------------------------------ with DeepSpeed's own files


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What resharding_ranks.py has seen; one start of three processes for all numbers of ranks."""
    directory = tmp_path_factory.mktemp("checkpoints")
    program = Path(__file__).parent / "resharding_ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(distributed.REPOSITORY)}
    logs = [directory / f"rank-{rank}.log" for rank in range(3)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(directory), str(rank)],
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    codes = distributed.Ranks(processes).wait(180)
    assert codes == [0, 0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    return torch.load(directory / "seen.pt")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masters_moments_and_step_are_bit_for_bit_those_saved_by_any_number_of_ranks(seen, precision):
    for saved_by in (1, 2, 3):
        saved = seen[precision, saved_by]
        for name in ("masters", "exp_avg", "exp_avg_sq"):
            assert saved[name].dtype == torch.float32
            assert saved[name].any()
            assert torch.equal(saved[name], saved[f"by name: {name}"])
        assert saved["step"] == updates_before(precision, saved_by)
        for loaded_by in (1, 2, 3):
            loaded = seen[precision, saved_by, loaded_by]["loaded"]
            for name in ("masters", "exp_avg", "exp_avg_sq", "step", "weights"):
                assert torch.equal(loaded[name], saved[name]), (saved_by, loaded_by, name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_next_update_is_the_same_on_any_number_of_ranks(seen, precision):
    for saved_by in (1, 2, 3):
        expected = seen[precision, saved_by, saved_by]["updated"]
        assert not torch.equal(expected["masters"], seen[precision, saved_by]["masters"])
        for loaded_by in (1, 2, 3):
            updated = seen[precision, saved_by, loaded_by]["updated"]
            for name in ("masters", "exp_avg", "exp_avg_sq", "step"):
                torch.testing.assert_close(updated[name], expected[name], rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------ a whole run


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_target_and_drafter_ranks_and_the_same_losses(tmp_path):
    """1 + 1 ranks, then 2 + 2, then 2 + 1, each with six micro-batches in an update; stopped by SIGTERM.

    Of the last checkpoint of 2 + 2 a bit is changed, so the one before is taken.
    """
    config, runs = tmp_path / "config.json", tmp_path / "runs"
    tiny.write_target(tmp_path / "target")
    tiny.write_chats(tmp_path / "train.jsonl", 48)
    config.write_text(json.dumps(tiny.settings(tmp_path / "target", tmp_path / "train.jsonl", runs)))
    options = ["training.num_epochs=16", "training.save_every=2", "target.sharding=none"]

    def arguments(rounds, drafters, *more):
        spread = [f"gradient_accumulation_steps={rounds}", f"topology.drafter_ranks={drafters}"]
        return [part for option in [*options, *spread, *more] for part in ("--set", option)]

    def stop_after(updates, job):
        job.wait_for_updates(runs / "run", updates)
        job.signal(0, signal.SIGTERM)
        assert set(job.wait(40)) == {0}
        (checkpoint,) = (runs / "run" / "checkpoints").glob(f"step-{len(losses(runs / 'run')):06d}")
        return len(losses(runs / "run")), sorted(checkpoint.glob("engine/*_optim_states.pt"))

    distributed.run(2, config, *arguments(6, 1, "run_name=whole"))
    whole = losses(runs / "whole")
    first, parts = stop_after(4, distributed.start(2, config, *arguments(6, 1)))
    assert len(parts) == 1
    second, parts = stop_after(first + 4, distributed.start(4, config, *arguments(3, 2)))
    assert len(parts) == 2
    changed = bytearray(parts[1].read_bytes())
    changed[len(changed) // 2] ^= 1
    parts[1].write_bytes(changed)
    assert first < second < len(whole)
    distributed.run(3, config, *arguments(3, 1))
    assert f"{parts[1].parent.parent} is not whole (other bytes than were written in engine/" in distributed.output(
        config, 0
    )
    got = losses(runs / "run")
    assert got[:first] == whole[:first]
    assert got[first : first + 2] == pytest.approx(whole[first : first + 2], rel=1e-5)
    assert got == pytest.approx(whole, rel=1e-3)


def losses(run):
    return [line["loss"] for line in distributed.metrics(run)]
