"""Whose every tensor of a head is: trained, the target's own rows, a map, or not in the file and lent by the target."""

from dataclasses import dataclass

from torch import Tensor

from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.head_files import HeadFiles
from eyas.models.head_layout import EMBEDDINGS, ZERO_TENSORS
from eyas.models.target import Target

OUTPUT = "lm_head.weight"
MAPS = {"d2t": "map: target id less draft id", "t2d": "map: which target ids can be drafted"}
ZEROS = "zeros: an engine's code reads it"
LENT = "absent: the target lends its own"


@dataclass(frozen=True)
class TensorOrigin:
    """A tensor of a head, its shape and dtype, and a few words on whose it is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    origin: str


def tensor_origins(files: HeadFiles, target: Target) -> tuple[TensorOrigin, ...]:
    """Return every tensor of a head in the order of its file, then those that it reads of the target."""
    found = []
    for name, tensor in files.tensors.items():
        origin = ZEROS if name in ZERO_TENSORS[files.method] else MAPS.get(name, "trained")
        if name == OUTPUT:
            origin = _of_output(tensor, _target_rows(files, target))
        elif name == EMBEDDINGS:
            origin = _of_output(tensor, target.embedding.weight)
        found.append(TensorOrigin(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), origin))
    lent = {EMBEDDINGS: target.embedding.weight, OUTPUT: target.head.weight_VD}
    for name, weight in lent.items():
        if name not in files.tensors:
            found.append(TensorOrigin(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), LENT))
    return tuple(found)


def _target_rows(files: HeadFiles, target: Target) -> Tensor:
    """Return the target's output rows of the head's draft ids."""
    weight_VD = target.head.weight_VD
    if (d2t := files.tensors.get("d2t")) is None:
        return weight_VD
    return weight_VD[DraftVocabulary.from_d2t(d2t, len(weight_VD)).token_ids_U.to(weight_VD.device)]


def _of_output(ours: Tensor, theirs: Tensor) -> str:
    """Return whether a matrix is the target's, as it was or further trained; compared in the coarser dtype."""
    if ours.shape != theirs.shape:
        return "trained"
    coarse = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    same = (ours.to(coarse) == theirs.cpu().to(coarse)).all(-1)
    if bool(same.all()):
        return "frozen: the target's own rows"
    return "trained" if not bool(same.any()) else f"trained: {float(same.float().mean()):.0%} of its rows the target's"
