"""How peers of different versions tell each other so: one frame that has no version, and that all of them understand.

Whoever listens answers a header of another version with a refusal. Whoever has connected answers what it cannot read,
a refusal or a header, with one of its own, once, and gives up. A listener never answers a refusal, so there is an end.

A refusal is one frame: the magic, a byte 0, the version of its sender, and UTF-8 text that says who that is.
"""

from __future__ import annotations

import platform

from kvmpi.errors import ProtocolError

MAGIC = b"KVM"
#: In the place of the version; so no version has this number.
REFUSAL = 0
_MAX_TEXT = 300


class OtherVersionError(ProtocolError):
    """The peer speaks another version, or says that this process does.

    Attributes:
        version: the peer's; 0 if it does not say.
        who: how the peer calls itself; empty if this is no refusal, or an empty one.
        refused: the peer knows already.
    """

    def __init__(self, text: str, version: int = 0, who: str = "", *, refused: bool = False) -> None:
        super().__init__(text)
        self.version, self.who, self.refused = version, who, refused


def describe(name: str) -> str:
    """What a refusal says about its sender, this process: ``name``, where it runs, and what is installed there."""
    from importlib.metadata import PackageNotFoundError, version  # which takes long to load, and is seldom needed

    try:
        release = version("kvmpi")
    except PackageNotFoundError:
        release = "of no release"
    return f"{name} on {platform.node()} (kvmpi {release})"


def encode_refusal(spoken: int, name: str) -> bytes:
    """The frame with which ``name`` refuses a peer, because it speaks version ``spoken`` and the peer another."""
    return MAGIC + bytes([REFUSAL, spoken]) + describe(name).encode(errors="replace")[:_MAX_TEXT]


def other_version(header: bytes, spoken: int) -> OtherVersionError:
    """What is the matter with a header that begins with the magic, and not with version ``spoken``."""
    if header[3] != REFUSAL:
        text = f"protocol version {header[3]:02x}, this process speaks {spoken:02x}"
        return OtherVersionError(text, header[3])
    theirs = header[4] if len(header) > 4 else 0
    who = "".join(c if c.isprintable() else "?" for c in header[5 : 5 + _MAX_TEXT].decode(errors="replace"))
    text = f"refused by {who}, which speaks protocol version {theirs:02x}, this process {spoken:02x}"
    return OtherVersionError(text, theirs, who, refused=True)


def explain(name: str, spoken: int, other: OtherVersionError, peer: str) -> str:
    """The error for users, at either end. ``peer`` is what this process takes the other for."""
    them = f"{peer}, which calls itself {other.who}," if other.who else peer
    return (
        f"{describe(name)} speaks version {spoken} of the protocol, {them} speaks version "
        f"{other.version or 'unknown'}; install the same version of kvmpi on all hosts"
    )
