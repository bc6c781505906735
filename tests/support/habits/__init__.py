"""What people do with models of Hugging Face. The order of the imports is that of the page's table."""

# ruff: noqa: I001
from habits import subjects
from habits import outputs_and_training, heads_and_adapters, text_and_weights

__all__ = ["heads_and_adapters", "outputs_and_training", "subjects", "text_and_weights"]
