"""What docs/clusters.md tells schedulers to start is a command of jrec, and its numbers agree."""

import argparse
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from jrec.commands import train

CLUSTERS = pathlib.Path(__file__).parent.parent / "examples" / "clusters"
JOBSET = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
SLURM = (CLUSTERS / "slurm.sh").read_text()


def options_of(words):
    """The parsed arguments of a ``jrec train`` command."""
    assert words[:2] == ["jrec", "train"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    train.add_arguments(parser)
    return parser.parse_args(words[2:])


def test_pods_are_the_processes_that_the_command_names():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    assert job["replicas"] == 1
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (line,) = container["args"]
    command = line.removeprefix("exec ").replace('"$JOB_COMPLETION_INDEX"', "1")
    options = options_of(shlex.split(command))
    assert options.resume
    assert options.processes == spec["parallelism"] == spec["completions"]
    assert options.process == 1
    assert spec["completionMode"] == "Indexed"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"mesh.devices={gpus * options.processes}" in command.split()


def test_the_coordinator_is_the_first_pod():
    name = JOBSET["metadata"]["name"]
    (job,) = JOBSET["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "JAX_COORDINATOR_ADDRESS"
    assert variable["value"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"


def test_the_batch_script_starts_jrec_and_requeues_what_can_go_on():
    subprocess.run(["bash", "-n", CLUSTERS / "slurm.sh"], check=True)
    (call,) = re.findall(r"^srun [^\n]*\n(?:  [^\n]*\n)+", SLURM, re.MULTILINE)
    words = shlex.split(call.replace("\\\n", " ").replace('"$SLURM_NTASKS"', "8").split("||")[0])
    options = options_of(words[words.index("jrec") :])
    assert options.resume
    assert options.distributed


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, True), (130, True)])
def test_the_batch_script_requeues_by_exit_code(code, requeued, tmp_path):
    for name, body in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/asked')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
    done = subprocess.run(["bash", CLUSTERS / "slurm.sh"], env=environment, check=False)
    assert done.returncode == code
    asked = tmp_path / "asked"
    assert asked.is_file() == requeued
    if requeued:
        assert asked.read_text() == "requeue 77\n"
