"""A request and what becomes of it round by round, up to its end: a stop token, a stop string or the limit."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.penalties import LogitsProcessor, Penalties, apply_all
from eyas.inference.sampling import Coins, Sampling
from eyas.inference.verify import Rule
from eyas.models.errors import UserError

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to continue by at most `max_new_tokens`.

    Any of `stop_ids` ends the text and is returned, unless `ignore_eos`; so does the token that completes one of
    `stop_strings`, which are then cut off the decoded text. A stop on the last token allowed wins over the limit.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    penalties: Penalties = field(default_factory=Penalties)
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_new_tokens < 1:
            raise UserError(
                f"a request needs a prompt of at least one token and max_new_tokens of at least 1; given "
                f"{len(self.prompt_ids)} and {self.max_new_tokens}."
            )
        if "" in self.stop_strings:
            raise UserError("a stop string must not be empty; it would end every text at once.")


@dataclass(frozen=True)
class Round:
    """One round: nodes proposed, and tokens emitted (accepted drafts first, then the bonus unless cut by a stop).

    `logprobs`, where asked for, are the target's own log-probabilities of the tokens, before penalties, processors and
    temperature. The first round of a request is its prefill: nothing drafted, one token.
    """

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """What a request produced. `rounds` leaves out the prefill, which emitted the first token.

    `seconds` is wall time from joining on, prefill included; in a batch it is shared with the others. `text` is None
    unless the engine can decode.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    stats: AcceptanceStats
    rounds: tuple[Round, ...]
    prefill_seconds: float
    seconds: float
    logprobs: tuple[float, ...] | None = None
    text: str | None = None


@dataclass
class Running:
    """A request under way. All its tokens but the last (the root) are in the caches: `cached` of them."""

    number: int
    request: GenerationRequest
    decode: Decode | None
    depth: int
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    coins_used: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        self.coins = Coins(self.request.sampling.seed)
        self.started = self.prefilled = time.perf_counter()
        if self.request.stop_strings and self.decode is None:
            raise UserError("stop strings need an engine that can decode: give Engine(decode=tokenizer.decode).")

    @property
    def cached(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens) - 1

    @property
    def rule(self) -> Rule | None:
        """Return what the request's penalties and processors do at a node of its tree, None when there are none."""
        request = self.request
        if not request.penalties and not request.processors:
            return None
        text = [*request.prompt_ids, *self.tokens]

        def rule(path: list[int], logits_V: Tensor) -> Tensor:
            return apply_all(
                logits_V,
                text + path,
                generated_from=len(request.prompt_ids),
                penalties=request.penalties,
                processors=request.processors,
            )

        return rule

    def emit(self, accepted: list[int], bonus: int, *, drafted: int, logprobs: list[float] | None) -> Round:
        """Append a round's tokens one by one until a stop or the limit; nothing after that is kept or counted."""
        if not self.rounds:
            self.prefilled = time.perf_counter()
        kept: list[int] = []
        for token in (*accepted, bonus):
            self.tokens.append(token)
            kept.append(token)
            if self._stops(token):
                self.finish_reason = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                break
        made = Round(
            drafted=drafted,
            accepted=min(len(accepted), len(kept)),
            tokens=tuple(kept),
            logprobs=None if logprobs is None else tuple(logprobs[: len(kept)]),
        )
        self.rounds.append(made)
        return made

    def finish(self) -> Generation:
        """Return the finished generation."""
        assert self.finish_reason is not None
        stats = AcceptanceStats(self.depth)
        for made in self.rounds[1:]:
            stats.record(made.accepted, drafted=made.drafted)
        logprobs = [value for made in self.rounds for value in made.logprobs or ()]
        if self.text is None and self.decode is not None:
            self.text = self.decode(self.tokens)
        return Generation(
            token_ids=tuple(self.tokens),
            finish_reason=self.finish_reason,
            stats=stats,
            rounds=tuple(self.rounds[1:]),
            prefill_seconds=self.prefilled - self.started,
            seconds=time.perf_counter() - self.started,
            logprobs=tuple(logprobs) if self.request.logprobs else None,
            text=self.text,
        )

    def _stops(self, token: int) -> bool:
        request = self.request
        if token in request.stop_ids and not request.ignore_eos:
            return True
        if request.stop_strings:
            assert self.decode is not None
            text = self.decode(self.tokens)
            found = [at for stop in request.stop_strings if (at := text.find(stop)) >= 0]
            if found:
                self.text = text[: min(found)]
                return True
        return False
