"""A switch of a ``NetLab`` that does to packets what real networks do. ``python bad_switch.py PORTS``, where they are.

It takes the place of the bridge: every frame passes through this process. Standard input is lines of JSON with what
holds from then on; each is answered by a line with how often which thing has happened since the line before. Not netem
and nft, which are modules and programs that many machines lack.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import json
import random
import select
import socket
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, fields

_IGNORE_OUTGOING = 23  # PACKET_IGNORE_OUTGOING of Linux
_SIOCETHTOOL = 0x8946
#: Commands of ETHTOOL that leave segments and checksums to the device: GRO, GSO, TSO, checksums sent and received.
_OFFLOADS = (0x2C, 0x24, 0x1F, 0x17)
_IPV4, _TCP = 0x0800, 6
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16


@dataclass
class Conditions:
    """What happens to frames that come in at a port, or at all of them.

    Attributes:
        delay_ms, jitter_ms: of each frame, which may so overtake others.
        loss, duplicates, corruption: probabilities; of corruption, that a bit is not as it was sent.
        kilobits_per_s, queue_bytes: the rate; what finds more bytes in the queue is dropped. 0: no limit.
        mtu: longer packets vanish, and nobody is told. 0: none do.
        idle_s: packets of a TCP connection that has been silent for longer vanish, as at a firewall that has forgotten
            it; 0: never.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    duplicates: float = 0.0
    corruption: float = 0.0
    kilobits_per_s: float = 0.0
    queue_bytes: int = 1 << 20
    mtu: int = 0
    idle_s: float = 0.0


class Switch:
    """The ports, what happens at each, and the frames that are under way."""

    def __init__(self, num_ports: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._at = [Conditions() for _ in range(num_ports)]
        self._free_s = [0.0] * num_ports  # when the queue of a port is empty
        self._ports: list[socket.socket] = []
        for i in range(num_ports):
            port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            port.setsockopt(263, _IGNORE_OUTGOING, 1)
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            port.bind((f"port{i}", 3))
            port.setblocking(False)
            self._ports.append(port)
        self._port_of: dict[bytes, int] = {}
        self._seen_s: dict[tuple[bytes, bytes], float] = {}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self.counts: Counter[str] = Counter()

    def change(self, words: dict[str, object]) -> None:
        """Conditions at port ``port``, or at all; those that are not named are as they were at first.

        ``forget``: as a firewall that was started anew: what goes on is not known to it.
        """
        port = words.pop("port", None)
        if words.pop("forget", False):
            self._seen_s.clear()
        if unknown := words.keys() - {field.name for field in fields(Conditions)}:
            raise ValueError(f"no conditions: {unknown}")
        for i in range(len(self._at)) if port is None else [int(str(port))]:
            self._at[i] = Conditions(**words)  # type: ignore[arg-type]

    def serve(self) -> None:
        """Until the end of standard input."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        by_fd = {port.fileno(): i for i, port in enumerate(self._ports)}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while True:
            wait_s = self._under_way[0][0] - time.monotonic() if self._under_way else 1.0
            for fd, _ in poll.poll(max(0.0, wait_s * 1e3)):
                if fd in by_fd:
                    self._take(by_fd[fd])
                    continue
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                self.change(json.loads(line))
                print(json.dumps(self.counts), flush=True)
                self.counts.clear()
            now_s = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now_s:
                _, _, to, frame = heapq.heappop(self._under_way)
                try:
                    self._ports[to].send(frame)
                except OSError:
                    self.counts["not sent"] += 1  # the buffer is full, or the port down

    def _take(self, port: int) -> None:
        for _ in range(64):
            try:
                frame = self._ports[port].recv(65536)
            except OSError:
                return
            self._port_of[frame[6:12]] = port
            to = self._port_of.get(frame[:6])
            for other in range(len(self._ports)) if to is None else [to]:
                if other != port:
                    self._pass(port, other, frame)

    def _pass(self, port: int, to: int, frame: bytes) -> None:
        at, now_s, chance = self._at[port], time.monotonic(), self._random.random
        self.counts["frames"] += 1
        if at.mtu and len(frame) - 14 > at.mtu:
            self.counts["too long"] += 1
            return
        if at.idle_s and self._is_forgotten(frame, now_s, at.idle_s):
            self.counts["forgotten"] += 1
            return
        if at.loss and chance() < at.loss:
            self.counts["lost"] += 1
            return
        if at.corruption and chance() < at.corruption:
            self.counts["corrupted"] += 1
            place = self._random.randrange(14, len(frame))
            frame = frame[:place] + bytes([frame[place] ^ (1 << self._random.randrange(8))]) + frame[place + 1 :]
        leaves_s = now_s
        if at.kilobits_per_s:
            rate = at.kilobits_per_s * 125.0
            begins_s = max(now_s, self._free_s[port])
            if (begins_s - now_s) * rate > at.queue_bytes:
                self.counts["no room"] += 1
                return
            leaves_s = self._free_s[port] = begins_s + len(frame) / rate
        for _ in range(1 + (at.duplicates > 0 and chance() < at.duplicates)):
            self._number += 1
            comes_s = leaves_s + (at.delay_ms + chance() * at.jitter_ms) / 1e3
            heapq.heappush(self._under_way, (comes_s, self._number, to, frame))

    def _is_forgotten(self, frame: bytes, now_s: float, idle_s: float) -> bool:
        if struct.unpack_from("!H", frame, 12)[0] != _IPV4 or frame[23] != _TCP:
            return False
        tcp = 14 + 4 * (frame[14] & 15)
        one, other = frame[26:30] + frame[tcp : tcp + 2], frame[30:34] + frame[tcp + 2 : tcp + 4]
        flow, flags = (min(one, other), max(one, other)), frame[tcp + 13]
        known = now_s - self._seen_s.get(flow, -1e9) <= idle_s
        if known or flags & (_SYN | _ACK) == _SYN:
            self._seen_s[flow] = now_s
            return False
        return True


def _turn_off(interface: str) -> None:
    """Have the kernel send what would be sent on a wire: frames that fit it, with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), value.buffer_info()[0]))


if __name__ == "__main__":
    if not sys.argv[1].isdecimal():
        _turn_off(sys.argv[1])
        sys.exit()
    switch = Switch(int(sys.argv[1]), 7)
    print("ready", flush=True)
    switch.serve()
