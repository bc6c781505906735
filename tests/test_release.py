"""What the package needs is bounded, tested and listed with its licence; a release can be built again to the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import dependencies
import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
DIRECT = {canonicalize_name(one.name): one for one in dependencies.direct()}


def test_the_oldest_that_are_tested_are_the_lower_bounds():
    oldest = dependencies.pins("constraints-oldest.txt")
    assert oldest.keys() == DIRECT.keys()
    for name, one in DIRECT.items():
        bounds = {part.operator: Version(part.version) for part in one.specifier}
        assert bounds.keys() == {">=", "<"}, one
        assert bounds[">="] == Version(oldest[name]), one


def test_what_is_tested_lies_within_the_bounds():
    tested = dependencies.pins("constraints.txt")
    assert [str(one) for name, one in DIRECT.items() if tested[name] not in one.specifier] == []


def test_every_direct_dependency_is_listed_with_its_licence():
    rows = dependencies.PAGE.read_text(encoding="utf-8").splitlines()
    oldest, tested = dependencies.pins("constraints-oldest.txt"), dependencies.pins("constraints.txt")
    for name in DIRECT:
        said = dependencies.licence(name)
        assert said not in (dependencies.NOT_INSTALLED, "see its files")
        same = Version(version(name)).public == tested[name]  # another version may have another licence
        row = f"| {name} | {oldest[name]} | {tested[name]} | {said if same else ''}"
        assert any(line.startswith(row) for line in rows), row  # else: make dependencies


def test_the_bill_of_materials_names_everything_that_is_installed():
    found = dependencies.bill()
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    known = {one["bom-ref"]: one for one in found["components"]}
    assert {one["name"] for one in known.values()} >= {*DIRECT, "huggingface-hub"}
    own, *others = found["dependencies"]
    assert len(own["dependsOn"]) == len(DIRECT)
    assert [other["ref"] for other in others] == list(known)
    assert {ref for one in found["dependencies"] for ref in one["dependsOn"]} == known.keys()  # nothing hangs in the air
    assert all(one["licenses"][0]["license"]["name"] for one in known.values())


@pytest.mark.slow
def test_a_release_is_built_twice_to_the_same_bytes(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, ROOT / "release" / "build.py", tmp_path / "dist"], check=True)  # it compares
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    stamp = json.loads(zipfile.ZipFile(wheel).read("pnn/_commit.json"))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert (stamp["commit"], stamp["changed"]) == (head, False)
    listed = dict(reversed(line.split("  ")) for line in (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines())
    assert {path.name for path in (tmp_path / "dist").iterdir()} == {*listed, "SHA256SUMS"}
    assert {Path(name).suffix for name in listed} == {".whl", ".gz", ".json"}
