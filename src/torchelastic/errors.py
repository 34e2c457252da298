"""Every exception that torchelastic raises, and every exit code.

TorchElasticError
├── ConfigError            bad input: one sentence, what is wrong and what to do (exit 64)
│   ├── KubernetesError    a Kubernetes cluster refuses a request, or cannot be reached
│   └── ProgramMissing     program not found; also a FileNotFoundError
├── RendezvousError
│   ├── RendezvousLost     the store became unreachable (exit 171)
│   ├── LeaseExpired       the store considers this node failed
│   ├── NotEnoughNodes     fewer than min nodes for longer than allowed (exit 170)
│   ├── VoteOutdated       the job in which this node had a vote was started again
│   ├── RendezvousRefused  the store rejected this agent
│   ├── RendezvousClosedException, RendezvousTimeoutException, RendezvousNonRetryableError
│   │                      0.2's handlers: the job has ended; too few nodes; anything else
│   └── WireError          bytes that are not our protocol, or a message that is too large
│       └── TlsError       the peer does not speak TLS, or its certificate is not trusted
├── ChannelLost            an in-process worker and its agent lost their connection
├── CheckpointError        a checkpoint cannot be written or loaded
├── NonRetryableException  user code: a retry cannot help
│   └── JobClosed          the job ended before its training was done
├── JobInterrupted         a signal asked this node to leave (exit 128 + signal)
├── OtherBitsError         a worker computes other bits than the others: its node is held out
├── SnapshotError          a snapshot cannot be stored, found or used
├── SpawnError             a worker process could not be started
├── StopException          user code: the training is done
├── TransferError          state from a peer cannot be read, or is too large to send
└── UnfitError             a worker's model differs from that of the others: only it ends
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
# EX_USAGE of sysexits.h: bad input, or an error of the script that no other start can fix. A
# scheduler should not start the job again.
EXIT_USAGE = 64
#: The job itself failed: not because of a signal or a lack of nodes.
FAILED = (EXIT_FAILED, EXIT_USAGE)
# A scheduler may treat codes from 128 on as an interruption and start the job again.
EXIT_SIGNAL_BASE = 128
EXIT_NOT_ENOUGH_NODES = 170
EXIT_RENDEZVOUS_LOST = 171


class TorchElasticError(Exception):
    """Base class of all errors of this package."""


class ConfigError(TorchElasticError, ValueError):
    """The user's input is wrong; the message says what to do about it."""


class KubernetesError(ConfigError):
    """A request to a Kubernetes cluster failed; `status` is 0 if there was no answer."""

    def __init__(self, message: str, status: int, reason: str = "") -> None:
        super().__init__(message)
        #: The status of HTTP, and the reason that the API gives, such as `AlreadyExists`.
        self.status, self.reason = status, reason


class ProgramMissing(ConfigError, FileNotFoundError):
    """Program not found; callers of 0.2 and of subprocess catch FileNotFoundError."""


class RendezvousError(TorchElasticError):
    """The nodes could not agree on a world."""


class RendezvousLost(RendezvousError):
    """The store of the rendezvous is unreachable."""


class VoteOutdated(RendezvousError):
    """This node resumed the vote of an earlier job with the same id; it must join again."""


class RendezvousRefused(RendezvousError):
    """The store at the endpoint serves another job or speaks another protocol."""


class WireError(RendezvousError):
    """Received bytes are not our protocol, or a message is too large to send."""


class TlsError(WireError):
    """The TLS handshake with the peer failed."""


class NotEnoughNodes(RendezvousError):
    """The job waited for nodes longer than allowed."""


class RendezvousClosedException(RendezvousError):
    """0.2: the job has ended; there will be no further world."""


class RendezvousTimeoutException(RendezvousError):
    """0.2: the nodes did not agree on a world in time."""


class RendezvousNonRetryableError(RendezvousError):
    """0.2: the rendezvous is unreachable or rejects this node."""


class CheckpointError(TorchElasticError):
    """A checkpoint cannot be written or loaded; the message names it."""


class SnapshotError(TorchElasticError):
    """A snapshot cannot be stored, found or used; the message says why."""


class SpawnError(TorchElasticError):
    """A worker process could not be started."""


class LeaseExpired(RendezvousError):
    """The store considers this node failed: it must stop its workers and join again."""


class JobInterrupted(TorchElasticError):
    """A signal made this node leave the job before it was done."""


class TransferError(TorchElasticError):
    """State received from a peer is invalid, or state is too large to send."""


class UnfitError(TorchElasticError):
    """This worker's state does not match the state of the training it joined."""


class OtherBitsError(TorchElasticError):
    """This worker computes other bits than the other workers: it ends, and is replaced. Its node is
    held out if it has just joined, or the second time (`rendezvous.suspects`)."""


class ChannelLost(TorchElasticError):
    """An in-process worker and its agent lost their connection."""


class StopException(TorchElasticError):
    """Raised by user code in a step: the training is done, as at the end of the data."""


class NonRetryableException(TorchElasticError):
    """Raised by user code: a retry cannot help; end the job."""


class JobClosed(NonRetryableException):
    """The job ended before its training was done, by a time-out for example; the message says why.

    As in 0.1, where a rendezvous that timed out could not be retried.
    """


def exitcode_of(error: Exception) -> int:
    """Return the exit code of an agent that this error ended."""
    return EXIT_USAGE if isinstance(error, ConfigError | RendezvousRefused) else EXIT_FAILED
