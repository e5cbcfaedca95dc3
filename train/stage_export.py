"""The export stage: the best head as the native checkpoint, with launch lines, numbers and fingerprints."""

import json
from typing import Any

import torch

from eyas.models.bundled import resolve_model
from eyas.models.checkpoint import load_head, save_head
from eyas.models.engines import judge
from eyas.models.feature_fingerprint import feature_fingerprint, fixed_prompt
from eyas.models.head_json import head_config_json
from eyas.models.launch import COMMANDS, Serving, launch_lines
from eyas.models.target import load_tokenizer
from eyas.models.target_checks import tokenizer_fingerprint
from eyas.models.target_facts import TargetFacts
from eyas.train.context import RunContext
from eyas.train.prompt_sources import prompt_file_hash
from eyas.train.provenance import provenance
from eyas.train.stage_evaluate import CALIBRATION_FILE


def run_export(context: RunContext) -> dict[str, Any]:
    """Write head/ and return its path."""
    recipe = context.recipe
    folder = context.folder.of("export")
    dtype = getattr(torch, recipe.export.dtype)
    head = load_head(context.folder.of("train") / "best", dtype=torch.float32)
    chain, tree = recipe.evaluate.chain, recipe.evaluate.tree
    target = resolve_model(recipe.target.model)
    serving = Serving(target, str(folder), depth=chain.depth, top_k=tree.top_k, num_draft_tokens=tree.num_draft_tokens)
    fields = head_config_json(head.config, dtype=dtype)
    engines = tuple(name for name in COMMANDS if (verdict := judge(name, fields)).serves and not verdict.export)
    save_head(
        head, folder, metadata=head_metadata(context), dtype=dtype,
        files={"README.md": launch_lines(serving, method=head.config.kind, engines=engines)},
    )  # fmt: skip
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": str(folder), "bytes": size}


def head_metadata(context: RunContext) -> dict[str, Any]:
    """Return eyas.json's content: what the head was trained for and on, how well it drafts, where it came from."""
    recipe = context.recipe
    tokenizer = load_tokenizer(recipe.target.model)
    facts = TargetFacts.of(recipe.target.model)
    training = context.folder.record("train").get("result", {})
    evaluated = context.folder.record("evaluate").get("result", {})
    results = evaluated.get("results", [])
    tapped = context.load_target(recipe.extract.dtype, tapped=True)
    return {
        "target": recipe.target.model,
        "target_fingerprint": context.target_fingerprint,
        "target_revision": getattr(facts.config, "_commit_hash", None),
        "target_quantisation": facts.quantisation,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "chat_template": tokenizer.chat_template,
        "template_arguments": recipe.target.template_arguments,
        "features": feature_fingerprint(tapped, fixed_prompt(tokenizer)),
        "coverage": training.get("coverage"),
        "trained_length": training.get("trained_length"),
        "data": context.folder.record("synthesize").get("result", {}),
        "training": {name: training[name] for name in _TRAINING if name in training},
        "evaluation_prompts": {source: prompt_file_hash(source) for source in recipe.evaluate.prompts},
        "acceptance": [entry for entry in results if entry["prompt_set"] == "all"],
        "acceptance_by_set": [entry for entry in results if entry["prompt_set"] != "all"],
        "acceptance_by_context": evaluated.get("by_context", []),
        **_calibration(context),
        "recipe": recipe.model_dump(mode="json"),
        "provenance": provenance(seed=recipe.train.seed),
    }


def _calibration(context: RunContext) -> dict[str, Any]:
    """Return the calibration that the evaluate stage made, if it made one."""
    path = context.folder.of("evaluate") / CALIBRATION_FILE
    return {"calibration": json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}


_TRAINING = (
    "steps", "best_by", "best_step", "best_validation_tau", "best_validation_tree_tau", "rows", "supervised_tokens",
    "head_parameters",
)  # fmt: skip
