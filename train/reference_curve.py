"""What is normal: the held-out acceptance of finished runs of bundled recipes, step by step, shipped beside them.

A run of the same recipe is drawn over its reference and told where it stays behind: a wrong mask, layer or template
does not stop the loss from falling, but it shows here. A run of any other recipe hears how far the references came with
how many tokens. `python -m eyas.train.reference_curve RUN` prints the curve of a finished run, for recipes/curves/.
"""

import argparse
import json
import sys
from bisect import bisect_left
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from eyas.models.errors import UserError
from eyas.train.comparison import FinishedRun
from eyas.train.recipe import Recipe
from eyas.train.recipe_io import RECIPES, load_recipe
from eyas.train.run_folder import fingerprint

CURVES = RECIPES / "curves"
TAUS = ("tau", "tree_tau")
BEHIND = 0.1  # of tau: five times what two seeds differ by at the end of a run (docs/log.md)
# What does not change a run's curve, section by section; all else of target, corpus, features, head and training does.
BESIDE: dict[str, set[str]] = {
    "target": {"device", "device_map", "attention"},
    "synthesize": {"backend", "rows_per_part", "max_drop_share", "strict"},
    "extract": {"mode", "cache_bytes", "backend", "vllm_python", "rows_per_shard", "checked_rows", "tokens_per_batch"},
    "head": set(),
    "train": {
        "attention", "recompute", "compile", "validate_every", "decode_every", "decode_prompts", "checkpoint_every",
        "patience", "tracker",
    },
}  # fmt: skip


@dataclass(frozen=True)
class ReferenceCurve:
    """A finished run of a bundled recipe: `points` hold step, tau and tree_tau of every validation, ascending.

    `settings` is the fingerprint of all that a run's curve follows from, `taught_tokens` what it was trained on.
    """

    recipe: str
    settings: str
    target: str
    taught_tokens: int
    head_parameters: int
    points: tuple[dict[str, float], ...]
    commit: str | None
    seed: int
    machine: str
    written: str

    @property
    def last(self) -> dict[str, float]:
        return self.points[-1]

    def at(self, step: int, name: str) -> float | None:
        """Return the reference's tau at a step, between validations by a straight line; None behind its last."""
        steps = [point["step"] for point in self.points]
        right = bisect_left(steps, step)
        if right == len(steps):
            return None
        if right == 0:
            return self.points[0][name]
        a, b = self.points[right - 1], self.points[right]
        return a[name] + (b[name] - a[name]) * (step - a["step"]) / (b["step"] - a["step"])


@cache
def references() -> tuple[ReferenceCurve, ...]:
    """Return the shipped curves, the smallest corpus first."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(CURVES.glob("*.json"))]
    curves = [ReferenceCurve(**{**fields, "points": tuple(fields["points"])}) for fields in read]
    return tuple(sorted(curves, key=lambda curve: curve.taught_tokens))


def reference_of(recipe: Recipe) -> ReferenceCurve | None:
    """Return the curve of the run whose recipe trained just as this one does, whatever either is called."""
    return next((curve for curve in references() if curve.settings == training_settings(recipe)), None)


def behind(curve: ReferenceCurve, point: dict[str, float]) -> str:
    """Return how a validation compares with the reference, "" where that has no number."""
    expected = curve.at(int(point["step"]), "tau")
    if expected is None:
        return ""
    said = f"reference {expected:.3f}"
    if point["tau"] >= expected - BEHIND:
        return said
    return (
        f"{said}: {expected - point['tau']:.2f} behind the run of this recipe that eyas ships, where two seeds differ "
        "by 0.02. Something in corpus, template, layers or map is not as it was; eyas doctor RECIPE checks them"
    )


def what_is_normal(taught_tokens: int) -> str:
    """Return how far the references came with how many tokens, for runs of other recipes."""
    known = "; ".join(
        f"{curve.last['tau']:.2f} and {curve.last['tree_tau']:.2f} with {curve.taught_tokens:,} ({curve.target})"
        for curve in references()
    )
    return (
        f"{taught_tokens:,} taught tokens. For orientation, the held-out tau of chain and tree that runs of bundled "
        f"recipes reached: {known}; docs/training.md has more"
    )


def curve_of(run: Path) -> ReferenceCurve:
    """Return the curve of a finished run; raises UserError for one that is not finished, export included."""
    finished = FinishedRun.read(run)
    if not (made := finished.card.get("provenance")):
        raise UserError(f"{run} has no exported head, which says of what code and machine the run is: export it first.")
    recipe, train, machine = load_recipe(str(run / "recipe.yaml")), finished.results["train"], made["machine"]
    return ReferenceCurve(
        recipe=recipe.name,
        settings=training_settings(recipe),
        target=recipe.target.model,
        taught_tokens=train["supervised_tokens"],
        head_parameters=train["head_parameters"],
        points=tuple(
            {"step": point["step"], **{name: round(point[name], 4) for name in TAUS}} for point in train["history"]
        ),
        commit=made["commit"],
        seed=recipe.train.seed,
        machine=f"{machine['cores']} cores {machine['cpu']}, {', '.join(machine['gpus']) or 'no GPU'}",
        written=made["written"],
    )


def training_settings(recipe: Recipe) -> str:
    """Return the fingerprint of the settings that a run's curve follows from."""
    fields = recipe.model_dump(mode="json")
    kept = {name: {k: v for k, v in fields[name].items() if k not in beside} for name, beside in BESIDE.items()}
    return fingerprint(kept)


def main(arguments: list[str] | None = None) -> int:
    """Print the curve of a finished run as JSON and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eyas.train.reference_curve", description="Print a run's curve.")
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    try:
        print(json.dumps(asdict(curve_of(parser.parse_args(arguments).run)), indent=1))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
