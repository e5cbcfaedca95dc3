"""What became of a head's candidates: rounds of real decoding, every candidate compared with the text that followed.

Coins decide a request's tokens whoever proposes them, and at temperature 0 the target alone does: so the text says of
every candidate whether it would have been accepted, whether it was verified in that round or not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from eyas.inference.draft import Columns, DynamicTree, GoesOn, HeadState
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.request import Generation
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import Target


class Child(NamedTuple):
    """A candidate below an accepted parent: its depth, the head's log-probability of it, its rank, its fate."""

    depth: int
    log_q: float
    rank: int
    accepted: bool


@dataclass(frozen=True)
class ObservedRequest:
    """The children of one request's accepted nodes, and how many rounds they are from."""

    children: tuple[Child, ...]
    rounds: int


class _Pool(NamedTuple):
    """All candidates of one row in one round, in level order; parents are pool indices, -1 for the root."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]


@dataclass(frozen=True)
class _RecordedTree(DynamicTree):
    """A dynamic tree that keeps the whole pool of its last round, row by row."""

    pools: list[_Pool] = field(default_factory=list)

    @property
    def fixed(self) -> bool:
        """A round that is recorded is read by the host."""
        return False

    def candidates(self, state: HeadState, goes_on: GoesOn | None = None) -> Columns:
        columns = super().candidates(state, goes_on)
        tokens, parents, _, scores = (column.tolist() for column in columns)
        self.pools[:] = [_Pool(*row) for row in zip(tokens, parents, scores, strict=True)]
        return columns


def observe(
    target: Target,
    head: DraftHead,
    tree: DynamicTree,
    requests: list[GenerationRequest],
    *,
    batch: int,
    progress: Callable[[int, int, int], None],
) -> list[ObservedRequest]:
    """Return what became of the candidates of some requests, decoded `batch` at a time; the tree is uncalibrated.

    `progress` hears requests done, requests in all, and tokens just emitted.
    """
    if tree.calibration is not None:
        raise UserError("a calibration is fitted on the head's own probabilities: give a tree without one.")
    recorder = _RecordedTree(tree.depth, tree.top_k, tree.num_draft_tokens)
    session = Engine(target, head, recorder, batch=batch).session()
    pools: dict[int, list[tuple[int, _Pool]]] = {number: [] for number in range(len(requests))}
    finished: dict[int, Generation] = {}
    waiting = list(requests)
    while waiting or len(session):
        if waiting and len(session) < batch:
            room = batch - len(session)
            events = session.join(waiting[:room])
            del waiting[:room]
        else:
            rows = [(row.number, len(row.tokens)) for row in session.rows]
            events = session.round()
            for (number, place), pool in zip(rows, recorder.pools, strict=True):
                pools[number].append((place, pool))
        for event in events:
            if event.finished:
                finished[event.number] = event.finished
            progress(len(finished), len(requests), len(event.round.tokens))
    return [
        ObservedRequest(
            tuple(child for place, pool in pools[number] for child in _children(pool, finished[number], place)),
            len(pools[number]),
        )
        for number in range(len(requests))
    ]


def _children(pool: _Pool, generation: Generation, place: int) -> Iterator[Child]:
    """Yield the children of every accepted node of a round whose first draft is a guess at text token `place`.

    Below the last token of a text that was cut by the limit nothing is known; below a stop nothing is accepted.
    """
    below: dict[int, list[int]] = {}
    for candidate, parent in enumerate(pool.parents):
        below.setdefault(parent, []).append(candidate)
    text, node, depth = generation.token_ids, -1, 1
    while children := below.get(node):
        position = place + depth - 1
        if position >= len(text) and generation.finish_reason == "length":
            return
        following = None
        for rank, child in enumerate(children):
            accepted = position < len(text) and pool.tokens[child] == text[position]
            yield Child(depth, pool.scores[child] - (pool.scores[node] if node >= 0 else 0.0), rank, accepted)
            following = child if accepted else following
        if following is None:
            return
        node, depth = following, depth + 1
