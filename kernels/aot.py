"""Ahead-of-time compilation of every kernel for sm_80, sm_90 and sm_100, on a machine that needs no GPU.

The interpreter that the tests run accepts what a GPU would not: register spills, too much shared memory, code that does
not compile. `python -m eyas.kernels.aot` compiles each build that the kernel files list and prints one JSON list of
`CompileReport`. It must run without TRITON_INTERPRET, which turns kernels into something that cannot be compiled.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eyas.kernels import tree_attention, triton_support, verify_tree_greedy
from eyas.kernels.triton_support import KernelBuild

CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True)
class CompileReport:
    """What one build costs on one architecture.

    registers: per thread. spilled_bytes: local memory per thread. shared_bytes: shared memory per block.
    """

    build: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


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


def main() -> int:
    """0 after printing the reports, 2 where kernels cannot be compiled."""
    if triton_support.triton is None:
        print("triton is not installed, so there is nothing to compile: pip install triton", file=sys.stderr)
        return 2
    if triton_support.triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set, which makes kernels uncompilable: unset it for this command", file=sys.stderr)
        return 2
    builds = (*verify_tree_greedy.aot_builds(), *tree_attention.aot_builds())
    reports = [compile_ahead(build, capability) for build in builds for capability in CAPABILITIES]
    print(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
