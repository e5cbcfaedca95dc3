"""Initialise a head from its target (the last block's weights and its head rows), or from a head trained before.

A head from its target starts as "run the target's last block once more on the last tapped state", far better than
noise. The embedding half of what it reads starts at zero, so that at first the feature alone speaks. Layers behind the
first start as the same block with its outputs at zero: they add nothing yet.
"""

from typing import Any

import torch

from eyas.models.draft_head import DraftHead
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle1 import Eagle1Head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.embedding_scale import check_embedding_scale
from eyas.models.errors import UserError
from eyas.models.last_block import LastBlock, last_block, norm_factor
from eyas.models.target import Target


def set_vocabulary(head: DraftHead, vocabulary: DraftVocabulary) -> None:
    """Write a draft vocabulary into the head's map buffers."""
    assert len(vocabulary) == head.config.draft_vocab_size
    if not head.config.full_vocabulary:
        head.d2t.copy_(vocabulary.d2t_U)
        head.t2d.copy_(vocabulary.t2d_V)


def vocabulary_of(head: DraftHead) -> DraftVocabulary:
    """Return the draft vocabulary that a head carries."""
    if head.config.full_vocabulary:
        return DraftVocabulary.full(head.config.vocab_size)
    return DraftVocabulary(head.t2d.cpu().nonzero().squeeze(-1), head.config.vocab_size)


@torch.no_grad()
def init_random(head: DraftHead, *, std: float = 0.02) -> None:
    """Fill every matrix with a normal of the given deviation; norms stay at one."""
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=std)


@torch.no_grad()
def init_from_target(head: DraftHead, target: Target, vocabulary: DraftVocabulary) -> tuple[str, ...]:
    """Copy what the target already knows and return what of it a draft layer cannot hold, in sentences.

    Raises UserError when its last block is not Llama-like.
    """
    init_random(head)
    try:
        block = last_block(target)
        if isinstance(head, Eagle3Head):
            _eagle3_from_target(head, target, block, vocabulary)
        elif isinstance(head, Eagle1Head):
            _eagle1_from_target(head, target, block)
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            f"cannot warm-start the head from the last block of a {target.config.model_type} target ({error}); "
            "set head.init to 'random'."
        ) from error
    return block.notes


def _eagle3_from_target(head: Eagle3Head, target: Target, block: LastBlock, vocabulary: DraftVocabulary) -> None:
    D = head.config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        weight[:, :D].zero_()
        weight[:, D:].copy_(block.attention[name])
    _copy_rest(head.midlayer, block)
    for layer in head.layers.values():
        _silent_layer(layer, block)
    head.midlayer.hidden_norm.weight.copy_(block.attention_norm_D)
    head.norm.weight.copy_(norm_factor(target.decoder.norm))
    head.fc.weight.zero_()
    head.fc.weight[:, -D:].copy_(torch.eye(D))
    head.lm_head.weight.copy_(target.head.rows(vocabulary.token_ids_U).weight_VD)


def _eagle1_from_target(head: Eagle1Head, target: Target, block: LastBlock) -> None:
    """Fold the last block's input norm into its projections, the target's last norm having scaled the feature."""
    layer: Any = head.layers[0]
    D = head.config.hidden_size
    scale_D = block.attention_norm_D / norm_factor(target.decoder.norm)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.copy_(block.attention[name] * scale_D)
    _copy_rest(layer, block)
    for later in head.layers[1:]:
        _silent_layer(later, block)
    head.fc.weight[:, :D].zero_()
    head.fc.weight[:, D:].copy_(torch.eye(D))


def _silent_layer(layer: Any, block: LastBlock) -> None:
    """Copy a whole block but for its outputs, which are zero."""
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.copy_(block.attention[name])
    _copy_rest(layer, block)
    layer.input_layernorm.weight.copy_(block.attention_norm_D)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def _copy_rest(layer: Any, block: LastBlock) -> None:
    """Copy the output projection, the MLP and the norm before it."""
    layer.self_attn.o_proj.weight.copy_(block.attention["o_proj"])
    for name, weight in block.mlp.items():
        getattr(layer.mlp, name).weight.copy_(weight)
    layer.post_attention_layernorm.weight.copy_(block.mlp_norm_D)


@torch.no_grad()
def init_from_head(head: DraftHead, trained: DraftHead, target: Target, vocabulary: DraftVocabulary) -> float:
    """Copy a trained head's weights and return the share of the new draft vocabulary that it could draft.

    Its vocabulary may be another: rows of tokens it could not draft come from the target's head. Raises UserError when
    anything but the draft vocabulary differs between the two heads.
    """
    ours, theirs = head.config, trained.config
    # The first is mapped below, the second changes no state, the third is compared with the target's own.
    free = ("draft_vocab_size", "max_position_embeddings", "embedding_scale")
    if isinstance(trained, Eagle1Head):
        check_embedding_scale(target.embedding, trained.config.embedding_scale)
    for name in ours.__dataclass_fields__:
        mine, given = getattr(ours, name), getattr(theirs, name)
        if mine != given and not name.endswith("token_id") and name not in free:
            raise UserError(
                f"the head in head.init has {name} {given}, this recipe's head {mine}: set head.{name} alike, or name "
                "another head."
            )
    own, weights = head.state_dict(), trained.state_dict()
    skipped = {"d2t", "t2d", "lm_head.weight"}
    head.load_state_dict({name: weights.get(name, own[name]) if name not in skipped else own[name] for name in own})
    known_U = vocabulary_of(trained).draft_ids_V[vocabulary.token_ids_U]
    if isinstance(head, Eagle3Head) and isinstance(trained, Eagle3Head):
        rows_UD = head.lm_head.weight
        rows_UD.copy_(target.head.rows(vocabulary.token_ids_U).weight_VD)
        rows_UD[known_U >= 0] = trained.lm_head.weight[known_U[known_U >= 0]]
    return float((known_U >= 0).float().mean())
