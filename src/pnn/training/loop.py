"""The training loop, on accelerate: one process, many processes, many nodes by `accelerate launch`.

What an update is stands in `training/updates`; what is trained, masked tokens or next tokens, is the objective's business
(`training/objective`).

An exact resume needs no saved random state: masks follow from (seed, place in the stream), dropout from (seed, step), as does
the number of refinement steps where every update draws it (`model.random_steps`).
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import PreTrainedModel

from pnn import runs
from pnn.config import RunConfig
from pnn.data import run_tokens
from pnn.data.batches import TrainingStream
from pnn.data.shards import left_out, prepare, quietly
from pnn.data.synthetic import RULES
from pnn.data.tokenizers import end_of_text
from pnn.errors import Stopped, UserError
from pnn.files import point, write_json
from pnn.memory import out_of_memory_says
from pnn.models.lean import leave_out_logits
from pnn.models.precision import width_of
from pnn.models.sections import build_model, compile_blocks, model_config, with_room_for
from pnn.nn.fast import kernels_compute
from pnn.progress import Bars, say, track
from pnn.training import checkpoint
from pnn.training.device import compiles, precision_of, trained_in
from pnn.training.fitting import check_update_fits
from pnn.training.objective import objective_of
from pnn.training.optim import average_weights, learning_rate, make_optimizer, set_learning_rate
from pnn.training.recording import Recorder, can_record
from pnn.training.threads import choose_threads
from pnn.training.tracking import Metrics, check_trackers, environment, start_trackers
from pnn.training.updates import Plan, Update, fitting_batch_size, updates_ahead

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Trainer:
    def __init__(self, config: RunConfig, run: Path, resume: bool = False, quiet: bool = False):
        self.config, self.run, self.quiet = config, run, quiet
        mixed_precision, on_gpu = precision_of(config, trained_in(run) if resume else None)
        self.precision = "fp32" if mixed_precision == "no" else mixed_precision
        self.compiled = compiles(config.training, on_gpu) and config.plasticity is None  # what changes shape stays as it is
        # several runs in one process may differ in precision and device; processes that are connected stay so
        AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=not on_gpu,
            log_with="tensorboard" if config.training.tensorboard else None,
            project_dir=str(run),
        )
        self.is_main = self.accelerator.is_main_process
        if self.accelerator.gradient_accumulation_steps != 1:
            raise UserError(
                "leave out the launcher's gradient_accumulation_steps: it follows from training.effective_batch_size"
            )
        if config.plasticity is not None and self.accelerator.num_processes > 1:
            raise UserError(
                f"plasticity: a model that changes its shape trains in one process, not in {self.accelerator.num_processes}"
            )
        # What can be wrong is found before anything is written: the config's model, the folder, the text, the tokenizer.
        check_trackers(config)
        width = width_of(model_config(config.model)) or 256
        runs.check_free(run, config, resume)
        with self.accelerator.main_process_first():
            self.prepared = prepare(config.data, track if self.is_main and not quiet else quietly)
        self.plan = Plan.of(config, self.prepared, self.accelerator.num_processes)
        self.where = str(self.accelerator.device)
        if not on_gpu and self.accelerator.num_processes == 1:  # launchers share out the cores of several processes
            self.where += " " + choose_threads(run, resume, width)
        self.model = self._build()
        self.plasticity = self._plasticity()
        self.flops = 0.0  # of all updates so far, counted only where they differ
        self.optimizer = make_optimizer(self.model, config.training)
        if self.is_main:
            runs.claim(run, config, resume)
        self.step = 0
        self.best_loss, self.best_step = math.inf, -1
        self.seconds = 0.0
        start = self._restore() if resume else 0
        if self.is_main:
            run_tokens.record(run, self.prepared)
        self.stream = TrainingStream(
            self.prepared.train,
            self.prepared.train_sequences,
            self.plan.batch_tokens,
            config.training.seed,
            filler=self.prepared.tokenizer.pad_token_id or 0,
            start=start,
        )
        self.position = start
        self.wrapped, stepper = self.accelerator.prepare(self.model, self.optimizer)
        # accelerate's own knows of fp16 scaling, and looks for a package on disk at every step
        self.stepper = self.optimizer if self.accelerator.scaler is None else stepper
        dtype, device = DTYPES[mixed_precision], self.accelerator.device
        if self.compiled:
            compile_blocks(self.model, with_kernels=kernels_compute(device, dtype))
        self.unread = {"output_logits": False} if config.kind.ours else {"use_cache": False}
        self.objective = objective_of(config, self.prepared, self.plan.batch_tokens, device.type == "cuda")
        recordable = self.compiled and self.accelerator.num_processes == 1  # several talk to each other during a pass
        recordable = recordable and config.kind.ours and can_record(self.model, dtype, device)
        recordable = recordable and self._drawn_steps() is None  # a recording has one number of steps
        parameters = self.model.parameters()
        self.recorder = Recorder(self._forward_backward, parameters, self.plan.accumulation) if recordable else None
        self.unchecked: list[tuple[int, torch.Tensor]] = []  # (step, [loss, gradient norm]) not yet looked at
        self.signal: int | None = None
        self.signal_time = 0.0

    # Setting up ---------------------------------------------------------------------------------------------------

    def _build(self) -> PreTrainedModel:
        data = self.config.data
        tokenizer = self.prepared.tokenizer
        tokens = {"pad_token_id": tokenizer.pad_token_id}
        if self.config.model.get("guess_after"):
            tokens |= {"mask_token_id": tokenizer.mask_token_id}
        if self.config.kind.causal:
            tokens |= {"bos_token_id": end_of_text(tokenizer), "eos_token_id": end_of_text(tokenizer)}
        asked, made_from_text = self.config.model, data.tokenizer == "corpus" and data.train not in RULES
        sized = with_room_for(asked, len(tokenizer)) if made_from_text else asked
        if sized != asked and self.is_main and not self.quiet:
            said = f"model.vocab_size is {asked['vocab_size']:,}, but the text's vocabulary has {len(tokenizer):,} entries"
            say(f"note: {said}: the model takes them all (fewer: --set data.vocab_size={asked['vocab_size']})")
        section = model_config(sized, len(tokenizer), max_position_embeddings=data.max_length, **tokens)
        if section.max_position_embeddings < data.max_length:
            raise UserError(
                f"model.max_position_embeddings: {section.max_position_embeddings}, but data.max_length is {data.max_length}"
            )
        check_update_fits(self.config, section, self.plan.batch_tokens, str(self.accelerator.device))
        torch.manual_seed(self.config.training.seed)
        model = build_model(section)
        if not self.config.kind.ours:
            leave_out_logits(model)
        return model

    def _plasticity(self) -> Any:
        """What changes the model's shape between updates, if anything does. Makes the model as small as it begins."""
        if self.config.plasticity is None:
            return None
        in_training = import_module("pnn.plasticity.in_training")  # stands above this file
        lengths = self.prepared.train.lengths[self.prepared.train_sequences]
        return in_training.InTraining(self.config, self.model, lengths, self.plan.updates)

    def _restore(self) -> int:
        """Continue from the last checkpoint; returns its place in the stream."""
        folder = self.run / "checkpoints" / "last"
        if not folder.exists():
            if self.is_main and not self.quiet:
                say(f"nothing to resume in {self.run}: starting from the beginning")
            return 0
        state = checkpoint.read_state(folder)
        text = state["text"][:3] + state["text"][-1:]  # older checkpoints also name a micro-batch's tokens, which may change
        if text != self._text():
            raise UserError(
                f"cannot resume {self.run}: its text or tokenizer is no longer what it was trained on "
                f"({', '.join(map(str, text))} then, {', '.join(map(str, self._text()))} now)"
            )
        if self.plasticity is not None:
            self.plasticity.resume(self.optimizer, folder)
            self.flops = state["training_flops"]
        checkpoint.load_weights(self.model, folder)
        self.model.to(self.accelerator.device)
        checkpoint.load_optimizer(self.model, self.optimizer, folder)
        if state.get("scaler") and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.best_loss = math.inf if state["best_loss"] is None else state["best_loss"]
        self.best_step = state["best_step"]
        if self.is_main:  # a kill may have come before older ones were removed
            checkpoint.rotate(self.run / "checkpoints", self.config.training.keep_checkpoints)
        return state["stream_position"]

    def _text(self) -> list[Any]:
        """What the run reads, by the fingerprints in the folders' names, and in how many updates."""
        folders = [self.prepared.train.folder.name, self.prepared.validation.folder.name]
        return [*folders, len(self.prepared.train_sequences), self.plan.updates]

    # The loop -----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train to the end. Raises `Stopped` if asked to stop."""
        config, plan = self.config.training, self.plan
        if self.is_main:
            self._announce()
        metrics = Metrics(self.run / "metrics.jsonl", self.step) if self.is_main else None
        start_trackers(self.accelerator, self.config, self.step)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        remaining = plan.updates - self.step
        started, tokens_since = time.perf_counter(), 0
        self.wrapped.train()
        try:
            name = self.config.name
            quiet = self.quiet or not self.is_main
            with out_of_memory_says(self._smaller_batch), Bars({name: plan.updates}, quiet=quiet) as bars:
                for update in updates_ahead(self.stream, plan, process, processes, remaining):
                    rate = learning_rate(self.step, plan.updates, config)
                    loss, last_step_loss, norm = self.apply(update, rate)
                    self.step += 1
                    self.position = update.position
                    self.unchecked.append((self.step, torch.stack((loss, norm))))
                    tokens_since += update.tokens
                    if self.plasticity is not None:
                        self.flops += self.plasticity.flops_per_token * update.tokens
                    note = None
                    done = self.step == plan.updates
                    if self.step % config.log_every == 0 or done:
                        self._check_finite()
                        now = time.perf_counter()
                        self.seconds += now - started
                        row = {
                            "step": self.step,
                            "loss": loss.item(),
                            "last_step_loss": last_step_loss.item(),
                            "learning_rate": rate,
                            "gradient_norm": norm.item(),
                            "epoch": self.position / len(self.prepared.train_sequences),
                            "tokens_per_second": tokens_since / (now - started),
                            "seconds": self.seconds,
                        }
                        if self.plasticity is not None:
                            row["training_flops"] = self.flops
                        started, tokens_since = now, 0
                        self._log(metrics, row)
                        note = f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"
                    if self.plasticity is not None and self.plasticity.due(self.step):
                        self._check_finite()
                        self._log(metrics, self.plasticity.change(self.optimizer, self.step))
                    bars.update(name, self.step, note)
                    stop = self._agreed_signal()
                    if self.step % config.evaluate_every == 0 or done:
                        self._check_finite()
                        self.seconds += time.perf_counter() - started
                        self._evaluate(metrics)
                        started, tokens_since = time.perf_counter(), 0
                    if self.step % config.save_every == 0 or done or stop is not None or self.best_step == self.step:
                        self.seconds += time.perf_counter() - started
                        self._save()
                        started, tokens_since = time.perf_counter(), 0
                    if stop is not None and not done:
                        self.accelerator.wait_for_everyone()  # for the one that saves
                        raise Stopped(stop, self.step)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if metrics is not None:
                metrics.close()

    def apply(self, update: Update, rate: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One optimiser step. Returns loss (as trained), loss of the last step alone, and gradient norm, on the device."""
        with self.recorder.on_stream() if self.recorder is not None else nullcontext():
            return self._apply(update, rate)

    def _apply(self, update: Update, rate: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        accelerator = self.accelerator
        device, processes = accelerator.device, accelerator.num_processes
        # (torch.manual_seed would write a stack trace for every kind of device that is not there)
        seed_all = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
        seed_all(_step_seed(self.config.training.seed, self.step, accelerator.process_index))
        batches = [self.objective.inputs(batch, device) for batch in update.batches]
        targets = torch.stack([self.objective.targets(inputs) for inputs in batches]).sum()
        if processes > 1:
            targets = accelerator.reduce(targets, "sum")
        set_learning_rate(self.optimizer, rate)
        losses = []
        steps = self._drawn_steps()
        for index, inputs in enumerate(batches):
            inputs["num_items_in_batch"] = targets
            more = index + 1 < len(batches)
            with accelerator.no_sync(self.wrapped) if more else nullcontext():
                losses.append(torch.stack(self.recorder(inputs) if self.recorder else self._forward_backward(inputs, steps)))
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), self.config.training.gradient_clip)
        self.stepper.step()
        if self.config.training.average_decay is not None:
            average_weights(self.optimizer, self.config.training.average_decay)
        if self.recorder is None:
            self.stepper.zero_grad()
        else:
            self.recorder.end_update()
        totals = torch.stack(losses).sum(0)
        if processes > 1:
            totals = accelerator.reduce(totals, "sum")
        return totals[0], totals[1], norm.detach()

    def _drawn_steps(self) -> int | None:
        """With how many refinement steps this update trains, the same in every process; None where the number is fixed."""
        draw = getattr(self.model.config, "draw_steps", None)
        seed = _step_seed(self.config.training.seed, self.step, 0)
        return None if draw is None else draw(torch.Generator().manual_seed(seed))

    def _forward_backward(self, inputs: dict[str, torch.Tensor], num_steps: int | None = None) -> tuple[torch.Tensor, ...]:
        """One micro-batch: (loss, loss of the last step where there are several)."""
        drawn = {} if num_steps is None else {"num_steps": num_steps}
        out = self.wrapped(**inputs, **drawn, **self.unread)
        # DDP averages gradients over processes; ours are parts of one sum
        self.accelerator.backward(out.loss * self.accelerator.num_processes)
        loss = out.loss.detach()
        return loss, out.step_losses[-1] if "step_losses" in out else loss

    # At intervals -------------------------------------------------------------------------------------------------

    def _check_finite(self) -> None:
        """Look at the losses and gradient norms since the last look (one wait for the device instead of one a step).
        With fp16 an infinite gradient is the scaler's business: it skips that update."""
        seen, self.unchecked = self.unchecked, []
        columns = 1 if self.accelerator.scaler is not None else 2
        for step, values in seen:
            if not bool(torch.isfinite(values[:columns]).all()):
                raise UserError(
                    f"the loss became non-finite at step {step} (loss {values[0].item():.4g}, gradient norm "
                    f"{values[1].item():.4g}); {self._kept()}. A lower training.learning_rate usually helps."
                )

    def _kept(self) -> str:
        good = self.run / "checkpoints" / "last"
        return f"the last good checkpoint is {good.resolve().name}" if good.exists() else "no checkpoint was saved yet"

    def _smaller_batch(self) -> str:
        """What to change when an update does not fit into memory."""
        training = self.config.training
        smaller = fitting_batch_size(
            training.effective_batch_size, self.accelerator.num_processes, max(1, training.batch_size // 2)
        )
        if training.batch_size == 1 or smaller is None:
            advice = "a smaller model or a smaller data.max_length needs less"
        else:
            advice = f"--batch-size {smaller} needs less and leaves the effective batch of {training.effective_batch_size:,}"
        return (
            f"at step {self.step + 1} on {self.accelerator.device} with micro-batches of {training.batch_size:,} sequences "
            f"({self.plan.batch_tokens:,} tokens): {advice}; {self._kept()}, and --resume goes on with the run"
        )

    def _log(self, metrics: Metrics | None, row: dict[str, Any]) -> None:
        if metrics is not None:
            metrics.write(row)
        if self.accelerator.trackers:
            self.accelerator.log({k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}, step=row["step"])

    def _evaluate(self, metrics: Metrics | None) -> None:
        if self.is_main:
            measured = self._evaluation()
            if not math.isfinite(measured["validation_loss"]):  # the last update broke the weights: no loss has shown it yet
                raise UserError(
                    f"the validation loss became non-finite at step {self.step}; {self._kept()}. "
                    "A lower training.learning_rate usually helps."
                )
            if measured["validation_loss"] < self.best_loss:
                self.best_loss, self.best_step = measured["validation_loss"], self.step
            self._log(metrics, {"step": self.step, **measured})
        self.accelerator.wait_for_everyone()

    def _evaluation(self) -> dict[str, Any]:
        # every batch has its own shape: not worth compiling for
        with out_of_memory_says(self._smaller_evaluation), torch.compiler.set_stance("force_eager"):
            return self.objective.evaluate(self.model, DTYPES[self.accelerator.mixed_precision])

    def _smaller_evaluation(self) -> str:
        tokens = self.config.evaluation.batch_tokens
        advice = f"--set evaluation.batch_tokens={max(1, tokens // 2)} needs half"
        return (
            f"at step {self.step}, evaluating batches of {tokens:,} tokens: {advice}; {self._kept()}, "
            "and --resume goes on with the run"
        )

    def _save(self) -> None:
        self._check_finite()
        if self.is_main:
            checkpoints = self.run / "checkpoints"
            folder = checkpoint.step_folder(checkpoints, self.step)
            if not folder.exists():
                scaler = self.accelerator.scaler
                state = {
                    "step": self.step,
                    "stream_position": self.position,
                    "best_loss": None if math.isinf(self.best_loss) else self.best_loss,
                    "best_step": self.best_step,
                    "seconds": self.seconds,
                    "text": self._text(),
                    "scaler": scaler.state_dict() if scaler is not None else None,
                }
                if self.plasticity is not None:
                    state["training_flops"] = self.flops
                checkpoint.save_checkpoint(folder, self.model, self.prepared.tokenizer, self.optimizer, state)
            if self.best_step == self.step:
                point(checkpoints / "best", folder)
            averaged = self.run / runs.AVERAGE
            if self.config.training.average_decay is not None and self.step == self.plan.updates and not averaged.exists():
                checkpoint.save_average(averaged, self.model, self.prepared.tokenizer, self.optimizer)
            point(checkpoints / "last", folder)
            checkpoint.rotate(checkpoints, self.config.training.keep_checkpoints)

    # Around the loop ----------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        made = environment(self.config.training.seed, self.accelerator.num_processes)
        write_json(self.run / "environment.json", made | {"precision": self.precision})
        if not self.quiet:
            parameters = sum(p.numel() for p in self.model.parameters())
            say(
                f"{self.config.name}: {parameters:,} parameters, {len(self.prepared.train_sequences):,} sequences, "
                f"{self.plan.updates:,} updates of {self.plan.accumulation * self.accelerator.num_processes} × "
                f"{self.plan.batch_tokens:,} tokens on {self.where} in {self.precision}"
                + (f", from step {self.step}" if self.step else "")
            )
            for said in left_out(self.prepared.train):
                say(said)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C from an impatient person stops now, without saving. Schedulers often send SIGTERM twice.
        if self.signal == signal.SIGINT == number and time.monotonic() - self.signal_time > 1:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal, self.signal_time = number, time.monotonic()

    def _agreed_signal(self) -> int | None:
        """The signal that any process has received; all must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return self.signal
        if self.step % self.config.training.log_every:
            return None
        heard = self.accelerator.reduce(torch.tensor(self.signal or 0, device=self.accelerator.device), "sum").item()
        return None if heard == 0 else self.signal or signal.SIGTERM


def _step_seed(seed: int, step: int, process: int) -> int:
    """Dropout's seed at a step: the same after a resume, different for every step and process."""
    return (seed * 1_000_003 + step) * 4096 + process
