"""The dashboard of one job for the researcher who trains it: layout, frozen layers, speed and cost of regroups."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable
from grafana_foundation_sdk.models.dashboard import VariableRefresh

from tools.dashboards.panels import annotation, graph, new_dashboard, number, section, source

#: Panels that mark freezes and regroups.
MARKED = ("Loss", "Samples a second", "Seconds of a step")
_JOB = 'namespace="$namespace", job_name="$job"'
_IDLE = 'activity="Idle"'


def dashboard() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        "pipetransformer-job", "PipeTransformer / Job", "One PipeTrainingJob: layers, layout, GPUs, speed, regroups."
    )
    board.with_variable(_variable("namespace", "Namespace", "label_values(pipetransformer_job_state, namespace)"))
    names = 'label_values(pipetransformer_job_state{namespace="$namespace"}, job_name)'
    board.with_variable(_variable("job", "Job", names))
    generation, frozen = _operator("layout_generation"), _operator("frozen_layers")
    board.annotation(annotation("Freeze", "blue", f"{frozen} != {frozen} offset 1m"))
    board.annotation(annotation("Regroup", "orange", f"{generation} != {generation} offset 1m"))
    _now(board)
    _layout(board)
    _training(board)
    _speed(board)
    _cache(board)
    _regroups(board)
    _workers(board)
    return board


def _variable(name: str, label: str, query: str) -> QueryVariable:
    variable = QueryVariable(name).label(label).query(query).datasource(source())
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _now(board: Dashboard) -> None:
    section(
        board,
        "Now",
        number(
            "State",
            [(_operator("state"), "{{state}}")],
            name=True,
            description="State of the job. kubectl describe shows its conditions and events.",
        ),
        number(
            "Frozen layers",
            [(_operator("frozen_layers"), "frozen"), (_operator("layers"), "of")],
            description="Frozen layers, and all layers of the model.",
        ),
        number(
            "Layout",
            [(_operator("pipelines"), "pipelines"), (_operator("stages"), "stages")],
            description="Data-parallel pipelines, and the stages of each.",
        ),
        number(
            "GPUs held",
            [(_operator("gpus_held"), "held")],
            description="GPUs whose pods exist, also while they are being released.",
        ),
        number(
            "GPU time saved",
            [(f"sum(increase({_operator('saved_gpu_seconds_total')}[$__range]))", "saved")],
            unit="s",
            description="GPU time in this range that the job left to others, compared with holding its initial GPUs.",
        ),
        number("Step", [(_worker("step"), "step")], description="Committed steps."),
    )


def _layout(board: Dashboard) -> None:
    section(
        board,
        "Layers, layout, GPUs",
        graph(
            "Layers",
            [(_worker("frozen_layers"), "frozen"), (_worker("layers"), "all")],
            description="Frozen layers, and all layers.",
        ),
        graph(
            "Layout",
            [
                (_worker("stages"), "stages (K)"),
                (_worker("pipelines"), "pipelines (R)"),
                (_worker("schedule_info"), "{{schedule}}"),
            ],
            description="Stages of a pipeline (K), data-parallel pipelines (R), and a line at 1 for the schedule that"
            " runs. Packing lowers K.",
        ),
        graph(
            "GPUs",
            [
                (_operator("gpus_held"), "held"),
                (_operator("gpus_pending"), "pending"),
                (_operator("gpus_leaving"), "leaving"),
                (_operator("workers_initial"), "initial"),
            ],
            description="GPUs that the job holds, asked for and releases, and its initial GPUs.",
        ),
        graph(
            "Held and not training, by reason",
            [(_operator("gpus_idle"), "{{reason}}")],
            stacked=True,
            description="GPUs that the job holds without training on them, by what they wait for.",
        ),
        graph(
            "GPUs saved",
            [(f"namespace_job_name:pipetransformer_job_saved_gpus:rate5m{{{_JOB}}}", "saved")],
            description="GPUs that the job leaves to others, as a mean of five minutes.",
        ),
        graph(
            "Given back",
            [(_increase(_operator("gpus_released_total")), "GPUs")],
            description="GPUs that the job released in each interval.",
        ),
        graph(
            "Layout generation",
            [(_operator("layout_generation"), "published"), (_worker("layout_generation"), "trains")],
            description="Newest generation that the operator published, and the one that trains.",
        ),
    )


def _training(board: Dashboard) -> None:
    section(
        board,
        "Training",
        graph(
            "Loss",
            [(_worker("loss"), "loss")],
            description="Training loss of the newest step. Marks show freezes and regroups.",
        ),
        graph(
            "Gradient norm",
            [(_worker("gradient_norm"), "norm")],
            description="Norm of the whole model's gradient before clipping.",
        ),
        graph("Learning rate", [(_worker("learning_rate"), "rate")], description="Learning rate of the newest step."),
        graph(
            "Step and checkpoint",
            [(_worker("step"), "step"), (_operator("checkpoint_step"), "durable checkpoint")],
            description="Committed steps, and steps in a durable checkpoint.",
        ),
        graph(
            "Age of the newest checkpoint",
            [(f"time() - {_operator('checkpoint_timestamp_seconds')}", "age")],
            unit="s",
            description="Time since the newest checkpoint became durable. An alert fires above the line.",
            limits=((7200, "red"),),
        ),
        graph(
            "Cost of the newest checkpoint",
            [
                (_operator("checkpoint_pause_seconds"), "training paused"),
                (_operator("checkpoint_write_seconds"), "until durable"),
            ],
            unit="s",
            description="Seconds that training paused for the newest checkpoint, and seconds until it was durable.",
        ),
        graph(
            "Steps redone",
            [(_increase(_operator("redone_steps_total")), "redone")],
            description="Committed steps in each interval that were lost with their workers, and trained again.",
            limits=((1, "yellow"),),
        ),
        graph(
            "Steps skipped",
            [(f"sum({_increase(_worker('skipped_steps_total'))})", "not finite")],
            description="Steps in each interval whose loss or gradient was not finite.",
            limits=((1, "yellow"),),
        ),
        graph(
            "Failures",
            [
                (_increase(_operator("failures_total")), "of workers"),
                (_increase(_operator("node_losses_total")), "lost nodes"),
                (_operator("resize_failures"), "of resizes, in a row"),
                (f"max({_increase(_worker('broken_generations_total'))})", "broken generations"),
            ],
            description="Failures in each interval. Lost nodes and failed resizes do not count against backoffLimit.",
            limits=((3, "red"),),
        ),
    )


def _speed(board: Dashboard) -> None:
    idle = f"rate({_worker('round_seconds_total', _IDLE)}[$__rate_interval])"
    section(
        board,
        "Speed",
        graph(
            "Samples a second",
            [(f"sum(rate({_worker('samples_total')}[$__rate_interval]))", "samples")],
            description="Training speed of the whole job. Marks show freezes and regroups.",
        ),
        graph(
            "Seconds of a step",
            [
                (f"namespace_job_name:pipetransformer_trainer_step_seconds:mean5m{{{_JOB}}}", "mean of 5 minutes"),
                (
                    f"histogram_quantile(0.99, sum by (le) (rate({_worker('step_seconds_bucket')}[$__rate_interval])))",
                    "p99",
                ),
            ],
            unit="s",
            description="Time of a step. Marks show freezes and regroups.",
        ),
        graph(
            "Idle share",
            [
                (
                    f"sum by (pod) ({idle}) / sum by (pod) (rate({_worker('round_seconds_total')}[$__rate_interval]))",
                    "{{pod}}",
                ),
                (_worker("bubble_ratio"), "predicted mean"),
            ],
            unit="percentunit",
            description="Share of a round in which each worker does not compute, and the mean that was predicted.",
        ),
    )


def _cache(board: Dashboard) -> None:
    section(
        board,
        "Activation cache",
        graph(
            "Hits",
            [(f"namespace_job_name:pipetransformer_trainer_cache_hits:ratio_rate5m{{{_JOB}}}", "share")],
            unit="percentunit",
            description="Share of samples whose frozen layers were read from the cache.",
        ),
        graph(
            "Samples, by use of the cache",
            [(f"sum by (outcome) (rate({_worker('cache_samples_total')}[$__rate_interval]))", "{{outcome}}")],
            stacked=True,
            description="Samples per second that were read from the cache, read at an earlier boundary, or computed.",
        ),
        graph(
            "Bytes",
            [(f"sum by (tier) ({_worker('cache_bytes')})", "{{tier}}")],
            unit="bytes",
            stacked=True,
            description="Size of the cache, by tier.",
        ),
        graph(
            "Frozen forwards made one step ahead",
            [(_worker("frozen_ahead_share"), "{{pod}}")],
            unit="percentunit",
            description="Share of a step's frozen forwards that the step before computed, with frozenForward: Ahead.",
        ),
        graph(
            "Faults",
            [(f"sum by (fault) ({_increase(_worker('cache_faults_total'))})", "{{fault}}")],
            description="Faults of the cache in each interval. Lost entries are computed, so results do not change.",
            limits=((1, "yellow"),),
        ),
    )


def _regroups(board: Dashboard) -> None:
    section(
        board,
        "Regroups",
        graph(
            "Seconds without training, by reason",
            [
                (
                    f"max by (reason) ({_worker('regroup_seconds_sum')} / {_worker('regroup_seconds_count')})",
                    "{{reason}}",
                )
            ],
            unit="s",
            description="Mean time of the slowest worker, including its first step.",
        ),
        graph(
            "Seconds in each phase",
            [(f"max by (phase) ({_increase(_worker('regroup_phase_seconds_total'))})", "{{phase}}")],
            unit="s",
            stacked=True,
            description="Time that regroups spent in each phase within an interval, of the slowest worker.",
        ),
        graph(
            "Moved between workers",
            [(f"sum by (direction) ({_increase(_worker('moved_bytes_total'))})", "{{direction}}")],
            unit="bytes",
            description="Bytes of layers and optimizer state that regroups moved in each interval.",
        ),
    )


def _workers(board: Dashboard) -> None:
    memory = f"process_resident_memory_bytes{{{_JOB}}}"
    allocated = _worker("accelerator_memory_bytes", 'kind="Allocated"')
    section(
        board,
        "Workers",
        graph(
            "Layers held",
            [(_worker("held_layers"), "{{pod}}")],
            stacked=True,
            description="Layers that each worker holds.",
        ),
        graph("Stage", [(_worker("stage"), "{{pod}}")], description="Stage that each worker holds."),
        graph(
            "Memory of the host",
            [(memory, "{{pod}}")],
            unit="bytes",
            description="Resident memory of each worker's process.",
        ),
        graph(
            "Memory of the accelerator",
            [(f"{allocated} or on (pod) {memory}", "{{pod}}")],
            unit="bytes",
            description="Memory of tensors, on the host if a worker has no accelerator.",
        ),
        graph(
            "Processor",
            [(f"rate(process_cpu_seconds_total{{{_JOB}}}[$__rate_interval])", "{{pod}}")],
            description="Processor time per second of each worker's process, in cores.",
        ),
    )


def _operator(name: str) -> str:
    return f"pipetransformer_job_{name}{{{_JOB}}}"


def _worker(name: str, *more: str) -> str:
    return f"pipetransformer_trainer_{name}{{{', '.join([_JOB, *more])}}}"


def _increase(counter: str) -> str:
    return f"increase({counter}[$__rate_interval])"
