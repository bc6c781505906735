"""One file an experiment of the published evidence suite, by its published name: `pnn evidence --experiment NAME`.

Every experiment returns what the published script reports (`published`, on real tokens and fixed masks), our measurements
beside it, and a hypothesis with its effect, interval, control and verdict (see `analysis.totals`).
"""
