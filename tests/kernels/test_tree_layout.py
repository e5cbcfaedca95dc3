"""Ancestors against a tree drawn by hand and against a walk up the parents; the check of malformed trees."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eyas.kernels.tree_layout import ancestor_mask, check_trees, pack_ancestors, unpack_ancestors

# The tree in the docstring of tree_layout: 0 -> 1, 2 and 2 -> 3, 4.
PARENTS = [-1, 0, 0, 2, 2]


def test_the_drawn_tree_has_the_words_written_beside_it() -> None:
    mask = ancestor_mask(torch.tensor([PARENTS]), torch.tensor([5]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]
    assert mask.dtype == torch.bool
    assert mask[0].int().tolist() == expected
    assert pack_ancestors(mask)[0, :, 0].tolist() == [0b00001, 0b00011, 0b00101, 0b01101, 0b10101]


def test_padding_nodes_see_nothing_and_are_seen_by_nobody() -> None:
    mask = ancestor_mask(torch.tensor([PARENTS, PARENTS]), torch.tensor([3, 0]))
    assert mask[0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0] * 5, [0] * 5]
    assert not mask[1].any()


@pytest.mark.parametrize("nodes", [1, 5, 7, 60, 63, 64, 65, 130])
def test_ancestors_are_those_met_on_the_way_up(nodes: int, random_parents: Callable[[int, int], Tensor]) -> None:
    parents = random_parents(3, nodes)
    num_nodes = torch.tensor([nodes, 1, (nodes + 1) // 2])
    expected = torch.zeros(3, nodes, nodes, dtype=torch.bool)
    for row in range(3):
        for node in range(int(num_nodes[row])):
            above = node
            while above >= 0:
                expected[row, node, above] = True
                above = int(parents[row, above])
    mask = ancestor_mask(parents, num_nodes)
    assert torch.equal(mask, expected)
    words = pack_ancestors(mask)
    assert words.shape == (3, nodes, (nodes + 63) // 64)
    assert torch.equal(unpack_ancestors(words), expected)


def test_a_chain_of_64_uses_the_sign_bit() -> None:
    words = pack_ancestors(ancestor_mask(torch.arange(-1, 63)[None], torch.tensor([64])))
    assert words[0, 62, 0] == 2**63 - 1
    assert words[0, 63, 0] == -1


def test_a_cycle_ends() -> None:
    mask = ancestor_mask(torch.tensor([[-1, 2, 1]]), torch.tensor([3]))
    assert mask[0].int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("parents", "num_nodes", "message"),
    [
        ([-1, 0, 0, 2, 2], 6, r"num_nodes_B\[1\] is 6, but .* 5 nodes per row: give 0 \(idle row\) to 5"),
        ([-1, 0, 0, 2, 2], -1, r"num_nodes_B\[1\] is -1"),
        ([0, 0, 0, 2, 2], 5, r"parents_BN\[1, 0\] is 0, but must be -1"),
        ([-1, 0, -1, 2, 2], 5, r"parents_BN\[1, 2\] is -1, but must be 0 to 1"),
        ([-1, 0, 2, 2, 2], 5, r"parents_BN\[1, 2\] is 2, but must be 0 to 1"),
        ([-1, 0, 0, 4, 2], 4, r"parents_BN\[1, 3\] is 4, but must be 0 to 2"),
    ],
)
def test_malformed_trees_are_named(parents: list[int], num_nodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trees(torch.tensor([PARENTS, parents]), torch.tensor([5, num_nodes]))


def test_padding_may_hold_anything() -> None:
    check_trees(torch.tensor([[-1, 0, 99, -7], [5, 5, 5, 5]]), torch.tensor([2, 0]))
