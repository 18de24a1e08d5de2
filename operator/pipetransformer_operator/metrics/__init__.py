"""What Prometheus sees of the operator. Series of a job are read at each scrape, so they end with the job."""

from .operator import Metrics

__all__ = ["Metrics"]
