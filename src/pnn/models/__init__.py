"""Hugging Face models, one file an architecture, registered with the Auto classes on import."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
)

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

for _config, _base, _mlm, _classifier, _choice in (
    (PNNConfig, PNNModel, PNNForMaskedLM, PNNForSequenceClassification, PNNForMultipleChoice),
    (
        BertBaselineConfig,
        BertBaselineModel,
        BertBaselineForMaskedLM,
        BertBaselineForSequenceClassification,
        BertBaselineForMultipleChoice,
    ),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForMaskedLM.register(_config, _mlm, exist_ok=True)
    AutoModelForSequenceClassification.register(_config, _classifier, exist_ok=True)
    AutoModelForMultipleChoice.register(_config, _choice, exist_ok=True)
AutoConfig.register(DDLConfig.model_type, DDLConfig, exist_ok=True)
AutoModel.register(DDLConfig, DDLModel, exist_ok=True)
AutoModelForCausalLM.register(DDLConfig, DDLForCausalLM, exist_ok=True)

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
