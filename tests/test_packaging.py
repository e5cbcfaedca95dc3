"""What a user installs: the wheel and the editable form hold exactly the package `eyas` and all its files.

Both are built from a copy of the checkout, so that neither `build/` nor `*.egg-info` is left in it.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import eyas

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("train", "data", "models", "inference", "kernels", "recipes", "scripts")
ROOT_FILES = ("__init__.py", "py.typed", "pyproject.toml", "README.md", "LICENSE")
EDITABLE = "import setuptools.build_meta as backend, sys; print(backend.build_editable(sys.argv[1]))"


def expected_files(root: Path) -> set[str]:
    """Return the names that a wheel of the checkout `root` must hold: every file of the folders but documents."""
    found = {"eyas/__init__.py", "eyas/py.typed"}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix != ".md" and "__pycache__" not in path.parts:
                found.add(f"eyas/{path.relative_to(root).as_posix()}")
    return found


def wheel_faults(names: set[str], expected: set[str]) -> list[str]:
    """Return what is wrong with a wheel that holds `names`."""
    found = [f"{folder}/ is missing" for folder in FOLDERS if not any(n.startswith(f"eyas/{folder}/") for n in names)]
    found += [f"{name} is missing" for name in sorted(expected - names)]
    found += [
        f"{name} must not exist" for name in sorted(names) if name.endswith("__init__.py") and name.count("/") > 1
    ]
    tops = {name.split("/")[0] for name in names}
    found += [
        f"{top} is installed beside eyas" for top in sorted(tops) if top != "eyas" and not top.endswith(".dist-info")
    ]
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that go into the package."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ROOT_FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel built, without network, from the source distribution: what is missing there is missing here."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel_faults(names, expected_files(ROOT)) == []
    assert wheel.name == f"eyas-{eyas.__version__}-py3-none-any.whl"


def test_the_installed_wheel_imports_as_eyas(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    first_of_each = [sorted((target / "eyas" / folder).glob("*.py")) for folder in FOLDERS if folder != "recipes"]
    names = [f"eyas.{files[0].parent.name}.{files[0].stem}" for files in first_of_each]
    code = (
        f"import importlib, json, sys; sys.path.insert(0, {str(target)!r})\n"
        f"print(json.dumps([importlib.import_module(name).__file__ for name in {names!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    files = json.loads(done.stdout.splitlines()[-1])
    assert len(files) == 6
    assert all(Path(file).is_relative_to(target / "eyas") for file in files)
    assert (target / "bin" / "eyas").is_file()


def test_the_editable_form_imports_the_checkout_itself(checkout: Path, tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-c", EDITABLE, str(tmp_path)], cwd=checkout, capture_output=True, text=True, check=True
    )
    zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).extractall(tmp_path / "site")
    code = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
        "import eyas, eyas.kernels, eyas.recipes, importlib.util\n"
        "print(eyas.__file__); print(*eyas.kernels.__path__); print(*eyas.recipes.__path__)\n"
        "print(importlib.util.find_spec('train'), importlib.util.find_spec('kernels'))"
    )
    # -I -S: no other installed form of eyas can answer in this one's place.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = [str(checkout / "__init__.py"), str(checkout / "kernels"), str(checkout / "recipes"), "None None"]
    assert done.stdout.splitlines() == expected


def test_this_environment_runs_the_checkout(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import eyas; print(eyas.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == ROOT / "__init__.py"


GOOD = {"eyas/__init__.py", "eyas-0.1.0.dist-info/METADATA", *(f"eyas/{folder}/a.py" for folder in FOLDERS)}


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (GOOD - {"eyas/data/a.py"}, "data/ is missing"),
        (GOOD | {"eyas/kernels/__init__.py"}, "eyas/kernels/__init__.py must not exist"),
        (GOOD | {"train/a.py"}, "train is installed beside eyas"),
        (GOOD | {"tests/test_a.py"}, "tests is installed beside eyas"),
    ],
)
def test_the_checker_names_the_fault(names: set[str], fault: str) -> None:
    assert wheel_faults(names, set()) == [fault]
    assert wheel_faults(GOOD, set()) == []


def test_the_checker_misses_no_recipe() -> None:
    assert wheel_faults(GOOD, {"eyas/recipes/tiny.yaml"}) == ["eyas/recipes/tiny.yaml is missing"]
