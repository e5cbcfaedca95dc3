"""The runtime at temperature 1: the text of plain sampling with the same seed, and the target's exact distribution."""

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.sampling import Sampling
from eyas.models.target import Target
from eyas.tests.inference.heads import FlakyHead, fixed_head, greedy, knowing_head, random_prompt
from eyas.tests.toys import tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
MAKERS: dict[str, TreeMaker] = {"chain": ChainTree(4), "tree": DynamicTree(3, 4, 10), "wide": DynamicTree(2, 6, 30)}
SAMPLINGS = {
    "plain": Sampling(1.0),
    "top-k and top-p": Sampling(0.8, top_k=20, top_p=0.9),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_the_same_seed_gives_the_text_of_plain_sampling(maker: TreeMaker, sampling: Sampling) -> None:
    stats, texts = AcceptanceStats(maker.depth), set()
    for seed in range(4):
        prompt = random_prompt(3 + seed, seed=seed)
        seeded = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        request = GenerationRequest(prompt, 18, frozenset({2}), seeded)
        plain = Engine(TARGET).generate(request)
        head = knowing_head(FlakyHead, TARGET, [*prompt, *plain.token_ids, *random_prompt(9, seed=3)], seed=seed)
        generation = Engine(TARGET, head, maker).generate(request)
        assert generation.token_ids == plain.token_ids
        assert generation.finish_reason == plain.finish_reason
        stats += generation.stats
        texts.add(plain.token_ids)
    assert stats.accepted >= 10, "drafts that are never accepted test nothing"
    assert len(texts) == 4


def test_the_seed_decides_the_text() -> None:
    request = [GenerationRequest((5, 6, 7), 12, sampling=Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    texts = [Engine(TARGET).generate(r).token_ids for r in request]
    assert texts[0] == texts[1] != texts[2]


def test_temperature_is_honoured_by_every_method() -> None:
    """Near temperature 0 the sampled text is the greedy one."""
    prompt = random_prompt(5, seed=1)
    for maker in (None, *MAKERS.values()):
        engine = Engine(TARGET, None if maker is None else tiny_head(TARGET), maker)
        cold = engine.generate(GenerationRequest(prompt, 10, sampling=Sampling(1e-4)))
        assert list(cold.token_ids) == greedy(TARGET, prompt, 10)


V, COUNT = 8, 320
PROMPT = (3, 1, 4, 1, 5)
SMALL = tiny_target(vocab_size=V, layers=1, aux_layers=(0, 1), hidden_size=16, head_dim=8, intermediate_size=16)


def exact_pairs(target: Target, sampling: Sampling) -> Tensor:
    """Return the exact probability of each pair of first two tokens, [V, V]."""
    rows = torch.tensor([[*PROMPT, token] for token in range(V)])
    logits = target.head.logits(target.forward(rows).final_hidden_BTD)
    first = sampling.probabilities(logits[0, -2])
    second = torch.stack([sampling.probabilities(row[-1]) for row in logits])
    return first[:, None] * second


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of counts under expected ones; cells under 5 are pooled, impossible cells must be empty."""
    assert float(counts[expected == 0].sum()) == 0
    small = (expected < 5) & (expected > 0)
    cells = torch.cat((counts[expected >= 5], counts[small].sum()[None]))
    truth = torch.cat((expected[expected >= 5], expected[small].sum()[None]))
    return float(chisquare(cells.double().numpy(), truth.double().numpy()).pvalue)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (1.4, 5, 0.9)])
@pytest.mark.parametrize("maker", [ChainTree(2), DynamicTree(2, 3, 7)], ids=["chain", "tree"])
def test_the_first_two_tokens_have_the_targets_exact_distribution(
    maker: TreeMaker, temperature: float, top_k: int, top_p: float
) -> None:
    # The likeliest second tokens over all first ones are drafted, so that a good part of them is accepted.
    likely = exact_pairs(SMALL, Sampling(temperature, top_k, top_p)).sum(0)
    engine = Engine(SMALL, fixed_head(SMALL, likely.log().clamp(min=-30).float()), maker)
    counts, accepted = torch.zeros(V, V), 0
    for seed in range(COUNT):
        sampling = Sampling(temperature, top_k, top_p, seed)
        generation = engine.generate(GenerationRequest(PROMPT, 2, sampling=sampling))
        counts[generation.token_ids] += 1
        accepted += generation.stats.accepted
    assert 0.1 * COUNT < accepted < 0.95 * COUNT
    truth = COUNT * exact_pairs(SMALL, sampling)
    assert p_value(counts, truth) > 1e-3
    # The same counts are far from what the target would say at another temperature.
    assert p_value(counts, COUNT * exact_pairs(SMALL, Sampling(2.5 * temperature))) < 1e-6
