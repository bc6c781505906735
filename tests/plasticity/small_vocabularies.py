"""Small tokenizers of each kind that can lose tokens, and models that read by them."""

from __future__ import annotations

import torch
import transformers as hf
from small_cycles import LENGTH, language
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

OTHER = "Zebras quickly jump over 17 lazy foxes; naïve café, 你好!"  # no language of ours
SPECIAL = ["<unk>", "<s>"]
STRANGE = [f"{first}{second}" for first in ("quix", "vorp", "zulm") for second in ("otle", "ander", "ish", "ola", "unty")]
FORMS = ("bytes", "pieces", "unigram")  # GPT-2's, Llama's, T5's kind of vocabulary


def tokenizer_of(form: str) -> hf.PreTrainedTokenizerFast:
    """Trained on the language and on words that it never has."""
    text = [*language().split("\n"), *(" ".join(STRANGE) for _ in range(60)), OTHER]
    if form == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet))
    elif form == "pieces":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIAL, *bytes_]))
    else:
        known = sorted(tokenizer_of("pieces").get_vocab().items(), key=lambda one: one[1])
        scored = [(said, -float(place)) for place, (said, _) in enumerate(known) if said != "<added>" and "<0x" not in said]
        made = Tokenizer(models.Unigram(scored, 0))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(["</s>"])  # behind the others: its number changes when they go
    start, end = (made.token_to_id(name) for name in ("<s>", "</s>"))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start), ("</s>", end)])
    made.add_tokens(["<added>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def model_for(tokenizer, tied: bool = True) -> hf.PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        **sizes,
    )
    return hf.LlamaForCausalLM(config).eval()


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def names(tokenizer, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids(tokenizer, text))
