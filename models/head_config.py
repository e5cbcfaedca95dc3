"""The shape of a draft head and everything it inherits from its target.

Aux layers are kept in the neutral index k = number of decoder layers already applied (0 = embeddings, L = the last
layer, before the final norm). Engines count differently; `eyas.models.checkpoint` translates when it writes.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from eyas.models.errors import UserError


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of one EAGLE-3 draft head; `from_target` derives it, checkpoints carry it."""

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

    def __post_init__(self) -> None:
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
        check_aux_layers(self.aux_layers, num_layers=self.target_num_layers)

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


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _inherited(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of the named fields that the target's config sets; raises UserError when none is."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise UserError(
        f"the config of this {config.model_type} target has no {' or '.join(names)}, which an EAGLE-3 head takes over "
        "from its target; draft heads need a target with RMSNorm, a gated MLP and rotary positions."
    )


def _full_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE of the full-attention layers where each kind of layer has its own: a head attends to all."""
    return dict(parameters.get("full_attention") or parameters)


def head_config_for(
    target: PreTrainedConfig,
    *,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
    intermediate_size: int | None = None,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> HeadConfig:
    """Return the head configuration that inherits head dim, RoPE, lengths, eps and activation from a target's config.

    `intermediate_size` defaults to the target's; MoE targets must state it, because theirs is the width per expert.
    """
    config = target.get_text_config()
    is_moe = any(getattr(config, name, None) for name in _EXPERT_COUNTS)
    if intermediate_size is None and is_moe:
        raise UserError(
            f"target {config.model_type} is a mixture of experts: its intermediate_size is per expert, too narrow for "
            f"a head; set head.intermediate_size (a usual value is 2-4 times the hidden size {config.hidden_size})."
        )
    heads = _inherited(config, "num_attention_heads")
    eos = config.eos_token_id
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or _inherited(config, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_act=_inherited(config, "hidden_act", "hidden_activation"),
        rms_norm_eps=_inherited(config, "rms_norm_eps"),
        rope_parameters=_full_rope(_inherited(config, "rope_parameters")),
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
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
