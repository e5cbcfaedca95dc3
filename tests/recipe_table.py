"""The table of docs/recipes.md: every bundled recipe as `eyas plan --card` computes it, on its target's public config.

python -m eyas.tests.recipe_table    # writes it there
"""

import json
import random
import tempfile
from functools import cache
from pathlib import Path

from eyas.data.sources import read_prompts
from eyas.tests.recipe_targets import TARGETS
from eyas.train.cards import CARDS, LAUNCH, Card
from eyas.train.context import RunContext
from eyas.train.machine import Speed
from eyas.train.plan import RunPlan, human, make_plan
from eyas.train.progress import Reporter
from eyas.train.recipe_io import bundled_recipes, load_recipe
from eyas.train.run_folder import RunFolder

# Assumed speeds of two CPU cores, near those in docs/log.md, so that the table is the same everywhere.
TWO_CORES = Card("2 cores of an AMD EPYC", 8_000_000_000, Speed(110e9, 400e9, 20e9, LAUNCH / 3))
CARDS_OF = {
    "llama-3.1-8b": "h100",
    "llama-3.3-70b": "b200",
    "qwen2.5-7b": "h100",
    "qwen2.5-72b": "b200",
    "qwen3-8b": "h100",
    "qwen3-32b": "h200",
    "qwen3-30b-a3b": "h200",
    "gpt-oss-20b": "h100",
    "gemma-3-12b": "h100",
    "mistral-small": "h200",
}
DOCS = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
DOMAIN_ROWS, DOMAIN_WORDS = 1500, 45


def card_of(name: str) -> Card:
    """Return the card that a recipe is planned for; those of the small target run on a CPU."""
    return CARDS[CARDS_OF[name]] if name in CARDS_OF else TWO_CORES


def write_domain(folder: Path, *, rows: int, words: int = DOMAIN_WORDS) -> list[str]:
    """Write made-up question files of a domain and return the settings that name them."""
    known = {word for prompt in read_prompts("bundled:train") for word in prompt.user_texts()[0].split()}
    usual, draw = sorted(word for word in known if word.isalpha()), random.Random(0)
    for name, count in (("train", rows), ("test", min(rows, 96))):
        questions = (" ".join(draw.choices(usual, k=words)) for _ in range(count))
        lines = [json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    source = f"{{path: {folder / 'train.jsonl'}, schema: question, category: gsm8k, limit: {rows}}}"
    return [f"synthesize.prompts=[{source}]", f"evaluate.prompts=[{folder / 'test.jsonl'}]"]


def plan_of(name: str, *settings: str, card: Card | None = None) -> RunPlan:
    """Return the plan of a bundled recipe on its target's public config, without weights, with room on disk."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = TARGETS[name].save_config(folder / "model")
        named = write_domain(folder, rows=DOMAIN_ROWS) if name == "smollm2-domain" else []
        recipe = load_recipe(name, [f"target.model={model}", "plan.disk=100TB", *named, *settings])
        context = RunContext(recipe, RunFolder(folder / "run"), Reporter(quiet=True))
        context.check()
        return make_plan(context, card=card)


@cache
def planned(name: str) -> RunPlan:
    """Return the plan of a bundled recipe on its card."""
    return plan_of(name, card=card_of(name))


def row(name: str) -> str:
    """Return one line of the table."""
    plan = planned(name)
    facts = plan.facts
    layers = ", ".join(map(str, facts.head_config.aux_layers)) or "final state"
    hours = {stage.name: (stage.seconds or 0.0) / 3600 for stage in plan.stages}
    cells = (
        f"[{name}](../recipes/{name}.yaml)",
        load_recipe(name).target.model,
        layers,
        f"{facts.head.parameters / 1e6:.0f}M",
        human(plan.disk_needed),
        human(max(stage.needed_memory for stage in plan.stages)),
        card_of(name).title,
        f"{hours['synthesize']:.1f}",
        f"{hours['train']:.1f}",
        f"{sum(hours.values()):.1f}",
    )
    return f"| {' | '.join(cells)} |"


def markdown() -> str:
    """Return the table."""
    columns = (
        "recipe", "target", "layers read", "head", "disk", "memory", "planned for one", "synthesize, h", "train, h",
        "all, h",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *map(row, bundled_recipes())]
    return "\n".join(lines)


if __name__ == "__main__":
    page, table = DOCS.read_text(encoding="utf-8"), markdown()
    start = page.index("| recipe |")
    DOCS.write_text(page[:start] + table + page[page.index("\n\n", start) :], encoding="utf-8")
    print(table)
