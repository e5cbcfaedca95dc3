"""What every stage of a run shares: the recipe, the folder, the fingerprints, and where to report."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from eyas.data.conversation import bundled_prompts, read_prompts
from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.head_config import check_aux_layers, default_aux_layers
from eyas.models.kv_cache import check_full_attention
from eyas.models.target import Target, model_fingerprint
from eyas.train.progress import Reporter
from eyas.train.recipe import Recipe
from eyas.train.run_folder import RunFolder, file_hash, fingerprint

CODE_VERSION = {"synthesize": 1, "extract": 1, "train": 1, "evaluate": 1, "export": 1}  # raise when results change


@dataclass(frozen=True)
class RunContext:
    """One run of one recipe."""

    recipe: Recipe
    folder: RunFolder
    reporter: Reporter

    @cached_property
    def device(self) -> str:
        """The device stages work on."""
        asked = self.recipe.target.device
        if asked != "auto":
            return asked
        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def target_fingerprint(self) -> str:
        return model_fingerprint(self.recipe.target.model)

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """The aux layers of the recipe, or the default ones of its target."""
        return self.recipe.head.aux_layers or default_aux_layers(self.target_config.num_hidden_layers)

    @cached_property
    def target_config(self) -> PreTrainedConfig:
        """The target's own (text) config, read without loading its weights."""
        name = self.recipe.target.model
        folder = resolve_model(name)
        try:
            return AutoConfig.from_pretrained(folder).get_text_config()
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the config of target {name!r}: {error}") from None

    def check(self) -> None:
        """Raise UserError for anything in the recipe that does not fit its target or its files, before any work."""
        config = self.target_config
        check_aux_layers(self.aux_layers, num_layers=config.num_hidden_layers)
        check_full_attention(config)
        if self.recipe.head.draft_vocab_size > config.vocab_size:
            raise UserError(
                f"head.draft_vocab_size {self.recipe.head.draft_vocab_size} is larger than the target's vocabulary of "
                f"{config.vocab_size} tokens; set it to at most that."
            )
        for source in (*self.recipe.synthesize.prompts, *self.recipe.evaluate.prompts):
            read_prompts(source)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every stage: its section, its code version, and all it stands on."""
        recipe = self.recipe
        keys: dict[str, str] = {}
        keys["synthesize"] = self._key(
            "synthesize", recipe.synthesize.model_dump(), self.target_fingerprint, recipe.target.template_arguments,
            [prompt_file_hash(source) for source in recipe.synthesize.prompts],
        )  # fmt: skip
        keys["extract"] = self._key("extract", recipe.extract.model_dump(), list(self.aux_layers), keys["synthesize"])
        keys["train"] = self._key("train", recipe.head.model_dump(), recipe.train.model_dump(), keys["extract"])
        keys["evaluate"] = self._key(
            "evaluate", recipe.evaluate.model_dump(), keys["train"],
            [prompt_file_hash(source) for source in recipe.evaluate.prompts],
        )  # fmt: skip
        keys["export"] = self._key("export", recipe.export.model_dump(), keys["evaluate"])
        return keys

    def _key(self, stage: str, *parts: object) -> str:
        return fingerprint({"stage": stage, "version": CODE_VERSION[stage], "parts": parts})

    def load_target(self, dtype: str, *, tapped: bool) -> Target:
        """Load the recipe's target in a dtype, with aux taps or without."""
        return Target.load(
            self.recipe.target.model,
            dtype=getattr(torch, dtype),
            aux_layers=self.aux_layers if tapped else (),
            device=self.device,
        )


def prompt_file_hash(source: str) -> str:
    """Return the hash of a prompt file; raises UserError when there is none."""
    path = bundled_prompts(source.removeprefix("bundled:")) if source.startswith("bundled:") else Path(source)
    if not path.is_file():
        raise UserError(f"there is no prompt file {source!r}; give a JSONL file, or bundled:train or bundled:eval.")
    return file_hash(path)
