"""Every kind of target, loaded from shards whole and under ZeRO-3: what is loaded, what is captured, and that a capture
depends neither on its batch nor on what was captured before.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import distributed
import learning
import pytest
import small_targets
import torch
import zero3_ranks
from learning import random_rows, target_settings

from ds_dflash.target import Target, load_whole, open_target

CPU = torch.device("cpu")
EVERY_KIND = pytest.mark.parametrize("kind", small_targets.KINDS)
TIED = {"llama_tied", "qwen3_tied"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.fixture(scope="module")
def saved(root):
    """kind -> (model, directory of its checkpoint, in several shards)."""

    @cache
    def save(kind):
        model = small_targets.build(small_targets.KINDS[kind])
        directory = small_targets.write(model, root / kind, max_shard_size="20KB")
        assert len(list(directory.glob("*.safetensors"))) > 2
        return model, directory

    return save


def load(directory, layer_ids):
    settings = target_settings(directory)
    return Target.load(open_target(settings), settings, layer_ids, CPU, zero=None)


def assert_near(found, expected):
    """Within 1e-5 of the largest number."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def hidden_states(model, ids, layer_ids):
    """Outputs of the whole model's layers (not of the last one) for one row."""
    states = model(input_ids=torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layer_ids], -1)


@EVERY_KIND
@pytest.mark.parametrize("layer_ids", [[1, 4], [0, 2, 3]])
def test_features_are_the_hidden_states_after_the_tapped_layers(saved, kind, layer_ids):
    model, directory = saved(kind)
    target = load(directory, layer_ids)
    for ids in random_rows(11, 6):
        assert_near(target.capture([ids]), hidden_states(model, ids, layer_ids))


@EVERY_KIND
def test_rows_of_a_padded_batch_have_the_features_they_have_alone(saved, kind):
    target, rows = load(saved(kind)[1], [1, 4]), random_rows(3, 17, 1, 9)
    together = target.capture(rows)
    assert together.shape == (30, 32)
    assert_near(together, torch.cat([target.capture([row]) for row in rows]))


@EVERY_KIND
def test_a_second_capture_equals_the_first(saved, kind):
    target, rows = load(saved(kind)[1], [1, 4]), random_rows(3, 17, 9)
    first = target.capture(rows)
    target.capture(random_rows(20, 20, seed=1))
    assert torch.equal(target.capture(rows), first)


def layers_of(names):
    return {name.split(".")[1] for name in names if name.startswith("layers.")}


@EVERY_KIND
def test_layers_above_the_last_tap_and_the_head_are_not_loaded(saved, kind):
    parameters = dict(load(saved(kind)[1], [1, 3])._model.named_parameters())
    assert layers_of(parameters) == {"0", "1", "2", "3"}
    assert not any("head" in name or "visual" in name for name in parameters)
    assert not any(parameter.requires_grad for parameter in parameters.values())


@EVERY_KIND
def test_embedding_and_head_are_the_models_own(saved, kind):
    model, directory = saved(kind)
    embedding, head = open_target(target_settings(directory)).embedding_and_head(torch.float32, CPU)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (head is embedding) == (kind in TIED)
    rounded = open_target(target_settings(directory)).embedding_and_head(torch.bfloat16, CPU)[1]
    assert torch.equal(rounded, head.bfloat16())


@EVERY_KIND
def test_a_checkpoint_in_one_file_is_the_same_target(saved, tmp_path, kind):
    model, sharded = saved(kind)
    whole = small_targets.write(model, tmp_path / "whole")
    assert len(list(whole.glob("*.safetensors"))) == 1
    rows = random_rows(5, 8)
    assert torch.equal(load(sharded, [1, 4]).capture(rows), load(whole, [1, 4]).capture(rows))
    pairs = [open_target(target_settings(path)).embedding_and_head(torch.float32, CPU) for path in (sharded, whole)]
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@EVERY_KIND
def test_the_whole_language_model_gives_the_logits_of_the_saved_one(saved, kind):
    model, directory = saved(kind)
    settings, ids = target_settings(directory), torch.from_numpy(random_rows(9)[0])[None]
    loaded = load_whole(open_target(settings), settings, CPU)
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


# ------------------------------------------------------------------------------------------ under ZeRO-3


@pytest.fixture(scope="module")
def of_ranks(saved, root):
    """What zero3_ranks.py kept on each of two ranks: [{kind: {what: result}}]; one start for all kinds."""
    for kind in small_targets.KINDS:
        saved(kind)
    launcher = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    launcher |= {"MASTER_PORT": str(distributed.free_port()), "PYTHONPATH": str(distributed.REPOSITORY)}
    command = [sys.executable, str(Path(zero3_ranks.__file__)), str(root)]
    processes = []
    for rank in ("0", "1"):
        environment = os.environ | launcher | {"RANK": rank, "LOCAL_RANK": rank}
        with (root / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = distributed.Ranks(processes).wait()
    assert codes == [0, 0], "\n".join((root / f"rank-{rank}.log").read_text()[-3000:] for rank in range(2))
    return [torch.load(root / f"captured-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@EVERY_KIND
def test_under_zero3_every_rank_captures_what_a_whole_target_does(saved, of_ranks, kind):
    target = load(saved(kind)[1], zero3_ranks.LAYER_IDS)
    for rank, micro_batches in zip(of_ranks, zero3_ranks.MICRO_BATCHES, strict=True):
        for found, rows in zip(rank[kind]["captured"], micro_batches, strict=True):
            if rows:
                assert_near(found, torch.cat([target.capture([row]) for row in rows]))
            else:  # took part with a forward that counts for nothing
                assert found.shape == (0, 32)


@pytest.mark.slow
@EVERY_KIND
def test_under_zero3_rows_have_the_features_they_have_alone_and_again(of_ranks, kind):
    together, alone = of_ranks[0][kind]["captured"]
    assert_near(together[3:20], alone)
    for rank in of_ranks:
        pairs = zip(rank[kind]["captured"], rank[kind]["again"], strict=True)
        assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.slow
@EVERY_KIND
def test_under_zero3_a_rank_holds_half_of_the_layers_up_to_the_last_tap(of_ranks, kind):
    for rank in of_ranks:
        assert layers_of(rank[kind]["names"]) == {"0", "1", "2", "3"}
        assert not any("head" in name for name in rank[kind]["names"])
        assert rank[kind]["held"] < 0.51 * rank[kind]["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", small_targets.KINDS)
def test_zero3_gathers_a_layer_ahead_and_keeps_nothing_unless_the_settings_say_otherwise(of_ranks, kind):
    for rank in of_ranks:
        assert rank[kind]["gathered ahead"] == rank[kind]["largest layer"]
        assert (rank[kind]["kept for reuse"], rank[kind]["never cut"]) == (0, zero3_ranks.PERSISTENCE)


@pytest.mark.parametrize("kind", zero3_ranks.BUILD_DRAFTER)
def test_a_drafter_built_beside_a_zero3_target_is_whole_and_learns(saved, of_ranks, kind):
    """Report 22: a second model built under ZeRO-3's global state came out with empty parameters, and embedding and
    head had size 0 on the drafter's rank.
    """
    model, directory = saved(kind)
    config = learning.config_for(open_target(target_settings(directory)), zero3_ranks.LAYER_IDS)
    expected = learning.new_drafter(config).state_dict()
    for rank in of_ranks:
        assert torch.equal(rank[kind]["embedding"], model.get_input_embeddings().weight)
        assert torch.equal(rank[kind]["head"], model.get_output_embeddings().weight)
        first, weights = rank[kind]["first"], rank[kind]["weights"]
        assert first.keys() == weights.keys() == expected.keys()
        assert all(torch.equal(first[name], expected[name]) for name in expected)
        assert all(weights[name].shape == expected[name].shape for name in expected)
        assert not any(torch.equal(weights[name], first[name]) for name in expected)
    assert all(torch.equal(of_ranks[0][kind]["weights"][name], of_ranks[1][kind]["weights"][name]) for name in expected)
