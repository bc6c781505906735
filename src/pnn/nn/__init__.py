"""Readable parts, each the equation of its paper. The plain version here is the oracle of any fast one."""
