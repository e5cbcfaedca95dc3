"""Which target layers a published head reads: two numberings, two places to write them, and often neither.

    top level of config.json   layers applied (vLLM, speculators; the neutral index)
    eagle_config               layer outputs counted from 0 (SGLang, SpecForge, Model-Optimizer): one less

A head whose layers were left out measured 1.2 % acceptance instead of 58.9 %, so silence is never filled in here.
"""

from typing import Any

from eyas.models.raw_head import RawHead

KEY = "eagle_aux_hidden_state_layer_ids"


def resolve_layers(
    raw: RawHead, facts: dict[str, Any], answer: tuple[int, ...] | None, notes: list[str], questions: list[str]
) -> tuple[int, ...]:
    """Return the aux layers in the neutral index; where they are open, appends a question and returns what is known."""
    L = facts["target_num_layers"]
    width = int(raw.tensors["fc.weight"].shape[1])
    count, rest = divmod(width, facts["target_hidden_size"])
    default = (2, L // 2, L - 3)
    ask = f"say them with --aux-layers, counted as layers applied (the usual three are {_text(default)})"
    if rest or not count:
        size = facts["target_hidden_size"]
        questions.append(
            f"fc reads {width} values, no multiple of the target's hidden size {size}; is this its target?"
        )
        return default
    top = raw.fields.get(KEY)
    nested = (raw.fields.get("eagle_config") or {}).get(KEY)
    recorded = raw.card.get("head", {}).get("aux_layers")
    layers = tuple(answer or recorded or ())
    if answer is not None:
        for place, ids, shift in (("the top level", top, 0), ("eagle_config", nested, 1)):
            if ids and tuple(k + shift for k in ids) != layers:
                notes.append(f"--aux-layers {_text(layers)} overrules {list(ids)} of {place}")
    elif top and nested:
        layers = tuple(top)
        if [k - 1 for k in top] != list(nested):
            questions.append(f"its layer ids are {top} at the top level and {nested} in eagle_config; {ask}")
    elif top:
        layers = tuple(top)
        notes.append(f"layer ids {top} of the top level were read as layers applied, as vLLM does")
    elif nested and not recorded:
        layers = tuple(k + 1 for k in nested)
        questions.append(
            f"its layer ids {nested} stand in eagle_config alone, where SGLang reads layers {_text(layers)} and vLLM "
            f"reads {_text(tuple(nested))}; {ask}"
        )
    elif not recorded:
        questions.append(f"it does not say which layers it reads; {ask}")
    if layers and len(layers) != count:
        questions.append(
            f"{len(layers)} layers are named, but fc reads {count} states of {facts['target_hidden_size']}"
        )
    return layers or default


def _text(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))
