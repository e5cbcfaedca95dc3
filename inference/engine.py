"""The runtime: decodes with a target and, given a drafter, speculates.

Without one every tree is the root alone, which is plain decoding on the same code: the baseline of every speed number.
Requests run side by side, each with its own settings; `session.py` holds the life of a round.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

import torch

from eyas.inference.draft import TreeMaker
from eyas.inference.drafter import Drafter
from eyas.inference.eagle_drafter import EagleDrafter
from eyas.inference.request import Decode, Generation, GenerationRequest, Round
from eyas.inference.session import Event, Session
from eyas.inference.verify import DRAWN
from eyas.kernels.triton_support import available
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.kv_cache import check_kv_dtype
from eyas.models.target import Target

__all__ = ["Engine", "Event", "Generation", "GenerationRequest", "Round", "Session"]


class Engine:
    """A target with, perhaps, an EAGLE head and a tree, or any other drafter; at most `batch` requests at a time."""

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        tree: TreeMaker | None = None,
        *,
        drafter: Drafter | None = None,
        batch: int = 8,
        drawn_verifier: str = "block",
        decode: Decode | None = None,
        fixed: bool | None = None,
        graphs: bool = True,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Raise UserError when drafter and target do not belong together.

        `decode` turns generated ids into text; stop strings and `Generation.text` need it. `fixed` runs rounds in fixed
        shapes, without asking the host in between (None: on a GPU that has kernels), and `graphs` as CUDA graphs.
        `kv_dtype` is that of the target's KV cache: None for the target's own, or torch.float8_e4m3fn (on CUDA from
        compute capability 8.9), with which plain decoding and every tree agree on one text, that of the rounded keys.
        """
        if (head is None) != (tree is None):
            raise UserError("give the engine both a head and a tree, or neither (plain decoding).")
        if head is not None and drafter is not None:
            raise UserError("give the engine a head or another drafter, not both.")
        if batch < 1:
            raise UserError(f"an engine runs at least one request at a time, given batch {batch}.")
        if drawn_verifier not in DRAWN:
            raise UserError(f"drawn chains are verified by {' or '.join(DRAWN)}, not by {drawn_verifier!r}.")
        if head is not None and tree is not None:
            drafter = EagleDrafter(head, tree)
        if drafter is not None:
            drafter.check(target)
        check_kv_dtype(kv_dtype, target.device)
        _ = target.attention_kinds  # raises where the runtime cannot serve a layer
        self.target = target
        self.drafter = drafter
        self.batch = batch
        self.drawn_verifier = drawn_verifier
        self.decode = decode
        self.fixed = target.device.type == "cuda" and available(target.device) if fixed is None else fixed
        self.graphs = graphs
        self.kv_dtype = kv_dtype

    def session(self) -> Session:
        """Return a session without requests, to join and run round by round."""
        return Session(
            self.target,
            self.drafter,
            drawn_verifier=self.drawn_verifier,
            decode=self.decode,
            fixed=self.fixed,
            graphs=self.graphs,
            kv_dtype=self.kv_dtype,
        )

    @overload
    def generate(self, requests: GenerationRequest) -> Generation: ...

    @overload
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]: ...

    def generate(self, requests: GenerationRequest | Sequence[GenerationRequest]) -> Generation | list[Generation]:
        """Return the whole continuation of one request, or of several in their order."""
        asked = [requests] if isinstance(requests, GenerationRequest) else requests
        session = self.session()
        for request in asked:
            session.check(request)
        finished = {event.number: event.finished for event in self._run(session, asked) if event.finished}
        whole = [finished[number] for number in range(len(asked))]
        return whole[0] if isinstance(requests, GenerationRequest) else whole

    def stream(self, requests: Iterable[GenerationRequest]) -> Iterator[Event]:
        """Yield every round of every request as it happens; an event's number is the request's place.

        The first round of a request is the token that its prefill produced. Requests are taken from the iterable as
        places become free.
        """
        yield from self._run(self.session(), requests)

    def _run(self, session: Session, requests: Iterable[GenerationRequest]) -> Iterator[Event]:
        waiting = iter(requests)
        while True:
            if joining := list(islice(waiting, self.batch - len(session))):
                yield from session.join(joining)
            elif len(session):
                yield from session.round()
            else:
                return
