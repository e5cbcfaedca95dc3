"""What every stage of a run shares: the recipe, the folder, the fingerprints, and where to report."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from eyas.data.conversation import Prompt
from eyas.data.encode import ChatTemplate
from eyas.data.ranks import Ranks
from eyas.data.sources import SourcesReport, read_prompts
from eyas.inference.draft import DynamicTree
from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.head_config import HeadConfig, default_aux_layers, head_config_for
from eyas.models.hub import resolve_head
from eyas.models.kv_cache import attention_kinds
from eyas.models.target import Target, load_tokenizer, model_fingerprint
from eyas.models.target_parts import borrowed_parts
from eyas.train.machine import chosen_device
from eyas.train.progress import Reporter
from eyas.train.prompt_sources import prompt_file_hash, prompt_sources, read_given, source_hash
from eyas.train.ranks import launched_ranks
from eyas.train.recipe import HeadSection, Recipe
from eyas.train.run_folder import RunFolder, fingerprint

DEFAULT_DRAFT_VOCAB_SIZE = 8192
CODE_VERSION = {"synthesize": 3, "extract": 2, "train": 2, "evaluate": 3, "export": 2}  # raise when results change

HOW_TO_REACH_IT = {"backend": {"url", "api_key_env", "concurrency", "retries", "timeout"}}  # changes no reply


@dataclass(frozen=True)
class RunContext:
    """One run of one recipe."""

    recipe: Recipe
    folder: RunFolder
    reporter: Reporter

    @cached_property
    def device(self) -> str:
        """The device stages work on."""
        return chosen_device(self.recipe.target.device, setting="target.device")

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that share this run's work."""
        return launched_ranks(cpu=self.device == "cpu")

    @cached_property
    def target_fingerprint(self) -> str:
        """The target's weights, config and tokenizer, and how its weights are quantised here, as a short text."""
        quantization = self.recipe.target.quantization
        return model_fingerprint(self.recipe.target.model) + ("" if quantization == "none" else f"-{quantization}")

    @cached_property
    def aux_layers(self) -> tuple[int, ...]:
        """The aux layers of the recipe, or the default ones of its target; none for EAGLE-1."""
        if self.recipe.head.kind == "eagle1":
            return self.recipe.head.aux_layers
        return self.recipe.head.aux_layers or default_aux_layers(self.target_config.num_hidden_layers)

    @property
    def final_states(self) -> str:
        """Where final states are kept: at every token for EAGLE-1, which reads them, or where prompts are taught."""
        recipe = self.recipe
        everywhere = recipe.head.kind == "eagle1" or recipe.train.supervise == "all"
        return "everywhere" if everywhere else recipe.extract.final_states

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
    def template(self) -> ChatTemplate:
        """The target's chat template with the recipe's arguments."""
        return ChatTemplate(load_tokenizer(self.recipe.target.model), self.recipe.target.template_arguments)

    @cached_property
    def given(self) -> SourcesReport:
        """The given conversations, read once for all that ask; raises RowsRefused."""
        positions = self.target_config.max_position_embeddings
        return read_given(self.recipe, self.template, positions=positions, reporter=self.reporter)

    @cached_property
    def head_config(self) -> HeadConfig:
        """The configuration of the recipe's head on its target; raises UserError where the two do not fit."""
        section = self.recipe.head
        return head_config_for(
            self.target_config,
            kind=section.kind,
            num_layers=section.num_layers,
            aux_layers=self.aux_layers,
            draft_vocab_size=draft_vocab_size(section, self.target_config.vocab_size),
            intermediate_size=section.intermediate_size,
            norm_before_residual=section.norm_before_residual,
            norm_before_fc=section.norm_before_fc,
            fc_norm=section.fc_norm,
            norm_output=section.norm_output,
        )

    @cached_property
    def init_folder(self) -> Path | None:
        """The folder of the trained head to go on from (head.init), None where a head begins anew."""
        init = self.recipe.head.init
        if init in ("target", "random"):
            return None
        try:
            return resolve_head(init)
        except UserError as error:
            raise UserError(f"head.init {init!r} is neither target, random nor a trained head: {error}") from None

    @cached_property
    def validation_tree(self) -> DynamicTree:
        """The dynamic tree that held-out rows are replayed with."""
        section = self.recipe.train.validation_tree or self.recipe.evaluate.tree
        return DynamicTree(section.depth, section.top_k, section.num_draft_tokens)

    def check(self) -> None:
        """Raise UserError for anything in the recipe that does not fit its target or its files, before any work."""
        attention_kinds(self.target_config)
        _ = self.device, self.head_config, self.validation_tree  # raise where the recipe asks for what is not there
        evaluation = self.recipe.evaluate
        trees = (evaluation.tree,) if evaluation.auto is None else (evaluation.tree, evaluation.auto)
        for tree in trees:
            DynamicTree(tree.depth, tree.top_k, tree.num_draft_tokens)
        for source in prompt_sources(self.recipe):
            if source.dataset is None:  # datasets are asked for only by the stage that reads them
                source.probe()
        reserved = {prompt.category for prompt in read_all_prompts(evaluation.prompts)} & {"all", "self-written"}
        if reserved:
            raise UserError(f"evaluation category {reserved.pop()!r} is a name of the report's own; rename it.")

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every stage: its section, its code version, and all it stands on."""
        recipe = self.recipe
        keys: dict[str, str] = {}
        keys["synthesize"] = self._key(
            "synthesize", recipe.synthesize.model_dump(exclude=HOW_TO_REACH_IT), self.target_fingerprint,
            recipe.target.template_arguments, [source_hash(source) for source in prompt_sources(recipe)],
            # Not those of evaluate.prompts: a changed evaluation set costs no corpus, its stage checks it anew.
            [prompt_file_hash(source) for source in recipe.synthesize.dedup.overlap_with or ()],
        )  # fmt: skip
        keys["extract"] = self._key(
            "extract", recipe.extract.model_dump(), self.final_states, list(self.aux_layers), keys["synthesize"]
        )
        keys["train"] = self._key(
            "train", recipe.head.model_dump(), recipe.train.model_dump(), keys["extract"],
            # The tree chooses the head only then; else it is only looked at.
            *([asdict(self.validation_tree)] if recipe.train.best_by == "tree" else []),
            *([model_fingerprint(str(self.init_folder))] if self.init_folder else []),
        )  # fmt: skip
        keys["evaluate"] = self._key(
            "evaluate", recipe.evaluate.model_dump(), keys["train"],
            [prompt_file_hash(source) for source in recipe.evaluate.prompts],
        )  # fmt: skip
        keys["export"] = self._key("export", recipe.export.model_dump(), keys["evaluate"])
        return keys

    def _key(self, stage: str, *parts: object) -> str:
        return fingerprint({"stage": stage, "version": CODE_VERSION[stage], "parts": parts})

    def load_borrowed(self) -> Target:
        """Load what a head borrows of the target, in fp32: its plain weights, quantised ones being the same, rounded.

        The whole target is loaded, and said to be, where its files do not hold these parts plain.
        """
        start = self.recipe.head.init == "target"
        try:
            return borrowed_parts(self.recipe.target.model, dtype=torch.float32, device=self.device, last_layer=start)
        except UserError as error:
            self.reporter.say(f"  loading the whole target: {error}")
        return self.load_target("float32", tapped=False, plain=True)

    def load_target(self, dtype: str, *, tapped: bool, plain: bool = False) -> Target:
        """Load the recipe's target in a dtype, with aux taps or not; `plain` leaves out the recipe's quantisation."""
        disable_progress_bar()  # transformers' own, of a second's work
        section = self.recipe.target
        return Target.load(
            section.model,
            dtype=getattr(torch, dtype),
            aux_layers=self.aux_layers if tapped else (),
            device=self.device,
            device_map=section.device_map,
            quantization="none" if plain else section.quantization,
            attention=section.attention,
        )


def draft_vocab_size(section: HeadSection, vocab_size: int) -> int:
    """Return how many tokens the recipe's head drafts over, of the target's vocabulary."""
    if section.draft_vocab_size == "full" or (section.draft_vocab_size is None and section.kind == "eagle1"):
        return vocab_size
    return section.draft_vocab_size or min(DEFAULT_DRAFT_VOCAB_SIZE, vocab_size)


def read_all_prompts(sources: tuple[str, ...]) -> list[Prompt]:
    """Return the prompts of several files; raises UserError when an id occurs twice, as results are kept by id."""
    prompts = [prompt for source in sources for prompt in read_prompts(source)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise UserError(f"prompt id {prompt.id!r} occurs twice in {', '.join(sources)}; ids must be unique.")
        seen.add(prompt.id)
    return prompts
