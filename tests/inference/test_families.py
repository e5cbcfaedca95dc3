"""Every target family, unchanged: plain decoding is the library's, speculation is plain, an oracle is accepted."""

import pytest
import torch

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.prompt_lookup import PromptLookup
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.head_config import head_config_for
from eyas.models.target import Target
from eyas.models.warm_start import init_random, set_vocabulary
from eyas.tests.inference.heads import random_prompt, table_head
from eyas.tests.models.families import SERVED, family_model

PROMPTS = (random_prompt(9, seed=2), random_prompt(3, seed=5))
COUNT = 31  # far longer than the windows of 6


@pytest.mark.parametrize("name", SERVED)
def test_a_family_is_served_as_it_is(name: str) -> None:
    model = family_model(name)
    target = Target(model, aux_layers=(0, 1, 3))
    texts = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
        texts.append(ids[0, len(prompt) :].tolist())
    requests = [GenerationRequest(prompt, COUNT) for prompt in PROMPTS]
    plain = Engine(target).generate(requests)
    assert [list(generation.token_ids) for generation in plain] == texts
    assert [generation.stats.tau for generation in plain] == [1.0, 1.0]

    oracle = table_head(target, [[*PROMPTS[0], *texts[0]]])
    head = Eagle3Head(head_config_for(target.config, aux_layers=(0, 1, 3), draft_vocab_size=50, intermediate_size=56))
    init_random(head, std=0.3)
    set_vocabulary(head, DraftVocabulary.from_counts(torch.rand(97), size=50, forced=set()))
    for maker in (ChainTree(4), StaticTree(), DynamicTree(4, 3, 12)):
        found = Engine(target, oracle, maker).generate(requests)
        assert [list(generation.token_ids) for generation in found] == texts
        assert {len(made.tokens) for made in found[0].rounds[:-1]} == {maker.depth + 1}
        found = Engine(target, head.eval(), maker).generate(requests)
        assert [list(generation.token_ids) for generation in found] == texts
    found = Engine(target, drafter=PromptLookup(5, 1)).generate(requests)
    assert [list(generation.token_ids) for generation in found] == texts


@pytest.mark.parametrize("name", SERVED)
def test_a_family_made_fast_for_decoding_writes_the_same(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    requests = [GenerationRequest(prompt, COUNT) for prompt in PROMPTS]
    ids = torch.tensor([PROMPTS[0]])
    before = target.forward(ids)
    plain = Engine(target).generate(requests)
    target.pack(rows=12)
    after = target.forward(ids)
    torch.testing.assert_close(after.aux_hidden_BTF, before.aux_hidden_BTF, rtol=1e-3, atol=1e-4)
    texts = [list(generation.token_ids) for generation in plain]
    assert [list(generation.token_ids) for generation in Engine(target).generate(requests)] == texts
    oracle = table_head(target, [[*PROMPTS[0], *texts[0]]])
    found = Engine(target, oracle, DynamicTree(4, 3, 12)).generate(requests)
    assert [list(generation.token_ids) for generation in found] == texts
    assert {len(made.tokens) for made in found[0].rounds[:-1]} == {5}


def test_longrope_targets_end_where_the_whole_forward_would_turn_otherwise() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 5, "long_factor": [4.0] * 5}
    fields = {"rope_parameters": {**rope, "original_max_position_embeddings": 24}}
    model = family_model("phi3", original_max_position_embeddings=24, **fields)
    target = Target(model, aux_layers=(0, 1, 3))
    assert target.position_limit == 24
    prompt = PROMPTS[0]
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False, pad_token_id=0)
    oracle = table_head(target, [ids[0].tolist()])
    for maker in (ChainTree(4), DynamicTree(4, 3, 12)):
        found = Engine(target, oracle, maker).generate(GenerationRequest(prompt, 15))
        assert [*prompt, *found.token_ids] == ids[0].tolist()
        with pytest.raises(UserError, match="exceed the target's 24 positions"):
            Engine(target, oracle, maker).generate(GenerationRequest(prompt, 16))
    assert Target(family_model("llama")).position_limit == 256
