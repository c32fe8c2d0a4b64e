"""The real things that fakes are compared with."""

from tests.cluster.conftest import _prerequisites, cluster

__all__ = ["_prerequisites", "cluster"]
