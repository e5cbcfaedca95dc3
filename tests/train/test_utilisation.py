"""Operations of a training step, counted by hand on two packed documents and padding."""

import pytest
import torch

from eyas.data.feature_batch import FeatureBatch
from eyas.models.head_config import HeadConfig, head_config_for
from eyas.models.heads import new_head
from eyas.tests.toys import tiny_config
from eyas.train.plan_facts import head_size
from eyas.train.utilisation import TrainingWork

NORMS = {"eagle3": 4 * 40, "eagle1": 40}  # counted with the layers


def batch() -> FeatureBatch:
    """Return a line of two documents of 5 and 3 tokens, 3 and 2 of them generated, and two tokens of padding."""
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1, -1]])
    return FeatureBatch(
        input_ids_BT=torch.zeros(1, 10, dtype=torch.int64), aux_hidden_BTF=torch.zeros(1, 10, 1),
        final_hidden_BTD=torch.zeros(1, 10, 1), argmax_BT=torch.zeros(1, 10, dtype=torch.int64),
        generated_mask_BT=torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 0, 0]]).bool(), document_BT=document,
        position_BT=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0]]),
    )  # fmt: skip


def config(kind: str, *, layers: int = 1) -> HeadConfig:
    aux = (1, 2, 4) if kind == "eagle3" else ()
    size = 61 if kind == "eagle3" else None
    return head_config_for(tiny_config(), kind=kind, num_layers=layers, aux_layers=aux, draft_vocab_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("trains_output", [True, False])
def test_the_operations_of_eagle3_by_hand(trains_output: bool) -> None:
    found = TrainingWork(config("eagle3"), head_size(config("eagle3")), ttt_steps=2, trains_output=trains_output)
    # q 80x64, k and v 80x32 each, o 64x40, three of the MLP 40x56; four norms.
    layer = 80 * 64 + 2 * 80 * 32 + 64 * 40 + 3 * 40 * 56 + NORMS["eagle3"]
    # Slots 1 and 2 of the first document and 0 of the second at step 0, which see 2, 3 and 1 keys; slot 1 at step 1.
    tokens, slots, visible, pairs = 8, 3, 2 + 3 + 1, 3 + 1
    keys = visible + (visible + slots)
    only_seen = 2 * 80 * 32 + 40  # k and v; the head's last norm is counted with every slot
    forward_and_back = 3 * (2 * layer * slots + only_seen * (tokens - slots)) + 3 * 2 * 64 * keys
    output = 40 * 61 * ((3 if trains_output else 2) * pairs + slots)
    assert found.of_batch(batch()) == 2 * (forward_and_back + 2 * 120 * 40 * tokens + output)


def test_eagle1_runs_its_fc_at_every_step_and_the_targets_head_never_learns() -> None:
    found = TrainingWork(config("eagle1"), head_size(config("eagle1")), ttt_steps=1, trains_output=False)
    layer = 80 * 40 + 40 * 64 + 2 * 40 * 32 + 64 * 40 + 3 * 40 * 56 + NORMS["eagle1"]
    keys = 80 * 40 + 2 * 40 * 32  # fc, k and v
    assert found.of_batch(batch()) == 2 * (3 * (layer * 3 + keys * 5) + 3 * 2 * 64 * 6 + 40 * 97 * (2 * 3 + 3))


def test_more_layers_and_more_supervision_are_more_work() -> None:
    def work(layers: int, *, everywhere: bool) -> float:
        shape = config("eagle3", layers=layers)
        return TrainingWork(shape, head_size(shape), 3, trains_output=True, everywhere=everywhere).of_batch(batch())

    with torch.device("meta"):
        extra = sum(p.numel() for n, p in new_head(config("eagle3", layers=3)).named_parameters() if "layers." in n)
    keys, each = 3 * 6 + 3 * (1 + 2), extra // 2
    # Slots that are only seen pass the first two layers of three whole, and of the last k and v alone.
    seen = (80 * 64 + 80 * 32 * 2 + 64 * 40 + 3 * 40 * 56 + NORMS["eagle3"] - 40 + each) + 2 * 40 * 32 - 2 * 80 * 32
    found = work(3, everywhere=False) - work(1, everywhere=False)
    assert found == 2 * (3 * (3 * extra * 3 + seen * 5) + 2 * 3 * 2 * 64 * keys)
    assert work(1, everywhere=True) > work(1, everywhere=False)
