"""Ahead-of-time compilation of every kernel for sm_80, sm_90 and sm_100, on a machine that needs no GPU.

The interpreter that the tests run accepts what a GPU would not: register spills, too much shared memory, code that does
not compile. `python -m eyas.kernels.aot` compiles each build that the kernel files list and prints one JSON list of
`CompileReport`; arguments NAME@CAPABILITY choose some. It must run without TRITON_INTERPRET, which turns kernels into
something that cannot be compiled.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyas.kernels import (
    block_statistics,
    build_tree,
    coins,
    draft_loss,
    draft_top_k,
    draw_tokens,
    keep_path,
    tree_attention,
    triton_support,
    truncate,
    ttt_attention_backward,
    ttt_attention_forward,
    verify_chain_kernels,
    verify_tree_greedy,
)
from eyas.kernels.triton_support import KernelBuild

CAPABILITIES = (80, 90, 100)
# Opt-in maximum per block in bytes (CUDA C++ programming guide, "Compute Capabilities").
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORE_INSTRUCTION = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*")
# Every file with kernels: all its builds are compiled.
BUILDS = {
    "tree_attention": tree_attention.aot_builds,
    "build_tree": build_tree.aot_builds,
    "verify_tree_greedy": verify_tree_greedy.aot_builds,
    "coins": coins.aot_builds,
    "block_statistics": block_statistics.aot_builds,
    "truncate": truncate.aot_builds,
    "draw_tokens": draw_tokens.aot_builds,
    "verify_chain": verify_chain_kernels.aot_builds,
    "keep_path": keep_path.aot_builds,
    "draft_top_k": draft_top_k.aot_builds,
    "draft_loss": draft_loss.aot_builds,
    "ttt_attention_forward": ttt_attention_forward.aot_builds,
    "ttt_attention_backward": ttt_attention_backward.aot_builds,
}


@dataclass(frozen=True)
class CompileReport:
    """What one build costs on one architecture.

    registers: per thread. spilled_bytes: local memory per thread. shared_bytes: shared memory per block.
    tensor_core_instructions: how many stand in the PTX.
    """

    build: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_instructions: int

    @property
    def fault(self) -> str | None:
        """What a card would make of this build: None if nothing is wrong."""
        if self.spilled_bytes:
            return f"{self.spilled_bytes} bytes per thread spilled"
        limit = SHARED_LIMIT[self.capability]
        return f"{self.shared_bytes} bytes of shared memory, {limit} exist" if self.shared_bytes > limit else None


def all_builds() -> dict[str, KernelBuild]:
    """Every build by its name."""
    builds = [build for of_file in BUILDS.values() for build in of_file()]
    by_name = {build.name: build for build in builds}
    assert len(by_name) == len(builds), "two builds share a name"
    return by_name


def capabilities(build: KernelBuild) -> tuple[int, ...]:
    """The architectures that have the types of a build."""
    return tuple(capability for capability in CAPABILITIES if capability >= build.since)


def compile_ahead(build: KernelBuild, capability: int) -> CompileReport:
    """The costs of `build` on compute capability `capability` (90 means 9.0). Errors: those of triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    source = ASTSource(
        fn=build.kernel,
        signature={name: build.types.get(name, "constexpr") for name in names},
        constexprs=build.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=build.options)
    usage = _resource_usage(compiled.asm["cubin"])
    return CompileReport(
        build=build.name,
        capability=capability,
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        tensor_core_instructions=len(TENSOR_CORE_INSTRUCTION.findall(compiled.asm["ptx"])),
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL, ... of the one kernel in `cubin`, as the cuobjdump in triton's wheel prints them."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", printed)}


def why_not() -> str | None:
    """Why nothing can be compiled in this process; None if it can."""
    if triton_support.triton is None:
        return "triton is not installed, so there is nothing to compile: pip install triton"
    if triton_support.triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, which makes kernels uncompilable: unset it for this command"
    return None


def main(chosen: list[str]) -> int:
    """0 after printing the reports of `chosen` (all if empty), 2 where kernels cannot be compiled."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    builds = all_builds()
    pairs = [(name, capability) for name, build in builds.items() for capability in capabilities(build)]
    if chosen:
        pairs = [(name, int(capability)) for name, _, capability in (text.rpartition("@") for text in chosen)]
    reports = [compile_ahead(builds[name], capability) for name, capability in pairs]
    print(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
