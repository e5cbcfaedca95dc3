"""Which tensors, of which shapes, a head's config.json promises: the one table that checks, imports and exports share.

EAGLE-3: one middle layer whose attention reads [embedding ; feature], fc over the aux states, own norm and lm_head, and
the vocabulary maps iff the draft vocabulary is reduced. EAGLE-1: a plain layer without its first norm behind fc over
[embedding ; feature], nothing else; `fc.bias` is zero, because SGLang's fc has a bias and would keep random values.
Layers behind the first are plain Llama layers under `layers.1.`, `layers.2.`, ... in both.
"""

from typing import Any

Shapes = dict[str, tuple[int, ...]]

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ZERO_TENSORS = {"eagle3": (), "eagle1": ("fc.bias",)}
EMBEDDINGS = "embed_tokens.weight"  # the target's, which only exports for some engines carry
LAYER = {"eagle3": "midlayer.", "eagle1": "layers.0."}
PLAIN_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
)
BORROWED = {
    "draft_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
}  # what EAGLE-1 shares with its target
SCALE_FIELD = "target_embedding_scale"  # in config.json, of EAGLE-1 heads of targets that scale their embeddings
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def neutral_fields(method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json of our layout says, in the names and numbering of HeadConfig; KeyError for a gap.

    An EAGLE-1 head reads the final state alone and drafts through the target's whole output head.
    """
    rope = dict(fields.get("rope_scaling") or {"rope_type": "default"})
    neutral = {
        **{name: fields[name] for name in PLAIN_FIELDS if method == "eagle3" or name not in BORROWED},
        "rope_parameters": {"rope_theta": fields["rope_theta"], **rope},
        "num_layers": fields["num_hidden_layers"],
        "target_num_layers": fields["target_num_hidden_layers"],
        "aux_layers": tuple(fields["eagle_aux_hidden_state_layer_ids"]) if method == "eagle3" else (),
        **{name: fields.get(name) for name in TOKEN_FIELDS},
        **{name: fields.get(name, False) for name in FLAGS},
        "embedding_scale": fields.get(SCALE_FIELD, 1.0),
    }
    if method == "eagle1":
        neutral |= {ours: fields[theirs] for ours, theirs in BORROWED.items()}
    return neutral


def expected_shapes(method: str, fields: dict[str, Any]) -> Shapes:
    """Return name -> shape of every tensor of a native checkpoint; raises KeyError for a size that is missing."""
    return {"eagle3": _eagle3, "eagle1": _eagle1}[method](fields)


def _layer(prefix: str, fields: dict[str, Any], *, reads: int) -> Shapes:
    D, M = fields["hidden_size"], fields["intermediate_size"]
    q = fields["num_attention_heads"] * fields["head_dim"]
    kv = fields["num_key_value_heads"] * fields["head_dim"]
    return {
        f"{prefix}self_attn.q_proj.weight": (q, reads),
        f"{prefix}self_attn.k_proj.weight": (kv, reads),
        f"{prefix}self_attn.v_proj.weight": (kv, reads),
        f"{prefix}self_attn.o_proj.weight": (D, q),
        f"{prefix}mlp.gate_proj.weight": (M, D),
        f"{prefix}mlp.up_proj.weight": (M, D),
        f"{prefix}mlp.down_proj.weight": (D, M),
        f"{prefix}post_attention_layernorm.weight": (D,),
    }


def _later_layers(fields: dict[str, Any]) -> Shapes:
    shapes: Shapes = {}
    for number in range(1, fields["num_hidden_layers"]):
        prefix = f"layers.{number}."
        shapes[f"{prefix}input_layernorm.weight"] = (fields["hidden_size"],)
        shapes |= _layer(prefix, fields, reads=fields["hidden_size"])
    return shapes


def _eagle3(fields: dict[str, Any]) -> Shapes:
    D, V, U = fields["hidden_size"], fields["vocab_size"], fields["draft_vocab_size"]
    width = fields.get("target_hidden_size", D)
    aux = len(fields["eagle_aux_hidden_state_layer_ids"])
    shapes = {
        "fc.weight": (D, aux * width),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        **_layer(LAYER["eagle3"], fields, reads=2 * D),
        **_later_layers(fields),
        "norm.weight": (D,),
        "lm_head.weight": (U, D),
    }
    if fields.get("norm_before_fc"):
        shapes["input_norm.weight"] = (aux * width,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (width,) for number in range(aux)}
    if U < V:
        shapes |= {"d2t": (U,), "t2d": (V,)}
    return shapes


def _eagle1(fields: dict[str, Any]) -> Shapes:
    D = fields["hidden_size"]
    first = _layer(LAYER["eagle1"], fields, reads=D)
    return {"fc.weight": (D, 2 * D), "fc.bias": (D,), **first, **_later_layers(fields)}
