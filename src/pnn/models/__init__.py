"""Hugging Face models, one file an architecture, registered with the Auto classes on import."""

import pnn.models.registry  # noqa: F401  (registers them)
from pnn.models.bert import (
    BertBaselineConfig,
    BertBaselineForMaskedLM,
    BertBaselineForMultipleChoice,
    BertBaselineForSequenceClassification,
    BertBaselineModel,
)
from pnn.models.ddl import DDLConfig, DDLForCausalLM, DDLModel
from pnn.models.pnn import (
    PNNConfig,
    PNNForMaskedLM,
    PNNForMultipleChoice,
    PNNForSequenceClassification,
    PNNModel,
)

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
]
