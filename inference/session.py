"""A session: requests that decode side by side, each at its own length; they join and leave between rounds.

A round starts with all tokens of every request but the last (the root) in the caches. One draft, one target forward
over root and nodes of all requests, one verification; then the accepted paths' keys move into place, tokens are emitted
one by one up to a stop or the limit, rows that ended leave (the last row takes their place), and the drafter is fed the
accepted tokens with the target's own states.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.inference.draft import FixedMaker
from eyas.inference.drafter import Drafter
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.fixed_round import FixedRound
from eyas.inference.padding import alike
from eyas.inference.request import Decode, Generation, GenerationRequest, Round, Running
from eyas.inference.tree import DraftTree, TreeBatch
from eyas.inference.verify import NAN, VERIFIERS, Verification, VerifyBatch
from eyas.kernels.keep_path import ELEMENTS
from eyas.kernels.triton_support import available, next_power_of_two
from eyas.models.errors import UserError
from eyas.models.kv_cache import KVCache
from eyas.models.target import Target, TargetOutput

CAPACITY_STEP = 256  # tokens by which caches of fixed rounds grow


@dataclass(frozen=True)
class Event:
    """A round of the request that got `number` when it joined; `finished` holds the whole with its last round."""

    number: int
    round: Round
    finished: Generation | None


class Session:
    """Requests under way on one target. `rows` are the running ones, in the order of their cache rows."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        drawn_verifier: str,
        decode: Decode | None,
        fixed: bool = False,
        graphs: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`fixed`: rounds of fixed shapes, where drafter and requests allow it; `graphs`: recorded as CUDA graphs.

        `kv_dtype`: that of the target's cache; None: the target's own.
        """
        self.target = target
        self.drafter = drafter
        self.drawn_verifier = drawn_verifier
        self.decode = decode
        self.drafting = drafter.open() if drafter else None
        self.rows: list[Running] = []
        self.cache: KVCache | None = None
        self.fixed = fixed
        self.graphs = graphs
        self.kv_dtype = kv_dtype
        self.fixed_rounds: dict[int, FixedRound] = {}
        self._joined = 0

    def __len__(self) -> int:
        return len(self.rows)

    def check(self, request: GenerationRequest) -> None:
        """Raise UserError for a request that the target has no room for."""
        T, limit = len(request.prompt_ids), self.target.position_limit
        if T + request.max_new_tokens > limit:
            raise UserError(
                f"prompt ({T} tokens) and max_new_tokens ({request.max_new_tokens}) exceed the target's {limit} "
                "positions."
            )
        strange = [token for token in request.prompt_ids if not 0 <= token < self.target.vocab_size]
        if strange:
            raise UserError(
                f"the prompt holds token {strange[0]}; this target has tokens 0 to {self.target.vocab_size - 1}."
            )

    @torch.inference_mode()
    def join(self, requests: list[GenerationRequest]) -> list[Event]:
        """Prefill some requests side by side and return their first tokens; numbers count up from 0."""
        for request in requests:
            self.check(request)
        first, depth = len(self.rows), self.drafter.depth if self.drafter else 0
        joined = [Running(self._joined + i, request, self.decode, depth) for i, request in enumerate(requests)]
        self._joined += len(joined)
        parts = alike(joined, key=lambda row: len(row.request.prompt_ids))
        self.rows += [row for part in parts for row in part]
        self._reserve()
        events, outs, start = [], [], first
        try:
            for part in parts:
                out, logits_RV = self._prefill(part, start)
                events += self._emit(part, [DraftTree.root(0)] * len(part), logits_RV[:, None])[1]
                outs.append(out)
                start += len(part)
        except FloatingPointError:
            del self.rows[first:]  # those that were running go on, and must meet no NaN in slots they only mask
            assert self.cache is not None
            self.cache.clear(slice(first, None))
            raise
        if self.drafting is not None:
            asked, start = [row.request for row in self.rows[first:]], first
            capacity = self._capacity()
            self.drafting.join([r.prompt_ids for r in asked], [r.sampling for r in asked], capacity=capacity)
            for part, out in zip(parts, outs, strict=True):
                follow = [[*row.request.prompt_ids[1:], row.tokens[0]] for row in part]
                self.drafting.extend(start, follow, out)
                start += len(part)
        self._leave()
        return sorted(events, key=lambda event: event.number)

    def _prefill(self, part: list[Running], first: int) -> tuple[TargetOutput, Tensor]:
        """Return the target's states on the prompts of some rows, the first of which has a place, and their logits."""
        assert self.cache is not None
        lengths = [len(row.request.prompt_ids) for row in part]
        longest, device = max(lengths), self.target.device
        padded = [[*row.request.prompt_ids, *[0] * (longest - n)] for row, n in zip(part, lengths, strict=True)]
        self.cache.write_at(0, longest, rows=slice(first, first + len(part)))
        # Padding behind a short prompt lies in slots that the row's next tokens overwrite before they are seen.
        out = self.target.forward(torch.tensor(padded, device=device), cache=self.cache)
        last_R = torch.tensor(lengths, device=device) - 1
        final_RD = out.final_hidden_BTD[torch.arange(len(part), device=device), last_R]
        return out, self.target.head.logits(final_RD)

    @torch.inference_mode()
    def round(self) -> list[Event]:
        """Run one round of all running requests."""
        assert self.cache is not None
        assert self.rows
        if self._fits_fixed():
            return self._fixed_round()
        R, device = len(self.rows), self.target.device
        roots = [row.tokens[-1] for row in self.rows]
        trees = self.drafting.draft(roots) if self.drafting else [DraftTree.root(root) for root in roots]
        self._check_trees(trees, roots)
        batch = TreeBatch.of(trees)
        N = batch.tokens_RN.shape[1]
        lengths_R = torch.tensor([row.cached for row in self.rows])
        positions_RN = lengths_R[:, None] + batch.depths_RN
        # Nodes past the last position are cut by the limit anyway; dynamic RoPE would turn all other nodes by them.
        positions_RN = positions_RN.clamp(max=self.target.position_limit - 1)
        slots_RN = lengths_R[:, None] + torch.arange(N)
        tree = mask_R1NL = key_positions_RL = None
        if self.target.trees_by_kernel:
            tree = batch.layout(lengths_R, device)
        else:
            mask_R1NL = batch.sight(lengths_R)[:, None].to(device)
            key_positions_RL = torch.arange(mask_R1NL.shape[3]).repeat(R, 1).scatter_(1, slots_RN, positions_RN)
            key_positions_RL = key_positions_RL.to(device)
        if R == 1:
            self.cache.write_at(self.rows[0].cached, N, rows=slice(0, 1))
        else:
            self.cache.write_rows_at(slice(0, R), slots_RN.to(device))
        out = self.target.forward(
            batch.tokens_RN.to(device),
            position_ids_BT=positions_RN.to(device),
            mask_B1TL=mask_R1NL,
            key_positions_BL=key_positions_RL,
            tree=tree,
            cache=self.cache,
        )
        found, events = self._emit(self.rows, trees, self.target.head.logits(out.final_hidden_BTD))
        self._keep_paths(found, lengths_R)
        order = self._leave()
        if self.drafting is not None and order:
            self._feed(out, order, [found[row].path for row in order])
        return events

    def _emit(
        self, rows: list[Running], trees: list[DraftTree], logits_RNV: Tensor
    ) -> tuple[list[Verification], list[Event]]:
        """Verify each row by its own rule and let it emit what was accepted."""
        found: list[Verification | None] = [None] * len(rows)
        rules = [self._verifier(row, tree) for row, tree in zip(rows, trees, strict=True)]
        for name in sorted(set(rules)):
            members = [r for r, rule in enumerate(rules) if rule == name]
            width = max(len(trees[r]) for r in members)
            group = VerifyBatch.of(
                [trees[r] for r in members],
                logits_RNV[:, :width] if len(members) == len(rows) else logits_RNV[members, :width],
                [rows[r].request.sampling for r in members],
                torch.tensor(
                    [[] if name == "greedy" else rows[r].coins.take(rows[r].coins_used, width) for r in members],
                    dtype=torch.float64,
                ),
                [rows[r].rule for r in members],
            )
            for r, verification in zip(members, VERIFIERS[name](group), strict=True):
                found[r] = verification
        events = []
        whole = [verification for verification in found if verification is not None]
        for r, (row, tree, verification) in enumerate(zip(rows, trees, whole, strict=True)):
            # A drawn chain has used a coin per draft and one for the bonus, any other tree one per token emitted.
            coins = len(verification.path) if tree.drawn_KV is None else len(tree)
            accepted = tree.tokens_N[list(verification.path[1:])].tolist()
            logprobs = None
            if row.request.logprobs:
                chosen = torch.tensor([*accepted, verification.bonus_token], device=logits_RNV.device)
                own = torch.log_softmax(logits_RNV[r, list(verification.path)].float(), -1)
                logprobs = own.gather(1, chosen[:, None]).squeeze(1).tolist()
            bonus, drafted = verification.bonus_token, len(tree) - 1
            events.append(_record(row, accepted, bonus, drafted=drafted, coins=coins, logprobs=logprobs))
        return whole, events

    def _fits_fixed(self) -> bool:
        """Return whether this round can run in fixed shapes: the drafter can, and no row wants more than its tokens."""
        drafting = self.drafting
        drafts = drafting is None or (
            isinstance(drafting, EagleDrafting)
            and isinstance(drafting.tree, FixedMaker)
            and drafting.tree.fixed
            and drafting.head.device == self.target.device
        )
        return self.fixed and drafts and all(row.rule is None and not row.request.logprobs for row in self.rows)

    def _fixed_round(self) -> list[Event]:
        assert self.cache is not None
        drafting = self.drafting
        assert drafting is None or isinstance(drafting, EagleDrafting)
        rows = next_power_of_two(len(self.rows))
        if drafting is not None:
            drafting.cache.grow(batch=rows, capacity=drafting.cache.keys.shape[3])
        made = self.fixed_rounds.get(rows)
        if made is None or not made.fits(self.cache, drafting):
            made = FixedRound(self.target, self.cache, drafting, rows=rows, graphs=self.graphs)
            self.fixed_rounds[rows] = made
        outcomes = made.run(self.rows)
        if any(outcome.bonus_token < 0 for outcome in outcomes):
            raise FloatingPointError(NAN)
        events = []
        for row, (accepted, bonus) in zip(self.rows, outcomes, strict=True):
            coins, drafted = len(accepted) + 1, made.num_nodes - 1
            events.append(_record(row, list(accepted), bonus, drafted=drafted, coins=coins, logprobs=None))
        self._leave()
        return events

    def _verifier(self, row: Running, tree: DraftTree) -> str:
        if row.request.sampling.temperature == 0:
            return "greedy"
        return "sampling" if tree.drawn_KV is None else self.drawn_verifier

    def _keep_paths(self, found: list[Verification], lengths_R: Tensor) -> None:
        """Move the accepted nodes' keys to the slots that follow each row's text."""
        assert self.cache is not None
        if available(self.target.device) and self.cache.dtype in ELEMENTS:
            paths = [list(verification.path) for verification in found]
            longest = max(map(len, paths))
            device = self.target.device
            path_RN = torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths], device=device)
            accepted_R = torch.tensor([len(path) - 1 for path in paths], device=device)
            self.cache.keep_paths(lengths_R.to(device), path_RN, accepted_R)
            return
        moves = [
            (r, start + node, start + place)
            for r, (verification, start) in enumerate(zip(found, lengths_R.tolist(), strict=True))
            for place, node in enumerate(verification.path)
            if node != place
        ]
        if moves:
            rows, sources, destinations = torch.tensor(moves, device=self.target.device).T
            self.cache.move(rows, sources, destinations)

    def _leave(self) -> list[int]:
        """Drop the rows that ended, each replaced by the last; return which old row now stands in each place."""
        order = list(range(len(self.rows)))
        for r in range(len(self.rows) - 1, -1, -1):
            if self.rows[r].finish_reason is None:
                continue
            last = len(self.rows) - 1
            if r != last:
                assert self.cache is not None
                self.cache.move_row(last, r)
                self.rows[r], order[r] = self.rows[last], order[last]
            self.rows.pop()
            order.pop()
            if self.drafting is not None:
                self.drafting.leave(r)
        return order

    def _feed(self, out: TargetOutput, order: list[int], paths: list[tuple[int, ...]]) -> None:
        """Give the drafter the tokens that the remaining rows emitted, with the target's states before each."""
        assert self.drafting is not None
        longest, device = max(map(len, paths)), self.target.device
        nodes_RP = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)
        rows_R1 = torch.tensor(order, device=device)[:, None]
        states = TargetOutput(out.aux_hidden_BTF[rows_R1, nodes_RP], out.final_hidden_BTD[rows_R1, nodes_RP])
        self.drafting.extend(0, [list(row.rounds[-1].tokens) for row in self.rows], states)

    def _reserve(self) -> None:
        """Make room for every running request to its very end, so that rounds allocate nothing."""
        nodes = self.drafter.max_nodes if self.drafter else 1
        batch = next_power_of_two(len(self.rows)) if self.fixed else len(self.rows)
        if self.cache is None:
            self.cache = self.target.new_cache(batch=batch, capacity=self._capacity() + nodes, dtype=self.kv_dtype)
        else:
            self.cache.grow(batch=batch, capacity=self._capacity() + nodes)

    def _capacity(self) -> int:
        """Return the most tokens that a running request can come to; in coarse steps where a change costs a capture."""
        need = max(len(row.request.prompt_ids) + row.request.max_new_tokens for row in self.rows)
        return -(-need // CAPACITY_STEP) * CAPACITY_STEP if self.fixed else need

    def _check_trees(self, trees: list[DraftTree], roots: list[int]) -> None:
        """Raise ValueError for drafts that no target can verify: another root, too many nodes, unknown tokens."""
        most = self.drafter.max_nodes if self.drafter else 1
        assert len(trees) == len(roots)
        for tree, root in zip(trees, roots, strict=True):
            low, high = int(tree.tokens_N.min()), int(tree.tokens_N.max())
            if int(tree.tokens_N[0]) != root or len(tree) > most or low < 0 or high >= self.target.vocab_size:
                raise ValueError(
                    f"a drafter returned a tree of {len(tree)} nodes below token {int(tree.tokens_N[0])} with tokens "
                    f"{low} to {high}; the root is {root}, at most {most} nodes and {self.target.vocab_size} tokens "
                    "are allowed."
                )


def _record(
    row: Running, accepted: list[int], bonus: int, *, drafted: int, coins: int, logprobs: list[float] | None
) -> Event:
    """Let a row emit what its round came to."""
    row.coins_used += coins
    made = row.emit(accepted, bonus, drafted=drafted, logprobs=logprobs)
    return Event(row.number, made, row.finish() if row.finish_reason else None)
