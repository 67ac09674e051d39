"""Several processes, often on several hosts, that run one program together.

Every process runs the same command and the same loop; each drives its own devices. What must not differ between them
(how many updates come next, whether to stop) is agreed on; files are written by the first process alone.
"""

import dataclasses
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from pqn_eqx.errors import UserError, require, require_at_least
from pqn_eqx.sharding import everywhere, place_own

SLURM_TASKS, OPEN_MPI_TASKS = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """Processes that train together. Within `srun` and `mpirun` they find each other; elsewhere say how."""

    coordinator: str | None = None
    """Address of the first process, HOST:PORT, for processes started by hand."""
    num_processes: int | None = None
    """How many processes there are; with coordinator."""
    process_id: int | None = None
    """Which of them this is, from 0; with coordinator."""
    heartbeat_timeout: int = 30
    """Seconds without a sign of life after which a process counts as dead, and the others end."""

    def __post_init__(self):
        given = (self.coordinator, self.num_processes, self.process_id)
        require(
            all(value is None for value in given) or all(value is not None for value in given),
            f"hosts.coordinator, hosts.num_processes and hosts.process_id belong together: give all three, or none; "
            f"got {', '.join(map(str, given))}.",
        )
        if self.num_processes is not None and self.process_id is not None:
            require_at_least(1, **{"hosts.num_processes": self.num_processes})
            require(
                0 <= self.process_id < self.num_processes,
                f"hosts.process_id must lie in [0, num_processes), got {self.process_id} of {self.num_processes}.",
            )
        require_at_least(5, **{"hosts.heartbeat_timeout": self.heartbeat_timeout})

    def connect(self) -> None:
        """Join the other processes, where there are any; before anything else is asked of JAX.

        Raises `UserError` where they cannot be reached.
        """
        launched_by = next((name for name in (SLURM_TASKS, OPEN_MPI_TASKS) if int(os.environ.get(name, 1)) > 1), None)
        if self.coordinator is None and launched_by is None:
            return
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                heartbeat_timeout_seconds=self.heartbeat_timeout,
            )
        except (RuntimeError, ValueError) as error:
            where = f"hosts.coordinator {self.coordinator}" if self.coordinator else f"{launched_by} is set"
            raise UserError(
                f"{where}, but the processes did not come together: {error}. Give --hosts.coordinator HOST:PORT, "
                f"--hosts.num-processes and --hosts.process-id to each."
            ) from error


def is_alone() -> bool:
    """Whether there is no other process."""
    return jax.process_count() == 1


def writes_files() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def on_first(function: Callable[[], None]) -> None:
    """`function()` on the first process; where it fails there, all fail. Here the processes wait for each other."""
    error: Exception | None = None
    if writes_files():
        try:
            function()
        except Exception as raised:
            error = raised
    if not is_alone() and multihost_utils.broadcast_one_to_all(np.asarray(error is not None)) and error is None:
        raise UserError("The first process stopped; it says why.")
    if error is not None:
        raise error


def from_first(text: str) -> str:
    """What the first process gave. Here the processes wait for each other."""
    if is_alone():
        return text
    room = 4096
    encoded = np.frombuffer(text.encode().ljust(room)[:room], np.uint8)
    return bytes(multihost_utils.broadcast_one_to_all(encoded)).decode().rstrip()


def leave(status: int) -> None:
    """End this process after an error, at once where there are others: they may be waiting for it, and need not."""
    if is_alone():
        return
    if sys.exc_info()[0] is not None and not isinstance(sys.exc_info()[1], UserError):
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all processes do alike."""

    stop: bool
    save: bool
    """Make a checkpoint at the end of the log interval."""
    num_updates: int
    """Turns of the loop over updates in the next chunk."""
    num_eval_steps: int
    """Steps of an evaluation in the next piece of it."""


class Agreement:
    """One decision of all processes: stop as soon as any of them wants to, and keep the pace of the first.

    Votes are cast on the devices, behind the work that was dispatched before, so that asking makes nobody wait. A
    process that is alone decides for itself, at any time.
    """

    def __init__(self, mesh: Mesh, wish: Callable[[], Decision]):
        self.mesh, self.wish = mesh, wish
        self.heard = wish()
        self.asked: deque[jax.Array] = deque()
        self.gather = everywhere(mesh)

    @property
    def decision(self) -> Decision:
        """What was agreed last."""
        return self.wish() if is_alone() else self.heard

    def ask(self) -> None:
        """Cast this process's vote."""
        if not is_alone():
            vote = np.asarray(dataclasses.astuple(self.wish()), np.int32)
            leads = np.asarray([jax.process_index() == 0], np.int32)
            self.asked.append(self.gather(place_own(np.concatenate([leads, vote]), self.mesh)))

    def hear(self) -> None:
        """Wait for the votes that were asked for first and have not been heard, and decide by them."""
        if not is_alone():
            votes = jax.device_get(self.asked.popleft())
            first = votes[votes[:, 0] == 1][0]
            self.heard = Decision(bool(votes[:, 1].any()), bool(first[2]), int(first[3]), int(first[4]))
