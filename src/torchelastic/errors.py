"""Every exception torchelastic raises, and every exit code it ends with.

TorchElasticError
├── ConfigError            bad input: one sentence, what is wrong and what to do (exit 2)
│   ├── ProcessesError     start_processes cannot start these; also a RuntimeError
│   └── ProgramMissing     there is no such program; also a FileNotFoundError
├── RendezvousError
│   ├── RendezvousLost     the store cannot be reached any longer (exit 171)
│   ├── LeaseExpired       the store has given this node up
│   ├── NotEnoughNodes     fewer than min nodes for longer than allowed (exit 170)
│   ├── VoteOutdated       the job that this node had a vote in has been started again
│   ├── RendezvousRefused  the store answered, but this agent may not join it
│   ├── RendezvousClosedException, RendezvousTimeoutException, RendezvousNonRetryableError
│   │                      0.2's handlers: the job has ended; too few nodes; anything else
│   └── WireError          bytes that are not our protocol, or a message too large for it
│       └── TlsError       the other end speaks no TLS, or its certificate is not to be trusted
├── ChannelLost            a resident worker and its agent cannot talk any longer
├── CheckpointError        a checkpoint cannot be written or loaded
├── NonRetryableException  user code: trying again cannot help
├── JobClosed              the job has ended otherwise than by the end of its training
├── JobInterrupted         a signal asked this node to leave (exit 128 + signal)
├── SnapshotError          a snapshot cannot be kept, found or used
├── SpawnError             a worker process could not be started
├── StopException          user code: the training is done
├── TransferError          state from a peer cannot be read, or is too large to send
└── UnfitError             a worker has built another model than the others: it ends alone
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# From 128 on a scheduler may take the end for an interruption and start the job again.
EXIT_SIGNAL_BASE = 128
EXIT_NOT_ENOUGH_NODES = 170
EXIT_RENDEZVOUS_LOST = 171


class TorchElasticError(Exception):
    """Base of all errors of this package."""


class ConfigError(TorchElasticError, ValueError):
    """The user's input is wrong; the message says what to do about it."""


class ProcessesError(ConfigError, RuntimeError):
    """`start_processes` cannot start what it is asked for; 0.2's callers catch a RuntimeError."""


class ProgramMissing(ConfigError, FileNotFoundError):
    """There is no such program; callers of 0.2 and of subprocess catch a FileNotFoundError."""


class RendezvousError(TorchElasticError):
    """The nodes could not agree on a world."""


class RendezvousLost(RendezvousError):
    """The store that the nodes meet at is out of reach."""


class VoteOutdated(RendezvousError):
    """What this node has resumed is of an earlier job of the same id: it is to join anew."""


class RendezvousRefused(RendezvousError):
    """The store at the endpoint serves another job or speaks another protocol."""


class WireError(RendezvousError):
    """What came over a connection is not our protocol, or what is to go is too large for it."""


class TlsError(WireError):
    """No TLS comes about with the other end of a connection."""


class NotEnoughNodes(RendezvousError):
    """The job waited for nodes longer than it was allowed to."""


class RendezvousClosedException(RendezvousError):
    """0.2: the job has ended, and no world comes any more."""


class RendezvousTimeoutException(RendezvousError):
    """0.2: the nodes have not agreed on a world in time."""


class RendezvousNonRetryableError(RendezvousError):
    """0.2: the rendezvous cannot be reached, or refuses this node."""


class CheckpointError(TorchElasticError):
    """A checkpoint cannot be written or loaded; the message names it."""


class SnapshotError(TorchElasticError):
    """A snapshot cannot be kept, found or used; the message says why."""


class SpawnError(TorchElasticError):
    """A worker process could not be started."""


class LeaseExpired(RendezvousError):
    """The store has given this node up: it must stop its workers and join anew."""


class JobInterrupted(TorchElasticError):
    """A signal made this node leave the job before it was done."""


class TransferError(TorchElasticError):
    """State that came from a peer is not what peers send, or is too large to be sent."""


class UnfitError(TorchElasticError):
    """This worker's state is of another form than that of the training it came to."""


class JobClosed(TorchElasticError):
    """The job has ended otherwise than by the end of its training; the message says how."""


class ChannelLost(TorchElasticError):
    """A resident worker and its agent cannot talk to each other any longer."""


class StopException(TorchElasticError):
    """Raised by user code, in a step: the training is done, as at the end of the data."""


class NonRetryableException(TorchElasticError):
    """Raised by user code: trying again cannot help, the job is to end."""
