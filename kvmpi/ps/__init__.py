"""The parameter server: scheduler, servers, and the master's side of the conversation with them."""

from kvmpi.ps.client import PsClient
from kvmpi.ps.embedded import EmbeddedJob
from kvmpi.ps.landing import Landing
from kvmpi.ps.placement import Placement
from kvmpi.ps.row_chunks import ArrivingRows
from kvmpi.ps.steps import Turn, finds_position

__all__ = ["ArrivingRows", "EmbeddedJob", "Landing", "Placement", "PsClient", "Turn", "finds_position"]
