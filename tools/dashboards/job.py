"""One job, for who trains: how its layout follows its frozen layers, how fast it is, and what regroups cost."""

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from tools.dashboards.panels import DATA_SOURCE, graph, new_dashboard, number, section

_JOB = 'namespace="$namespace", job_name="$job"'


def dashboard() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        "pipetransformer-job", "PipeTransformer / Job", "One PipeTrainingJob: layers, layout, GPUs, speed, regroups."
    )
    board.with_variable(_variable("namespace", "Namespace", "label_values(pipetransformer_job_state, namespace)"))
    names = 'label_values(pipetransformer_job_state{namespace="$namespace"}, job_name)'
    board.with_variable(_variable("job", "Job", names))
    _now(board)
    _layout(board)
    _training(board)
    _speed(board)
    _cache(board)
    _regroups(board)
    _workers(board)
    return board


def _variable(name: str, label: str, query: str) -> QueryVariable:
    source = DataSourceRef(type_val="prometheus", uid=f"${{{DATA_SOURCE}}}")
    variable = QueryVariable(name).label(label).query(query).datasource(source)
    return variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _now(board: Dashboard) -> None:
    section(
        board,
        "Now",
        number("State", [(_operator("state"), "{{state}}")], name=True),
        number("Frozen blocks", [(_operator("frozen_layers"), "frozen"), (_operator("layers"), "of")]),
        number("Layout", [(_operator("pipelines"), "pipelines"), (_operator("stages"), "stages")]),
        number("GPUs held", [(_operator("gpus_held"), "held")]),
        number("GPU time saved", [(_operator("saved_gpu_seconds_total"), "saved")], unit="s"),
        number("Step", [(_worker("step"), "step")]),
    )


def _layout(board: Dashboard) -> None:
    section(
        board,
        "Layers, layout, GPUs",
        graph("Blocks", [(_worker("frozen_layers"), "frozen"), (_worker("layers"), "all")]),
        graph(
            "Layout",
            [(_worker("stages"), "stages (K)"), (_worker("pipelines"), "pipelines (R)")],
        ),
        graph(
            "GPUs",
            [
                (_operator("gpus_held"), "held"),
                (_operator("gpus_pending"), "pending"),
                (_operator("gpus_leaving"), "leaving"),
                (_operator("workers_initial"), "initial"),
            ],
        ),
        graph("GPUs saved", [(f"namespace_job_name:pipetransformer_job_saved_gpus:rate5m{{{_JOB}}}", "saved")]),
        graph("Given back", [(_operator("gpus_released_total"), "GPUs")]),
        graph(
            "Layout generation",
            [(_operator("layout_generation"), "published"), (_worker("layout_generation"), "trains")],
        ),
    )


def _training(board: Dashboard) -> None:
    section(
        board,
        "Training",
        graph("Loss", [(_worker("loss"), "loss")]),
        graph("Gradient norm", [(_worker("gradient_norm"), "norm")]),
        graph("Learning rate", [(_worker("learning_rate"), "rate")]),
        graph(
            "Step and checkpoint",
            [(_worker("step"), "step"), (_operator("checkpoint_step"), "durable checkpoint")],
        ),
        graph("Steps skipped", [(f"sum({_worker('skipped_steps_total')})", "no numbers")]),
        graph(
            "Failures",
            [
                (_operator("failures_total"), "of workers"),
                (_operator("node_losses_total"), "lost nodes"),
                (_operator("resize_failures"), "of resizes, in a row"),
                (f"max({_worker('broken_generations_total')})", "broken generations"),
            ],
        ),
    )


def _speed(board: Dashboard) -> None:
    section(
        board,
        "Speed",
        graph(
            "Samples a second",
            [(f"sum(rate({_worker('samples_total')}[$__rate_interval]))", "samples")],
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
        ),
        graph(
            "Bubble",
            [(_worker("bubble_ratio"), "idle")],
            unit="percentunit",
            description="Share of a step in which the pipeline leaves its stages idle, as the step model predicts it.",
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
        ),
        graph(
            "Samples, by what became of them",
            [(f"sum by (outcome) (rate({_worker('cache_samples_total')}[$__rate_interval]))", "{{outcome}}")],
            stacked=True,
        ),
        graph(
            "Bytes",
            [(f"sum by (tier) ({_worker('cache_bytes')})", "{{tier}}")],
            unit="bytes",
            stacked=True,
        ),
        graph("Faults", [(f"sum by (fault) ({_worker('cache_faults_total')})", "{{fault}}")]),
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
            description="Mean of the slowest worker, its first step included.",
        ),
        graph(
            "Seconds in each phase",
            [(f"max by (phase) ({_worker('regroup_phase_seconds_total')})", "{{phase}}")],
            unit="s",
            stacked=True,
        ),
        graph(
            "Moved between workers",
            [(f"sum by (direction) ({_worker('moved_bytes_total')})", "{{direction}}")],
            unit="bytes",
        ),
    )


def _workers(board: Dashboard) -> None:
    memory = f"process_resident_memory_bytes{{{_JOB}}}"
    allocated = _worker("accelerator_memory_bytes", 'kind="Allocated"')
    section(
        board,
        "Workers",
        graph("Blocks held", [(_worker("held_layers"), "{{pod}}")], stacked=True),
        graph("Stage", [(_worker("stage"), "{{pod}}")]),
        graph("Memory of the host", [(memory, "{{pod}}")], unit="bytes"),
        graph(
            "Memory of the accelerator",
            [(f"{allocated} or on (pod) {memory}", "{{pod}}")],
            unit="bytes",
            description="What tensors take. The host's, where a worker has no accelerator.",
        ),
        graph("Processor", [(f"rate(process_cpu_seconds_total{{{_JOB}}}[$__rate_interval])", "{{pod}}")]),
    )


def _operator(name: str) -> str:
    return f"pipetransformer_job_{name}{{{_JOB}}}"


def _worker(name: str, *more: str) -> str:
    return f"pipetransformer_trainer_{name}{{{', '.join([_JOB, *more])}}}"
