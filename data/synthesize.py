"""Synthesis: the target writes the corpus itself.

Self-prompting: from the bare chat prefix (everything up to where a user's text begins) the target writes user turns,
then answers them. Bundled or given prompts are answered too. Replies keep their token ids and finish reason exactly;
a reply cut by the length limit gets no end-of-turn token. The order of work is fixed by request id, every draw by seed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eyas.data.batch_decode import BatchDecoder, Reply, Request
from eyas.data.conversation import Prompt
from eyas.data.corpus import CorpusRow, PartWriter, load_corpus, to_jsonl, write_atomically
from eyas.data.encode import ChatTemplate
from eyas.data.questions import Question, given_questions, split_prompts, usable_prompts, without_leaks
from eyas.models.errors import UserError
from eyas.models.target import Target

Progress = Callable[[str, int, int, int], None]  # phase, rows done, rows in all, tokens written in this call


@dataclass(frozen=True)
class AnswerStyle:
    """How replies are sampled: `temperature` 0 is greedy; `top_k` 0 keeps the whole vocabulary."""

    temperature: float
    top_k: int = 0


@dataclass(frozen=True)
class SynthesisPlan:
    """What to write. The target writes `self_prompts` training prompts and `self_heldout` more for evaluation.

    `validation` prompts, half of them self-written and half taken evenly from the given ones, are kept from training
    and answered greedily: the checkpoint is chosen on them, never on the held-out ones. A self-written prompt that does
    not end within `self_prompt_tokens` is dropped.
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
    batch: int
    rows_per_part: int
    seed: int


@dataclass(frozen=True)
class SynthesisReport:
    """Counts of one finished corpus."""

    rows: int
    reply_tokens: int
    heldout_rows: int
    validation_rows: int
    cut_replies: int
    dropped_prompts: int
    duplicate_prompts: int


def synthesize(
    target: Target, template: ChatTemplate, prompts: list[Prompt], plan: SynthesisPlan, folder: Path, progress: Progress
) -> SynthesisReport:
    """Write `folder/corpus.jsonl`; resumes from finished parts. Raises UserError when nothing usable was written."""
    decoder = BatchDecoder(
        target,
        batch=plan.batch,
        capacity=plan.max_prompt_tokens + max(plan.max_reply_tokens, plan.self_prompt_tokens),
    )
    stop_ids = stop_token_ids(template, target)
    longest = min(plan.max_prompt_tokens, decoder.capacity - plan.max_reply_tokens)
    self_validation, given_validation = validation_shares(
        validation=plan.validation, self_prompts=plan.self_prompts, given=len(prompts)
    )
    given = given_questions(template, prompts, validation=given_validation)
    _check_given(given, longest, plan, target)
    held_back = plan.self_heldout + self_validation
    wanted = held_back + plan.self_prompts
    asked = _self_prompts(decoder, template, plan, wanted, stop_ids, folder, progress)
    kept, dropped, duplicates = usable_prompts(template, asked, wanted=wanted, longest=longest)
    if len(kept) < held_back + min(1, plan.self_prompts):
        raise UserError(
            f"only {len(kept)} of the {len(asked)} prompts the target wrote are usable ({dropped} did not end or were "
            f"too short or too long, {duplicates} repeat another), too few for {held_back} held-back ones; raise "
            "synthesize.self_prompt_tokens or synthesize.prompt_temperature, or ask for fewer."
        )
    questions, leaks = without_leaks([*split_prompts(kept, plan.self_heldout, held_back), *given])
    requests: dict[str, tuple[Request, CorpusRow]] = {}
    for question in questions:
        requests |= _requests(question, plan, stop_ids)
    rows = _answer(decoder, template, plan, requests, folder, progress)
    if not rows:
        raise UserError("synthesis wrote no reply: give prompts or raise synthesize.self_prompts above 0.")
    write_atomically(folder / "corpus.jsonl", to_jsonl(rows))
    return SynthesisReport(
        rows=len(rows),
        reply_tokens=sum(len(row.reply_ids) for row in rows),
        heldout_rows=sum(row.split == "heldout" for row in rows),
        validation_rows=sum(row.split == "validation" for row in rows),
        cut_replies=sum(row.finish_reason == "length" for row in rows),
        dropped_prompts=dropped,
        duplicate_prompts=duplicates + leaks,
    )


def stop_token_ids(template: ChatTemplate, target: Target) -> frozenset[int]:
    """Return every token that ends a reply: the template's end of turn and the model's EOS tokens."""
    eos = target.model.generation_config.eos_token_id if target.model.generation_config else None
    listed = eos if isinstance(eos, list) else [eos]
    return frozenset({template.end_of_turn, *(token for token in listed if token is not None)})


def _self_prompts(
    decoder: BatchDecoder, template: ChatTemplate, plan: SynthesisPlan, wanted: int, stop_ids: frozenset[int],
    folder: Path, progress: Progress,
) -> list[CorpusRow]:  # fmt: skip
    """Return user turns written by the target, in id order; a third more than wanted, since some will be unusable."""
    prefix = tuple(template.user_prefix())
    requests = {}
    for number in range(wanted + wanted // 3):
        name = f"self-{number:06d}"
        requests[name] = Request(
            name, prefix, plan.self_prompt_tokens, stop_ids, plan.prompt_style.temperature,
            plan.prompt_style.top_k, _seed(plan.seed, name),
        )  # fmt: skip
    origin = {
        name: CorpusRow(name, "self", "self", "prompt", request.temperature, prefix, (), "", "", "")
        for name, request in requests.items()
    }
    pairs = {name: (request, origin[name]) for name, request in requests.items()}
    return _decode_all(decoder, template, pairs, folder / "prompts", plan.rows_per_part, "writing prompts", progress)


def validation_shares(*, validation: int, self_prompts: int, given: int) -> tuple[int, int]:
    """Return how many validation prompts are self-written and how many come from the `given` ones.

    Raises UserError when those are too few.
    """
    of_self = validation if not given else validation // 2 if self_prompts else 0
    of_given = validation - of_self
    if of_given >= max(1, given) and of_given:
        raise UserError(
            f"{given} given prompts are too few to keep {of_given} for validation; give more prompts or lower "
            "synthesize.validation."
        )
    return of_self, of_given


def _check_given(given: list[Question], longest: int, plan: SynthesisPlan, target: Target) -> None:
    """Raise UserError for given prompts that are too long or whose id is not their own."""
    seen: set[str] = set()
    for question in given:
        if question.id in seen or question.id.startswith("self-"):
            raise UserError(
                f"prompt id {question.id!r} is used twice or begins with 'self-', which the target's own prompts do; "
                "rename it."
            )
        seen.add(question.id)
        if len(question.prompt_ids) > longest:
            raise UserError(
                f"prompt {question.id!r} is {len(question.prompt_ids)} tokens long, more than the {longest} that "
                f"synthesize.max_prompt_tokens = {plan.max_prompt_tokens} and the target's "
                f"{target.config.max_position_embeddings} positions less synthesize.max_reply_tokens = "
                f"{plan.max_reply_tokens} allow; shorten it or change the limits."
            )


def _requests(
    question: Question, plan: SynthesisPlan, stop_ids: frozenset[int]
) -> dict[str, tuple[Request, CorpusRow]]:
    """Return the requests for one prompt: each style of its source for training, greedy alone for other splits."""
    of_source = plan.self_answer_styles if question.source == "self" else plan.answer_styles
    requests = {}
    for number, style in enumerate(of_source if question.split == "train" else (AnswerStyle(0.0),)):
        row_id = f"{question.id}/{number}"
        request = Request(
            row_id, question.prompt_ids, plan.max_reply_tokens, stop_ids, style.temperature, style.top_k,
            _seed(plan.seed, row_id),
        )  # fmt: skip
        row = CorpusRow(
            row_id, question.source, question.category, question.split, style.temperature, question.prompt_ids, (), "",
            question.text, "",
        )  # fmt: skip
        requests[row_id] = (request, row)
    return requests


def _answer(
    decoder: BatchDecoder, template: ChatTemplate, plan: SynthesisPlan, requests: dict[str, tuple[Request, CorpusRow]],
    folder: Path, progress: Progress,
) -> list[CorpusRow]:  # fmt: skip
    return _decode_all(decoder, template, requests, folder / "replies", plan.rows_per_part, "writing replies", progress)


def _decode_all(
    decoder: BatchDecoder, template: ChatTemplate, requests: dict[str, tuple[Request, CorpusRow]], folder: Path,
    rows_per_part: int, phase: str, progress: Progress,
) -> list[CorpusRow]:  # fmt: skip
    """Return one finished row per request in request order, decoding only those not yet in finished parts."""
    writer = PartWriter(folder, rows_per_part=rows_per_part)
    done = {
        name: row
        for name, row in writer.written().items()
        if name in requests and row.prompt_ids == requests[name][0].prompt_ids
    }
    progress(phase, len(done), len(requests), 0)
    waiting = [request for name, (request, _) in requests.items() if name not in done]
    for reply in decoder.run(waiting):
        row = _finish(template, reply, requests[reply.request.id][1])
        done[row.id] = row
        writer.add(row)
        progress(phase, len(done), len(requests), len(row.reply_ids))
    writer.close()
    return [done[name] for name in requests]


def _finish(template: ChatTemplate, reply: Reply, row: CorpusRow) -> CorpusRow:
    stopped = reply.finish_reason == "stop"
    text_ids = reply.token_ids[:-1] if stopped else reply.token_ids
    text = str(template.tokenizer.decode(list(text_ids)))
    return CorpusRow(
        **{**row.__dict__, "reply_ids": reply.token_ids, "reply_text": text, "finish_reason": reply.finish_reason}
    )


def _seed(seed: int, name: str) -> int:
    """Return a seed of its own for every request, the same whenever it is asked again."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def load_split(folder: Path, split: str) -> list[CorpusRow]:
    """Return the rows of one split ("train", "validation" or "heldout") of a finished corpus."""
    return [row for row in load_corpus(folder / "corpus.jsonl") if row.split == split]
