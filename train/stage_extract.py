"""The extract stage: frozen features of every corpus row."""

from typing import Any

import torch

from eyas.data.corpus import load_corpus
from eyas.data.extract import ExtractionPlan, extract
from eyas.train.context import RunContext
from eyas.train.extraction_target import extraction_target


def run_extract(context: RunContext) -> dict[str, Any]:
    """Write the feature store and return its counts."""
    section = context.recipe.extract
    rows = load_corpus(context.folder.of("synthesize") / "corpus.jsonl")
    folder = context.folder.of("extract")
    plan = ExtractionPlan(
        max_length=context.recipe.train.line_length,
        tokens_per_batch=section.tokens_per_batch,
        rows_per_shard=section.rows_per_shard,
        state_dtype=getattr(torch, section.state_dtype),
    )
    with extraction_target(context) as target, context.reporter.bar("tok") as bar:
        store = extract(
            target,
            [(row.id, row.example()) for row in rows if row.split != "heldout"],
            plan,
            folder,
            target_fingerprint=context.target_fingerprint,
            corpus_fingerprint=context.fingerprints["synthesize"],
            progress=lambda done, total, tokens: bar.update("extracting", done, total, tokens),
        )
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "rows": store.manifest.rows,
        "tokens": store.manifest.tokens,
        "bytes": size,
        "aux_layers": context.aux_layers,
    }
