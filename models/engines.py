"""What each serving engine does with a head's folder: which layers it reads, and what it cannot serve or would misread.

Facts of the versions named, one rule a line, so that exports, `eyas doctor` and the model card judge by the same table.
A rule that holds means the engine does not serve the head as it was trained: some fail loudly, most draft nonsense.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.models.head_files import head_method

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Traits:
    """What engines differ about, read from a head's config.json in the native layout."""

    method: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Traits":
        return cls(head_method(fields, where="config.json"), fields)

    @property
    def trained_layers(self) -> Layers:
        """Aux layers in the neutral index, of which the top level is written."""
        return tuple(self.fields.get("eagle_aux_hidden_state_layer_ids", ()))

    @property
    def target_layers(self) -> int:
        return int(self.fields["target_num_hidden_layers"])

    @property
    def default_layers(self) -> Layers:
        L = self.target_layers
        return (2, L // 2, L - 3)

    @property
    def rope_kind(self) -> str:
        return str((self.fields.get("rope_scaling") or {}).get("rope_type", "default"))

    def flag(self, name: str) -> bool:
        return bool(self.fields.get(name)) or bool(self.fields.get("eagle_config", {}).get(name))


@dataclass(frozen=True)
class Rule:
    """What an engine cannot serve: whether it applies, why, and what to do instead."""

    applies: Callable[[Traits], bool]
    reason: str
    instead: str


@dataclass(frozen=True)
class Engine:
    """One engine in the version whose code its rules were read from; `tried` says whether heads were run in it.

    `export` names the format it needs where it would misread the native folder.
    """

    title: str
    version: str
    tried: bool
    reads_layers: Callable[[Traits], Layers]
    rules: tuple[Rule, ...]
    export: str | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether an engine serves a head as trained: the layers it would read, and the reasons against it."""

    engine: str
    version: str
    tried: bool
    serves: bool
    layers: Layers
    reasons: tuple[str, ...]
    export: str | None


def judge(name: str, fields: dict[str, Any]) -> Verdict:
    """Return an engine's verdict on a head with this config.json."""
    engine, traits = ENGINES[name], Traits.of(fields)
    reasons = [f"{rule.reason}; {rule.instead}" for rule in engine.rules if rule.applies(traits)]
    layers = engine.reads_layers(traits) if traits.method == "eagle3" else ()
    if layers != traits.trained_layers:
        reasons.append(
            f"reads layers {list(layers)} (layers applied), trained on {list(traits.trained_layers)}; train with the "
            "layers it reads, or serve with an engine that takes them from the config"
        )
    export = engine.export and {"eagle3": engine.export, "eagle1": f"eagle1-{engine.export}"}[traits.method]
    return Verdict(engine.title, engine.version, engine.tried, not reasons, layers, tuple(reasons), export)


def _vllm_layers(traits: Traits) -> Layers:
    """The top level as it stands, else eagle_config as it stands, else the default; sorted, without repeats."""
    nested = traits.fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    ids = traits.fields.get("eagle_aux_hidden_state_layer_ids") or nested or traits.default_layers
    return tuple(sorted(set(ids)))


def _sglang_layers(traits: Traits) -> Layers:
    """eagle_config counts layer outputs from 0, so one more is applied; without it the default."""
    nested = traits.fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(k + 1 for k in nested) if nested else traits.default_layers


def _fixed_layers(traits: Traits) -> Layers:
    return traits.default_layers


def _flag(name: str) -> Callable[[Traits], bool]:
    return lambda traits: traits.flag(name)


def _not_three(traits: Traits) -> bool:
    return traits.method == "eagle3" and len(traits.trained_layers) != 3


def _many_eagle3_layers(traits: Traits) -> bool:
    return traits.method == "eagle3" and traits.fields["num_hidden_layers"] != 1


def _eagle1(traits: Traits) -> bool:
    return traits.method == "eagle1"


def _no_eagle1(program: str) -> Rule:
    return Rule(_eagle1, f"{program} has no EAGLE-1 heads", "train an EAGLE-3 head")


def _untranslatable_rope(traits: Traits) -> bool:
    """The original code knows two kinds of scaling, and both forget rope_theta."""
    if traits.rope_kind == "default":
        return False
    keys = traits.fields["rope_scaling"].keys()
    two_keys = traits.rope_kind in ("linear", "dynamic") and keys == {"rope_type", "factor"}
    return not two_keys or traits.fields["rope_theta"] != 10000


_INSTEAD_OF_LAYERS = "export for vLLM, or train with head.num_layers 1"
ENGINES = {
    "vllm": Engine(
        "vLLM",
        "0.32-0.33",
        True,
        _vllm_layers,
        (),
    ),
    "sglang": Engine(
        "SGLang",
        "0.5.23",
        False,
        _sglang_layers,
        (
            Rule(
                _many_eagle3_layers,
                "SGLang gives layers behind the first another norm and leaves out the residual before them, and skips "
                "the tensors it does not know without an error",
                _INSTEAD_OF_LAYERS,
            ),
            Rule(
                _flag("norm_before_residual"),
                "SGLang does not implement norm_before_residual and would add the un-normed feature, without an error",
                "export for vLLM, or train with head.norm_before_residual false",
            ),
            Rule(
                lambda traits: 0 in traits.trained_layers,
                "SGLang numbers layer outputs, so the embeddings (layer 0) have no number there",
                "train with aux layers of 1 and more, or export for vLLM",
            ),
            Rule(
                lambda traits: traits.method == "eagle3" and traits.target_layers in traits.trained_layers,
                "SGLang takes states where the next layer begins, so the last layer's output is never handed over",
                "train with aux layers below the last one, or export for vLLM",
            ),
            Rule(
                lambda traits: (
                    traits.method == "eagle3"
                    and len(traits.trained_layers) * traits.fields["target_hidden_size"] == traits.fields["hidden_size"]
                ),
                "SGLang tells aux states from features by their width, which is the same here, and would skip fc",
                "train with more aux layers, or export for vLLM",
            ),
        ),
    ),
    "eagle": Engine(
        "original EAGLE code",
        "cb7e084",
        False,
        _fixed_layers,
        (
            Rule(_many_eagle3_layers, "the original code has exactly one EAGLE-3 layer", _INSTEAD_OF_LAYERS),
            Rule(_not_three, "the original code reads exactly 3 aux states", "train with 3 aux layers"),
            *(
                Rule(
                    _flag(name),
                    f"the original code does not know {name} and loads the head without it, silently",
                    f"export for vLLM, or train with head.{name} false",
                )
                for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
            ),
            Rule(
                _untranslatable_rope,
                "the original code knows linear and dynamic RoPE scaling at rope_theta 10000 only",
                "export for vLLM or SGLang, which take the target's RoPE whole",
            ),
            Rule(
                lambda traits: (
                    traits.method == "eagle3" and traits.fields["target_hidden_size"] != traits.fields["hidden_size"]
                ),
                "the original code does not load the target's embeddings for a head of another width",
                "train a head of the target's width",
            ),
        ),
        # The native folder names target_hidden_size, at which this code skips loading the target's embeddings.
        export="eagle",
    ),
    "llama.cpp": Engine(
        "llama.cpp",
        "mid-2026",
        False,
        _fixed_layers,
        (
            _no_eagle1("llama.cpp"),
            Rule(_many_eagle3_layers, "llama.cpp has exactly one layer", _INSTEAD_OF_LAYERS),
            Rule(_not_three, "llama.cpp reads exactly 3 aux states", "train with 3 aux layers"),
            *(
                Rule(
                    _flag(name),
                    f"llama.cpp does not know {name}",
                    f"export for vLLM, or train with head.{name} false",
                )
                for name in ("norm_before_fc", "fc_norm", "norm_output")
            ),
        ),
    ),
}
