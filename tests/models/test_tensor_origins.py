"""Whose a head's tensors are: trained, the target's rows as they were, in part, maps, zeros, or lent."""

import pytest
import torch

from eyas.models.checkpoint import head_files
from eyas.models.head_files import HeadFiles
from eyas.models.head_layout import EMBEDDINGS
from eyas.models.target import Target
from eyas.models.tensor_origins import LENT, MAPS, OUTPUT, ZEROS, tensor_origins
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target

TARGET = tiny_target()
OWN = "frozen: the target's own rows"


def whose(files: HeadFiles, target: Target = TARGET) -> dict[str, str]:
    return {one.name: one.origin for one in tensor_origins(files, target)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_matrix_is_the_targets_its_own_or_in_between(dtype: torch.dtype) -> None:
    head = tiny_head(TARGET, draft_vocab_size=60)
    assert whose(head_files(head, metadata={}, dtype=dtype))[OUTPUT] == "trained"
    ids = head.to_target_ids(torch.arange(60))
    head.lm_head.weight.data.copy_(TARGET.head.weight_VD[ids])
    assert whose(head_files(head, metadata={}, dtype=dtype))[OUTPUT] == OWN
    head.lm_head.weight.data[:45] += 1.0
    assert whose(head_files(head, metadata={}, dtype=dtype))[OUTPUT] == "trained: 25% of its rows the target's"


def test_every_tensor_of_the_file_is_named_and_what_it_lacks_too() -> None:
    files = head_files(tiny_head(TARGET), metadata={}, dtype=torch.float32)
    found = tensor_origins(files, TARGET)
    assert [one.name for one in found] == [*files.tensors, EMBEDDINGS]
    origins = {one.name: one.origin for one in found}
    assert origins[EMBEDDINGS] == LENT
    assert {origins[name] for name in MAPS} == set(MAPS.values())
    assert {origin for name, origin in origins.items() if name.startswith("midlayer.")} == {"trained"}
    shapes = {one.name: (one.shape, one.dtype) for one in found}
    assert shapes["d2t"] == ((61,), "int64")
    assert shapes[EMBEDDINGS] == ((97, TARGET.config.hidden_size), "float32")


def test_an_eagle1_head_has_no_output_matrix_and_zeros_that_an_engine_reads() -> None:
    origins = whose(head_files(tiny_eagle1(TARGET), metadata={}, dtype=torch.float32))
    assert (origins[OUTPUT], origins[EMBEDDINGS]) == (LENT, LENT)
    assert {name for name, origin in origins.items() if origin == ZEROS} != set()
    assert "trained" in origins.values()
