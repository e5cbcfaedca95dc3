"""The extract stage: frozen features of every corpus row, or their checks alone where training computes them."""

import os
from pathlib import Path
from typing import Any

from eyas.data.extract import extract
from eyas.data.measure import describe
from eyas.data.online_rows import OnlineRows
from eyas.train.context import RunContext
from eyas.train.extraction_target import extraction_target
from eyas.train.features import extraction_plan, feature_examples, feature_spec


def run_extract(context: RunContext) -> dict[str, Any]:
    """Write the feature store and return its counts. Every process of a launch calls this and writes its own shards."""
    section = context.recipe.extract
    examples, _ = feature_examples(context)
    spec, plan = feature_spec(context, examples), extraction_plan(context)
    if section.mode == "online":
        OnlineRows(context.load_target(section.dtype, tapped=True), examples, plan, spec, cache_bytes=0).check()
        context.reporter.say("  extract.mode online: features are computed while training, none are stored")
        tokens = sum(len(example) for _, example in examples)
        return {"rows": len(examples), "tokens": tokens, "bytes": 0, "aux_layers": list(context.aux_layers)}
    folder = context.folder.of("extract")
    with extraction_target(context) as target, context.reporter.bar("tok") as bar:
        store = extract(
            target,
            examples,
            plan,
            folder,
            spec=spec,
            progress=lambda done, total, tokens: bar.update("extracting", done, total, tokens),
            rank=int(os.environ.get("RANK", "0")),
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )
    store.check_files(context.reporter.say)
    for line in describe(store.manifest.measured, context.aux_layers):
        context.reporter.say(line)
    return {
        "rows": store.manifest.rows,
        "tokens": store.manifest.tokens,
        "taught_tokens": store.manifest.taught,
        "bytes": sum(_size(folder / name) for name in store.manifest.shards),
        "aux_layers": list(context.aux_layers),
        "measured": store.manifest.measured,
    }


def _size(path: Path) -> int:
    return path.stat().st_size
