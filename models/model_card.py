"""The model card of a head: what was measured, on what, with which commands, and the YAML that the Hub indexes."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyas.models.engines import ENGINES, judge
from eyas.models.head_files import HeadFiles
from eyas.models.launch import COMMANDS, Serving

DEPTH, TOP_K, NODES = 5, 8, 16
BAREWORDS = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1"}


def model_card(files: HeadFiles, *, repo: str, target: str, licence: str | None) -> str:
    """Return README.md of a head for the Hub repo `repo`; `target` is the Hub id or path its launch lines name."""
    card = files.card
    recipe = card.get("recipe", {}).get("evaluate", {})
    tree = recipe.get("tree", {})
    serving = Serving(
        target,
        repo,
        depth=recipe.get("chain", {}).get("depth", DEPTH),
        top_k=tree.get("top_k", TOP_K),
        num_draft_tokens=tree.get("num_draft_tokens", NODES),
    )
    verdicts = [judge(name, files.fields) for name in ENGINES]
    launches = [
        (title, command(files.method, serving))
        for name, (title, command) in COMMANDS.items()
        if judge(name, files.fields).serves and not ENGINES[name].export
    ]
    rows = [*card.get("acceptance", []), *card.get("acceptance_by_set", [])]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("model_card.md.j2").render(
        metadata=_metadata(files, rows, repo=repo, target=target, licence=licence),
        name=repo.rpartition("/")[2],
        method=BAREWORDS[files.method],
        target=target,
        fields=files.fields,
        card=card,
        rows=[row for row in rows if row["method"] != "plain"],
        contexts=_contexts(card.get("acceptance_by_context", [])),
        verdicts=verdicts,
        launches=launches,
        licence=licence,
    )


def _contexts(by_context: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the tree, which copies nothing from the text, at the lowest temperature."""
    of_tree = [entry for entry in by_context if entry["method"] == "tree"]
    coldest = min((entry["temperature"] for entry in of_tree), default=None)
    return [entry for entry in of_tree if entry["temperature"] == coldest]


def _metadata(files: HeadFiles, rows: list[dict[str, Any]], *, repo: str, target: str, licence: str | None) -> str:
    """Return the YAML block: base model, library, tags, and one result per prompt set, method and temperature."""
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="eyas-prompts",
            dataset_name=f"{row['prompt_set']}, {row['method']}, T={row['temperature']:g}",
            dataset_config=f"{row['prompt_set']}-{row['method']}-{row['temperature']:g}",  # else they fall into one
            metric_type="acceptance-length",
            metric_name="tau, tokens per target forward",
            metric_value=round(row["tau"], 3),
        )
        for row in rows
        if row["method"] != "plain"
    ]
    hub_id = target.count("/") == 1 and not target.startswith((".", "/", "~"))
    data = ModelCardData(
        library_name="eyas",
        base_model=target if hub_id else None,
        license=licence,
        tags=["speculative-decoding", "eagle", f"{files.method}", "draft-model"],
        model_name=repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    return data.to_yaml()
