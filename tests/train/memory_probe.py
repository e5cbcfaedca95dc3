"""Train one long row of a wide vocabulary and print peak memory: `python -m ...memory_probe`, in a process of its own.

Linux: the peak is VmHWM of /proc/self/status, set back before each length through /proc/self/clear_refs.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyas.data.feature_batch import FeatureBatch
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import head_config_for
from eyas.models.target_head import TargetHead
from eyas.models.warm_start import init_random, set_vocabulary
from eyas.tests.toys import tiny_config
from eyas.train.losses import LossMix
from eyas.train.objective import ObjectivePlan, TrainingTimeTest

VOCAB, DRAFT, HIDDEN, STEPS = 128256, 4096, 64, 4


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, value.numel())
        return result


def resident(field: str) -> float:
    """Return a memory field of this process, MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def module() -> TrainingTimeTest:
    torch.manual_seed(0)
    config = tiny_config(vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=8192)
    head = Eagle3Head(head_config_for(config, aux_layers=(1, 2, 4), draft_vocab_size=DRAFT)).train()
    init_random(head)
    vocabulary = DraftVocabulary(torch.arange(0, VOCAB, VOCAB // DRAFT)[:DRAFT], VOCAB)
    set_vocabulary(head, vocabulary)
    head.use_embedding(nn.Embedding(VOCAB, HIDDEN))
    teacher = TargetHead(torch.randn(VOCAB, HIDDEN), None, 1.0, None).rows(vocabulary.token_ids_U)
    plan = ObjectivePlan(LossMix((("kl", 1.0),)), (1.0,) * STEPS, keep_oov=True)
    return TrainingTimeTest(head, teacher, vocabulary.draft_ids_V, plan)


def batch(length: int) -> FeatureBatch:
    zeros = torch.zeros(1, length, dtype=torch.int64)
    return FeatureBatch(
        input_ids_BT=torch.randint(VOCAB, (1, length)), aux_hidden_BTF=torch.randn(1, length, 3 * HIDDEN),
        final_hidden_BTD=torch.randn(1, length, HIDDEN), argmax_BT=zeros,
        generated_mask_BT=torch.arange(length)[None] > 0, document_BT=zeros, position_BT=torch.arange(length)[None],
    )  # fmt: skip


def peaks_of_epochs(trained: TrainingTimeTest, *, epochs: int, rows: int) -> list[float]:
    """Return the peak of each epoch over the same few rows, MiB, optimizer steps included."""
    given = [batch(1024 + 32 * n) for n in range(rows)]
    optimizer = torch.optim.AdamW(trained.head.parameters(), lr=1e-4, fused=True)
    found = []
    for _ in range(epochs):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        for row in given:
            trained(row, trained.counts(row)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append(resident("VmHWM"))
    return found


def main() -> None:
    """Print {"peak", "largest", "lengths", "extra", "epochs"}: MiB, elements, MiB more than before each length, MiB."""
    trained, extra, seen = module(), [], LargestTensor()
    lengths = (1024, 2048, 4096)
    for length in (256, *lengths):
        given = batch(length)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        with seen:
            trained(given, trained.counts(given)).backward()
        if length >= 1024:
            extra.append(resident("VmHWM") - before)
    found = {"peak": resident("VmHWM"), "largest": seen.largest, "lengths": lengths, "extra": extra}
    print(json.dumps({**found, "epochs": peaks_of_epochs(trained, epochs=3, rows=4)}))


if __name__ == "__main__":
    main()
