"""What has become of an operation, in words: what it has lost, whom it waits for, and where to look."""

from __future__ import annotations

from collections.abc import Collection

from kvmpi.errors import VALUES_LOST, KVError, ServerLostError, names_in_words, ranks_in_words
from kvmpi.ps.asks import NOWHERE, SCHEDULER, Ask, Operation
from kvmpi.ps.reply import MAX_NAMED
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

_LOOK = "check that process and the network to it"


def lost_error(operation: Operation, why: str) -> ServerLostError:
    """What an operation ends with that nobody is left to answer."""
    return ServerLostError(f"{operation.label}: {why}; {VALUES_LOST}")


def as_kv_error(ask: Ask, error: Exception) -> KVError:
    """``error`` with the operation that it hit; a defect keeps its type in the message and its traceback as cause."""
    label = ask.operation.label
    if isinstance(error, KVError):
        wrapped: KVError = type(error)(f"{label}: {error}")
    else:
        wrapped = KVError(f"{label}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def explain(operation: Operation, greeted: Collection[int]) -> str:
    """Why an operation is not done in time; ``greeted``: the servers that know this client."""
    reasons = why_waiting(operation, greeted)
    why = "; ".join(reasons[:4]) + ("; ..." if len(reasons) > 4 else "")
    return f"{operation.label}: not done in {operation.timeout_s:.1f} s: {why}, or raise KVMPI_TIMEOUT_S"


def why_waiting(operation: Operation, greeted: Collection[int]) -> list[str]:
    """Whom an operation still waits for, and where to look. ``greeted``: the servers that know this client."""
    reasons = []
    open_asks = [ask for ask in operation.asks if not ask.ended]
    for peer in sorted({ask.peer for ask in open_asks}):
        asks = [ask for ask in open_asks if ask.peer == peer]
        if peer == NOWHERE:
            reasons.append("no server answers for it at present; look at the servers and the scheduler")
            continue
        name = "the scheduler" if peer == SCHEDULER else f"server {peer}"
        name += _which(operation, asks)
        missing = sorted({client for ask in asks for client in ask.missing or []})
        if missing:
            silent_s = {client: s for ask in asks for client, s in zip(ask.missing or [], ask.silent_s, strict=False)}
            silent = [client for client in missing if silent_s.get(client)]
            shown = names_in_words([f"{client} (silent for {silent_s[client]} s)" for client in silent])
            others = ranks_in_words(set(missing) - set(silent))
            shown = ", ".join(filter(None, (shown, others))) + (", ..." if len(missing) >= MAX_NAMED else "")
            reasons.append(f"{name} still waits for client {shown}; look at that client's workers")
        elif any(ask.accepted for ask in asks):
            reasons.append(f"{name} has accepted it and not answered; look at the other clients' workers")
        elif all(ask.sent_s is None and ask.part >= 0 for ask in asks) and peer not in greeted:
            reasons.append(f"not yet sent to {name}, which has not answered this client's Hello; {_LOOK}")
        elif all(ask.sent_s is None for ask in asks):
            reasons.append(f"not yet sent to {name}, which has not accepted what was sent before")
        elif any(ask.kind is m.Register for ask in asks):  # who joins is answered when all servers are there
            reasons.append(f"no answer from {name}: it still waits for servers (see what it says), is stopped or "
                           "cannot be reached; check it and the servers")  # fmt: skip
        else:
            reasons.append(f"no answer from {name}; {_LOOK}")
    return reasons


def _which(operation: Operation, asks: Collection[Ask]) -> str:
    """Which of the keys that are exchanged together ``asks`` are about; nothing where there is one."""
    if len(set(_keys(operation.asks))) < 2:
        return ""
    return f" (key {names_in_words([*map(repr, _keys(asks))], 4)})"


def _keys(asks: Collection[Ask]) -> list[Key]:
    return list(dict.fromkeys(ask.fields[0] for ask in asks if ask.kind in (m.Push, m.Pull)))
