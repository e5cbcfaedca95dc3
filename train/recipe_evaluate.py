"""The evaluate section of a recipe: trees, calibration, and what is decoded."""

from typing import Annotated

from pydantic import Field, model_validator

from eyas.train.recipe_section import Dtype, NonNegative, Positive, Section


class ChainSection(Section):
    """A chain of `depth` drafts."""

    depth: Positive = 5


class TreeSection(Section):
    """A dynamic tree."""

    depth: Positive = 5
    top_k: Positive = 8
    num_draft_tokens: Positive = 16


class EvaluatedTreeSection(TreeSection):
    """A dynamic tree, its nodes chosen by the head's own probabilities or by calibrated ones."""

    calibrated: bool = False


class AutoSection(Section):
    """A cost-aware tree: at most so many levels, children and nodes, in each round as many as pay on this machine."""

    depth: Positive = 8
    top_k: Positive = 6
    num_draft_tokens: Positive = 32


class CalibrationSection(Section):
    """Rounds on prompts of the validation split that the head's scores are calibrated on (0 prompts: not at all)."""

    prompts: NonNegative = 32
    max_new_tokens: Annotated[int, Field(ge=2)] = 48
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = (0.0, 1.0)

    @model_validator(mode="after")
    def _both_kinds(self) -> "CalibrationSection":
        if (
            0 not in self.temperatures
            or len(set(self.temperatures)) != len(self.temperatures)
            or len(self.temperatures) < 2
        ):
            raise ValueError(
                f"calibration.temperatures must be 0 and at least one above it, each once, given {self.temperatures}"
            )
        return self


class EvaluateSection(Section):
    """Held-out decoding. `sampled_prompts` bounds how many prompts per set are also decoded at each T > 0 (0: none).

    Before anything is measured the head is calibrated; with `auto` a cost-aware tree is measured beside the others.
    """

    prompts: tuple[str, ...] = ("bundled:eval",)
    self_heldout: bool = True
    max_new_tokens: Positive = 64
    temperatures: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (0.0, 1.0)
    sampled_prompts: NonNegative = 12
    chain: ChainSection = ChainSection()
    tree: EvaluatedTreeSection = EvaluatedTreeSection()
    auto: AutoSection | None = None
    calibration: CalibrationSection = CalibrationSection()
    dtype: Dtype = "float32"
    draft_dtype: Dtype = "bfloat16"
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _has_calibration(self) -> "EvaluateSection":
        if (self.tree.calibrated or self.auto is not None) and self.calibration.prompts == 0:
            raise ValueError("evaluate.tree.calibrated and evaluate.auto need evaluate.calibration.prompts above 0")
        return self
