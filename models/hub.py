"""Heads on the Hub: loading one by repo id, and uploading one with its card.

The token comes from where huggingface_hub keeps it (HF_TOKEN, `hf auth login`); it is never read, printed or stored
here.
An upload that broke off goes on where it stopped when it is run again.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.models.errors import UserError
from eyas.models.head_files import CARD, CONFIG, WEIGHTS

HEAD_PATTERNS = ("*.json", "*.safetensors", "pytorch_model.bin", "README.md")


@dataclass(frozen=True)
class Upload:
    """What was (or, in a dry run, would be) uploaded: files with their bytes, and where it can be seen."""

    repo: str
    private: bool
    files: dict[str, int]
    url: str | None


def resolve_head(name: str) -> Path:
    """Return the local folder of a head: the folder itself, or the download of a Hub id (owner/name)."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"there is no head folder {name!r}; give an existing folder or a Hub id (owner/name).")
    try:
        return Path(snapshot_download(name, allow_patterns=list(HEAD_PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"there is no folder {name!r}, and the Hub does not give a head of that name: {_reason(error)}."
        ) from None


def push_folder(folder: Path, repo: str, *, card: str, private: bool, dry_run: bool) -> Upload:
    """Upload a head's files with `card` as README.md and return what was sent; a dry run contacts nobody.

    Raises UserError when the Hub refuses (wrong token, no right to the name) or the connection breaks for good.
    """
    if repo.count("/") != 1:
        raise UserError(f"--repo takes USER/NAME, given {repo!r}.")
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch)
        for name in (CONFIG, CARD, WEIGHTS):
            if (folder / name).is_file():
                shutil.copy2(folder / name, staged / name)
        (staged / "README.md").write_text(card, encoding="utf-8")
        files = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
        if dry_run:
            return Upload(repo, private, files, None)
        api = HfApi(library_name="eyas")
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=staged, commit_message="Upload a draft head with eyas")
        except (HfHubHTTPError, HFValidationError) as error:
            raise UserError(
                f"the Hub refused the upload to {repo!r}: {_reason(error)}. Check the token (hf auth whoami, or "
                "HF_TOKEN) and its right to write there."
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(_broken(repo, error)) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "hf_xet"):
                raise
            raise UserError(_broken(repo, error)) from None
    return Upload(repo, private, files, commit.commit_url)


def _broken(repo: str, error: Exception) -> str:
    return (
        f"the upload to {repo!r} broke off ({_reason(error)}); run the same command again: what has arrived is not "
        "sent twice."
    )


def _reason(error: Exception) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
