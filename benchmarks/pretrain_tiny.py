"""Train the embedded model: a byte-level Llama on the source of the standard library.

    python -m benchmarks.pretrain_tiny --minutes 45 --out attnzoo/assets/tiny-llama
    python -m benchmarks.pretrain_tiny --qk-norm --minutes 7 --lr 1e-3 --out tiny-qwen3

Without bfloat16 products on the CPU, the second takes `--minutes 9 --batch 8 --precision no
--optimizer adamw`, which was 270 steps on one core.

Two CPU cores with bfloat16 products suffice. Half of the rows repeat a segment, so that the model
learns to recall. With ``--qk-norm``, the embedded model continues as a Qwen 3, whose queries and
keys are normalised, as students of stock classes with Gated DeltaNet need it.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from attnzoo.evaluation.corpus import (
    add_repeats,
    byte_tokens,
    cut_rows,
    held_out_files,
    join,
)
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.quality import EvalBatch, Quality, evaluate_rows, rows_with_repeats
from tools.python_text import standard_library_files


def tiny_config(context: int) -> LlamaConfig:
    """Return the config: 2.9 million parameters, two query heads per key head."""
    return LlamaConfig(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


@torch.no_grad()
def with_qk_norm(source: PreTrainedModel, tokens: Tensor) -> Qwen3ForCausalLM:
    """Return a Llama as a Qwen 3 to train: norms keep the mean size of queries and keys.

    Args:
        source: The Llama.
        tokens: Rows on which the sizes are measured, ``[B, T]``.
    """
    data = source.config.to_dict()
    names = [*tiny_config(0).to_diff_dict(), "rms_norm_eps", "rope_parameters"]
    kept = {name: data[name] for name in names if name in data and name != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**kept))
    model.load_state_dict(source.state_dict(), strict=False)  # without the norms' weights

    def measure(norm: torch.nn.Module, output: Tensor) -> None:
        heads = output.unflatten(-1, (-1, source.config.head_dim))
        norm.weight.fill_(heads.square().mean(-1).sqrt().mean())

    handles = []
    for old, new in zip(source.model.layers, model.model.layers, strict=True):
        for part in "qk":
            norm = getattr(new.self_attn, f"{part}_norm")
            projection = getattr(old.self_attn, f"{part}_proj")
            hook = partial(lambda norm, module, args, output: measure(norm, output), norm)
            handles.append(projection.register_forward_hook(hook))
    source(tokens)
    for handle in handles:
        handle.remove()
    return model


def make_optimizers(model: PreTrainedModel, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """Return AdamW for all, or Muon for the matrices of the layers beside AdamW for the rest."""
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]
    if name != "muon":
        raise typer.BadParameter(f"optimizer {name!r} is not muon or adamw")
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in n)]
    return [
        torch.optim.Muon(
            matrices, lr=lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def evaluate(model: PreTrainedModel, tokens: Tensor, context: int, rows: int) -> Quality:
    """Return the bits per byte on held-out rows, and on the second copy of a repeated segment."""
    generator = torch.Generator().manual_seed(1)
    plain = cut_rows([tokens], rows, context, generator)
    repeated, repeats = rows_with_repeats(plain, generator)
    batch = EvalBatch(rows=plain, repeated=repeated, repeats=repeats)
    return evaluate_rows(model, batch)


def token_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the cross-entropy in nats of every token but the first, ``[N, T - 1]``."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")


def main(
    out: Annotated[Path, typer.Option(help="folder for the trained model")],
    minutes: Annotated[float, typer.Option(help="wall-clock time to train")] = 45.0,
    context: Annotated[int, typer.Option(help="row length in bytes")] = 512,
    batch: Annotated[int, typer.Option(help="rows per step")] = 24,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 4e-3,
    optimizer: Annotated[
        str, typer.Option(help="muon, in bfloat16 (slow on a CPU without AMX), or adamw")
    ] = "muon",
    qk_norm: Annotated[
        bool, typer.Option("--qk-norm", help="train a Qwen 3 from the embedded model, in float32")
    ] = False,
    precision: Annotated[str, typer.Option(help="bf16, or no (float32)")] = "bf16",
    seed: int = 0,
) -> None:
    """Train for a given time, warming up and then decaying to zero, and save in bfloat16."""
    set_seed(seed)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    files = standard_library_files(held_out=False)
    train = byte_tokens(join(path.read_bytes() for path in files))
    held_out = byte_tokens(join(held_out_files()))
    raw: PreTrainedModel = LlamaForCausalLM(tiny_config(context))
    if qk_norm:
        source = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
        raw = with_qk_norm(source.eval(), train[: 8 * 512].view(8, 512))
    optimizers = make_optimizers(raw, optimizer, lr)
    model = accelerator.prepare(raw)
    sizes = f"{len(train):,} training bytes, {len(held_out):,} held out"
    print(f"{raw.num_parameters():,} parameters, {sizes}", flush=True)
    generator = torch.Generator().manual_seed(seed)
    start, step, smooth = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        rows = cut_rows([train], batch, context + 1, generator)
        add_repeats(rows, generator, share=0.5)
        loss = token_losses(model, rows.tokens).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(raw.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 100) * (1 - done)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        smooth = 0.96 * smooth + 0.04 * loss.item() if step > 1 else loss.item()
        if step % 50 == 0:
            seen = f"{step * batch * context / 1e6:.1f}M bytes"
            print(f"step {step} {done:.1%} {seen}, {smooth / math.log(2):.3f} bits", flush=True)
        if step % 500 == 0:
            print(f"  {evaluate(raw, held_out, context, rows=64)}", flush=True)
    # Qwen 3.5 stores norm weights as w - 1, for which bfloat16 has too few bits
    raw.to(torch.float32 if qk_norm else torch.bfloat16).save_pretrained(out)
    ByT5Tokenizer(model_max_length=context).save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    print(f"{step} steps, {step * batch * context / 1e6:.1f}M bytes")
    print(evaluate(loaded, held_out, context, rows=256))


if __name__ == "__main__":
    typer.run(main)
