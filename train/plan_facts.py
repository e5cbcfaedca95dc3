"""What a plan is computed from: the recipe, the sizes of target and head, the corpus counts. No weight is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from eyas.models.bundled import resolve_model
from eyas.models.head_config import HeadConfig
from eyas.models.heads import new_head
from eyas.models.size import TargetSize, target_size
from eyas.train.context import RunContext, draft_vocab_size, read_all_prompts
from eyas.train.plan_corpus import (
    CorpusCounts,
    PromptLengths,
    count_allowed,
    count_finished,
    lengths_in,
    prompt_lengths,
)
from eyas.train.recipe import Recipe

CUDA_CONTEXT = 600 << 20  # what CUDA and its libraries take of a device before any tensor is there


@dataclass(frozen=True)
class HeadSize:
    """Parameters of a draft head: those every TTT step passes through, those used once per token (EAGLE-3's fc and its
    norms), and the output rows. `keys` are those of `layer` that a slot passes only to be seen by others.
    """

    layer: int
    fuse: int
    lm_head: int
    keys: int

    @property
    def parameters(self) -> int:
        return self.layer + self.fuse + self.lm_head


@dataclass(frozen=True)
class Facts:
    """`base` is what the process takes before any work; `weight_file` the bytes of the target's files (0: not here) and
    `weight_dtype` what they hold.

    `maps` says that mapped files lie in the memory that is planned: on a CPU.
    """

    recipe: Recipe
    target: TargetSize
    head_config: HeadConfig
    head: HeadSize
    lengths: PromptLengths
    counts: CorpusCounts
    evaluation_prompts: int
    evaluation_sets: int
    weight_file: int
    weight_dtype: str
    base: int
    maps: bool
    final_everywhere: bool

    @property
    def trained(self) -> int:
        """Parameters of the head that learn."""
        frozen = 0 if self.recipe.train.lm_head_rate > 0 else self.head.lm_head
        return self.head.parameters - frozen

    @property
    def moments(self) -> int:
        """Numbers the optimizer keeps: two per parameter that learns, one where Muon trains it."""
        matrices = self.head.layer + self.head.fuse if self.recipe.train.optimizer == "muon" else 0
        return 2 * self.trained - matrices

    @property
    def averaged(self) -> int:
        """Numbers of the averaged weights, 0 without averaging."""
        return self.trained if self.recipe.train.ema else 0

    @property
    def tokens_per_batch(self) -> float:
        """Tokens of one batch of lines."""
        section, counts = self.recipe.train, self.counts
        mean_row = counts.stored_tokens / max(1, counts.stored_rows)
        return section.lines_per_batch * (section.line_length if section.batching == "packed" else mean_row)

    @property
    def steps(self) -> int:
        """Optimizer steps on one process."""
        section = self.recipe.train
        batches = self.counts.stored_tokens / self.tokens_per_batch
        return round(section.epochs * batches / section.accumulate) if section.epochs else section.steps

    @property
    def vocabulary_map(self) -> int:
        """Bytes of d2t and t2d in a checkpoint of the head."""
        config = self.head_config
        return 0 if config.full_vocabulary else 8 * config.draft_vocab_size + config.vocab_size


def gather_facts(context: RunContext, *, on_card: bool = False) -> Facts:
    """Return the facts of a run, on this machine's device or on a GPU that is not here.

    Raises UserError where the recipe does not fit its target or its files.
    """
    recipe = context.recipe
    prompts = read_all_prompts(recipe.evaluate.prompts)
    own = recipe.synthesize.self_heldout if recipe.evaluate.self_heldout else 0
    weights = Path(resolve_model(recipe.target.model)).glob("*.safetensors")
    on_cpu = not on_card and not context.device.startswith("cuda")
    finished = context.folder.is_finished("synthesize", context.fingerprints["synthesize"])
    corpus = context.folder.of("synthesize")
    exact = finished and (corpus / "corpus.jsonl").is_file()  # where it is missing, the stage that reads it will say so
    lengths = lengths_in(context, corpus) if exact else prompt_lengths(context)
    counts = count_finished(corpus) if exact else count_allowed(recipe, lengths)
    return Facts(
        recipe=recipe,
        target=target_size(context.target_config),
        head_config=context.head_config,
        head=head_size(context.head_config),
        lengths=lengths,
        counts=counts,
        evaluation_prompts=len(prompts) + own,
        evaluation_sets=len({prompt.category for prompt in prompts}) + bool(own),
        weight_file=sum(path.stat().st_size for path in weights),
        weight_dtype=str(context.target_config.dtype).removeprefix("torch."),
        base=psutil.Process().memory_info().rss if on_cpu else CUDA_CONTEXT,
        maps=on_cpu,
        final_everywhere=context.final_states == "everywhere",
    )


def facts_with(facts: Facts, recipe: Recipe) -> Facts:
    """Return the facts of the same run with another recipe for the same target and prompts.

    Raises UserError where that recipe is impossible.
    """
    config = replace(facts.head_config, draft_vocab_size=draft_vocab_size(recipe.head, facts.head_config.vocab_size))
    counts = facts.counts
    if recipe.synthesize != facts.recipe.synthesize:
        counts = count_allowed(recipe, facts.lengths)
    return replace(facts, recipe=recipe, head_config=config, head=head_size(config), counts=counts)


def head_size(config: HeadConfig) -> HeadSize:
    """Return the size of a head from its config."""
    with torch.device("meta"):
        head = new_head(config)
    sizes = {name: parameter.numel() for name, parameter in head.named_parameters()}
    lm_head = sum(size for name, size in sizes.items() if name.startswith("lm_head."))
    once = ("fc.", "fc_norm.", "input_norm.") if config.kind == "eagle3" else ()
    fuse = sum(size for name, size in sizes.items() if name.startswith(once))
    layer = sum(sizes.values()) - lm_head - fuse
    first = "midlayer." if config.kind == "eagle3" else "layers.0."
    last = first if config.num_layers == 1 else f"layers.{config.num_layers - 1}."
    of_last = {name.removeprefix(last): size for name, size in sizes.items() if name.startswith(last)}
    unseen = sum(of_last.values()) - sum(of_last[f"self_attn.{name}_proj.weight"] for name in "kv")
    return HeadSize(layer=layer, fuse=fuse, lm_head=lm_head, keys=layer - unseen)
