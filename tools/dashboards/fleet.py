"""The dashboard of all jobs for platform engineers: GPUs held and released, and the operator's health."""

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
            description="GPUs whose pods exist. A GPU counts until its pod is gone, also while it is being released.",
        ),
        number(
            "GPUs pending",
            [("sum(pipetransformer_job_gpus_pending)", "pending")],
            description="GPUs that jobs asked for and the scheduler has not placed yet.",
            limits=((1, "yellow"),),
        ),
        number(
            "GPUs saved",
            [("sum(namespace_job_name:pipetransformer_job_saved_gpus:rate5m)", "saved")],
            description="GPUs that running jobs leave to others, compared with holding their initial GPUs.",
        ),
        number(
            "GPU time saved in this range",
            [("sum(increase(pipetransformer_job_saved_gpu_seconds_total[$__range]))", "saved")],
            unit="s",
            description="GPU time in this range that jobs left to others, compared with holding their initial GPUs.",
        ),
        number("Jobs", [("sum by (state) (pipetransformer_job_state)", "{{state}}")], description="Jobs by state."),
        number(
            "Alerts",
            [('count(ALERTS{alertname=~"PipeTransformer.+", alertstate="firing"}) or vector(0)', "firing")],
            description="Firing alerts of this chart. Each links to its runbook.",
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
            "Held, pending, about to be released",
            [
                ("sum(pipetransformer_job_gpus_held)", "held"),
                ("sum(pipetransformer_job_gpus_pending)", "pending"),
                ("sum(pipetransformer_job_gpus_leaving)", "leaving"),
            ],
            span=12,
            description="Pending: asked for, not placed yet. Leaving: released after the next durable checkpoint.",
        ),
        graph(
            "Held and not training, by reason",
            [("sum by (reason) (pipetransformer_job_gpus_idle)", "{{reason}}")],
            stacked=True,
            span=12,
            description="GPUs that jobs hold without training on them, by what they wait for.",
        ),
        graph(
            "Saved by job",
            [("namespace_job_name:pipetransformer_job_saved_gpus:rate5m", "{{namespace}}/{{job_name}}")],
            stacked=True,
            span=12,
            description="GPUs that each job leaves to others, as a mean of five minutes.",
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
            description="GPUs that jobs released in each interval.",
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
            description="One row for each job. Click a row to open the job's dashboard.",
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
            "Jobs ended, by cause",
            [
                (
                    "sum by (state, reason) (increase(pipetransformer_jobs_finished_total[$__range]))",
                    "{{state}} {{reason}}",
                )
            ],
            description="Jobs that completed or failed in the range, by the reason of their condition.",
        ),
        graph(
            "Seconds to the first step",
            [
                (
                    f"histogram_quantile({quantile}, sum by (le)"
                    " (increase(pipetransformer_first_step_seconds_bucket[$__range])))",
                    name,
                )
                for quantile, name in _QUANTILES
            ],
            unit="s",
            description="Time from when a job asked for its workers until their first step, for starts in the range.",
        ),
        graph(
            "Failures by node",
            [
                (
                    "sum by (node, cause) (increase(pipetransformer_node_failures_total[$__range]))",
                    "{{node}} {{cause}}",
                )
            ],
            description="Failed workers by node and cause, and lost nodes. A line begins at 0 with the first failure"
            " of a day. An alert fires at the limit, except for Exited and Killed.",
            limits=((2, "red"),),
        ),
        graph(
            "Nodes avoided",
            [("count(pipetransformer_node_avoided_until_timestamp_seconds > time()) or vector(0)", "nodes")],
            description="Nodes that get no workers, because more than one accelerator failed there within a day.",
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
            description="Resizes that ended in each interval. The old layout trains on after a cancelled one.",
        ),
        graph(
            "Layouts published, by reason",
            [("sum by (reason) (increase(pipetransformer_generations_total[$__rate_interval]))", "{{reason}}")],
            description="Generations that the operator published in each interval, by their cause.",
        ),
        graph(
            "Back in the layout before",
            [
                (
                    f"sum by {_OF_JOB} (increase(pipetransformer_job_layout_returns_total[1h]))",
                    "{{namespace}}/{{job_name}}",
                )
            ],
            description="Changes by choice to the layout left last, within an hour. An alert fires at the line.",
            limits=((3, "red"),),
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
            "Time from a report to its durable status",
            [("pipetransformer_report_seconds:p99_5m", "p99"), (_quantile("0.5", "report_seconds"), "median")],
            unit="s",
            description="Time from a leader's report to the status that answers it. An alert fires above the line.",
            limits=((5, "red"),),
        ),
        graph(
            "Reconciles, by result",
            [("sum by (result) (rate(pipetransformer_reconciles_total[$__rate_interval]))", "{{result}}")],
            unit="ops",
            description="Reconciles of jobs per second. Error: the operator failed. Unavailable: the API server did.",
        ),
        graph(
            "Turn and plan, p99",
            [(_quantile("0.99", "reconcile_seconds"), "turn"), (_quantile("0.99", "plan_seconds"), "plan alone")],
            unit="s",
            description="Time to reconcile a job, and time of the decision alone.",
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
            description="The API server's answers by code. Many 429s mean that it throttles the operator.",
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
            description="Time that 99 % of the operator's requests take at most, by verb.",
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
            "Age of watches",
            [("time() - pipetransformer_watch_opened_timestamp_seconds", "{{resource}}")],
            unit="s",
            description="Each watch is opened again every two minutes. One that grows older is stuck.",
            limits=((300, "red"),),
        ),
        graph(
            "Lag of the event loop",
            [
                (_quantile("0.99", "event_loop_lag_seconds"), "p99"),
                (_quantile("0.5", "event_loop_lag_seconds"), "median"),
            ],
            unit="s",
            description="How late the operator's event loop is. An alert fires if it is often later than the line.",
            limits=((1, "red"),),
        ),
        graph(
            "Days left of certificates",
            [
                (
                    "(pipetransformer_certificate_expiry_timestamp_seconds - time()) / 86400",
                    "{{certificate}} {{instance}}",
                )
            ],
            description="Days until the channel's certificates expire. The operator renews its own early.",
        ),
        graph(
            "Kueue answers",
            [("pipetransformer_kueue_answers", "{{instance}}")],
            description="1 while Kueue answers the operator. Empty for an operator that does not use Kueue.",
        ),
        graph(
            "Holds the lease",
            [("pipetransformer_leader", "{{instance}}")],
            description="1 for the leading operator, 0 for standbys. Exactly one operator leads.",
        ),
        graph(
            "Processor",
            [
                (
                    "rate(process_cpu_seconds_total[$__rate_interval]) and on (instance) pipetransformer_leader == 1",
                    "{{instance}}",
                )
            ],
            description="Processor time per second of the leading operator, in cores.",
        ),
        graph(
            "Memory",
            [("process_resident_memory_bytes and on (instance) pipetransformer_leader == 1", "{{instance}}")],
            unit="bytes",
            description="Resident memory of the leading operator.",
        ),
    )


def _quantile(quantile: str, name: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate(pipetransformer_{name}_bucket[$__rate_interval])))"
