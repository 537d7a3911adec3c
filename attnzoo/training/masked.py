"""Fine-tuning of encoders by masked language modelling.

A fraction of a text's tokens is selected; of those 80% become the mask token, 10% a random token
and 10% stay, and the model predicts them all. Source: Devlin et al., 2019, arXiv:1810.04805 (BERT),
section 3.1. Other letters: B texts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.embeddings import Texts
from attnzoo.evaluation.margins import mean_of, paired
from attnzoo.evaluation.quality import contributions, require_finite
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.hf.configs import read_field
from attnzoo.hf.saving.files import read_config
from attnzoo.training.encoder import EncoderRun
from attnzoo.training.loading import load_model
from attnzoo.training.loop import Loss

ROWS_PER_STEP = 16
LEAST_LOSS = 0.001  # nats; smaller differences do not matter


@dataclass(frozen=True, kw_only=True)
class MaskedQuality:
    """Prediction of masked tokens of held-out texts.

    Attributes:
        loss: Cross-entropy in nats per masked token.
        accuracy: Fraction of masked tokens that are predicted correctly.
        loss_rows: The contribution of each text to ``loss``, which is their mean.
    """

    loss: float
    accuracy: float
    loss_rows: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Selects and replaces tokens.

    The draws depend on the seed, the step and the text only, so that they are the same in a resumed
    run and for any number of processes.

    Attributes:
        mask_token: The token that replaces selected ones.
        kept: Special tokens, which are never selected.
        vocab_size: Random tokens are below.
        probability: Fraction of the tokens that are selected.
        seed: Seed.
    """

    mask_token: int
    kept: Sequence[int]
    vocab_size: int
    probability: float
    seed: int

    def __call__(self, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels for texts, ``[B, T]``; labels are -100 where not selected."""
        rows = [self._row(row, step) for row in tokens.cpu()]
        inputs, labels = (torch.stack(x).to(tokens.device) for x in zip(*rows, strict=True))
        return inputs, labels

    def _row(self, row: Tensor, step: int) -> tuple[Tensor, Tensor]:
        text = row[~torch.isin(row, torch.tensor(self.kept))]  # without padding
        seed = zlib.crc32(text.numpy().tobytes(), zlib.crc32(f"{self.seed} {step}".encode()))
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(3, len(row), generator=generator)
        allowed = ~torch.isin(row, torch.tensor(self.kept))
        selected = (draws[0] < self.probability) & allowed
        if not selected.any():  # the token with the smallest draw, so that every text counts
            first = draws[0].masked_fill(~allowed, 1.0).argmin()
            selected[first] = allowed[first]
        replaced = torch.where(
            draws[1] < 0.8,
            self.mask_token,
            torch.where(draws[1] < 0.9, (draws[2] * self.vocab_size).long(), row),
        )
        return torch.where(selected, replaced, row), row.masked_fill(~selected, IGNORE_INDEX)


def masked_loss(masking: Masking, step: Callable[[], int], label_smoothing: float = 0.0) -> Loss:
    """Return the cross-entropy of selected tokens as a loss.

    Args:
        masking: Selects the tokens.
        step: Returns the present step.
        label_smoothing: Probability that the targets spread over all tokens.
    """

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        tokens, labels = masking(batch["input_ids"], step())
        logits = model(**{**batch, "input_ids": tokens}).logits
        return F.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
        )

    return loss


@torch.no_grad()
def measure_masked(model: PreTrainedModel, texts: Texts, masking: Masking) -> MaskedQuality:
    """Return how well a model predicts the selected tokens of texts.

    Raises:
        NonFiniteError: The loss is NaN or infinite.
    """
    training, correct = model.training, []
    losses: list[Tensor] = []
    device = next(model.parameters()).device
    model.eval()
    for first in range(0, len(texts), ROWS_PER_STEP):
        rows = slice(first, first + ROWS_PER_STEP)
        tokens, labels = masking(texts.tokens[rows].to(device), 0)
        logits = model(tokens, attention_mask=texts.attention_mask[rows].to(device)).logits
        kept = labels != IGNORE_INDEX
        found = F.cross_entropy(logits[kept].float(), labels[kept], reduction="none")
        losses.extend(found.split(kept.sum(1).tolist()))
        correct.append(logits[kept].argmax(-1) == labels[kept])
    model.train(training)
    return MaskedQuality(
        loss=require_finite(float(torch.cat(losses).mean()), "loss on masked tokens"),
        accuracy=float(torch.cat(correct).float().mean()),
        loss_rows=contributions(losses),
    )


def verdict(lines: Mapping[str, MaskedQuality]) -> str:
    """Return the conclusion in one sentence, beginning with a result worse than the window's."""
    result, window, softmax = (lines[x] for x in ("result", "window alone", "softmax"))
    more = paired(result.loss_rows, window.loss_rows, least=LEAST_LOSS)
    if more.is_positive:
        return (
            f"The result is worse than its window alone: the loss of masked tokens is "
            f"{result.loss:.3f} nats, the window's {window.loss:.3f} (difference {more}). Do not "
            "use it; train longer, keep layers exact, or use the window."
        )
    tuned = lines.get("softmax tuned")
    also = "" if tuned is None else f", equally trained {mean_of(tuned.loss_rows)}"
    same = "" if more.is_clear else f" No difference from the window alone is measured: {more}."
    return (
        f"The loss of masked tokens of held-out text is {mean_of(result.loss_rows)} nats, and "
        f"{result.accuracy:.0%} are right; the loss of softmax before training is "
        f"{mean_of(softmax.loss_rows)}{also}.{same}"
    )


class MaskedRun(EncoderRun):
    """One run of masked language modelling.

    Attributes:
        masking: Selects the tokens to predict.
        step: The present step.
    """

    quality_class = MaskedQuality
    verdict: Any = staticmethod(verdict)
    step = 0

    def load_rows(self, data: list[Path], column: str) -> tuple[Texts, Texts]:
        """Return training texts and held-out texts.

        Raises:
            SpecError: The model, its tokenizer or an option does not suit masked tokens.
        """
        config = self.config
        found = read_config(self.path)
        if type(found) not in MODEL_FOR_MASKED_LM_MAPPING:
            raise SpecError(
                f"{str(self.path)!r} holds a {found.model_type} encoder, and transformers has no "
                "masked-language model of this family to fine-tune; use recover, which needs none"
            )
        if config.train_on == "completions":
            raise SpecError(
                "train_on='completions' needs a decoder; an encoder predicts masked tokens"
            )
        tokenizer = load_tokenizer(self.path)
        if tokenizer.mask_token_id is None:
            raise SpecError(
                f"The tokenizer in {str(self.path)!r} has no mask token; set one and save it"
            )
        train, held_out = super().load_rows(data, column)
        self.masking = Masking(
            mask_token=tokenizer.mask_token_id,
            kept=tuple(tokenizer.all_special_ids),
            vocab_size=found.get_text_config().vocab_size,
            probability=read_field(config, "mlm_probability") or 0.15,
            seed=config.loop.seed,
        )
        return train, held_out

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the swapped model with its saved weights and its head for masked tokens."""
        return load_model(self.path, self.spec, AutoModelForMaskedLM, **options)

    def quality(self, model: PreTrainedModel, *, is_original: bool = False) -> MaskedQuality:
        """Return how well a model predicts masked tokens of the held-out texts."""
        return measure_masked(model, self.texts, self.masking)

    def loss(self) -> Loss:
        """Return the loss of a stage, which :meth:`step_callback` tells the step."""
        return masked_loss(self.masking, lambda: self.step, self.config.label_smoothing_factor)

    def step_callback(self, model: Any, steps: int) -> Callable[[int], None]:
        """Return a ``before_step`` that also sets the step of the draws."""
        set_window_dropout = super().step_callback(model, steps)

        def before_step(step: int) -> None:
            self.step = step + 1  # 0 is that of evaluation
            set_window_dropout(step)

        return before_step
