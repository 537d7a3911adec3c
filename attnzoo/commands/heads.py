"""The command that measures and prunes attention heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.compare import Threads
from attnzoo.commands.options import Model
from attnzoo.commands.terminal import AsJson, console, problems
from attnzoo.errors import SpecError
from attnzoo.hf.configs import read_field
from attnzoo.report.live import show_status

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def heads(
    path: Model = Path("embedded"),
    data: Annotated[Path | None, typer.Option(help="text file in the model's language")] = None,
    rows: Annotated[int, typer.Option(min=1, help="texts to measure on")] = 8,
    max_length: Annotated[int, typer.Option(help="tokens per text")] = 128,
    prune: Annotated[
        float | None, typer.Option(help="fraction of heads to remove, such as 0.4; needs --save")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="new folder for the pruned model")] = None,
    output_dir: Annotated[
        Path, typer.Option(help="folder for heads.json, heads.html and pictures")
    ] = Path("attnzoo-heads"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the results in an existing --output-dir")
    ] = False,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure every head: importance by gradient, entropy, distance; prune heads.

    A table has the quality after pruning more and more heads. `--prune 0.4 --save NEW` writes a
    model without the least important heads, which from_pretrained loads.
    """
    import torch

    from attnzoo.compare.maps import HEADS, heads_data, heads_table, pruning_table, write_heads
    from attnzoo.evaluation.heads import study_heads
    from attnzoo.evaluation.models import is_embedded
    from attnzoo.hf.heads.pruning import prune_heads
    from attnzoo.hf.pretrained import load_pretrained
    from attnzoo.hf.saving.files import model_class, read_config, save_copy
    from attnzoo.report.charts import WITHOUT_MATPLOTLIB
    from attnzoo.report.output_path import check_file

    _check(prune, save)
    if data is None and not is_embedded(str(path)):
        raise SpecError("A model needs --data: give a text file in the model's language")
    check_file(output_dir / HEADS, overwrite=overwrite)
    torch.set_num_threads(threads or torch.get_num_threads())
    chosen = {}
    fractions = sorted({*FRACTIONS, *([prune] if prune else [])})
    with show_status(problems if as_json else console) as on_step:
        study = _load(path, data, rows, max_length)
        found = study_heads(study, fractions, on_step)
        page = write_heads(output_dir, found)
        if prune is not None and save is not None:
            positions = study.choose(prune, found.measures["gradient"])
            chosen = {n: [found.numbers[n][i] for i in x] for n, x in positions.items()}
            whole = load_pretrained(model_class(read_config(path), path), path).eval()
            save_copy(prune_heads(whole, chosen), path, save)
    if as_json:
        saved = None if save is None else str(save)
        print(json.dumps(heads_data(found) | {"pruned": chosen, "saved": saved}, indent=2))
        return
    heads_table(found).print(console)
    pruning_table(found).print(console)
    console.print(f"Report:  {page}" if page else WITHOUT_MATPLOTLIB, markup=False)
    if save is not None:
        console.print(
            f"Model:   {save}, without {sum(map(len, chosen.values()))} heads (load it with "
            "from_pretrained after `import attnzoo`)",
            soft_wrap=True,
        )


def _check(prune: float | None, save: Path | None) -> None:
    """Raise an error if the options of pruning do not fit together."""
    if (prune is None) != (save is None):
        raise SpecError("--prune FRACTION and --save FOLDER belong together; give both or neither")
    if prune is not None and not 0 < prune < 1:
        raise SpecError(f"--prune must be a fraction above 0 and below 1, got {prune}")
    if save is not None:
        from attnzoo.hf.saving.files import require_new_folder
        from attnzoo.report.output_path import check_folder

        require_new_folder(save)
        check_folder(save)


def _load(path: Path, text: Path | None, rows: int, length: int) -> Any:
    """Return a model with the texts on which its heads are measured."""
    import torch

    from attnzoo.evaluation.heads import HeadStudyModel, head_rows_of_text
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
    texts = head_rows_of_text(path, text, layers, rows=rows, length=length)
    return HeadStudyModel(loaded, texts)
