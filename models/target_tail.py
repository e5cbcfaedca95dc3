"""The end of a target alone, its final norm and output head: what turns a pre-norm state into logits.

An engine hands out the last layer's state before the final norm. To store it as the library would, and to rebuild the
teacher from it, these few tensors are read from the target's files; the rest is never loaded.
"""

import torch
from torch import Tensor

from eyas.models.bundled import resolve_model
from eyas.models.errors import UserError
from eyas.models.target_head import TargetHead
from eyas.models.target_loading import find_decoder
from eyas.models.target_parts import empty_model, fill, final_norm


class TargetTail:
    """The final norm and the output head of a target, in one dtype on the CPU."""

    def __init__(self, name: str, *, dtype: torch.dtype) -> None:
        """Raise UserError where the target's files do not hold the tensors under their usual names."""
        model = empty_model(name, dtype=dtype)
        self.config = model.config.get_text_config()
        try:
            self.norm = final_norm(find_decoder(model)[0])
            fill(model, [self.norm, model.get_output_embeddings()], resolve_model(name), dtype=dtype)
        except UserError as error:
            raise UserError(f"{error} Extract with extract.backend: hf.") from error
        self.head = TargetHead.of(model)

    @torch.inference_mode()
    def final_state(self, state: Tensor) -> Tensor:
        """Return the post-norm state of a pre-norm one."""
        return self.norm(state)
