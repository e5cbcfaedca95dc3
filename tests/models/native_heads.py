"""Native heads on disk for tests: a tiny target, a random head for it, and eyas.json filled in."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.models.checkpoint import save_head
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_files import HeadFiles, write_head_files
from eyas.models.head_json import native_json
from eyas.models.head_layout import FLAGS, expected_shapes
from eyas.models.launch import Serving
from eyas.models.target import Target, TargetOutput
from eyas.tests.toys import tiny_head, tiny_target

SERVING = Serving("owner/target", "owner/head", depth=4, top_k=3, num_draft_tokens=9)
LAYERS = 8
DEFAULT_LAYERS = (2, 4, 5)


def target_and_head(
    *, aux_layers: tuple[int, ...] = DEFAULT_LAYERS, draft_vocab_size: int = 61, rope: Any = None, **shape: Any
) -> tuple[Target, Eagle3Head]:
    """Return a tiny target of 8 layers and a random head; both in fp32, norms random too."""
    fields = {"rope_parameters": rope} if rope else {}
    target = tiny_target(aux_layers=aux_layers, layers=LAYERS, **fields)
    head = tiny_head(target, draft_vocab_size=draft_vocab_size, **shape)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return target, head


def save_native(head: Eagle3Head, folder: Path, *, dtype: torch.dtype = torch.float32, **card: Any) -> Path:
    """Save a head with a card that says something, and return the folder."""
    save_head(head, folder, metadata={"target": "owner/target", **card}, dtype=dtype)
    return folder


def drafted(target: Target, head: Eagle3Head, ids: list[int], guesses: list[int]) -> list[Tensor]:
    """Return our own target-vocabulary log-probabilities after `ids` and after each guessed token."""
    from eyas.inference.draft import ChainTree
    from eyas.inference.eagle_drafter import EagleDrafting
    from eyas.inference.sampling import Sampling

    head.lend(target)
    drafting = EagleDrafting(head, ChainTree(len(guesses) + 1))
    drafting.join([tuple(ids)], [Sampling()], capacity=len(ids))
    out = target.forward(torch.tensor([ids]))
    drafting.extend(0, [ids[1:]], TargetOutput(out.aux_hidden_BTF[:, :-1], out.final_hidden_BTD[:, :-1]))
    found, features = [drafting.logits_RU[0]], drafting.features_RD[None]
    for depth, guess in enumerate(guesses, start=1):
        mask = torch.ones(1, 1, depth, dtype=torch.bool)
        features, logits = drafting.expand(features, torch.tensor([[guess]]), depth=depth, tree_mask_RKN=mask)
        found.append(logits[0, 0])
    where = head.to_target_ids(torch.arange(head.config.draft_vocab_size))
    return [
        torch.full((head.config.vocab_size,), -torch.inf).index_copy(0, where, torch.log_softmax(logits.float(), -1))
        for logits in found
    ]


def eagle1_files(*, dtype: torch.dtype = torch.float32) -> HeadFiles:
    """Return a random EAGLE-1 head as native files, for a target of 8 layers, width 40 and 97 tokens."""
    neutral: dict[str, Any] = {
        "hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "vocab_size": 97,
        "draft_vocab_size": 97, "target_hidden_size": 40, "target_num_layers": LAYERS, "aux_layers": (),
        "num_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": None, **dict.fromkeys(FLAGS, False),
    }  # fmt: skip
    fields = native_json("eagle1", neutral, dtype=str(dtype).removeprefix("torch."))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.3).to(dtype)
        for name, shape in expected_shapes("eagle1", fields).items()
    }
    tensors["fc.bias"].zero_()
    return HeadFiles(fields, tensors, {"head": neutral, "method": "eagle1"}, "an EAGLE-1 head")


def write_native(files: HeadFiles, folder: Path) -> Path:
    """Write native files as they are and return the folder."""
    write_head_files(folder, files, check=lambda _: None)
    return folder
