"""What sentence-transformers reads beside an encoder: how the states of its tokens become one vector for a text.

The mean over the last state of all tokens. No head was trained to make sentence vectors, and the mean needs none.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModel, AutoModelForMaskedLM

from pnn.export.loading import Exported
from pnn.files import write_json
from pnn.models.loading import longest_input
from pnn.models.registry import kind_of


def write_pooling(folder: Path, exported: Exported) -> None:
    """In the form that all versions of sentence-transformers read. Nothing for decoders and classifiers."""
    if exported.auto not in (AutoModel, AutoModelForMaskedLM) or kind_of(exported.model).causal:
        return
    modules = (("Transformer", ""), ("Pooling", "1_Pooling"))
    named = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    write_json(folder / "modules.json", named)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest_input(exported.model), "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": exported.model.config.hidden_size, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
