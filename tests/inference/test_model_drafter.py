"""An independent draft model: its own greedy chain at temperature 0, drawn chains with their q above, exact texts."""

import pytest
import torch
from torch import Tensor

from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter, ModelDrafting
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.models.target import TargetOutput
from eyas.tests.inference.heads import greedy, random_prompt
from eyas.tests.inference.verify_toys import p_value
from eyas.tests.toys import tiny_target

TARGET = tiny_target(layers=3, aux_layers=())
SMALL = tiny_target(layers=2, aux_layers=(), seed=5)
NOTHING = TargetOutput(torch.empty(0), torch.empty(0))


def state(text: list[int], sampling: Sampling, *, depth: int = 4) -> ModelDrafting:
    drafting = ModelDrafting(SMALL, depth)
    drafting.join([(text[0],)], [sampling], capacity=60)
    drafting.extend(0, [text[1:]], NOTHING)
    return drafting


def test_at_temperature_0_the_chain_is_the_models_own_greedy_continuation() -> None:
    text = list(random_prompt(7, seed=1))
    (tree,) = state(text, Sampling()).draft([text[-1]])
    assert tree.tokens_N.tolist() == [text[-1], *greedy(SMALL, tuple(text), 4)]
    assert tree.drawn_KV is None
    ids = torch.tensor([[*text, *tree.tokens_N[1:].tolist()]])
    logp = SMALL.model(input_ids=ids).logits[0].log_softmax(-1)
    steps = [float(logp[6 + i, int(tree.tokens_N[1 + i])]) for i in range(4)]
    assert tree.scores_N.tolist() == pytest.approx([0, *torch.tensor(steps).cumsum(0).tolist()], abs=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8)], ids=str)
def test_above_it_every_token_comes_with_the_distribution_it_was_drawn_from(sampling: Sampling) -> None:
    text = list(random_prompt(5, seed=2))
    drafting, chains = state(text, sampling), set()
    for _ in range(3):
        (tree,) = drafting.draft([text[-1]])
        drafting.rows[0].cached = len(text) - 1  # as after a round that accepts nothing
        tokens = tree.tokens_N[1:].tolist()
        assert tree.drawn_KV is not None
        logits = SMALL.model(input_ids=torch.tensor([[*text, *tokens]])).logits[0]
        expected = torch.stack([sampling.probabilities(logits[4 + i]) for i in range(4)])
        torch.testing.assert_close(tree.drawn_KV, expected, rtol=1e-4, atol=1e-5)
        assert all(float(expected[i, token]) > 0 for i, token in enumerate(tokens))
        chains.add(tuple(tokens))
    assert len(chains) > 1, "every round draws by fresh coins"


def test_the_target_as_its_own_draft_model_is_accepted_whole() -> None:
    for temperature in (0.0, 0.7, 1.0):
        for verifier in ("leviathan", "block"):
            engine = Engine(TARGET, drafter=ModelDrafter(TARGET, 4), drawn_verifier=verifier)
            request = GenerationRequest(random_prompt(6, seed=4), 1 + 5 * 4, sampling=Sampling(temperature))
            generation = engine.generate(request)
            assert generation.stats.tau == 5.0, (temperature, verifier)


def test_another_model_leaves_the_greedy_text_as_it_is() -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 4, 12)]
    engine = Engine(TARGET, drafter=ModelDrafter(SMALL, 3))
    for prompt, found in zip(prompts, engine.generate([GenerationRequest(p, 25) for p in prompts]), strict=True):
        assert list(found.token_ids) == greedy(TARGET, prompt, 25)


V, COUNT, PROMPT = 5, 1500, (3, 1, 4)
TOY, DRAFT = (
    tiny_target(vocab_size=V, layers=1, aux_layers=(), hidden_size=16, head_dim=8, intermediate_size=16, seed=seed)
    for seed in (0, 1)
)


def exact_triples(sampling: Sampling) -> Tensor:
    """Return the target's probability of each triple of first tokens, [V, V, V]."""
    pairs = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    rows = torch.cat((torch.tensor(PROMPT).expand(len(pairs), -1), pairs), dim=1)
    logits = TOY.model(input_ids=rows).logits
    p = torch.stack([torch.stack([sampling.probabilities(v) for v in row[-3:]]) for row in logits])
    p = p.view(V, V, 3, V)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


@pytest.mark.parametrize("verifier", ["leviathan", "block"])
def test_the_engine_emits_the_targets_exact_distribution_for_two_settings_in_one_batch(verifier: str) -> None:
    settings = (Sampling(1.0), Sampling(0.8, top_k=3))
    engine = Engine(TOY, drafter=ModelDrafter(DRAFT, 2), drawn_verifier=verifier, batch=500)
    requests = [
        GenerationRequest(PROMPT, 3, sampling=Sampling(s.temperature, s.top_k, s.top_p, seed))
        for seed in range(COUNT)
        for s in settings
    ]
    counts, accepted = torch.zeros(2, V, V, V), 0
    for i, generation in enumerate(engine.generate(requests)):
        counts[i % 2][generation.token_ids] += 1
        accepted += generation.stats.accepted
    assert accepted > 0.3 * COUNT
    for k, sampling in enumerate(settings):
        assert p_value(counts[k], exact_triples(sampling)) > 1e-3
    assert p_value(counts[0], exact_triples(Sampling(1.6))) < 1e-6


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="the draft model has 98 tokens, the target 97"):
        Engine(TARGET, drafter=ModelDrafter(tiny_target(vocab_size=98, layers=1, aux_layers=()), 3))
    short = tiny_target(layers=1, aux_layers=(), max_position_embeddings=64)
    with pytest.raises(UserError, match="the draft model reads 64 positions, the target 512"):
        Engine(TARGET, drafter=ModelDrafter(short, 3))
    with pytest.raises(UserError, match="a chain needs a depth of at least 1, given 0"):
        ModelDrafter(SMALL, 0)
