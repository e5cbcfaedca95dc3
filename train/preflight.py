"""The pre-flight of a recipe: what it is checked on, and the checks run one after the other, in seconds.

Every check answers one question that silently spoils heads when the answer is wrong (train/preflight_checks.py). What
it needs is made once and lazily: the target, one written reply, a head of the recipe's shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from eyas.data.backends import Request
from eyas.data.batch_decode import BatchDecoder
from eyas.data.corpus import load_corpus
from eyas.data.encode import ChatTemplate, TokenizedExample, encode_reply
from eyas.data.synthesize import stop_token_ids
from eyas.models.draft_head import DraftHead
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.embedding_scale import with_embedding_scale
from eyas.models.errors import CheckFailed, UserError
from eyas.models.heads import new_head
from eyas.models.target import Target, load_tokenizer
from eyas.models.warm_start import init_from_target, init_random, set_vocabulary
from eyas.train.context import RunContext

Verdict = Literal["ok", "warning", "failed", "not checked"]
WRITTEN_PROMPTS, WRITTEN_TOKENS = 4, 48  # replies that the target writes where there is no corpus yet
CORPUS_ROWS = 64


@dataclass(frozen=True)
class Outcome:
    """What a check found: "ok" or "warning" with what was seen. A check that fails raises instead."""

    detail: str
    verdict: Literal["ok", "warning"] = "ok"


@dataclass(frozen=True)
class Finding:
    """One line of a pre-flight."""

    check: str
    verdict: Verdict
    detail: str


class Probe:
    """What the checks look at, made when first asked for."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.recipe = context.recipe

    @cached_property
    def template(self) -> ChatTemplate:
        """The served chat template."""
        return ChatTemplate(load_tokenizer(self.recipe.target.model), self.recipe.target.template_arguments)

    @cached_property
    def target(self) -> Target:
        """The target as extraction loads it."""
        return self.context.load_target(self.recipe.extract.dtype, tapped=True)

    @cached_property
    def examples(self) -> list[tuple[str, TokenizedExample]]:
        """Rows of the finished corpus, or else replies that the target writes now to its first prompts."""
        folder = self.context.folder
        if folder.is_finished("synthesize", self.context.fingerprints["synthesize"]):
            rows = load_corpus(folder.of("synthesize") / "corpus.jsonl")
            return [(row.id, row.example()) for row in rows[:CORPUS_ROWS]]
        return self._write()

    def _write(self) -> list[tuple[str, TokenizedExample]]:
        section = self.recipe.synthesize
        given = [conversation.prompt() for conversation in self.context.given.conversations[:WRITTEN_PROMPTS]]
        messages = [(prompt.id, list(prompt.messages)) for prompt in given]
        messages = messages or [("hello", [{"role": "user", "content": "Hello, what can you do for me?"}])]
        asked = {name: tuple(self.template.ids(turns, add_generation_prompt=True)) for name, turns in messages}
        tokens = min(section.max_reply_tokens, WRITTEN_TOKENS)
        longest = max(map(len, asked.values()))
        decoder = BatchDecoder(self.target, batch=len(asked), capacity=longest + tokens)
        stops = stop_token_ids(self.template, self.target)
        replies = decoder.run([Request(name, ids, tokens, stops) for name, ids in asked.items()])
        written = {reply.request.id: reply.token_ids for reply in replies}
        return [(name, encode_reply(list(ids), list(written[name]))) for name, ids in asked.items()]

    @cached_property
    def head(self) -> DraftHead:
        """A head of the recipe's shape, initialised as the recipe says, in fp32; the vocabulary is not yet counted."""
        config = with_embedding_scale(self.context.head_config, self.target.embedding)
        forced = {self.template.end_of_turn, *self.template.tokenizer.all_special_ids}
        counts = torch.zeros(config.vocab_size)
        vocabulary = DraftVocabulary.from_counts(counts, size=config.draft_vocab_size, forced=forced)
        head = new_head(config)
        if self.recipe.head.init == "target":
            init_from_target(head, self.target, vocabulary)
        else:
            init_random(head)
        set_vocabulary(head, vocabulary)
        head.lend(self.target)
        return head.to(self.target.device).eval()


Check = Callable[[Probe], Outcome]


def run_checks(probe: Probe, checks: dict[str, Check], *, vital: frozenset[str]) -> list[Finding]:
    """Return a finding per check, in order; after a `vital` one has failed the others are not run."""
    findings: list[Finding] = []
    stopped = ""
    for name, check in checks.items():
        if stopped:
            findings.append(Finding(name, "not checked", f"because of {stopped!r}"))
            continue
        try:
            outcome = check(probe)
            findings.append(Finding(name, outcome.verdict, outcome.detail))
        except (UserError, CheckFailed) as error:
            findings.append(Finding(name, "failed", str(error)))
            stopped = name if name in vital else ""
    return findings
