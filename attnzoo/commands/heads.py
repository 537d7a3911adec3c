"""The command that measures and prunes attention heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.compare import Model, Threads
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.errors import SpecError
from attnzoo.hf.configs import read_field
from attnzoo.report.live import show_status

CHOICES = ("ablation", "gradient")
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def heads(
    model: Model = "embedded",
    text: Annotated[Path | None, typer.Option(help="text file in the model's language")] = None,
    rows: Annotated[int, typer.Option(min=1, help="texts to measure on")] = 8,
    length: Annotated[int, typer.Option(help="tokens per text")] = 128,
    window: Annotated[int, typer.Option(min=1, help="report attention beyond so many tokens")] = 32,
    prune: Annotated[
        float | None, typer.Option(help="fraction of heads to remove, such as 0.4; needs --save")
    ] = None,
    by: Annotated[str, typer.Option(help="importance to prune by: ablation or gradient")] = (
        "ablation"
    ),
    save: Annotated[Path | None, typer.Option(help="new folder for the pruned model")] = None,
    refit: Annotated[
        int,
        typer.Option(help="texts to refit the output projections on, by least squares; 0: none"),
    ] = 64,
    out: Annotated[
        Path, typer.Option(help="folder for heads.json, heads.html and pictures")
    ] = Path("attnzoo-heads"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the results in an existing --out")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure every head: importance by gradient and ablation, entropy, distance; prune heads.

    A table has the quality after pruning more and more heads, next to random choices. `--prune 0.4
    --save NEW` writes a model without the least important heads, which from_pretrained loads.
    """
    import torch

    from attnzoo.compare.heads import DATA, data, write_heads
    from attnzoo.evaluation.models import is_embedded, model_path
    from attnzoo.report.output_path import check_file, check_folder

    _check(prune, by, save, refit)
    if text is None and not is_embedded(model):
        raise SpecError("A model needs --text: give a text file in the model's language")
    check_file(out / DATA, overwrite=overwrite)
    if save is not None:
        check_folder(save)
    torch.set_num_threads(threads or torch.get_num_threads())
    path = model_path(model)
    fractions = sorted({*FRACTIONS, *([prune] if prune else [])})
    saved = None
    with show_status(problems if as_json else console) as on_step:
        study, found, chosen = _measure(
            path, text, (rows, length), window, fractions, (prune, by), on_step
        )
        page = write_heads(out, found)
        if save is not None:
            texts = _refit_texts(path, text, study, rows=refit, length=length)
            saved = _save(path, study, chosen, save, texts, on_step)
    chosen = {name: [found.numbers[name][i] for i in heads] for name, heads in chosen.items()}
    if as_json:
        print(json.dumps(data(found) | {"pruned": chosen, "saved": saved}, indent=2))
    else:
        _show(found, page, saved, sum(map(len, chosen.values())))


def _show(found: Any, page: Path | None, saved: str | None, count: int) -> None:
    """Print the tables, and where the page and the model are."""
    from attnzoo.compare.heads import importance_table, pruning_table
    from attnzoo.report.charts import WITHOUT_MATPLOTLIB

    importance_table(found).print(console)
    pruning_table(found).print(console)
    console.print(f"Report:  {page}" if page else WITHOUT_MATPLOTLIB, markup=False)
    if saved:
        console.print(
            f"Model:   {saved}, without {count} heads (load it with from_pretrained after "
            "`import attnzoo`)",
            soft_wrap=True,
        )


def _check(prune: float | None, by: str, save: Path | None, refit: int) -> None:
    """Raise an error if the options of pruning do not fit together."""
    if (prune is None) != (save is None):
        raise SpecError("--prune FRACTION and --save FOLDER belong together; give both or neither")
    if prune is not None and not 0 < prune < 1:
        raise SpecError(f"--prune must be a fraction above 0 and below 1, got {prune}")
    if refit < 0:
        raise SpecError(f"--refit must be a number of texts, 0 or more, got {refit}")
    if by not in CHOICES:
        raise SpecError(f"--by must be one of {', '.join(CHOICES)}, got {by!r}")
    if save is not None:
        from attnzoo.hf.saving.files import require_new_folder

        require_new_folder(save, option="--save")


def _measure(
    path: Path,
    text: Path | None,
    size: tuple[int, int],
    window: int,
    fractions: list[float],
    wanted: tuple[float | None, str],
    on_step: Any,
) -> tuple[Any, Any, dict[str, list[int]]]:
    """Return a model with its texts, what is measured, and positions of the heads to prune."""
    import torch

    from attnzoo.evaluation.heads import HeadStudyModel, head_rows_of_text, study_heads
    from attnzoo.hf.layers import attention_layers
    from attnzoo.hf.pretrained import load_pretrained
    from attnzoo.hf.saving.files import model_class, read_config

    config = read_config(path)
    loaded = load_pretrained(model_class(config, path), path, dtype=torch.float32)
    layers = attention_layers(loaded)
    if not layers or read_field(config, "is_encoder_decoder", False):
        raise SpecError(
            f"{type(loaded).__name__} is an encoder-decoder or has no layer that calls "
            "transformers' attention interface; give an encoder or a decoder of text"
        )
    texts = head_rows_of_text(path, text, layers, rows=size[0], length=size[1])
    study = HeadStudyModel(loaded, texts)
    found = study_heads(study, window=window, fractions=fractions, on_step=on_step)
    fraction, by = wanted
    chosen = {} if fraction is None else study.choose(fraction, found.measures[by])
    return study, found, {name: sorted(heads) for name, heads in chosen.items()}


def _refit_texts(path: Path, text: Path | None, study: Any, *, rows: int, length: int) -> Any:
    """Return texts to refit the output projections on, ``None`` for none.

    Raises:
        SpecError: They have fewer tokens than the features of a layer's heads.
    """
    from attnzoo.evaluation.heads import head_rows_of_text

    if rows == 0:
        return None
    found = head_rows_of_text(path, text, study.layers, rows=rows, length=length)
    features = max(x.geometry.num_heads * x.geometry.head_dim for x in study.layers)
    count = found.tokens.numel()
    if count < 2 * features:
        raise SpecError(
            f"--refit {rows} with --length {length} are {count} tokens, but the heads of a "
            f"layer have {features} features; give at least {-(-2 * features // length)} texts, or "
            "--refit 0"
        )
    return found.tokens  # each row is one document


def _save(
    path: Path,
    study: Any,
    chosen: dict[str, list[int]],
    save: Path,
    refit_texts: Any,
    on_step: Any,
) -> str:
    """Write a model without some heads, given by position; return its folder."""
    from attnzoo.hf.heads.pruning import original_heads, prune_heads, refit_outputs
    from attnzoo.hf.layers import attention_layers
    from attnzoo.hf.pretrained import load_pretrained
    from attnzoo.hf.saving.files import model_class, read_config, save_copy

    model = load_pretrained(model_class(read_config(path), path), path).eval()
    study.add_means(model, chosen)
    present = {layer.name: original_heads(layer) for layer in attention_layers(model)}
    numbers = {name: [present[name][i] for i in heads] for name, heads in chosen.items()}
    prune_heads(model, numbers)
    if refit_texts is not None:
        refit_outputs(model, study.model, refit_texts, on_step=on_step)
    save_copy(model, path, save)
    return str(save)
