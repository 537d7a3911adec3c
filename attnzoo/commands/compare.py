"""Commands that measure: compare, demo, inspect, tasks, heads, memory."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnzoo.commands.options import Attentions, Model, parse_size, spec_of, specs_of, split
from attnzoo.commands.terminal import AsJson, console, print_files, problems, show_status
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.hf.configs import read_field
from attnzoo.report.table import format_length

if TYPE_CHECKING:
    from attnzoo.compare.run import CompareConfig

Lengths = Annotated[str, typer.Option(help="tokens: 1k..64k (doubling) or 512,2k,3000")]


OutputDir = Annotated[
    Path,
    typer.Option(help="folder of results; resumes from earlier results in it"),
]
Level = Annotated[str, typer.Option(help="op, model, or all")]
Dtype = Annotated[
    str | None, typer.Option(help="data type; default: float32 on a CPU, bfloat16 on a GPU")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or both with a comma; default: all available")
]
Tokens = Annotated[int, typer.Option(min=1, help="tokens per call; as many rows as fit")]
MinRunTime = Annotated[
    float, typer.Option(min=0.001, help="seconds of timed calls per case; more is steadier")
]
Timeout = Annotated[float, typer.Option(min=1, help="time limit per case in seconds")]
Threads = Annotated[int | None, typer.Option(min=1, help="torch threads; default: all cores")]
Fresh = Annotated[
    bool, typer.Option(help="set earlier results in --output-dir aside and start over")
]

_NUMBER = re.compile(r"\s*(\d{1,9})\s*([kKmM]?)\s*")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
MAX_LENGTH = 2**26


def compare(
    model: Model = Path("embedded"),
    lengths: Lengths = "1k..16k",
    attention: Attentions = None,
    output_dir: OutputDir = Path("attnzoo-compare"),
    mode: Annotated[str, typer.Option(help="forward, train or decode")] = "forward",
    level: Level = "all",
    tokens: Tokens = 4096,
    dtype: Dtype = None,
    device: Device = None,
    data: Annotated[Path | None, typer.Option(help="text file to measure quality on")] = None,
    quality: Annotated[bool, typer.Option(help="measure quality over length")] = True,
    max_length: Annotated[int, typer.Option(min=8, help="tokens per row for quality")] = 2048,
    min_run_time: MinRunTime = 0.5,
    timeout: Timeout = 60.0,
    threads: Threads = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Measure time, memory and quality over length, and name the attention that is worth it.

    Every case runs in its own process; a case that fails is a row with the reason. The tables have
    the cases of this command; other rows in --output-dir stay there.
    """
    parsed = parse_lengths(lengths)  # before torch is imported
    import torch

    from attnzoo.compare.cases import LEVELS
    from attnzoo.compare.run import CompareConfig, read_model_info

    torch.set_num_threads(threads or torch.get_num_threads())
    info = read_model_info(model)
    config = CompareConfig(
        model=info,
        lengths=parsed,
        specs=_specs(attention, causal=info.causal),
        out=output_dir,
        levels=LEVELS if level == "all" else split(level),
        mode=mode,
        tokens=tokens,
        dtype=dtype,
        devices=split(device) if device else None,
        text=data,
        quality=quality,
        quality_length=max_length,
        min_run_time=min_run_time,
        timeout=timeout,
        fresh=fresh,
    )
    _compare(config, as_json)


def demo(
    model: Model = Path("embedded"),
    data: Annotated[Path | None, typer.Option(help="text file to evaluate on")] = None,
    attention: Attentions = None,
    output_dir: OutputDir = Path("attnzoo-demo"),
    quick: Annotated[bool, typer.Option(help="use contexts up to 1k only")] = False,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Compare quality, recall, decoding speed and cache size of every attention in one model.

    It is `compare --mode decode --level model` with shorter rows.
    """
    from attnzoo.compare.run import CompareConfig, read_model_info

    lengths, info = [256, 1024] if quick else [256, 1024, 4096, 16384], read_model_info(model)
    limit = info.max_positions or 2 * lengths[-1]
    config = CompareConfig(
        model=info,
        lengths=[n for n in lengths if n < limit] or [limit // 2],
        specs=_specs(attention, causal=info.causal, use_case="short"),
        out=output_dir,
        levels=["model"],
        mode="decode",
        text=data,
        quality_length=512,
        min_run_time=0.05,
        fresh=fresh,
    )
    _compare(config, as_json)


def _specs(attention: list[str] | None, **options: Any) -> list[Any]:
    """Return the specs of ``--attention``: of all backends, or of names by their presets."""
    from attnzoo.compare.cases import default_specs

    presets: Any = partial(default_specs, **options)
    return specs_of(attention or ["all"], presets) or presets(None)


def _compare(config: CompareConfig, as_json: bool) -> None:
    """Measure what has no row yet, write the report, and print the tables or all rows."""
    from attnzoo.compare.report import show, write_report
    from attnzoo.compare.run import compare
    from attnzoo.evaluation.results import FILE

    with show_status(problems if as_json else console) as on_status:
        log = problems if as_json else console
        rows = compare(config, on_status, partial(log.print, soft_wrap=True))
    page = write_report(config.out, rows)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    show(console, rows)
    print_files(config.out / FILE, page)


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of ``"1k..64k"`` (doubling) or ``"512,1k,3000"``, in increasing order.

    Raises:
        SpecError: The text is not a list of lengths.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = _length(first, text)
        high = _length(last, text) if dots else low
        if high < low:
            raise SpecError(
                f"The range of lengths {part.strip()!r} is decreasing; write the shorter one first"
            )
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _length(part: str, whole: str) -> int:
    match = _NUMBER.fullmatch(part)
    value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= value <= MAX_LENGTH:
        raise SpecError(
            f"Lengths {whole!r} are not understood at {part.strip()!r}; write numbers of tokens "
            f"from 1 to {format_length(MAX_LENGTH)}, such as 1k..64k (doubling) or 512,2k,3000"
        )
    return value


def tasks(
    attention: Attentions = None,
    seeds: Annotated[int, typer.Option(help="runs per attention")] = 3,
    max_steps: Annotated[int, typer.Option(help="training steps")] = 1200,
    output_dir: OutputDir = Path("attnzoo-tasks"),
    threads: Threads = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Train small models from scratch on associative recall, with one budget for each attention.

    The table has the accuracy in percent: mean over seeds ± half the range.
    """
    import torch

    from attnzoo.evaluation.results import FILE
    from attnzoo.tasks import default_specs, run_tasks, tabulate

    torch.set_num_threads(threads or torch.get_num_threads())
    specs = specs_of(attention, default_specs) if attention else None
    with show_status(problems if as_json else console) as show:
        rows = run_tasks(
            output_dir,
            specs=specs,
            seeds=seeds,
            steps=max_steps,
            fresh=fresh,
            on_progress=lambda name, done: show(f"{done:.0%}  {name}"),
        )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    tabulate(rows).print(console)
    console.print(f"Numbers: {output_dir / FILE}")


MapLength = Annotated[
    int, typer.Option(min=2, max=4096, help="tokens; attention weights need their square")
]


def inspect(
    model: Model = Path("embedded"),
    data: Annotated[Path | None, typer.Option(help="text file; its first tokens are used")] = None,
    layer: Annotated[int, typer.Option(help="index of the layer")] = 0,
    head: Annotated[int, typer.Option(help="index of the head")] = 0,
    attention: Annotated[str, typer.Option(help="NAME or NAME:OPTION=VALUE,...")] = "linear",
    max_length: MapLength = 192,
    output_dir: Annotated[
        Path, typer.Option(help="folder for maps.json, maps.html and pictures")
    ] = Path("attnzoo-maps"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the maps in an existing --output-dir")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show attention maps of a head, exact and approximate: difference and entropy.

    Only the given layer is swapped, so that both maps have the same queries and keys.
    """
    from attnzoo.compare.maps import MAPS, make_maps, maps_table, write_maps
    from attnzoo.report.output_path import check_file

    check_file(output_dir / MAPS, overwrite=overwrite)
    spec = spec_of(attention)
    _require_data(model, data)
    found = make_maps(model, spec, text=data, layer=layer, head=head, tokens=max_length)
    page = write_maps(output_dir, found, head)
    if as_json:
        print((output_dir / MAPS).read_text("utf-8"), end="")
        return
    maps_table(found).print(console)
    print_files(output_dir / MAPS, page)


def _require_data(path: Path, data: Path | None) -> None:
    """Raise an error without a text, unless the model is an embedded one."""
    from attnzoo.evaluation.models import is_embedded

    if data is None and not is_embedded(str(path)):
        raise SpecError("A model needs --data: give a text file in the model's language")


FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def heads(
    path: Model = Path("embedded"),
    data: Annotated[Path | None, typer.Option(help="text file in the model's language")] = None,
    rows: Annotated[int, typer.Option(min=1, help="texts to measure on")] = 8,
    max_length: MapLength = 128,
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

    from attnzoo.compare.maps import HEADS, heads_table, pruning_table, write_heads
    from attnzoo.evaluation.heads import study_heads
    from attnzoo.hf.pretrained import load_pretrained
    from attnzoo.hf.pruning import prune_heads
    from attnzoo.hf.saving.files import model_class, read_config, save_copy
    from attnzoo.report.output_path import check_file

    _check(path, prune, save)
    _require_data(path, data)
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
            if not positions:
                count = sum(study.heads.values())
                raise SpecError(f"--prune {prune} of {count} heads removes none; give more")
            chosen = {n: [found.numbers[n][i] for i in x] for n, x in positions.items()}
            whole = load_pretrained(model_class(read_config(path), path), path).eval()
            save_copy(prune_heads(whole, chosen), path, save)
    if as_json:
        saved = None if save is None else str(save)
        measured = json.loads((output_dir / HEADS).read_text("utf-8"))
        print(json.dumps(measured | {"pruned": chosen, "saved": saved}, indent=2))
        return
    heads_table(found).print(console)
    pruning_table(found).print(console)
    print_files(output_dir / HEADS, page)
    if save is not None:
        console.print(
            f"Model:   {save}, without {sum(map(len, chosen.values()))} heads (load it with "
            "from_pretrained after `import attnzoo`)",
            soft_wrap=True,
        )


def _check(path: Path, prune: float | None, save: Path | None) -> None:
    """Raise an error if the options of pruning do not fit together, or the model."""
    if (prune is None) != (save is None):
        raise SpecError("--prune FRACTION and --save FOLDER belong together; give both or neither")
    if prune is not None and not 0 < prune < 1:
        raise SpecError(f"--prune must be a fraction above 0 and below 1, got {prune}")
    if save is not None:
        from attnzoo.hf.configs import has_field
        from attnzoo.hf.saving.files import read_config, require_new_folder
        from attnzoo.report.output_path import check_folder

        if has_field(read_config(path), "attnzoo"):
            raise SpecError("A swapped model is not pruned; prune the original model, then swap it")
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


COLUMNS = {name: name for name in ("parameters", "gradients", "optimizer", "activations")} | {
    "activations_checkpointed": "checkpointed",
    "training": "training",
    "training_checkpointed": "checkpointed",
    "cache": "cache",
    "inference": "prompt",
    "decoding": "decoding",
}
CAPTION = (
    "Training, prompt and decoding are peaks, weights included; checkpointed: with gradient "
    "checkpointing. Tensors on a CPU: without the process itself, and on a GPU without kernels' "
    "own buffers."
)


def memory(
    path: Model = Path("embedded"),
    max_length: Annotated[str, typer.Option(help="tokens per row, such as 32k")] = "4k",
    batch_size: Annotated[int, typer.Option(min=1, help="rows")] = 1,
    attention: Attentions = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="data type of the weights; default: that of the saved model (recover and "
            "finetune train in float32)"
        ),
    ] = None,
    optim: Annotated[
        str, typer.Option(help="adamw, adamw_8bit (bitsandbytes), adafactor or sgd")
    ] = "adamw",
    train: Annotated[
        str, typer.Option(help="full, lora (adapters and extras) or extras (of the backends)")
    ] = "full",
    bf16: Annotated[bool, typer.Option("--bf16", help="autocast to bfloat16")] = False,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="frozen linear layers in 4 bits (QLoRA)")
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(min=1, help="GPUs that share --batch-size rows and divide weights (FSDP2)"),
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Show the memory of training and decoding, computed without weights or a run.

    Parameters, gradients, optimizer, activations with and without gradient checkpointing, keys and
    values or states, and the peaks of a training step, of a prompt and of a decoded token.
    """
    from attnzoo.compare.run import read_model_info
    from attnzoo.evaluation.memory import MemoryEstimator
    from attnzoo.hf.saving.files import dtype_name, saved_dtype
    from attnzoo.report.table import format_length

    tokens = parse_size(max_length, "--max-length")
    settings: dict[str, Any] = {
        **{"batch": batch_size, "dtype": dtype or dtype_name(saved_dtype(path))},
        **{"optimizer": optim, "train": train, "bf16": bf16},
        **{"load_in_4bit": load_in_4bit, "gpus": gpus},
    }
    specs: list[Any] = [None]  # the attention of the model's config
    if attention is not None:
        specs = _specs(attention, causal=read_model_info(path).causal)
    found, rows = [MemoryEstimator(path=path, spec=x, **settings) for x in specs], []
    with show_status(problems if as_json else console) as show:
        for estimator in found:
            show(estimator.attention)
            spec = estimator.spec and estimator.spec.to_dict()
            row = {"attention": estimator.attention, "spec": spec, "length": tokens, **settings}
            try:
                row |= {"computed": estimator.at(tokens).to_dict(), "reason": ""}
            except AttnzooError as error:
                row |= {"computed": None, "reason": str(error)}
            rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    title = f"{format_length(tokens)} tokens, {batch_size} row{'s' if batch_size > 1 else ''}, "
    title += settings["dtype"] + (f", one of {gpus} GPUs" if gpus > 1 else "")
    _print(rows, title)


def _print(rows: list[dict[str, Any]], title: str) -> None:
    """Print the memory of every attention, and the reasons of those without."""
    from attnzoo.report.table import Table, format_bytes

    body = [
        [row["attention"], *(format_bytes(row["computed"][key]) for key in COLUMNS)]
        for row in rows
        if row["computed"]
    ]
    columns = ["attention", *COLUMNS.values()]
    Table(columns=columns, rows=body, title=title, caption=CAPTION).print(console)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['attention']}: {row['reason']}", soft_wrap=True, highlight=False)
