"""The shape of a draft head and everything it inherits from its target.

Aux layers are kept in the neutral index k = number of decoder layers already applied (0 = embeddings, L = the last
layer, before the final norm). Engines count differently; `eyas.models.checkpoint` translates when it writes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from eyas.models.errors import UserError

Kind = Literal["eagle1", "eagle3"]


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of one draft head; `head_config_for` derives it, checkpoints carry it.

    An EAGLE-1 head reads final states only: no aux layers, the target's whole vocabulary, none of the norm flags. It
    reads embeddings without a norm, so it keeps what its target's embedding module multiplies them by.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    aux_layers: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    kind: Kind = "eagle3"
    num_layers: int = 1
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise UserError(f"a head has at least one layer, given head.num_layers = {self.num_layers}.")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise UserError(
                f"draft vocabulary size {self.draft_vocab_size} is not between 1 and the target's vocabulary size "
                f"{self.vocab_size}; set head.draft_vocab_size to at most {self.vocab_size}."
            )
        if self.norm_before_fc and self.fc_norm:
            raise UserError(
                "norm_before_fc (one norm over all aux states) and fc_norm (one norm per aux state) exclude each "
                "other; set at most one of them."
            )
        if self.kind == "eagle3":
            check_aux_layers(self.aux_layers, num_layers=self.target_num_layers)
        else:
            self._check_eagle1()

    def _check_eagle1(self) -> None:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        given = [f"head.{name}" for name in ("aux_layers", *flags) if getattr(self, name)]
        if not self.full_vocabulary:
            given.append(f"head.draft_vocab_size {self.draft_vocab_size}")
        if given:
            raise UserError(
                f"an EAGLE-1 head reads the target's final state alone and drafts through the target's own head of "
                f"{self.vocab_size} tokens; {', '.join(given)} belong to EAGLE-3: leave them out or set head.kind to "
                "eagle3."
            )

    @property
    def full_vocabulary(self) -> bool:
        """Whether the head predicts the whole target vocabulary (then it carries no d2t/t2d)."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def aux_width(self) -> int:
        """Width of the concatenated aux hidden states, A * target hidden size."""
        return len(self.aux_layers) * self.target_hidden_size


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the three default aux layers (2, L//2, L-3) in the neutral index.

    Raises UserError for targets under 7 layers, where these collide or leave the model.
    """
    if num_layers < 7:
        raise UserError(
            f"the default aux layers (2, L//2, L-3) collide on a target of {num_layers} layers; "
            f"name distinct layers between 0 and {num_layers} in head.aux_layers."
        )
    return (2, num_layers // 2, num_layers - 3)


def check_aux_layers(aux_layers: tuple[int, ...], *, num_layers: int) -> None:
    """Raise UserError unless the layers are ascending, distinct and within 0..num_layers."""
    outside = [k for k in aux_layers if not 0 <= k <= num_layers]
    if outside:
        raise UserError(
            f"aux layer {outside[0]} is out of range: this target has {num_layers} layers, so head.aux_layers takes "
            f"numbers from 0 (embeddings) to {num_layers} (last layer, before the final norm)."
        )
    if not aux_layers or list(aux_layers) != sorted(set(aux_layers)):
        raise UserError(
            f"aux layers {list(aux_layers)} must be at least one layer, distinct and ascending; "
            f"write {sorted(set(aux_layers))} in head.aux_layers."
        )


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_dim", "intermediate_size")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def _inherited(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of the named fields that the target's config sets; raises UserError when none is."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise UserError(
        f"the config of this {config.model_type} target has no {' or '.join(names)}, which a draft head takes over "
        "from its target; draft heads need a target with RMSNorm, a gated MLP and rotary positions."
    )


def is_mixture(target: PreTrainedConfig) -> bool:
    """Return whether a target's MLP is a mixture of experts."""
    return any((getattr(target.get_text_config(), name, None) or 0) > 1 for name in EXPERT_COUNTS)


def _mlp_width(config: PreTrainedConfig) -> int:
    """Return the target's MLP width; of a mixture, what one token passes, and never under twice the hidden size."""
    if not is_mixture(config):
        return int(_inherited(config, "intermediate_size"))
    width = _inherited(config, *_EXPERT_WIDTHS) * _inherited(config, *_EXPERTS_PER_TOKEN)
    return int(max(width, 2 * config.hidden_size))


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the target's RoPE parameters; where layer types have their own, those of full attention."""
    parameters = dict(_inherited(config, "rope_parameters"))
    of_full_attention = parameters.get("full_attention")
    return dict(of_full_attention) if isinstance(of_full_attention, dict) else parameters


def head_config_for(
    target: PreTrainedConfig,
    *,
    kind: Kind = "eagle3",
    num_layers: int = 1,
    aux_layers: tuple[int, ...] = (),
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> HeadConfig:
    """Return the head configuration that inherits head dim, RoPE, lengths, eps and activation from a target's config.

    `draft_vocab_size` None is the target's whole vocabulary; `intermediate_size` None is the target's MLP width.
    """
    config = target.get_text_config()
    heads = _inherited(config, "num_attention_heads")
    eos = config.eos_token_id
    return HeadConfig(
        kind=kind,
        num_layers=num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or _mlp_width(config),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_act=_inherited(config, "hidden_act", "hidden_activation"),
        rms_norm_eps=_inherited(config, "rms_norm_eps"),
        rope_parameters=_rope_parameters(config),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size if draft_vocab_size is None else draft_vocab_size,
        target_hidden_size=config.hidden_size,
        target_num_layers=config.num_hidden_layers,
        aux_layers=tuple(aux_layers),
        bos_token_id=config.bos_token_id,
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
        pad_token_id=config.pad_token_id,
        norm_before_residual=norm_before_residual,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


def head_remarks(config: HeadConfig, target: PreTrainedConfig) -> list[str]:
    """Return sentences about a head that works but not everywhere, or not as its target's config suggests."""
    remarks = []
    if is_mixture(target):
        remarks.append(
            f"the target is a mixture of experts, whose MLP width is per expert; the head's is "
            f"{config.intermediate_size} (head.intermediate_size)."
        )
    if config.intermediate_size < config.hidden_size:
        remarks.append(
            f"the head's MLP ({config.intermediate_size}) is narrower than its hidden size ({config.hidden_size}); "
            "heads drafted better with 2 to 4 times the hidden size (head.intermediate_size)."
        )
    if config.num_layers > 1 and config.kind == "eagle3":
        remarks.append(
            f"{config.num_layers} layers: SGLang, the original EAGLE code and llama.cpp cannot serve it (their exports "
            "are refused); vLLM and eyas do."
        )
    if config.norm_before_residual:
        remarks.append("norm_before_residual: SGLang does not implement it; vLLM and eyas do.")
    if config.kind == "eagle3" and len(config.aux_layers) != 3:
        remarks.append(
            f"{len(config.aux_layers)} aux layers: the original EAGLE code and llama.cpp read exactly 3; vLLM, SGLang "
            "and eyas read any number."
        )
    return remarks
