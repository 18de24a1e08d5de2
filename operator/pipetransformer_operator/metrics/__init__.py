"""What Prometheus sees of the operator. Per-job series come from a live collector, so they vanish with their job."""

from .operator import Metrics

__all__ = ["Metrics"]
