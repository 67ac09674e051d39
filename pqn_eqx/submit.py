"""Training on a SLURM cluster: ``python -m pqn_eqx.submit --nodes 16 --gpus-per-node 4 ... -- PRESET [flags]``.

What stands after ``--`` is a command line of `pqn_eqx.train`. One process is started for each GPU (for each node
where there is none); they find each other through SLURM. A job that is told to make room saves, is queued again and
goes on where it was. Built on submitit.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from pqn_eqx.command_line import parse
from pqn_eqx.errors import ConfigError, UserError, require, require_at_least
from pqn_eqx.packages import import_or_explain
from pqn_eqx.run_directory import CONFIG, default_run_directory
from pqn_eqx.train import REQUEUE
from pqn_eqx.train import main as train

PROGRAM = "python -m pqn_eqx.submit"


@dataclasses.dataclass(frozen=True)
class SubmitConfig:
    """A job on a cluster, or on this machine to try it."""

    nodes: int = 1
    """Nodes of the job."""
    gpus_per_node: int = 0
    """GPUs, and so processes, on each node; 0 runs one process a node, on its CPUs."""
    cpus_per_task: int = 8
    """CPU cores of each process."""
    mem_gb: float | None = None
    """Memory of each node in GB; default: the cluster's."""
    minutes: int = 60
    """Time limit of the job."""
    partition: str | None = None
    """SLURM's partition."""
    account: str | None = None
    """SLURM's account."""
    qos: str | None = None
    """SLURM's quality of service."""
    constraint: str | None = None
    """SLURM's constraint on nodes, such as h100."""
    grace_seconds: int = 120
    """Seconds before its time limit at which the job is told to save and to queue again."""
    setup: tuple[str, ...] = ()
    """Shell commands before the processes start: "module load cuda"."""
    name: str = "pqn_eqx"
    """Name of the job."""
    folder: Path = Path("jobs")
    """Where submitit keeps logs and pickles, one set for each job; must be visible to every node."""
    cluster: Literal["slurm", "local"] = "slurm"
    """Where to run: through sbatch, or as a process on this machine, whose end is waited for."""
    print: bool = False
    """Print the batch script and submit nothing; needs no cluster."""

    def __post_init__(self):
        require_at_least(1, nodes=self.nodes, cpus_per_task=self.cpus_per_task, minutes=self.minutes)
        require_at_least(0, gpus_per_node=self.gpus_per_node)
        require(
            self.cluster == "slurm" or self.nodes == self.tasks_per_node == 1,
            f"cluster local is one process on this machine; got {self.nodes} nodes x {self.tasks_per_node} processes.",
        )

    @property
    def tasks_per_node(self) -> int:
        return max(1, self.gpus_per_node)

    def parameters(self) -> dict[str, Any]:
        """As submitit's parameters for SLURM."""
        given = {
            "job_name": self.name,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus_per_task,
            "mem": None if self.mem_gb is None else f"{self.mem_gb:g}GB",
            "time": self.minutes,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "setup": list(self.setup) or None,
            "signal_delay_s": self.grace_seconds,
            "additional_parameters": {"requeue": True},
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """What each process of the job runs, at first and whenever the job is queued again; pickled by submitit."""

    arguments: tuple[str, ...]
    run_directory: Path

    def command_line(self) -> list[str]:
        """A new run, or the one that is there already."""
        if (self.run_directory / CONFIG).exists():
            return ["--resume", str(self.run_directory)]
        return [*self.arguments, "--run-dir", str(self.run_directory)]

    def __call__(self) -> int:
        status = train(self.command_line())
        if status == REQUEUE and os.environ.get("SLURM_PROCID", "0") == "0" and "SLURM_JOB_ID" in os.environ:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        elif status not in (0, REQUEUE):
            raise RuntimeError(f"Training ended with status {status}; its output says why.")
        return status


def submit(config: SubmitConfig, arguments: Sequence[str], run_directory: Path) -> int:
    """Submit a training run; the exit status. Raises `UserError` where the cluster does not take it."""
    # Importing submitit configures logging anew, which closes the handlers that others in this process have set up.
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    # The signal that SLURM sends before the end: one that the training listens to.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"
    submitit = import_or_explain("submitit", extra="slurm", field="submit")
    job = TrainJob(tuple(arguments), run_directory.resolve())
    if config.cluster == "local":
        executor = submitit.LocalExecutor(config.folder)
        executor.update_parameters(timeout_min=config.minutes)
        return _wait(executor.submit(job))
    from submitit.slurm.slurm import SlurmExecutor

    class AnywhereExecutor(SlurmExecutor):
        """Makes batch scripts without a cluster, too; submitit has no public way to ask for one."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    try:
        executor = (AnywhereExecutor if config.print else SlurmExecutor)(config.folder)
        executor.update_parameters(**config.parameters())
        if config.print:
            print(executor._make_submission_file_text(executor._submitit_command_str, "job"))
            print(f"# which runs, in every process: python -m pqn_eqx.train {' '.join(job.command_line())}")
            return 0
        submitted = executor.submit(job)
    except (RuntimeError, OSError) as error:
        raise UserError(f"The job was not submitted: {error} To try it without a cluster: --cluster local.") from error
    print(f"Submitted job {submitted.job_id}; its output: {submitted.paths.stdout}")
    return 0


def _wait(job: Any) -> int:
    print(f"Running as process {job.job_id}; its output: {job.paths.stdout}")
    error = job.exception()
    print(job.stdout() or "", end="")
    print(job.stderr() or "", end="", file=sys.stderr)
    if error is not None:
        raise UserError(f"The job failed; its output: {job.paths.stderr}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 submitted, 1 failed, 2 for a wrong request."""
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    own, arguments = argv[:split], argv[split + 1 :]
    try:
        description = (
            "Submit a training run to a SLURM cluster.\n\n"
            f"  {PROGRAM} --nodes 16 --gpus-per-node 4 -- craftax --num-envs 204800\n\n"
            "What stands after -- is a command line of pqn_eqx.train."
        )
        config = tyro.cli(SubmitConfig, prog=PROGRAM, description=description, args=own)
        if split == len(argv):
            raise ConfigError(f"Say what to train after --: {PROGRAM} {' '.join(own)} -- PRESET [flags].")
        # A wrong command line is told here, not by the job an hour later.
        training = parse(arguments)
        return submit(config, arguments, training.run_dir or default_run_directory(training.name))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    sys.exit(main())
