"""A preview of a recipe's training rows, before any target is loaded: from the run's corpus, or from what is given."""

from dataclasses import dataclass

from eyas.data.corpus import load_corpus
from eyas.data.supervision import EXAMPLE, ShownRow, check_supervision, show_conversation, spans_of
from eyas.models.errors import UserError
from eyas.train.context import RunContext
from eyas.train.prompt_sources import with_table


@dataclass(frozen=True)
class Preview:
    """Rows to look at, where they come from, and the share of supervised tokens in all rows counted."""

    rows: list[ShownRow]
    origin: str
    counted_rows: int
    supervised_share: float
    rewritten_turns: int


def preview(context: RunContext, *, rows: int) -> Preview:
    """Return `rows` rows, evenly spread; raises CheckFailed when no token or every token is supervised."""
    if rows < 1:
        raise UserError(f"--rows takes a number of rows from 1 on, given {rows}.")
    template = context.template
    key = context.fingerprints["synthesize"]
    if context.folder.is_finished("synthesize", key):
        corpus = [row for row in load_corpus(context.folder.of("synthesize") / "corpus.jsonl") if row.split == "train"]
        shown = [ShownRow(row.id, row.source, row.category, spans_of(template, row.example())) for row in corpus]
        origin = f"Rows of the corpus in {context.folder.of('synthesize')}."
    elif context.recipe.synthesize.prompts:
        given = with_table(lambda: context.given, context.reporter, None)
        shown = [show_conversation(template, conversation) for conversation in given.conversations]
        origin = "The given conversations; there is no corpus of this recipe yet, so replies are stand-ins or as given."
    else:
        shown = [show_conversation(template, EXAMPLE)]
        origin = "A built-in example; there is no corpus of this recipe yet, and the target writes its own prompts."
    if not shown:
        raise UserError("there is no row to look at: every row of the prompt sources was dropped.")
    check_supervision(shown)
    tokens = sum(row.tokens for row in shown)
    wanted = min(rows, len(shown))
    return Preview(
        rows=[shown[number * len(shown) // wanted] for number in range(wanted)],
        origin=origin,
        counted_rows=len(shown),
        supervised_share=sum(row.supervised_tokens for row in shown) / tokens,
        rewritten_turns=sum(row.rewritten_turns for row in shown),
    )
