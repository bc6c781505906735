"""Which code this is: the commit, whether the tree was clean, and a digest of the sources.

Where there is a git repository, git says it. A copy without one (an installed package, a tree that was sent to another
machine) has a stamp: `_commit.json`, written by `make stamp` before the code is copied, and by whatever builds a package. A
stamp is believed as far as the sources are still those that it was made for; then also against a repository that lacks the
commit, because copied files lie over an older one, or that finds files changed which are no sources.

Standard library only: `make stamp` and the build run this file by itself.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
STAMP = "_commit.json"


def code_version(package: Path = PACKAGE) -> dict[str, Any] | None:
    """{"commit": …, "changed": whether the code is not exactly that commit's}; None if nobody knows."""
    found = _from_git(package)
    if (found is not None and not found["changed"]) or not (package / STAMP).exists():
        return found
    stamp = json.loads((package / STAMP).read_text(encoding="utf-8"))
    changed = stamp["changed"] or stamp["source_sha256"] != source_digest(package)
    return found if changed and found is not None else {"commit": stamp["commit"], "changed": changed}


def write_stamp(package: Path = PACKAGE) -> bool:
    """Returns whether git could say the commit. Where it cannot, a stamp that came with the code stays."""
    found = _from_git(package)
    if found is not None:
        stamp = {**found, "source_sha256": source_digest(package)}
        (package / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    return found is not None


def _from_git(package: Path) -> dict[str, Any] | None:
    def git(*args: str) -> str:
        command = ["git", "--no-optional-locks", *args]  # killed meanwhile, it would leave a lock that stops everybody else
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a package may be installed inside somebody else's repository
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def source_digest(package: Path = PACKAGE) -> str:
    """Of the package's Python files, by name and content: what ran can be told also where there is no git, and changes that
    were never committed show."""
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py")):
        digest.update(name.encode() + b"\0" + (package / name).read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    if not write_stamp():
        sys.exit("there is no git repository here that holds this code, so there is no commit to write down")
    print((PACKAGE / STAMP).read_text(encoding="utf-8"), end="")
