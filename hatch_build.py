"""Puts the commit into wheels and source packages, so that a run of an installed package knows its code."""

import runpy

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Stamp(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version != "editable":  # that is the repository itself, where git knows
            runpy.run_path("src/pnn/code_version.py")["write_stamp"]()
            build_data["artifacts"].append("src/pnn/_commit.json")
