"""The synthesize stage: the target writes the corpus of the recipe."""

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from transformers import GenerationConfig

from eyas.data.backends import Backend
from eyas.data.batch_decode import BatchDecoder
from eyas.data.encode import ChatTemplate
from eyas.data.openai_backend import OpenAIBackend, Server
from eyas.data.questions import turns_of
from eyas.data.self_prompts import Steering
from eyas.data.server_template import compare_rendering
from eyas.data.styles import AnswerStyle
from eyas.data.supervision import EXAMPLE, check_supervision, show_conversation
from eyas.data.synthesize import ANY_PROMPT, SynthesisPlan, SynthesisReport, stops_with, synthesize
from eyas.models.bundled import resolve_model
from eyas.train.context import RunContext
from eyas.train.prompt_sources import dedup_plan, evaluation_texts, with_table
from eyas.train.recipe import AnswerStyleSection

LOOKED_AT = 32  # conversations whose mask is checked before the target is loaded
SMOKE = 20_000  # reply tokens, below which a head learns too little to be judged


def run_synthesize(context: RunContext) -> dict[str, Any]:
    """Write corpus/corpus.jsonl and return its counts."""
    section = context.recipe.synthesize
    template = context.template
    folder = context.folder.of("synthesize") if context.ranks.first else None
    given = with_table(lambda: context.given, context.reporter, folder)
    check_supervision([show_conversation(template, row) for row in given.conversations[:LOOKED_AT] or [EXAMPLE]])
    plan = synthesis_plan(context)
    backend = BACKENDS[section.backend.kind](context, template, plan)
    with context.reporter.bar("tok") as bar:
        report = synthesize(
            backend, template, given.conversations, plan, context.folder.of("synthesize"), bar.update,
            stop_ids=stops_with(template, eos_token_ids(context)), ranks=context.ranks,
        )  # fmt: skip
    for line in describe(report):
        context.reporter.say(f"  {line}")
    if report.reply_tokens < SMOKE:
        context.reporter.say(f"  smoke run: {report.reply_tokens} reply tokens are too few for acceptance to mean much")
    return asdict(report)


def synthesis_plan(context: RunContext) -> SynthesisPlan:
    """Return what the recipe asks for."""
    section = context.recipe.synthesize
    steerings = tuple(Steering(one.category, one.system, one.share) for one in section.steering)
    return SynthesisPlan(
        self_prompts=section.self_prompts,
        self_heldout=section.self_heldout,
        validation=section.validation,
        self_prompt_tokens=section.self_prompt_tokens,
        prompt_style=AnswerStyle(section.prompt_temperature, section.prompt_top_k, section.prompt_top_p),
        answer_styles=_styles(section.answers),
        self_answer_styles=_styles(section.self_answers),
        max_prompt_tokens=section.max_prompt_tokens,
        max_reply_tokens=section.max_reply_tokens,
        positions=context.target_config.max_position_embeddings,
        rows_per_part=section.rows_per_part,
        seed=section.seed,
        steerings=steerings or (ANY_PROMPT,),
        group=section.group,
        dedup=dedup_plan(context.recipe),
        evaluation=evaluation_texts(context.recipe),
    )


def _styles(sections: tuple[AnswerStyleSection, ...]) -> tuple[AnswerStyle, ...]:
    return tuple(AnswerStyle(one.temperature, one.top_k, one.top_p, one.share) for one in sections)


def eos_token_ids(context: RunContext) -> int | list[int] | None:
    """Return the EOS tokens of the target's generation config (or of its config), read without its weights."""
    try:
        config: Any = GenerationConfig.from_pretrained(resolve_model(context.recipe.target.model))
    except OSError:
        config = context.target_config
    eos: int | list[int] | None = config.eos_token_id
    return eos


def _local(context: RunContext, template: ChatTemplate, plan: SynthesisPlan) -> Backend:
    section = context.recipe.synthesize
    target = context.load_target(section.dtype, tapped=False).pack(rows=section.batch)
    return BatchDecoder(target, batch=section.batch, capacity=plan.capacity)


def _openai(context: RunContext, template: ChatTemplate, plan: SynthesisPlan) -> Backend:
    section = context.recipe.synthesize.backend
    server = Server(
        url=section.url,
        model=section.model or context.recipe.target.model,
        token_ids=section.token_ids,
        concurrency=section.concurrency,
        retries=section.retries,
        timeout=section.timeout,
    )
    api_key = os.environ.get(section.api_key_env)
    prompts = [list(turns_of(row.messages)[0]) for row in context.given.conversations if turns_of(row.messages)]
    if section.checked_prompts and context.ranks.first:
        asked = prompts[: section.checked_prompts] or [list(EXAMPLE.messages[:1])]
        context.reporter.say(f"  {compare_rendering(template, server, asked, api_key=api_key)}")
    return OpenAIBackend(template, server, api_key=api_key)


BACKENDS: dict[str, Callable[[RunContext, ChatTemplate, SynthesisPlan], Backend]] = {
    "local": _local,
    "openai": _openai,
}


def describe(report: SynthesisReport) -> list[str]:
    """Return what a user should know of a corpus beyond its size, one line each."""
    lines = [
        f"self-written prompts, {category}: {one.kept} kept of {one.asked} ({one.dropped} unusable, {one.duplicates} "
        "said before or in an evaluation set)" + ("" if one.kept == one.wanted else f", {one.wanted} were wanted")
        for category, one in report.self_written.items()
        if one.asked
    ]
    lines += [f"given conversations left out: {n} ({reason})" for reason, n in report.dropped_conversations.items()]
    lines += [f"conversations ended early: {n} ({reason})" for reason, n in report.early_ends.items()]
    if report.rewritten_turns:
        lines.append(
            f"{report.rewritten_turns} of {report.turns} turns stand in rows of their own: the template rewrote what "
            "came before them"
        )
    if report.reencoded_replies:
        lines.append(f"{report.reencoded_replies} replies came as text alone and were encoded again")
    return lines
