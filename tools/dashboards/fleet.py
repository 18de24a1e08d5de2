"""All jobs together, for who runs the cluster: where the GPUs are, what comes back, and how the operator fares."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.panels import graph, new_dashboard, number, section

_QUANTILES = (("0.5", "median"), ("0.99", "p99"))


def dashboard() -> Dashboard:
    """The dashboard."""
    board = new_dashboard(
        "pipetransformer-fleet",
        "PipeTransformer / Fleet",
        "GPUs of all PipeTrainingJobs, how they change size, and the health of the operator.",
    )
    _now(board)
    _gpus(board)
    _jobs(board)
    _resizes(board)
    _operator(board)
    return board


def _now(board: Dashboard) -> None:
    section(
        board,
        "Now",
        number("GPUs held", [("sum(pipetransformer_job_gpus_held)", "held")]),
        number("GPUs pending", [("sum(pipetransformer_job_gpus_pending)", "pending")]),
        number(
            "GPUs saved",
            [("sum(namespace_job_name:pipetransformer_job_saved_gpus:rate5m)", "saved")],
            description="GPUs that running jobs leave to others, against holding their initial ones.",
        ),
        number(
            "GPU time saved in this range",
            [("sum(increase(pipetransformer_job_saved_gpu_seconds_total[$__range]))", "saved")],
            unit="s",
        ),
        number("Jobs", [("sum by (state) (pipetransformer_job_state)", "{{state}}")]),
        number(
            "Alerts",
            [('count(ALERTS{alertname=~"PipeTransformer.+", alertstate="firing"}) or vector(0)', "firing")],
        ),
    )


def _gpus(board: Dashboard) -> None:
    section(
        board,
        "GPUs",
        graph(
            "Held by job",
            [("sum by (namespace, job_name) (pipetransformer_job_gpus_held)", "{{namespace}}/{{job_name}}")],
            stacked=True,
            span=12,
        ),
        graph(
            "Held, pending, about to be given back",
            [
                ("sum(pipetransformer_job_gpus_held)", "held"),
                ("sum(pipetransformer_job_gpus_pending)", "pending"),
                ("sum(pipetransformer_job_gpus_leaving)", "leaving"),
            ],
            span=12,
            description="Leaving: their job no longer needs them, and waits for a durable checkpoint.",
        ),
        graph(
            "Saved by job",
            [("namespace_job_name:pipetransformer_job_saved_gpus:rate5m", "{{namespace}}/{{job_name}}")],
            stacked=True,
            span=12,
        ),
        graph(
            "Given back since the start, by job",
            [("sum by (namespace, job_name) (pipetransformer_job_gpus_released_total)", "{{namespace}}/{{job_name}}")],
            span=12,
        ),
    )


def _jobs(board: Dashboard) -> None:
    section(
        board,
        "Jobs",
        graph("By state", [("sum by (state) (pipetransformer_job_state)", "{{state}}")], stacked=True),
        graph(
            "Frozen",
            [("pipetransformer_job_frozen_layers / pipetransformer_job_layers", "{{namespace}}/{{job_name}}")],
            unit="percentunit",
        ),
        graph(
            "Samples a second",
            [("namespace_job_name:pipetransformer_trainer_samples:rate5m", "{{namespace}}/{{job_name}}")],
        ),
        graph(
            "Nodes avoided, time left",
            [("pipetransformer_node_avoided_until_timestamp_seconds - time()", "{{node}}")],
            unit="s",
            description="More than one accelerator failed there within a day.",
        ),
    )


def _resizes(board: Dashboard) -> None:
    section(
        board,
        "Changes of size",
        graph(
            "Ended, by direction and result",
            [("sum by (direction, result) (pipetransformer_resizes_total)", "{{direction}} {{result}}")],
        ),
        graph("Layouts published, by reason", [("sum by (reason) (pipetransformer_generations_total)", "{{reason}}")]),
        graph(
            "Seconds in each phase",
            [
                (
                    f"histogram_quantile({quantile}, sum by (le, phase)"
                    " (increase(pipetransformer_resize_phase_seconds_bucket[$__range])))",
                    f"{{{{phase}}}} {name}",
                )
                for quantile, name in _QUANTILES
            ],
            unit="s",
            description="Prepare: workers start while the old layout trains. Commit: published, until it trains. Clean:"
            " until leavers may go.",
        ),
    )


def _operator(board: Dashboard) -> None:
    section(
        board,
        "Operator",
        graph(
            "From a report to its durable plan",
            [("pipetransformer_report_seconds:p99_5m", "p99"), (_quantile("0.5", "report_seconds"), "median")],
            unit="s",
        ),
        graph(
            "Turns of jobs' loops, by result",
            [("sum by (result) (rate(pipetransformer_reconciles_total[$__rate_interval]))", "{{result}}")],
            unit="ops",
        ),
        graph(
            "Turn and plan, p99",
            [(_quantile("0.99", "reconcile_seconds"), "turn"), (_quantile("0.99", "plan_seconds"), "plan alone")],
            unit="s",
        ),
        graph(
            "Requests to the API server",
            [
                (
                    "sum by (verb, resource) (rate(pipetransformer_api_requests_total[$__rate_interval]))",
                    "{{verb}} {{resource}}",
                )
            ],
            unit="reqps",
        ),
        graph(
            "Answers of the API server",
            [("sum by (code) (rate(pipetransformer_api_requests_total[$__rate_interval]))", "{{code}}")],
            unit="reqps",
        ),
        graph(
            "Requests to the API server, p99",
            [
                (
                    "histogram_quantile(0.99, sum by (le, verb)"
                    " (rate(pipetransformer_api_request_seconds_bucket[$__rate_interval])))",
                    "{{verb}}",
                )
            ],
            unit="s",
        ),
        graph(
            "Requests of workers",
            [
                (
                    "sum by (path, code) (rate(pipetransformer_channel_requests_total[$__rate_interval]))",
                    "{{path}} {{code}}",
                )
            ],
            unit="reqps",
        ),
        graph(
            "Requests of workers refused",
            [("sum by (reason) (pipetransformer_channel_refusals_total) or vector(0)", "{{reason}}")],
        ),
        graph(
            "Watches: since they were opened",
            [("time() - pipetransformer_watch_opened_timestamp_seconds", "{{resource}}")],
            unit="s",
            description="Each is opened anew every two minutes.",
        ),
        graph("Holds the lease", [("pipetransformer_leader", "{{instance}}")]),
        graph(
            "Processor",
            [
                (
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) pipetransformer_leader",
                    "{{instance}}",
                )
            ],
        ),
        graph(
            "Memory",
            [("process_resident_memory_bytes and on (instance) pipetransformer_leader", "{{instance}}")],
            unit="bytes",
        ),
    )


def _quantile(quantile: str, name: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate(pipetransformer_{name}_bucket[$__rate_interval])))"
