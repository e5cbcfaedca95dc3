"""What a training-time-test step may see: step-0 keys up to its slot, and its own later keys (one diagonal per step).

    query (t, s) sees   keys (j, 0) for first_t <= j <= t     and     keys (t, 1) .. (t, s)

first_t is the first slot of t's document. That is exactly what the draft cache shows a node of depth s when decoding;
the step-0 mask never shifts with s. Nobody but the slot itself sees its later keys, so a slot that is not trained needs
no query, no output and no later step: `wanted_N` of a context names the slots that go on after step 0's keys.

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


class TTTContext:
    """The attention context of one training batch: the keys of all steps so far, alive for one forward pass."""

    def __init__(
        self,
        document_BT: Tensor,
        *,
        attention: str = "blocks",
        keys: tuple[Tensor, ...] = (),
        values: tuple[Tensor, ...] = (),
        wanted_N: Tensor | None = None,
    ) -> None:
        """`document_BT`: document number of every slot, -1 for padding. `keys` and `values`: of the steps before.

        `wanted_N` are the slots that go on, ascending flat indices into B*T; all lines then count as one from step 0's
        attention on, and later steps take [1, N, ...]. Left out, every slot goes on.
        """
        B, T = document_BT.shape
        self.first_BN = first_visible(document_BT)
        self.slot_BN = torch.arange(T, device=document_BT.device).expand(B, T)
        if wanted_N is not None:
            line_B1 = T * torch.arange(B, device=document_BT.device)[:, None]
            self.first_BN = (self.first_BN + line_B1).flatten()[None, wanted_N]
            self.slot_BN = wanted_N[None]
        self.wanted_N = wanted_N
        self.attention = TTT_ATTENTIONS[attention]
        self.keys, self.values = list(keys), list(values)

    def attend(self, q_BHTd: Tensor, k_BGTd: Tensor, v_BGTd: Tensor) -> Tensor:
        """Return the attention output of the next step; the first call is step 0, and leaves the wanted slots alone."""
        if self.wanted_N is not None and not self.keys:
            k_BGTd, v_BGTd = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k_BGTd, v_BGTd))
            H, d = q_BHTd.shape[1], q_BHTd.shape[3]
            q_MA = q_BHTd.transpose(1, 2).reshape(-1, H * d)
            q_BHTd = take_rows(q_MA, self.wanted_N).view(1, -1, H, d).transpose(1, 2)
        self.keys.append(k_BGTd)
        self.values.append(v_BGTd)
        return self.attention(q_BHTd, self.keys, self.values, self.first_BN, self.slot_BN)

    def kept(self, x_BTD: Tensor) -> Tensor:
        """Return those rows of the layer's input that `attend` returned outputs for."""
        if self.wanted_N is None or len(self.keys) > 1:
            return x_BTD
        return take_rows(x_BTD.flatten(0, 1), self.wanted_N)[None]
