"""What training would count on decoded answers is what decoding accepted there, step by step."""

import numpy as np
import pytest
import small_targets
import torch
from drafters import make_drafter, sliding
from test_decode import EVERY_MODEL, MODELS, TAPS, drafter_for, prompt_of

from ds_dflash.attention import BlockLayout
from ds_dflash.decode import Drafter, SpeculativeDecoder
from ds_dflash.teacher_forcing import TeacherForcing, visited, walked, within_answer

LENGTHS = (9, 1, 17, 9)


class Forgetful(Drafter):
    """Decoding with a fault: it gets the features of the token before."""

    def extend(self, contexts, features):
        super().extend(contexts, [part.roll(1, 0) for part in features])


def random_drafter(target, kind=Drafter, **fields):
    return kind(make_drafter(drafter_for(target, initializer_range=0.5, **fields), seed=1), target)


def decoded(target, drafter, new=14):
    """Prompts, their generations with two ids that end an answer, and what training counts on the answers."""
    asked = [prompt_of(length, seed) % 6 for seed, length in enumerate(LENGTHS)]
    full = SpeculativeDecoder(target, drafter).generate_batch(asked, max_new_tokens=new, stop_ids=())
    stop = int(full[0].output_ids[len(asked[0]) + 8])
    generations = SpeculativeDecoder(target, drafter).generate_batch(asked, max_new_tokens=new, stop_ids=(stop,))
    generations += full
    outputs = [generation.output_ids for generation in generations]
    return generations, TeacherForcing(target, drafter).accepted(outputs, LENGTHS * 2)


def steps(generations, forced):
    """(accepted within the answer, what training counts at that anchor) of every step."""
    for generation, accepted, length in zip(generations, forced, LENGTHS * 2, strict=True):
        new = len(generation.output_ids) - length
        assert len(accepted) == new - 1
        lengths = generation.acceptance_lengths
        assert visited(lengths).tolist() == [0, *lengths.cumsum()[:-1]][: len(lengths)]
        yield within_answer(lengths, new).tolist(), walked(accepted).tolist()


@EVERY_MODEL
@pytest.mark.parametrize("fields", [{}, sliding(6)], ids=["full", "sliding"])
def test_every_step_accepts_what_training_counts_at_its_anchor(kind, fields):
    target = small_targets.build(MODELS[kind], seed=2, vocab_size=6)  # few ids: a random drafter is sometimes right
    generations, forced = decoded(target, random_drafter(target, **fields))
    pairs = list(steps(generations, forced))
    assert [accepted for accepted, _ in pairs] == [counted for _, counted in pairs]
    assert len({length for accepted, _ in pairs for length in accepted}) > 1


def test_a_fault_in_decoding_makes_the_two_differ():
    target = small_targets.build(MODELS["qwen3"], seed=2, vocab_size=6)
    generations, forced = decoded(target, random_drafter(target, Forgetful))
    assert any(accepted != counted for accepted, counted in steps(generations, forced))


@torch.no_grad()
def test_every_token_of_the_answer_but_the_last_is_an_anchor_and_counts_leading_right_slots():
    target = small_targets.build(MODELS["qwen3"], seed=2, vocab_size=6)
    drafter, ids = random_drafter(target), prompt_of(16, seed=3) % 6
    (accepted,) = TeacherForcing(target, drafter).accepted([ids], [10])
    hidden = target(input_ids=ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)
    expected = []
    for anchor in range(10, 15):
        block = torch.tensor([[int(ids[anchor]), 3, 3, 3]])
        layout = BlockLayout((0, anchor), (0, 1), torch.tensor([anchor]), 4)
        drafted = drafter.model(features[:anchor], drafter.embedding[block], layout)[0, 1:] @ drafter.head.T
        right = (drafted.argmax(-1)[: 15 - anchor] == ids[anchor + 1 : anchor + 4]).tolist()
        expected.append(1 + [*right, False].index(False))
    assert accepted.tolist() == expected
    assert len(set(expected)) > 1


def test_proposals_past_the_end_of_the_answer_do_not_count():
    lengths = np.array([4, 1, 4])
    assert visited(lengths).tolist() == [0, 4, 5]
    for new, expected in {9: [4, 1, 4], 8: [4, 1, 3], 7: [4, 1, 2]}.items():
        assert within_answer(lengths, new).tolist() == expected
    assert within_answer(np.zeros(0, np.int64), 1).tolist() == []


def test_a_walk_goes_on_behind_what_it_counts():
    assert walked(np.array([2, 4, 1, 3, 4, 2, 1])).tolist() == [2, 1, 3, 1]
    assert walked(np.array([], np.int64)).tolist() == []
