"""Commands that recover quality after a swap: plan, recover, finetune."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.commands.model_argument import ModelArgument, argument_of, model_folder
from attnzoo.commands.spec_options import parse_object, spec_of
from attnzoo.commands.terminal import console, problems
from attnzoo.commands.train_options import (
    Column,
    Data,
    MaxTokens,
    TrainOptions,
    token_count,
    with_train_options,
)
from attnzoo.errors import ConfigError, SpecError
from attnzoo.hf.configs import read_field
from attnzoo.report.live import show_status

TransferTarget = Annotated[
    str, typer.Option(help="what layers match of softmax: output or attention (weights)")
]
LayersAtOnce = Annotated[
    int | None, typer.Option(help="layers per block of transfer; default: all")
]
TopK = Annotated[
    int | None,
    typer.Option(help="most probable tokens of the teacher in the distillation loss; default: all"),
]
CrossEntropy = Annotated[
    float, typer.Option(help="weight of cross-entropy in the distillation loss, 0 to 1")
]
HiddenStates = Annotated[
    float, typer.Option(help="weight of the error of hidden states in the distillation loss")
]
Train = Annotated[
    str,
    typer.Option(help="what to train: extras (of the backends), lora (and extras) or full (all)"),
]
TransferLR = Annotated[
    float | None,
    typer.Option(help="learning rate of transfer; default: 2e-2, or 5e-2 for target attention"),
]
TransferFrom = Annotated[
    str | None,
    typer.Option(help="folder of an earlier run, whose transferred layers are reused"),
]
CalibrationRows = Annotated[
    int,
    typer.Option(help="training rows whose attention the gates of delta start from; 0: none"),
]
Teacher = Annotated[
    Path | None,
    typer.Option(
        parser=model_folder,
        metavar="MODEL",
        help="folder or Hub id of the model that MODEL was converted from by `attnzoo convert "
        "--recurrent`, in place of a swap (experimental)",
    ),
]
TeacherDtype = Annotated[
    str | None,
    typer.Option(
        help="data type of the teacher with --train full, a copy: float32, bfloat16, float16, or "
        "nf4 (linear layers in 4 bits, which needs bitsandbytes); default: float32"
    ),
]
OffloadTeacher = Annotated[
    bool,
    typer.Option(
        "--offload-teacher",
        help="keep the teacher of --train full in the memory of the CPU; each layer's weights go "
        "to the GPU while it runs",
    ),
]
DisableDropout = Annotated[
    bool, typer.Option(help="train without the model's dropout, which its config keeps")
]
DistilLength = Annotated[
    int | None, typer.Option(help="tokens per row of distillation; default: --length")
]
DistilBatch = Annotated[
    int | None, typer.Option(help="rows per step of distillation; default: --batch")
]
DistilSchedule = Annotated[
    str | None, typer.Option(help="schedule of distillation; default: --lr-scheduler-type")
]
DistilScheduleOptions = Annotated[str, typer.Option(help="JSON for the schedule of distillation")]
RateFactor = Annotated[
    float | None,
    typer.Option(
        help="factor of the rates of distillation; default: from how far the student is from "
        "softmax, and 1 if a rate is given"
    ),
]
AlwaysTrain = Annotated[
    bool,
    typer.Option(
        "--always-train",
        help="train also if the swap starts less than 1e-3 nats from softmax, and no difference is "
        "measured",
    ),
]
PlanLength = Annotated[
    int | None, typer.Option(help="tokens per row; default: --target-length, or 512")
]
PlanTarget = Annotated[
    int | None,
    typer.Option(
        min=8,
        help="tokens for which the swap is meant: candidates that save neither memory nor time "
        "there are left out; default: 4096, or the model's positions",
    ),
]
KeepSoftmax = Annotated[
    float | None,
    typer.Option(help="fraction or number of layers that keep softmax; default: 0.25"),
]
CacheBytes = Annotated[
    str | None, typer.Option(help="instead of --keep-softmax: largest cache, such as 1MiB")
]
TransferSteps = Annotated[int, typer.Option(help="steps of transfer, per block of layers")]
PlanFrom = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="run of `recover` with transfer only, in all layers: measure its trained layers",
    ),
]
PlanClass = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        help="what a stock class holds (attnzoo convert --to CLASS): windows of one size, within "
        "--cache-bytes, or the recurrent layers of a student, which --from has transferred",
    ),
]
EqualWindow = Annotated[
    int | None, typer.Option(min=1, help="window of every candidate that has one, in tokens")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="measure and print, but write nothing")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an existing --out")]
OPTION_OF = {
    "row_length": "length",
    "batch_size": "batch",
    "tune_softmax": "compare",
}  # where a field has another name
INTERRUPTED = 130  # exit code after ^C, as in shells


def plan(
    path: ModelArgument,
    data: Data,
    keep_softmax: KeepSoftmax = None,
    cache_bytes: CacheBytes = None,
    cache_length: Annotated[
        str, typer.Option(help="context length of --cache-bytes in tokens")
    ] = "16k",
    out: Annotated[Path | None, typer.Option(help="JSON file for the plan")] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(help="BACKEND (by its presets) or BACKEND:NAME=VALUE,... (repeatable)"),
    ] = None,
    from_: PlanFrom = None,
    equal_window: EqualWindow = None,
    rows: Annotated[int, typer.Option(min=1, help="rows to measure on")] = 8,
    max_tokens: MaxTokens = None,
    length: PlanLength = None,
    target_length: PlanTarget = None,
    window: Annotated[int, typer.Option(min=1, help="report attention beyond so many tokens")] = 32,
    to: PlanClass = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    column: Column = "text",
) -> None:
    """Measure how much each layer needs softmax, and choose an attention for each layer."""
    from attnzoo.report.output_path import check_file
    from attnzoo.training.plan import make_plan
    from attnzoo.training.reuse import read_transferred

    if keep_softmax is not None and cache_bytes is not None:
        raise SpecError("plan takes either --keep-softmax or --cache-bytes")
    if out is not None and not dry_run:
        check_file(out, overwrite=overwrite)
    keep = 0.25 if keep_softmax is None else keep_softmax
    row_length = length or target_length or 512
    if to is not None and _has_recurrent_layers(to):
        given = {"cache-bytes": cache_bytes, "candidate": candidate, "equal-window": equal_window}
        run = _transferred_student(from_, given)
        measured = _plan_rows(path, data, column, row_length, max_tokens, rows)
        _plan_student(path, run, measured, to, keep, None if dry_run else out)
        return
    budget = None if cache_bytes is None else _budget(cache_bytes, cache_length)
    if to is not None:
        _refuse_with_class(from_, equal_window)
        candidate, budget = _for_class(path, to, candidate, budget)
    transferred = None if from_ is None else read_transferred(from_)
    specs = {} if transferred and not candidate else _candidate_specs(candidate, equal_window)
    measured = _plan_rows(path, data, column, row_length, max_tokens, rows)
    with show_status(console) as show:
        options: dict[str, Any] = {"window": window, "target_length": target_length}
        options |= {"budget": budget, "transferred": transferred}
        made_plan = make_plan(path, measured, specs, keep_softmax=keep, on_step=show, **options)
    _print_plan(made_plan)
    if out is None or dry_run:
        console.print("Nothing was written; give --out FILE to save the plan.")
        return
    _write_plan(made_plan, out, path, rows)


def _plan_rows(
    path: Path, data: list[Path], column: str, length: int, max_tokens: str | None, count: int
) -> Any:
    """Return rows of training text, each with a repeated segment in a document that takes one."""
    from attnzoo.training.loading import load_rows
    from attnzoo.training.train_config import TrainConfig

    limit = token_count(max_tokens, "--max-tokens")
    config = TrainConfig(row_length=length, repeat_share=1.0, max_tokens=limit)
    return load_rows(path, data, column, config)[0].select(slice(count))


def _has_recurrent_layers(to: str) -> bool:
    """Return whether a plan for a class chooses recurrent layers."""
    from attnzoo.hf.stock.classes import stock_class

    return bool(stock_class(to).recurrent)


def _transferred_student(from_: Path | None, given: dict[str, Any]) -> Path:
    """Return ``--from`` of a plan of a student's layers.

    Raises:
        SpecError: It is not given, or an option is given that does not apply.
    """
    for name, value in given.items():
        if value:
            raise SpecError(
                "A plan of recurrent layers has one candidate, and --keep-softmax sets its "
                f"memory; leave --{name} out"
            )
    if from_ is None:
        raise SpecError(
            "Recurrent layers are ranked after a transfer: run `attnzoo convert DIR --to CLASS "
            "--recurrent LAYERS` with all layers that may become recurrent, then `attnzoo recover "
            "STUDENT --teacher DIR --recipe student --distil-steps 0`, and give the folder of "
            "its result by --from"
        )
    return from_


def _plan_student(path: Path, run: Path, rows: Any, to: str, keep: float, out: Path | None) -> None:
    """Choose the recurrent layers of a student; print them and the next command."""
    from attnzoo.training.student_plan import plan_student

    with show_status(console) as show:
        made_plan = plan_student(path, run, rows, to=to, keep_softmax=keep, on_step=show)
    made_plan.table().print(console)
    choice = ["--recurrent", made_plan.layers]
    if out is not None:
        made_plan.write(out)
        console.print(f"Plan:   {out}", soft_wrap=True)
        choice = ["--plan", str(out)]
    command = ["attnzoo", "convert", argument_of(path), "--to", to, *choice]
    console.print(f"Next:   {shlex.join(command)} --out STUDENT", soft_wrap=True)


def _budget(cache_bytes: str, cache_length: str) -> Any:
    """Return the limit of ``--cache-bytes`` at ``--cache-length``."""
    from attnzoo.training.budget import CacheBudget, parse_size

    tokens = parse_size(cache_length, "--cache-length")
    return CacheBudget(bytes=parse_size(cache_bytes, "--cache-bytes"), length=tokens)


def _refuse_with_class(from_: Path | None, equal_window: int | None) -> None:
    """Raise ``SpecError`` for options of a plan that choose other candidates than ``--to``."""
    for name, value in (("--from", from_), ("--equal-window", equal_window)):
        if value is not None:
            raise SpecError(
                f"--to plans windows of the sizes that it tries itself; leave {name} out"
            )


def _for_class(
    path: Path, to: str, candidate: list[str] | None, budget: Any
) -> tuple[list[str], Any]:
    """Return the candidates and the budget of a plan that a stock class holds."""
    from attnzoo.hf.saving.files import read_config
    from attnzoo.training.class_plan import OneWindow, window_candidates

    if candidate:
        raise SpecError(
            "--to plans windows of the sizes that it tries itself; leave --candidate out"
        )
    if budget is None:
        raise SpecError("--to chooses windows and layers within --cache-bytes; give it")
    return window_candidates(read_config(path).model_type, to), OneWindow(budget=budget)


def _candidate_specs(candidates: list[str] | None, window: int | None) -> dict[str, Any]:
    """Return the specs of ``--candidate`` by their texts; names have their presets' options.

    Args:
        candidates: The texts; the default candidates when ``None``.
        window: Window of every candidate that has one; ``None`` for their own.
    """
    from attnzoo.training.candidates import CANDIDATE_BACKENDS, preset_candidates, with_window

    specs = {}
    for given in candidates or CANDIDATE_BACKENDS:
        for text in [given] if ":" in given else preset_candidates([given]):
            name, spec = text, spec_of(text)
            if window is not None:
                name, spec = with_window(text, spec, window)
            specs[name] = spec
    return specs


def _print_plan(made_plan: Any) -> None:
    """Print the candidates, those that are left out with the reason, and the choice."""
    from attnzoo.training.plan_report import candidates_table, plan_table, windows_note

    for name, reason in made_plan.left_out.items():
        console.print(f"{name} is left out: {reason}", soft_wrap=True, highlight=False)
    candidates_table(made_plan).print(console)
    if note := windows_note(made_plan):
        console.print(note, soft_wrap=True, highlight=False)
    console.print(plan_table(made_plan))


def _write_plan(made_plan: Any, out: Path, path: Path, rows: int) -> None:
    """Write a plan and its charts, and print the next command."""
    from attnzoo.training.plan_report import write_plan_page

    made_plan.write(out)
    console.print(f"Plan:   {out}", soft_wrap=True)
    pages = ", ".join(map(str, write_plan_page(out.with_suffix(".html"), made_plan)))
    if pages:
        console.print(f"Charts: {pages}", soft_wrap=True)
    command = shlex.join(["attnzoo", "recover", argument_of(path), "--plan", str(out)])
    if made_plan.transfer_from is not None:
        command += f" --transfer-from {shlex.quote(made_plan.transfer_from)}"
    if made_plan.calibrated:
        command += f" --calibration-rows {rows}"  # it was measured with calibrated gates
    console.print(f"Next:   {command} ...", soft_wrap=True)


@with_train_options
def recover(
    path: ModelArgument,
    plan: Annotated[Path | None, typer.Option(help="plan from `attnzoo plan`")] = None,
    teacher: Teacher = None,
    transfer_steps: TransferSteps = 100,
    transfer_target: TransferTarget = "output",
    transfer_lr: TransferLR = None,
    transfer_from: TransferFrom = None,
    layers_at_once: LayersAtOnce = None,
    calibration_rows: CalibrationRows = 0,
    distil_steps: Annotated[int, typer.Option(help="steps of distillation from softmax")] = 100,
    top_k: TopK = None,
    distil_length: DistilLength = None,
    distil_batch: DistilBatch = None,
    distil_lr_scheduler_type: DistilSchedule = None,
    distil_lr_scheduler_kwargs: DistilScheduleOptions = "{}",
    rate_factor: RateFactor = None,
    always_train: AlwaysTrain = False,
    cross_entropy: CrossEntropy = 0.0,
    hidden_states: HiddenStates = 0.0,
    teacher_dtype: TeacherDtype = None,
    offload_teacher: OffloadTeacher = False,
    disable_dropout: DisableDropout = True,
    train: Train = "lora",
    *,
    context: typer.Context,
    options: TrainOptions,
) -> None:
    """Swap a model and recover its quality by attention transfer and distillation.

    With --teacher, MODEL is a student of a stock class (`attnzoo convert --recurrent`).
    """
    from attnzoo.training import recover as recovery

    if plan is None and teacher is None:
        options = _with_recipe_attention(options)
    spec, weights = _spec_of_recovery(options, plan, teacher)
    schedule = parse_object(distil_lr_scheduler_kwargs, "--distil-lr-scheduler-kwargs")
    given = {
        "transfer_steps": transfer_steps,
        "transfer_target": transfer_target,
        "transfer_lr": transfer_lr,
        "transfer_from": transfer_from,
        "layers_at_once": layers_at_once,
        "calibration_rows": calibration_rows,
        "distil_steps": distil_steps,
        "distil_length": distil_length,
        "distil_batch": distil_batch,
        "distil_lr_scheduler_type": distil_lr_scheduler_type,
        "distil_lr_scheduler_kwargs": schedule,
        "rate_factor": rate_factor,
        "always_train": always_train,
        "top_k": top_k,
        "cross_entropy": cross_entropy,
        "hidden_states": hidden_states,
        "teacher_dtype": teacher_dtype,
        **{"offload_teacher": offload_teacher, "disable_dropout": disable_dropout},
        "train": train,
        **options.config(),
    }
    config = _config("recover", given, options, context)
    start = partial(recovery.recover, path, spec, weights=weights, teacher=teacher)
    _run(start, config, _stages(config), options)


def _stages(config: Any) -> dict[str, int]:
    """Return the steps of each stage of a recovery."""
    steps, distil_steps = config.transfer_steps, config.distil_steps
    return {"softmax": distil_steps, "transfer": steps, "distil": distil_steps}


def _spec_of_recovery(
    options: TrainOptions, plan: Path | None, teacher: Path | None
) -> tuple[Any, str | None]:
    """Return the spec of a recovery and the weights it was planned for; none with a teacher."""
    from attnzoo.training.plan import read_plan

    if [options.attention, plan, teacher].count(None) != 2:
        raise SpecError(
            "recover takes either --attention (with --set, --layers) or --plan FILE, or --teacher "
            "MODEL for a student of a stock class"
        )
    if teacher is not None:
        if options.option or options.layers or options.else_:
            raise SpecError("--set, --layers and --else need --attention; leave them out")
        return None, None
    return read_plan(plan) if plan else (options.spec(), None)


def _with_recipe_attention(options: TrainOptions) -> TrainOptions:
    """Return the options with the attention of the recipe, if it has one and none is given."""
    from attnzoo.training.recipes import find_recipe

    if options.recipe is None or options.attention is not None:
        return options
    return replace(options, attention=find_recipe(options.recipe).attention)


def _config(
    command: str, given: dict[str, Any], options: TrainOptions, context: typer.Context
) -> Any:
    """Return the config of a command; options of the command line change that of a recipe."""
    from attnzoo.training.recipes import CONFIGS, recipe_config

    if options.recipe is None:
        return CONFIGS[command](**given)
    changes = {}
    for field, value in {**given, **vars(given["loop"])}.items():
        source = context.get_parameter_source(OPTION_OF.get(field, field))
        if source is not None and source.name == "COMMANDLINE":
            changes[field] = value
    return recipe_config(options.recipe, command, **changes)


@with_train_options
def finetune(
    path: ModelArgument,
    steps: Annotated[int, typer.Option(help="steps of training")] = 200,
    compare: Annotated[
        bool, typer.Option(help="also train the softmax model, as a baseline")
    ] = True,
    mlm_probability: Annotated[
        float | None, typer.Option(help="fraction of an encoder's tokens to predict; default: 0.15")
    ] = None,
    train: Train = "full",
    *,
    context: typer.Context,
    options: TrainOptions,
) -> None:
    """Fine-tune a model on text, swapped by --attention or already swapped."""
    from attnzoo.hf.names import NAME
    from attnzoo.hf.saving.files import read_config
    from attnzoo.training.finetune import finetune as finetune_model

    if read_field(read_config(path), NAME) is None:
        options = _with_recipe_attention(options)
    if options.attention is None and (options.option or options.layers or options.else_):
        raise SpecError("--set, --layers and --else need --attention; give it, or leave them out")
    spec = None if options.attention is None else options.spec()
    given = {
        "steps": steps,
        "tune_softmax": compare,
        "mlm_probability": mlm_probability,
        "train": train,
        **options.config(),
    }
    config = _config("finetune", given, options, context)
    stages = {"softmax": config.steps, "finetune": config.steps}
    _run(partial(finetune_model, path, spec), config, stages, options)


def _run(start: Any, config: Any, stages: dict[str, int], options: TrainOptions) -> None:
    """Run a training command, show its progress and print its results."""
    from attnzoo.training.progress import TrainingProgress

    out = options.out
    progress = TrainingProgress(console, stages)
    repo = _prepare_repo(options) if progress.main else None
    try:
        with progress:
            given = {"column": options.column, "resume": options.resume}
            shown = {"log": progress.log, "on_step": progress.on_step}
            results = start(options.data, out, config, **given, **shown)
    except KeyboardInterrupt:
        if progress.main:
            problems.print(how_to_resume(out), soft_wrap=True, highlight=False)
        raise SystemExit(INTERRUPTED) from None
    if progress.main:
        print_results(results)
        load = "load it with from_pretrained"
        if "student" not in results:
            load += " after `import attnzoo`"
        console.print(f"Model:  {out} ({load})", soft_wrap=True)
    if repo is not None:
        from attnzoo.training.publish import publish

        console.print(f"Hub:    {publish(out, repo)}", soft_wrap=True)


def _prepare_repo(options: TrainOptions) -> str | None:
    """Return the repository of ``--push-to-hub``, which is created before anything is trained.

    Raises:
        ConfigError: An option of the repository is given without ``--push-to-hub``.
        AttnzooError: The repository cannot be created.
    """
    if not options.push_to_hub:
        for name in ("hub_model_id", "hub_private_repo"):
            if getattr(options, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} needs --push-to-hub; give both, or neither")
        return None
    from attnzoo.training.checkpoints import check_run_folder
    from attnzoo.training.publish import prepare_repo

    check_run_folder(options.out, resume=options.resume)
    name = options.hub_model_id or options.out.resolve().name
    return prepare_repo(name, private=options.hub_private_repo)


def print_results(results: dict[str, Any]) -> None:
    """Print the quality of every model and the verdict."""
    from attnzoo.training.report import generation_table, longer_tables, results_table

    results_table(results).print(console)
    if (generation := generation_table(results)) is not None:
        generation.print(console)
    for table, sentence in longer_tables(results):
        table.print(console)
        console.print(sentence, soft_wrap=True)
    console.print(results["verdict"], style="bold", soft_wrap=True)


def how_to_resume(out: Path) -> str:
    """Return what to do after an interruption: the command that resumes the run."""
    from attnzoo.training.checkpoints import RUN

    given = sys.argv[1:]
    if not (out / RUN).is_file():
        return "Interrupted before the run started; nothing was written."
    command = shlex.join(["attnzoo", *given, *([] if "--resume" in given else ["--resume"])])
    launcher = " with the same launcher" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    return f"Interrupted. Resume{launcher} with:\n{command}"
