"""The few kinds of panels that both dashboards are made of."""

from collections.abc import Iterable

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import DashboardLink, DatasourceVariable, Row
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef

TAG = "pipetransformer"
DATA_SOURCE = "datasource"
#: (PromQL, legend); the legend may name labels as {{label}}.
Query = tuple[str, str]


def new_dashboard(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """An empty one, with the data source to choose and a link to its siblings."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-6h", "now")
        .with_variable(DatasourceVariable(DATA_SOURCE).label("Data source").type("prometheus"))
        .link(
            DashboardLink("PipeTransformer")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )


def section(board: dashboard.Dashboard, title: str, *panels: stat.Panel | timeseries.Panel) -> None:
    """Adds panels under a heading."""
    board.with_row(Row(title))
    for panel in panels:
        board.with_panel(panel)


def number(
    title: str, queries: Iterable[Query], *, unit: str = "short", description: str = "", name: bool = False
) -> stat.Panel:
    """The newest values; `name` shows legends instead of them."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(_source()).height(4).span(4)
    panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    panel.text_mode(BigValueTextMode.NAME if name else BigValueTextMode.AUTO)
    for target in _targets(queries, instant=True):
        panel.with_target(target)
    return panel


def graph(
    title: str,
    queries: Iterable[Query],
    *,
    unit: str = "short",
    description: str = "",
    stacked: bool = False,
    span: int = 8,
) -> timeseries.Panel:
    """Values over time."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(_source())
    panel.height(8).span(span).axis_soft_min(0).fill_opacity(20 if stacked else 5)
    panel.legend(
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for target in _targets(queries, instant=False):
        panel.with_target(target)
    return panel


def _targets(queries: Iterable[Query], *, instant: bool) -> Iterable[prometheus.Dataquery]:
    for index, (expression, legend) in enumerate(queries):
        target = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + index))
        yield target.instant() if instant else target.range()


def _source() -> DataSourceRef:
    return DataSourceRef(type_val="prometheus", uid=f"${{{DATA_SOURCE}}}")
