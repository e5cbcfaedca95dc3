"""What the kernel tests share: the device kernels run on, random trees, and poisoned allocations.

On a machine with a GPU the launchers run the compiled kernels, elsewhere triton's interpreter runs them on the CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def random_parents() -> Callable[[int, int], Tensor]:
    """parents_BN of `rows` random trees of `nodes` nodes, rather deep ones: a parent is one of the last 4 nodes."""

    def make(rows: int, nodes: int) -> Tensor:
        parents = torch.full((rows, nodes), -1)
        for node in range(1, nodes):
            parents[:, node] = torch.randint(max(node - 4, 0), node, (rows,))
        return parents

    return make


@pytest.fixture
def interpreter_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give triton's interpreter the bf16 product it lacks: it keeps bf16 as uint16 and multiplies the bit patterns."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen_then_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [builder.cast_impl(x, language.float32) if x.dtype.scalar == language.bfloat16 else x for x in (a, b)]
        return create_dot(builder, *wide, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widen_then_dot)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and torch.empty_like return, so that an element a kernel forgets to write is seen."""

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -987654321)

        return wrapped

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
