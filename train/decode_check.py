"""Real decoding while training: a few held-out prompts with the runtime itself, beside what replay says of all rows."""

from dataclasses import dataclass

import torch

from eyas.data.feature_row import RowSource
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.draft_head import DraftHead
from eyas.models.target import Target
from eyas.train.validation import drafting_copy, generated_spans


@dataclass(frozen=True)
class DecodeCheck:
    """Some requests and how their drafts are made; `dtype` is what the head drafts in."""

    target: Target
    requests: list[GenerationRequest]
    depth: int
    tree: DynamicTree
    dtype: torch.dtype

    def __call__(self, head: DraftHead) -> dict[str, float]:
        """Return the tau of really decoding the requests at T=0, by chain and by tree."""
        drafter = drafting_copy(head, dtype=self.dtype, rows=self.tree.top_k)
        taus = {}
        methods: dict[str, TreeMaker] = {"decoded_tau": ChainTree(self.depth), "decoded_tree_tau": self.tree}
        for name, maker in methods.items():
            stats = AcceptanceStats(maker.depth)
            for generation in Engine(self.target, drafter, maker).generate(self.requests):
                stats += generation.stats
            taus[name] = stats.tau
        return taus


def first_replies(rows: RowSource, *, count: int, stop_ids: frozenset[int]) -> list[GenerationRequest]:
    """Return requests for the first reply of the first `count` rows, of the length it has there."""
    requests = []
    for index in range(min(count, len(rows))):
        row = rows.tokens(index)
        first, last = generated_spans(row.generated_mask_T)[0]
        requests.append(GenerationRequest(tuple(row.input_ids_T[:first].tolist()), last - first + 1, stop_ids))
    return requests
