"""The naive and the transformers baselines, readable, and what times them beside ours."""
