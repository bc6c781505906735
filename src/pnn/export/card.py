"""The model card: what the model is, how it came about and how well it does, from the run's own files.

It says only what these files say. What they leave open (who may use the weights, which languages) is left open, or said to be
unknown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import pnn
from pnn.config import DataConfig, RunConfig
from pnn.data import run_tokens
from pnn.export.changes import Changes
from pnn.export.cycles import Cycle, public
from pnn.export.loading import Exported
from pnn.models.plastic import PlasticConfig
from pnn.models.registry import AUTO_CLASSES, kind_of, sentence, steps_read
from pnn.numbers import bare_per_cent, halting, interval, per_cent, points, unknown_tokens
from pnn.plasticity.architectures import LAYER, NEURON
from pnn.plasticity.heads import heads, original_counts
from pnn.plasticity.models import HISTORY, Plastic
from pnn.plasticity.units import unit_map
from pnn.results import Evaluation, TunedTask, texts_of
from pnn.runs import AVERAGE, is_cycle, read_config, read_environment, read_json

CARRIED = ("Intended use", "Data", "Training", "Results", "Limits", "Licence")  # from the card of weights without their run
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon (AdamW for all weights that are no matrix of a block)"}


def model_card(
    exported: Exported, *, bf16: bool, remote_code: bool, onnx_steps: int | None, licence: str | None, int8: bool = False
) -> str:
    head: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["plastic-neural-networks", exported.model.config.model_type],
    }
    pipeline = AUTO_CLASSES[exported.auto].pipeline
    if pipeline is not None:
        head["pipeline_tag"] = pipeline
    if licence is not None:
        head["license"] = licence
    known = Known(exported)
    sections = {
        "Use": known.use(remote_code, onnx_steps, int8),
        "Model": known.table(),
        "Data": known.data(),
        "Training": known.training(),
        "Results": known.results(bf16),
        "Limits": "\n".join(f"- {limit}" for limit in known.limits()),
        "Licence": known.licence(licence, remote_code),
    }
    before, told = earlier_card(exported)
    sections |= {title: text for title, text in told.items() if title in CARRIED and (title != "Licence" or licence is None)}
    head = {key: before[key] for key in ("language", "license") if key in before} | head
    parts = [f"# {exported.name}\n\n{known.what()}", *(f"## {title}\n\n{text}" for title, text in sections.items())]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"


def earlier_card(exported: Exported) -> tuple[dict[str, Any], dict[str, str]]:
    """Header and sections of the card beside weights whose run is not there: it says where they come from. Its links to files
    of its own repository lead nowhere from another folder, so their words stay alone."""
    card = Path(exported.checkpoint) / "README.md"
    if exported.run is not None or isinstance(exported.model, Plastic) or not card.is_file():
        return {}, {}
    text = re.sub(r"\[([^\]]+)\]\(\.[^)]*\)", r"\1", card.read_text(encoding="utf-8"))
    header = re.match(r"---\n(.*?)\n---\n", text, flags=re.DOTALL)
    try:
        found = yaml.safe_load(header[1]) if header else {}
    except yaml.YAMLError:
        found = {}
    return found if isinstance(found, dict) else {}, sections_of(text)


def sections_of(card: str) -> dict[str, str]:
    """By title; what stands before the first one by none."""
    parts = re.split(r"^## (.+)\n", card, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], map(str.strip, parts[::2]), strict=True))


class Known:
    """What the run's files say."""

    def __init__(self, exported: Exported):
        self.exported, self.config, self.kind = exported, exported.model.config, kind_of(exported.model)
        run = exported.run
        self.is_reorganised = isinstance(exported.model, Plastic)
        self.halt: dict[str, Any] | None = getattr(self.config, "halt", None)
        self.run: RunConfig | None = read_config(run) if run is not None and (run / "config.yaml").exists() else None
        self.evaluation = self._evaluation()
        self.tuned: TunedTask | None = (
            self._read("result.json") if (run is not None and (run / "finetune.json").exists()) else None
        )
        self.environment = read_environment(run) if run is not None and (run / "environment.json").exists() else None
        self.plasticity: Cycle | Changes | None = None
        if run is not None and is_cycle(run):
            self.plasticity = Cycle(run, Path(exported.checkpoint))
        elif (Path(exported.checkpoint) / HISTORY).exists():
            self.plasticity = Changes(Path(exported.checkpoint))

    def _read(self, name: str) -> Any:
        run = self.exported.run
        return read_json(run / name) if run is not None and (run / name).exists() else None

    def _evaluation(self) -> Evaluation | None:
        """Of these very weights: a run's evaluation is of its best checkpoint, and of its averaged weights."""
        measured: Any = self._read("evaluation.json") or {}
        name = Path(self.exported.checkpoint).resolve().name
        return next((one for one in (measured, measured.get("average")) if one and one["checkpoint"] == name), None)

    def what(self) -> str:
        text = sentence(self.exported.model)
        if self.tuned is not None:
            text += f" Fine-tuned on {self.tuned['task']} ({self.tuned['benchmark']})."
        return text if self.plasticity is None else f"{text} {self.plasticity.what()}"

    def use(self, remote_code: bool, onnx_steps: int | None, int8: bool) -> str:
        auto = self.exported.auto.__name__
        lines = ["```python", f"from transformers import {auto}, AutoTokenizer", ""]
        needs_package = not remote_code and (self.kind.ours or self.is_reorganised)
        if needs_package:
            lines.insert(1, "import pnn  # of the project plastic-neural-networks")
        arguments = '"FOLDER", trust_remote_code=True' if remote_code else '"FOLDER"'  # the tokenizer asks for it too
        lines += [f"model = {auto}.from_pretrained({arguments})", f"tokenizer = AutoTokenizer.from_pretrained({arguments})"]
        lines.append("```")
        if needs_package:
            kind = PlasticConfig.model_type if self.is_reorganised else self.config.model_type
            lines += [
                "",
                "A checkout of plastic-neural-networks has `pnn` (`pip install -e .`); `pip install pnn` is another project. "
                f"Without `import pnn`, transformers says that it does not recognize the model type `{kind}`.",
            ]
        elif remote_code:
            lines += ["", "With `trust_remote_code=True` the folder's own code runs. Where `pnn` is imported, leave it out."]
        if onnx_steps is not None:
            steps = f"with {onnx_steps} refinement steps" if self.kind.has_steps else "of the whole model"
            lines += ["", f"`model.onnx` is the graph {steps}: inputs `input_ids` and `attention_mask`, output `logits`."]
            if self.halt is not None:
                lines[-1] += " No token halts there, unlike in the model itself: each takes all steps."
        if int8:
            lines += ["`model_int8.onnx` computes the same with its products in int8: faster on a CPU, not as exact."]
        return "\n".join(lines)

    def table(self) -> str:
        config = self.config
        rows = {"parameters": f"{sum(p.numel() for p in self.exported.model.parameters()):,}"}
        names = {
            "hidden_size": "width",
            "num_attention_heads": "heads",
            "intermediate_size": "width of the feed-forward part",
            "num_steps": "refinement steps",
            "num_hidden_layers": "layers",
            "vocab_size": "vocabulary",
            "max_position_embeddings": "longest input, tokens",
        }
        rows |= {label: f"{getattr(config, key):,}" for key, label in names.items() if getattr(config, key, None) is not None}
        if recall := getattr(config, "recall", False):
            where = "learned" if recall == "learned" else "halfway"
            rows["every step begins"] = f"between the state and the embeddings ({where})"
        if guess_after := getattr(config, "guess_after", None):
            steps = "step" if len(guess_after) == 1 else "steps"
            rows["masked tokens read their guess"] = f"after {steps} {', '.join(map(str, guess_after))}"
        if self.halt is not None:
            rows["tokens halt"] = halting(self.halt)
        if self.is_reorganised:  # the config's number is the original's
            model = self.exported.model
            rows["heads"] = f"{len(heads(model))} of {sum(original_counts(model))} (pruned or grown, layer by layer)"
            if getattr(config, "neuron_map", None) is not None:
                neurons = f"{sum(map(len, unit_map(model, NEURON))):,} neurons in all"
                rows["width of the feed-forward part"] = f"{neurons} (pruned, layer by layer)"
            if getattr(config, "width_map", None) is not None:
                rows["width"] = f"{len(config.width_map):,} of {config.hidden_size:,}"
            if getattr(config, "gone_layers", None):
                there = unit_map(model, LAYER)
                rows["layers"] = f"{sum(map(len, there))} of {len(there)}"
        if self.exported.auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            rows["labels"] = ", ".join(str(label) for label in config.id2label.values())
        return "| | |\n|---|---|\n" + "\n".join(f"| {label} | {value} |" for label, value in rows.items())

    def data(self) -> str:
        if self.tuned is not None:
            data = self.tuned["data"]
            counts = ", ".join(f"{count:,} {name}" for name, count in data["examples"].items())
            cut = sum(data["truncated"].values())
            return (
                f"{self.tuned['task']} of {self.tuned['benchmark']}, {data['source']}: {counts}. {cut:,} texts were longer "
                f"than {self.tuned['settings']['max_length']} tokens and cut. "
                "On what the encoder was pretrained, this run does not say."
            )
        if self.run is not None:
            data_config = self.run.data
            text = f"Trained on {self._source(data_config)}, at most "
            text += f"{data_config.max_length:,} tokens per sequence, layout {data_config.layout}, filter {data_config.filter}."
            if self.evaluation is not None and "source" in self.evaluation:
                text += f" Measured on held-out text of `{public(self.evaluation['source'])}`."
            return text
        if self.plasticity is not None:
            return self.plasticity.data()
        return "Not known: this checkpoint came without the folder of its run."

    def _source(self, data: DataConfig) -> str:
        """Text and tokenizer. Where a folder of token shards stood for the text, the files that the shards were made of."""
        read = {} if self.exported.run is None else run_tokens.recorded(self.exported.run).get("train", {})
        if read and Path(read["folder"]).name == Path(data.train).name:
            files = read["recipe"]["source"].get("files", [])
            names = ", ".join(f"`{name}`" for name, _ in files) or f"`{public(data.train)}`"
            return f"{names}, tokenised in advance with the tokenizer beside the weights"
        return f"`{public(data.train)}`, tokenizer `{public(data.tokenizer)}`"

    def training(self) -> str:
        parts = []
        if self.tuned is not None:
            settings = self.tuned["settings"]
            parts.append(
                f"AdamW at a learning rate of {self.tuned['learning_rate']:g} (chosen on dev among "
                f"{len(self.tuned['learning_rates_tried'])}), batches of {settings['batch_size']}, {settings['epochs']} epochs "
                f"of which the best on dev is kept, {len(self.tuned['seeds'])} seed(s); these are the weights of seed "
                f"{self.tuned['checkpoint']['seed']}, epoch {self.tuned['checkpoint']['epoch']}."
            )
        elif self.run is not None:
            training = self.run.training
            length = f"{training.max_steps:,} updates" if training.max_steps else f"{training.epochs:g} epochs in updates"
            parts.append(
                f"{length} of {training.effective_batch_size:,} sequences, {OPTIMIZERS[training.optimizer]} at a learning "
                f"rate of {training.learning_rate:g} after {training.warmup_steps:,} updates of warm-up ({training.schedule} "
                f"schedule), weight decay {training.weight_decay:g}, seed {training.seed}."
            )
            if self.kind.masked:
                parts.append(f"{per_cent(self.run.data.masked_in_training)} of the tokens were masked.")
            if Path(self.exported.checkpoint).name == Path(AVERAGE).name:
                parts.append(f"The weights are a running average (decay {training.average_decay}).")
        elif self.plasticity is not None:
            parts.append(self.plasticity.training())
        else:
            return "Not known."
        if self.environment is not None:
            hardware, versions = self.environment["hardware"], self.environment["versions"]
            device = ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['threads']} thread(s)"
            parts.append(f"Hardware: {device}. torch {versions['torch']}, transformers {versions['transformers']}.")
            if git := self.environment.get("git"):
                parts.append(f"Code: commit `{git['commit'][:12]}`.")
            elif "source_sha256" in self.environment:
                parts.append(f"Code: source files with the digest `{self.environment['source_sha256'][:12]}`.")
        return " ".join(parts)

    def results(self, bf16: bool) -> str:
        if self.tuned is not None:
            return self._tuned_results()
        if self.plasticity is not None:
            return self.plasticity.results(causal=self.kind.causal)
        if self.evaluation is None:
            return "Not measured by this run."
        sets = texts_of(self.evaluation)
        lines = []
        if self.kind.causal:
            lines += ["| text | loss | 95 % interval | perplexity by token | bits per byte |", "|---|---|---|---|---|"]
            for name, one in sets.items():
                between = interval(one["loss_interval"], 4, scale=1)
                cells = (public(name), f"{one['loss']:.4f}", between, f"{one['perplexity']:.2f}")
                lines.append(f"| {' | '.join(cells)} | {'' if (bits := one.get('bits_per_byte')) is None else f'{bits:.3f}'} |")
            if "loss_by_step" in sets.get("validation", {}):
                lines += ["", f"Loss {self._along_steps([f'{loss:.3f}' for loss in sets['validation']['loss_by_step']])}"]
        else:
            lines += ["Masked tokens that are predicted right:", "", "| text | accuracy | 95 % interval |", "|---|---|---|"]
            for name, one in sets.items():
                lines.append(f"| {public(name)} | {per_cent(one['accuracy'])} | {interval(one['accuracy_interval'])} |")
            if self.kind.has_steps and "validation" in sets:
                steps = self._along_steps([*map(bare_per_cent, sets["validation"]["accuracy_by_step"])])
                lines += ["", f"Accuracy {steps}"]
            if halted := [one["halt"] for one in sets.values() if "halt" in one]:
                lines += ["", f"Tokens halted {halting(halted[0])}."]
            elif self.halt is not None:
                lines += ["", "When this was measured no token halted, as they do in the model now."]
        for name, one in sets.items():
            if told := unknown_tokens(one.get("unknown_tokens", 0.0), public(name)):
                lines += ["", f"{told}."]
        if bf16:
            lines += ["", "Measured before the weights were rounded to bf16."]
        return "\n".join(lines)

    def _along_steps(self, values: list[str]) -> str:
        """A step without a loss has not learned to be read: what the head makes of it says nothing."""
        read = [step for step in steps_read(self.config) if step < len(values)]
        if len(read) == len(values) - 1:
            return f"after each refinement step, from 0: {' → '.join(values)}."
        named = ", ".join(f"{values[step]} after {step}" for step in read)
        return f"after the steps that have learned to be read: {named}."

    def _tuned_results(self) -> str:
        assert self.tuned is not None
        baselines = self.tuned["baselines"]
        lines = ["| on the dev set | value | majority class | bag of words |", "|---|---|---|---|"]
        for name, value in self.tuned["metrics"].items():
            others = (baselines[which][name] for which in ("majority", "bag_of_words"))
            lines.append(f"| {name} | {per_cent(value)} | {' | '.join(map(per_cent, others))} |")
        text = f"Mean of {len(self.tuned['seeds'])} seed(s). {self.tuned['score_is'].removeprefix('dev ')}: "
        text += f"{per_cent(self.tuned['score'])}, 95 % interval over dev examples {interval(self.tuned['score_interval'])}"
        if self.tuned["score_std"] is not None:
            text += f", standard deviation between seeds {points(self.tuned['score_std'])}"
        lines += ["", text + "."]
        if "score_by_step" in self.tuned:
            steps = " → ".join(map(bare_per_cent, self.tuned["score_by_step"]))
            trained = "" if self.tuned["settings"].get("every_step") else ", of which the last alone was trained"
            lines += ["", f"Read after each refinement step{trained}, from 0: {steps}."]
        return "\n".join(lines)

    def limits(self) -> list[str]:
        found = []
        longest = getattr(self.config, "max_position_embeddings", None)
        if longest is not None:
            found.append(f"Texts of more than {longest:,} tokens have to be cut.")
        if self.tuned is not None:
            found.append("Dev chose the epoch and the learning rate: on other examples expect a little less.")
            if len(self.tuned["seeds"]) < 3:
                known = "not known" if self.tuned["score_std"] is None else "hardly known"
                found.append(f"{len(self.tuned['seeds'])} seed(s): the spread between seeds is {known}.")
            low, high = self.tuned["score_interval"]
            for which in ("majority", "bag_of_words"):
                baseline = self.tuned["baselines"][which]["score"]
                if low <= baseline:
                    what = "not better than" if high < baseline else "not shown to be better than"
                    found.append(f"It is {what} the baseline {which.replace('_', ' ')} ({per_cent(baseline)}).")
            unknown = self.tuned["data"]["unknown_tokens"]
            if unknown > 0:
                found.append(f"{per_cent(unknown)} of the training set's tokens are not in its vocabulary.")
        elif self.plasticity is not None:
            found += self.plasticity.limits()
        elif self.evaluation is not None:
            found.append("One seed: intervals speak of the text that was measured, not of the spread between seeds.")
        else:
            found.append("How well it does is not known.")
        found.append("Bias, toxicity and factual truth of its predictions were not studied.")
        return found

    def licence(self, licence: str | None, remote_code: bool) -> str:
        weights = (
            f"The weights are published under `{licence}`."
            if licence is not None
            else "The run does not say under which licence its weights are published; the training text has terms of its own."
        )
        code = f" The code beside them is of plastic-neural-networks {pnn.__version__}, MIT." if remote_code else ""
        return weights + code
