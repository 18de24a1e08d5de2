"""Grafana dashboards as code. `python -m tools.dashboards` writes the JSON that the chart installs."""
