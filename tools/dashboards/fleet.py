"""All jobs together, for the platform engineer: where the GPUs are, what comes back, and how the operator fares."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from tools.dashboards.panels import graph, new_dashboard, number, rows, section

_OF_JOB = "(namespace, job_name)"
_FROZEN = "pipetransformer_job_frozen_layers / pipetransformer_job_layers"
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
        number(
            "GPUs held",
            [("sum(pipetransformer_job_gpus_held)", "held")],
            description="GPUs whose pods exist, also those that leave: each counts until its pod is gone.",
        ),
        number(
            "GPUs pending",
            [("sum(pipetransformer_job_gpus_pending)", "pending")],
            description="GPUs that jobs asked for and no node has given yet.",
            limits=((1, "yellow"),),
        ),
        number(
            "GPUs saved",
            [("sum(namespace_job_name:pipetransformer_job_saved_gpus:rate5m)", "saved")],
            description="GPUs that running jobs leave to others, against holding their initial ones.",
        ),
        number(
            "GPU time saved in this range",
            [("sum(increase(pipetransformer_job_saved_gpu_seconds_total[$__range]))", "saved")],
            unit="s",
            description="GPU time within the time range that jobs left to others, against holding their initial GPUs.",
        ),
        number("Jobs", [("sum by (state) (pipetransformer_job_state)", "{{state}}")], description="Jobs by state."),
        number(
            "Alerts",
            [('count(ALERTS{alertname=~"PipeTransformer.+", alertstate="firing"}) or vector(0)', "firing")],
            description="Alerts of this chart that fire now. Each links to its runbook.",
            limits=((1, "red"),),
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
            description="Each job's GPUs. A job that packs with onPack Release shrinks here.",
        ),
        graph(
            "Held, pending, about to be given back",
            [
                ("sum(pipetransformer_job_gpus_held)", "held"),
                ("sum(pipetransformer_job_gpus_pending)", "pending"),
                ("sum(pipetransformer_job_gpus_leaving)", "leaving"),
            ],
            span=12,
            description="Pending: asked for. Leaving: their job waits for a durable checkpoint first.",
        ),
        graph(
            "Saved by job",
            [("namespace_job_name:pipetransformer_job_saved_gpus:rate5m", "{{namespace}}/{{job_name}}")],
            stacked=True,
            span=12,
            description="GPUs that each job leaves to others now, as a mean of five minutes.",
        ),
        graph(
            "Given back, by job",
            [
                (
                    f"sum by {_OF_JOB} (increase(pipetransformer_job_gpus_released_total[$__rate_interval]))",
                    "{{namespace}}/{{job_name}}",
                )
            ],
            span=12,
            description="GPUs that jobs gave back in each interval.",
        ),
    )


def _jobs(board: Dashboard) -> None:
    section(
        board,
        "Jobs",
        rows(
            "Each job",
            [
                ("", "short", "max by (namespace, job_name, state) (pipetransformer_job_state)"),
                ("GPUs held", "short", f"sum by {_OF_JOB} (pipetransformer_job_gpus_held)"),
                ("GPUs saved", "short", "namespace_job_name:pipetransformer_job_saved_gpus:rate5m"),
                ("Frozen", "percentunit", f"max by {_OF_JOB} ({_FROZEN})"),
                ("Samples a second", "short", "namespace_job_name:pipetransformer_trainer_samples:rate5m"),
            ],
            description="A row for each job. A click on a row opens the job's dashboard.",
            link=(
                "Open the job",
                "/d/pipetransformer-job?var-namespace=${__data.fields.namespace}"
                "&var-job=${__data.fields.job_name}&${__url_time_range}",
            ),
        ),
        graph(
            "By state",
            [("sum by (state) (pipetransformer_job_state)", "{{state}}")],
            stacked=True,
            description="Number of jobs in each state.",
        ),
        graph(
            "Frozen",
            [(_FROZEN, "{{namespace}}/{{job_name}}")],
            unit="percentunit",
            description="Share of each job's layers that no longer train.",
        ),
        graph(
            "Samples a second",
            [("namespace_job_name:pipetransformer_trainer_samples:rate5m", "{{namespace}}/{{job_name}}")],
            description="Training speed of each job, as a mean of five minutes.",
        ),
        graph(
            "Nodes avoided",
            [("count(pipetransformer_node_avoided_until_timestamp_seconds > time()) or vector(0)", "nodes")],
            description="Nodes to which no worker is sent: more than one accelerator failed there within a day.",
            limits=((1, "yellow"),),
        ),
    )


def _resizes(board: Dashboard) -> None:
    section(
        board,
        "Changes of size",
        graph(
            "Ended, by direction and result",
            [
                (
                    "sum by (direction, result) (increase(pipetransformer_resizes_total[$__rate_interval]))",
                    "{{direction}} {{result}}",
                )
            ],
            description="Resizes that ended in each interval. Cancelled ones cost no training: the old layout goes on.",
        ),
        graph(
            "Layouts published, by reason",
            [("sum by (reason) (increase(pipetransformer_generations_total[$__rate_interval]))", "{{reason}}")],
            description="Generations that the operator published in each interval, by what caused them.",
        ),
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
            "From a report to its durable status",
            [("pipetransformer_report_seconds:p99_5m", "p99"), (_quantile("0.5", "report_seconds"), "median")],
            unit="s",
            description="Time from a leader's report to the status that answers it. An alert fires above the line.",
            limits=((5, "red"),),
        ),
        graph(
            "Turns of jobs' loops, by result",
            [("sum by (result) (rate(pipetransformer_reconciles_total[$__rate_interval]))", "{{result}}")],
            unit="ops",
            description="How often the operator looks at jobs. Error: its own fault. Unavailable: the API server's.",
        ),
        graph(
            "Turn and plan, p99",
            [(_quantile("0.99", "reconcile_seconds"), "turn"), (_quantile("0.99", "plan_seconds"), "plan alone")],
            unit="s",
            description="Time of one look at a job, and of the decision alone.",
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
            description="The operator's requests by verb and resource.",
        ),
        graph(
            "Answers of the API server",
            [("sum by (code) (rate(pipetransformer_api_requests_total[$__rate_interval]))", "{{code}}")],
            unit="reqps",
            description="The API server's answers by code. Many 429 mean that it limits the operator.",
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
            description="Time of the slowest hundredth of the operator's requests, by verb.",
            limits=((1, "yellow"), (5, "red")),
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
            description="Requests of trainer pods to the operator's channel, by path and code.",
        ),
        graph(
            "Requests of workers refused",
            [
                (
                    "sum by (reason) (increase(pipetransformer_channel_refusals_total[$__rate_interval])) or vector(0)",
                    "{{reason}}",
                )
            ],
            description="Refused requests of trainer pods in each interval, by reason.",
            limits=((1, "yellow"),),
        ),
        graph(
            "Watches: since they were opened",
            [("time() - pipetransformer_watch_opened_timestamp_seconds", "{{resource}}")],
            unit="s",
            description="Each watch is opened again every two minutes. One that grows older is stuck.",
            limits=((300, "red"),),
        ),
        graph(
            "Holds the lease",
            [("pipetransformer_leader", "{{instance}}")],
            description="1 for the operator that leads, 0 for those that stand by. Exactly one leads.",
        ),
        graph(
            "Processor",
            [
                (
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) pipetransformer_leader",
                    "{{instance}}",
                )
            ],
            description="Processor time a second of the operator that leads, in cores.",
        ),
        graph(
            "Memory",
            [("process_resident_memory_bytes and on (instance) pipetransformer_leader", "{{instance}}")],
            unit="bytes",
            description="Resident memory of the operator that leads.",
        ),
    )


def _quantile(quantile: str, name: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate(pipetransformer_{name}_bucket[$__rate_interval])))"
