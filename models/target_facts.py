"""What a head must have in common with its target, read from the target's folder without loading the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.target_files import read_tensor, tensor_files

EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
OUTPUTS = ("lm_head.weight",)


@dataclass(frozen=True)
class TargetFacts:
    """A target's text config, its quantisation (None when it has none), and single tensors of its checkpoint."""

    name: str
    folder: Path
    config: PreTrainedConfig
    quantisation: dict[str, Any] | None

    @classmethod
    def of(cls, name: str) -> "TargetFacts":
        """Read a target's config from a bundled name, a model folder or a Hub id."""
        folder = resolve_model(name)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the config of target {name!r}: {error}") from None
        return cls(name, Path(folder), config.get_text_config(), quantisation_of(config))

    @property
    def shared(self) -> dict[str, Any]:
        """Sizes that a head shares with its target, in HeadConfig's names."""
        return {
            "target_hidden_size": self.config.hidden_size,
            "target_num_layers": self.config.num_hidden_layers,
            "vocab_size": self.config.vocab_size,
        }

    def embedding(self) -> Tensor:
        """Return the input embedding as stored."""
        return read_tensor(tensor_files(str(self.folder)), EMBEDDINGS)[1]

    def output_rows(self) -> Tensor:
        """Return the output head's weight as stored; the embedding where the two are tied."""
        wanted = EMBEDDINGS if self.config.tie_word_embeddings else OUTPUTS
        return read_tensor(tensor_files(str(self.folder)), wanted)[1]


def quantisation_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return how a target's weights are quantised: method and bits as its config says, None for plain weights."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    fields = given if isinstance(given, dict) else given.to_dict()
    kept = ("quant_method", "bits", "fmt", "weight_block_size", "load_in_8bit", "load_in_4bit", "format")
    return {name: json.loads(json.dumps(fields[name], default=str)) for name in kept if fields.get(name) is not None}
