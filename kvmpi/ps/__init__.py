"""The parameter server: scheduler, servers, and the master's side of the conversation with them."""

from kvmpi.ps.client import PsClient
from kvmpi.ps.embedded import EmbeddedJob
from kvmpi.ps.landing import Landing
from kvmpi.ps.placement import Placement

__all__ = ["EmbeddedJob", "Landing", "Placement", "PsClient"]
