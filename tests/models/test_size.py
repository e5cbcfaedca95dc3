"""Parameters counted from a config equal those of the model itself; experts and embeddings count as they are used."""

import pytest
from transformers import PreTrainedConfig

from eyas.models.errors import UserError
from eyas.models.size import target_size
from eyas.tests.models.families import SERVED, family_config, family_model
from eyas.tests.toys import tiny_config


@pytest.mark.parametrize("name", SERVED)
def test_every_family_is_counted_without_its_weights(name: str) -> None:
    size = target_size(family_config(name))
    assert size.parameters == sum(parameter.numel() for parameter in family_model(name).parameters())


def test_the_embedding_is_looked_up_and_only_a_tied_one_is_multiplied() -> None:
    untied, tied = target_size(tiny_config()), target_size(tiny_config(tie_word_embeddings=True))
    assert untied.parameters - tied.parameters == 97 * 40
    assert untied.active == tied.active == tied.parameters
    assert (untied.embedding, untied.kv_per_token) == (97 * 40, 2 * 5 * 2 * 16)


def test_a_token_passes_through_the_experts_it_is_routed_to() -> None:
    whole, size = family_config("mixtral"), target_size(family_config("mixtral"))
    experts = whole.num_hidden_layers * whole.num_local_experts * 3 * whole.hidden_size * whole.intermediate_size
    assert size.active == size.parameters - size.embedding - experts // 2  # 2 of 4 experts, the embedding is untied
    assert size.mlp_width == 2 * whole.intermediate_size


def test_a_family_without_a_causal_model_is_named() -> None:
    class Unheard(PreTrainedConfig):
        model_type = "unheard"

    with pytest.raises(UserError, match="cannot count the parameters of a unheard target"):
        target_size(Unheard())
