"""The draft vocabulary: which target tokens a head can propose.

`d2t` holds offsets (target_id = draft_id + d2t[draft_id]) and draft ids ascend with target ids; `t2d` is a mask over
the target vocabulary. A target token outside it counts as a miss in every acceptance number, so coverage is part of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.models.errors import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """Ascending target ids a head proposes (int64 [U]) out of a target vocabulary of `vocab_size`."""

    token_ids_U: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids_U
        if ids.dtype != torch.int64 or ids.ndim != 1 or len(ids) == 0:
            raise UserError(
                f"a draft vocabulary is a non-empty int64 vector, given {ids.dtype} of shape {tuple(ids.shape)}"
            )
        if bool((ids[1:] <= ids[:-1]).any()):
            raise UserError("draft vocabulary ids must ascend without repeats; d2t and t2d disagree otherwise.")
        if int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(
                f"draft vocabulary ids run from {int(ids[0])} to {int(ids[-1])}, outside the target's 0.."
                f"{self.vocab_size - 1}; the map belongs to another tokenizer."
            )

    @classmethod
    def full(cls, vocab_size: int) -> "DraftVocabulary":
        """Return the vocabulary that holds every target token."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_counts(cls, counts_V: Tensor, *, size: int, forced: set[int]) -> "DraftVocabulary":
        """Return exactly `size` tokens: the forced ones first, then the most frequent, then unused ids in order.

        `counts_V`: how often the target generated each token in the corpus. Ties go to the lower id.
        """
        vocab_size = len(counts_V)
        if not 1 <= size <= vocab_size:
            raise UserError(
                f"draft vocabulary size {size} is larger than the vocabulary or not positive: the target has "
                f"{vocab_size} tokens; set head.draft_vocab_size between 1 and {vocab_size}."
            )
        forced = {token for token in forced if 0 <= token < vocab_size}
        if len(forced) > size:
            raise UserError(f"draft vocabulary size {size} cannot hold the {len(forced)} special tokens; raise it.")
        priority = counts_V.to(torch.float64, copy=True)
        priority[sorted(forced)] = float("inf")
        chosen = torch.sort(priority, descending=True, stable=True).indices[:size]
        return cls(chosen.sort().values, vocab_size)

    @classmethod
    def from_d2t(cls, d2t_U: Tensor, vocab_size: int) -> "DraftVocabulary":
        """Return the vocabulary of a checkpoint's offset map; raises UserError on a malformed one."""
        if len(d2t_U) < vocab_size and not bool(d2t_U.any()):
            raise UserError(
                f"d2t is all zeros for a draft vocabulary of {len(d2t_U)} out of {vocab_size} tokens: the map was "
                "never filled in, and the head would propose the first ids of the vocabulary."
            )
        return cls(torch.arange(len(d2t_U)) + d2t_U.to(torch.int64), vocab_size)

    def __len__(self) -> int:
        return len(self.token_ids_U)

    @property
    def d2t_U(self) -> Tensor:
        """int64 offsets: target id minus draft id."""
        return self.token_ids_U - torch.arange(len(self))

    @property
    def t2d_V(self) -> Tensor:
        """Bool mask over the target vocabulary."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.token_ids_U] = True
        return mask

    @property
    def draft_ids_V(self) -> Tensor:
        """int64 [V]: the draft id of each target token, -1 outside."""
        ids = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        ids[self.token_ids_U] = torch.arange(len(self))
        return ids

    def coverage(self, counts_V: Tensor) -> float:
        """Return the share of counted tokens that the vocabulary holds (1.0 for no tokens)."""
        total = float(counts_V.sum())
        return float(counts_V[self.token_ids_U].sum()) / total if total else 1.0
