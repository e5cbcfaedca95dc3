"""What importing costs and needs: `import eyas` is quick and brings no torch; no module needs an optional package."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("train", "data", "models", "inference", "kernels", "scripts")
OPTIONAL = ("deepspeed", "wandb", "vllm", "triton", "matplotlib", "torchao", "openai")
MODULES = sorted(f"eyas.{path.parent.name}.{path.stem}" for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))

# Each finder is wrapped rather than preceded by one that raises: an absent package makes `find_spec` return None,
# which is how transformers and torch ask whether triton or deepspeed is there.
PROBE = """
import importlib, json, sys

class Without:
    def __init__(self, finder, absent):
        self.finder, self.absent = finder, absent

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

absent, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.meta_path[:] = [Without(finder, absent) for finder in sys.meta_path]
failures = {}
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


def import_without(absent: tuple[str, ...], names: list[str]) -> dict[str, str]:
    """Return the error of every module in `names` that fails to import where the packages `absent` cannot be found."""
    command = [sys.executable, "-c", PROBE, json.dumps(absent), json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


def test_import_eyas_is_quick_and_brings_no_torch(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        command = [sys.executable, "-c", "import eyas, sys; print(eyas.__version__, 'torch' in sys.modules)"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        assert done.stdout.split()[1] == "False"
    assert min(seconds) < 0.3


def test_every_module_imports_without_the_optional_packages() -> None:
    assert MODULES
    failures = import_without(OPTIONAL, MODULES)
    assert not failures, "\n" + "\n".join(f"{name}: {error}" for name, error in failures.items())


@pytest.mark.parametrize("name", ["matplotlib", "matplotlib.pyplot"])
def test_the_probe_hides_an_installed_package(name: str) -> None:
    assert import_without((), [name]) == {}
    assert import_without(("matplotlib",), [name])[name].startswith("ModuleNotFoundError")
