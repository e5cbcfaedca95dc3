"""Where a run's features come from: its store on disk, or the target itself while training (extract.mode)."""

import json
from typing import NamedTuple

from eyas.data.corpus import load_corpus
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_row import RowSource, SelectedRows
from eyas.data.feature_store import FeatureStore
from eyas.data.forward_rows import Example
from eyas.data.manifest import FeatureSpec, data_fingerprint
from eyas.data.online_rows import OnlineRows
from eyas.models.target import load_tokenizer
from eyas.models.target_loading import quantization_of
from eyas.train.context import RunContext
from eyas.train.run_folder import fingerprint


class RunRows(NamedTuple):
    """The training and validation rows of a run; held-out rows have no features."""

    training: SelectedRows
    validation: SelectedRows


def feature_examples(context: RunContext) -> tuple[list[Example], list[str]]:
    """Return the rows that get features, in corpus order, and the split of each."""
    rows = [row for row in load_corpus(context.folder.of("synthesize") / "corpus.jsonl") if row.split != "heldout"]
    return [(row.id, row.example()) for row in rows], [row.split for row in rows]


def feature_spec(context: RunContext, examples: list[Example]) -> FeatureSpec:
    """Return what this run's features are made of."""
    recipe, config = context.recipe, context.target_config
    tokenizer = load_tokenizer(recipe.target.model)
    return FeatureSpec(
        target=context.target_fingerprint,
        quantization=quantization_of(recipe.target.model, recipe.target.quantization),
        tokenizer=fingerprint({"vocabulary": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}),
        template=fingerprint({"template": str(tokenizer.chat_template)}),
        template_arguments=json.dumps(recipe.target.template_arguments, sort_keys=True),
        aux_layers=context.aux_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        compute_dtype=recipe.extract.dtype,
        state_dtype=recipe.extract.state_dtype,
        data=data_fingerprint(examples),
        final_at=context.final_states,
    )


def extraction_plan(context: RunContext) -> ExtractionPlan:
    """Return how this run's rows are batched and sharded."""
    section = context.recipe.extract
    return ExtractionPlan(
        max_length=context.recipe.train.line_length,
        tokens_per_batch=section.tokens_per_batch,
        rows_per_shard=section.rows_per_shard,
        checked_rows=section.checked_rows,
    )


def open_rows(context: RunContext) -> RunRows:
    """Return the run's rows. Raises UserError when the store was made of anything else than this run's."""
    examples, splits = feature_examples(context)
    spec, section = feature_spec(context, examples), context.recipe.extract
    source: RowSource
    if section.mode == "online":
        target = context.load_target(section.dtype, tapped=True)
        source = OnlineRows(target, examples, extraction_plan(context), spec, cache_bytes=section.cache_bytes)
    else:
        store = FeatureStore(context.folder.of("extract"))
        store.check(spec, max_length=context.recipe.train.line_length)
        store.check_files(context.reporter.say)
        source = store
    return RunRows(*(SelectedRows(source, _of_split(splits, name)) for name in ("train", "validation")))


def _of_split(splits: list[str], name: str) -> list[int]:
    return [index for index, split in enumerate(splits) if split == name]
