"""The packages of a release, from the commit that is checked out: a wheel, a source package, their checksums and a bill of
materials. They are built twice, in other folders, with another umask, time zone and hash seed; the bytes must be the same.

    python release/build.py dist        (`make release`)

All times in the packages are that of the commit. What is not committed is not in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dependencies import ROOT, bill


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def build(folder: Path, umask: int, **settings: str) -> Path:
    """Packages of a fresh clone; returns where they are."""
    subprocess.run(["git", "clone", "--quiet", "--local", ROOT, folder / "source"], check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", "-t", "sdist", "-t", "wheel"]
    subprocess.run(command, cwd=folder / "source", env={**os.environ, **settings}, umask=umask, check=True, capture_output=True)
    return folder / "dist"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def main(output: Path) -> None:
    os.environ["SOURCE_DATE_EPOCH"] = git("show", "-s", "--format=%ct", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no"):
        print("note: there are changes that are not committed; they are not in the packages", file=sys.stderr)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first = build(Path(one), 0o022, TZ="UTC", PYTHONHASHSEED="0")
        again = build(Path(other), 0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="1")
        if digests(first) != digests(again):
            sys.exit(f"two builds differ: {digests(first)} and {digests(again)}")
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(first, output)
    (output / "bill-of-materials.json").write_text(json.dumps(bill(), indent=2) + "\n", encoding="utf-8")
    listing = "".join(f"{digest}  {name}\n" for name, digest in digests(output).items())
    (output / "SHA256SUMS").write_text(listing, encoding="utf-8")
    print(listing, end="")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
