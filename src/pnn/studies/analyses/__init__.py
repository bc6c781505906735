"""One file an analysis: `pnn analyze NAME`, kept as analysis/NAME.json. How to add one: docs/howto/analysis.md."""
