"""Thin wrappers of ZeroMQ sockets that carry messages. Nothing outside of kvmpi.wire imports zmq."""

from __future__ import annotations

import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq

from kvmpi.errors import ConfigError, ProtocolError
from kvmpi.wire import bundle, encoding, slips
from kvmpi.wire.addresses import address_of, is_loopback, listening
from kvmpi.wire.context import Context
from kvmpi.wire.encoding import encode
from kvmpi.wire.handshake import Handshake
from kvmpi.wire.malloc import give_memory_back
from kvmpi.wire.messages import Message
from kvmpi.wire.partner import Partner
from kvmpi.wire.private import check_folder
from kvmpi.wire.refusal import OtherVersionError, encode_refusal, explain
from kvmpi.wire.unread import Unread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Payload: TypeAlias = "npt.NDArray[Any]"
#: Below this size a copy into the message is cheaper than to lend the buffer: when it is free again, a thread is woken.
LEND_FROM_BYTES = 512 << 10
# Plain ints: joining pyzmq's enumerations anew for every frame takes longer than sending a small one.
_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
_LAST = int(zmq.NOBLOCK)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
#: As pyzmq's sockets have it before they look for arguments that only drafts of ZeroMQ know.
_send_frame: Callable[..., zmq.MessageTracker | None] = zmq.backend.Socket.send
#: Kernel buffers of Unix sockets: they hold a chunk or two, so that a sender is not woken for every few hundred KB.
#: Those of TCP the system makes as large as a connection can use, but only if nobody has set them.
_KERNEL_BUFFER_BYTES = 1 << 20
#: But within a host what TCP can use is more than the caches hold: of what is sent there, so much may be under way.
_LOOPBACK_SEND_BYTES = 512 << 10
_AS_THE_SYSTEM_HAS_IT = -1
#: Connections that the kernel holds until they are accepted; a thousand strangers at once must not fill it.
_BACKLOG = 4096
#: Messages of one peer that wait at a listener; the peer's others stay where they are.
_INBOX_MESSAGES = 32
#: So much may wait for a peer that does not read, where nobody says more.
_UNREAD_BYTES = 16 << 20
#: Messages taken from one of a listener's sockets before the other gets its turn.
_TURN = 8
_TCP, _IPC = b"t", b"i"
#: The routing id of a peer that takes bundles begins so.
_TAKES_BUNDLES = b"b"

_log = logging.getLogger(__name__)


def _milliseconds(seconds: float) -> int:
    """As libzmq takes them: 32 bits, and 0 would be for ever."""
    return min((1 << 31) - 1, max(1, int(1000 * seconds)))


def probe_pause_s(timeout_s: float) -> int:
    """Seconds between two probes of a TCP connection without traffic, where silence of ``timeout_s`` is a loss."""
    return max(1, int(timeout_s / 4))


def _open(context: Context[Any], kind: int, max_message_bytes: int, *, tcp: bool) -> zmq.Socket[Any]:
    opened: zmq.Socket[Any] = context.socket(kind)
    opened.linger = context.linger_ms
    opened.maxmsgsize = max_message_bytes
    opened.handshake_ivl = _milliseconds(context.config.handshake_s)
    # The window of the session bounds what is in flight; a second limit here could only drop or block.
    opened.sndhwm = 0
    opened.rcvhwm = 0
    if tcp:
        _keep_alive(opened, context.config.heartbeat_timeout_s)
    else:
        opened.sndbuf = opened.rcvbuf = _KERNEL_BUFFER_BYTES
    return opened


def _suit(opened: zmq.Socket[Any], endpoint: str) -> None:
    """Let the links that ``opened`` makes next be what a TCP endpoint wants."""
    address = address_of(endpoint)
    opened.ipv6 = ":" in address
    opened.sndbuf = _LOOPBACK_SEND_BYTES if is_loopback(address) else _AS_THE_SYSTEM_HAS_IT


def _keep_alive(opened: zmq.Socket[Any], timeout_s: float) -> None:
    """Let the system see to it that connections without traffic stay known on their way, and that broken ones end.

    Firewalls and address translators forget a connection that has been silent for minutes, as while all evaluate. What
    is sent over it from then on vanishes, and TCP alone tries again for a quarter of an hour. Not ZeroMQ's heartbeats:
    behind a large frame on a slow link they would be late, and an end to a link that works.
    """
    opened.tcp_keepalive = 1
    opened.tcp_keepalive_idle = opened.tcp_keepalive_intvl = probe_pause_s(timeout_s)
    # Of what is sent, too: the link is made anew, and the session says again what was under way.
    opened.tcp_maxrt = _milliseconds(timeout_s)


def _send(
    to: zmq.Socket[Any], route: bytes, header: bytes, payloads: Sequence[Payload], *, follow: bool = False,
    mark: bool = False,
) -> zmq.MessageTracker | None:  # fmt: skip
    """Send a message, to the peer at ``route`` if that is not empty. ``follow``: say when a payload that is lent has
    left; ``mark``: follow the header if need be.

    What came as a frame and nobody changes any more, as it is read-only, is not copied: the frame leaves once more.
    """
    tracker, left = None, len(payloads)
    if route:
        _send_frame(to, route, _MORE)
    if mark:
        frame = zmq.Frame(header, track=True, copy=False, copy_threshold=0)
        tracker = _send_frame(to, frame, _MORE if left else _LAST, False, True)
    else:
        _send_frame(to, header, _MORE if left else _LAST)
    for payload in payloads:
        left -= 1
        how, nbytes = _MORE if left else _LAST, payload.nbytes
        if nbytes >= LEND_FROM_BYTES:
            lent = _send_frame(to, payload.data, how, False, follow)
            tracker = lent if follow else tracker
        elif not payload.flags.writeable and (whole := _whole_frame(payload)) is not None:
            _send_frame(to, whole, how, False)
        else:
            _send_frame(to, payload.data if nbytes else b"", how)  # an array of length 0 has no memory
    return tracker


def _whole_frame(payload: Payload) -> zmq.Frame | None:
    """The frame that a payload came as, if it is all of it; see ``as_array``."""
    owner: Any = payload
    while (base := getattr(owner, "base", None)) is not None:
        owner = base
    frame = owner.obj if isinstance(owner, memoryview) else None
    return frame if isinstance(frame, zmq.Frame) and len(frame) == payload.nbytes else None


def _recv(source: zmq.Socket[Any]) -> tuple[bytes, list[memoryview]] | None:
    """The first frame of a message, and where the others are; None: there is no message."""
    if not int(source.getsockopt(_EVENTS)) & _POLLIN:  # takes a third of the time of zmq.Again
        return None
    frame = first = source.recv(_LAST, False)
    others: list[memoryview] = []
    while frame.more:
        frame = source.recv(_LAST, False)
        others.append(frame.buffer)
    return first.bytes, others


class Listener:
    """Hears many peers, and answers each by its route.

    It has a ROUTER socket for TCP, where peers must be members of the job, and one for Unix sockets, which lie in a
    private folder: encryption there would cost time and protect nothing. A route begins with the socket that it is of.
    Peers at Unix sockets may hand large payloads over in shared memory, and get them so.

    A peer that does not read its answers is not heard while many of them wait for it: it says again what matters.

    Args:
        name: what this process tells peers of another version that it is, for example "server 0".
    Attributes:
        hears: whether a peer, of whose answers so many bytes are here, is heard.
    """

    def __init__(self, context: Context[Any], max_message_bytes: int, name: str = "a process") -> None:
        self.hears: Callable[[bytes, int], bool] = lambda route, unread_bytes: unread_bytes <= _UNREAD_BYTES
        self._unread = Unread()
        self._unheard = 0
        self._flooded: set[bytes] = set()  # peers that were not heard, and still have not read
        self._context, self._max_message_bytes, self._name = context, max_message_bytes, name
        self._refused = {False: 0, True: 0}  # messages of another version, refusals
        self._sockets: dict[bytes, zmq.Socket[Any]] = {}
        self._turns: deque[tuple[bytes, zmq.Socket[Any]]] = deque()  # whose turn it is comes first
        self._left_of_turn = _TURN
        self._partners: dict[bytes, Partner] = {}
        self._rest: deque[tuple[bytes, Message, list[memoryview]]] = deque()  # of a bundle
        self.endpoints: list[str] = []

    @property
    def handles(self) -> list[zmq.Socket[Any]]:
        return list(self._sockets.values())

    def bind_tcp(self, host: str, port: int = 0) -> str:
        """Listen on ``tcp://host:port``; port 0 lets the system choose. Returns the endpoint.

        Args:
            host: an address, a name of this host, or the name of an interface.

        Raises:
            ConfigError: the address cannot be had, for example because the port is in use; or there are no keys.
        """
        return self._bind(_TCP, listening(host, port))

    def bind_ipc(self, path: str) -> str:
        """Listen on the Unix socket ``path``. Returns the endpoint.

        Raises:
            ConfigError: the folder of ``path`` is not private.
        """
        check_folder(os.path.dirname(path))
        return self._bind(_IPC, f"ipc://{path}")

    def _bind(self, kind: bytes, endpoint: str) -> str:
        router = self._router(kind)
        try:
            if kind == _TCP:
                _suit(router, endpoint)
            router.bind(endpoint)
        except zmq.ZMQError as error:
            reason = "the address is in use" if error.errno == zmq.EADDRINUSE else zmq.strerror(error.errno or 0)
            what_helps = {
                _TCP: "set KVMPI_HOST to an address of this host, and KVMPI_SCHEDULER_PORT to 0 or a port that is free",
                _IPC: "set TMPDIR to another folder",
            }
            raise ConfigError(f"cannot listen on {endpoint}: {reason}; {what_helps[kind]}") from None
        bound = str(router.getsockopt_string(zmq.LAST_ENDPOINT))
        self.endpoints.append(bound)
        return bound

    def _router(self, kind: bytes) -> zmq.Socket[Any]:
        router = self._sockets.get(kind)
        if router is None:
            router = _open(self._context, zmq.ROUTER, self._max_message_bytes, tcp=kind == _TCP)
            # A peer whose link broke comes back under the same name, maybe before this side has noticed.
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            router.backlog = _BACKLOG
            router.rcvhwm = _INBOX_MESSAGES
            if kind == _TCP:
                try:
                    self._context.secure_listener(router)
                except BaseException:
                    router.close()
                    raise
            self._sockets[kind] = router
            self._turns.append((kind, router))
        return router

    def send(self, route: bytes, message: Message, payloads: Sequence[Payload] = ()) -> None:
        """Send to the peer at ``route``; a peer that is gone is no error. Large payloads are lent, not copied.

        Raises:
            ProtocolError: the message cannot be encoded; nothing was sent.
        """
        self._post(route, encode(message), payloads)

    def send_all(
        self, route: bytes, messages: Sequence[bundle.Outgoing], reject: Callable[[Message, ProtocolError], None]
    ) -> None:
        """``send`` several messages to one peer, small ones together if it takes bundles.

        Args:
            reject: gets messages that cannot be encoded.
        """
        if len(messages) == 1:
            [(message, payloads)] = messages
            try:
                self.send(route, message, payloads)
            except ProtocolError as error:
                reject(message, error)
            return
        most_bytes = self._max_message_bytes if route[1:2] == _TAKES_BUNDLES else 0
        for header, payloads in bundle.gathered(messages, reject, most_bytes):
            self._post(route, header, payloads)

    def _post(self, route: bytes, header: bytes, payloads: Sequence[Payload]) -> None:
        router, partner = self._sockets.get(route[:1]), self._partners.get(route)
        if router is not None:
            if partner is not None:
                header, payloads = partner.pack(header, payloads)
            nbytes = len(header)
            for payload in payloads:
                nbytes += payload.nbytes
            tracker = _send(router, route[1:], header, payloads, follow=True, mark=self._unread.wants_mark(route))
            self._unread.add(route, nbytes, 1 + len(payloads), tracker)

    def recv(self) -> tuple[bytes, Message | ProtocolError, list[memoryview]] | None:
        """The next message and where it came from, or None. What is no message comes as a ``ProtocolError``.

        What is of another version does not come: its sender is told, and None says that there may be more.
        """
        if self._rest:
            return self._rest.popleft()
        while (received := self._next()) is not None:
            kind, name, frames = received
            route = kind + name
            if not frames:
                return route, ProtocolError("message without a header frame"), []
            header, payloads = bytes(frames[0]), frames[1:]
            try:
                if kind == _IPC and header.startswith(slips.BEGINNING):
                    slip, header = slips.decode(header)
                    payloads = self._take(route, slip, payloads)
                    if not header:
                        continue
                while not (heard := self.hears(route, self.unread_bytes(route))) and self._unread.await_left(route):
                    pass
                if not heard:
                    self._ignore(route)
                    continue
                parted = bundle.parted(header, payloads)
                if len(parted) > 1:
                    self._rest.extend([(route, *each) for each in parted[1:]])
                return route, *parted[0]
            except OtherVersionError as other:
                self._refuse(route, other)
                return None
            except ProtocolError as error:
                return route, error, []
        return None

    def take_rest(self) -> list[tuple[bytes, Message, list[memoryview]]]:
        """What has come together with the last message."""
        if not self._rest:
            return []
        rest = list(self._rest)
        self._rest.clear()
        return rest

    def unread_bytes(self, route: bytes) -> int:
        """What a peer has been sent and not read."""
        partner = self._partners.get(route)
        return self._unread.of(route) + (0 if partner is None else partner.lent_bytes)

    def _ignore(self, route: bytes) -> None:
        self._unheard += 1
        self._flooded.add(route)
        if self._unheard <= 10 or self._unheard % 10_000 == 0:  # a flood must not fill a disk
            _log.warning(
                "%s: too many answers wait for a peer, %d bytes here; its requests are dropped (%d so far)",
                self._name, self.unread_bytes(route), self._unheard,
            )  # fmt: skip

    def forget_gone(self) -> None:
        """Let go what was kept for peers that have ended; to be called now and then."""
        self._unread.forget_idle()
        for route in [route for route, partner in self._partners.items() if partner.gone()]:
            self._partners.pop(route).part()
        read = {route for route in self._flooded if not self.unread_bytes(route)}
        if read:
            self._flooded -= read
            self._context.give_back()
            give_memory_back()

    def _take(self, route: bytes, slip: slips.Slip, frames: list[memoryview]) -> list[memoryview]:
        """What a peer says about shared memory; the payloads of its message."""
        partner = self._partners.get(route)
        if isinstance(slip, slips.Offer):
            partner = self._new_partner(route)
        if partner is None:
            if not isinstance(slip, slips.Unknown):
                self._say(route, slips.Unknown())
            if isinstance(slip, slips.Parcel) and slip.blocks:
                raise ProtocolError("payloads in memory that this process has not mapped")
            return frames
        answer: slips.Slip | None = None
        match slip:
            case slips.Parcel():
                frames = partner.unpack(slip, frames)
                answer = partner.overdue()
            case slips.Unknown():
                self._partners.pop(route).part()
            case _:
                answer = partner.meet(slip)
        if answer is not None:
            self._say(route, answer)
        return frames

    def _new_partner(self, route: bytes) -> Partner | None:
        """For a peer that makes itself known, maybe again. Those who are gone are forgotten."""
        for old in [old for old, partner in self._partners.items() if old == route or partner.gone()]:
            self._partners.pop(old).part()
        partner = self._context.new_partner(self._max_message_bytes)
        if partner is not None:
            self._partners[route] = partner
        return partner

    def _say(self, route: bytes, slip: slips.Slip) -> None:
        _send(self._sockets[_IPC], route[1:], slips.encode(slip), ())

    def _refuse(self, route: bytes, other: OtherVersionError) -> None:
        """Tell a peer of another version, unless that is what it says, and the log."""
        if not other.refused:
            refusal = encode_refusal(encoding.PROTOCOL_VERSION, self._name)
            _send(self._sockets[route[:1]], route[1:], refusal, ())
        self._refused[other.refused] += 1
        so_far = self._refused[other.refused]
        if so_far <= 10 or so_far % 1000 == 0:  # a flood must not fill a disk
            why = explain(self._name, encoding.PROTOCOL_VERSION, other, "a process that has connected")
            _log.error("no conversation with a peer (%d so far): %s", so_far, why)

    def _next(self) -> tuple[bytes, bytes, list[memoryview]] | None:
        """From the sockets in turn, so that none waits for ever; but not to an idle one for every message."""
        if not self._left_of_turn:
            self._pass_turn()
        for _ in range(len(self._turns)):
            kind, router = self._turns[0]
            received = _recv(router)
            if received is not None:
                self._left_of_turn -= 1
                return kind, *received
            self._pass_turn()
        return None

    def _pass_turn(self) -> None:
        self._turns.rotate(-1)
        self._left_of_turn = _TURN

    def close(self) -> None:
        for router in self._sockets.values():
            router.close()
        while self._partners:
            self._partners.popitem()[1].part()


class Connection:
    """A DEALER socket: one connection to one listener, under the same route there when it breaks and is made anew.

    Args:
        name, peer: what this process and the listener are, for errors and for peers of another version.
        silence_s: after so long without a sign of life on TCP, the link is made anew. What was on its way is lost, but
            TCP alone tries again ever more rarely: as long after the end of a partition as that has lasted.
    Raises:
        ConfigError: the endpoint is malformed, its folder is not private, or there are no keys for TCP.
    """

    def __init__(
        self, context: Context[Any], endpoint: str, max_message_bytes: int, name: str = "a process",
        peer: str = "the listener", silence_s: float | None = None,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self._name, self._peer, self._max_message_bytes = name, peer, max_message_bytes
        self._has_refused = False
        self._handshake: Handshake | None = None
        self._partner: Partner | None = None
        self._rest: deque[tuple[Message, list[memoryview]]] = deque()  # of a bundle
        self._socket = _open(context, zmq.DEALER, max_message_bytes, tcp=endpoint.startswith("tcp://"))
        if silence_s is not None and endpoint.startswith("tcp://"):
            self._socket.heartbeat_ivl = self._socket.heartbeat_timeout = _milliseconds(silence_s / 2)
            self._socket.connect_timeout = _milliseconds(silence_s)
        self._socket.affinity = context.next_thread()
        # Without a name, a second link would be a stranger to the listener. Nobody can guess this one and take it over.
        self._socket.setsockopt(zmq.ROUTING_ID, _TAKES_BUNDLES + uuid.uuid4().bytes)
        try:
            self._connect(context, max_message_bytes)
        except BaseException:
            self.close()
            raise

    def _connect(self, context: Context[Any], max_message_bytes: int) -> None:
        path = self.endpoint.removeprefix("ipc://")
        if self.endpoint.startswith("tcp://"):
            context.secure_connection(self._socket)
            _suit(self._socket, self.endpoint)
            self._handshake = Handshake(self._socket, self.endpoint)
        elif path != self.endpoint and os.path.isabs(path):
            check_folder(os.path.dirname(path))
        else:
            raise ConfigError(f"cannot connect to {self.endpoint!r}: expected tcp://HOST:PORT or ipc:///PATH")
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {self.endpoint!r}: {error.strerror}") from None
        if self._handshake is None:
            self._partner = context.new_partner(max_message_bytes)
            self._introduce()

    def _introduce(self) -> None:
        """Offer the listener to hand payloads over in shared memory. Until it has agreed, they are frames."""
        if self._partner is not None:
            self._say(slips.encode(self._partner.offer(answer=True)))

    @property
    def is_near(self) -> bool:
        """Whether large payloads may go to the listener in shared memory, once it has agreed."""
        return self._partner is not None

    @property
    def shares(self) -> bool:
        """Whether large payloads go to the listener in shared memory."""
        return self._partner is not None and self._partner.shares

    @property
    def handles(self) -> list[zmq.Socket[Any]]:
        return [self._socket] if self._handshake is None else [self._socket, self._handshake.events]

    @property
    def raw(self) -> zmq.Socket[Any]:
        return self._socket

    @property
    def readable(self) -> bool:
        """Whether a message has come. To send one may take the notice of that."""
        return bool(self._rest or int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def close(self) -> None:
        if self._handshake is not None:
            self._handshake.close()
        self._socket.close()
        if self._partner is not None:
            self._partner.part()
            self._partner = None  # and its memory with it, unless something is read there still

    def send(self, message: Message, payloads: Sequence[Payload] = ()) -> None:
        """Send to the listener. A large payload is lent: leave it unchanged until it is answered.

        Raises:
            ProtocolError: the message cannot be encoded; nothing was sent.
        """
        self._post(encode(message), payloads)

    def send_all(self, messages: Iterable[bundle.Outgoing], reject: Callable[[Message, ProtocolError], None]) -> None:
        """``send`` several messages, small ones together.

        Args:
            reject: gets messages that cannot be encoded.
        """
        for header, payloads in bundle.gathered(messages, reject, self._max_message_bytes):
            self._post(header, payloads)

    def _post(self, header: bytes, payloads: Sequence[Payload]) -> None:
        if self._partner is not None:
            header, payloads = self._partner.pack(header, payloads)
        try:
            _send(self._socket, b"", header, payloads)
        except zmq.Again:
            # There is no limit to queues here, so it means that there is no link: libzmq gives one up for good when the
            # peer violates the protocol, as by a frame above our limit. Make another; connecting twice does nothing.
            try:
                self._socket.disconnect(self.endpoint)
            except zmq.ZMQError:
                pass  # forgotten already
            self._socket.connect(self.endpoint)
            if not self.shares:
                self._introduce()
            _send(self._socket, b"", header, payloads)

    def _say(self, frame: bytes) -> None:
        """Send a word that nobody needs where there is no link: the next message makes another, see ``send``."""
        try:
            _send(self._socket, b"", frame, ())
        except zmq.Again:
            pass

    def recv(self) -> tuple[Message, list[memoryview]] | None:
        """The next message with its payloads, or None.

        Raises:
            ProtocolError: what came is no message.
            OtherVersionError: the listener speaks another version; nothing else will ever come.
            AuthenticationError: the listener does not let this process in; only before it has done so once.
        """
        if self._rest:
            return self._rest.popleft()
        while (received := _recv(self._socket)) is not None:
            header, payloads = received
            if self._partner is not None and header.startswith(slips.BEGINNING):
                slip, header = slips.decode(header)
                payloads = self._take(self._partner, slip, payloads)
                if not header:
                    continue
            try:
                parted = bundle.parted(header, payloads)
                self._rest.extend(parted[1:])
                return parted[0]
            except OtherVersionError as other:
                self._refuse()
                why = explain(self._name, encoding.PROTOCOL_VERSION, other, f"{self._peer} at {self.endpoint}")
                raise OtherVersionError(why, other.version, other.who, refused=other.refused) from None
        if self._handshake is not None:
            self._handshake.check()
        return None

    def _refuse(self) -> None:
        """Say who this is, which a listener of another version cannot know."""
        if not self._has_refused:
            self._has_refused = True
            self._say(encode_refusal(encoding.PROTOCOL_VERSION, self._name))

    def _take(self, partner: Partner, slip: slips.Slip, frames: list[memoryview]) -> list[memoryview]:
        """What the listener says about shared memory; the payloads of its message."""
        answer: slips.Slip | None = None
        match slip:
            case slips.Parcel():
                frames = partner.unpack(slip, frames)
                answer = partner.overdue()
            case slips.Unknown():  # another process listens there now
                partner.part()
                self._introduce()
            case _:
                answer = partner.meet(slip)
        if answer is not None:
            self._say(slips.encode(answer))
        return frames


def as_array(payload: memoryview, dtype: np.dtype[Any]) -> Payload:
    """A payload frame as an array that keeps the frame alive; nothing else refers to its memory.

    Raises:
        ProtocolError: the frame's length is no multiple of the item size.
    """
    import numpy as np  # a scheduler, which has no payloads, starts without

    if payload.nbytes % dtype.itemsize:
        raise ProtocolError(f"payload of {payload.nbytes} bytes is no whole number of {dtype} items")
    return np.frombuffer(payload, dtype=dtype)
