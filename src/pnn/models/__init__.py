"""Hugging Face models, one file an architecture, registered with the Auto classes on import."""

import pnn.models.registry  # noqa: F401  (registers them)
from pnn.models.bert import (
    BertBaselineConfig,
    BertBaselineForMaskedLM,
    BertBaselineForMultipleChoice,
    BertBaselineForQuestionAnswering,
    BertBaselineForSequenceClassification,
    BertBaselineForTokenClassification,
    BertBaselineModel,
)
from pnn.models.ddl import DDLConfig, DDLForCausalLM, DDLForSequenceClassification, DDLModel
from pnn.models.image_processor import PNNImageProcessor
from pnn.models.last_loss import LastLoss
from pnn.models.pnn import (
    PNNConfig,
    PNNForMaskedLM,
    PNNForMultipleChoice,
    PNNForQuestionAnswering,
    PNNForSequenceClassification,
    PNNForTokenClassification,
    PNNModel,
)
from pnn.models.pnn_causal import PNNCausalConfig, PNNCausalForSequenceClassification, PNNCausalModel, PNNForCausalLM
from pnn.models.pnn_image import PNNForImageClassification, PNNImageConfig, PNNImageModel

__all__ = [
    "BertBaselineConfig",
    "BertBaselineForMaskedLM",
    "BertBaselineForMultipleChoice",
    "BertBaselineForQuestionAnswering",
    "BertBaselineForSequenceClassification",
    "BertBaselineForTokenClassification",
    "BertBaselineModel",
    "DDLConfig",
    "DDLForCausalLM",
    "DDLForSequenceClassification",
    "DDLModel",
    "LastLoss",
    "PNNCausalConfig",
    "PNNCausalForSequenceClassification",
    "PNNCausalModel",
    "PNNConfig",
    "PNNForCausalLM",
    "PNNForImageClassification",
    "PNNForMaskedLM",
    "PNNForMultipleChoice",
    "PNNForQuestionAnswering",
    "PNNForSequenceClassification",
    "PNNForTokenClassification",
    "PNNImageConfig",
    "PNNImageModel",
    "PNNImageProcessor",
    "PNNModel",
]
