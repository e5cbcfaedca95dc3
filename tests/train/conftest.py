"""accelerate keeps its state in singletons: every test here starts without them, on the CPU, in a single process."""

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
