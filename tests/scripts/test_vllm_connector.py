"""What the connector takes from vLLM's cache are a request's own states, in the order of its tokens."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.scripts import vllm_connector
from eyas.scripts.vllm_connector import states_of_blocks, write_states


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 12])
def test_states_come_in_the_order_of_the_blocks(tokens: int) -> None:
    blocks, layers, slots, D = 7, 2, 4, 3
    cache_BASD = torch.zeros(blocks, layers, slots, D)
    owned = [5, 1, 6]
    for place in range(12):  # token `place` was written to its slot of its block
        block, slot = owned[place // slots], place % slots
        cache_BASD[block, :, slot] = torch.arange(layers)[:, None] * 100.0 + place
    states = states_of_blocks(cache_BASD, owned, tokens)
    assert states.shape == (tokens, layers, D)
    assert states[:, 1, 0].tolist() == [100.0 + place for place in range(tokens)]


def test_blocks_that_hold_too_little_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="4 states for 5 tokens"):
        states_of_blocks(torch.zeros(3, 2, 4, 3), [1], 5)


def test_a_file_has_its_final_name_when_it_is_whole(tmp_path: Path) -> None:
    write_states(str(tmp_path / "row.safetensors"), torch.ones(2, 1, 3), [7, 8])
    found = load_file(tmp_path / "row.safetensors")
    assert found["token_ids"].tolist() == [7, 8]
    assert found["states"].shape == (2, 1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["row.safetensors"]


def test_nothing_else_is_looked_up() -> None:
    with pytest.raises(AttributeError, match="SomethingElse"):
        _ = vllm_connector.SomethingElse
