"""The synthesize stage: the target writes the corpus of the recipe."""

from dataclasses import asdict
from typing import Any

from eyas.data.encode import ChatTemplate
from eyas.data.supervision import EXAMPLE, check_supervision, show_conversation
from eyas.data.synthesize import AnswerStyle, SynthesisPlan, synthesize
from eyas.models.target import load_tokenizer
from eyas.train.context import RunContext
from eyas.train.prompt_sources import read_given

LOOKED_AT = 32  # conversations whose mask is checked before the target is loaded
SMOKE = 20_000  # reply tokens, below which a head learns too little to be judged


def run_synthesize(context: RunContext) -> dict[str, Any]:
    """Write corpus/corpus.jsonl and return its counts."""
    section = context.recipe.synthesize
    template = ChatTemplate(load_tokenizer(context.recipe.target.model), context.recipe.target.template_arguments)
    given = read_given(
        context.recipe, template, positions=context.target_config.max_position_embeddings, reporter=context.reporter,
        folder=context.folder.of("synthesize"),
    )  # fmt: skip
    check_supervision([show_conversation(template, row) for row in given.conversations[:LOOKED_AT] or [EXAMPLE]])
    prompts = [conversation.prompt() for conversation in given.conversations]
    plan = SynthesisPlan(
        self_prompts=section.self_prompts,
        self_heldout=section.self_heldout,
        validation=section.validation,
        self_prompt_tokens=section.self_prompt_tokens,
        prompt_style=AnswerStyle(section.prompt_temperature, section.prompt_top_k),
        answer_styles=tuple(AnswerStyle(style.temperature, style.top_k) for style in section.answers),
        self_answer_styles=tuple(AnswerStyle(style.temperature, style.top_k) for style in section.self_answers),
        max_prompt_tokens=section.max_prompt_tokens,
        max_reply_tokens=section.max_reply_tokens,
        batch=section.batch,
        rows_per_part=section.rows_per_part,
        seed=section.seed,
    )
    target = context.load_target(section.dtype, tapped=False).pack(rows=section.batch)
    with context.reporter.bar("tok") as bar:
        report = synthesize(target, template, prompts, plan, context.folder.of("synthesize"), bar.update)
    if report.reply_tokens < SMOKE:
        context.reporter.say(f"  smoke run: {report.reply_tokens} reply tokens are too few for acceptance to mean much")
    return asdict(report)
