"""The draft vocabulary: exactly the size asked, forced tokens inside, and three views of it that agree."""

import pytest
import torch
from torch import Tensor

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.errors import UserError

COUNTS = torch.tensor([5, 0, 9, 5, 0, 0, 1, 5])


@pytest.mark.parametrize(
    ("size", "forced", "expected"),
    [
        (1, set(), [2]),  # the most frequent
        (2, set(), [0, 2]),  # of the three that tie at 5 the lowest id
        (4, set(), [0, 2, 3, 7]),
        (6, set(), [0, 1, 2, 3, 6, 7]),  # one unused id fills the rest, the lowest
        (8, set(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, {5}, [2, 5]),  # forced before frequent
        (2, {5, 4}, [4, 5]),
        (3, {5, 2, -1, 99}, [0, 2, 5]),  # ids outside the vocabulary take no place
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_from_counts_takes_forced_then_frequent_then_unused(
    size: int, forced: set[int], expected: list[int], dtype: torch.dtype
) -> None:
    counts = COUNTS.to(dtype)
    vocabulary = DraftVocabulary.from_counts(counts, size=size, forced=forced)
    assert vocabulary.token_ids_U.tolist() == expected
    assert torch.equal(counts, COUNTS.to(dtype)), "the caller's counts were changed"


@pytest.mark.parametrize("size", range(1, 9))
def test_the_size_is_exact_whatever_the_counts(size: int) -> None:
    for counts in (torch.zeros(8), torch.ones(8), torch.rand(8), COUNTS):
        vocabulary = DraftVocabulary.from_counts(counts, size=size, forced={7})
        assert len(vocabulary) == size
        assert 7 in vocabulary.token_ids_U


@pytest.mark.parametrize("size", [0, -3, 9])
def test_a_size_outside_the_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=rf"size {size} is larger .*: the target has 8 tokens; .* 1 and 8"):
        DraftVocabulary.from_counts(COUNTS, size=size, forced=set())


def test_more_forced_tokens_than_places_are_refused() -> None:
    with pytest.raises(UserError, match="size 2 cannot hold the 3 special tokens; raise it"):
        DraftVocabulary.from_counts(COUNTS, size=2, forced={1, 4, 5})


@pytest.mark.parametrize("ids", [[1, 3, 4, 9], [0], [9], list(range(10)), [5, 6]])
def test_offsets_mask_and_inverse_agree(ids: list[int]) -> None:
    vocabulary = DraftVocabulary(torch.tensor(ids), 10)
    d2t, t2d, draft_ids = vocabulary.d2t_U, vocabulary.t2d_V, vocabulary.draft_ids_V
    assert [draft + int(offset) for draft, offset in enumerate(d2t)] == ids
    assert d2t.dtype == draft_ids.dtype == torch.int64
    assert [token for token in range(10) if t2d[token]] == ids
    assert [int(draft_ids[token]) for token in ids] == list(range(len(ids)))
    assert bool((draft_ids[~t2d] == -1).all())
    if len(ids) == 10 or ids != list(range(len(ids))):
        assert torch.equal(DraftVocabulary.from_d2t(d2t, 10).token_ids_U, vocabulary.token_ids_U)


def test_the_full_vocabulary_maps_every_token_to_itself() -> None:
    full = DraftVocabulary.full(10)
    assert len(full) == 10
    assert not bool(full.d2t_U.any())
    assert full.draft_ids_V.tolist() == list(range(10))


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.tensor([3, 1, 5]), "must ascend without repeats"),  # ids 3, 2, 7
        (torch.tensor([3, 2, 5]), "must ascend without repeats"),  # ids 3, 3, 7
        (torch.tensor([3, 4, 8]), r"run from 3 to 10, outside the target's 0\.\.9; the map"),
        (torch.tensor([-1, 4, 5]), r"run from -1 to 7, outside"),
        (torch.zeros(3, dtype=torch.int64), r"d2t is all zeros for a draft vocabulary of 3 out of 10 tokens"),
    ],
)
def test_a_malformed_map_is_refused(d2t: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DraftVocabulary.from_d2t(d2t, 10)


@pytest.mark.parametrize("ids", [torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([], dtype=torch.int64)])
def test_ids_that_are_no_vector_of_int64_are_refused(ids: Tensor) -> None:
    with pytest.raises(UserError, match="a draft vocabulary is a non-empty int64 vector, given torch"):
        DraftVocabulary(ids, 10)


def test_coverage_is_the_share_of_tokens_inside() -> None:
    vocabulary = DraftVocabulary(torch.tensor([0, 2]), 8)
    assert vocabulary.coverage(COUNTS) == 14 / 25
    assert DraftVocabulary.full(8).coverage(COUNTS) == 1.0
    assert vocabulary.coverage(torch.zeros(8)) == 1.0
    assert vocabulary.coverage(torch.tensor([0, 1, 0, 0, 0, 0, 0, 0])) == 0.0
