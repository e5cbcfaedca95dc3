"""What every stage of a run shares: the recipe, the folder, the fingerprints, and where to report."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from eyas.data.conversation import Prompt, bundled_prompts, read_prompts
from eyas.inference.draft import DynamicTree
from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig, default_aux_layers, head_config_for
from eyas.models.kv_cache import attention_kinds
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
        if asked == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=asked)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"target.device {asked!r} cannot be used here: {reason}; set it to auto or cpu.") from None
        return asked

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

    @cached_property
    def head_config(self) -> HeadConfig:
        """The configuration of the recipe's head on its target; raises UserError where the two do not fit."""
        section = self.recipe.head
        return head_config_for(
            self.target_config,
            aux_layers=self.aux_layers,
            draft_vocab_size=section.draft_vocab_size,
            intermediate_size=section.intermediate_size,
            norm_before_residual=section.norm_before_residual,
            norm_before_fc=section.norm_before_fc,
            fc_norm=section.fc_norm,
            norm_output=section.norm_output,
        )

    def check(self) -> None:
        """Raise UserError for anything in the recipe that does not fit its target or its files, before any work."""
        attention_kinds(self.target_config)
        _ = self.device, self.head_config  # both raise where the recipe asks for what is not there
        evaluation = self.recipe.evaluate
        DynamicTree(evaluation.tree.depth, evaluation.tree.top_k, evaluation.tree.num_draft_tokens)
        read_all_prompts(self.recipe.synthesize.prompts)
        reserved = {prompt.category for prompt in read_all_prompts(evaluation.prompts)} & {"all", "self-written"}
        if reserved:
            raise UserError(f"evaluation category {reserved.pop()!r} is a name of the report's own; rename it.")

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
        disable_progress_bar()  # transformers' own, of a second's work
        return Target.load(
            self.recipe.target.model,
            dtype=getattr(torch, dtype),
            aux_layers=self.aux_layers if tapped else (),
            device=self.device,
        )


def read_all_prompts(sources: tuple[str, ...]) -> list[Prompt]:
    """Return the prompts of several files; raises UserError when an id occurs twice, as results are kept by id."""
    prompts = [prompt for source in sources for prompt in read_prompts(source)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"prompt id {prompt.id!r} occurs twice in {', '.join(sources)}; ids must be unique.")
        seen.add(prompt.id)
    return prompts


def prompt_file_hash(source: str) -> str:
    """Return the hash of a prompt file; raises UserError when there is none."""
    path = bundled_prompts(source.removeprefix("bundled:")) if source.startswith("bundled:") else Path(source)
    if not path.is_file():
        raise UserError(f"there is no prompt file {source!r}; give a JSONL file, or bundled:train or bundled:eval.")
    return file_hash(path)
