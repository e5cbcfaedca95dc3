"""The runtime: draft, one target forward over the tree, verify, keep the accepted path, feed the head again.

A round starts with all tokens but the last (the root) in both caches. Without a head the tree is the root alone, which
is plain decoding on the same code: the baseline of every speed number. Batch 1.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import EagleDrafter, TreeMaker
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.verify import VERIFIERS
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.kv_cache import KVCache
from eyas.models.target import Target


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue by at most `max_new_tokens`; any of `stop_ids` ends it (and is returned)."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_new_tokens < 1:
            raise UserError(
                f"a request needs a prompt of at least one token and max_new_tokens of at least 1; given "
                f"{len(self.prompt_ids)} and {self.max_new_tokens}."
            )


@dataclass(frozen=True)
class Round:
    """One round: nodes proposed, and tokens emitted (accepted drafts first, then the bonus unless cut by a stop)."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """What a request produced. `seconds` is wall time from the prompt on, prefill included."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stats: AcceptanceStats
    rounds: tuple[Round, ...]
    prefill_seconds: float
    seconds: float


@dataclass
class _Progress:
    """A running request: the text so far and how many of its tokens are in the caches."""

    request: GenerationRequest
    cache: KVCache
    drafter: EagleDrafter | None
    coins: torch.Generator
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish_reason: str | None = None

    def emit(self, tokens: list[int]) -> list[int]:
        """Append tokens one by one until a stop or the limit; return those that were kept."""
        kept: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            kept.append(token)
            if token in self.request.stop_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        return kept


class Engine:
    """Decodes with a target and, given a head and a tree maker, speculates."""

    def __init__(self, target: Target, head: DraftHead | None = None, tree: TreeMaker | None = None) -> None:
        """Raise UserError when head and target do not belong together."""
        if (head is None) != (tree is None):
            raise UserError("give the engine both a head and a tree, or neither (plain decoding).")
        if head is not None:
            _check_pair(target, head)
            head.lend(target)
        self.target = target
        self.head = head
        self.tree = tree

    def generate(self, request: GenerationRequest) -> Generation:
        """Return the whole continuation of a request."""
        started = time.perf_counter()
        depth = self.tree.depth if self.tree else 0
        stats, rounds = AcceptanceStats(depth), []
        progress = self._prefill(request)
        prefill_seconds = time.perf_counter() - started
        for round_ in self._rounds(progress):
            stats.record(round_.accepted, drafted=round_.drafted)
            rounds.append(round_)
        assert progress.finish_reason is not None
        return Generation(
            token_ids=tuple(progress.tokens),
            finish_reason=progress.finish_reason,
            stats=stats,
            rounds=tuple(rounds),
            prefill_seconds=prefill_seconds,
            seconds=time.perf_counter() - started,
        )

    def stream(self, request: GenerationRequest) -> Iterator[Round]:
        """Yield rounds as they happen; the first one carries the token that the prefill produced."""
        progress = self._prefill(request)
        yield Round(drafted=0, accepted=0, tokens=tuple(progress.tokens))
        yield from self._rounds(progress)

    @torch.inference_mode()
    def _prefill(self, request: GenerationRequest) -> _Progress:
        T = len(request.prompt_ids)
        nodes = self.tree.max_nodes if self.tree else 1
        capacity = T + request.max_new_tokens + nodes
        limit = self.target.config.max_position_embeddings
        if T + request.max_new_tokens > limit:
            raise UserError(
                f"prompt ({T} tokens) and max_new_tokens ({request.max_new_tokens}) exceed the "
                f"target's {limit} positions."
            )
        drafter = None
        if self.head is not None and self.tree is not None:
            drafter = EagleDrafter(self.head, capacity=capacity + self.tree.scratch)
        cache = self.target.new_cache(batch=1, capacity=capacity)
        coins = torch.Generator().manual_seed(request.sampling.seed)
        progress = _Progress(request, cache, drafter, coins)
        device = self.target.device
        prompt = torch.tensor(request.prompt_ids, device=device)
        cache.write_at(0, T)
        out = self.target.forward(prompt[None], cache=cache)
        logits = self.target.head.logits(out.final_hidden_BTD[0, -1:])
        first = VERIFIERS[self._verifier(request)](DraftTree.root(0), logits, request.sampling, coins).bonus_token
        progress.cached = T
        progress.emit([first])
        if drafter is not None and progress.finish_reason is None:
            drafter.extend(drafter.states(out), torch.cat((prompt[1:], torch.tensor([first], device=device))))
        return progress

    def _rounds(self, progress: _Progress) -> Iterator[Round]:
        while progress.finish_reason is None:
            yield self._round(progress)

    @torch.inference_mode()
    def _round(self, progress: _Progress) -> Round:
        root = progress.tokens[-1]
        if self.tree is not None and progress.drafter is not None:
            tree = self.tree.make(progress.drafter, root)
        else:
            tree = DraftTree.root(root)
        N, start, device = len(tree), progress.cached, self.target.device
        prefix = torch.ones(N, start, dtype=torch.bool)
        mask_NL = torch.cat((prefix, tree.ancestors_NN), dim=1).to(device)
        # Nodes past the last position are cut by the limit anyway; dynamic RoPE would turn all other nodes by them.
        positions_N = (start + tree.depths_N).clamp(max=self.target.config.max_position_embeddings - 1)
        progress.cache.write_at(start, N)
        out = self.target.forward(
            tree.tokens_N[None].to(device),
            position_ids_BT=positions_N[None].to(device),
            mask_B1TL=mask_NL[None, None],
            cache=progress.cache,
        )
        logits_NV = self.target.head.logits(out.final_hidden_BTD[0])
        verifier = VERIFIERS[self._verifier(progress.request)]
        verification = verifier(tree, logits_NV, progress.request.sampling, progress.coins)
        path = torch.tensor(verification.path, device=device)
        progress.cache.keep_path(start, path)
        progress.cached += len(path)
        accepted = tree.tokens_N[list(verification.path[1:])].tolist()
        kept = progress.emit([*accepted, verification.bonus_token])
        if progress.drafter is not None and progress.finish_reason is None:
            progress.drafter.extend(progress.drafter.states(out)[path], torch.tensor(kept, device=device))
        return Round(drafted=N - 1, accepted=min(len(accepted), len(kept)), tokens=tuple(kept))

    @staticmethod
    def _verifier(request: GenerationRequest) -> str:
        return "sampling" if request.sampling.temperature > 0 else "greedy"


def _check_pair(target: Target, head: DraftHead) -> None:
    """Raise UserError when a head was made for a target of other layers, width, layer count or vocabulary."""
    config = head.config
    expected = {
        "aux layers": (config.aux_layers, target.aux_layers if config.aux_layers else ()),  # EAGLE-1 reads none
        "hidden size": (config.target_hidden_size, target.config.hidden_size),
        "layers": (config.target_num_layers, target.config.num_hidden_layers),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    for what, (of_head, of_target) in expected.items():
        if of_head != of_target:
            raise UserError(f"this head was made for a target with {what} {of_head}, the target given has {of_target}.")
