"""The study of the plasticity cycle: its arms, the folder that processes share, and the verdicts on the source's findings."""
