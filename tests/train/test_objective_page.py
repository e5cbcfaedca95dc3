"""The worked table of docs/objective.md, made again from the code that trains."""

from pathlib import Path

import torch

from eyas.data.feature_batch import FeatureBatch, collate
from eyas.data.feature_store import FeatureRow
from eyas.models.ttt_attention import TTTContext

PAGE = Path(__file__).resolve().parents[2] / "docs" / "objective.md"
WORDS = ["Q", ":", "yes", ",", "sure", "<end>"]
STEPS = 3


def six_tokens() -> FeatureBatch:
    """Return the page's text as one line; token i is word i."""
    generated = torch.tensor([False, False, True, True, True, True])
    states = torch.zeros(6, 1)
    row = FeatureRow("page", torch.arange(6), generated, states, states, torch.zeros(6, dtype=torch.int64))
    return collate([[row]], length=6, dtype=torch.float32)


def keys_seen(batch: FeatureBatch) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the keys (slot, step) whose value reaches the attention output of each query (slot, step)."""
    context, values, seen = TTTContext(batch.document_BT), [], {}
    for step in range(STEPS):
        q, k, v = (torch.randn(1, 1, 6, 2, requires_grad=True) for _ in range(3))
        values.append(v)
        out = context.attend(q, k, v)
        for slot in range(6):
            grads = torch.autograd.grad(out[0, 0, slot].sum(), values, retain_graph=True)
            reached = [(j, i) for i, grad in enumerate(grads) for j in range(6) if bool(grad[0, 0, j].any())]
            seen[slot, step] = reached
    return seen


def worked_table() -> list[str]:
    batch, seen = six_tokens(), keys_seen(six_tokens())
    lines = []
    for step in range(STEPS):
        supervised, embedded = batch.supervised(step)[0], batch.token_ids(step)[0]
        for slot in range(5 - step):
            teacher = int(batch.teacher_index(torch.tensor([slot]), step))
            taught = f"p_{teacher}" + (f" of `{WORDS[teacher + 1]}`" if teacher < 5 else "")
            cells = (
                step,
                slot,
                f"target's at {slot}" if step == 0 else f"own of step {step - 1}",
                f"`{WORDS[int(embedded[slot])]}`",
                int(batch.position_ids(step)[0, slot]),
                " ".join(f"({j},{i})" for j, i in seen[slot, step]),
                taught,
                "yes" if bool(supervised[slot]) else "no",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def test_the_pages_table_is_what_the_code_does() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- the worked table -->\n")[1].split("<!-- end of the worked table -->")[0].splitlines()
    assert table[2:] == worked_table()
