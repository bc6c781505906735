"""Plastic Neural Networks: transformers that rewrite instead of only adding."""

from pnn import plasticity
from pnn.models import (
    BertBaselineConfig,
    BertBaselineForMaskedLM,
    BertBaselineForMultipleChoice,
    BertBaselineForSequenceClassification,
    BertBaselineModel,
    DDLConfig,
    DDLForCausalLM,
    DDLModel,
    PNNConfig,
    PNNForMaskedLM,
    PNNForMultipleChoice,
    PNNForSequenceClassification,
    PNNModel,
)

__version__ = "0.1.0"

__all__ = [
    "BertBaselineConfig",
    "BertBaselineForMaskedLM",
    "BertBaselineForMultipleChoice",
    "BertBaselineForSequenceClassification",
    "BertBaselineModel",
    "DDLConfig",
    "DDLForCausalLM",
    "DDLModel",
    "PNNConfig",
    "PNNForMaskedLM",
    "PNNForMultipleChoice",
    "PNNForSequenceClassification",
    "PNNModel",
    "plasticity",
]
