"""Publish an exported folder: on the Hugging Face hub, or, for a name that is a path, in a folder (a shared disk, a mirror)."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from pnn.errors import UserError
from pnn.files import new_folder


def is_path(target: str) -> bool:
    return target.startswith(("/", "./", "../", "~"))


def check_target(target: str) -> None:
    if is_path(target):
        if Path(target).expanduser().exists():
            raise UserError(f"--push-to {target}: it exists already")
    elif target.count("/") != 1:
        raise UserError(f"--push-to {target}: owner/name on the hub, or a path that begins with / or ./")


def push(folder: Path, target: str, *, private: bool = True) -> str:
    """Returns where it lies now."""
    check_target(target)
    if is_path(target):
        place = Path(target).expanduser()
        with new_folder(place) as partial:
            shutil.copytree(folder, partial, dirs_exist_ok=True)
        return str(place)
    api = HfApi()
    try:
        api.create_repo(target, exist_ok=True, private=private)
        return str(api.upload_folder(repo_id=target, folder_path=folder, commit_message="Exported by pnn"))
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--push-to {target}: the hub did not take it ({reason}); {folder} is whole and can be pushed again"
        ) from error
