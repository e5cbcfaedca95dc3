"""What a training-time-test step may see: step-0 keys up to its slot, and its own later keys (one diagonal per step).

    query (t, s) sees   keys (j, 0) for first_t <= j <= t     and     keys (t, 1) .. (t, s)

first_t is the first slot of t's document. That is exactly what the draft cache shows a node of depth s when decoding;
the step-0 mask never shifts with s. Nobody but the slot itself sees its later keys, so a slot that is not trained needs
no query, no output and no later step: `wanted_N` of a context names the slots that go on after step 0's keys, those of
the head's last layer, as the layers before it make keys of step 0 too.

`blocks` is the op, by kernel or in blocks of queries, with memory linear in T and in S; `dense` is the sentence above
written down, for tests.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eyas.kernels.ttt_attention import first_visible, ttt_attention, ttt_attention_reference
from eyas.models.layers import take_rows

Attention = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], Tensor]
TTT_ATTENTIONS: dict[str, Attention] = {"blocks": ttt_attention, "dense": ttt_attention_reference}


Layers = tuple[Tensor, ...]  # one tensor per layer of the head


class TTTContext:
    """The attention context of one training batch: the keys of all steps so far, alive for one forward pass."""

    def __init__(
        self,
        document_BT: Tensor,
        *,
        attention: str = "blocks",
        keys: tuple[Layers, ...] = (),
        values: tuple[Layers, ...] = (),
        wanted_N: Tensor | None = None,
        layers: int = 1,
    ) -> None:
        """`document_BT`: document number of every slot, -1 for padding. `keys` and `values`: of the steps before.

        `wanted_N` are the slots that go on, ascending flat indices into B*T; all lines then count as one from the
        attention of step 0's last layer (of `layers`) on, and later steps take [1, N, ...]. Left out, all go on.
        """
        B, T = document_BT.shape
        first_BT, slot_BT = first_visible(document_BT), torch.arange(T, device=document_BT.device).expand(B, T)
        self.lines = self.queries = (first_BT, slot_BT)
        if wanted_N is not None:
            line_B1 = T * torch.arange(B, device=document_BT.device)[:, None]
            self.queries = ((first_BT + line_B1).flatten()[None, wanted_N], wanted_N[None])
        self.wanted_N = wanted_N
        self.last_layer = layers - 1
        self._cuts = False
        self.attention = TTT_ATTENTIONS[attention]
        self.keys, self.values = list(keys), list(values)

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor, *, layer: int = 0) -> Tensor:
        """Return the attention output of a layer of the next step, which begins with layer 0; the first is step 0.

        The last layer of step 0 leaves the wanted slots alone; the layers before it make keys that others see.
        """
        if layer == 0:
            self.keys.append(())
            self.values.append(())
        joins = self.wanted_N is not None and len(self.keys) == 1
        self._cuts = joins and layer == self.last_layer
        self.keys[-1] += (_joined(k_BGTd) if joins else k_BGTd,)
        self.values[-1] += (_joined(v_BGTd) if joins else v_BGTd,)
        if joins and not self._cuts:
            return self.attention(q_BHTd, [k_BGTd], [v_BGTd], *self.lines)
        if self._cuts and self.wanted_N is not None:
            H, d = q_BHTd.shape[1], q_BHTd.shape[3]
            q_MA = q_BHTd.transpose(1, 2).reshape(-1, H * d)
            q_BHTd = take_rows(q_MA, self.wanted_N).view(1, -1, H, d).transpose(1, 2)
        keys, values = ([step[layer] for step in steps] for steps in (self.keys, self.values))
        return self.attention(q_BHTd, keys, values, *self.queries)

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return those rows of the layer's input that `attend` returned outputs for."""
        if self.wanted_N is None or not self._cuts:
            return x_BTD
        return take_rows(x_BTD.flatten(0, 1), self.wanted_N)[None]


def _joined(x_BGTd: Tensor) -> Tensor:
    """Return the keys of all lines as those of one, [1, G, B*T, d]."""
    return x_BGTd.transpose(0, 1).flatten(1, 2)[None]
