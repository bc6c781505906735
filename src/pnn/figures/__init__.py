"""One function per figure. They read results (evaluation.json, metrics.jsonl, config.json as dictionaries), never a model."""
