"""What the package needs, from the metadata of what is installed: with licences, as a page and as a bill of materials.

    python release/dependencies.py page             docs/dependencies.md anew
    python release/dependencies.py bill FILE        a software bill of materials: CycloneDX 1.6, JSON

Both hold the packages that `pip install plastic-neural-networks` brings, with what these bring themselves.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_INSTALLED = "not installed here"


def direct() -> list[Requirement]:
    return [Requirement(line) for line in PROJECT["dependencies"]]


def needs(name: str, extras: set[str]) -> list[Requirement]:
    """What a package with these extras brings here."""
    wanted = map(Requirement, distribution(name).requires or ())
    cases = [{"extra": extra} for extra in ("", *extras)]
    return [one for one in wanted if one.marker is None or any(map(one.marker.evaluate, cases))]


def closure() -> dict[str, set[str]]:
    """Every package that is needed, and what each of them needs."""
    found: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = direct()
    while waiting:
        one = waiting.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            brought = needs(name, set(extras))
        except PackageNotFoundError:  # other builds of torch bring CUDA's packages
            continue
        found.setdefault(name, set()).update(canonicalize_name(other.name) for other in brought)
        waiting += brought
    return {name: found[name] & found.keys() for name in sorted(found)}


def licence(name: str) -> str:
    """The licence that a package's metadata names: an SPDX expression, classifiers, or the first line of a text."""
    try:
        said = distribution(name).metadata
    except PackageNotFoundError:
        return NOT_INSTALLED
    classifiers = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or () if line.startswith("License :: ")]
    text = (said["License"] or "").strip().splitlines()
    named = said["License-Expression"] or ", ".join(one for one in classifiers if one != "OSI Approved")
    return named or (text[0] if text and len(text[0]) < 80 else "see its files")


def pins(file: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


TEXT = """<!-- written by release/dependencies.py: `make dependencies` -->
# Dependencies

What `pip install` installs, with licences as the packages' own metadata names them. `pyproject.toml` allows every version from
the oldest column up to the major version after the tested one.

| package | oldest | tested by `make test` | licence |
|---|---|---|---|
{direct}

`make oldest` runs the most telling tests with the oldest versions of all these together, `make newest` with today's newest,
each in an environment of its own. `make release` puts the whole list into the release as `bill-of-materials.json`
(CycloneDX).

These packages bring others. With the CPU build of torch:

| package | licence |
|---|---|
{others}
"""


def page() -> str:
    oldest, tested = pins("constraints-oldest.txt"), pins("constraints.txt")
    ours = sorted(canonicalize_name(one.name) for one in direct())
    rows = [f"| {name} | {oldest[name]} | {tested[name]} | {licence(name)} |" for name in ours]
    others = [f"| {name} | {licence(name)} |" for name in closure() if name not in ours]
    return TEXT.format(direct="\n".join(rows), others="\n".join(others))


def bill() -> dict[str, Any]:
    """CycloneDX 1.6. Names and times follow from the versions and SOURCE_DATE_EPOCH: the same again gives the same file."""
    packages = closure()
    reference = {name: f"pkg:pypi/{name}@{distribution(name).version}" for name in packages}
    own = f"pkg:pypi/{PROJECT['name']}@{PROJECT['version']}"
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, " ".join([own, *reference.values()])).urn,
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": PROJECT["name"],
                "version": PROJECT["version"],
                "purl": own,
                "licenses": [{"license": {"id": PROJECT["license"]}}],
            },
        },
        "components": [
            {
                "type": "library",
                "bom-ref": reference[name],
                "name": name,
                "version": distribution(name).version,
                "purl": reference[name],
                "licenses": [{"license": {"name": licence(name)}}],
            }
            for name in packages
        ],
        "dependencies": [
            {"ref": own, "dependsOn": [reference[canonicalize_name(one.name)] for one in direct()]},
            *({"ref": reference[name], "dependsOn": [reference[one] for one in sorted(packages[name])]} for name in packages),
        ],
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["page"]:
            PAGE.write_text(page(), encoding="utf-8")
        case ["bill", file]:
            Path(file).write_text(json.dumps(bill(), indent=2) + "\n", encoding="utf-8")
        case _:
            sys.exit(__doc__)
