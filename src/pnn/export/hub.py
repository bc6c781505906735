"""Publish an exported folder on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from pnn.errors import UserError


def check_target(target: str) -> None:
    if target.count("/") != 1 or target.startswith(("/", ".", "~")):
        raise UserError(f"--push-to {target}: give a name on the hub, owner/name (--output takes a folder of your own)")


def push(folder: Path, target: str) -> str:
    """Into a private repository. Returns where it lies now."""
    api = HfApi()
    try:
        api.create_repo(target, exist_ok=True, private=True)
        return str(api.upload_folder(repo_id=target, folder_path=folder, commit_message="Exported by pnn"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--push-to {target}: the hub did not take it ({reason}); {folder} is whole and can be pushed again"
        ) from error
