"""The export stage: the best head as a cross-engine checkpoint with its launch lines and numbers."""

from typing import Any

import torch

from eyas.models.bundled import resolve_model
from eyas.models.checkpoint import load_head, save_head
from eyas.models.launch import launch_lines
from eyas.models.target import load_tokenizer
from eyas.train.context import RunContext
from eyas.train.stage_evaluate import versions


def run_export(context: RunContext) -> dict[str, Any]:
    """Write head/ and return its path."""
    recipe = context.recipe
    folder = context.folder.of("export")
    dtype = getattr(torch, recipe.export.dtype)
    head = load_head(context.folder.of("train") / "best", dtype=torch.float32)
    tokenizer = load_tokenizer(recipe.target.model)
    training = context.folder.record("train").get("result", {})
    target = resolve_model(recipe.target.model)
    chain, tree = recipe.evaluate.chain, recipe.evaluate.tree
    metadata = {
        "target": recipe.target.model,
        "target_fingerprint": context.target_fingerprint,
        "chat_template": tokenizer.chat_template,
        "template_arguments": recipe.target.template_arguments,
        "coverage": training.get("coverage"),
        "trained_length": training.get("trained_length"),
        "acceptance": [
            entry for entry in context.folder.record("evaluate").get("result", {}).get("results", [])
            if entry["prompt_set"] == "all"
        ],
        "recipe": recipe.model_dump(mode="json"),
        "versions": versions(),
    }  # fmt: skip
    lines = launch_lines(
        target, str(folder), depth=chain.depth, top_k=tree.top_k, num_draft_tokens=tree.num_draft_tokens
    )
    save_head(head, folder, metadata=metadata, dtype=dtype, files={"README.md": lines})
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": str(folder), "bytes": size}
