"""Drafting with an independent small language model that shares the target's tokenizer: the classic draft model.

It reads text alone. At temperature 0 its chain is its own greedy continuation; above, every token is drawn from its
distribution q under the request's own settings, and the tree carries q so that verification can be exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.inference.sampling import DRAFT_SEED, Coins, Sampling, probabilities
from eyas.inference.tree import DraftTree
from eyas.models.draw import draw
from eyas.models.errors import UserError
from eyas.models.kv_cache import KVCache
from eyas.models.target import Target, TargetOutput


@dataclass(frozen=True)
class ModelDrafter:
    """A draft model (loaded like a target, without aux layers) that proposes chains of `depth` tokens."""

    model: Target
    depth: int

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise UserError(f"a chain needs a depth of at least 1, given {self.depth}.")

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    def check(self, target: Target) -> None:
        """Raise UserError unless both models have the same number of tokens; their meaning is the caller's matter."""
        if self.model.vocab_size != target.vocab_size:
            raise UserError(
                f"the draft model has {self.model.vocab_size} tokens, the target {target.vocab_size}; they must share "
                "one tokenizer."
            )
        if self.model.position_limit < target.position_limit:
            raise UserError(
                f"the draft model reads {self.model.position_limit} positions, the target {target.position_limit}; "
                "it must read as many."
            )

    def open(self) -> "ModelDrafting":
        return ModelDrafting(self.model, self.depth)


@dataclass
class _Row:
    """The committed text, how many of its tokens are in the cache, and what was drafted behind it."""

    text: list[int]
    sampling: Sampling
    coins: Coins
    cached: int = 0
    drafted: tuple[int, ...] = ()
    coins_used: int = 0


class ModelDrafting:
    """The drafting state of a session's rows."""

    def __init__(self, model: Target, depth: int) -> None:
        self.model = model
        self.depth = depth
        self.rows: list[_Row] = []
        self.cache: KVCache | None = None

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self.rows.append(_Row([prompt[0]], sampling, Coins(sampling.seed + DRAFT_SEED)))
        capacity += self.depth + 2  # the chain, and the padding of rows that catch up
        if self.cache is None:
            self.cache = self.model.new_cache(batch=len(self.rows), capacity=capacity)
        self.cache.grow(batch=len(self.rows), capacity=capacity)

    @torch.inference_mode()
    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        fed = self.rows[first : first + len(next_tokens)]
        for row, tokens in zip(fed, next_tokens, strict=True):
            # The cache holds the drafts that were run; those the target accepted are committed text now.
            same = next((i for i, (a, b) in enumerate(zip(row.drafted, tokens, strict=False)) if a != b), None)
            agreed = min(len(row.drafted), len(tokens)) if same is None else same
            row.cached = min(row.cached, len(row.text) + agreed)
            row.text += tokens
            row.drafted = ()
        if self.rows[first].cached == 0:  # new rows read their prompts by themselves, so that nobody is padded to them
            self._read([row.text[:-1] for row in fed], first=first)

    @torch.inference_mode()
    def draft(self, roots: list[int]) -> list[DraftTree]:
        tokens: list[list[int]] = [[] for _ in self.rows]
        scores: list[list[float]] = [[] for _ in self.rows]
        drawn: list[list[Tensor]] = [[] for _ in self.rows]
        for level in range(self.depth):
            logits_RV = self._read(
                [[*row.text, *new][row.cached :] for row, new in zip(self.rows, tokens, strict=True)]
            )
            log_q_RV = torch.log_softmax(logits_RV.float(), -1)
            chosen = logits_RV.argmax(-1).tolist()
            hot = [r for r, row in enumerate(self.rows) if row.sampling.temperature > 0]
            if hot:
                q_AV = probabilities(logits_RV[hot], [self.rows[r].sampling for r in hot]).cpu()
                coins = [self.rows[r].coins.take(self.rows[r].coins_used + level, 1) for r in hot]
                for r, q_V, token in zip(hot, q_AV, draw(q_AV, torch.tensor(coins).flatten()).tolist(), strict=True):
                    chosen[r] = token
                    drawn[r].append(q_V)
            total = [log_q_V[token] for log_q_V, token in zip(log_q_RV, chosen, strict=True)]
            for r, token in enumerate(chosen):
                scores[r].append(float(total[r]) + (scores[r][-1] if scores[r] else 0.0))
                tokens[r].append(token)
        trees = []
        for r, (row, root) in enumerate(zip(self.rows, roots, strict=True)):
            row.drafted = tuple(tokens[r])
            row.coins_used += self.depth
            trees.append(
                DraftTree.chain(root, tokens[r], scores[r], drawn_KV=torch.stack(drawn[r]) if drawn[r] else None)
            )
        return trees

    def leave(self, row: int) -> None:
        last = len(self.rows) - 1
        if row != last:
            assert self.cache is not None
            self.cache.move_row(last, row)
            self.rows[row] = self.rows[last]
        self.rows.pop()

    def _read(self, new: list[list[int]], *, first: int = 0) -> Tensor:
        """Run the next tokens of rows first, first+1, ... and return the logits_RV behind each row's last one."""
        assert self.cache is not None
        rows = self.rows[first : first + len(new)]
        device, longest = self.model.device, max(map(len, new))
        ids_RT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in new])
        slots_RT = torch.tensor([row.cached for row in rows])[:, None] + torch.arange(longest)
        mask_R1TL = torch.arange(int(slots_RT.max()) + 1) <= slots_RT[:, None, :, None]
        limit = self.model.position_limit - 1  # what lies past it is cut by the request's limit anyway
        self.cache.write_rows_at(slice(first, first + len(new)), slots_RT.to(device))
        out = self.model.forward(
            ids_RT.to(device),
            position_ids_BT=slots_RT.clamp(max=limit).to(device),
            mask_B1TL=mask_R1TL.to(device),
            cache=self.cache,
        )
        for row, tokens in zip(rows, new, strict=True):
            row.cached += len(tokens)
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=device)
        return self.model.head.logits(out.final_hidden_BTD[torch.arange(len(new), device=device), last])
