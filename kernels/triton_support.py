"""The one place that tries to import triton.

Every kernel file takes `tl` and `jit` from here, so it imports on a machine without triton: the kernels then stay plain
functions that nobody launches, because `available` is False and each op runs its PyTorch reference instead. Kernel
files start with `from __future__ import annotations`: `BLOCK: tl.constexpr` is then a string that triton reads and
Python never evaluates.

With TRITON_INTERPRET=1 set before the first import, `jit` yields kernels that triton's interpreter runs on CPU tensors.
The ops never choose that by themselves: the tests call the private launchers, or open `interpreted`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None


def jit(function: Any) -> Any:
    """`function` as a triton kernel, or unchanged where triton is missing."""
    return function if triton is None else triton.jit(function)


def available(device: torch.device) -> bool:
    """True where triton can compile for `device`: a GPU, on NVIDIA of compute capability 8.0 (Ampere) or later.

    A GPU without kernels gives one warning that names the reason. Inside `interpreted` the CPU counts as well.
    """
    if device.type != "cuda":
        return device.type == "cpu" and _interpreting
    reason = _why_missing(device)
    if reason is None:
        return True
    _warn_once(reason)
    return False


def _why_missing(device: torch.device) -> str | None:
    if triton is None:
        return "triton is not installed (pip install triton)"
    if torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, triton needs 8.0"


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"kernels run as their plain PyTorch references, which are slower: {reason}", stacklevel=4)


_interpreting = False


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let every op run its kernel in triton's interpreter on CPU tensors: for tests, where the law must not change."""
    global _interpreting
    assert triton is not None, "triton is not installed"
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before triton is imported"
    _interpreting = True
    try:
        yield
    finally:
        _interpreting = False


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which launches go to `device`; triton would otherwise use the current GPU, not the tensors' one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for values up to 1)."""
    return 1 << max(value - 1, 0).bit_length()


@dataclass(frozen=True)
class KernelBuild:
    """One compilation of a kernel, as a launch would specialise it (`eyas.kernels.aot` compiles these without a GPU).

    types: triton type of each argument that is not a constant, such as "*bf16", "i32", "fp32".
    aligned: arguments that a launch finds divisible by 16; this decides vector loads and asynchronous copies.
    since: the first compute capability that has its types.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    aligned: frozenset[str]
    constants: dict[str, Any]
    options: dict[str, int]
    since: int = 80
