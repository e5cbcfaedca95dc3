"""The import table of the package, enforced on the syntax tree of every module; the checker itself on bad sources."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALL = {"kernels", "models", "data", "inference", "train", "scripts"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "models": {"kernels"},
    "data": {"models", "kernels"},
    "inference": {"models", "kernels"},
    "train": {"data", "models", "inference", "kernels"},
    "scripts": ALL,
    "tests": ALL,
}
FOLDERS = {*MAY_IMPORT, "recipes"}
INTERFACE_ONLY = {"yaml", "typer"}
MAY_USE_INTERFACE = {"train", "scripts", "tests"}
OPTIONAL = {"deepspeed", "wandb", "vllm", "triton", "matplotlib", "openai"}
TRITON_SUPPORT = "kernels/triton_support.py"
MAX_LINES = 400


def imported_names(node: ast.AST) -> list[str]:
    """Return the dotted names that an import statement brings in; `from eyas import x` counts as `eyas.x`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        return [f"eyas.{alias.name}" for alias in node.names] if module == "eyas" else [module]
    return []


def is_type_checking(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether `node` is `if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_time_nodes(node: ast.AST, *, guarded: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes that run when the module is imported, each with whether a `try` with handlers surrounds it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if is_type_checking(node) and child in node.body:
            continue
        child_guarded = guarded or (isinstance(node, ast.Try) and child in node.body and bool(node.handlers))
        yield child, child_guarded
        yield from import_time_nodes(child, guarded=child_guarded)


def layer_faults(folder: str, name: str) -> Iterator[str]:
    """Yield what is wrong with a module of `folder` importing the dotted `name`, wherever in the module it does."""
    first, _, rest = name.partition(".")
    if first in FOLDERS:
        yield f"imports {name}: our own modules are imported as eyas.{name}"
    layer = rest.partition(".")[0]
    if first == "eyas" and layer in FOLDERS and layer not in MAY_IMPORT[folder] | {folder}:
        allowed = ", ".join(sorted(MAY_IMPORT[folder])) or "nothing of ours"
        yield f"imports {name}: {folder} may import {allowed}"
    if first in INTERFACE_ONLY and folder not in MAY_USE_INTERFACE:
        yield f"imports {name}: only train and scripts see YAML and the command line"


def faults(path: str, source: str) -> list[str]:
    """Return what `source`, the module at `path` (relative to the root), does against the house's table."""
    folder, _, file_name = path.rpartition("/")
    if folder.startswith("tests/"):
        folder = "tests"
    lines = source.count("\n")
    found = [(MAX_LINES, f"{lines} lines; {MAX_LINES} are allowed")] if lines > MAX_LINES else []
    if file_name == "__init__.py" and folder:
        found.append((1, "no folder may hold an __init__.py: `kernels` would shadow the package of that name"))
    if folder not in MAY_IMPORT:
        found.append((1, f"modules live in {', '.join(sorted(MAY_IMPORT))} and nowhere else"))
        return [f"{path}:{line}: {what}" for line, what in found]

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "relative import: write `from eyas.folder.file import name`"))
        found += [
            (getattr(node, "lineno", 0), what) for name in imported_names(node) for what in layer_faults(folder, name)
        ]
    for node, guarded in import_time_nodes(tree) if folder != "tests" else ():
        for name in imported_names(node):
            optional = name.partition(".")[0]
            if optional in OPTIONAL and not (optional == "triton" and guarded and path == TRITON_SUPPORT):
                line = getattr(node, "lineno", 0)
                found.append((line, f"imports {name} when it is imported: do it inside the function that needs it"))
    return [f"{path}:{line}: {what}" for line, what in sorted(found)]


def modules() -> list[str]:
    """Return every Python file of the checkout's own folders and of its root but the package's `__init__.py`."""
    found = [path for folder in sorted(FOLDERS) for path in (ROOT / folder).rglob("*.py")]
    found += [path for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def test_every_module_keeps_to_the_table() -> None:
    found = [fault for path in modules() for fault in faults(path, (ROOT / path).read_text())]
    assert not found, "\n" + "\n".join(found)


def test_the_walk_reaches_every_folder() -> None:
    assert {path.split("/")[0] for path in modules()} == set(MAY_IMPORT)


def test_shell_scripts_are_short_too() -> None:
    lines = {path.name: path.read_text().count("\n") for path in (ROOT / "scripts").glob("*.sh")}
    assert {"test.sh", "quickstart.sh", "venv.sh"} <= set(lines)
    assert max(lines.values()) <= MAX_LINES


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("models/a.py", "from eyas.data.store import Store", "models may import kernels"),
        ("models/a.py", "import eyas.train.loop", "models may import kernels"),
        ("kernels/a.py", "from eyas.models.cache import KVCache", "kernels may import nothing of ours"),
        ("data/a.py", "from eyas.inference.tree import DraftTree", "data may import kernels, models"),
        ("inference/a.py", "from eyas import data", "inference may import kernels, models"),
        ("train/a.py", "def f():\n    from eyas.scripts.cli import main", "a.py:2: imports eyas.scripts.cli"),
        ("scripts/a.py", "from eyas.tests.tiny import model", "scripts may import"),
        ("models/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import eyas.data.store", "a.py:3:"),
        ("models/a.py", "from .cache import KVCache", "relative import"),
        ("tests/a.py", "from . import tiny", "relative import"),
        ("train/a.py", "from data.store import Store", "imported as eyas.data.store"),
        ("tests/models/a.py", "import tests.tiny", "imported as eyas.tests.tiny"),
        ("data/a.py", "def f():\n    import yaml", "only train and scripts see YAML"),
        ("inference/a.py", "import typer", "only train and scripts see YAML"),
        ("train/a.py", "import wandb", "inside the function"),
        ("train/a.py", "try:\n    import deepspeed\nexcept ImportError:\n    deepspeed = None", "inside the function"),
        ("scripts/a.py", "class A:\n    from vllm import LLM", "inside the function"),
        ("scripts/a.py", "import sys\nif sys.argv:\n    import matplotlib.pyplot as plt", "a.py:3: imports matplotlib"),
        ("train/a.py", "if TYPE_CHECKING:\n    x = 1\nelse:\n    import wandb", "a.py:4: imports wandb"),
        ("kernels/a.py", "try:\n    import triton\nexcept ImportError:\n    triton = None", "inside the function"),
        (TRITON_SUPPORT, "import triton.language as tl", "inside the function"),
        (TRITON_SUPPORT, "try:\n    x = 1\nexcept ImportError:\n    import triton", "inside the function"),
        ("kernels/__init__.py", "", "no folder may hold an __init__.py"),
        ("tests/kernels/__init__.py", "", "no folder may hold an __init__.py"),
        ("models/llama/a.py", "", "nowhere else"),
        ("recipes/a.py", "", "nowhere else"),
        ("setup.py", "", "nowhere else"),
        ("models/a.py", "\n" * 401, "401 lines; 400 are allowed"),
    ],
)
def test_the_checker_names_the_fault(path: str, source: str, expected: str) -> None:
    found = faults(path, source)
    assert len(found) == 1
    assert expected in found[0]
    assert found[0].startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("models/a.py", "import torch\nfrom eyas import __version__\nfrom eyas.kernels.verify import verify"),
        ("models/a.py", "from eyas.models.cache import KVCache"),
        ("train/a.py", "import yaml\nfrom eyas.data.store import Store\nfrom eyas.inference.tree import DraftTree"),
        ("scripts/a.py", "import typer\nfrom eyas.train.loop import train\n\ndef f():\n    import vllm"),
        ("train/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb"),
        (TRITON_SUPPORT, "try:\n    import triton\nexcept ImportError:\n    triton = None"),
        ("tests/a.py", "import triton\nfrom eyas.scripts.cli import main"),
        ("data/a.py", "\n" * 400),
    ],
)
def test_the_checker_accepts_what_is_allowed(path: str, source: str) -> None:
    assert faults(path, source) == []
