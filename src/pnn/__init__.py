"""Plastic Neural Networks: transformers that rewrite instead of only adding."""

import os

# A thread of torch that waits for another keeps its core busy. Where other programs want that core too, the default of 300,000
# rounds makes small models ten times slower. Read when torch is loaded, so it stands before all imports; your own value stays.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

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
