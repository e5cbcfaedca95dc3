"""Penalties and processors: worked out by hand, against the library's, and the same text with drafts as without."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter
from eyas.inference.penalties import Penalties, apply_all
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.tests.inference.heads import FlakyHead, knowing_head, random_prompt
from eyas.tests.toys import tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
MAKERS: dict[str, TreeMaker] = {"chain": ChainTree(4), "static": StaticTree(), "tree": DynamicTree(3, 4, 10)}
KINDS: dict[str, dict[str, object]] = {
    "repetition": {"penalties": Penalties(repetition=1.6)},
    "presence": {"penalties": Penalties(presence=4.0)},
    "frequency": {"penalties": Penalties(frequency=1.5)},
    "all": {"penalties": Penalties(1.3, 0.7, 0.4)},
    "processor": {"processors": (NoRepeatNGramLogitsProcessor(2),)},
}


def test_penalties_worked_out_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0, 0.0])
    # The prompt is 0, 1; generated were 2, 2, 3.
    text = [0, 1, 2, 2, 3]
    found = Penalties(repetition=2.0).apply(logits, text, generated_from=2)
    assert found.tolist() == [1.0, -4.0, 2.0, 0.5, 0.0]
    found = Penalties(presence=0.5, frequency=0.25).apply(logits, text, generated_from=2)
    assert found.tolist() == [2.0, -2.0, 3.0, 0.25, 0.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, 1.0, 0.0]
    assert torch.equal(Penalties(presence=0.5).apply(logits, [0, 1], generated_from=2), logits)


def test_the_repetition_penalty_is_the_librarys() -> None:
    logits, text = torch.randn(97), random_prompt(30, seed=1)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([text]), logits[None].clone())[0]
    assert torch.equal(Penalties(repetition=1.7).apply(logits, list(text), generated_from=4), expected)


def test_processors_follow_the_penalties_in_their_order() -> None:
    seen: list[tuple[list[int], float]] = []

    def double(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((ids[0].tolist(), float(scores[0, 1])))
        return scores * 2

    def add(_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 1

    found = apply_all(
        torch.tensor([1.0, 3.0]), [1, 0], generated_from=0, penalties=Penalties(presence=1.0), processors=(double, add)
    )
    assert found.tolist() == [1.0, 5.0]
    assert seen == [([1, 0], 2.0)]


def test_a_processor_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"a logits processor returned shape \(2,\), not \(1, 2\)"):
        apply_all(
            torch.zeros(2), [0], generated_from=0, penalties=Penalties(), processors=(lambda _ids, scores: scores[0],)
        )


@pytest.mark.parametrize("repetition", [0.0, -1.0])
def test_a_repetition_penalty_that_is_none_is_refused(repetition: float) -> None:
    with pytest.raises(UserError, match="repetition penalty must be above 0"):
        Penalties(repetition=repetition)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_penalised_text_is_the_same_with_and_without_drafts(kind: str, temperature: float, maker: TreeMaker) -> None:
    """Repeats fall inside a round's path, where a penalty of the committed text alone would come too late."""
    stats, changed = AcceptanceStats(maker.depth), 0
    for seed in range(3):
        prompt, sampling = random_prompt(4, seed=seed), Sampling(temperature, seed=seed)
        request = GenerationRequest(prompt, 24, sampling=sampling, **KINDS[kind])  # type: ignore[arg-type]
        plain = Engine(TARGET).generate(request)
        known = [*prompt, *plain.token_ids, *random_prompt(9, seed=9)]
        found = Engine(TARGET, knowing_head(FlakyHead, TARGET, known, seed=seed), maker).generate(request)
        assert found.token_ids == plain.token_ids
        stats += found.stats
        free = Engine(TARGET).generate(GenerationRequest(prompt, 24, sampling=sampling))
        changed += plain.token_ids != free.token_ids
    assert stats.accepted > 20
    assert changed > 0


def test_plain_penalised_decoding_is_the_librarys() -> None:
    for seed in range(3):
        prompt = random_prompt(5, seed=seed)
        expected = TARGET.model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2,
            pad_token_id=0, eos_token_id=None,
        )[0, 5:].tolist()  # fmt: skip
        request = GenerationRequest(
            prompt, 20, penalties=Penalties(repetition=1.5), processors=(NoRepeatNGramLogitsProcessor(2),)
        )
        assert list(Engine(TARGET).generate(request).token_ids) == expected


def test_a_forbidden_bigram_never_appears_from_a_drawn_chain() -> None:
    """The draft model knows no processors, so it proposes repeated bigrams; none may be accepted."""
    target = tiny_target(vocab_size=5, layers=2, aux_layers=())
    for seed in range(20):
        request = GenerationRequest(
            (1, 2), 12, sampling=Sampling(1.0, seed=seed), processors=(NoRepeatNGramLogitsProcessor(2),)
        )
        text = [1, 2, *Engine(target, drafter=ModelDrafter(target, 4)).generate(request).token_ids]
        pairs = list(pairwise(text))
        assert len(set(pairs)) == len(pairs)
