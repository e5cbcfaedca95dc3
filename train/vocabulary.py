"""The draft vocabulary of a run, and how much of what the target writes each size would cover, by prompt set."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.corpus import CorpusRow, write_atomically
from eyas.data.encode import ChatTemplate
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.target import load_tokenizer
from eyas.train.context import RunContext
from eyas.train.ranks import is_main_rank

SIZES = (1024, 2048, 4096, 8192, 16384, 32000, 64000, 128000)
ALL = "all"


def choose_vocabulary(
    context: RunContext, rows: list[CorpusRow], vocab_size: int
) -> tuple[DraftVocabulary, dict[str, float]]:
    """Return the draft vocabulary from the training rows' counts, and its coverage of generated tokens per split.

    Writes coverage.json and coverage.png to the run's training folder: held-out coverage by prompt set and size.
    """
    config = context.head_config
    counts = {
        split: token_counts([row for row in rows if row.split == split], vocab_size)
        for split in ("train", "validation")
    }
    if config.full_vocabulary:
        return DraftVocabulary.full(vocab_size), dict.fromkeys(counts, 1.0)
    tokenizer = load_tokenizer(context.recipe.target.model)
    template = ChatTemplate(tokenizer, context.recipe.target.template_arguments)
    forced = {template.end_of_turn, *tokenizer.all_special_ids}
    vocabulary = DraftVocabulary.from_counts(counts["train"], size=config.draft_vocab_size, forced=forced)
    coverage = {name: vocabulary.coverage(count) for name, count in counts.items()}
    if is_main_rank():
        table = coverage_table(rows, counts["train"], forced=forced, chosen=config.draft_vocab_size)
        folder = context.folder.of("train")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "coverage.json", json.dumps(table, indent=2))
        plot_coverage(table, folder / "coverage.png")
    context.reporter.say(
        f"  draft vocabulary: {len(vocabulary)} of {vocab_size} tokens, covering "
        + ", ".join(f"{share:.2%} of generated {name} tokens" for name, share in coverage.items())
    )
    return vocabulary, coverage


def token_counts(rows: list[CorpusRow], vocab_size: int) -> Tensor:
    """Return how often the target generated each token, int64 [V]."""
    generated = [example.input_ids_T[example.generated_mask_T.bool()] for example in (row.example() for row in rows)]
    return torch.bincount(torch.cat([torch.zeros(0, dtype=torch.int64), *generated]), minlength=vocab_size)


def coverage_table(rows: list[CorpusRow], training_V: Tensor, *, forced: set[int], chosen: int) -> dict[str, Any]:
    """Return {"chosen", "sizes", "sets": {name: {"tokens", "coverage": one share per size}}} over rows not trained on.

    Every size is filled from the training counts as the chosen one is.
    """
    vocab_size = len(training_V)
    sizes = sorted({size for size in (*SIZES, chosen) if len(forced) <= size < vocab_size} | {vocab_size})
    held_out = [row for row in rows if row.split != "train"]
    names = [ALL, *sorted({row.category for row in held_out} - {ALL})]
    counts = {
        name: token_counts([row for row in held_out if name in (ALL, row.category)], vocab_size) for name in names
    }
    vocabularies = [DraftVocabulary.from_counts(training_V, size=size, forced=forced) for size in sizes]
    return {
        "chosen": chosen,
        "sizes": sizes,
        "sets": {
            name: {
                "tokens": int(counts_V.sum()),
                "coverage": [vocabulary.coverage(counts_V) for vocabulary in vocabularies],
            }
            for name, counts_V in counts.items()
        },
    }


def plot_coverage(table: dict[str, Any], path: Path) -> None:
    """Write the table as a picture: one line per prompt set, the chosen size marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for name, entry in table["sets"].items():
        every = name == ALL
        axes.plot(
            table["sizes"],
            [100 * share for share in entry["coverage"]],
            marker="o",
            markersize=3.5,
            linewidth=2.2 if every else 1.1,
            color="#1d2430" if every else None,
            label=f"{name} ({entry['tokens']:,} tokens)",
            zorder=3 if every else 2,
        )
    axes.axvline(table["chosen"], color="#d98e32", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"chosen: {table['chosen']}", (table["chosen"], axes.get_ylim()[0]), xytext=(4, 6),
        textcoords="offset points", color="#d98e32", fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(table["sizes"], [f"{size:,}" for size in table["sizes"]], rotation=30, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("draft vocabulary size")
    axes.set_ylabel("held-out tokens covered, %")
    axes.set_title("What the draft vocabulary can propose, by prompt set", fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    temporary.replace(path)
