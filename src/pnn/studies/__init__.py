"""What is asked of models: analyses and experiments, one file each, found by name (`registry`); and the study of the cycle."""
