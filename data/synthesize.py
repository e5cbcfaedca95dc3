"""Synthesis: the target writes the corpus itself.

Self-prompting: from the bare chat prefix the target writes user turns, then answers them. Given conversations are
answered too, every assistant turn anew. Replies keep their token ids and finish reason exactly; a reply cut by the
length limit gets no end-of-turn token and ends its conversation. The order of rows is fixed by the questions, every
draw by its request's seed, so neither kills nor the number of processes show in the corpus.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from eyas.data.answering import Progress, ReplyLog, answer_all
from eyas.data.backends import Backend
from eyas.data.conversation import Conversation
from eyas.data.corpus import CorpusRow, to_jsonl, write_atomically
from eyas.data.dedup import DedupPlan, TextRepeats
from eyas.data.dialogue import Dialogue
from eyas.data.encode import ChatTemplate
from eyas.data.questions import Question, check_validation, given_questions, split_prompts, without_leaks
from eyas.data.ranks import Ranks
from eyas.data.self_prompts import PromptCounts, Steering, write_prompts
from eyas.data.styles import GREEDY, AnswerStyle, styles_for
from eyas.models.errors import UserError
from eyas.models.target import Target

ANY_PROMPT = Steering("self", None, 1.0)


@dataclass(frozen=True)
class SynthesisPlan:
    """What to write. The target writes `self_prompts` training prompts and `self_heldout` more for evaluation.

    `validation` conversations, half of them self-written and half taken evenly from the given ones, are kept from
    training and answered greedily: the checkpoint is chosen on them, never on the held-out ones. No prompt of any turn
    is longer than `max_prompt_tokens`, and none leaves fewer than `max_reply_tokens` of the target's `positions`.
    `group` is explained in data/answering.py. `dedup` says which of its own prompts are dropped: those that repeat
    another or share a run of words with one of the `evaluation` texts.
    """

    self_prompts: int
    self_heldout: int
    validation: int
    self_prompt_tokens: int
    prompt_style: AnswerStyle
    answer_styles: tuple[AnswerStyle, ...]
    self_answer_styles: tuple[AnswerStyle, ...]
    max_prompt_tokens: int
    max_reply_tokens: int
    positions: int
    rows_per_part: int
    seed: int
    steerings: tuple[Steering, ...] = (ANY_PROMPT,)
    group: int = 0
    dedup: DedupPlan = field(default_factory=DedupPlan)
    evaluation: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """The longest prompt, in tokens."""
        return min(self.max_prompt_tokens, self.positions - self.max_reply_tokens)

    @property
    def capacity(self) -> int:
        """The most tokens a request needs, prompt and reply."""
        return self.max_prompt_tokens + max(self.max_reply_tokens, self.self_prompt_tokens)


@dataclass(frozen=True)
class SynthesisReport:
    """Counts of one finished corpus.

    Every one of the `given_conversations` is asked, or among the dropped ones or the `duplicate_prompts`. `turns` were
    written; `rewritten_turns` of them stand in rows of their own, since the template had rewritten what came before.
    `dropped_conversations` were never asked, `early_ends` stopped before their last turn; both by reason.
    `reencoded_replies` came as text alone and were encoded again.
    """

    given_conversations: int
    rows: int
    reply_tokens: int
    heldout_rows: int
    validation_rows: int
    cut_replies: int
    dropped_prompts: int
    duplicate_prompts: int
    turns: int
    rewritten_turns: int
    reencoded_replies: int
    dropped_conversations: dict[str, int]
    early_ends: dict[str, int]
    self_written: dict[str, PromptCounts]


def synthesize(
    backend: Backend, template: ChatTemplate, conversations: list[Conversation], plan: SynthesisPlan, folder: Path,
    progress: Progress, *, stop_ids: frozenset[int], ranks: Ranks | None = None,
) -> SynthesisReport:  # fmt: skip
    """Write `folder/corpus.jsonl`; resumes from finished parts. Raises UserError when nothing usable was written.

    All ranks call it alike; each asks its backend for its share, and the first writes the corpus.
    """
    ranks = ranks or Ranks()
    self_validation, given_validation = validation_shares(
        validation=plan.validation, self_prompts=plan.self_prompts, given=len(conversations)
    )
    given, dropped_conversations = given_questions(
        template, conversations, validation=given_validation, longest=plan.longest,
        limits=f"synthesize.max_prompt_tokens = {plan.max_prompt_tokens} and the target's {plan.positions} positions "
        f"less synthesize.max_reply_tokens = {plan.max_reply_tokens}",
    )  # fmt: skip
    held_back = plan.self_heldout + self_validation
    kept, counts = write_prompts(
        backend, template, plan.steerings, plan.prompt_style, wanted=held_back + plan.self_prompts,
        max_tokens=plan.self_prompt_tokens, longest=plan.longest, stop_ids=stop_ids, seed=plan.seed,
        folder=folder / "prompts", rows_per_part=plan.rows_per_part, ranks=ranks, progress=progress,
        repeats=TextRepeats(plan.dedup, plan.evaluation), group=plan.group,
    )  # fmt: skip
    dropped, duplicates = (sum(getattr(one, name) for one in counts.values()) for name in ("dropped", "duplicates"))
    if len(kept) < held_back + min(1, plan.self_prompts):
        raise UserError(
            f"only {len(kept)} of the {sum(one.asked for one in counts.values())} prompts the target wrote are usable "
            f"({dropped} did not end or were too short or too long, {duplicates} repeat another), too few for "
            f"{held_back} held-back ones; raise synthesize.self_prompt_tokens or synthesize.prompt_temperature, or ask "
            "for fewer."
        )
    questions, leaks = without_leaks([*split_prompts(kept, plan.self_heldout, held_back), *given])
    dialogues = [dialogue for question in questions for dialogue in _dialogues(template, question, plan)]
    log = ReplyLog(folder / "replies", rows_per_part=plan.rows_per_part, rank=ranks.rank)
    reencoded = _regenerate(backend, dialogues, plan, stop_ids, log, ranks, progress)
    rows = [row for dialogue in dialogues for row in dialogue.rows()]
    early_ends = Counter(dialogue.ended for dialogue in dialogues if dialogue.ended)
    if not rows:
        reasons = "".join(f"; {count} replies: {reason}" for reason, count in early_ends.items())
        raise UserError(f"synthesis wrote no reply: give prompts or raise synthesize.self_prompts above 0{reasons}.")
    if ranks.first:
        write_atomically(folder / "corpus.jsonl", to_jsonl(rows))
    return SynthesisReport(
        given_conversations=len(conversations),
        rows=len(rows),
        reply_tokens=sum(len(row.reply_ids) for row in rows),
        heldout_rows=_count_split(rows, "heldout"),
        validation_rows=_count_split(rows, "validation"),
        cut_replies=sum(row.finish_reason == "length" for row in rows),
        dropped_prompts=dropped,
        duplicate_prompts=duplicates + leaks,
        turns=sum(len(row.generated) for row in rows),
        rewritten_turns=sum(dialogue.rewritten_turns for dialogue in dialogues),
        reencoded_replies=reencoded,
        dropped_conversations=dropped_conversations,
        early_ends=dict(early_ends),
        self_written=counts,
    )


def stop_token_ids(template: ChatTemplate, target: Target) -> frozenset[int]:
    """Return every token that ends a reply: the template's end of turn and the model's EOS tokens."""
    config = target.model.generation_config
    return stops_with(template, config.eos_token_id if config else None)


def stops_with(template: ChatTemplate, eos: int | list[int] | None) -> frozenset[int]:
    """Return the template's end of turn and the listed EOS tokens."""
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset({template.end_of_turn, *(token for token in listed if token is not None)})


def validation_shares(*, validation: int, self_prompts: int, given: int) -> tuple[int, int]:
    """Return how many validation conversations are self-written and how many come from the `given` ones.

    Raises UserError when those are too few.
    """
    of_self = validation if not given else validation // 2 if self_prompts else 0
    check_validation(given, validation - of_self)
    return of_self, validation - of_self


def _dialogues(template: ChatTemplate, question: Question, plan: SynthesisPlan) -> list[Dialogue]:
    """Return the dialogues of one question: in its source's styles for training, greedy alone for other splits."""
    of_source = plan.self_answer_styles if question.source == "self" else plan.answer_styles
    styles = styles_for(question.id, of_source, seed=plan.seed) if question.split == "train" else [(0, GREEDY)]
    return [Dialogue(template, question, style, f"{question.id}/{number}") for number, style in styles]


def _regenerate(
    backend: Backend, dialogues: list[Dialogue], plan: SynthesisPlan, stop_ids: frozenset[int], log: ReplyLog,
    ranks: Ranks, progress: Progress,
) -> int:  # fmt: skip
    """Write all turns, the first ones of all dialogues first, and return how many replies were encoded from text."""
    reencoded = turn = 0
    while waiting := [dialogue for dialogue in dialogues if dialogue.open]:
        turn += 1
        requests = [
            dialogue.request(max_new_tokens=plan.max_reply_tokens, stop_ids=stop_ids, seed=plan.seed)
            for dialogue in waiting
        ]
        phase = "writing replies" if turn == 1 else f"writing replies, turn {turn}"
        replies = answer_all(backend, requests, log, ranks, group=plan.group, phase=phase, progress=progress)
        for dialogue, reply in zip(waiting, replies, strict=True):
            dialogue.accept(reply, longest=plan.longest)
            reencoded += not reply.exact and not reply.fault
    return reencoded


def _count_split(rows: list[CorpusRow], split: str) -> int:
    return sum(row.split == split for row in rows)
