"""The client library: talk to a cluster, or start one."""

from pdactors.client.blocking import Client
from pdactors.client.client import AsyncClient, Generation
from pdactors.client.cluster import Cluster, launch

__all__ = ["AsyncClient", "Client", "Cluster", "Generation", "launch"]
