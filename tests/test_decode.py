"""Speculative decoding gives the target's own greedy output, and accepts what a plain loop accepts."""

from functools import cache, partial

import numpy as np
import pytest
import small_targets
import torch
from drafters import drafter_config, make_drafter, sliding

from ds_dflash.attention import BlockLayout
from ds_dflash.decode import DraftContext, Drafter, Generation, SpeculativeDecoder, compare, greedy
from ds_dflash.errors import UserError

TAPS = [1, 3]
MODELS = {
    "qwen3": small_targets.qwen3,
    "llama_tied": small_targets.llama_tied,
    "moe": small_targets.moe,
    "hybrid": small_targets.hybrid,  # its linear attention cannot be cropped: snapshot and replay
    "windows": partial(
        small_targets.qwen3,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
}
EVERY_MODEL = pytest.mark.parametrize("kind", MODELS)


class Echo:
    """Stands in for a drafter: proposes the target's own continuations, wrong in some slots of its choice.

    continuations: what each prompt of a batch becomes; wrong: for each, the wrong slots of one step after another.
    """

    def __init__(self, continuations, wrong):
        self.continuations, self.wrong = continuations, wrong
        self.layer_ids, self.block_size = TAPS, 4
        self.steps = [0] * len(wrong)
        self.features = []  # of each prompt, part after part

    def extend(self, contexts, features):
        for context, part in zip(contexts, features, strict=True):
            if not context.length:  # prompts are prefilled in their order
                context.row = len(self.features)
                self.features.append([])
            self.features[context.row].append(part)
            context.length += len(part)

    def logits(self, anchor_tokens, contexts):
        proposals = [self._propose(token, context) for token, context in zip(anchor_tokens, contexts, strict=True)]
        return torch.nn.functional.one_hot(torch.stack(proposals), small_targets.VOCABULARY).float()

    def _propose(self, anchor_token, context):
        row, position = context.row, context.length
        assert self.continuations[row][position] == anchor_token
        proposal = self.continuations[row][position + 1 : position + 4].clone()
        for slot in self.wrong[row][self.steps[row] % len(self.wrong[row])]:
            proposal[slot] = (proposal[slot] + 1) % small_targets.VOCABULARY
        self.steps[row] += 1
        return proposal


def drafter_for(target, **fields):
    text = target.config.get_text_config()
    shared = {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size}
    return drafter_config(**shared, dflash_config={"mask_token_id": 3, "target_layer_ids": TAPS}, **fields)


@cache
def target_of(kind):
    return small_targets.build(MODELS[kind], seed=1)


def prompt_of(length=9, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(5, small_targets.VOCABULARY, length))


@cache
def own_output(kind, length=9):
    """`prompt_of(length)` and the target's next 32 tokens: one whole forward a token, without any cache."""
    target, ids = target_of(kind), prompt_of(length)
    for _ in range(32):
        ids = torch.cat([ids, target(input_ids=ids[None]).logits[0, -1:].argmax(-1)])
    return ids


@EVERY_MODEL
def test_greedy_equals_whole_forwards_without_a_cache(kind):
    target, prompt = target_of(kind), prompt_of()
    generation = greedy(target, prompt, max_new_tokens=15, stop_ids=())
    assert torch.equal(generation.output_ids, own_output(kind)[: 9 + 15])
    assert len(generation.tie_margins) == 15
    assert (generation.tie_margins >= 0).all()


@EVERY_MODEL
@pytest.mark.parametrize("drafter_fields", [{}, sliding(6)], ids=["full", "sliding"])
def test_speculative_output_is_the_targets_own(kind, drafter_fields):
    target = target_of(kind)
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target, **drafter_fields)), target))
    for length in (1, 9):
        prompt = prompt_of(length)
        generation = decoder.generate(prompt, max_new_tokens=12, stop_ids=())
        assert torch.equal(generation.output_ids, own_output(kind, length)[: length + 12])


@EVERY_MODEL
def test_what_is_accepted_is_the_run_of_right_proposals_and_the_output_stays_the_targets(kind):
    """Every number of right slots, after every other: caches go back to what is committed, whatever was tried."""
    target, prompt = target_of(kind), prompt_of()
    continuation = own_output(kind)
    wrong = [[0], [1], [], [2], [0, 2], [], [], [1, 2], [0]]
    decoder = SpeculativeDecoder(target, Echo([continuation], [wrong]))
    generation = decoder.generate(prompt, max_new_tokens=24, stop_ids=())
    assert torch.equal(generation.output_ids, continuation[: len(prompt) + 24])
    lengths = [1 + min(slots, default=3) for slots in wrong]
    expected = []
    while 1 + sum(expected) < 24:
        expected.append(lengths[len(expected) % len(lengths)])
    assert generation.acceptance_lengths.tolist() == expected


def simple_loop(target, model, prompt, count):
    """Speculative decoding from its definition: whole forwards of target and drafter, no caches."""
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    ids, lengths = torch.cat([prompt, target(input_ids=prompt[None]).logits[0, -1:].argmax(-1)]), []
    while len(ids) < len(prompt) + count:
        anchor = len(ids) - 1
        hidden = target(input_ids=ids[None], output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)
        layout = BlockLayout((0, len(ids)), (0, 1), torch.tensor([anchor]), 4)  # the anchor's own feature is not seen
        block = torch.tensor([[int(ids[-1]), 3, 3, 3]])
        proposal = (model(features, embedding[block], layout)[0, 1:] @ head.T).argmax(-1)
        own = target(input_ids=torch.cat([ids, proposal])[None]).logits[0, anchor:].argmax(-1)
        accepted = 0
        while accepted < 3 and proposal[accepted] == own[accepted]:
            accepted += 1
        ids = torch.cat([ids, own[: accepted + 1]])
        lengths.append(accepted + 1)
    return ids[: len(prompt) + count], lengths


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "llama_tied", "hybrid"])
def test_acceptance_lengths_equal_those_of_a_loop_without_caches(kind):
    target = small_targets.build(MODELS[kind], seed=2, vocab_size=6)  # few ids: a random drafter is sometimes right
    seen = set()
    for seed in range(2):
        model, prompt = make_drafter(drafter_for(target), seed=seed), prompt_of(seed=seed) % 6
        decoder = SpeculativeDecoder(target, Drafter(model, target))
        generation = decoder.generate(prompt, max_new_tokens=20, stop_ids=())
        ids, lengths = simple_loop(target, model, prompt, 20)
        assert torch.equal(generation.output_ids, ids)
        assert generation.acceptance_lengths.tolist() == lengths
        seen.update(lengths)
    assert len(seen) > 1


@EVERY_MODEL
def test_decoding_ends_with_the_first_stop_id(kind):
    target, prompt = target_of(kind), prompt_of()
    continuation = own_output(kind)
    stop = int(continuation[len(prompt) + 7])
    first = int((continuation[len(prompt) :] == stop).nonzero()[0])
    expected = continuation[: len(prompt) + first + 1]
    for stop_ids in ((stop,), (stop, small_targets.VOCABULARY + 5)):
        decoder = SpeculativeDecoder(target, Echo([continuation], [[[], [1]]]))
        generation = decoder.generate(prompt, max_new_tokens=25, stop_ids=stop_ids)
        assert torch.equal(generation.output_ids, expected)
        assert torch.equal(greedy(target, prompt, max_new_tokens=25, stop_ids=stop_ids).output_ids, expected)


def test_a_stop_id_in_the_prompt_ends_nothing():
    target, prompt = target_of("qwen3"), prompt_of()
    absent = set(range(small_targets.VOCABULARY)) - set(own_output("qwen3")[9:19].tolist())
    stop = (absent & set(prompt.tolist())).pop()
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target)), target))
    assert len(decoder.generate(prompt, max_new_tokens=10, stop_ids=(stop,)).output_ids) == len(prompt) + 10
    assert len(greedy(target, prompt, max_new_tokens=10, stop_ids=(stop,)).output_ids) == len(prompt) + 10


def test_an_answer_of_one_token_needs_no_draft():
    target, prompt = target_of("qwen3"), prompt_of()
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target)), target))
    first = int(own_output("qwen3")[9])
    for options in ({"max_new_tokens": 1, "stop_ids": ()}, {"max_new_tokens": 9, "stop_ids": (first,)}):
        generation = decoder.generate(prompt, **options)
        assert torch.equal(generation.output_ids, own_output("qwen3")[:10])
        assert len(generation.acceptance_lengths) == 0


@pytest.mark.parametrize("broken", ["target", "drafter"])
def test_logits_that_are_not_finite_are_refused_and_not_called_equal(broken):
    target = small_targets.build(MODELS["qwen3"], seed=1)
    model = make_drafter(drafter_for(target))
    norm = target.model.norm if broken == "target" else model.norm
    norm.weight.data.fill_(float("nan"))
    decoder = SpeculativeDecoder(target, Drafter(model, target))
    with pytest.raises(UserError, match=f"logits of the {broken} are not finite in float32"):
        decoder.generate(prompt_of(), max_new_tokens=5, stop_ids=())
    if broken == "target":
        with pytest.raises(UserError, match="logits of the target"):
            greedy(target, prompt_of(), max_new_tokens=5, stop_ids=())


def test_hooks_are_gone_when_decoding_is_over():
    target, prompt = small_targets.build(MODELS["qwen3"]), prompt_of()  # transformers leaves hooks of its own on others
    decoder = SpeculativeDecoder(target, Drafter(make_drafter(drafter_for(target)), target))
    decoder.generate(prompt, max_new_tokens=5, stop_ids=())
    assert not any(layer._forward_hooks for layer in target.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, sliding(5)], ids=["full", "sliding"])
def test_a_training_blocks_logits_equal_those_of_decoding_at_that_position(fields):
    target = target_of("qwen3")
    model = make_drafter(drafter_for(target, **fields))
    drafter, ids, anchors = Drafter(model, target), prompt_of(20), [0, 4, 5, 13, 19]
    hidden = target(input_ids=ids[None], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[tap + 1][0] for tap in TAPS], -1)
    blocks = torch.full((len(anchors), 4), 3)
    blocks[:, 0] = ids[anchors]
    layout = BlockLayout((0, 20), (0, len(anchors)), torch.tensor(anchors), 4)
    trained = model(features, drafter.embedding[blocks], layout)[:, 1:] @ drafter.head.T
    for block, anchor in enumerate(anchors):
        context = DraftContext()
        drafter.extend([context], [features[:anchor]])
        served = drafter.logits(ids[anchor][None], [context])
        torch.testing.assert_close(served[0], trained[block], rtol=1e-5, atol=1e-5)


def generation(ids, margins=None):
    return Generation(torch.tensor(ids), np.zeros(0, np.int64), np.array(margins or [1.0] * len(ids)))


def test_compare_tells_equal_tie_and_different_apart():
    margins = [0.5, 1e-4, 0.5, 1e-2]
    reference = generation([9, 9, 1, 2, 3, 4], margins)
    cases = {
        "equal": [[1, 2, 3, 4]],
        "tie": [[1, 7, 3, 4], [1, 7, 8, 9], [1, 7]],
        "different": [[7, 2, 3, 4], [1, 2, 7, 4], [7, 7, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 7]],
    }
    for verdict, outputs in cases.items():
        for output in outputs:
            assert compare(generation([9, 9, *output]), reference, 2, torch.float32) == verdict, output
    assert compare(generation([9, 9, 1, 2, 3, 7]), reference, 2, torch.bfloat16) == "tie"


def test_the_margin_of_a_tie_is_relative_to_the_largest_logit():
    target = target_of("qwen3")
    margins = greedy(target, prompt_of(), max_new_tokens=3, stop_ids=()).tie_margins
    ids = own_output("qwen3")
    for step, margin in enumerate(margins):
        logits = target(input_ids=ids[None, : 9 + step]).logits[0, -1].sort(descending=True).values
        assert margin == pytest.approx(float((logits[0] - logits[1]) / logits[0].abs()), rel=1e-3)
