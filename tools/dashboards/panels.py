"""The kinds of panels in both dashboards."""

from collections.abc import Iterable, Sequence

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    DashboardLink,
    DatasourceVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.models.common import (
    BigValueTextMode,
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "pipetransformer"
DATA_SOURCE = "datasource"
#: (PromQL, legend). The legend may name labels as {{label}}.
Query = tuple[str, str]
#: (title of a column, unit, PromQL). Without a title only the labels of the values are shown.
Column = tuple[str, str, str]
#: (lowest value, colour) in increasing order. Values below the first are good.
Limits = Sequence[tuple[float, str]]


def new_dashboard(uid: str, title: str, description: str) -> dashboard.Dashboard:
    """Returns an empty dashboard: a choice of the data source, links to other dashboards, one crosshair."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
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


Panel = stat.Panel | timeseries.Panel | table.Panel


def section(board: dashboard.Dashboard, title: str, *panels: Panel) -> None:
    """Adds panels under a heading."""
    board.with_row(Row(title))
    for panel in panels:
        board.with_panel(panel)


def number(
    title: str,
    queries: Iterable[Query],
    *,
    description: str,
    unit: str = "short",
    limits: Limits = (),
    name: bool = False,
) -> stat.Panel:
    """Shows the newest values, or with `name` their legends."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(source()).height(4).span(4)
    panel.reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    panel.text_mode(BigValueTextMode.NAME if name else BigValueTextMode.AUTO)
    panel.thresholds(_thresholds(limits))
    for target in _targets(queries, instant=True):
        panel.with_target(target)
    return panel


def graph(
    title: str,
    queries: Iterable[Query],
    *,
    description: str,
    unit: str = "short",
    limits: Limits = (),
    stacked: bool = False,
    span: int = 8,
) -> timeseries.Panel:
    """Shows values over time, with limits as dashed lines."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(source())
    panel.height(8).span(span).axis_soft_min(0).fill_opacity(20 if stacked else 5)
    panel.legend(
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    if limits:
        panel.thresholds(_thresholds(limits))
        panel.thresholds_style(GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED))
    for target in _targets(queries, instant=False):
        panel.with_target(target)
    return panel


def rows(title: str, columns: Sequence[Column], *, description: str, link: tuple[str, str]) -> table.Panel:
    """Shows one row for each set of labels, with a link. Its title and URL may name fields of the row."""
    panel = table.Panel().title(title).description(description).unit("short").datasource(source()).height(9).span(24)
    for target in _targets(((expression, "") for _, _, expression in columns), instant=True):
        panel.with_target(target.format(PromQueryFormat.TABLE))
    values = {f"Value #{_letter(index)}": column for index, (column, _, _) in enumerate(columns)}
    hidden = {"Time": True} | {value: True for value, column in values.items() if not column}
    shown = {value: column for value, column in values.items() if column}
    panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    options = {"excludeByName": hidden, "renameByName": shown}
    panel.with_transformation(DataTransformerConfig(id_val="organize", options=options))
    for column, unit, _ in columns:
        panel.override_by_name(column, [DynamicConfigValue(id_val="unit", value=unit)])
    panel.data_links([DashboardLink(link[0]).url(link[1])])
    return panel


def annotation(name: str, colour: str, expression: str) -> AnnotationQuery:
    """Returns marks on graphs at times where the expression has a value."""
    return AnnotationQuery().name(name).datasource(source()).enable(True).icon_color(colour).expr(expression)


def _thresholds(limits: Limits) -> ThresholdsConfig:
    steps = [Threshold(value=None, color="green"), *(Threshold(value=value, color=colour) for value, colour in limits)]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _targets(queries: Iterable[Query], *, instant: bool) -> Iterable[prometheus.Dataquery]:
    for index, (expression, legend) in enumerate(queries):
        target = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(_letter(index))
        yield target.instant() if instant else target.range()


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def source() -> DataSourceRef:
    """The data source that the user chose."""
    return DataSourceRef(type_val="prometheus", uid=f"${{{DATA_SOURCE}}}")
