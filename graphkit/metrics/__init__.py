"""Metrics of runners and engines for Prometheus. Needs the extra ``metrics``."""

from graphkit.metrics.prometheus import PrometheusCollector

__all__ = ["PrometheusCollector"]
