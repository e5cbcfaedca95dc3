"""The recipe: one complete, strict description of a run. Unknown keys and values out of range are errors.

Each section belongs to one stage; a stage's fingerprint covers its section, so changing a key reruns that stage and
those after it, and nothing else.
"""

from typing import Annotated, Any, Literal

from pydantic import ByteSize, ConfigDict, Field, model_validator

from eyas.train.recipe_evaluate import EvaluateSection, TreeSection
from eyas.train.recipe_section import Dtype, NonNegative, Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
LossName = Literal["kl", "ce", "tv", "lk"]


class TargetSection(Section):
    """The frozen target and the arguments its chat template is served with.

    `device_map` places a large target's modules on several devices (accelerate's names, or module: device); with it,
    `device` is where the head trains. `quantization` is for plain checkpoints; quantised ones are loaded as they are.
    """

    model: str
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    device: str = "auto"
    device_map: Literal["auto", "balanced", "sequential"] | dict[str, int | str] | None = None
    quantization: Literal["none", "int8"] = "none"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"


class AnswerStyleSection(Section):
    """One way of sampling replies: temperature, then top-k, then top-p.

    A training conversation is answered once in each of its source's styles; where the styles have shares (all of a
    list, adding up to 1), once in one of them.
    """

    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: NonNegative = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] | None = None


class SteeringSection(Section):
    """One kind of self-written prompt: its category, the system prompt that asks for it (or none), its share of all."""

    category: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    system: Annotated[str, Field(min_length=1)] | None = None
    share: Annotated[float, Field(gt=0)] = 1.0


class BackendSection(Section):
    """Who writes: the target in this process (`local`), or an OpenAI-compatible server that serves it (`openai`).

    `model` is the name it is served under (default: target.model). The key is read from the environment variable
    `api_key_env`. `token_ids` asks for exact ids with fields that vLLM and SGLang know; switch it off for others. The
    server must render the first `checked_prompts` prompts as they are rendered here (where it tells: vLLM does).
    """

    kind: Literal["local", "openai"] = "local"
    url: str = ""
    model: str = ""
    token_ids: bool = True
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: Positive = 32
    retries: NonNegative = 8
    timeout: Annotated[float, Field(gt=0)] = 600.0
    checked_prompts: NonNegative = 4

    @model_validator(mode="after")
    def _has_url(self) -> "BackendSection":
        if (self.kind == "openai") != bool(self.url):
            raise ValueError(
                "backend.kind openai needs backend.url, such as http://localhost:8000/v1"
                if self.kind == "openai"
                else "backend.url is for backend.kind openai"
            )
        return self


class PromptSourceSection(Section):
    """One source of prompts; a bare text in the recipe is its `path`.

    `path` is a JSONL, JSON or Parquet file (also .gz) or a bundled set; `dataset` is a Hub id or a local folder of
    Hugging Face datasets, with `config`, `revision`, `split` and `streaming`. `schema` says how its columns spell a
    conversation (probed when left out). `weight` is its share of the conversations, relative to the other weights: the
    mix is as large as the smallest source allows, nothing is repeated. `limit` reads only the first rows.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    path: str | None = None
    dataset: str | None = None
    config: str | None = None
    revision: str | None = None
    split: str | None = None
    streaming: bool = False
    schema_name: Literal[
        "messages", "conversations", "turns", "instruction", "prompt", "question", "text", "text-prompt"
    ] | None = Field(default=None, alias="schema")  # fmt: skip
    weight: Annotated[float, Field(gt=0)] | None = None
    limit: Positive | None = None
    category: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_place(self) -> "PromptSourceSection":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a prompt source needs either path or dataset")
        if self.path is not None and (self.config or self.revision or self.split or self.streaming):
            raise ValueError(f"config, revision, split and streaming go with a dataset, not with path {self.path!r}")
        return self


class DedupSection(Section):
    """Which repeats are dropped: `near` is the Jaccard similarity of two prompts' words, 0 for off.

    No prompt may share a run of `overlap_words` words (0: off) with the evaluation sets `overlap_with`, which are
    those of evaluate.prompts when left out.
    """

    exact: bool = True
    near: Annotated[float, Field(ge=0, le=1)] = 0.8
    overlap_words: NonNegative = 13
    overlap_with: tuple[str, ...] | None = None


class SynthesizeSection(Section):
    """What the target writes: its own prompts, and replies to those and to the given ones.

    `strict` stops at the first bad row of a source; otherwise up to `max_drop_share` of a source's rows may be dropped.
    `group` decodes so many replies together, always the same ones (0: all that are missing): a multiple of `batch` such
    as 8 times makes the corpus of an interrupted run, or of another number of processes, the same also in bfloat16.
    """

    backend: BackendSection = BackendSection()

    prompts: tuple[PromptSourceSection, ...] = (PromptSourceSection(path="bundled:train"),)
    strict: bool = False
    max_drop_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    dedup: DedupSection = DedupSection()
    self_prompts: NonNegative = 0
    self_heldout: NonNegative = 0
    validation: Positive = 32
    self_prompt_tokens: Positive = 64
    prompt_temperature: Annotated[float, Field(gt=0)] = 1.0
    prompt_top_k: NonNegative = 50
    prompt_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    steering: tuple[SteeringSection, ...] = ()
    answers: Annotated[tuple[AnswerStyleSection, ...], Field(min_length=1)] = (AnswerStyleSection(),)
    self_answers: Annotated[tuple[AnswerStyleSection, ...], Field(min_length=1)] = (AnswerStyleSection(),)
    max_prompt_tokens: Positive = 256
    max_reply_tokens: Positive = 160
    batch: Positive = 64
    rows_per_part: Positive = 64
    group: NonNegative = 0
    dtype: Dtype = "bfloat16"
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _consistent(self) -> "SynthesizeSection":
        for name in ("answers", "self_answers"):
            shares = [style.share for style in getattr(self, name)]
            given = [share for share in shares if share is not None]
            if given and (len(given) < len(shares) or abs(sum(given) - 1) > 1e-6):
                raise ValueError(f"the shares of {name} must be given for all styles and add up to 1, given {shares}")
        categories = [steering.category for steering in self.steering]
        if len(set(categories)) < len(categories):
            raise ValueError(f"the categories of steering must differ, given {categories}")
        return self


class ExtractSection(Section):
    """How features are computed and kept: on disk (store), or computed while training (online, with a cache).

    `final_states`: where final states are kept; "taught" is all that EAGLE-3 reads. `checked_rows` of every shard are
    computed once more alone. `backend` vllm serves the target from vLLM, in the environment whose interpreter
    `vllm_python` names, on `vllm_tensor_parallel` devices: for targets that need an engine.
    """

    mode: Literal["store", "online"] = "store"
    cache_bytes: NonNegative = 0
    backend: Literal["hf", "vllm"] = "hf"
    vllm_python: str | None = None
    vllm_tensor_parallel: Positive = 1
    tokens_per_batch: Positive = 4096
    rows_per_shard: Positive = 128
    checked_rows: Positive = 2
    dtype: Dtype = "bfloat16"
    state_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "bfloat16"
    final_states: Literal["taught", "everywhere"] = "taught"

    @model_validator(mode="after")
    def _has_an_interpreter(self) -> "ExtractSection":
        if self.backend == "vllm" and self.vllm_python is None:
            raise ValueError(
                "extract.backend vllm needs extract.vllm_python: the interpreter of an environment with vLLM (on a CPU "
                "scripts/vllm_cpu_env.sh builds one)"
            )
        if self.backend == "vllm" and self.mode == "online":
            raise ValueError(
                "extract.mode online computes features in the training process, which is not vLLM's; set extract.mode "
                "to store or extract.backend to hf"
            )
        return self


class HeadSection(Section):
    """The draft head. Empty aux_layers means the default (2, L//2, L-3).

    `draft_vocab_size` left out is 8192 for EAGLE-3 and the target's whole vocabulary for EAGLE-1, which has no other.
    `init` is "target" (the target's own last block), "random", or a trained head to go on from: a folder or Hub id of
    any layout that `eyas import` reads.
    `num_layers` > 1 is for engines that serve such heads; their names are printed.
    """

    kind: Literal["eagle1", "eagle3"] = "eagle3"
    num_layers: Positive = 1
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: Positive | Literal["full"] | None = None
    intermediate_size: Positive | None = None
    init: Annotated[str, Field(min_length=1)] = "target"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class TrainSection(Section):
    """Training-time test. `steps` are optimizer steps; `batching` packs rows into lines or pads one row per line.

    `epochs` > 0 trains so many whole epochs instead of `steps`. `schedule` wsd decays over the last `decay_share` of
    the steps only. `ema` > 0 is the decay of averaged weights, which are then validated and kept.

    A validation replays held-out rows with a chain of `validation_depth` and with `validation_tree` (left out:
    evaluate.tree). The best checkpoint has the best tau of the one that `best_by` names; `patience` > 0 stops after so
    many validations without a better one. `decode_every` n > 0 also decodes `decode_prompts` held-out prompts with the
    runtime at every n-th validation, for which the target is kept in memory.

    `loss` is a name or a weighted mix of names; left out it is kl for EAGLE-3, and 0.1 kl beside the regression of
    `feature_weight` for EAGLE-1. TTT step s weighs step_decay ** s, or step_weights[s] where given. `pace`,
    `align_top_k` and `start_floor` weigh slots by what the head drafts there (train/slot_weights.py).
    """

    steps: Positive = 1000
    epochs: NonNegative = 0
    loss: LossName | dict[LossName, Annotated[float, Field(gt=0)]] | None = None
    ttt_steps: Positive = 7
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    step_weights: tuple[Annotated[float, Field(ge=0)], ...] = ()
    keep_oov: bool = False
    supervise: Literal["generated", "all"] = "generated"
    normalisation: Literal["token", "sequence"] = "token"
    pace: Fraction | None = None
    align_top_k: Positive | None = None
    start_floor: Fraction | None = None
    feature_weight: Annotated[float, Field(ge=0)] | None = None
    feature_noise: Annotated[float, Field(ge=0)] = 0.0
    attention: Literal["blocks", "dense"] = "blocks"
    recompute: bool = False
    compile: bool = False
    batching: Literal["packed", "padded"] = "packed"
    line_length: Positive = 512
    lines_per_batch: Positive = 1
    accumulate: Positive = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    lm_head_rate: Annotated[float, Field(ge=0)] = 1.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    warmup_steps: NonNegative = 20
    floor: Annotated[float, Field(ge=0, le=1)] = 0.05
    clip: Annotated[float, Field(gt=0)] = 1.0
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    precision: Literal["bf16", "fp32"] = "bf16"
    validate_every: Positive = 100
    validation_depth: Positive = 5
    validation_tree: TreeSection | None = None
    best_by: Literal["chain", "tree"] = "chain"
    decode_every: NonNegative = 0
    decode_prompts: Positive = 4
    patience: NonNegative = 0
    checkpoint_every: Positive = 100
    tracker: Literal["none", "wandb", "tensorboard", "trackio"] = "none"
    seed: NonNegative = 0


class ExportSection(Section):
    """The exported checkpoint."""

    dtype: Dtype = "bfloat16"


class PlanSection(Section):
    """What a run may use and what its plan assumes; no stage depends on it.

    `disk` and `memory` are bytes ("20GB" works too), by default what the machine has free. `reply_tokens` is the mean
    length of a reply to expect, by default the limit, so that a plan is an upper bound until the corpus is there.
    """

    disk: ByteSize | None = None
    memory: ByteSize | None = None
    reply_tokens: Positive | None = None


class Recipe(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    target: TargetSection
    synthesize: SynthesizeSection = SynthesizeSection()
    extract: ExtractSection = ExtractSection()
    head: HeadSection = HeadSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    export: ExportSection = ExportSection()
    plan: PlanSection = PlanSection()

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        longest = self.synthesize.max_prompt_tokens + self.synthesize.max_reply_tokens
        if self.train.line_length < longest:
            raise ValueError(
                f"train.line_length {self.train.line_length} is shorter than the longest row, "
                f"synthesize.max_prompt_tokens + max_reply_tokens = {longest}"
            )
        self._check_objective()
        if not self.synthesize.prompts and not self.synthesize.self_prompts:
            raise ValueError("there is nothing to train on: give synthesize.prompts or raise synthesize.self_prompts")
        if not self.evaluate.prompts and not (self.evaluate.self_heldout and self.synthesize.self_heldout):
            raise ValueError("there is nothing to evaluate on: give evaluate.prompts or raise synthesize.self_heldout")
        return self

    def _check_objective(self) -> None:
        train = self.train
        if train.step_weights and len(train.step_weights) != train.ttt_steps:
            raise ValueError(
                f"train.step_weights has {len(train.step_weights)} entries for train.ttt_steps = {train.ttt_steps}; "
                "give one per step"
            )
        if train.loss == {}:
            raise ValueError("train.loss names no loss; give a name, or weights by name such as {kl: 0.5, lk: 0.5}")
        if train.supervise == "all" and not train.keep_oov:
            raise ValueError(
                "train.supervise all also trains prompt tokens, whose most likely target token is not stored, so what "
                "the draft vocabulary lacks cannot be left out there; set train.keep_oov to true"
            )
        if self.head.kind == "eagle3" and train.feature_weight:
            raise ValueError(
                "train.feature_weight regresses the target's final state, which only head.kind eagle1 continues"
            )
