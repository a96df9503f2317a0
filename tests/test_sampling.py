"""Sampling is lossless: whatever the drafter proposes, the tokens have the target's own distribution."""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import small_targets
import torch
from drafters import drafter_config, make_drafter

from ds_dflash import sampling
from ds_dflash.decode import Drafter, SpeculativeDecoder, plain
from ds_dflash.sampling import Greedy, Sampler, acceptance, draw, make_chooser, probabilities, residual

VOCABULARY, NEW, SAMPLES, TEMPERATURE = 5, 3, 2000, 1.3
PROMPT = torch.tensor([2, 0, 4, 1])
BOUND = 1e-4  # a right sampler's p-value is below it once in 10,000 seeds; the seed is fixed


def distributions(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.6), shape))


PAIRS = {
    "apart": (distributions(seed=1), distributions(seed=2)),
    "equal": (distributions(seed=3), distributions(seed=3)),
    "never proposed": (distributions(seed=4), torch.tensor([0, 0, 0.3, 0.7, 0], dtype=torch.float64)),
    "never wanted": (torch.tensor([0, 0, 0.3, 0.7, 0], dtype=torch.float64), distributions(seed=5)),
    "disjoint": (torch.tensor([0.5, 0.5, 0, 0, 0]).double(), torch.tensor([0, 0, 0.25, 0.25, 0.5]).double()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_accepting_or_drawing_again_gives_exactly_the_targets_distribution(pair):
    target, draft = PAIRS[pair]
    accepted = acceptance(target, draft)
    assert ((accepted >= 0) & (accepted <= 1)).all()
    rest = residual(target, draft)
    rejected = (draft * (1 - accepted)).sum()
    torch.testing.assert_close(draft * accepted + rejected * rest / rest.sum(), target, rtol=1e-12, atol=1e-12)


def test_a_residual_that_rounding_leaves_empty_is_the_target_itself():
    target = torch.tensor([0.2, 0.3, 0.5]).double()
    assert torch.equal(residual(target, target + 1e-17), target)
    assert torch.equal(residual(target, target * (1 + 1e-15)), target)


@pytest.mark.parametrize("weights", [[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [0.0, 1e-300, 0.0], [3.0, 1.0, 0.0]])
def test_a_draw_takes_each_index_for_the_share_of_uniforms_that_it_weighs(weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    uniforms = (torch.arange(1000).double() + 0.5) / 1000
    drawn = draw(weights.expand(1000, -1), uniforms)
    shares = torch.bincount(drawn, minlength=len(weights)) / 1000
    torch.testing.assert_close(shares.double(), weights / weights.sum(), rtol=0, atol=2e-3)
    edges = draw(weights.expand(2, -1), torch.tensor([0.0, np.nextafter(1.0, 0.0)]).double())
    assert (weights[edges] > 0).all()


def test_an_extreme_temperature_is_greedy_or_uniform_and_never_nan():
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1, 0.0]])
    assert probabilities(logits, 1e-300).tolist() == [[1, 0, 0, 0]]
    torch.testing.assert_close(probabilities(logits, 1e300), torch.full((1, 4), 0.25).double())


def test_temperature_0_is_greedy():
    assert isinstance(make_chooser(0.0, 3, 1), Greedy)
    assert isinstance(make_chooser(0.1, 3, 1), Sampler)


def test_the_random_numbers_follow_from_seed_and_index_and_from_nothing_else():
    logits = torch.zeros(1000)

    def draws(seed, index):
        sampler = Sampler(1.0, seed, index)
        return [sampler.first(logits) for _ in range(4)]

    assert draws(1, 2) == draws(1, 2)
    assert len({tuple(draws(seed, index)) for seed in range(3) for index in range(3)}) == 9


def test_as_many_random_numbers_are_drawn_whatever_is_accepted():
    """Else a rounding difference that flips one acceptance would change all that follows at once."""
    logits, proposal = torch.zeros(4, 9), torch.tensor([1, 2, 3])
    following = set()
    for favoured in range(9):
        sampler = Sampler(1.0, 0, 0)
        sampler.commit(proposal, logits[:3], logits + 50.0 * torch.nn.functional.one_hot(torch.tensor(favoured), 9))
        following.add(sampler.first(torch.zeros(10_000)))
    assert len(following) == 1


class Table:
    """Stands in for a drafter: the logits of its slots hang on the anchor's position only."""

    def __init__(self, logits):
        self.table, self.layer_ids, self.block_size = logits, [0], 4

    def extend(self, contexts, features):
        for context, part in zip(contexts, features, strict=True):
            context.length += len(part)

    def logits(self, anchor_tokens, contexts):
        return torch.stack([self.table[context.length - len(PROMPT)] for context in contexts])


@cache
def target():
    fields = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "initializer_range": 0.5}
    return small_targets.build(small_targets.qwen3, seed=3, vocab_size=VOCABULARY, **fields)


@cache
def own_distribution():
    """Probability of every answer of NEW tokens, by whole forwards: float64 [V, V, V]."""
    answers = torch.tensor(list(product(range(VOCABULARY), repeat=NEW)))
    logits = target()(input_ids=torch.cat([PROMPT.expand(len(answers), -1), answers], 1)).logits[:, len(PROMPT) - 1 :]
    logs = (logits.double() / TEMPERATURE).log_softmax(-1)[:, :NEW].gather(2, answers[..., None])
    return logs.sum((1, 2)).exp().view(VOCABULARY, VOCABULARY, VOCABULARY)


def drafters():
    """One right in part (the target's own marginal distribution of each place), a wrong one and a real one."""
    own = own_distribution()
    places = torch.stack([own.sum((1, 2)), own.sum((0, 2)), own.sum((0, 1)), *distributions(4, seed=8)])
    logits = places.log() * TEMPERATURE
    config = drafter_config(vocab_size=VOCABULARY, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 1]})
    return {
        "partly right": lambda: Table(torch.stack([logits[1:4], logits[2:5], logits[3:6]])),
        "wrong": lambda: Table(6 * torch.from_numpy(np.random.default_rng(5).normal(size=(3, 3, VOCABULARY)))),
        "real": lambda: Drafter(make_drafter(config, seed=1), target()),
    }


def choosers(seed):
    return [Sampler(TEMPERATURE, seed, index) for index in range(SAMPLES)]


def answers(generations):
    return Counter(tuple(generation.output_ids[len(PROMPT) :].tolist()) for generation in generations)


def sample(name):
    """Counted answers to one prompt, all in a batch, and the acceptance lengths of their steps."""
    decoder = SpeculativeDecoder(target(), drafters()[name]())
    options = {"max_new_tokens": NEW, "stop_ids": (), "choosers": choosers(11)}
    generations = decoder.generate_batch([PROMPT] * SAMPLES, **options)
    return answers(generations), np.concatenate([generation.acceptance_lengths for generation in generations])


def p_value(found):
    """Pearson's chi-square of counted answers against `own_distribution`; rare answers share one cell."""
    expected = own_distribution().flatten() * SAMPLES
    observed = torch.tensor([found[answer] for answer in product(range(VOCABULARY), repeat=NEW)]).double()
    common = expected >= 5
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def test_the_enumerated_distribution_is_one_and_has_many_likely_answers():
    own = own_distribution()
    assert float(own.sum()) == pytest.approx(1, abs=1e-6)
    assert (own * SAMPLES >= 5).sum() > 30


def test_sampled_answers_have_the_targets_own_distribution_whatever_the_drafter():
    acceptance_length = {}
    for name in drafters():
        found, accepted = sample(name)
        assert p_value(found) > BOUND, name
        assert len(set(accepted.tolist())) == 4, name  # every number of accepted slots took part
        acceptance_length[name] = accepted.mean()
    assert acceptance_length["partly right"] > acceptance_length["wrong"] + 0.2


def test_plain_sampling_has_the_same_distribution():
    options = {"max_new_tokens": NEW, "stop_ids": (), "choosers": choosers(12)}
    assert p_value(answers(plain(target(), [PROMPT] * SAMPLES, **options))) > BOUND


@pytest.mark.parametrize(
    ("part", "replacement"),
    [
        ("acceptance", lambda target, draft: torch.ones_like(target)),
        ("acceptance", lambda target, draft: target),  # as if the proposal were one draw of many
        ("residual", lambda target, draft: target),  # the rejected slot drawn without subtracting q
    ],
    ids=["always accepts", "accepts by p alone", "does not subtract q"],
)
def test_the_distribution_test_finds_a_sampler_that_is_wrong(monkeypatch, part, replacement):
    monkeypatch.setattr(sampling, part, replacement)
    found, _ = sample("wrong")
    assert p_value(found) < BOUND / 100
