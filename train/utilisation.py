"""Model FLOP utilisation: the products that training cannot do without, per second, over what the machine can do.

Counted: the layers at every TTT step of a supervised slot, what makes keys at every other, fc once, output rows at
supervised pairs and the teacher's at taught positions, scores and values of the attention; forward and backward, none
of it twice. Not counted: padding, recomputed activations, everything that is no matrix product. The machine's speed is
`train/machine.py`'s bare product.
"""

from dataclasses import dataclass

from eyas.data.feature_batch import FeatureBatch
from eyas.models.head_config import HeadConfig
from eyas.train.plan_facts import HeadSize


@dataclass(frozen=True)
class TrainingWork:
    """What a training step of a head multiplies. `everywhere`: prompts are supervised too."""

    config: HeadConfig
    size: HeadSize
    ttt_steps: int
    trains_output: bool
    everywhere: bool = False

    def flops(self, *, tokens: int, slots: int, visible: int, pairs: int) -> float:
        """Return the operations of a step over some tokens, `slots` of them supervised at step 0, at `pairs` in all.

        `visible` are the step-0 keys that the queries of one step see together.
        """
        config, steps = self.config, self.ttt_steps
        output = config.draft_vocab_size * config.hidden_size
        width = config.num_attention_heads * config.head_dim
        keys = steps * visible + slots * steps * (steps - 1) / 2  # and one own key per step before
        return 2.0 * (
            3 * (steps * self.size.layer * slots + self.size.keys * (tokens - slots))
            + 2 * self.size.fuse * tokens  # no gradient by the target's states
            + (3 if self.trains_output else 2) * output * pairs
            + output * slots
            + 3 * 2 * width * config.num_layers * keys
        )

    def of_batch(self, batch: FeatureBatch) -> float:
        """Return the operations that a batch needs, over its supervised slots."""
        supervised = [batch.supervised(step, everywhere=self.everywhere) for step in range(self.ttt_steps)]
        return self.flops(
            tokens=int((batch.document_BT >= 0).sum()),
            slots=int(supervised[0].sum()),
            visible=int((batch.position_BT + 1)[supervised[0]].sum()),
            pairs=sum(int(slots_BT.sum()) for slots_BT in supervised),
        )
