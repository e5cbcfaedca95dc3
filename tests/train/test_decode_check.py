"""Real decoding while training says what replay says, on the same prompts."""

import torch

from eyas.data.feature_row import LoadedRows
from eyas.inference.draft import DynamicTree
from eyas.tests.inference.heads import soften
from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.rows import greedy_row
from eyas.train.decode_check import DecodeCheck, first_replies
from eyas.train.validation import held_out_acceptance

TREE = DynamicTree(3, 4, 9)


def test_decoding_and_replay_agree_on_the_same_rows() -> None:
    target = tiny_target()
    prompts = ([5, 6, 7], [40, 3], [11, 12, 13, 14])
    rows = [greedy_row(target, str(n), prompt, new_tokens=30 + n) for n, prompt in enumerate(prompts)]
    requests = first_replies(LoadedRows(rows), count=2, stop_ids=frozenset({96}))
    assert [(list(r.prompt_ids), r.max_new_tokens, r.stop_ids) for r in requests] == [
        ([5, 6, 7], 30, {96}), ([40, 3], 31, {96}),
    ]  # fmt: skip
    assert len(first_replies(LoadedRows(rows), count=9, stop_ids=frozenset())) == 3
    head = soften(tiny_head(target))
    check = DecodeCheck(
        target, first_replies(LoadedRows(rows), count=2, stop_ids=frozenset()), depth=4, tree=TREE, dtype=torch.float32
    )
    replayed = held_out_acceptance(head, rows[:2], depth=4, dtype=torch.float32, tree=TREE).taus()
    assert check(head) == {"decoded_tau": replayed["tau"], "decoded_tree_tau": replayed["tree_tau"]}
    assert replayed["tree_tau"] > 1.05
    assert head.embed(torch.tensor([[3]])).dtype == torch.float32
